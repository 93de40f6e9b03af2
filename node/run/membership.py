"""Who is in the run, where, and who is alive: signed records in a last-writer-wins map, heartbeats,
indirect probes. Sans-IO.

Merging is a maximum by (sequence, hash), so that replicas converge in any order of delivery; expiry
is the tombstone. Records travel by gossip: the hash of the table first, the digest when it differs.
Liveness is separate: any message is a sign of life, a silent peer is asked for through two others
before it is suspected, and probes are answered here, by the application, so that a stopped process
is found out although its kernel still answers. Parameters and costs:
docs/internals/protocol/membership.md.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import structs

from ...collectives.errors import BadSignatureError, LocalProtocolError, RemoteProtocolError
from ...collectives.identifiers import PeerId, RunId
from ...collectives.messages import shared
from ..net.transport.allowance import Allowance
from . import membership_records as wire
from .hearing import Hearing, make_hearing, mesh_of
from .membership_records import MAX_RECORDS, RECORDS_PER_MESSAGE, Record, Sign, SignedRecord, Verify

MOST_BY_ONE = MAX_RECORDS * 3 // 4
LOOKED_AT = 8  # times as many as are wanted are looked at, where there are hundreds
PROBES_KEPT = 8  # newest ones of a peer that an answer counts for
LONG_AGO, NEVER = float("-inf"), float("inf")


class MembershipTiming(msgspec.Struct, frozen=True):
    """Seconds. By the defaults all of 200 members know a new record after 2.9 s (median)."""

    gossip_s: float = 1.0  # each round of gossip goes to `gossip_peers`, 20 % jitter
    renew_s: float = 10.0
    lifetime_s: float = 35.0  # three renewals and the spread
    skew_s: float = 300.0  # how far the wall clocks of honest members may differ
    beat_s: float = 0.2
    detect_s: float = 1.0  # silence after which a watched peer is suspected
    lost_s: float = 0.3  # the same once its connection has ended: time to ask for it through others
    push_s: float = 0.25  # own changes are pushed at most this often
    gossip_peers: int = 2
    push_peers: int = 4
    probe_peers: int = 2
    sparse_above: int = 32
    """More members than so many beat to partners only (`node.run.partners`), and take their word
    for the others (`node.run.hearsay`).
    """
    sparse: float = 2.5
    """There, beats and suspicion take so many times as long: rounds of many take longer, too."""

    def wide(self, members: int) -> MembershipTiming:
        """The same in a run of so many ``members``. Records are renewed so much more rarely that
        what a member hears of them grows as √n.
        """
        rarely = min(MOST_RARELY, math.sqrt(members / max(1, self.sparse_above)))
        return structs.replace(
            self,
            beat_s=self.sparse * self.beat_s,
            detect_s=self.sparse * self.detect_s,
            renew_s=rarely * self.renew_s,
            lifetime_s=rarely * self.lifetime_s,
        )


CLOCK_JUMP_S = 1.0  # by which the wall clock moves against the other before it was corrected
MOST_RARELY = 8.0
"""Times: a record's life stays below the skew of clocks, which peers that know fewer members allow
for.
"""
HANDED, HANDED_PER_S = 2 * MAX_RECORDS, 128.0
"""Records handed to one peer at once, and from then on: a digest of nothing, a few bytes, asks for
all. As many as there may be are renewed in eight seconds.
"""


class _Row(NamedTuple):
    """A record: what of it is the same at all who hold it. ``line``: what digests say of it."""

    record: Record
    signed: SignedRecord
    hash: bytes
    line: bytes

    @property
    def order(self) -> tuple[int, bytes]:
        return self.record.sequence, self.hash


class _Held:
    """One record of the table."""

    __slots__ = ("expires", "invite", "known")

    def __init__(self, known: _Row, expires: float, invite: bytes) -> None:
        self.known, self.expires, self.invite = known, expires, invite

    @property
    def record(self) -> Record:
        return self.known.record

    @property
    def order(self) -> tuple[int, bytes]:
        return self.known.order


class Membership:
    """The membership of one run as one member sees it.

    Driver: call `on_message` for messages of this protocol, `heard` for *any* message of a peer,
    `tick` at `next_due`, and send what `drain` returns. ``unix_offset_s`` is wall clock minus
    ``now`` and only serves the expiry inside records.
    """

    def __init__(
        self,
        me: PeerId,
        run: RunId,
        *,
        sign: Sign,
        verify: Verify,
        rng: random.Random,
        timing: MembershipTiming | None = None,
        unix_offset_s: float = 0.0,
    ) -> None:
        self.me, self.run = me, run
        # on another history of the run: wherever they are, nothing is decided with them
        self.foreign = set[PeerId]()
        self.banned: set[PeerId] = set()  # the same, whatever their history
        self.trusted: set[PeerId] = set()  # let in without probation, however many have come
        self.roles: dict[PeerId, str] = {}  # by their invites; who is not in it trains
        self.certificate = b""
        """The own, for the own record: who has been away for long knows the members by nothing
        else.
        """
        self.believes: Callable[[PeerId, bytes], bool] = lambda peer, shown: True
        """Whether a record of this peer that carries this certificate is kept and handed on. Raises
        BadSignatureError where no honest member would.
        """
        self.shows: Callable[[PeerId, bytes], None] = lambda peer, shown: None
        """Told which certificate a peer shows in a record, once its signature was checked: who
        holds an invite's seed can make one for anybody.
        """
        self.invite_of: Callable[[bytes], bytes] = lambda certificate: b""
        """The id of the invite that a certificate was made by; empty for none. One invite has
        `MOST_BY_ONE` records at most.
        """
        self._by_invite = Counter[bytes]()  # records in the table
        self.timing = self._usual = timing or MembershipTiming()
        self.large = False  # more members than `sparse_above`
        self._hearsay: Hearing | None = None  # there
        self.silences: Mapping[PeerId, float] = {}
        """Peers on the way to whom packets are lost: the silence that says nothing, in seconds,
        where it is longer than ``detect_s``.
        """
        self.refused: Counter[str] = Counter()  # records refused, by reason
        same = random.Random()
        same.setstate(rng.getstate())
        self.life = same.randbytes(wire.LIFE_BYTES)  # a nonce of this process
        self.is_doubled = False  # another process speaks under this key
        # whose record under this key was seen last, and whether that process knows of this one
        self._beside, self._both_know = b"", False
        self._sign, self._verify, self._rng, self._offset = sign, verify, rng, unix_offset_s
        self._handed = Allowance(HANDED, HANDED_PER_S)  # records, to each peer that asks
        self._table: dict[PeerId, _Held] = {}
        # of it: names in order, lines of digests, and names by what stands for them there
        self._names, self._lines, self._named = list[PeerId](), set[bytes](), dict[bytes, PeerId]()
        # Expired here: (sequence, hash, forget at).
        self._gone: dict[PeerId, tuple[int, bytes, float]] = {}
        self._hash: bytes | None = None
        self._fields: dict[str, Any] = {}
        self._renew_at = self._gossip_at = self._beat_at = 0.0
        self._push_at = self._expires_at = NEVER
        self._pushed = LONG_AGO
        self._ticked = self._due = NEVER  # the last tick, and when the next one was wanted
        self._wanted: dict[str, set[PeerId]] = {}  # by log
        self._watched: dict[PeerId, float] = {}  # since when
        self._heard: dict[PeerId, float] = {}
        self._seen: dict[PeerId, float] = {}  # vouched for by another peer
        self._probed: dict[PeerId, float] = {}
        self._nonces: dict[PeerId, deque[bytes]] = {}  # of the newest probes of a watched peer
        self._asked = 0
        self._lost: dict[PeerId, float] = {}  # when the connection of a watched peer ended
        self._closed: set[PeerId] = set()  # of these, those where nobody listens any more
        self._sent: dict[PeerId, float] = {}  # when anything of this protocol went to the peer last
        self._outbox = list[tuple[PeerId, bytes]]()
        self._moved: dict[PeerId, tuple[str, ...]] = {}

    # ---- what the session asks
    def doubled(self, peer: PeerId) -> bool:
        """Whether two processes live under this peer's key, by their own word."""
        held = self._table.get(peer)
        return (held is not None and held.record.doubled) or (peer == self.me and self.is_doubled)

    def records(self) -> list[Record]:
        """All members known now, by peer; one's own record included."""
        return [self._table[peer].record for peer in self._names]

    def known(self) -> Collection[PeerId]:
        """Whose record is here, in no order."""
        return self._table.keys()

    def record(self, peer: PeerId) -> Record | None:
        """What ``peer`` says of itself, if known."""
        held = self._table.get(peer)
        return held.record if held else None

    def watch(self, now: float, peers: Iterable[PeerId], log: str = "") -> None:
        """Exchange heartbeats with exactly these peers from now on, for the sake of this log,
        beside those watched for others. A new one gets ``detect_s`` to be heard."""
        same = self._wanted.get(log)
        self._wanted[log] = set(peers)
        if same == self._wanted[log]:
            return  # as nearly always
        wanted = set[PeerId]().union(*self._wanted.values())
        wanted = self._widen(now, wanted) - {self.me}
        for peer in [p for p in self._watched if p not in wanted]:
            del self._watched[peer]
            self._forget_loss(peer)
        # Sorted: the same order in every process.
        for peer in sorted(wanted - self._watched.keys()):
            self._watched[peer] = now
            self._beat_at = self._due = now

    def _widen(self, now: float, wanted: set[PeerId]) -> set[PeerId]:
        """Make the partners those of a run of so many, and return who is watched. What the partners
        until now have said, and whom they were asked for, counts on. In a run that is not as large
        any more whoever was not suspected has ``detect_s`` to be heard, as a new one has.
        """
        before, usual = self._hearsay, self._usual
        self.large = len(wanted) > usual.sparse_above
        mesh = mesh_of(tuple(sorted(wanted))) if self.large else None
        if mesh is not None and before is not None and before.mesh is mesh:
            return wanted
        narrows = mesh is None and before is not None
        there = [p for p in self._watched if not self.suspected(now, p)] if narrows else []
        self._hearsay, asked, beaten = None, dict[PeerId, tuple[float, float]](), self._watched
        if before is not None:
            asked, beaten = before.asked, before.beaten
            for peer in self._watched:
                if (last := before.last(now, peer)) > self._seen.get(peer, LONG_AGO):
                    self._seen[peer] = last
        if mesh is None:
            self.timing = usual
            for peer in there:  # what is known by hearsay is older than suspicion takes now
                self._watched[peer] = now
            if narrows:
                self._beat_at = self._due = now
            return wanted
        self.timing = usual.wide(len(wanted))
        if self.me not in mesh:  # nobody says to it what it hears
            return set(mesh.beside(self.me))
        for peer in beaten:  # which has asked it all the time
            heard = self._heard.get(peer, self._watched.get(peer, now))
            asked[peer] = heard + self.timing.beat_s, now
        self._hearsay = make_hearing()(
            self.me,
            mesh,
            self._heard,
            self._watched,
            beat_s=self.timing.beat_s,
            detect_s=self.timing.detect_s,
            asked={peer: asked[peer] for peer in wanted & asked.keys()},
            beaten={peer: beaten.get(peer, now) for peer in mesh.partners(self.me)},
        )
        return wanted

    def live(self, now: float, peer: PeerId) -> bool:
        """Whether ``peer`` gave a sign of life within ``detect_s``, to us or to one who vouches for
        it; within ``lost_s`` and since then, once its connection has ended: a process that is
        killed says so by that, and its silence needs no proof as long; none where it is `gone`.
        One that is `doubled` beats, and takes part in nothing."""
        if peer == self.me:
            return True
        if self.excluded(peer):
            return False
        last = self._last(now, peer)
        if now - last > self._detect_s(peer):
            return False
        lost = self._lost.get(peer, NEVER)
        return last > lost or (peer not in self._closed and now - lost <= self.timing.lost_s)

    def suspected(self, now: float, peer: PeerId) -> bool:
        """Whether ``peer`` was watched for ``detect_s``, or lost its connection, and is not `live`.
        Without being watched it never is, unless it is on another history, banned, or `doubled`."""
        if self.excluded(peer):
            return True
        since = self._watched.get(peer)
        return (
            since is not None
            and (now - since > self._detect_s(peer) or peer in self._lost)
            and not self.live(now, peer)
            and (
                self._hearsay is None
                or peer in self._lost
                or self._hearsay.unanswered(now, peer, self._last(now, peer))
            )
        )

    def _last(self, now: float, peer: PeerId) -> float:
        """When it gave its last sign of life."""
        last = max(self._heard.get(peer, LONG_AGO), self._seen.get(peer, LONG_AGO))
        if self._hearsay is not None and now - last > self.timing.lost_s:
            return max(last, self._hearsay.last(now, peer))
        return last

    def excluded(self, peer: PeerId) -> bool:
        """Whether the peer takes no part, however alive: banned, on another history, `doubled`."""
        return peer in self.foreign or peer in self.banned or self.doubled(peer)

    def _detect_s(self, peer: PeerId) -> float:
        return max(self.timing.detect_s, self.silences.get(peer, 0.0))

    # ---- inputs
    def announce(self, now: float, **fields: Any) -> None:
        """Change what one's own record says (fields of Record); pushed at once when something
        really changed.
        """
        unknown = fields.keys() - {"addresses", "round", "first_batch", "spent"}
        if unknown:
            raise LocalProtocolError(f"a membership record has no field {sorted(unknown)[0]!r}")
        if self.me in self._table and all(
            self._fields.get(key) == value for key, value in fields.items()
        ):
            return
        started = bool(self._fields.get("round"))
        self._fields.update(fields)
        hints = {"round", "first_batch"} if self.large else {"first_batch"}
        if started and fields.keys() <= hints:
            return  # they go with the next renewal, or change
        self._issue(now)
        self._push_at = max(now, self._pushed + self.timing.push_s)

    def follow_clock(self, now: float, unix_offset_s: float) -> None:
        """The wall clock minus ``now`` is this. Where it was corrected, others' records are judged
        by it from now on, and one's own is told anew.
        """
        if abs(unix_offset_s - self._offset) <= CLOCK_JUMP_S:
            return
        self._offset = unix_offset_s
        if self.me in self._table:
            self._issue(now)
            self._push_at = max(now, self._pushed + self.timing.push_s)

    def heard(self, now: float, peer: PeerId) -> None:
        """``peer`` sent something, anything."""
        self._heard[peer] = now

    def link(self, now: float, peer: PeerId, up: bool) -> None:
        """The connection to ``peer`` came or went. Ask others at once for a lost one."""
        if up:
            self._forget_loss(peer)
        elif peer in self._watched:
            self._lost.setdefault(peer, now)
            self._probe(now, peer)

    def gone(self, peer: PeerId) -> None:
        """Where ``peer`` listened until its connection ended, its machine refuses connections: the
        process is no more.
        """
        if peer in self._lost:
            self._closed.add(peer)

    def _forget_loss(self, peer: PeerId) -> None:
        self._lost.pop(peer, None)
        self._closed.discard(peer)

    def learn(self, now: float, data: Sequence[SignedRecord], sender: PeerId) -> None:
        """Take records from elsewhere (discovery of first members), checked as from a message."""
        self._merge(now, data, sender)

    def recall(self, peer: PeerId) -> bytes:
        """The newest record that ``peer`` has signed, for itself: whoever speaks under its key
        learns of another who does. b"": none.
        """
        held = self._table.get(peer)
        return wire.pack(held.known.signed) if held is not None and peer != self.me else b""

    def reminded(self, now: float, sender: PeerId, recalled: bytes) -> None:
        """What ``sender`` knows of us, by its greeting. Where another life of ours has signed it,
        the sender gets our own word of that.
        """
        try:
            signed = wire.unpack(recalled, sender)
            record = wire.open_record(signed, sender)
            if record.peer != self.me or record.life == self.life:
                return
            wire.verify_record(signed, record, self.run, self._verify)
        except (BadSignatureError, RemoteProtocolError):
            self.refused["recalled"] += 1
            return
        self._merge(now, (signed,), sender)
        if self.me in self._table:
            self._send_records(now, sender, [self.me])

    def on_message(self, now: float, sender: PeerId, data: bytes) -> None:
        """A message of this protocol from an authenticated peer. Raises RemoteProtocolError when it
        is malformed.
        """
        message = wire.decode(data, sender)
        self.heard(now, sender)
        match message:
            case wire.Beat(answer):
                if answer and (sender not in self._watched or self._hearsay is not None):
                    self._send(now, sender, wire.Beat(False))
            case wire.HeardBeat(mesh, bits):
                if self._hearsay is not None and sender in self._hearsay.beaten:
                    self._hearsay.said(now, sender, mesh, bits)
                elif self._hearsay is not None or sender not in self._watched:
                    self._send(now, sender, wire.Beat(False))  # it waits for ours
            case wire.Probe(target, nonce):
                if target == self.me:
                    self._send(now, sender, self._alive(sender, nonce))
                elif target in self._watched or target in self._table:
                    self._send(now, target, wire.ProbePing(sender, nonce))
            case wire.ProbePing(asker, nonce):
                self._send(now, sender, self._alive(asker, nonce))
            case wire.Alive():
                self._on_alive(now, sender, message)
            case wire.TableHash(hash_):
                if hash_ != self._table_hash():
                    self._send(now, sender, self._digest())
            case wire.Digest(lines):
                self._on_digest(now, sender, lines)
            case wire.Records(records, wanted):
                self._merge(now, records, sender, from_member=True)
                if wanted:
                    asked = dict.fromkeys(wire.split(wanted, wire.SHORT_BYTES, sender))
                    named = [self._named[short] for short in asked if short in self._named]
                    self._send_records(now, sender, named)

    def _alive(self, asker: PeerId, nonce: bytes) -> wire.Alive:
        alive = wire.Alive(self.me, asker, nonce, b"")
        return structs.replace(alive, signature=self._sign(wire.alive_payload(self.run, alive)))

    def _on_alive(self, now: float, sender: PeerId, alive: wire.Alive) -> None:
        target, asker = alive.target, alive.asker
        if asker == self.me:
            # Only what the target itself has signed since it was asked: others could keep a dead
            # one alive by their word, and rounds waiting for it.
            if target in self._watched and alive.nonce in self._nonces.get(target, ()):
                payload = wire.alive_payload(self.run, alive)
                if sender == target or self._verify(target, payload, alive.signature):
                    self._seen[target] = now
        elif target == sender and asker in self._watched:  # it vouches for itself; we pass it on
            self._send(now, asker, alive)

    # ---- records
    def _issue(self, now: float) -> None:
        held, gone = self._table.get(self.me), self._gone.pop(self.me, None)
        last = max(held.record.sequence if held else 0, gone[0] if gone else 0)
        # wall-clock milliseconds, so that a process that forgot its sequence goes on above it
        sequence = max(last + 1, int((now + self._offset) * 1000))
        expires = now + self.timing.lifetime_s
        record = Record(
            self.run,
            self.me,
            sequence,
            int((expires + self._offset) * 1000),
            **self._fields,
            life=self.life,
            beside=self._beside,
            doubled=self.is_doubled,
            certificate=self.certificate,
        )
        signed = wire.sign_record(record, self._sign)
        self._put(record, signed, signed.hash(), NEVER)  # one's own never expires here
        self._renew_at = now + self.timing.renew_s

    def _put(self, record: Record, signed: SignedRecord, hash_: bytes, expires: float) -> None:
        invite = self.invite_of(record.certificate)
        if (before := self._table.get(record.peer)) is not None:
            self._by_invite[before.invite] -= 1
            self._lines.discard(before.known.line)
        else:
            insort(self._names, record.peer)
        self._by_invite[invite] += 1
        known = shared(hash_, lambda: _Row(record, signed, hash_, wire.line(record, hash_)))
        self._table[record.peer] = _Held(known, expires, invite)
        self._lines.add(known.line)
        self._named[known.line[: wire.SHORT_BYTES]] = record.peer
        self._expires_at = min(self._expires_at, expires)
        self._gone.pop(record.peer, None)
        self._hash = None

    def _known(self, peer: PeerId) -> tuple[int, bytes]:
        held = self._table.get(peer)
        if held is not None:
            return held.order
        gone = self._gone.get(peer)
        return (gone[0], gone[1]) if gone else (-1, b"")

    def _merge(
        self,
        now: float,
        records: Iterable[SignedRecord],
        sender: PeerId,
        *,
        from_member: bool = False,
    ) -> None:
        """``from_member``: a member sent them and has checked what it hands on. Then the first bad
        one is its fault, and the rest is not looked at: raises RemoteProtocolError."""
        for signed in records:
            try:
                self._consider(now, signed, wire.open_record(signed, sender))
            except (BadSignatureError, RemoteProtocolError) as error:
                wrong = "forged" if isinstance(error, BadSignatureError) else "malformed"
                self.refused["foreign" if "of run" in error.message else wrong] += 1
                if from_member:
                    raise RemoteProtocolError(
                        f"it hands on a bad record: {error.message}", peer=sender
                    ) from None

    def _consider(self, now: float, signed: SignedRecord, record: Record) -> None:
        timing, hash_ = self.timing, signed.hash()
        # The cheap test first: never verify twice.
        if (record.sequence, hash_) <= self._known(record.peer):
            return
        left = record.expires_unix_ms / 1000 - (now + self._offset)
        if left < -timing.skew_s or left > timing.lifetime_s + timing.skew_s:
            self.refused["expired"] += 1
            return
        if (
            record.peer not in self._table
            and len(self._table) >= MAX_RECORDS
            and record.peer not in self._watched
        ):
            self.refused["full"] += 1
            return
        if record.peer != self.me and not self.believes(record.peer, record.certificate):
            self.refused["withdrawn"] += 1
            return
        invite = self.invite_of(record.certificate)
        if (
            invite
            and record.peer not in self._table
            and record.peer not in self._watched
            and self._by_invite[invite] >= MOST_BY_ONE
        ):
            self.refused["crowded"] += 1
            return
        wire.verify_record(signed, record, self.run, self._verify)
        self.shows(record.peer, record.certificate)
        # An earlier life of ours spoke with a larger sequence, or another process: speak above it.
        if record.peer == self.me:
            self._put(record, signed, hash_, NEVER)
            both_knew = self.is_doubled and self._beside == record.life and record.doubled
            if record.life != self.life:
                self._beside = record.life
                self.is_doubled |= bool(record.life) and record.beside == self.life
                self._both_know |= self.is_doubled and record.doubled
            # Both know: it is said again when it is time, not as an answer to every answer.
            if both_knew:
                self._renew_at = min(self._renew_at, now + self.timing.renew_s)
                return
            self._issue(now)
            self._push_at = now
        else:
            known = self._table.get(record.peer)
            if record.addresses and (known is None or known.record.addresses != record.addresses):
                self._moved[record.peer] = record.addresses
            self._put(record, signed, hash_, now + timing.lifetime_s)

    def _expire(self, now: float) -> None:
        if now > self._expires_at:
            for peer in [p for p, held in self._table.items() if held.expires < now]:
                held = self._table.pop(peer)
                del self._names[bisect_left(self._names, peer)]
                self._lines.discard(held.known.line)
                self._named.pop(held.known.line[: wire.SHORT_BYTES], None)
                self._by_invite[held.invite] -= 1
                self._by_invite += Counter()  # without those of whom none is left
                self._moved.pop(peer, None)
                forget_at = now + 2 * self.timing.skew_s + self.timing.lifetime_s
                self._gone[peer] = (*held.order, forget_at)
                self._hash = None
            for peer in [p for p, gone in self._gone.items() if gone[2] < now]:
                del self._gone[peer]
            ends = [held.expires for held in self._table.values()]
            ends += [gone[2] for gone in self._gone.values()]
            self._expires_at = min(ends, default=NEVER)
        for times in (self._heard, self._seen, self._sent, self._probed):
            if len(times) > 4 * MAX_RECORDS:  # strangers come and go
                for peer in sorted(times, key=lambda p: times[p])[: 2 * MAX_RECORDS]:
                    del times[peer]
        while len(self._gone) > 4 * MAX_RECORDS:
            del self._gone[next(iter(self._gone))]

    # ---- gossip
    def _table_hash(self) -> bytes:
        if self._hash is None:
            self._hash = blake3(
                b"".join([self._table[peer].known.hash for peer in self._names])
            ).digest()
        return self._hash

    def _digest(self) -> wire.Digest:
        return wire.Digest(b"".join(sorted(self._lines)))

    def _on_digest(self, now: float, sender: PeerId, data: bytes) -> None:
        lines, at = wire.split(data, wire.LINE_BYTES, sender), wire.SHORT_BYTES
        # of thousands nearly all are the same here and there: looked at is what differs
        theirs = {line[:at]: line[at:] for line in lines if line not in self._lines}
        mine = sorted(self._lines.difference(lines))
        newer_here = [
            self._named[line[:at]] for line in mine if line[at:] > theirs.get(line[:at], b"")
        ]
        known = {line[:at]: line[at:] for line in mine}
        if theirs.keys() - known.keys():  # not here, or no more
            gone = {wire.short(peer): wire.order(*gone[:2]) for peer, gone in self._gone.items()}
            known = gone | known
        self._send_records(
            now,
            sender,
            newer_here,
            b"".join(short for short, order in theirs.items() if order > known.get(short, b"")),
        )

    def _send_records(
        self, now: float, peer: PeerId, of: Sequence[PeerId], wanted: bytes = b""
    ) -> None:
        ready = [self._table[p].known.signed for p in of if p in self._table]
        if list(of) != [self.me]:  # what others say, and how often, holds back no own word
            handed = self._handed.some(peer, now, len(ready))
            if handed < len(ready):  # any of them: always the same would be handed otherwise
                ready = self._rng.sample(ready, handed)
        for start in range(0, max(len(ready), 1 if wanted else 0), RECORDS_PER_MESSAGE):
            self._send(
                now,
                peer,
                wire.Records(
                    tuple(ready[start : start + RECORDS_PER_MESSAGE]), wanted if start == 0 else b""
                ),
            )

    def _others(
        self, now: float, count: int, among: Collection[PeerId] | None = None
    ) -> list[PeerId]:
        """So many at random, those that are not suspected first; of all that are known, unless it
        says ``among`` whom.
        """
        if among is None:
            strangers = self._watched.keys() - self._table.keys()
            among = sorted([*self._names, *strangers]) if strangers else self._names
        else:
            among = sorted(among)
        known = [p for p in among if p != self.me]
        if self.large and len(known) > LOOKED_AT * count:
            known = self._rng.sample(known, LOOKED_AT * count)
        # two processes of one key meet by what others hand to each
        good = [p for p in known if self.doubled(p) or not self.suspected(now, p)]
        pool = good if len(good) >= count else known
        return self._rng.sample(pool, min(count, len(pool)))

    # ---- time
    def tick(self, now: float) -> None:
        """Do what is due at ``now``."""
        timing = self.timing
        self._wake(now)
        self._expire(now)
        if self.me in self._table and now >= self._renew_at:
            self._issue(now)
            self._push_at = min(self._push_at, max(now, self._pushed + timing.push_s))
        if now >= self._push_at:
            self._push_at, self._pushed = NEVER, now
            for peer in self._others(now, timing.push_peers):
                self._send_records(now, peer, [self.me])
        if self._both_know:
            # No more of this is for anybody. What the two would still say takes each other's
            # streams over, one greeting after the other.
            self._gossip_at = self._beat_at = now + timing.renew_s
        if now >= self._gossip_at:
            self._gossip_at = now + timing.gossip_s * self._rng.uniform(0.8, 1.2)
            for peer in self._others(now, timing.gossip_peers):
                self._send(now, peer, wire.TableHash(self._table_hash()))
        if now >= self._beat_at:
            self._beat_at = now + timing.beat_s
            self._beat(now)
        self._due = self.next_due()

    def next_due(self) -> float:
        """When `tick` wants to be called next."""
        due = self._gossip_at if self._gossip_at < self._push_at else self._push_at
        if self._beat_at < due and self._watched:
            due = self._beat_at
        return self._renew_at if self._renew_at < due and self.me in self._table else due

    def drain(self) -> list[tuple[PeerId, bytes]]:
        """Messages to send, oldest first; the outbox is empty afterwards."""
        out, self._outbox = self._outbox, []
        return out

    def moved(self) -> dict[PeerId, tuple[str, ...]]:
        """Whose record names other addresses than before, and which; told once."""
        moved, self._moved = self._moved, {}
        return moved

    def _wake(self, now: float) -> None:
        """After a pause of this process: the pause does not count as others' silence."""
        if now - self._due > self.timing.detect_s / 2:
            pause = now - self._ticked
            if self._hearsay is not None:
                self._hearsay.paused(self._ticked, pause)
            for times in (self._heard, self._seen, self._watched, self._lost):
                for peer, then in times.items():
                    if then <= self._ticked:
                        times[peer] = then + pause
        self._ticked = now

    def _beat_partners(self, now: float, hearsay: Hearing) -> None:
        """In a large run: a beat to each partner, a question to whom none vouches for."""
        timing = self.timing
        beat = wire.encode(hearsay.beat(now))
        for peer in hearsay.partners:
            self._sent[peer] = now
            self._outbox.append((peer, beat))
        for peer in hearsay.questions(now, self._seen):
            self._send(now, peer, wire.Beat(True))
        for peer in hearsay.silent(now):
            if now - self._probed.get(peer, LONG_AGO) >= 0.3 * timing.detect_s:
                self._probe(now, peer)

    def _beat(self, now: float) -> None:
        timing = self.timing
        if self._hearsay is not None:
            return self._beat_partners(now, self._hearsay)
        for peer in self._watched:
            silent = now - max(self._heard.get(peer, LONG_AGO), self._watched[peer])
            # what we sent just now is as good as a beat, unless we need an answer
            if (
                silent > 1.5 * timing.beat_s
                or now - self._sent.get(peer, LONG_AGO) >= 0.75 * timing.beat_s
            ):
                self._send(now, peer, wire.Beat(True))
            if (
                silent > 0.4 * timing.detect_s
                and now - self._probed.get(peer, LONG_AGO) >= 0.3 * timing.detect_s
            ):
                self._probe(now, peer)

    def _probe(self, now: float, peer: PeerId) -> None:
        self._probed[peer] = now
        self._asked += 1
        # by its own signature nobody can guess it, and a simulation of one seed repeats itself
        nonce = blake3(self._sign(b"atoll/probe/%d" % self._asked)).digest(8)
        self._nonces.setdefault(peer, deque(maxlen=PROBES_KEPT)).append(nonce)
        among = self._watched if self._hearsay is None else self._hearsay.partners
        asked = self._others(now, self.timing.probe_peers + 1, among)
        helpers = [p for p in asked if p != peer][: self.timing.probe_peers]
        for helper in helpers:
            self._send(now, helper, wire.Probe(peer, nonce))

    def _send(self, now: float, peer: PeerId, message: wire.Message) -> None:
        self._sent[peer] = now
        self._outbox.append((peer, wire.encode(message)))
