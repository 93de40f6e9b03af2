"""Content from other members: results of past rounds and whole states, in hashed chunks, from
several members at once. Sans I/O.

A result is verified against the part digests of its decided entry. A state (anchor, momentum) is
verified against its Merkle root: the one a decided entry names as the state before it, or the one a
quorum of the newest configuration offers alike. Where a state is offered that neither holds of, the
next question is for a certified one: every holder has one that is older, and all results since, so
that one holder is enough. A state that comes slowly is compared with another member's (`race`).
Nobody is paused: a member serves from a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from ...collectives import messages as m
from ...collectives.codecs.codec import Chunking
from ...collectives.digest import merkle_root, part_digest
from ...collectives.errors import RemoteProtocolError
from ...collectives.exchange import Bounds
from ...collectives.group import Entry, Member, Plan, is_quorum
from ...collectives.identifiers import HASH_BYTES, PeerId
from ...collectives.layout import Layout
from ...collectives.round import Timing
from .other_logs import is_operation
from .replica import state_chunk_bytes
from .requests import ChunkRequests
from .watches import OneSource

if TYPE_CHECKING:
    from .actions import LogActions

# a quorum that offers one state alike has done so within this time; then a certified one is asked
# for
UNBELIEVED_S = 1.0
# nothing came of a state for so long, whoever was asked: its sources are dead, or have no link.
# Some have a slow one
STALLED_S = 30.0
ASKED_RARELY = 8  # times `Timing.fetch_s`: between two questions for more sources of a state
PROPOSALS_FETCHED = 8  # entries of one round whose results are fetched before one is decided
RIVALS_ASKED = 2  # at once: each makes a copy of its state, and hashes it


@dataclass
class Fetching:
    """One piece of content on its way."""

    name: bytes
    sources: list[PeerId]
    entry: Entry | None = None  # of a result
    round: int = 0
    root: bytes = b""
    layout: Layout | None = None  # of a state
    hashes: list[bytes] = field(default_factory=list[bytes])
    data: memoryview | None = None
    bounds: Bounds = 0
    have: int = 0
    missing: Sequence[m.Span] = ()
    requests: ChunkRequests | None = None  # once there is something to ask for
    asked_at: float = -1e9
    moved_at: float = 0.0  # when something came last
    turn: int = 0
    refused: set[PeerId] = field(default_factory=set[PeerId])


class Transfer:
    """Everything this member is fetching for the main log of a run."""

    def __init__(
        self,
        actions: LogActions,
        organiser: PeerId,
        timing: Timing,
        rng: Random,
        tolerated: int = 0,
        make_race: Callable[..., OneSource] = OneSource,
    ) -> None:
        self.tolerated, self._make_race = tolerated, make_race
        self.actions, self.organiser, self.timing, self.rng = actions, organiser, timing, rng
        self.fetching: dict[bytes, Fetching] = {}
        self.offers: dict[tuple[int, bytes], dict[PeerId, m.Offer]] = {}
        self.seeking_state = False
        self._coming: bytes | None = None  # the state that is being fetched
        self._race: OneSource | None = None  # of it
        self._rival: bytes | None = None  # the state that is tried beside it
        self._beaten: set[PeerId] = set()  # whose states came more slowly than others'
        self._asked_state_at = -1e9
        # Since when states are offered, and none that is believed.
        self._unbelieved_at: float | None = None

    # ---- wanted by the session
    def fetch_result(self, now: float, entry: Entry, holders: Sequence[PeerId]) -> None:
        """Fetch the result bytes of a decided (or proposed) entry from any of ``holders``. Repeated
        calls are one.
        """
        name = entry.hash()
        known = self.fetching.get(name)
        if known is None:
            self._drop_proposal(entry)
            bounds = Chunking(entry.codec, entry.numel, entry.chunk_elements).results.bounds
            self.fetching[name] = known = Fetching(
                name, [], entry=entry, round=entry.round, bounds=bounds
            )
        fresh = [peer for peer in holders if peer not in known.sources]
        known.sources.extend(fresh)
        if fresh:
            self._ask(now, known)

    def _drop_proposal(self, entry: Entry) -> None:
        """Make room for one more entry that a round may decide: a convener could propose ever other
        ones. The first goes of which the least is here. What is decided all the same, is asked for
        again.
        """
        rivals = [
            item
            for item in self.fetching.values()
            if item.entry is not None
            and (item.entry.log, item.entry.round) == (entry.log, entry.round)
        ]
        if len(rivals) >= PROPOSALS_FETCHED:
            self._forget(min(rivals, key=lambda item: (bool(item.hashes), item.have)).name)

    def seek_state(self) -> None:
        """Fetch a newer state than we hold; goes on until `state_arrived`."""
        self.seeking_state = True

    def drop(self, before: int) -> None:
        """Results of older rounds are no longer of use."""
        for name, item in list(self.fetching.items()):
            if item.entry is not None and item.round < before and not is_operation(item.entry.log):
                self._forget(name)

    def drop_log(self, log: str) -> None:
        """Results of this log are no longer of use."""
        for name, item in list(self.fetching.items()):
            if item.entry is not None and item.entry.log == log:
                self._forget(name)

    def drop_all(self) -> None:
        """Fetch nothing any more."""
        self._forget_states()
        for name in list(self.fetching):
            self._forget(name)
        self.seeking_state = False

    @property
    def unbelieved(self) -> tuple[PeerId, ...]:
        """Who offers a state that neither an entry certifies nor a quorum offers alike; none where
        one is believed.
        """
        if self._unbelieved_at is None:
            return ()
        return tuple(sorted({peer for offers in self.offers.values() for peer in offers}))

    # ---- inputs
    def on_offer(self, now: float, peer: PeerId, round_: int, offer: m.Offer) -> None:
        """Chunk hashes from a peer. Raises RemoteProtocolError when they do not fit what they are
        offered for.
        """
        if len(offer.hashes) % HASH_BYTES:
            raise RemoteProtocolError("hash list is not a multiple of 32 bytes", peer=peer)
        item = self.fetching.get(offer.name)
        if item is not None and item.entry is not None:
            if not item.hashes:
                self._take_result_hashes(now, item, peer, offer)
        elif self.seeking_state and offer.layout is not None and self.actions.wants_state(round_):
            hashes = _split(offer.hashes)
            if merkle_root(hashes) != offer.name or offer.layout.check():
                raise RemoteProtocolError("state offer does not match its root", peer=peer)
            self._take_state_offer(now, peer, round_, offer)

    def on_gone(self, now: float, peer: PeerId, name: bytes) -> None:
        """The peer no longer has it."""
        item = self.fetching.get(name)
        if item is None or peer not in item.sources:
            return
        item.refused.add(peer)
        if not all(
            source in item.refused or self.actions.unheard(source) for source in item.sources
        ):
            return
        if item.entry is None:
            self._drop_state(now, name)  # all have moved on: look for a newer state
        else:
            item.refused.clear()  # others may have it by now
            self.actions.result_gone(item.entry)

    def on_blob(
        self,
        now: float,
        name: bytes,
        have: int,
        missing: Sequence[m.Span],
        source: PeerId | None = None,
    ) -> None:
        """Progress of content on its way: ``source`` brought a chunk. Without any, this answers a
        `report`.
        """
        item = self.fetching.get(name)
        if item is None or item.data is None:
            return
        progressed, item.have, item.missing = have > item.have, have, missing
        if name == self._coming and progressed:
            self.actions.state_progress(have, len(item.hashes), tuple(item.sources))
        if not missing:
            self._complete(item)
            return
        if progressed:
            item.asked_at = item.moved_at = now
            if item.requests is not None:
                item.requests.came(now, source, missing)
        self._advance(now, item)

    def on_bad_chunk(self, peer: PeerId, name: bytes) -> None:
        """A chunk from this peer failed its hash: ask others."""
        item = self.fetching.get(name)
        if item is not None:
            item.refused.add(peer)

    @property
    def asks(self) -> bool:
        """Whether something is looked for, so that `tick` needs to know of members."""
        return self.seeking_state or bool(self.fetching)

    def tick(self, now: float, targets: Sequence[PeerId]) -> None:
        """Repair loss by asking again; ``targets`` are members that may serve a state."""
        if (
            self.seeking_state
            and not self._state_comes(now)
            and now - self._asked_state_at > self._ask_every_s
        ):
            self._asked_state_at = now
            self.offers.clear()
            since = self._unbelieved_at
            ask = m.AskState(
                since is not None and now - since > UNBELIEVED_S, self.actions.least_state()
            )
            for peer in list(targets)[:8]:
                self.actions.tell(peer, 0, ask)
        self._compare(now, targets)
        for item in list(self.fetching.values()):
            if item.requests is not None:
                late = item.requests.late(now, self._able(item), self.timing.pull_s)
                self._get(item, late)
            if now - item.asked_at > 4 * self.timing.pull_s:
                item.asked_at = now
                if item.data is not None:
                    # Answered by `on_blob` with what is missing.
                    self.actions.content.report_blob(item.name)
                else:
                    self._ask(now, item)

    # ---- results
    def _take_result_hashes(self, now: float, item: Fetching, peer: PeerId, offer: m.Offer) -> None:
        entry, hashes = item.entry, _split(offer.hashes)
        assert entry is not None
        assert isinstance(item.bounds, tuple)
        if len(hashes) != len(item.bounds) - 1 or part_digests(entry, hashes) != entry.part_digests:
            item.refused.add(peer)
            raise RemoteProtocolError(
                f"hashes of round {entry.round} do not give its digests", peer=peer
            )
        item.hashes, item.data = hashes, self.actions.allocate(item.bounds[-1])
        self._want(now, item)

    # ---- states
    def _take_state_offer(self, now: float, peer: PeerId, round_: int, offer: m.Offer) -> None:
        offers = self.offers.setdefault((round_, offer.name), {})
        offers[peer] = offer
        believed = self._believed(round_, offer.name, list(offers))
        if not believed and self._unbelieved_at is None:
            self._unbelieved_at = now
        first = self.fetching.get(self._coming or b"")
        rival = (
            self._race is not None
            and self._race.seeking
            and offer.name not in self.fetching
            and peer not in self._beaten
            and (first is None or peer not in first.sources)
        )
        comes = self._state_comes(now) and not rival
        if comes or offer.name in self.fetching or not believed:
            running = self.fetching.get(offer.name)
            if running and peer not in running.sources:
                running.sources.append(peer)
                self._ask(now, running)
            if not believed:
                self.actions.offered_in_vain(peer, round_)
            return
        layout = offer.layout
        assert layout is not None
        genesis = self.actions.entry_at(0)
        if genesis is None or layout.digest() != genesis.entry.base:
            raise RemoteProtocolError("state offer is for another model", peer=peer)
        self._unbelieved_at = None
        if not rival:
            self._forget_states()
        item = Fetching(
            offer.name,
            [peer] if rival else sorted(offers),
            round=round_,
            root=offer.name,
            layout=layout,
            hashes=_split(offer.hashes),
        )
        item.bounds = state_chunk_bytes(layout.numel)
        item.data = self.actions.allocate_state(layout)
        self.fetching[offer.name] = item
        if rival:
            self._try(now, item)
        else:
            self._lead(now, item)
        self._want(now, item)

    @property
    def _ask_every_s(self) -> float:
        """Between two questions for a state. Where one is known and does not come, each of its
        sources has many others to serve: to ask them all the more often keeps it from that.
        """
        known = any(item.layout is not None for item in self.fetching.values())
        return self.timing.fetch_s * (ASKED_RARELY if known else 1)

    def _state_comes(self, now: float) -> bool:
        """Whether a state is on its way. Whoever joins watches nobody, and a source that died says
        nothing.
        """
        return any(
            item.layout is not None and now - item.moved_at <= STALLED_S
            for item in self.fetching.values()
        )

    def _believed(self, round_: int, root: bytes, offering: list[PeerId]) -> bool:
        entry, following = self.actions.entry_at(round_), self.actions.entry_at(round_ + 1)
        if entry is None:
            return False
        if round_ == 0 or following is not None:
            with_base = entry if round_ == 0 else following
            return with_base is not None and with_base.entry.base_state == root
        config = entry.entry.next_config
        voters: list[Member] = [member for member in config if member.peer in offering]
        return is_quorum(config, voters, self.organiser, self.tolerated)

    # ---- a state and its rival
    def _lead(self, now: float, item: Fetching, each_s: float = 0.0) -> None:
        """This is the state to be fetched, of which a chunk took ``each_s`` where that is known."""
        self._coming, self._race = (
            item.name,
            self._make_race(now, len(item.hashes), item.have, each_s),
        )

    def _try(self, now: float, item: Fetching) -> None:
        """This is tried beside it."""
        assert self._race is not None
        assert self._coming is not None
        self._rival = item.name
        self._race.begin(now, self.fetching[self._coming].have)

    def _compare(self, now: float, targets: Sequence[PeerId]) -> None:
        """If a state arrives slowly, try another member's, and go on with the faster."""
        race, first = self._race, self.fetching.get(self._coming or b"")
        if race is None or first is None:
            return
        rival = self.fetching.get(self._rival or b"")
        if rival is not None:
            won = race.won(now, first.have, rival.have)
            if won is not None:
                self._drop_state(now, (first if won else rival).name)
        elif race.wants_rival(now, first.have) and race.may_ask(now):
            others = [peer for peer in targets if peer not in first.sources]
            if self._beaten.issuperset(others):
                self._beaten.clear()
            others = [peer for peer in others if peer not in self._beaten]
            self.offers.clear()
            for peer in self.rng.sample(others, min(RIVALS_ASKED, len(others))):
                self.actions.tell(peer, 0, m.AskState(True, self.actions.least_state()))

    def _drop_state(self, now: float, name: bytes) -> None:
        """Fetch this state no longer; where a rival is tried, go on with the other one."""
        self._beaten.update(self.fetching[name].sources)
        self._forget(name)
        rival, self._rival = self._rival, None
        if name == self._coming:
            each_s = self._race.rival_each_s if self._race is not None else 0.0
            self._coming = self._race = None
            if rival is not None:
                item = self.fetching[rival]
                self._lead(now, item, each_s)
                item.requests = None
                self._advance(now, item)

    def _forget_states(self) -> None:
        for name in [name for name, each in self.fetching.items() if each.layout is not None]:
            self._forget(name)
        self._coming = self._rival = self._race = None
        self._beaten.clear()

    # ---- both
    def _want(self, now: float, item: Fetching) -> None:
        assert item.data is not None
        self.actions.content.want(item.name, item.data, item.bounds, item.hashes, item.sources)
        item.asked_at = item.moved_at = now
        # Answered by `on_blob`: what came before need not be asked for.
        self.actions.content.report_blob(item.name)

    def _ask(self, now: float, item: Fetching) -> None:
        """Ask one source for the chunk hashes; a new source of what is already coming is told to
        the data plane.
        """
        item.asked_at = now
        if item.data is not None:
            self.actions.content.want(item.name, item.data, item.bounds, item.hashes, item.sources)
        elif source := self._next_source(item):
            self.actions.tell(source, item.round, m.Get(item.name, ()))

    def _advance(self, now: float, item: Fetching) -> None:
        """Keep a window of chunks asked for, spread over the sources."""
        if item.requests is None:
            item.requests = ChunkRequests(now, self._chunk_bytes(item))
        if item.name == self._rival:
            item.requests.most = 1
        self._get(item, item.requests.next(now, item.missing, self._able(item)))

    def _get(self, item: Fetching, gets: Sequence[tuple[PeerId, list[m.Span]]]) -> None:
        for peer, spans in gets:
            self.actions.tell(peer, item.round, m.Get(item.name, tuple(spans)))

    def _chunk_bytes(self, item: Fetching) -> int:
        assert item.data is not None
        return math.ceil(self.timing.weight * -(-len(item.data) // max(1, len(item.hashes))))

    def _able(self, item: Fetching) -> list[PeerId]:
        """Sources to ask: those who live and have not refused, if there are any."""
        alive = [peer for peer in item.sources if not self.actions.unheard(peer)] or item.sources
        return [peer for peer in alive if peer not in item.refused] or alive

    def _next_source(self, item: Fetching) -> PeerId | None:
        """In turn."""
        sources = self._able(item)
        item.turn += 1
        return sources[item.turn % len(sources)] if sources else None

    def _complete(self, item: Fetching) -> None:
        self._forget(item.name)
        assert item.data is not None
        if item.entry is not None:
            self.actions.result_arrived(item.entry, item.data)
        elif item.layout is not None:
            self.seeking_state = False
            self._forget_states()
            self.actions.state_arrived(item.round, item.root, item.layout, item.data)

    def _forget(self, name: bytes) -> None:
        if self.fetching.pop(name, None) is not None:
            self.actions.content.unwant(name)


def part_digests(entry: Plan | Entry, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
    """The digests that a plan's or an entry's parts have if its result chunks have these hashes."""
    return tuple(part_digest(entry, part, hashes[part.first : part.stop]) for part in entry.parts)


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
