"""Federated runs whose rounds do not wait for everybody, with the real session: who is in which
round, on which anchor, and with what weight.
"""

from __future__ import annotations

import math

import pytest
import torch
from arriving_kit import LR, SPEEDS, B, D, K, N, Seen, play, rounds_of
from torch import Tensor, nn

from atoll.collectives.arrivals import ArrivalSettings, Fading
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.optim.federated.arrivals import buffered_factor, faded, fixed_weight, mixed
from atoll.optim.model.flat import FlatVector

PERIOD = 1.0
MIXING = [
    ArrivalSettings(count=1, fading=fading)
    for fading in (Fading(0.6, "constant"), Fading(0.8, a=0.7), Fading(0.9, "hinge", 2.0, 1))
]


def settings(rounds: int, arrivals: ArrivalSettings, **more: object) -> RunSettings:
    reducer = "mean" if arrivals.period_s is None else "sum"
    outer = OuterSettings(kind="sgd", lr=0.7, momentum=0.0)
    return RunSettings(
        sync_every=K,
        rounds=rounds,
        codec="fp32",
        outer=outer,
        reducer=reducer,
        arrivals=arrivals,
        **more,
    )  # type: ignore[arg-type]


def turn(anchor: Tensor, site: int) -> Tensor:
    """anchor - parameters after a turn."""
    live = anchor.clone()
    for _ in range(K):
        live -= LR * (live - B[site])
    return anchor - live


def replayed(given: dict[int, set[int]], run: RunSettings) -> tuple[Tensor, list[tuple[int, int]]]:
    """The last anchor, by the functions that simulations are made of, from who was in which round;
    and (site, staleness) of all contributions.
    """
    anchors, bases, stale = [torch.zeros(D)], dict.fromkeys(range(N), 0), list[tuple[int, int]]()
    for round_ in sorted(given):
        total = torch.zeros(D)
        for site in given[round_]:
            behind = round_ - 1 - bases[site]
            assert run.arrivals is not None
            came = turn(anchors[bases[site]], site)
            if run.arrivals.fading is not None:
                total += (
                    anchors[-1]
                    - mixed(
                        anchors[-1], anchors[bases[site]] - came, faded(run.arrivals.fading, behind)
                    )
                ) / len(given[round_])
            elif run.arrivals.period_s is None:
                total += buffered_factor(behind) / len(given[round_]) * came
            else:
                total += fixed_weight(1 / N, K * SPEEDS[site], run.arrivals.period_s) * came
            stale.append((site, behind))
            bases[site] = round_
        anchors.append(anchors[-1] - run.outer.lr * total)
    return anchors[-1], stale


@pytest.mark.parametrize("coordinator", [False, True])
@pytest.mark.parametrize(
    "arrivals",
    [ArrivalSettings(count=2), ArrivalSettings(count=1), ArrivalSettings(period_s=PERIOD), *MIXING],
)
def test_a_run_is_what_the_formulas_make_of_who_came_when(
    arrivals: ArrivalSettings, coordinator: bool
) -> None:
    run = settings(14, arrivals, coordinator=coordinator)
    seen = play(LocalSwarm(N, settings=run, latency_s=0.005))
    given = rounds_of(seen)
    assert sorted(given) == list(range(1, 15))
    end, stale = replayed(given, run)
    for found in seen.values():
        assert found.round == 14
        assert torch.equal(found.anchor, seen[0].anchor)
    assert torch.allclose(seen[0].anchor, end, atol=1e-5)
    assert set().union(*given.values()) == set(range(N))  # the slowest is in some round
    assert max(behind for _, behind in stale) >= 2  # and its anchor was an old one
    fast, slow = (sum(who == site for who, _ in stale) for site in (0, N - 1))
    assert fast > 1.5 * slow  # nobody waits for it
    if arrivals.count is not None:
        assert all(len(who) >= arrivals.count for who in given.values())
    counted = sum(outcome.counted for found in seen.values() for outcome in found.outcomes)
    assert counted == len(stale)


