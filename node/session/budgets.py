"""What one peer may ask of this node in one run: token buckets by peer and kind of message. Sans
I/O: callers pass ``now`` in seconds.

A message is counted twice. Before it is decoded it takes one message and its bytes from its
sender's buckets; decoded, it takes one of its type. What a bucket does not hold is refused and
counted, and the reader of the peer's stream pauses until the bucket has been refilled: TCP then
slows the sender down, and what it sends costs this node no more than its budget. (A member's stream
pauses only where it sends too much of everything, or goes on with what is refused.) Nothing is lost
by that but time, since every loss is repaired by asking again.

Who breaks rules (`net.faults`) is not listened to for a minute. What such a peer says now is
dropped, and what a peer says whose stream pauses comes late: rounds do not wait for either
(`PeerUsage.deaf_to`), and it is as alive as any.

Members have larger buckets than those who are only admitted. Free-standing operations are as many
as scripts call: each call of the own script pays for what its peers say about as many operations,
beyond the little that they may say of operations that nobody here has called.
"""

from __future__ import annotations

from typing import NamedTuple

from ...collectives.group import MAX_MEMBERS
from ...collectives.identifiers import PeerId
from ..net.transport.faults import Faults

MAX_PEERS = MAX_MEMBERS + 1024  # of which buckets are kept; full ones are as good as none
FULL_S = 20.0  # a bucket of which nothing was taken for so long is full, whichever it is
MOST_FULL = 64  # accounts whose buckets may all be full: of more, those are dropped
MAX_PAUSE_S = 1.0  # a stream that is read no more for longer would be taken for a silent one
SHUT_OUT_PAUSE_S = 0.005
"""Between two messages of a peer that is shut out: to read them costs this node more than to send
them costs the peer.
"""
BEHIND_S = 1.0
"""So long after a message was refused for want of the budget of all its kinds, a peer's other
messages wait behind such ones.
"""
SHUT_OUT = "shut_out"  # the kind of all that a peer says which is not listened to
MADE = "operation"  # the kind that an operation takes which a peer's message makes known here


class Rate(NamedTuple):
    """``per_s`` tokens a second, and at most ``burst`` of them at once."""

    per_s: float
    burst: float


MESSAGES, MEMBER_MESSAGES = Rate(256, 1024), Rate(4096, 16384)
BYTES, MEMBER_BYTES = Rate(4 << 20, 16 << 20), Rate(8 << 20, 32 << 20)

REQUESTS: dict[str, Rate] = {
    "manifest": Rate(2, 16),
    "ban": Rate(16, 128),
    "membership": Rate(64, 512),
    "ask_state": Rate(2, 16),
    "fetch": Rate(64, 256),
    "join": Rate(16, 64),
    "get": Rate(64, 256),  # of chunk hashes
    "get_chunks": Rate(512, 2048),
    "offer": Rate(64, 256),
    "gone": Rate(64, 256),
    "catch": Rate(64, 256),
    "decided": Rate(16, 64),  # each is as many signatures as half of the members
    "trial": Rate(4, 16),
    "sample": Rate(4, 16),
    "retained": Rate(16, 128),
    "fork": Rate(16, 128),
    "consent": Rate(16, 128),
    "begin": Rate(16, 128),
    "seal": Rate(16, 128),
    "sealed": Rate(16, 128),
    "files": Rate(256, 1024),  # of a run's base
    MADE: Rate(32, 64),
}
ROUND = Rate(1024, 4096)
"""Of each other type of the round's messages: some of a round, and of a fast run hundreds of rounds
a second.
"""
REFUSED = Rate(128, 2048)
"""Of a member's messages that are refused, of all kinds: to read and drop them costs processor
time, too.
"""
OPERATION = Rate(256, 1024)
"""All messages about free-standing operations."""
A_CALL = 32.0
"""How many messages about operations a call of the own script pays for, for each peer."""
SPANS_BYTES = 512  # who asks as it should names no more spans at once, but where much was lost
JOBS_AT_ONCE = 4
"""Jobs that one peer may have waiting in the queue of service."""


