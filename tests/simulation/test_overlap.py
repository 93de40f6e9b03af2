"""Who overlaps does not wait where the transfer fits into a round: any method, with any codec, also
after a round in which a contribution was lost.

In virtual time, which passes in inner steps and on links alone: training that waits for nothing
takes exactly its steps' time.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.optim.model.flat import FlatVector

H, ROUNDS, STEP_S, PEERS = 8, 5, 0.25, 3
LOST = 2  # the round on whose anchor a contribution is made that is lost
WIDTH = 64
RATE = 120_000.0  # bytes/s of a link: an fp32 vector takes a tenth of a round's compute
BASE = RunSettings(sync_every=H, rounds=ROUNDS, outer=OuterSettings("nesterov", 0.4, 0.5))
METHODS: dict[str, dict[str, Any]] = {
    "late": {"overlap": "late"},
    "late, delayed": {"overlap": "late", "delay": 6},
    "co2": {"overlap": "late", "outer": OuterSettings(kind="co2", lr=0.4, momentum=0.5)},
    "eager": {"overlap": "eager"},
    "streaming": {"overlap": "late", "fragments": 2, "delay": 6, "mixing": 0.5},
}
CODECS: dict[str, dict[str, Any]] = {
    "fp32": {"codec": "fp32"},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "int4 with feedback": {"codec": "int4", "feedback": True},
    "stat2": {"codec": "stat2"},
    "sparse64": {"codec": "sparse64"},
}


OFTEN = ("int8", "sparse64")


class Losing:
    """A member whose contribution on the anchor of one round, in each fragment, comes to nothing:
    it names an anchor that is none.
    """

    def __init__(self, member: LocalMember) -> None:
        self.__dict__["_member"] = member

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def contribute(self, *, base: int, **rest: Any) -> Any:
        return self._member.contribute(base=1 << 40 if base == LOST else base, **rest)

    def contribute_fragment(self, fragment: int, *, base: int, **rest: Any) -> Any:
        return self._member.contribute_fragment(
            fragment, base=1 << 40 if base == LOST else base, **rest
        )


def train(member: LocalMember) -> dict[str, Any]:
    """Once all are there: train on data of one's own to the end of the run."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    member.open(FlatVector(model).layout, FlatVector(model).write_to).release()
    while len(member.members()) < PEERS:
        member.sleep(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attachment = attach(
        model, optimizer, Losing(member) if member.index == 1 else member, clock=member.clock
    )  # type: ignore[arg-type]
    data = torch.Generator().manual_seed(member.index)
    began, steps = member.clock(), 0
    while not attachment.done:
        x = torch.randn(4, WIDTH, generator=data)
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        steps += 1
    anchor = torch.empty(FlatVector(model).numel)
    view = member.anchor()
    view.copy_into(anchor)
    return {
        "seconds": member.clock() - began,
        "steps": steps,
        "stats": attachment.stats,
        "anchor": anchor,
    }


@pytest.mark.parametrize(
    "codec",
    [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in CODECS],
)
@pytest.mark.parametrize("method", METHODS)
def test_training_takes_the_time_of_its_steps_and_no_more(method: str, codec: str) -> None:
    settings = msgspec.structs.replace(BASE, **METHODS[method], **CODECS[codec])
    results = LocalSwarm(PEERS, settings=settings, latency_s=0.02, bandwidth_bytes_per_s=RATE).run(
        train, step_s=STEP_S
    )
    fragments = settings.fragments
    for index, result in enumerate(results):
        stats = result["stats"]
        assert stats["waiting_s"] == 0
        assert result["seconds"] == pytest.approx(STEP_S * result["steps"], abs=1e-9)
        assert stats["uncounted"] >= fragments if index == 1 else stats["uncounted"] == 0
        assert stats["counted"] >= fragments * (ROUNDS - 2)
        assert torch.equal(result["anchor"], results[0]["anchor"])
    assert results[0]["anchor"].abs().sum() > 0


def test_it_is_the_overlap_that_saves_the_wait() -> None:
    """The same without: the instrument sees what is waited."""
    results = LocalSwarm(PEERS, settings=BASE, latency_s=0.02, bandwidth_bytes_per_s=RATE).run(
        train, step_s=STEP_S
    )
    for result in results:
        assert result["stats"]["waiting_s"] > 0.1 * ROUNDS
        assert result["seconds"] == pytest.approx(
            STEP_S * result["steps"] + result["stats"]["waiting_s"]
        )
