"""An invite: one line that gets nodes into a run. ``atoll2:`` and base58 of a packed record.

It holds the seed of an invite key, the capability that the organiser signed over that key's public
half, and addresses to start from. It is passed from hand to hand and never sent to a node:
`Invite.certify` makes a certificate for one peer from it, and only that travels (`capability`). A
member that came by an invite for many can hand on the same seed and capability with addresses of
its own (`reissue`), so the organiser may be away. An invite for one peer holds no secret: its seed
follows from the capability, which lets in nobody but that peer.

Whoever reads an invite can enter by it, so neither ``str`` nor ``repr`` of one shows the line:
`Invite.encode` does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import struct
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from ...collectives.errors import NotAdmittedError, VersionMismatchError
from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import (
    SIGNATURE_BYTES,
    Identity,
    decode_base58,
    encode_base58,
    peer_id_of,
    public_key_of,
)
from .capability import (
    CLOCK_TOLERANCE_S,
    KEY_BYTES,
    MOST_NAME,
    MOST_USES,
    ROLES,
    RUN_BYTES,
    SITE_NAME,
    Capability,
    Certificate,
    Role,
    certify,
    check_expiry,
    grant,
    run_key,
    span,
)

PREFIX = "atoll2:"
EARLIER_PREFIX = "atoll1:"
MAX_INVITE_CHARS = 4096
MAX_ADDRESSES = 16
DEFAULT_LIFE_S = 7 * 86_400
MAX_LIFE_S = 100 * 365 * 86_400
SECRET_BYTES = 16
CHECK_BYTES = 4
KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
"""Of addresses that are packed: whose and which kind, the peer's key if need be, port, host;
through a relay, the relay's address in the place of port and host. Any other is kept as text."""
_LENGTHS = {0: 4, 1: 16}
_TEXT, _THROUGH = len(KINDS), len(KINDS) + 1
_NO_PEER, _ORGANISER, _PEER = range(3)
_ALONE, _NAMED = 1, 2  # bits: for one peer, for a name
_LONG = 255
CIRCUIT = "/p2p-circuit"


class Invite(msgspec.Struct, frozen=True):
    """A decoded invite. `parse_invite` gives genuine, unexpired ones only. ``secret``: the seed of
    its invite key; of an invite for one peer anybody can tell it."""

    secret: bytes
    capability: Capability
    bootstrap: tuple[str, ...]

    @property
    def run_id(self) -> RunId:
        return self.capability.run_id

    @property
    def organiser(self) -> PeerId:
        """Whose run it is: the manifest must be signed by this peer."""
        return self.capability.organiser

    @property
    def expires_s(self) -> int:
        """Seconds since 1970, UTC."""
        return self.capability.expires_s

    def certify(self, identity: Identity, now_s: float) -> Certificate:
        """What lets ``identity`` into the run, and nobody else. Raises NotAdmittedError E201 where
        the invite is not for it, or has expired.
        """
        return certify(self.capability, _invite_key(self.secret), identity.peer, now_s=now_s)

    def encode(self) -> str:
        """The line itself: whoever reads it can enter."""
        capability = self.capability
        body = _HEAD.pack(
            capability.run,
            capability.organiser_key,
            capability.issued_s,
            capability.expires_s - capability.issued_s,
            capability.role_index,
            capability.uses,
            bool(capability.only) | _NAMED * bool(capability.name),
            capability.signature,
        )
        body += capability.only or self.secret
        if name := capability.name.encode():
            body += _pack_length(len(name)) + name
        for each in self.bootstrap:
            packed = _pack_address(each, capability.organiser_key)
            body += _pack_length(len(packed)) + packed
        return PREFIX + encode_base58(body + _checksum(body))

    def __str__(self) -> str:
        return f"invite to run {self.run_id} by {self.organiser[-8:]}"

    def __repr__(self) -> str:
        return f"<{self}>"


_HEAD = struct.Struct(f">{RUN_BYTES}s{KEY_BYTES}sIIBHB{SIGNATURE_BYTES}s")
"""Run, organiser's key, when issued, life, role, uses, whether it is for one peer and whether for a
name, signature. Then comes the secret, or the key of the only peer; then the name. The public half
of the invite key follows from the secret, and the organiser's key stands there once."""


