"""Asynchronous DiLoCo in runs of the real session: rounds of a quorum with a grace window, unequal
turns (DyLU), Delayed Nesterov, FedCompass' groups; against the papers' formulas in float64, from
who was in which round.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from arriving_kit import LR, SPEEDS, B, D, K, N, Seen, play, rounds_of

from atoll.collectives.arrivals import ArrivalSettings, DynamicSteps, Fading, GraceWindow, Groups
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim.federated.arrivals import faded

ROUNDS = 16
PLAIN, FADING = Fading(1.0, "constant"), Fading(1.0, "polynomial", 0.5)
DELAYED = OuterSettings("delayed_nesterov", 0.6, 0.5, every=4)


def run_of(
    arrivals: ArrivalSettings, outer: OuterSettings = DELAYED, **more: object
) -> RunSettings:
    return RunSettings(
        sync_every=K,
        rounds=ROUNDS,
        codec="fp32",
        outer=outer,
        reducer="mean" if arrivals.groups is None else "sum",
        arrivals=arrivals,
        **more,  # type: ignore[arg-type]
    )


def by_quorum(
    quorum: int, seconds: float | None = 0.0, fading: Fading = PLAIN, least: int | None = None
) -> ArrivalSettings:
    dynamic = None if least is None else DynamicSteps(K, least)
    return ArrivalSettings(quorum, fading=fading, window=GraceWindow(seconds), dynamic=dynamic)


def counted(seen: dict[int, Seen]) -> dict[int, dict[int, int]]:
    """By round: who is in it, with how many samples, which are its inner steps here."""
    found = dict[int, dict[int, int]]()
    for each in seen.values():
        for outcome in each.outcomes:
            if outcome.contributors:
                found[outcome.round] = {
                    int(share.peer[1:]): share.samples for share in outcome.contributors
                }
    return dict(sorted(found.items()))


def delayed(lr: float, mu: float, every: int) -> Callable[[np.ndarray], np.ndarray]:
    """How far Algorithm 3 of arXiv 2401.09135 moves, with c = 0."""
    m, buffer, t = np.zeros(D), np.zeros(D), 0

    def step(g: np.ndarray) -> np.ndarray:
        nonlocal m, buffer, t
        buffer, t = buffer + g, t + 1
        if t % every:
            return lr * g / every
        m, buffer = mu * m + buffer / every, np.zeros(D)
        return lr * (mu * m + g / every)

    return step


def replayed(given: dict[int, dict[int, int]], fading: Fading) -> tuple[np.ndarray, list[int]]:
    """The last anchor: means by samples of what each changed since the anchor it began at, less
    where that is old; and all staleness."""
    anchors, bases, stale = [np.zeros(D)], dict.fromkeys(range(N), 0), list[int]()
    step = delayed(DELAYED.lr, DELAYED.momentum, DELAYED.every)
    for round_ in sorted(given):
        total = np.zeros(D)
        for site, steps in given[round_].items():
            target = B[site].double().numpy()
            base = anchors[bases[site]]
            change = (1 - (1 - LR) ** steps) * (base - target)
            behind = round_ - 1 - bases[site]
            total += (
                steps * (1 + behind) ** -(0.5 if fading.staleness == "polynomial" else 0.0) * change
            )
            stale.append(behind)
            bases[site] = round_
        anchors.append(anchors[-1] - step(total / sum(given[round_].values())))
    return anchors[-1], stale


@pytest.mark.parametrize("fading", [PLAIN, FADING])
@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize("quorum", [1, 2])
def test_a_run_is_what_the_formulas_make_of_who_came_when(
    quorum: int, least: int | None, fading: Fading
) -> None:
    run = run_of(by_quorum(quorum, fading=fading, least=least))
    seen = play(LocalSwarm(N, settings=run, latency_s=0.005))
    given = counted(seen)
    assert sorted(given) == list(range(1, ROUNDS + 1))
    rounds_of(seen)  # all say the same
    end, stale = replayed(given, fading)
    for found in seen.values():
        assert (found.round, found.dropped % K if least is None else 0) == (ROUNDS, 0)
        assert torch.equal(found.anchor, seen[0].anchor)
    assert np.allclose(seen[0].anchor.numpy(), end, atol=2e-5)
    assert max(stale) >= 2
    assert all(len(who) >= quorum for who in given.values())


def test_slow_members_make_fewer_steps_and_all_come_about_equally_often() -> None:
    plain, unequal = (
        counted(play(LocalSwarm(N, settings=run_of(by_quorum(1, least=least)), latency_s=0.005)))
        for least in (None, 1)
    )
    wanted = [max(1, math.floor(K * SPEEDS[0] / speed + 1e-9)) for speed in SPEEDS]
    turns = {site: [who[site] for who in unequal.values() if site in who] for site in range(N)}
    for site in range(N):
        assert turns[site][0] == K  # its speed is not known yet
        assert all(abs(steps - wanted[site]) <= 1 for steps in turns[site][1:]), site
    often = [sum(site in who for who in plain.values()) for site in range(N)]
    equal = [len(turns[site]) for site in range(N)]
    assert max(equal[1:]) - min(equal[1:]) < max(often[1:]) - min(often[1:])


@pytest.mark.parametrize(("seconds", "more"), [(0.5, True), (None, False)])
def test_a_round_that_has_its_quorum_is_held_open_for_others_to_come(
    seconds: float | None, more: bool
) -> None:
    """The two fastest differ by 0.18 s a turn: they meet in a window of half a second, and mostly
    not in one of a step, 0.1 s."""
    alone, held = (
        counted(play(LocalSwarm(N, settings=run_of(by_quorum(1, window)), latency_s=0.005)))
        for window in (0.0, seconds)
    )
    sizes = [sum(len(who) for who in given.values()) for given in (alone, held)]
    assert sizes[1] > sizes[0] + (6 if more else 0)
    if more:
        assert sum({0, 1} <= who.keys() for who in held.values()) > ROUNDS / 3


def test_groups_that_arrive_together_make_a_round_with_an_outer_optimizer() -> None:
    arrivals = ArrivalSettings(fading=Fading(1.0), groups=Groups(K, 5 * K, K))
    run = run_of(arrivals, OuterSettings("nesterov", 0.7, 0.3))
    seen = play(LocalSwarm(N, settings=run, latency_s=0.005))
    given = counted(seen)
    assert sorted(given) == list(range(1, ROUNDS + 1))
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())
    assert sum(len(who) == N for who in given.values()) >= 2
    optimum = B.mean(0)
    assert float((seen[0].anchor - optimum).norm()) < 0.5 * float(optimum.norm())


@pytest.mark.parametrize("when_s", [3.0 + 0.31 * step for step in range(3)])
def test_who_is_killed_costs_the_others_no_round(when_s: float) -> None:
    arrivals = by_quorum(2, None, least=1)
    seen = play(
        LocalSwarm(N, settings=run_of(arrivals), latency_s=0.02).crash_at(
            1, when_s, back_after_s=1.5
        ),
        patience=3,
    )
    assert sorted(rounds_of(seen)) == list(range(1, ROUNDS + 1))
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())
    for site in (0, 2, 3):
        rounds = [outcome.round for outcome in seen[site].outcomes if outcome.counted]
        assert len(set(rounds)) == len(rounds)


def test_what_is_stale_never_counts_more() -> None:
    assert faded(FADING, 3) == 0.5
    assert faded(PLAIN, 1000) == 1.0
