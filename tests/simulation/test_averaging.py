"""Averages in groups among several members in virtual time: the same bits in a group, the mean
where all are counted, honesty where not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kits.rounds.averages import simulate_grid
from seeds import daily

from atoll.collectives import api
from atoll.collectives.averaging import Averaged, average, drawn_error, expected_error
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember

P = [PeerId(f"p{index}") for index in range(10)]


def play(
    count: int,
    body: Callable[[LocalMember], Any],
    arrange: Callable[[LocalSwarm], object] = lambda swarm: None,
) -> list[Any]:
    """``body`` at every member from virtual second 10 on, when all are members, until all have
    returned.
    """
    ended = set[int]()
    swarm = LocalSwarm(count, settings=RunSettings(codec="fp32"))
    arrange(swarm)

    def script(member: Any) -> Any:
        api.enter(member)
        while len(member.members()) < count:
            member.sleep(0.1)
        member.sleep(10.0 - member.clock())
        try:
            return body(member)
        finally:
            ended.add(member.index)
            while not ended >= {peer.index for peer in swarm.peers if peer.process is not None}:
                member.sleep(0.5)

    return swarm.run(script, limit_s=600.0)


def callers(averaged: Averaged) -> list[list[int]]:
    return [[int(share.peer[1:]) for share in outcome.contributors] for outcome in averaged.steps]


@pytest.mark.parametrize(
    ("count", "options", "steps"),
    [
        (1, {}, 2),
        (4, {}, 2),
        (6, {}, 2),
        (6, {"dims": (3, 2)}, 2),
        (8, {"dims": 3}, 3),
        (8, {"plan": "pairwise"}, 3),
        (4, {"plan": "pairwise"}, 2),
        (1, {"plan": "pairwise", "rounds": 2}, 2),
    ],
)
def test_a_full_grid_gives_everybody_the_mean_of_all(
    count: int, options: dict[str, Any], steps: int
) -> None:
    def body(member: LocalMember) -> tuple[Averaged, torch.Tensor]:
        flat = torch.arange(5.0) + 24 * member.index
        return average(member, flat, op_id="a", **options).wait(), flat

    results = play(count, body)
    for averaged, flat in results:
        assert (
            averaged.status,
            averaged.members,
            averaged.weight,
            averaged.exact,
            averaged.residual,
        ) == (
            "committed",
            count,
            count,
            True,
            0.0,
        )
        assert len(averaged.steps) == steps
        assert all(outcome.counted for outcome in averaged.steps)
        assert torch.allclose(flat, torch.arange(5.0) + 12 * (count - 1))
    for index, (averaged, _) in enumerate(results):
        for step, outcome in enumerate(averaged.steps):
            assert P[index] in [share.peer for share in outcome.contributors]
            for share in outcome.contributors:  # all of a group tell of the same
                assert (
                    results[int(share.peer[1:])][0].steps[step].contributors == outcome.contributors
                )


@pytest.mark.parametrize("options", [{}, {"plan": "pairwise"}])
def test_weights_are_carried_along(options: dict[str, Any]) -> None:
    weights = [1, 2, 3, 10]

    def body(member: LocalMember) -> tuple[Averaged, float]:
        flat = torch.full((3,), float(member.index))
        return average(
            member, flat, op_id="a", weight=weights[member.index], **options
        ).wait(), flat[0].item()

    for averaged, value in play(4, body):
        assert (averaged.weight, averaged.exact, averaged.residual) == (16, False, None)
        assert value == pytest.approx((2 + 6 + 30) / 16)


def test_a_grid_with_empty_places_says_what_each_result_lacks() -> None:
    """Five on 3 x 2: p4 is alone in its row; the second column has no place for it."""

    def body(member: LocalMember) -> tuple[Averaged, float]:
        flat = torch.full((3,), float(2**member.index))
        return average(member, flat, op_id="a").wait(), flat[0].item()

    results = play(5, body)
    for index in (0, 2, 4):
        assert (results[index][0].exact, results[index][0].weight, results[index][1]) == (
            True,
            5,
            pytest.approx(31 / 5),
        )
    for index in (1, 3):
        assert (results[index][0].exact, results[index][0].weight, results[index][1]) == (
            False,
            4,
            15 / 4,
        )
        assert results[index][0].residual == drawn_error(4, 5) == 0.25


def test_who_does_not_call_is_missing_from_the_mean_and_from_nothing_else() -> None:
    def body(member: LocalMember) -> tuple[Averaged, float] | None:
        if member.index == 4:
            return None
        flat = torch.full((3,), float(2**member.index))
        return average(member, flat, op_id="a", dims=(3, 3)).wait(), flat[0].item()

    results = play(9, body)
    for index in (index for index in range(9) if index != 4):
        averaged, value = results[index]
        without_row = index % 3 == 1  # its column has nobody who carries the middle row
        counted = [0, 1, 2, 6, 7, 8] if without_row else [0, 1, 2, 3, 5, 6, 7, 8]
        assert (averaged.weight, averaged.exact) == (len(counted), False)
        assert value == pytest.approx(sum(2**other for other in counted) / len(counted))
        assert averaged.residual == drawn_error(len(counted), 9)


@pytest.mark.parametrize("after_s", daily(2, (0.03, 0.09, 0.005, 0.06, 0.15)))
@pytest.mark.parametrize("victim", [0, 4])
def test_a_member_lost_under_way_costs_its_groups_only(victim: int, after_s: float) -> None:
    """Whenever it dies: what each result says it stands for is what is in it, and groups hold the
    same bits.
    """

    def body(member: LocalMember) -> tuple[Averaged, torch.Tensor]:
        flat = torch.full((50_000,), float(2**member.index))
        return average(member, flat, op_id="a", dims=(3, 3)).wait(), flat

    results = play(9, body, lambda swarm: swarm.crash_at(victim, 10.0 + after_s))
    row, column = victim // 3, victim % 3
    for index in (index for index in range(9) if index != victim):
        averaged, flat = results[index]
        total = flat[0].item() * averaged.weight
        held = [other for other in range(9) if round(total) >> other & 1]
        assert total == pytest.approx(round(total))
        assert (averaged.status, averaged.weight, averaged.exact) == (
            "committed",
            len(held),
            len(held) == 9,
        )
        missing = set(range(9)) - set(held)
        assert missing <= ({victim} if index % 3 != column else {3 * row, 3 * row + 1, 3 * row + 2})
        for other in callers(averaged)[-1]:
            if other != victim:
                assert torch.equal(results[other][1], flat)


def test_a_pair_that_lost_a_member_goes_on_with_the_next_step_before_its_deadline() -> None:
    def body(member: LocalMember) -> tuple[Averaged, float, float]:
        flat = torch.full((3,), float(2**member.index))
        averaged = average(member, flat, op_id="a", plan="pairwise", deadline_s=300.0).wait()
        return averaged, flat[0].item(), member.clock()

    for victim in range(4):
        results = play(4, body, lambda swarm, victim=victim: swarm.crash_at(victim, 10.0))
        for index in (index for index in range(4) if index != victim):
            averaged, value, at = results[index]
            assert averaged.status == "committed"
            assert at < 25.0
            assert value * averaged.weight == pytest.approx(
                sum(2**other for other in range(4) if round(value * averaged.weight) >> other & 1)
            )
            assert averaged.exact is False


def test_callers_under_different_configurations_come_together() -> None:
    """A fifth member joins; the organiser knows it first and calls, and so do the others, which
    have not heard of it yet.
    """
    seen = dict[int, int]()

    def script(member: Any) -> Any:
        api.enter(member)
        if member.index == 4:
            return member.sleep(30.0)

        def config() -> int:
            return len(member._node().session.machine.config)

        while (config() < 5) if member.index == 0 else (0 not in seen):
            member.sleep(0.002)
        seen[member.index] = config()
        flat = torch.full((3,), 2.0**member.index)
        return average(member, flat, op_id="a", dims=1).wait(), flat[0].item()

    results = (
        LocalSwarm(5, settings=RunSettings(codec="fp32"), latency_s=0.05)
        .join_at(4, 8.0)
        .run(script, limit_s=100.0)
    )
    assert seen[0] == 5
    assert 4 in seen.values()
    for averaged, value in results[:4]:
        assert (averaged.members, averaged.weight, value, averaged.exact) == (5, 4, 15 / 4, False)


def test_random_pairs_come_as_near_as_they_say() -> None:
    def body(member: LocalMember) -> tuple[Averaged, torch.Tensor]:
        flat = torch.randn(4000, generator=torch.Generator().manual_seed(member.index))
        return average(member, flat, op_id="a", plan="pairwise", rounds=5).wait(), flat

    results = play(6, body)
    given = torch.stack(
        [torch.randn(4000, generator=torch.Generator().manual_seed(index)) for index in range(6)]
    )
    averaged = results[0][0]
    assert (averaged.weight, averaged.exact, averaged.residual) == (
        None,
        False,
        pytest.approx(math.sqrt((2 / 5) ** 5)),
    )
    held = torch.stack([flat for _, flat in results])
    assert torch.allclose(
        held.mean(0), given.mean(0), atol=1e-6
    )  # pairs keep the mean of the swarm
    assert (held - given.mean(0)).square().mean().sqrt() < 0.5 * given.std()


def test_gossip_draws_pairs_where_a_hypercube_could_be_had() -> None:
    """Eight averages of one pair each among four members: the pairs change, the mean stays."""

    def body(member: LocalMember) -> list[tuple[Averaged, float]]:
        flat, seen = torch.full((3,), float(member.index)), []
        for step in range(8):
            averaged = average(member, flat, op_id=f"g{step}", plan="gossip", rounds=1).wait()
            seen.append((averaged, flat[0].item()))
        return seen

    results = play(4, body)
    partners = [callers(seen[0])[0] for seen in results[0]]
    assert all(len(pair) == 2 and 0 in pair for pair in partners)
    assert len(set(map(tuple, partners))) > 1
    for step in range(8):
        assert sum(result[step][1] for result in results) == 6.0
        averaged = results[0][step][0]
        assert (averaged.weight, averaged.exact, averaged.residual) == (
            None,
            False,
            pytest.approx(math.sqrt(1 / 3)),
        )


def test_pairs_that_miss_somebody_do_not_say_how_near_they_come() -> None:
    """Two members, more rounds than a hypercube has: p1 never calls, and what p0 holds is its own."""

    def body(member: LocalMember) -> Averaged | None:
        return (
            average(member, torch.ones(3), op_id="a", plan="pairwise", rounds=2).wait()
            if member.index == 0
            else None
        )

    averaged = play(2, body)[0]
    assert callers(averaged) == [[0], [0]]
    assert (averaged.status, averaged.weight, averaged.exact, averaged.residual) == (
        "committed",
        None,
        False,
        None,
    )


def test_handles_look_wait_and_cancel() -> None:
    def body(member: LocalMember) -> None:
        flat = torch.full((3,), float(member.index))
        pending = average(member, flat, op_id="looked at")
        assert pending.wait(0.0).status == "open"
        while not pending.done():
            member.sleep(0.01)
        assert flat.tolist() == [1.5] * 3  # written by `done` as by `wait`
        averaged = pending.wait(0.0)
        assert (averaged.status, averaged.exact, flat.tolist(), pending.wait()) == (
            "committed",
            True,
            [1.5] * 3,
            averaged,
        )
        cancelled = average(member, flat, op_id="cancelled")
        cancelled.cancel()
        cancelled.cancel()
        assert cancelled.done()
        assert (cancelled.wait().status, flat.tolist()) == ("open", [1.5] * 3)
        with pytest.raises(LocalProtocolError, match="was called already"):
            average(member, flat, op_id="looked at")

    play(4, body)


def test_arguments_that_cannot_be_are_typed_errors() -> None:
    def body(member: LocalMember) -> None:
        flat = torch.ones(4)
        for options in (
            {"plan": "ring"},
            {"dims": 0},
            {"dims": 9},
            {"dims": (1, 1)},
            {"dims": 2, "plan": "pairwise"},
            {"rounds": 2},
            {"plan": "pairwise", "rounds": 17},
            {"weight": 0},
            {"weight": 1 << 24},
            {"op_id": "x" * 63},
            {"op_id": None},
            {"dims": 2.0},
            {"dims": (1.5, 2)},
            {"dims": "ab"},
            {"plan": "pairwise", "rounds": 1.5},
            {"deadline_s": "soon"},
            {"deadline_s": None},
        ):
            with pytest.raises(LocalProtocolError):
                average(member, flat, **{"op_id": "x", **options})
        with pytest.raises(LocalProtocolError, match="non-empty float32"):
            average(member, flat.double(), op_id="x")
        assert average(member, flat, op_id="x").wait().status == "committed"

    play(2, body)


def test_nan_is_refused_at_its_source_and_the_others_go_on() -> None:
    def body(member: LocalMember) -> tuple[Averaged, list[float]]:
        flat = torch.full((3,), float("nan") if member.index == 3 else float(member.index))
        return average(member, flat, op_id="a").wait(), flat.tolist()

    results = play(4, body)
    assert results[3][0].status == "open"
    assert "NaN" in results[3][0].steps[0].reason
    for index in range(3):
        averaged, flat = results[index]
        assert averaged.status == "committed"
        assert all(math.isfinite(value) for value in flat)
        assert not averaged.exact


@pytest.mark.slow
def test_a_swarm_of_36_errs_under_churn_as_predicted_and_as_it_says() -> None:
    verdict = simulate_grid(36, churn=0.05, rounds=2, seed=1)
    assert verdict.killed > 2
    assert (verdict.dims, verdict.split, verdict.largest_degree) == ((6, 6), 0, 10)
    assert (
        verdict.predicted
        == pytest.approx(expected_error(36, (6, 6), churn=0.05))
        == pytest.approx(0.0689, abs=1e-4)
    )
    assert 0 < verdict.seen < 1.4 * verdict.predicted
    assert verdict.seen == pytest.approx(verdict.told, rel=0.3)
    calm = simulate_grid(9, churn=0.0, rounds=1)
    assert (calm.exact, calm.results, calm.told) == (9, 9, 0.0)
    assert calm.seen < 1e-6


@pytest.mark.parametrize("plan", ["grid", "gossip"])
def test_who_comes_late_keeps_its_own_value_in_the_mean(plan: Any) -> None:
    """p2 calls when the others have decided without it: what it holds then counts its own, too."""
    how: dict[str, Any] = {"dims": 1} if plan == "grid" else {"plan": "gossip", "rounds": 1}
    count = 3 if plan == "grid" else 2

    def body(member: LocalMember) -> tuple[Averaged, float]:
        late = member.index == count - 1
        member.sleep(40.0 if late else 0.0)
        flat = torch.full((5,), 3.0 * member.index)
        return average(member, flat, op_id="a", **how).wait(), flat[0].item()

    played = play(count, body)
    averaged, value = played[-1]
    mine, theirs = 3.0 * (count - 1), sum(3.0 * index for index in range(count - 1))
    assert (averaged.status, averaged.steps[0].counted) == ("committed", False)
    assert value == pytest.approx((theirs + mine) / count)
    assert callers(averaged) == [list(range(count - 1))]
    assert played[0][1] == theirs / (count - 1)
