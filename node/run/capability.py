"""Who may enter a run: capabilities that the organiser signs, and certificates that bind one to a
peer.

A *capability* is the organiser's signed word that whoever holds a certain private key, the *invite
key*, may name peers that enter its run. A *certificate* is a capability and one peer id, signed by
that invite key. Only certificates travel. One is worth nothing to any other peer, since every
channel proves the peer id at its other end; and who sees it learns no key with which to make
another. What each attacker gets by what it holds: docs/internals/protocol/admission.md.

Inside, keys and run ids are bytes: a certificate is shown in every announcement, so it has to be
small (about 270 bytes).
"""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Annotated, Literal, get_args

import msgspec
from blake3 import blake3

from ...collectives.errors import NotAdmittedError
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import SIGNATURE_BYTES, Identity, peer_id_of, public_key_of, verify

CAPABILITY_DOMAIN = "atoll/capability/1"
CERTIFICATE_DOMAIN = "atoll/certificate/1"
MAX_CERTIFICATE_BYTES = 512
MOST_USES = 1000
MOST_NAME = 32
SITE_NAME = r"^[a-z0-9][a-z0-9._-]*\Z|^\Z"
CLOCK_TOLERANCE_S = 120
RUN_BYTES, RUN_CHARS = 17, 26
"""A run id has 26 letters of base32, which are 130 bits."""
KEY_BYTES = 32
ID_BYTES = 16

Role = Literal["train", "observe", "aggregate"]
"""What a member may do. ``train``: everything. ``aggregate``: vote, and add up parts; it
contributes nothing. ``observe``: have the model; it is no member, has no vote and owns no part."""
ROLES: tuple[Role, ...] = get_args(Role)

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
RunKey = Annotated[bytes, msgspec.Meta(min_length=RUN_BYTES, max_length=RUN_BYTES)]
Time = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
CapabilityId = bytes
"""The first 16 bytes of the hash of what the organiser signed."""


class Capability(msgspec.Struct, frozen=True, array_like=True):
    """The organiser's word that the holder of an invite key may let peers into a run until
    ``expires_s``.

    ``bearer``: the public half of the invite key. Times are seconds since 1970, UTC. ``uses``: how
    many peers it lets in, 0 for any number. ``only``: the public key of the one peer it is for,
    empty for any. ``name``: what the site is called whose key it lets in, in a run with noise; else
    empty, and then not in the bytes.
    """

    run: RunKey
    bearer: Key
    issued_s: Time
    expires_s: Time
    organiser_key: Key
    role_index: Annotated[int, msgspec.Meta(ge=0, lt=len(ROLES))]
    uses: Annotated[int, msgspec.Meta(ge=0, le=MOST_USES)]
    only: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
    signature: Signature
    name: Annotated[str, msgspec.Meta(max_length=MOST_NAME, pattern=SITE_NAME)] = ""

    def signed_bytes(self) -> bytes:
        """What the organiser signed."""
        *fields, _, name = msgspec.structs.astuple(self)
        return msgspec.msgpack.encode((*fields, name) if name else fields)

    def packed(self) -> tuple[object, ...]:
        """As a certificate holds it."""
        fields = msgspec.structs.astuple(self)
        return fields if self.name else fields[:-1]

    @property
    def id(self) -> CapabilityId:
        """By which it is counted, shown and revoked."""
        return blake3(self.signed_bytes()).digest(ID_BYTES)

    @property
    def run_id(self) -> RunId:
        return _run_id(self.run)

    @property
    def organiser(self) -> PeerId:
        """Whose run it is: the manifest must be signed by this peer."""
        return _peer_id(self.organiser_key)

    @property
    def peer(self) -> PeerId | None:
        """The only peer it is for, if it is for one."""
        return _peer_id(self.only) if self.only else None

    @property
    def role(self) -> Role:
        """What it admits to."""
        return ROLES[self.role_index]

    @property
    def reissuable(self) -> bool:
        """Whether members who came by it may invite others with it."""
        return not self.only and self.uses != 1 and not self.name

    def genuine(self) -> bool:
        """Whether the organiser it names has signed it."""
        return len(self.only) in (0, KEY_BYTES) and verify(
            self.organiser, CAPABILITY_DOMAIN, self.signed_bytes(), self.signature
        )


class Certificate(msgspec.Struct, frozen=True, array_like=True):
    """A capability and the peer its invite key's holder lets in, until ``not_after_s``."""

    capability: Capability
    peer_key: Key
    not_after_s: Time
    signature: Signature

    def signed_bytes(self) -> bytes:
        """What the invite key signed."""
        return msgspec.msgpack.encode((self.capability.packed(), self.peer_key, self.not_after_s))

    @property
    def peer(self) -> PeerId:
        """Whom it lets in; to anybody else it is worth nothing."""
        return _peer_id(self.peer_key)

    @property
    def expires_s(self) -> int:
        """When it stops letting its peer in, in seconds since 1970, UTC."""
        return min(self.not_after_s, self.capability.expires_s)

    def encode(self) -> bytes:
        """What its peer shows to members."""
        fields = (self.capability.packed(), self.peer_key, self.not_after_s, self.signature)
        return msgspec.msgpack.encode(fields)


_decoder = msgspec.msgpack.Decoder(Certificate)


