"""Whom a transfer asks for which chunk, and whether another state would be here sooner."""

from __future__ import annotations

import pytest

from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Span
from atoll.node.session.race import FIRST_S, PAUSE, SILENT_S, TRIAL_S, Race
from atoll.node.session.requests import REMIND_S, SPAN_CHUNKS, WINDOW_CHUNKS, ChunkRequests

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
MIB = 1 << 20
PULL_S = 0.05


class Wire:
    """Sources that send a chunk each ``every_s``, over links of their own or over one that they
    share in turn; the last chunk that each was asked for first ends the queue.
    """

    def __init__(self, chunks: int, every_s: dict[PeerId, float], shared_s: float = 0.0) -> None:
        self.requests, self.every_s, self.shared_s = ChunkRequests(0.0, MIB), every_s, shared_s
        self.missing = set(range(chunks))
        self.queues: dict[PeerId, dict[int, None]] = {peer: {} for peer in every_s}
        self.free_at = dict.fromkeys(every_s, 0.0)
        self.link_free_at = self.now = 0.0
        self.sent = 0

    def spans(self) -> list[Span]:
        return [(chunk, chunk + 1) for chunk in sorted(self.missing)]

    def take(self, gets: list[tuple[PeerId, list[Span]]]) -> None:
        for peer, spans in gets:
            if not self.queues[peer]:
                self.free_at[peer] = max(self.free_at[peer], self.now + self.every_s[peer])
            self.queues[peer].update(
                (chunk, None) for first, stop in spans for chunk in range(first, stop)
            )

    def fetch(self, limit_s: float = 1000.0) -> float:
        """How long it takes."""
        sources = list(self.every_s)
        while self.missing and self.now < limit_s:
            self.take(self.requests.next(self.now, self.spans(), sources))
            self.take(self.requests.late(self.now, sources, PULL_S))
            self.now += 0.01
            for peer in sorted(sources, key=lambda who: self.free_at[who]):
                ready = self.queues[peer] and self.free_at[peer] <= self.now
                if not ready or self.link_free_at > self.now:
                    continue
                chunk = next(iter(self.queues[peer]))
                del self.queues[peer][chunk]
                self.free_at[peer] = self.now + self.every_s[peer]
                self.link_free_at = self.now + self.shared_s
                self.sent += 1
                if chunk in self.missing:
                    self.missing.discard(chunk)
                    self.requests.came(self.now, peer, self.spans())
        return self.now


def test_a_window_is_shared_among_sources_and_filled_where_there_is_room() -> None:
    requests = ChunkRequests(0.0, MIB)
    gets = dict(requests.next(0.0, [(0, 1000)], [A, B]))
    assert {peer: sum(b - a for a, b in spans) for peer, spans in gets.items()} == {A: 32, B: 32}
    assert requests.next(0.0, [(0, 1000)], [A, B]) == []
    fast = [chunk for first, stop in gets[B] for chunk in range(first, stop)]
    missing = [(chunk, chunk + 1) for chunk in range(1000) if chunk not in fast[:SPAN_CHUNKS]]
    for _ in range(SPAN_CHUNKS):
        requests.came(1.0, B, missing)
    assert requests.next(1.0, missing, [A, B]) == [(B, [(WINDOW_CHUNKS, WINDOW_CHUNKS + 8)])]


@pytest.mark.parametrize("silent", [1, 2, 3])
def test_what_several_sources_do_not_bring_is_asked_of_another(silent: int) -> None:
    """Two may be dead, or one of them lie, and both were asked for the same chunk."""
    sources = {PeerId(f"silent{number}"): 1e9 for number in range(silent)}
    assert Wire(6, sources | {C: 0.02}).fetch() < 10.0


@pytest.mark.parametrize("count", [1, 2, 4, 20])
def test_over_one_slow_link_sources_bring_little_twice_and_it_takes_no_longer(count: int) -> None:
    peers = [PeerId(f"p{number}") for number in range(count)]
    wire = Wire(48, dict.fromkeys(peers, 0.0), shared_s=1.0)
    assert wire.fetch() <= 48 * 1.05 + 1
    assert wire.sent <= 48 * 1.1


def test_after_a_stall_of_all_sources_waits_are_as_short_as_before() -> None:
    """A partition took half a minute: what a dead source was asked for is soon asked of another."""
    requests = ChunkRequests(0.0, 4096)
    (living, mine), (dead, its) = requests.next(0.0, [(0, 2)], [A, B])
    requests.came(30.0, living, its)
    assert (living, its) in requests.late(30.1, [A, B], PULL_S)
    requests.came(30.2, living, [])
    assert requests.next(30.2, mine, [dead]) == [(dead, mine)]
    assert (living, mine) not in requests.late(30.2 + 8 * PULL_S, [A, B], PULL_S)
    assert (living, mine) in requests.late(30.3 + 8 * PULL_S, [A, B], PULL_S)