def make_invite(
    run_id: RunId,
    bootstrap: Sequence[str],
    identity: Identity,
    *,
    now_s: float,
    life_s: float = DEFAULT_LIFE_S,
    peer: str = "",
    role: Role = "train",
    uses: int = 0,
    name: str = "",
) -> Invite:
    """A fresh invite by the organiser, whose key ``identity`` is, valid for ``life_s`` seconds.

    ``peer``: the only one it is for, if any. ``uses``: how many peers may enter by it, 0 for any
    number. ``name``: the site that it lets in, in a run with noise.
    """
    life_s = min(life_s, MAX_LIFE_S)
    if peer:
        issued_s, expires_s = int(now_s), int(now_s + life_s)
        secret = _open_secret(
            run_key(run_id),
            public_key_of(identity.peer),
            public_key_of(PeerId(peer)),
            issued_s,
            expires_s,
            ROLES.index(role),
            uses,
        )
    else:
        secret = os.urandom(SECRET_BYTES)
    capability = grant(
        run_id,
        _invite_key(secret).peer,
        identity,
        now_s=now_s,
        life_s=life_s,
        peer=peer,
        role=role,
        uses=uses,
        name=name,
    )
    return Invite(secret, capability, tuple(bootstrap[:MAX_ADDRESSES]))


def reissue(invite: Invite, bootstrap: Sequence[str]) -> Invite:
    """A member's invite: the same capability and expiry, other addresses to start from."""
    return msgspec.structs.replace(invite, bootstrap=tuple(bootstrap[:MAX_ADDRESSES]))


def is_invite(text: str) -> bool:
    """Whether it looks like one, of this version or of an earlier one."""
    return text.strip().lower().startswith((PREFIX, EARLIER_PREFIX))


def inspect_invite(text: str) -> Invite:
    """Decode an invite and check its signature, but not its expiry.

    Raises NotAdmittedError E201, or E202 for a signature; VersionMismatchError E140 for an invite
    of an earlier version.
    """
    compact = re.sub(r"\s+", "", text)
    if compact[: len(EARLIER_PREFIX)].lower() == EARLIER_PREFIX:
        raise VersionMismatchError(
            "this invite was made by an earlier version of atoll",
            why="Invites of that version admitted whoever saw them, so they open nothing any more.",
            hint="Ask the organiser for a new one, made by this version: atoll invite new",
        )
    if compact[: len(PREFIX)].lower() != PREFIX or len(compact) > MAX_INVITE_CHARS:
        raise NotAdmittedError(
            f"{_short(compact)!r} is not an invite",
            why=f"An invite is one line that starts with {PREFIX}",
            hint="Copy the whole line that `atoll invite new` printed.",
        )
    unreadable = NotAdmittedError(
        f"this invite cannot be read ({len(compact)} characters)",
        why="Part of it is missing or a character is wrong.",
        hint="Copy the whole line again; it ends without spaces.",
    )
    try:
        data = decode_base58(compact[len(PREFIX) :], most=MAX_INVITE_CHARS)
        body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
        if check != _checksum(body):
            raise unreadable
        invite = _unpack(body)
    except (struct.error, ValueError):
        raise unreadable from None
    capability = invite.capability
    if not capability.genuine():
        raise NotAdmittedError(
            f"this invite to run {capability.run_id} is not signed by the organiser it names",
            peer=capability.organiser,
            code="E202",
            why="Somebody put other contents under the signature.",
            hint="Ask for a new invite.",
        )
    return invite


def parse_invite(text: str, *, now_s: float) -> Invite:
    """A genuine, unexpired invite.

    Raises NotAdmittedError (E201, E202; E120 when our clock is behind the invite's),
    VersionMismatchError E140.
    """
    invite = inspect_invite(text)
    check_expiry(invite.capability, invite.expires_s, now_s)
    if now_s < invite.capability.issued_s - CLOCK_TOLERANCE_S:
        raise NotAdmittedError(
            (
                f"this machine's clock is {span(invite.capability.issued_s - now_s)} behind: the "
                "invite was made after now"
            ),
            code="E120",
            why="Signed records carry the time; with a wrong clock the others refuse ours.",
            hint="sudo timedatectl set-ntp true",
            exit_code=75,
        )
    return invite


def _unpack(body: bytes) -> Invite:
    """What `Invite.encode` packed. Raises ValueError, struct.error."""
    run, organiser, issued_s, life_s, role, uses, kind, signature = _HEAD.unpack_from(body)
    alone = kind & _ALONE
    if role >= len(ROLES) or uses > MOST_USES or kind > _ALONE | _NAMED:
        raise ValueError("no such role or uses")
    at = _HEAD.size + (KEY_BYTES if alone else SECRET_BYTES)
    only = body[_HEAD.size : at] if alone else b""
    expires_s = issued_s + life_s
    secret = (
        _open_secret(run, organiser, only, issued_s, expires_s, role, uses)
        if alone
        else body[_HEAD.size : at]
    )
    if at > len(body):
        raise ValueError("it is cut off")
    name = ""
    if kind & _NAMED:
        length, at = _unpack_length(body, at)
        name, at = body[at : at + length].decode(), at + length
        if re.search(SITE_NAME, name) is None or not 0 < len(name) <= MOST_NAME:
            raise ValueError("no name of a site")
    bootstrap = list[str]()
    while at < len(body):
        length, at = _unpack_length(body, at)
        at += length
        if at > len(body) or len(bootstrap) == MAX_ADDRESSES:
            raise ValueError("an address is cut off, or there are too many")
        address = _unpack_address(body[at - length : at], organiser)
        if re.search(PLAIN, address) is None:
            raise ValueError("an address has characters that no address has")
        bootstrap.append(address)
    bearer = public_key_of(_invite_key(secret).peer)
    capability = Capability(
        run, bearer, issued_s, expires_s, organiser, role, uses, only, signature, name
    )
    return Invite(secret, capability, tuple(bootstrap))