def grant(
    run_id: RunId,
    bearer: PeerId,
    organiser: Identity,
    *,
    now_s: float,
    life_s: float,
    peer: str = "",
    role: Role = "train",
    uses: int = 0,
    name: str = "",
) -> Capability:
    """A capability by the organiser for the holder of the invite key whose peer id is ``bearer``.

    Raises ValueError for a run id or a peer that is none.
    """
    capability = Capability(
        run_key(run_id),
        public_key_of(bearer),
        int(now_s),
        int(now_s + life_s),
        public_key_of(organiser.peer),
        ROLES.index(role),
        uses,
        public_key_of(PeerId(peer)) if peer else b"",
        bytes(SIGNATURE_BYTES),
        name,
    )
    return msgspec.structs.replace(
        capability, signature=organiser.sign(CAPABILITY_DOMAIN, capability.signed_bytes())
    )


def certify(
    capability: Capability, invite_key: Identity, peer: PeerId, *, now_s: float
) -> Certificate:
    """The certificate of ``peer``, good for as long as its capability.

    Raises NotAdmittedError E201 where the capability is for another peer, or has expired.
    """
    check_expiry(capability, capability.expires_s, now_s)
    check_bearer(capability, peer)
    certificate = Certificate(
        capability, public_key_of(peer), capability.expires_s, bytes(SIGNATURE_BYTES)
    )
    return msgspec.structs.replace(
        certificate, signature=invite_key.sign(CERTIFICATE_DOMAIN, certificate.signed_bytes())
    )


def genuine(data: bytes) -> Certificate | None:
    """The certificate in ``data``, where both its signatures are right; it may have expired."""
    return _genuine(data) if 0 < len(data) <= MAX_CERTIFICATE_BYTES else None


@lru_cache(maxsize=4096)
def invite_of(data: bytes) -> CapabilityId:
    """The id of the capability that the certificate in ``data`` was made by; empty where it is no
    certificate.
    """
    found = genuine(data)
    return found.capability.id if found is not None else b""


@lru_cache(maxsize=4096)
def _genuine(data: bytes) -> Certificate | None:
    """Remembered, since the same certificates are shown with every announcement and two signatures
    cost 0.2 ms.
    """
    try:
        certificate = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not certificate.capability.genuine() or not verify(
        _peer_id(certificate.capability.bearer),
        CERTIFICATE_DOMAIN,
        certificate.signed_bytes(),
        certificate.signature,
    ):
        return None
    return certificate


def recognise(data: bytes, *, run_id: RunId, organiser: PeerId, peer: PeerId) -> Certificate | None:
    """The certificate that ``peer`` shows, also when it has expired; None where it is none of this
    organiser's for it.
    """
    certificate = genuine(data)
    if certificate is None or certificate.peer != peer:
        return None
    capability = certificate.capability
    if (capability.run_id, capability.organiser) != (run_id, organiser):
        return None
    return certificate if capability.peer in (None, peer) else None


def check_certificate(
    data: bytes, *, run_id: RunId, organiser: PeerId, peer: PeerId, now_s: float
) -> Certificate:
    """The certificate that ``peer``, a newcomer, shows.

    Raises NotAdmittedError E201 when it does not open this run now to this peer.
    """
    if not data:
        raise NotAdmittedError(
            f"no certificate for run {run_id} was shown",
            why="The run asks for an invite.",
            hint="Ask a member for one.",
        )
    certificate = recognise(data, run_id=run_id, organiser=organiser, peer=peer)
    if certificate is None:
        raise NotAdmittedError(
            f"the certificate that was shown does not open run {run_id} to {peer[-8:]}",
            why="It is for another run or another peer, or its organiser did not sign it.",
            hint="Ask a member for an invite to this run.",
        )
    check_expiry(certificate.capability, certificate.expires_s, now_s)
    return certificate


def check_bearer(capability: Capability, peer: PeerId) -> None:
    """Raise NotAdmittedError E201 where the capability is for another peer than this one."""
    if capability.peer not in (None, peer):
        raise NotAdmittedError(
            f"this invite to run {capability.run_id} is for {str(capability.peer)[-8:]} only",
            why="The organiser has made it for one peer, who cannot pass it on.",
            hint="Ask the organiser for one of your own; it needs your peer id: atoll id",
        )


def check_expiry(capability: Capability, expires_s: int, now_s: float) -> None:
    """Raise NotAdmittedError E201 once it has expired."""
    if now_s > expires_s:
        raise NotAdmittedError(
            f"this invite to run {capability.run_id} expired {span(now_s - expires_s)} ago",
            why="Invites end by themselves, so that a leaked one does not stay open.",
            hint=(
                "Ask any member for a new one (atoll invite new); the organiser's are "
                "fresh. Is your clock right?"
            ),
        )


def run_key(run_id: RunId) -> bytes:
    """A run id in 17 bytes. Raises ValueError for what is none."""
    if len(run_id) != RUN_CHARS or run_id != run_id.lower():
        raise ValueError(f"not a run id: {run_id!r}")
    key = base64.b32decode(run_id.upper() + "A" * 6)[:RUN_BYTES]
    if _run_id(key) != run_id:
        raise ValueError(f"not a run id: {run_id!r}")
    return key


def capability_name(found: CapabilityId) -> str:
    """How a capability is shown and named to be revoked: 26 letters."""
    return base64.b32encode(found).decode().rstrip("=").lower()


def capability_id(name: str) -> CapabilityId | None:
    """The id that `capability_name` shows as ``name``; None where it is no such name."""
    try:
        found = base64.b32decode(name.upper() + "=" * (-len(name) % 8))
    except ValueError:
        return None
    return found if len(found) == ID_BYTES and capability_name(found) == name.lower() else None


def span(seconds: float) -> str:
    """A duration in words."""
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} seconds"


@lru_cache(maxsize=1024)
def _run_id(key: bytes) -> RunId:
    return RunId(base64.b32encode(key + bytes(3)).decode()[:RUN_CHARS].lower())


@lru_cache(maxsize=4096)
def _peer_id(key: bytes) -> PeerId:
    return peer_id_of(key)
