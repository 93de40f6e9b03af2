"""Runs in virtual time whose rounds do not wait for everybody, and what a member saw of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Outcome
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

N, D, K, LR = 4, 5, 6, 0.1
B = torch.randn(N, D, generator=torch.Generator().manual_seed(3)) * 3
SPEEDS = (0.1, 0.13, 0.29, 0.41)  # seconds a step


@dataclass
class Seen:
    """Outcomes, and the newest anchor in the end."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    anchor: Tensor = field(default_factory=lambda: torch.zeros(0))
    round: int = 0
    dropped: int = 0
    steps: int = 0
    waited_s: float = 0.0
    unsent: int = 0
    opened: int = 0
    at: list[int] = field(default_factory=list[int])  # steps made before each outcome


def play(swarm: LocalSwarm, speeds: Sequence[float] = SPEEDS, patience: int = N) -> dict[int, Seen]:
    """Every site trains on (w - b_i)²/2 to the end of the run, from when all are members."""
    seen = dict[int, Seen]()

    def script(member: LocalMember) -> None:
        found, model = (
            seen.setdefault(member.index, Seen()),
            nn.ParameterDict({"w": nn.Parameter(torch.zeros(D))}),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        member.open(make_layout([("w", (D,))]), lambda flat: flat.zero_()).release()
        while len(member.members()) < patience:
            member.sleep(0.05)
        attachment = attach(
            model, optimizer, member, clock=member.clock, on_round=found.outcomes.append
        )
        while not attachment.done:
            optimizer.zero_grad()
            ((model["w"] - B[member.index]) ** 2 / 2).sum().backward()
            optimizer.step()
        with attachment.evaluate_anchor() as view:
            found.anchor, found.round = model["w"].detach().clone(), view.round
        found.dropped, found.steps = attachment.stats["samples_dropped"], attachment.stats["steps"]

    swarm.run(script, step_s=speeds)
    return seen


def rounds_of(seen: dict[int, Seen]) -> dict[int, set[int]]:
    """Who is in each round; all that saw it must say the same."""
    given = dict[int, set[int]]()
    for found in seen.values():
        for outcome in filter(lambda each: each.contributors, found.outcomes):
            who = {int(share.peer[1:]) for share in outcome.contributors}
            assert given.setdefault(outcome.round, who) == who
    return given
