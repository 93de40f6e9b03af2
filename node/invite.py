"""An invite: one string that gets a node into a run. ``atoll1:`` and base32 of a signed msgpack array.

It carries the run id, addresses to start from, an admission token signed by the organiser, and the signature of whoever issued the
string. Any member can issue one from her own (the token stays, the addresses are fresh), so the organiser may be away.
The token alone is what a newcomer shows to members: `Invite.token`, checked with `check_token`.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec

from ..collectives.errors import NotAdmittedError
from ..collectives.group import MAX_PEER_ID
from ..collectives.identifiers import PeerId, RunId

if TYPE_CHECKING:
    from ..security.identity import Identity

PREFIX = "atoll1:"
INVITE_FILE = "invite"
"""In a run's folder: what this node entered by, for invites of its own."""
MAX_INVITE_CHARS = 8192
MAX_TOKEN_BYTES = 1024
MOST_USES = 1000
DEFAULT_LIFE_S = 7 * 86_400
CLOCK_TOLERANCE_S = 120
TOKEN_DOMAIN = "atoll/admission/1"
INVITE_DOMAIN = "atoll/invite/1"

Peer = Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID)]
Run = Annotated[RunId, msgspec.Meta(pattern="^[a-z2-7]{26}$")]
Time = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=8, max_length=16)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
Role = Literal["train", "observe", "aggregate"]
"""What a member may do. ``train``: everything. ``aggregate``: vote, and add up parts; it contributes nothing. ``observe``: have the model; it is no
member, has no vote and owns no part."""
ROLES: tuple[Role, ...] = get_args(Role)
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class Token(msgspec.Struct, frozen=True, array_like=True):
    """The organiser's word that whoever shows this may enter the run until ``expires_s`` (seconds since 1970, UTC); with a ``peer`` that one only, with
    ``uses`` the first so many."""

    run_id: Run
    issued_s: Time
    expires_s: Time
    nonce: Nonce
    organiser: Peer
    signature: Signature
    peer: Annotated[str, msgspec.Meta(max_length=MAX_PEER_ID)] = ""
    role: Role = "train"
    uses: Annotated[int, msgspec.Meta(ge=0, le=MOST_USES)] = 0

    def signed_bytes(self) -> bytes:
        """What the organiser signed."""
        said = (self.run_id, self.issued_s, self.expires_s, self.nonce, self.organiser)
        if self.uses:
            return msgspec.msgpack.encode((*said, self.peer, self.role, self.uses))
        if self.role != "train":
            return msgspec.msgpack.encode((*said, self.peer, self.role))
        return msgspec.msgpack.encode(
            (*said, self.peer) if self.peer else said
        )  # as before there were ``peer``, ``role`` and ``uses``


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """A decoded invite. `parse_invite` gives verified ones only."""

    token: Token
    bootstrap: Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]
    issuer: Peer
    signature: Signature

    @property
    def run_id(self) -> RunId:
        """The run it opens."""
        return self.token.run_id

    @property
    def organiser(self) -> PeerId:
        """Whose run it is: the manifest must be signed by this peer."""
        return self.token.organiser

    @property
    def expires_s(self) -> int:
        """Seconds since 1970, UTC."""
        return self.token.expires_s

    def token_bytes(self) -> bytes:
        """What a newcomer shows to members (about 170 bytes)."""
        return msgspec.msgpack.encode(self.token)

    def signed_bytes(self) -> bytes:
        """What the issuer signed."""
        return msgspec.msgpack.encode((self.token, self.bootstrap, self.issuer))

    def __str__(self) -> str:
        return PREFIX + base64.b32encode(msgspec.msgpack.encode(self)).decode().rstrip("=").lower()


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
) -> Invite:
    """A fresh invite by the organiser, whose key ``identity`` is, valid for ``life_s`` seconds; with a ``peer`` for that one only, with ``uses`` for
    the first so many (0: for all)."""
    token = Token(
        run_id,
        int(now_s),
        int(now_s + life_s),
        os.urandom(8),
        identity.peer,
        bytes(64),
        peer,
        role,
        uses,
    )
    token = msgspec.structs.replace(
        token, signature=identity.sign(TOKEN_DOMAIN, token.signed_bytes())
    )
    return _issue(token, bootstrap, identity)


def reissue(invite: Invite, bootstrap: Sequence[str], identity: Identity) -> Invite:
    """A member's invite: the same admission and expiry, other addresses to start from."""
    return _issue(invite.token, bootstrap, identity)


def _issue(token: Token, bootstrap: Sequence[str], identity: Identity) -> Invite:
    invite = Invite(token, tuple(bootstrap[:16]), identity.peer, bytes(64))
    return msgspec.structs.replace(
        invite, signature=identity.sign(INVITE_DOMAIN, invite.signed_bytes())
    )


