"""`atoll simulate` closes the rounds of a federated run as nodes do: one manifest is played by both,
in virtual time, and who is in a round, with how many steps and which weight, is compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from federated_numpy import batches
from hospitals_kit import manifest
from seeds import daily
from torch import nn

from atoll.collectives.identifiers import PeerId
from atoll.collectives.outcomes import Outcome
from atoll.collectives.swarm import RunSettings
from atoll.node.cli.simulating import _fewest
from atoll.node.local import LocalSwarm
from atoll.node.manifest import Manifest, parse_manifest
from atoll.node.session.mode_events import Unmasked
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.optim.federated.simulation import Device, Fleet, StudySettings, Task, simulate

BATCH = 32
Round = dict[int, tuple[int, int]]
"""Who is in it: inner steps, weight."""


@dataclass(frozen=True)
class Case:
    """Sites of so many examples and seconds a step; who is killed when, and back so much later."""

    federated: str
    sizes: tuple[int, ...]
    speeds: tuple[float, ...]
    deaths: tuple[tuple[int, float, float | None], ...] = ()
    more: str = ""
    rounds: int = 5


MASKED = "[secure]\nmax_weight = 1000\nreach = 4.0"
CASES = {
    "unequal sites and speeds": Case("work = { epochs = 1 }", (960, 640, 20), (1.0, 1.0, 5.0)),
    "a slow site is waited for": Case("work = { steps = 7 }", (100, 100, 100), (1.0, 3.0, 20.0)),
    "a small site works as long": Case("work = { samples = 100 }", (960, 20, 50), (1.0, 2.0, 1.5)),
    "equal weights, masked": Case(
        'work = { epochs = 2 }\nweights = "equal"', (90, 33, 200), (1.0, 2.0, 0.5), more="[secure]"
    ),
    "one of five dies, masked": Case(
        "work = { epochs = 1 }",
        (96, 64, 32, 96, 200),
        (1.0, 1.0, 2.0, 1.0, 1.0),
        ((2, 9.0, None),),
        MASKED,
    ),
    "one dies for good": Case(
        "work = { steps = 10 }", (96, 64, 96, 96), (1.0, 1.5, 1.0, 2.0), ((3, 33.0, None),)
    ),
    "one dies and is back in its round": Case(
        "work = { steps = 30 }", (96, 64, 96, 96), (1.0, 1.5, 1.0, 1.0), ((1, 57.0, 6.0),)
    ),
    "one dies and is back rounds later": Case(
        "work = { steps = 10 }",
        (96, 64, 96, 96),
        (1.0, 1.5, 1.0, 1.0),
        ((1, 17.0, 70.0),),
        rounds=9,
    ),
    "two of five die, one comes back": Case(
        "work = { epochs = 1 }",
        (320, 640, 96, 96, 200),
        (1.0, 1.0, 2.0, 1.0, 1.0),
        ((1, 27.0, None), (2, 47.0, 100.0)),
        rounds=9,
    ),
}


@dataclass(frozen=True)
class MaskedSum:
    """What its sites know of a sum whose masks are off: who is in it, what all count together, and
    each site what itself put on the ring.
    """

    members: frozenset[int]
    weight: int
    own: dict[int, int]


def by_nodes(case: Case, run: RunSettings) -> tuple[list[Round], dict[int, MaskedSum]]:
    """With the code of nodes and of scripts; of masked rounds the sums, too."""
    rounds, masked = dict[int, Round](), run.secure is not None
    sums = dict[int, MaskedSum]()

    def script(member: LocalMember) -> None:
        model, count = nn.Linear(2, 2), case.sizes[member.index]
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps, begun = 0, -1

        def heard(outcome: Outcome) -> None:
            counts = {share.peer: share.samples for share in outcome.contributors}
            if outcome.counted:
                # behind masks nobody is told it, and a site knows what it gave
                weight = counts[member.peer]
                if masked:
                    found = sums[sorted(sums)[outcome.round - 1]]  # by entries of the log
                    assert frozenset(map(swarm.names.index, counts)) == found.members
                    weight = found.own[member.index]
                rounds.setdefault(outcome.round, {})[member.index] = (steps, weight)

        attachment = attach(
            model, optimizer, member, examples=count, clock=member.clock, on_round=heard
        )
        drawn = batches(member.index, count, BATCH)
        while not attachment.done:
            if attachment.round != begun:  # also where its work was given up
                steps, begun = 0, attachment.round
            batch = next(drawn)
            steps += 1
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(torch.ones(len(batch), 2)), torch.zeros(len(batch), dtype=torch.int64)
            ).backward()
            attachment.samples(len(batch))
            optimizer.step()

    def unmasked(peer: PeerId, event: object) -> None:
        if isinstance(event, Unmasked):
            site, process = swarm.names.index(peer), swarm.peers[swarm.names.index(peer)].process
            assert process is not None
            secure: Any = process.session.pre_round
            _, given, vector, _ = secure.given
            ring = secure.vectors.words(vector, given, Random(0))
            members = frozenset(map(swarm.names.index, event.members))
            found = sums.setdefault(event.round, MaskedSum(members, event.weight, {}))
            assert (found.members, found.weight) == (members, event.weight)
            found.own[site] = int(ring[-1])

    swarm = LocalSwarm(len(case.sizes), settings=run)
    swarm.listener = unmasked
    for who, at_s, back_s in case.deaths:
        swarm = swarm.crash_at(who, at_s, back_after_s=back_s)
    swarm.run(script, step_s=case.speeds, limit_s=1e6)
    return [rounds[number] for number in sorted(rounds)], sums


def by_simulation(case: Case, read: Manifest) -> list[Round]:
    """As the command does, of the same machines."""
    assert read.work is not None
    total = sum(case.sizes)
    task = Task(
        lambda: nn.Linear(2, 2),
        torch.ones(total, 2),
        torch.zeros(total, dtype=torch.int64),
        torch.ones(4, 2),
        torch.zeros(4, dtype=torch.int64),
    )
    cuts = torch.arange(total).split(list(case.sizes))
    killed = [
        tuple(
            (at_s, math.inf if back_s is None else at_s + back_s)
            for who, at_s, back_s in case.deaths
            if who == site
        )
        for site in range(len(case.sizes))
    ]
    devices = tuple(
        Device(step_s, killed=spans) for step_s, spans in zip(case.speeds, killed, strict=True)
    )
    settings = StudySettings(
        rounds=case.rounds,
        batch=BATCH,
        work=read.work,
        even=read.work.weights == "equal",
        fewest=_fewest(read),
    )
    found = simulate(task, [cut.numpy() for cut in cuts], Fleet(devices), settings)
    assert not found.stalled
    return [
        {site: (played.steps[site], played.weights[site]) for site in played.steps}
        for played in found.rounds
    ]


@pytest.mark.parametrize("case", daily(0, CASES))
def test_both_close_a_round_for_the_same_sites(case: str) -> None:
    played = CASES[case]
    read = parse_manifest(manifest(played.federated, played.more, played.rounds), "run.toml")
    (nodes, sums), simulated = by_nodes(played, read.settings()), by_simulation(played, read)
    assert len(simulated) == played.rounds
    assert simulated == nodes
    assert len(sums) == (played.rounds if read.secure is not None else 0)
    for masked, round_ in zip((sums[number] for number in sorted(sums)), simulated, strict=False):
        assert masked.members == masked.own.keys() == round_.keys()
        assert masked.weight == sum(weight for _, weight in round_.values())