class Normal(nn.Module):
    """A variance to be found, and a parameter, since a model has some."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.norm = nn.Parameter(torch.zeros(1)), nn.BatchNorm1d(1, affine=False)


def test_running_statistics_count_by_the_share_and_not_by_the_weight() -> None:
    """With FedFix a slow site's weight is above 1; what it has found of a variance counts as
    everybody's.
    """
    run, seen = settings(12, ArrivalSettings(period_s=PERIOD)), dict[int, Seen]()

    def script(member: LocalMember) -> None:
        found, model = seen.setdefault(member.index, Seen()), Normal()
        flat, batch = FlatVector(model), torch.tensor([[-1.0], [1.0]]) * (member.index + 1)
        member.open(flat.layout, flat.write_to).release()
        while len(member.members()) < N:
            member.sleep(0.05)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        attachment = attach(
            model, optimizer, member, clock=member.clock, on_round=found.outcomes.append
        )
        while not attachment.done:
            model.norm(batch)
            model.w.grad = torch.zeros(1)
            optimizer.step()
        with attachment.evaluate_anchor():
            assert model.norm.running_var is not None
            found.anchor = model.norm.running_var.clone()

    LocalSwarm(N, settings=run, latency_s=0.005).run(script, step_s=SPEEDS)
    given, variances, bases = rounds_of(seen), [1.0], dict.fromkeys(range(N), 0)
    for round_ in sorted(given):
        variance = variances[-1]
        for site in given[round_]:
            base = variances[bases[site]]
            variance -= (
                base - (0.9**K * base + (1 - 0.9**K) * 2 * (site + 1) ** 2)
            ) / N  # of each turn a fourth
            bases[site] = round_
        variances.append(variance)
    assert math.ceil(K * SPEEDS[-1] / PERIOD) == 3  # the slowest's weight is three fourths
    assert all(
        float(found.anchor) == pytest.approx(variances[-1], rel=1e-4) for found in seen.values()
    )


@pytest.mark.parametrize("when_s", [3.0 + 0.37 * step for step in range(4)])
@pytest.mark.parametrize(
    "arrivals", [ArrivalSettings(count=2), ArrivalSettings(period_s=PERIOD), MIXING[1]]
)
def test_who_is_killed_costs_the_others_no_round(arrivals: ArrivalSettings, when_s: float) -> None:
    """Node and script of the fastest, who convenes as often as any: while it trains, while it
    waits, while its round is decided; it comes back.
    """
    seen = play(
        LocalSwarm(N, settings=settings(20, arrivals), latency_s=0.02).crash_at(
            1, when_s, back_after_s=1.5
        ),
        patience=3,
    )
    given = rounds_of(seen)
    assert sorted(given) == list(range(1, 21))
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())
    assert {found.round for found in seen.values()} == {20}
    for site in (0, 2, 3):  # each turn is counted once, or was the last
        counted = [outcome.round for outcome in seen[site].outcomes if outcome.counted]
        assert len(set(counted)) == len(counted)
        assert seen[site].steps - K * len(counted) in (0, K)
        assert seen[site].dropped == K * (seen[site].steps // K - len(counted))
        assert all((site in given[round_]) == (round_ in counted) for round_ in given)
    assert any(1 in given[round_] for round_ in range(15, 21))  # it is back


def test_a_member_that_waits_for_more_to_come_trains_on_after_its_deadline_and_loses_nothing() -> (
    None
):
    """A round of two, where the second takes long: what the first does meanwhile goes on from the
    anchor that counts its contribution.
    """
    run = settings(4, ArrivalSettings(count=2), deadline_s=1.0)
    seen = play(LocalSwarm(2, settings=run, latency_s=0.005), speeds=(0.1, 1.7), patience=2)
    opened = [outcome for outcome in seen[0].outcomes if outcome.status == "open"]
    assert opened
    samples = [
        share.samples
        for outcome in seen[0].outcomes
        if outcome.counted
        for share in outcome.contributors
        if share.peer == "p0"
    ]
    assert len(samples) == 4
    assert max(samples) > K  # what was trained meanwhile
    assert sum(samples) + seen[0].dropped <= seen[0].steps
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())


@pytest.mark.slow
def test_fixed_periods_end_where_all_count_alike_and_first_come_first_served_where_the_fast_pull() -> (
    None
):
    """With one loss each, (w - b_i)²/2, the mean of the b_i is the optimum; arrivals that count
    alike end nearer to the fast ones'.
    """
    optimum = B.mean(0)
    frequency = torch.tensor([1 / speed for speed in SPEEDS])[:, None]
    by_speed = (frequency * B).sum(0) / frequency.sum()
    run = settings(60, ArrivalSettings(period_s=PERIOD))
    fixed = play(LocalSwarm(N, settings=run, latency_s=0.005))[0].anchor
    first = play(LocalSwarm(N, settings=settings(120, ArrivalSettings(count=1)), latency_s=0.005))[
        0
    ].anchor
    assert (fixed - optimum).norm() < 0.3
    assert (first - by_speed).norm() < 0.3
    assert (optimum - by_speed).norm() > 1