def inspect_invite(text: str) -> Invite:
    """Decode an invite and check its signatures, but not its expiry. Raises NotAdmittedError (E201, or E202 for a signature)."""
    compact = re.sub(r"\s+", "", text)
    if not compact.lower().startswith(PREFIX) or len(compact) > MAX_INVITE_CHARS:
        raise NotAdmittedError(
            f"{_short(compact)!r} is not an invite",
            why=f"An invite is one line that starts with {PREFIX}",
            hint="Copy the whole line that `atoll invite new` printed.",
        )
    body = compact[len(PREFIX) :].upper()
    try:
        data = base64.b32decode(body + "=" * (-len(body) % 8))
        invite = msgspec.msgpack.decode(data, type=Invite)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise NotAdmittedError(
            f"this invite cannot be read ({len(compact)} characters)",
            why="Part of it is missing or a character is wrong.",
            hint="Copy the whole line again; it ends without spaces.",
        ) from None
    from ..security.identity import verify

    if not verify(
        invite.issuer, INVITE_DOMAIN, invite.signed_bytes(), invite.signature
    ) or not _genuine(invite.token):
        raise NotAdmittedError(
            f"this invite to run {invite.run_id} was changed after it was signed",
            peer=invite.issuer,
            code="E202",
            why="A character is wrong, or somebody put other contents under the signature.",
            hint="Copy the line again, or ask for a new invite.",
        )
    return invite


def parse_invite(text: str, *, now_s: float) -> Invite:
    """A verified, unexpired invite. Raises NotAdmittedError (E201, E202; E120 when our clock is behind the invite's)."""
    invite = inspect_invite(text)
    _check_expiry(invite.token, now_s)
    if now_s < invite.token.issued_s - CLOCK_TOLERANCE_S:
        raise NotAdmittedError(
            f"this machine's clock is {_span(invite.token.issued_s - now_s)} behind: the invite was made after now",
            code="E120",
            why="Signed records carry the time; with a wrong clock the others refuse ours.",
            hint="sudo timedatectl set-ntp true",
            exit_code=75,
        )
    return invite


def check_bearer(token: Token, peer: PeerId) -> None:
    """Raise NotAdmittedError where the invite is for another peer than this one."""
    if token.peer not in ("", peer):
        raise NotAdmittedError(
            f"this invite to run {token.run_id} is for {token.peer[-8:]} only",
            why="The organiser has made it for one peer, who cannot pass it on.",
            hint="Ask the organiser for one of your own; it needs your peer id: atoll id",
        )


def check_token(
    data: bytes, *, run_id: RunId, organiser: PeerId, now_s: float, peer: PeerId
) -> Token:
    """The admission token that ``peer``, a newcomer, showed. Raises NotAdmittedError when it does not open this run now to this peer."""
    token = _token(data)
    if token is None:
        raise NotAdmittedError(
            f"no readable admission token for run {run_id}",
            why="The run asks for an invite.",
            hint="Ask a member for one.",
        )
    if token.run_id != run_id or token.organiser != organiser or not _genuine(token):
        raise NotAdmittedError(
            f"this invite does not open run {run_id}",
            why="It is for another run, or its organiser did not sign it.",
            hint="Ask a member for an invite to this run.",
        )
    _check_expiry(token, now_s)
    check_bearer(token, peer)
    return token


def genuine_token(data: bytes, *, run_id: RunId, organiser: PeerId, peer: PeerId) -> Token | None:
    """The token that ``peer`` shows, also when it has run out; None where it is none of this organiser's for it."""
    token = _token(data)
    if (
        token is None
        or (token.run_id, token.organiser) != (run_id, organiser)
        or token.peer not in ("", peer)
        or not _genuine(token)
    ):
        return None
    return token


def _token(data: bytes) -> Token | None:
    try:
        return msgspec.msgpack.decode(data, type=Token) if len(data) <= MAX_TOKEN_BYTES else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _genuine(token: Token) -> bool:
    from ..security.identity import verify

    return verify(token.organiser, TOKEN_DOMAIN, token.signed_bytes(), token.signature)


def _check_expiry(token: Token, now_s: float) -> None:
    if now_s > token.expires_s:
        raise NotAdmittedError(
            f"this invite to run {token.run_id} expired {_span(now_s - token.expires_s)} ago",
            why="Invites end by themselves, so that a leaked one does not stay open.",
            hint="Ask any member for a new one (atoll invite new); the organiser's are fresh. Is your clock right?",
        )


def _span(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} seconds"


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:20] + "…"
