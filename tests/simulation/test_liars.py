"""Swarms in which members lie, over the production code of the others: no two histories, nobody
honest accused, rounds go on.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from kits.rounds.injection import FaultKind
from kits.rounds.liars import Lie
from kits.rounds.lying_plants import DEAR_PLANTS, LYING_PLANTS
from kits.rounds.swarm import Options, SimSwarm, run_seed
from seeds import seeds

from atoll.collectives.errors import LocalProtocolError

FAULTS: tuple[FaultKind, ...] = ("crash", "freeze", "partition", "isolate", "cut", "storm", "leave")
WITHHOLDING: tuple[tuple[Lie, ...], ...] = (
    ("hoard",),
    ("slander",),
    ("starve",),
    ("hoard", "slander"),
    ("hoard", "starve"),
)
SOON = {
    "justification-not-checked",
    "contributors-not-checked",
    "configuration-not-checked",
    "bytes-not-bound",
    "contributor-struck-out",
    "contributor-added",
    "owners-not-asked",
    "shares-not-checked",
    "sums-not-witnessed",
    "one-voice-is-enough",
    "signatures-not-verified",
    "vote-without-echoes",
    "majority-decides",
}


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_one_of_few_members_lies(seed: int) -> None:
    assert run_seed(seed, Options(peers=(4, 6), rounds=6, faults=FAULTS, lying=1)).problem == ""


@pytest.mark.parametrize("seed", seeds(1, 12))
def test_two_of_many_members_lie(seed: int) -> None:
    assert run_seed(seed, Options(peers=(7, 8), rounds=5, faults=FAULTS, lying=2)).problem == ""


@pytest.mark.parametrize(
    ("lie", "told", "found"),
    [
        ("equivocate", "lie: another entry", "proof of two for atoll/propose/2"),
        ("twice", "lie: two values", ""),
        ("promise", "lie: pledge", ""),
        ("withhold", "lie: nothing said", ""),
        ("evict", "lie: another entry", "refused"),
        ("forge", "lie: another entry", "refused"),
        ("turns", "lie: turn", ""),
        ("plans", "lie: plan", ""),
        ("replay", "lie: replay", ""),
        ("garble", "lie: signature", "refused"),
        ("subset", "lie: contributors", "refused"),
        ("superset", "lie: contributors", "refused"),
        ("weight", "lie: weight", ""),
        ("hide", "lie: plan hidden", "refused"),
        ("hoard", "lie: result withheld", ""),
        ("slander", "lie: report", ""),
        ("starve", "lie: contribution withheld", ""),
        ("lives", "lie: another life", ""),
        ("bend", "lie: bent", "refused"),
        ("drip", "lie: record dripped", ""),
        ("choose", "lie: contribution not planned", ""),
        ("mute", "lie: mute", ""),
        ("own", "lie: owner of everything", ""),
        ("add", "lie: sum", "proof of a wrong sum"),
        ("missum", "lie: statement", "proof of a wrong sum"),
        ("frame", "lie: statement", "proof of inputs that nobody gave"),
        ("two", "lie: two signed", "proof of two for atoll/given/1"),
        ("unsigned", "lie: nothing signed", ""),
    ],
)
def test_each_lie_alone(lie: Lie, told: str, found: str) -> None:
    stats: dict[str, int] = {}
    lies: tuple[Lie, ...] = (
        ("equivocate", "twice")
        if lie == "twice"
        else ("equivocate", "promise")
        if lie == "promise"
        else (lie,)
    )
    for seed in range(12):
        verdict = run_seed(seed, Options(peers=(4, 5), rounds=5, faults=(), lying=1, lies=lies))
        assert verdict.problem == ""
        for what, count in verdict.stats.items():
            stats[what] = stats.get(what, 0) + count
        if stats.get(told) and (not found or stats.get(found)):
            return
    pytest.fail(f"{lie} was never told, or not found out: {stats}")


def costs(*lies: Lie) -> tuple[float, float]:
    """Virtual seconds and contributions left out, an entry, with one liar among 4 to 6 members.
    `scripts/bench/bench_lies.py` measures more seeds, and each lie.
    """
    options = Options(peers=(4, 6), rounds=20, faults=(), plan="butterfly", lying=1, lies=lies)
    verdicts = [run_seed(seed, options) for seed in range(4)]
    assert [verdict.problem for verdict in verdicts] == [""] * len(verdicts)
    entries = sum(verdict.rounds for verdict in verdicts)
    left_out = sum(verdict.stats.get("contribution left out", 0) for verdict in verdicts)
    return sum(verdict.virtual_s for verdict in verdicts) / entries, left_out / entries


@pytest.mark.slow
@pytest.mark.rota(7)
def test_who_withholds_or_reports_falsely_costs_little_in_the_mean() -> None:
    usual_s, _ = costs()
    for lies in WITHHOLDING:
        entry_s, left_out = costs(*lies)
        assert entry_s <= 2 * usual_s, lies
        assert left_out <= 1, lies


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize(
    ("lie", "plant"), [("hoard", "owners-forgotten"), ("starve", "givers-forgotten")]
)
def test_who_is_not_remembered_costs_more(lie: Lie, plant: str) -> None:
    usual_s, _ = costs()
    remembered_s, _ = costs(lie)
    with DEAR_PLANTS[plant]().planted():
        forgotten_s, _ = costs(lie)
    assert forgotten_s - usual_s > 1.3 * (remembered_s - usual_s)


def empties(seed: int) -> tuple[int, int, int]:
    """Empty entries with which the liar comes in, empty entries, of the honest member that has
    most, and how many members there are.
    """
    swarm = SimSwarm(seed, Options(peers=(4, 6), rounds=12, faults=(), lying=1, lies=("lives",)))
    assert swarm.run().problem == ""
    of_liars, all_ = 0, 0
    for watch in swarm.watches:
        entries = [certified.entry for certified in watch.checker.entries]
        came = [
            {who.peer for who in set(entry.next_config) - set(before.next_config)}
            for before, entry in pairwise(entries)
            if not entry.contributors
        ]
        of_liars = max(of_liars, sum(not swarm.liars.isdisjoint(peers) for peers in came))
        all_ = max(all_, sum(not entry.contributors for entry in entries[1:]))
    return of_liars, all_, len(swarm.names)


@pytest.mark.parametrize("seed", [1, 3, 7])
def test_who_asks_in_under_ever_later_lives_makes_few_empty_entries(seed: int) -> None:
    of_liars, all_, members = empties(seed)
    assert of_liars <= 3
    assert all_ <= members + 2


def test_lives_that_cost_nothing_make_many_empty_entries() -> None:
    with DEAR_PLANTS["lives-cost-nothing"]().planted():
        of_liars, all_, members = empties(1)
    assert of_liars > 3
    assert all_ > members + 2


def apart_s(seed: int) -> float | None:
    """Virtual seconds until three honest members of four decide, one of which is some ballots ahead
    of the others and has less patience, since its last reduction was faster; None where they do not
    in 200 s. The fourth is dead.
    """
    options = Options(peers=(4, 4), faults=(), plan="butterfly", fragments=1, lying=1, lies=())
    swarm = SimSwarm(seed, options)
    swarm._start()
    world = swarm.world
    world.run(until=6.0)
    (liar,) = swarm.liars
    swarm.kill(swarm.members[liar], power=False)
    processes = [member.process for peer, member in swarm.members.items() if peer != liar]
    machines = [process.session.machine for process in processes if process is not None]
    first, *rest = honest = [machine for machine in machines if machine is not None]

    def planned() -> bool:
        opened = [machine.open for machine in honest]
        return len({machine.round for machine in honest}) == 1 and all(
            each.plan is not None and not each.decided and not each.reduced for each in opened
        )

    assert world.run(until=30.0, stop=planned)
    round_, since, first.bulk_s = first.round, world.now, 0.0
    first.enter(since, next(b for b in range(4, 8) if first.convener_of(b) == first.me))
    for machine in rest:
        machine.bulk_s = 5.0
        machine.enter(since, 1)
    for machine in honest:
        machine.open.reduced = None
    together = world.run(
        until=since + 200.0, stop=lambda: all(machine.round > round_ for machine in honest)
    )
    return world.now - since if together else None


@pytest.mark.slow
@pytest.mark.rota(7)
def test_members_that_are_ballots_apart_come_together() -> None:
    """How far apart they are when all wait differs by the seed: the planted bug shows in some."""
    assert None not in [apart_s(seed) for seed in (7, 20)]
    with DEAR_PLANTS["nobody-waits-for-a-quorum"]().planted():
        assert any(apart_s(seed) is None for seed in (7, 20, 10, 17))


def test_nobody_is_accused_where_nobody_lies() -> None:
    verdict = run_seed(3, Options(peers=(5, 5), rounds=8, faults=(), lying=1, lies=()))
    assert (
        verdict.problem,
        verdict.stats.get("refused"),
        verdict.stats.get("votes above ballot 0"),
    ) == ("", None, None)


def found(plant: str, seed: int, faults: tuple[FaultKind, ...]) -> bool:
    try:
        return (
            run_seed(
                seed, Options(rounds=6, faults=faults, patience_s=40.0), LYING_PLANTS[plant]()
            ).problem
            != ""
        )
    except LocalProtocolError:  # its own proposal is refused at home
        return True


@pytest.mark.parametrize("plant", sorted(SOON))
def test_a_planted_bug_is_found(plant: str) -> None:
    assert any(found(plant, seed, ()) for seed in range(40))


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("plant", sorted(LYING_PLANTS.keys() - SOON))
def test_a_planted_bug_that_shows_late_is_found(plant: str) -> None:
    assert any(found(plant, seed, ("crash",)) for seed in range(200))
