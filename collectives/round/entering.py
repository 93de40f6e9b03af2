"""By what peers enter the configuration: whom limited invites have let in, as the log tells, and
the seam to what certificates say. Sans I/O.

An entry that lets in a peer which the configuration before does not name carries what that peer has
shown (`Admitted`). Every acceptor checks that before it votes or echoes, so a convener that lies
lets in nobody who does not belong.

**Guests.** Who comes by a limited invite is given nothing of the run before an entry counts it,
also where it never asks to be a member: such an entry carries what it has shown, and leaves it out
of the configuration. So all members count one and the same peers, whomever each has met.

**Tally.** Which peers an invite for so many has let in follows from the log alone: each entry adds
to it, and names the hash of what came of it. So it is the same at every member, over restarts and
transfers. It is bounded: `MOST_TALLIED` peers. When room is needed, an invite is forgotten that
expired `KEPT_S` before the newest invite in the log was made; the organiser signed both times, so
no clock of a member has a say in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

import msgspec
from blake3 import blake3

from ..group import MAX_STAR, Admitted
from ..identifiers import PeerId

MOST_TALLIED = 4096
KEPT_S = 86_400
SHARE_BY_ONE = 3, 4
"""Of a run's places, those of members by one invite: who holds its seed can name any number of
peers, and leaves places for those whom the organiser invites by another.
"""
PEER_BYTES = 8
MOST_GUESTS = 64  # in one entry


class Doors(Protocol):
    """What certificates say, by the run's manifest and the organiser's word."""

    def warrant(self, peer: PeerId) -> Admitted | None:
        """By what ``peer`` may enter, as far as it is known here; without a certificate where it
        needs none; None: it may not.
        """
        ...

    def valid(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> bool:
        """Whether all these peers, which the configuration before does not name, may enter by this,
        and whoever else is in ``admitted`` is a guest by a limited invite. The same at every node
        at any time.
        """
        ...

    def name(self, admitted: Admitted) -> str:
        """The name that a certificate gives its peer; "" for none. The same at every node."""
        ...

    def guest(self, peer: PeerId) -> Admitted | None:
        """By what ``peer`` may be counted now, a member or not; None where it need not be, or may
        not, as far as is known here.
        """
        ...

    def limited(self, peer: PeerId) -> bool:
        """Whether ``peer`` must be counted before it is given anything: its invite is for so many,
        or none is known here though it needs one.
        """
        ...

    def objection(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> str:
        """Why one of them may not enter now, as far as is known here (revoked, banned, expired); ""
        for no reason.
        """
        ...


class OpenDoors:
    """Doors of a log that needs no certificates."""

    def warrant(self, peer: PeerId) -> Admitted | None:
        """Nothing is needed."""
        return Admitted(peer, b"")

    def valid(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> bool:
        """Nothing is carried."""
        return not admitted

    def name(self, admitted: Admitted) -> str:
        """Nobody is named."""
        return ""

    def guest(self, peer: PeerId) -> Admitted | None:
        """Nobody is counted."""
        return None

    def limited(self, peer: PeerId) -> bool:
        """Nobody needs an invite."""
        return False

    def objection(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> str:
        """None."""
        return ""


OPEN: Doors = OpenDoors()


@dataclass(frozen=True)
class _Spent:
    """Of one invite: how many peers it lets in, when it ends, and whom it has let in."""

    uses: int
    expires_s: int
    peers: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class InviteTally:
    """Whom limited invites have let in. ``newest_s``: when the newest of them was made."""

    spent: Mapping[bytes, _Spent] = field(default_factory=lambda: MappingProxyType({}))
    newest_s: int = 0

    @cached_property
    def hash(self) -> bytes:
        """32 bytes; empty where nobody is counted."""
        return blake3(b"atoll/tally/1" + self.encode()).digest() if self.spent else b""

    def encode(self) -> bytes:
        """Canonical bytes: what a member hands on that keeps no old entries."""
        rows = [
            (invite, spent.uses, spent.expires_s, sorted(spent.peers))
            for invite, spent in sorted(self.spent.items())
        ]
        return msgspec.msgpack.encode((self.newest_s, rows))

    @property
    def size(self) -> int:
        """How many peers are counted."""
        return sum(len(spent.peers) for spent in self.spent.values())

    def bars(self, invite: bytes, peer: PeerId) -> bool:
        """Whether an invite has no use left for ``peer``: others have taken all of them."""
        spent = self.spent.get(invite)
        return (
            spent is not None and len(spent.peers) >= spent.uses and _short(peer) not in spent.peers
        )

    def counts(self, peer: PeerId) -> bool:
        """Whether ``peer`` is one of those whom any limited invite has let in."""
        return bool(self.spent) and _short(peer) in self._everybody

    @cached_property
    def _everybody(self) -> frozenset[bytes]:
        return frozenset[bytes]().union(*(spent.peers for spent in self.spent.values()))

    def after(self, admitted: Iterable[Admitted]) -> InviteTally | None:
        """With these counted, too; None if an invite has no use left or the count is full."""
        limited = [each for each in admitted if each.uses]
        if not limited:
            return self
        spent = dict(self.spent)
        for each in limited:
            before = spent.get(each.invite) or _Spent(each.uses, each.expires_s)
            peers = before.peers | {_short(each.peer)}
            if len(peers) > before.uses:
                return None
            spent[each.invite] = _Spent(before.uses, before.expires_s, peers)
        newest_s = max(self.newest_s, *(each.issued_s for each in limited))
        found = InviteTally(spent, newest_s)
        if found.size > MOST_TALLIED:
            found = InviteTally(
                {
                    invite: each
                    for invite, each in spent.items()
                    if each.expires_s + KEPT_S >= newest_s
                },
                newest_s,
            )
        return found if found.size <= MOST_TALLIED else None


def crowded(
    came: Mapping[PeerId, bytes],
    config: Collection[PeerId],
    admitted: Collection[Admitted],
    most: int = MAX_STAR,
) -> bool:
    """Whether more than `SHARE_BY_ONE` of the ``most`` members of a run would have come by one
    invite; ``came``: by which each member did, where it needed one.
    """
    staying = Counter(came[peer] for peer in config if peer in came)
    new = Counter(each.invite for each in admitted if each.invite)
    by_one = most * SHARE_BY_ONE[0] // SHARE_BY_ONE[1]
    return any(staying[invite] + count > by_one for invite, count in new.items())


def _short(peer: PeerId) -> bytes:
    return blake3(b"atoll/tally/peer/1" + peer.encode()).digest(PEER_BYTES)