def _open_secret(
    run: bytes, organiser: bytes, only: bytes, issued_s: int, expires_s: int, role: int, uses: int
) -> bytes:
    """The secret of an invite for one peer, which everybody can tell from what the capability says:
    it is worth nothing to others, since members let in nobody but that peer by it. So the line does
    without one."""
    terms = struct.pack(">QQBH", issued_s, expires_s, role, uses)
    return blake3(b"atoll/invite/2/for" + run + organiser + only + terms).digest(SECRET_BYTES)


def _invite_key(secret: bytes) -> Identity:
    return Identity(blake3(b"atoll/invite/2" + secret).digest(32))


def _checksum(body: bytes) -> bytes:
    return blake3(body).digest(CHECK_BYTES)


def _pack_length(length: int) -> bytes:
    return bytes([length]) if length < _LONG else bytes([_LONG]) + length.to_bytes(2, "big")


def _unpack_length(body: bytes, at: int) -> tuple[int, int]:
    """A length, and where what it is of begins."""
    if body[at] < _LONG:
        return body[at], at + 1
    return int.from_bytes(body[at + 1 : at + 3], "big"), at + 3


def _pack_address(address: str, organiser: bytes) -> bytes:
    """``/ip4/H/tcp/P/p2p/PEER``, the same with ip6 or a name or without a peer, and a circuit of
    such, in few bytes; of others their last peer. Any text is given back as it was."""
    where, separator, name = address.rpartition("/p2p/")
    try:
        key = public_key_of(PeerId(name)) if separator else b""
        if separator and peer_id_of(key) != name:
            raise ValueError("not as it is written")
    except ValueError:
        where, key = address, b""
    if not key or not where:
        where, key = address, b""
    who = _ORGANISER if key == organiser else _PEER if key else _NO_PEER
    peer = key if who == _PEER else b""
    relay = where.removesuffix(CIRCUIT)
    if relay and relay != where and CIRCUIT not in relay:
        return _form(who, _THROUGH) + peer + _pack_address(relay, organiser)
    found = re.fullmatch(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([1-9][0-9]{0,4})", where)
    if found is not None and int(found[3]) < 1 << 16:
        kind, host = KINDS.index(found[1]), found[2].encode()
        form, port = _form(who, kind), int(found[3]).to_bytes(2, "big")
        if kind in _LENGTHS:
            with contextlib.suppress(ValueError):
                parsed = ipaddress.ip_address(found[2])
                if str(parsed) == found[2] and len(parsed.packed) == _LENGTHS[kind]:
                    return form + peer + port + parsed.packed
        else:
            return form + peer + port + host
    return _form(who, _TEXT) + peer + where.encode()


def _form(who: int, kind: int) -> bytes:
    return bytes([who << 4 | kind])


def _unpack_address(data: bytes, organiser: bytes, *, of_relay: bool = False) -> str:
    """The address as text. Raises ValueError."""
    if not data:
        raise ValueError("no address")
    who, kind, rest = data[0] >> 4, data[0] & 15, data[1:]
    peer = ""
    if who == _ORGANISER:
        peer = f"/p2p/{peer_id_of(organiser)}"
    elif who == _PEER and len(rest) > KEY_BYTES:
        peer, rest = f"/p2p/{peer_id_of(rest[:KEY_BYTES])}", rest[KEY_BYTES:]
    elif who != _NO_PEER:
        raise ValueError("no address")
    if kind == _THROUGH and not of_relay:
        return _unpack_address(rest, organiser, of_relay=True) + CIRCUIT + peer
    if kind == _TEXT and rest:
        return rest.decode() + peer
    port, host = int.from_bytes(rest[:2], "big"), rest[2:]
    if not kind < _TEXT or not host or len(host) != _LENGTHS.get(kind, len(host)):
        raise ValueError("no address")
    name = str(ipaddress.ip_address(host)) if kind in _LENGTHS else host.decode()
    return f"/{KINDS[kind]}/{name}/tcp/{port}{peer}"


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:20] + "…"