@pytest.mark.parametrize("every_s", [0.15, 1.0, 5.0, 1e6])
def test_a_source_that_trickles_among_others_costs_seconds(every_s: float) -> None:
    wire = Wire(200, {A: every_s, B: 0.05})
    assert wire.fetch() <= 200 * 0.05 + 5.0


def test_a_lost_request_is_made_again_and_who_has_more_to_send_is_reminded() -> None:
    requests = ChunkRequests(0.0, MIB)
    requests.next(0.0, [(0, 4)], [A])
    assert requests.late(1.0, [A], PULL_S) == []
    assert requests.late(2.5, [A], PULL_S) == [(A, [(0, 4)])]
    requests.came(2.6, A, [(1, 4)])
    assert requests.late(2.6 + REMIND_S, [A], PULL_S) == [(A, [(3, 4)])]


def comes(race: Race, rate: float, until: float, have: float = 0.0) -> float | None:
    """When a rival is wanted, of a state that comes at a steady rate."""
    for step in range(int(until * 10)):
        if race.wants_rival(step / 10, int(have + rate * step / 10)):
            return step / 10
    return None


def test_a_state_that_is_here_soon_has_no_rival() -> None:
    assert comes(Race(0.0, 100), 6.0, 100 / 6) is None
    assert comes(Race(0.0, 100), 1.0, 100.0) == FIRST_S


def test_over_a_slow_link_of_ones_own_the_first_state_stays_and_is_compared_once() -> None:
    race = Race(0.0, 100)
    assert race.wants_rival(FIRST_S, 10)
    race.begin(FIRST_S, 10)
    assert race.won(FIRST_S + TRIAL_S - 0.1, 11, 1) is None
    assert race.won(FIRST_S + TRIAL_S, 11, 1) is False
    for step in range(12, 100):
        assert not race.wants_rival(float(step), step - 1)


def test_a_rival_takes_over_from_who_trickles_also_from_one_that_began_fast() -> None:
    race = Race(0.0, 100)
    assert race.wants_rival(FIRST_S, 1)
    race.begin(FIRST_S, 1)
    assert race.won(FIRST_S + TRIAL_S, 1, 8) is True
    race = Race(0.0, 1000)
    assert race.wants_rival(FIRST_S, 100)
    race.begin(FIRST_S, 100)
    assert race.won(FIRST_S + TRIAL_S, 119, 8) is False
    later = next(at for at in range(12, 1000) if race.wants_rival(float(at), 114 + at // 2))
    assert later == FIRST_S + TRIAL_S + 2 * FIRST_S
    race.begin(float(later), 130)
    assert race.won(later + TRIAL_S, 131, 8) is True


def test_a_rival_that_brings_nothing_is_none() -> None:
    race = Race(0.0, 100)
    assert race.wants_rival(FIRST_S, 0)
    race.begin(FIRST_S, 0)
    assert race.won(2 * FIRST_S - 0.1, 0, 0) is None
    assert race.won(2 * FIRST_S, 0, 0) is False
    assert race.wants_rival(2 * FIRST_S, 0)  # at once
    race.begin(2 * FIRST_S, 0)
    assert race.won(4 * FIRST_S - 0.1, 0, 0) is None, "each costs a chunk over a slow link"
    assert race.won(4 * FIRST_S, 0, 0) is False
    race.begin(50.0, 10)
    assert race.won(53.0, 12, 0) is False
    assert not race.wants_rival(54.0, 13)


def test_a_state_of_which_nothing_comes_is_compared_soon() -> None:
    assert comes(Race(0.0, 100), 0.0, 100.0) == SILENT_S
    race = Race(0.0, 100)
    assert not race.wants_rival(0.1, 5)
    assert not race.wants_rival(0.1 + SILENT_S - 0.1, 5)
    assert race.wants_rival(0.1 + SILENT_S, 5)
    race.begin(0.1 + SILENT_S, 5)
    assert race.won(0.2 + SILENT_S + TRIAL_S, 5, 90) is True


def test_a_pause_of_a_slow_link_is_none() -> None:
    """Of what came at a chunk a second; and of what took so long for a chunk while it was tried."""
    race = Race(0.0, 100)
    assert not race.wants_rival(1.0, 1)
    assert not race.wants_rival(1.0 + PAUSE - 0.1, 1)
    assert race.wants_rival(1.0 + PAUSE, 1)
    race = Race(0.0, 100)
    race.begin(SILENT_S, 0)
    assert race.won(SILENT_S + 3.0, 0, 3) is True
    after = Race(0.0, 100, 3, race.rival_each_s)
    assert not after.wants_rival(PAUSE - 0.1, 3)
    assert after.wants_rival(PAUSE, 3)