def _weight(rate: Rate, nbytes: int) -> float:
    return min(rate.burst, 1.0 + nbytes // SPANS_BYTES)


class _Bucket:
    """Full at first."""

    __slots__ = ("_at", "_left")

    def __init__(self, rate: Rate, now: float) -> None:
        self._left, self._at = rate.burst, now

    def take(self, rate: Rate, now: float, amount: float) -> float:
        """0.0 where there was as much; otherwise nothing is taken, and it is how many seconds until
        there is.
        """
        self._left = min(rate.burst, self._left + max(0.0, now - self._at) * rate.per_s)
        self._at = now
        if self._left >= amount:
            self._left -= amount
            return 0.0
        return (amount - self._left) / rate.per_s

    def give(self, rate: Rate, amount: float) -> None:
        """Some more than time refills."""
        self._left = min(rate.burst, self._left + amount)


class _Account:
    """Of one peer."""

    __slots__ = ("behind_until", "buckets", "jobs", "refused", "used_at")

    def __init__(self) -> None:
        self.buckets: dict[str, _Bucket] = {}
        self.refused: dict[str, int] = {}
        self.jobs = 0
        self.used_at = 0.0
        self.behind_until = float("-inf")

    def refuses(self, kind: str) -> None:
        """Count what is refused."""
        self.refused[kind] = self.refused.get(kind, 0) + 1

    def is_full(self, now: float) -> bool:
        """Whether it says no more than a new one would."""
        idle = now - max(self.used_at, self.behind_until) >= FULL_S
        return idle and not self.refused and not self.jobs


class PeerUsage:
    """What the peers of one run have used of this node."""

    def __init__(self) -> None:
        self._accounts: dict[PeerId, _Account] = {}
        self._swept_at = 0.0
        self._breaches = Faults()
        self._pause = 0.0
        self._member = False  # whether the message that is looked at is a member's

    def message(self, now: float, peer: PeerId, nbytes: int, *, member: bool) -> bool:
        """Whether a message of ``nbytes`` is looked at."""
        if self._breaches.shut_out(peer, now):
            self.refuse(now, peer, SHUT_OUT)
            self._pause = SHUT_OUT_PAUSE_S
            return False
        self._member = member
        messages, volume = (MEMBER_MESSAGES, MEMBER_BYTES) if member else (MESSAGES, BYTES)
        return self._take(now, peer, "messages", messages) and self._take(
            now, peer, "bytes", volume, min(float(nbytes), volume.burst)
        )

    def request(self, now: float, peer: PeerId, kind: str, nbytes: int = 0) -> bool:
        """Whether one more message of this type is listened to; one of many ``nbytes`` of spans of
        chunks is as several.
        """
        rate = REQUESTS.get(kind, ROUND)
        return self._take(now, peer, kind, rate, _weight(rate, nbytes))

    def breach(self, now: float, peer: PeerId) -> None:
        """A message of ``peer`` broke a rule; too many of those and it is shut out."""
        self._breaches.count(peer, now)

    def deaf_to(self, now: float, peer: PeerId) -> bool:
        """Whether what ``peer`` says now does not come here, or comes late: it is shut out, or has
        used up what it may say.
        """
        account = self._accounts.get(peer)
        return (account is not None and now < account.behind_until) or self._breaches.shut_out(
            peer, now
        )

    def operation(self, now: float, peer: PeerId, nbytes: int = 0) -> bool:
        """Whether one more message about a free-standing operation is; see `request`."""
        return self._take(now, peer, "operations", OPERATION, _weight(OPERATION, nbytes))

    def called(self) -> None:
        """The own script has called an operation: its peers will speak of it."""
        for account in self._accounts.values():
            for kind, rate, amount in (
                ("operations", OPERATION, A_CALL),
                (MADE, REQUESTS[MADE], 2.0),
                ("messages", MEMBER_MESSAGES, A_CALL),
            ):
                if (bucket := account.buckets.get(kind)) is not None:
                    bucket.give(rate, amount)

    def begin_job(self, now: float, peer: PeerId, kind: str) -> bool:
        """Whether ``peer`` may queue one more job of service; then `end_job` ends it."""
        account = self._account(now, peer)
        if account.jobs >= JOBS_AT_ONCE:
            account.refuses(kind)
            return False
        account.jobs += 1
        return True

    def end_job(self, peer: PeerId) -> None:
        """A job of its is over."""
        if (account := self._accounts.get(peer)) is not None:
            account.jobs = max(0, account.jobs - 1)

    def refuse(self, now: float, peer: PeerId, kind: str) -> None:
        """Count what is refused elsewhere, for want of room."""
        self._account(now, peer).refuses(kind)

    def pause_s(self) -> float:
        """How long the stream that the last message came on is not to be read, in seconds. Asking
        sets it to 0.
        """
        pause, self._pause = self._pause, 0.0
        return pause

    def refused(self, peer: PeerId) -> dict[str, int]:
        """How much of each kind was refused to a peer until now."""
        account = self._accounts.get(peer)
        return dict(account.refused) if account is not None else {}

    def refusing(self) -> list[PeerId]:
        """Peers to which something was refused."""
        return [peer for peer, account in self._accounts.items() if account.refused]

    def _take(self, now: float, peer: PeerId, kind: str, rate: Rate, amount: float = 1.0) -> bool:
        account = self._account(now, peer)
        bucket = account.buckets.get(kind)
        if bucket is None:
            bucket = account.buckets[kind] = _Bucket(rate, now)
        wait = bucket.take(rate, now, amount)
        if wait:
            account.refuses(kind)
            if self._member and kind not in ("messages", "bytes"):
                refused = account.buckets.get("refused")
                if refused is None:
                    refused = account.buckets["refused"] = _Bucket(REFUSED, now)
                wait = refused.take(REFUSED, now, 1.0)
                if not wait:
                    return False  # what else a member says on this stream, rounds wait for
            account.behind_until = now + BEHIND_S
            self._pause = min(MAX_PAUSE_S, max(self._pause, wait))
            return False
        return True

    def _account(self, now: float, peer: PeerId) -> _Account:
        account = self._accounts.get(peer)
        if account is None:
            if len(self._accounts) > MOST_FULL and now - self._swept_at >= FULL_S:
                self._swept_at = now
                self._accounts = {
                    each: it for each, it in self._accounts.items() if not it.is_full(now)
                }
            if len(self._accounts) >= MAX_PEERS:
                idle = [each for each, it in self._accounts.items() if not it.jobs]
                idle.sort(key=lambda each: self._accounts[each].used_at)
                for each in idle[: MAX_PEERS // 16]:
                    del self._accounts[each]
            account = self._accounts[peer] = _Account()
        account.used_at = now
        return account
