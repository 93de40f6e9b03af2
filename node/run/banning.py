"""Whom a run, or this machine alone, will have nothing to do with.

The organiser's list counts for every member: it is signed, the newest one wins, and whoever has it
hands it on. (Where the manifest has ``[quorum] bans = "quorum"`` it counts against members at the
organiser's own node only: `Bans.spared`.) A machine's own list counts for that machine. A banned
peer is admitted to nothing: its streams and lanes end, its messages are dropped, it counts as
silent, so that the next entry evicts it, and it is refused with E205 and the reason. What it had
contributed to decided rounds stays in them, as does its vote: a ban looks forward. A ban with
evidence proves itself: each machine that sees the proof checks it, and bans for itself. Where the
banned are half of the members or more nothing can be decided: see ``atoll recertify``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from ...collectives.errors import ConfigError, NotAdmittedError, RemoteProtocolError, StorageError
from ...collectives.foreign import PLAIN, quoted
from ...collectives.group import MAX_PEER_ID
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import Identity, verify
from ..home.paths import make_private, write_atomic
from ..home.refusals import storage_error
from .proof import MAX_EVIDENCE

DOMAIN = "atoll/bans/1"
MAX_BANS, MAX_REASON = 1024, 200
MAX_LIST_BYTES = 1 << 19
RUN_FILE, HERE_FILE = "bans", "bans-here"
Time = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


Peer = Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_BANS)]


class Ban(msgspec.Struct, frozen=True, array_like=True):
    """Whom, why, and since when (seconds since 1970, UTC). ``evidence``: the proof, where there is
    one (`evidence`).
    """

    peer: Peer
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    since_s: Time
    evidence: Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)] = b""


class BanList(msgspec.Struct, frozen=True, array_like=True):
    """All bans of a run, the nonces of invites that admit nobody any more, and whom the organiser
    trusts: the list with the larger ``sequence`` takes the other's place."""

    run: Annotated[RunId, msgspec.Meta(max_length=64, pattern=PLAIN)]
    sequence: Time
    bans: Annotated[tuple[Ban, ...], msgspec.Meta(max_length=MAX_BANS)]
    revoked: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=16)], ...], msgspec.Meta(max_length=MAX_BANS)
    ] = ()
    trusted: Peers = ()


class Here(msgspec.Struct, frozen=True, array_like=True):
    """One machine's own. ``pardoned``: whom its user has let in again in spite of a proof."""

    bans: Annotated[tuple[Ban, ...], msgspec.Meta(max_length=MAX_BANS)] = ()
    trusted: Peers = ()
    pardoned: Peers = ()


