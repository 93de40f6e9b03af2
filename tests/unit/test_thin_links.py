"""Members whose links are much thinner than the others': when rounds do without them."""

from __future__ import annotations

from atoll.collectives.group import Contributor, Entry, Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Ready
from atoll.collectives.round.thin import FEWEST, THIN, ThinLinks
from atoll.collectives.swarm import RunSettings
from atoll.node.session.durations import SPARE, spare_of
from atoll.optim.planning import waiting

NBYTES = (1e6, 1e6)  # of a contribution and of a result
ROUND_S = 5.0
MEMBERS = tuple(Member(PeerId(f"p{number}"), 1) for number in range(5))
FAST, SLOW = MEMBERS[:4], MEMBERS[4]


def entry(*contributors: Member, config: tuple[Member, ...] = MEMBERS) -> Entry:
    counted = tuple(Contributor(who, who.peer.encode() * 8, 1) for who in contributors)
    return Entry("log", 1, b"", b"", counted, (), (), 8, 8, "fp32", "mean", config)


def said(*rates: int) -> dict[Member, Ready]:
    """What members say of their links, in bytes/s; 0: nothing."""
    return {
        who: Ready(b"", None, 0, False, up=rate, down=rate)
        for who, rate in zip(MEMBERS, rates, strict=False)
    }


def counts(links: ThinLinks, rates: dict[Member, Ready], rounds: int) -> list[bool]:
    """Whether each of so many rounds counts the slow member, where all offer something."""
    found = list[bool]()
    for _ in range(rounds):
        found.append(SLOW not in links.out)
        there = [who for who in MEMBERS if who not in links.out]
        links.decided(entry(*there), rates, NBYTES, ROUND_S)
    return found


def test_a_thin_link_costs_the_others_no_more_than_its_part_of_the_time() -> None:
    """A contribution takes it 2 s, and the others 0.2 s for both ways: 1.8 s in every 36th round of
    5 s are a hundredth."""
    found = counts(ThinLinks(0.01), said(*(10_000_000,) * 4, 500_000), 110)
    assert [at for at, counted in enumerate(found) if counted] == [0, 36, 72, 108]


def test_links_that_differ_by_less_are_waited_for() -> None:
    near = said(*(10_000_000,) * 4, round(10_000_000 / THIN) + 1)
    assert all(counts(ThinLinks(1e-6), near, 8))
    assert not all(counts(ThinLinks(1e-6), said(*(10_000_000,) * 4, 2_500_000), 8))


def test_what_is_soon_over_is_waited_for() -> None:
    """At 100 times the rates of both, a contribution takes 20 ms: less than a hundredth of 5 s."""
    assert all(counts(ThinLinks(0.01), said(*(1_000_000_000,) * 4, 50_000_000), 8))


def test_nothing_is_known_of_links_that_nobody_measured() -> None:
    assert all(counts(ThinLinks(0.01), said(10_000_000, 0, 0, 0, 500_000), 8))
    assert all(counts(ThinLinks(0.0), said(*(10_000_000,) * 4, 500_000), 8))  # all are waited for


def test_who_has_nothing_for_a_round_keeps_what_it_said_of_its_link() -> None:
    links = ThinLinks(0.01)
    links.decided(entry(*MEMBERS), said(*(10_000_000,) * 4, 500_000), NBYTES, ROUND_S)
    links.decided(entry(*FAST), said(*(10_000_000,) * 4, 0), NBYTES, ROUND_S)
    assert links.out == {SLOW}
    links.decided(entry(*FAST, config=FAST), {}, NBYTES, ROUND_S)
    assert not links.out  # it is gone
    links.decided(entry(*FAST), said(*(10_000_000,) * 4, 500_000), NBYTES, ROUND_S)
    assert not links.out  # it is back, and was in no round yet


def test_runs_that_must_hear_all_wait_for_all() -> None:
    assert spare_of(RunSettings()) == SPARE
    assert spare_of(RunSettings(fragments=4)) == SPARE / 4
    assert spare_of(RunSettings(overlap="late", delay=4)) == 0.0
    assert spare_of(RunSettings(reducer="trimmed_mean")) == 0.0


def test_the_planner_has_the_rule_of_conveners() -> None:
    assert (waiting.THIN, waiting.FEWEST, waiting.SPARE) == (THIN, FEWEST, SPARE)
    assert waiting.thin_of([1e6, 1e6, 1e6, 2.5e5]) == [3]
    assert waiting.thin_of([1e6, 1e6, 1e6, 2.6e5]) == []
    assert waiting.thin_of([1e6, 1e5]) == []
