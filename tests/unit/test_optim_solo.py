"""The swarm of one keeps the whole contract of a Swarm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3

from atoll.collectives.errors import (
    LocalProtocolError,
    ModelMismatchError,
    OutOfDateError,
    SwarmClosedError,
)
from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Share
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.optim import SoloSwarm

LAYOUT = make_layout([("w", (3, 2)), ("b", (2,))])
START = torch.arange(8.0)


def opened(settings: RunSettings | None = None) -> SoloSwarm:
    swarm = SoloSwarm(settings)
    swarm.open(LAYOUT, lambda out: out.copy_(START)).release()
    return swarm


def values(swarm: SoloSwarm) -> torch.Tensor:
    view = swarm.anchor()
    out = torch.empty(8)
    view.copy_into(out)
    view.release()
    return out


def test_it_is_a_swarm() -> None:
    assert isinstance(SoloSwarm(), Swarm)


def test_the_founder_brings_the_anchor_and_later_opens_get_it() -> None:
    swarm = SoloSwarm()
    view = swarm.open(LAYOUT, lambda out: out.copy_(START))
    assert (view.round, view.numel) == (0, 8)
    assert view.digest == blake3(START.numpy().tobytes()).hexdigest()
    again = swarm.open(LAYOUT, lambda out: pytest.fail("only a founder is asked"))
    part = torch.empty(3)
    again.copy_into(part, 2)
    assert part.tolist() == [2.0, 3.0, 4.0]
    with pytest.raises(ModelMismatchError, match="w  yours \\[2\\]  run \\[3, 2\\]"):
        swarm.open(make_layout([("w", (2,)), ("b", (2,))]), lambda out: None)


def test_contributions_commit_at_once_with_the_outer_step() -> None:
    swarm = opened(RunSettings(outer=OuterSettings("nesterov", 0.9, 0.6)))
    delta = torch.linspace(-1, 1, 8)
    pending = swarm.contribute(samples=5, write=lambda out: out.copy_(delta))
    assert pending.done()
    outcome = pending.wait(0.0)
    assert (outcome.status, outcome.round, outcome.counted) == ("committed", 1, True)
    assert outcome.contributors == (Share(swarm.peer, 5),)
    lr, mu = np.float32(0.9), np.float32(0.6)
    assert np.array_equal(
        values(swarm).numpy(), START.numpy() - lr * (delta.numpy() + mu * delta.numpy())
    )
    assert swarm.members()[0].round == 1


def test_a_leased_generation_is_never_overwritten_and_buffers_are_used_again() -> None:
    swarm = opened()
    held = swarm.anchor()
    seen: list[torch.Tensor] = []
    for _ in range(5):
        before = torch.empty(8)
        held.copy_into(before)
        swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
        assert torch.equal(before, START)
        seen.append(values(swarm))
    assert len({tuple(v.tolist()) for v in seen}) == 5
    assert held.round == 0
    assert swarm._store is not None
    assert len(swarm._store._free) == 1
    held.release()
    held.release()
    assert len(swarm._store._free) == 2
    with pytest.raises(LocalProtocolError, match="released"):
        held.copy_into(torch.empty(8))


def test_a_contribution_that_fails_commits_nothing() -> None:
    swarm = opened()

    def fails(out: torch.Tensor) -> None:
        out.fill_(9.0)
        raise KeyError("script")

    with pytest.raises(KeyError):
        swarm.contribute(samples=1, write=fails)
    with pytest.raises(LocalProtocolError, match="samples"):
        swarm.contribute(samples=0, write=lambda out: None)
    with pytest.raises(LocalProtocolError, match=r"not finite: .* holds NaN"):
        swarm.contribute(samples=1, write=lambda out: out.fill_(float("nan")))
    assert torch.equal(values(swarm), START)
    assert swarm.anchor().round == 0


def test_all_reduce_over_one_member_is_the_value_itself() -> None:
    swarm, flat = opened(), torch.arange(3.0)
    outcome = swarm.all_reduce(flat, weight=4, op_id="loss", deadline_s=1.0).wait()
    assert outcome.contributors == (Share(swarm.peer, 4),)
    assert flat.tolist() == [0.0, 1.0, 2.0]


def test_order_of_calls_is_enforced() -> None:
    swarm = SoloSwarm()
    with pytest.raises(LocalProtocolError, match="open"):
        swarm.anchor()
    swarm = opened()
    swarm.report({"loss": 1.5})
    assert swarm.reported == {"loss": 1.5}
    swarm.leave()
    with pytest.raises(SwarmClosedError):
        swarm.contribute(samples=1, write=lambda out: None)
    swarm.close()
    swarm.close()
    with pytest.raises(SwarmClosedError):
        swarm.anchor()


def test_state_comes_back_exactly() -> None:
    momentum = RunSettings(outer=OuterSettings("nesterov", 0.7, 0.9))
    swarm, other = opened(momentum), opened(momentum)
    for factor in (1.0, 2.0):
        swarm.contribute(samples=1, write=lambda out, factor=factor: out.fill_(factor))
    saved = swarm.state_dict()
    other.load_state_dict(saved)
    for one in (swarm, other):
        one.contribute(samples=1, write=lambda out: out.fill_(0.5))
    assert torch.equal(values(swarm), values(other))
    assert swarm.anchor().digest == other.anchor().digest
    plain = opened(RunSettings(method="local_sgd"))
    with pytest.raises(OutOfDateError, match="momentum"):
        plain.load_state_dict(saved)
    assert plain.state_dict()["momentum"].numel() == 0