class SignedBans(msgspec.Struct, frozen=True, array_like=True):
    """An encoded BanList with the organiser's signature."""

    list: Annotated[bytes, msgspec.Meta(max_length=MAX_LIST_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


_signed = msgspec.msgpack.Decoder(SignedBans)
_list = msgspec.msgpack.Decoder(BanList)
_here = msgspec.msgpack.Decoder(Here)


class Bans:
    """Both lists of one run, as they are in its folder. Nothing is read before `load`."""

    def __init__(self, folder: Path, run: RunId, organiser: PeerId) -> None:
        self._folder, self._run, self._organiser = folder, run, organiser
        self._signed = b""
        self._sequence = -1
        self.of_run: Mapping[PeerId, Ban] = {}
        self.here: Mapping[PeerId, Ban] = {}
        self.revoked: frozenset[bytes] = frozenset()
        self.trusted_by_run: frozenset[PeerId] = frozenset()
        self.trusted_here: frozenset[PeerId] = frozenset()
        self.pardoned: frozenset[PeerId] = frozenset()
        self.spared: Callable[[], Collection[PeerId]] = frozenset[PeerId]
        """Peers against whom the organiser's list does not count here, though it names them."""

    @property
    def peers(self) -> set[PeerId]:
        return {*self.here, *(self.of_run.keys() - set(self.spared()) if self.of_run else ())}

    @property
    def trusted(self) -> set[PeerId]:
        """Who is let in without probation, however many have come."""
        return {*self.trusted_by_run, *self.trusted_here}

    @property
    def encoded(self) -> bytes:
        """The organiser's list as it is handed on; empty where there is none."""
        return self._signed

    def why(self, peer: PeerId) -> str | None:
        """Why ``peer`` is banned, in words; None: it is not."""
        by_run = self._by_run(peer)
        ban = by_run or self.here.get(peer)
        if ban is None:
            return None
        whose = (
            "the run's organiser has banned this peer"
            if by_run is not None
            else "this member has banned this peer"
        )
        return f"{whose}: {quoted(ban.reason)}" if ban.reason else whose

    def _by_run(self, peer: PeerId) -> Ban | None:
        ban = self.of_run.get(peer)
        return None if ban is None or peer in self.spared() else ban

    def refuse(self, peer: PeerId) -> None:
        """Raise NotAdmittedError E205 for a peer that is banned."""
        if (why := self.why(peer)) is not None:
            raise banned(why, peer)

    def check_invite(self, nonce: bytes) -> None:
        """Raise NotAdmittedError for an invite that was revoked."""
        if nonce in self.revoked:
            raise NotAdmittedError(
                "this invite was revoked by the run's organiser",
                hint="Ask the organiser for a new one.",
            )

    def load(self) -> None:
        """Read both lists anew. Raises StorageError E303 for one that is damaged, which then counts
        as empty; the other is taken.
        """
        damage = [
            error
            for read in (self._load_run, self._load_here)
            if (error := _attempt(read)) is not None
        ]
        if damage:
            raise damage[0]

    def take(self, data: bytes, sender: PeerId) -> bool:
        """The organiser's list as ``sender`` has it; whether it is newer, and was kept. Raises
        RemoteProtocolError, StorageError.
        """
        try:
            signed = _signed.decode(data) if len(data) <= MAX_LIST_BYTES + 128 else None
            found = None if signed is None else _list.decode(signed.list)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(
                f"malformed list of bans: {quoted(error)}", peer=sender
            ) from None
        if signed is None or found is None:
            raise RemoteProtocolError(f"list of bans of {len(data)} bytes", peer=sender)
        if found.run == self._run and found.sequence <= self._sequence:  # the cheap test first
            return False
        if found.run != self._run or not verify(
            self._organiser, DOMAIN, signed.list, signed.signature
        ):
            raise RemoteProtocolError(
                "the list of bans is not signed by the run's organiser", peer=sender
            )
        write_atomic(self._folder / RUN_FILE, data)
        self._set(found, data)
        return True

    def change(self, ban: Ban | None, peer: PeerId, identity: Identity | None) -> bool:
        """Add a ban, or with None lift the one of ``peer``: for the run with its organiser's
        ``identity``, else on this machine. Whether anything changed. Raises StorageError,
        ConfigError where there are too many."""
        bans = {**(self.here if identity is None else self.of_run)}
        if ban is None and bans.pop(peer, None) is None:
            return False
        if ban is not None:
            bans[peer] = ban
        if identity is not None:
            self._sign(bans, self.revoked, self.trusted_by_run, identity)
            return True
        lifted = self.here[peer] if ban is None else None
        pardoned = (
            self.pardoned | {peer}
            if lifted is not None and lifted.evidence
            else self.pardoned - ({ban.peer} if ban else set())
        )
        self._keep_here(bans, self.trusted_here, pardoned)
        return True

    def convict(self, ban: Ban) -> bool:
        """Ban on this machine a peer that is proven to have lied; whether that is news. Whom the
        user trusts or has pardoned stays.
        """
        return self.can_convict(ban.peer) and self.change(ban, ban.peer, None)

    def can_convict(self, peer: PeerId) -> bool:
        """Whether a proof against ``peer`` would be news here, and count."""
        if peer in self.trusted or peer in self.pardoned or peer == self._organiser:
            return False
        return not any(
            known.evidence
            for known in (self._by_run(peer), self.here.get(peer))
            if known is not None
        )

    def trust(self, peer: PeerId, trusted: bool, identity: Identity | None) -> bool:
        """Trust a peer, or no longer: for the run with its organiser's ``identity``, else on this
        machine. Whether anything changed.
        """
        known = self.trusted_here if identity is None else self.trusted_by_run
        if (peer in known) == trusted:
            return False
        changed = known | {peer} if trusted else known - {peer}
        if len(changed) > MAX_BANS:
            raise ConfigError(
                f"{len(changed)} peers are trusted, at most {MAX_BANS} can be",
                hint="atoll trust PEER --no-longer",
            )
        if identity is not None:
            self._sign(self.of_run, self.revoked, changed, identity)
        else:
            self._keep_here(self.here, changed, self.pardoned)
        return True

    def _keep_here(
        self, bans: Mapping[PeerId, Ban], trusted: frozenset[PeerId], pardoned: frozenset[PeerId]
    ) -> None:
        kept = Here(_bounded(bans), tuple(sorted(trusted)), tuple(sorted(pardoned)[:MAX_BANS]))
        make_private(self._folder)
        write_atomic(self._folder / HERE_FILE, msgspec.msgpack.encode(kept))
        self.here, self.trusted_here, self.pardoned = {**bans}, trusted, pardoned

    def revoke(self, nonce: bytes, identity: Identity) -> None:
        """The organiser's invite with this nonce, and all that members have made of it, admit
        nobody any more. Raises StorageError.
        """
        self._sign(self.of_run, self.revoked | {nonce}, self.trusted_by_run, identity)

    def _sign(
        self,
        bans: Mapping[PeerId, Ban],
        revoked: frozenset[bytes],
        trusted: frozenset[PeerId],
        identity: Identity,
    ) -> None:
        listed = _bounded(bans)
        if len(revoked) > MAX_BANS:
            raise ConfigError(
                f"{len(revoked)} invites are revoked, at most {MAX_BANS} can be",
                hint="Old ones end by themselves.",
            )
        sequence = max([self._sequence + 1, *(1000 * each.since_s for each in listed)])
        found = BanList(self._run, sequence, listed, tuple(sorted(revoked)), tuple(sorted(trusted)))
        data = msgspec.msgpack.encode(found)
        if len(data) > MAX_LIST_BYTES:
            raise ConfigError(
                f"the list of bans has {len(data)} bytes, at most {MAX_LIST_BYTES} can be",
                hint="Lift some: atoll unban PEER",
            )
        signed = msgspec.msgpack.encode(SignedBans(data, identity.sign(DOMAIN, data)))
        make_private(self._folder)
        write_atomic(self._folder / RUN_FILE, signed)
        self._set(found, signed)

    def _set(self, found: BanList, data: bytes) -> None:
        self._signed, self._sequence = data, found.sequence
        self.of_run, self.revoked = {ban.peer: ban for ban in found.bans}, frozenset(found.revoked)
        self.trusted_by_run = frozenset(found.trusted)

    def _load_run(self) -> None:
        data = _content(self._folder / RUN_FILE)
        if data is None:
            return
        try:
            signed = _signed.decode(data)
            found = _list.decode(signed.list)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _damaged(self._folder / RUN_FILE, str(error)) from None
        if found.run != self._run or not verify(
            self._organiser, DOMAIN, signed.list, signed.signature
        ):
            raise _damaged(self._folder / RUN_FILE, "the run's organiser did not sign it")
        self._set(found, data)

    def _load_here(self) -> None:
        data = _content(self._folder / HERE_FILE)
        try:
            found = Here() if data is None else _here.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _damaged(self._folder / HERE_FILE, str(error)) from None
        self.here = {ban.peer: ban for ban in found.bans}
        self.trusted_here, self.pardoned = frozenset(found.trusted), frozenset(found.pardoned)


def banned(why: str, peer: PeerId) -> NotAdmittedError:
    """The error that tells of a ban."""
    return NotAdmittedError(why, peer=peer, code="E205")


def _bounded(bans: Mapping[PeerId, Ban]) -> tuple[Ban, ...]:
    if len(bans) > MAX_BANS:
        raise ConfigError(
            f"{len(bans)} peers are banned, at most {MAX_BANS} can be",
            hint="Lift some: atoll bans, atoll unban PEER",
        )
    return tuple(bans[peer] for peer in sorted(bans))


def _attempt(read: Callable[[], None]) -> StorageError | None:
    try:
        read()
    except StorageError as error:
        return error
    return None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from None


def _damaged(path: Path, why: str) -> StorageError:
    return StorageError(
        f"{path} is damaged: {why}",
        code="E303",
        exit_code=74,
        why="The disk, or something else than atoll, changed it: nobody is banned by it.",
        hint=(
            "Remove it. The run's own list comes from the other members; one of this machine only "
            "has to be given again: atoll ban PEER"
        ),
    )
