"""Averages of a large swarm on a grid, under churn: what they err, beside what
`collectives.averaging` predicts.

A `LocalSwarm`: the real sessions, operations and data planes of all members. Each round is an
average of fresh random values; at the beginning of each step, or in the middle of it, some members
are killed, node and script. They come back, from their disks, before the next round.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from random import Random
from typing import Any

import torch
from torch import Tensor

from atoll.collectives import api
from atoll.collectives.averaging import Averaged, average, expected_error
from atoll.collectives.groups import grid_dims
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import Timing
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm

TIMING = Timing(
    pull_s=0.25, heartbeat_s=1.0, detect_s=3.0, revise_s=3.0, takeover_s=3.5, fetch_s=1.0
)
"""Heartbeats are what a simulation of n members costs: n squared of them in every interval."""
BEGIN_S = 20.0  # by then all have joined
# longer than the grace for a member that does not call, and than to find out that one is dead
STEP_S = 9.0
BACK_S = 4.0  # what was killed is back so long before the next round


@dataclass(frozen=True, slots=True)
class GridVerdict:
    """``seen`` and ``predicted``: root mean square distance of the members' results from the mean
    of all members' values, in standard deviations of these; for each round, and for all. ``told``:
    what the results themselves say that they err."""

    members: int
    dims: tuple[int, ...]
    churn: float
    predicted: float
    seen: float
    told: float
    by_round: tuple[float, ...]
    killed: int
    results: int
    exact: int
    split: int
    """Members that hold other bits than another one of the same group of the last step: there must
    be none.
    """
    largest_degree: int
    """With how many others a member exchanged values, at most, from the first round on."""
    virtual_s: float


def values_of(seed: int, round_: int, index: int, numel: int) -> Tensor:
    """What a member gives: float32 (numel,)."""
    return torch.randn(
        numel, generator=torch.Generator().manual_seed((seed * 1000 + round_) * 1000 + index)
    )


def simulate_grid(
    members: int,
    *,
    churn: float,
    rounds: int,
    seed: int = 0,
    dims: tuple[int, ...] | None = None,
    numel: int = 64,
) -> GridVerdict:
    """Play it. Deterministic."""
    sizes = dims or grid_dims(members)
    swarm = LocalSwarm(
        members, settings=RunSettings(codec="fp32"), seed=seed, jitter_s=0.01, timing=TIMING
    )
    killed, span = (
        _arrange_churn(swarm, len(sizes), rounds, churn, Random(f"grid/{seed}")),
        len(sizes) * STEP_S + BACK_S,
    )
    found = [dict[int, tuple[Averaged, Tensor]]() for _ in range(rounds)]
    met = _watch(swarm)

    def script(member: Any) -> None:
        api.enter(member)
        while len(member.members()) < members:
            member.sleep(1.0)
        for round_ in range(rounds):
            began = BEGIN_S + round_ * span
            if member.clock() > began:
                continue
            member.sleep(began - member.clock())
            flat = values_of(seed, round_, member.index, numel)
            handle = average(
                member, flat, op_id=f"round {round_}", dims=dims, deadline_s=STEP_S * len(sizes)
            )
            for step in range(1, len(sizes) + 1):
                member.sleep(began + step * STEP_S - member.clock())
                handle.done()
            found[round_][member.index] = handle.wait(), flat
        member.sleep(
            BEGIN_S + rounds * span - member.clock()
        )  # all stay to the end: nobody's script is missed

    swarm.run(script, limit_s=BEGIN_S + rounds * span + 60.0)
    return _judge(swarm, found, seed, numel, sizes, churn, killed, met)


def _arrange_churn(swarm: LocalSwarm, steps: int, rounds: int, churn: float, rng: Random) -> int:
    killed, span = 0, steps * STEP_S + BACK_S
    for round_ in range(rounds):
        began = BEGIN_S + round_ * span
        for index in range(len(swarm.names)):
            step = next((step for step in range(steps) if rng.random() < churn), None)
            if step is not None:
                when, killed = began + step * STEP_S + rng.uniform(-0.05, 0.1), killed + 1
                swarm.crash_at(
                    index, when, back_after_s=began + span - BACK_S + rng.uniform(0.0, 0.5) - when
                )
    return killed


def _watch(swarm: LocalSwarm) -> dict[PeerId, set[PeerId]]:
    met = {peer: set[PeerId]() for peer in swarm.names}

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: object) -> bool:
        if channel == "record" and swarm.now >= BEGIN_S - BACK_S:
            met[sender].add(receiver)
            met[receiver].add(sender)
        return False

    swarm.network.tap = tap
    return met


def _judge(
    swarm: LocalSwarm,
    found: list[dict[int, tuple[Averaged, Tensor]]],
    seed: int,
    numel: int,
    dims: tuple[int, ...],
    churn: float,
    killed: int,
    met: dict[PeerId, set[PeerId]],
) -> GridVerdict:
    members, squares, told, split = len(swarm.names), list[float](), list[float](), 0
    for round_, results in enumerate(found):
        given = torch.stack([values_of(seed, round_, index, numel) for index in range(members)])
        spread, bits = given.var(0, correction=0).mean(), dict[tuple[PeerId, ...], bytes]()
        errors = [(flat - given.mean(0)).square().mean() / spread for _, flat in results.values()]
        squares.append(float(torch.stack(errors).mean()))
        told.extend((averaged.residual or 0.0) ** 2 for averaged, _ in results.values())
        for averaged, flat in results.values():
            if averaged.steps[-1].status == "committed":
                group = tuple(share.peer for share in averaged.steps[-1].contributors)
                split += bits.setdefault(group, flat.numpy().tobytes()) != flat.numpy().tobytes()
    judged = [averaged for results in found for averaged, _ in results.values()]
    return GridVerdict(
        members,
        dims,
        churn,
        expected_error(members, dims, churn=churn),
        sqrt(sum(squares) / len(squares)),
        sqrt(sum(told) / len(told)),
        tuple(sqrt(square) for square in squares),
        killed,
        len(judged),
        sum(averaged.exact for averaged in judged),
        split,
        max(map(len, met.values())),
        swarm.now,
    )
