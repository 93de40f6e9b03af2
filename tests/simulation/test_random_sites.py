"""Federated runs that are drawn, with sites that are killed and come back, in virtual time: each
comes to an end, and nobody has spent less privacy than the log has contributions of it.
`scripts/check_sites.py` does the same with real nodes, and fresh keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
from federated_numpy import batches
from hospitals_kit import manifest
from seeds import daily
from torch import nn

from atoll.collectives.swarm import PrivacySettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest import parse_manifest
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.security.privacy.budget import most_rounds

TERMS = PrivacySettings(noise=3.0, clip=1.0, delta=1e-5, stop_at_epsilon=4.0)
ALLOWED, BATCH = most_rounds(TERMS), 16


@dataclass(frozen=True)
class DrawnRun:
    """``deaths``: site, when, back how much later."""

    text: str
    rounds: int
    private: bool
    examples: list[int]
    speeds: list[float]
    deaths: list[tuple[int, float, float]]


def drawn(seed: int) -> DrawnRun:
    rng = Random(f"random sites {seed}")
    sites, kind = rng.choice([3, 3, 4, 5]), rng.choice(["open", "masked", "private", "private"])
    weights = rng.choice(["examples", "equal"])
    work = rng.choice(["{ epochs = 1 }", "{ epochs = 2 }", "{ steps = 6 }", "{ samples = 70 }"])
    needed = 1 if kind == "open" else 3
    sample = rng.choice([None, max(needed, sites - 1)]) if sites > needed else None
    rounds, more = rng.randint(3, 8), ""
    if kind != "open":
        threshold = rng.choice([3, sites]) if sample is None else 3
        heavy = "max_weight = 1000\n" if kind == "masked" and weights == "examples" else ""
        far = "reach = 64.0\n" if kind == "masked" else ""  # two epochs move a weight by 32
        more = f"[secure]\nthreshold = {threshold}\n{heavy}{far}"
    if kind == "private":
        rounds = ALLOWED - rng.choice([0, 0, 0, 1, 2])
        declared = "most_examples = 100\nnormaliser = 2.0\n" if weights == "examples" else ""
        more += (
            "[privacy]\nnoise = 3.0\nclip = 1.0\ndelta = 1e-5\nstop_at_epsilon = 4.0\n" + declared
        )
    share = f"\nsample = {sample}" if sample is not None else ""
    text = manifest(f'work = {work}\nweights = "{weights}"{share}', more, rounds)
    return DrawnRun(
        text,
        rounds,
        kind == "private",
        [rng.choice([7, 20, 64, 100, 160]) for _ in range(sites)],
        [rng.choice([0.2, 1.0, 4.0]) for _ in range(sites)],
        [
            (rng.randrange(sites), rng.uniform(1.0, 150.0), rng.choice([0.5, 3.0, 20.0, 200.0]))
            for _ in range(rng.randint(0, 4))
        ],
    )


@pytest.mark.parametrize("seed", daily(0, range(30)))
def test_each_run_comes_to_its_end_with_the_reason(seed: int) -> None:
    run = drawn(seed)
    ends = dict[int, tuple[int, str]]()

    def script(member: LocalMember) -> None:
        count, model = run.examples[member.index], nn.Linear(2, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = attach(model, optimizer, member, examples=count, clock=member.clock)
        indices = batches(member.index, count, BATCH)
        while not attachment.done:
            batch = next(indices)
            optimizer.zero_grad()
            model(torch.ones(len(batch), 2)).sum().backward()
            attachment.samples(len(batch))
            optimizer.step()
        ends[member.index] = (attachment.round, attachment._over)
        member.sleep(600.0)  # its node goes on, for who comes back late

    swarm = LocalSwarm(len(run.examples), settings=parse_manifest(run.text, "run.toml").settings())
    for site, at_s, back_s in run.deaths:
        swarm = swarm.crash_at(site, at_s, back_after_s=back_s)
    swarm.run(script, step_s=run.speeds, limit_s=40_000)
    assert ends.keys() == {*range(len(run.examples))}
    for round_, why in ends.values():
        assert round_ == run.rounds or (run.private and "epsilon" in why), (round_, why)
    entries = [c.entry for c in swarm.peers[0].storages[0].journal().entries]
    for peer in swarm.peers if run.private else ():
        given = sum(c.member.peer == peer.name for entry in entries for c in entry.contributors)
        assert given <= peer.storages[0].spent.noisy() <= ALLOWED
