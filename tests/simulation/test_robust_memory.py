"""What a robust run remembers from round to round: worker momentum, and the running radius of
centred clipping.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import StateError
from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim import GradientAveraging, SoloSwarm, attach
from atoll.security.rules import aggregate
from atoll.security.rules.centre import common_radius

STEP = OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
NUMEL = 40


def line(values: list[float], settings: RunSettings, saved: Any = None) -> tuple[list[float], Any]:
    """A model of one weight whose steps are given, alone: the weight after each round, and the
    state to go on from.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, -10.0 if saved else 0.0)
    attachment = attach(
        model, optimizer := torch.optim.SGD(model.parameters(), lr=1.0), SoloSwarm(settings)
    )
    if saved:
        attachment.load_state_dict(saved)
    found = list[float]()
    for value in values:
        model.weight.grad = torch.tensor([[value]])
        optimizer.step()
        found.append(float(model.weight.detach()))
    return found, attachment.state_dict()


def test_a_member_contributes_its_running_mean_and_goes_on_with_it_after_a_restart() -> None:
    settings = RunSettings(sync_every=1, outer=STEP, codec="fp32", worker_momentum=0.5)
    found, saved = line([8.0, 8.0], settings)
    assert found == [-4.0, -10.0]  # 8 / 2; 4 / 2 + 8 / 2
    assert saved["strands"]["0"]["momentum"].tolist() == [6.0]
    assert line([8.0, 0.0], settings, saved)[0] == [-17.0, -20.5]  # 6 / 2 + 8 / 2; 7 / 2
    assert line([8.0], RunSettings(sync_every=1, outer=STEP, codec="fp32"))[0] == [-8.0]
    saved["strands"]["0"]["momentum"] = torch.zeros(2)
    with pytest.raises(StateError, match="a momentum of 2 elements, for 1"):
        line([8.0], settings, saved)


def test_running_statistics_have_no_momentum() -> None:
    model = nn.BatchNorm1d(1)
    attachment = attach(
        model,
        optimizer := torch.optim.SGD(model.parameters(), lr=1.0),
        SoloSwarm(RunSettings(method="local_sgd", sync_every=1, codec="fp32", worker_momentum=0.5)),
    )
    model(torch.tensor([[0.0], [40.0]]))
    assert model.weight is not None
    model.weight.grad, model.bias.grad = torch.tensor([0.5]), torch.tensor([0.0])
    optimizer.step()
    assert attachment.round == 1
    assert (float(model.weight.detach()), model.running_mean) == (
        0.75,
        torch.tensor([2.0]),
    )  # a tenth of the mean 20, as the model has it itself


def test_a_round_is_the_rule_of_running_means() -> None:
    """Gradients and what they come to are whole numbers: each weight is known to the bit, at all
    members.
    """
    gradients = np.array(
        [[[8, 4], [16, 0], [8, 8]], [[0, 8], [8, 8], [16, 8]], [[4, 0], [0, 4], [24, 16]]],
        np.float32,
    )  # member, round
    settings = RunSettings(
        method="gradient_averaging",
        sync_every=1,
        rounds=3,
        codec="fp32",
        outer=STEP,
        reducer="median:1",
        worker_momentum=0.5,
        deadline_s=60.0,
    )

    def script(member: Any) -> list[list[float]]:
        model, seen = nn.Linear(2, 1, bias=False), list[list[float]]()
        nn.init.zeros_(model.weight)
        member.open(make_layout([("weight", (1, 2))]), lambda initial: None).release()
        while len(member.members()) < 3:
            member.sleep(0.1)
        optimizer = GradientAveraging(
            model.parameters(), swarm=member, model=model, clock=member.clock
        )
        while not optimizer.attachment.done:
            round_ = optimizer.attachment.round
            model.weight.grad = torch.from_numpy(gradients[member.index, round_]).view(1, 2).clone()
            optimizer.step()
            if optimizer.attachment.round > round_:
                seen.append(model.weight.detach().view(-1).tolist())
            member.sleep(0.1)
        return seen

    mean, anchor, want = np.zeros((3, 2), np.float32), np.zeros(2, np.float32), list[list[float]]()
    for round_ in range(3):
        mean = (mean + gradients[:, round_]) / 2
        anchor = anchor - np.median(mean, axis=0)
        want.append(anchor.tolist())
    assert want[0] == [-2.0, -2.0]
    assert LocalSwarm(3, settings=settings).run(script) == [want] * 3


def test_centred_clipping_clips_at_the_median_distance_of_the_rounds_before() -> None:
    """Rounds of unlike scale: what each comes to, with the radius of those before; the first has
    only its own.
    """
    scales = (1.0, 1.0, 8.0, 8.0, 0.125)
    settings = RunSettings(sync_every=1, outer=STEP, codec="fp32", reducer="centred_clip/running:1")

    def row(index: int, round_: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(100 * round_ + index)
        return scales[round_] * torch.randn(NUMEL, generator=rng) * (50.0 if index == 3 else 1.0)

    swarm = LocalSwarm(6, settings=settings, chunk_elements=16)

    def script(member: Any) -> list[tuple[Outcome, torch.Tensor]]:
        member.open(make_layout([("w", (NUMEL,))]), lambda initial: None).release()
        while len(member.members()) < 6:
            member.sleep(0.5)
        found = list[tuple[Outcome, torch.Tensor]]()
        for round_ in range(len(scales)):
            outcome = member.contribute(
                samples=1, write=lambda flat, at=round_: flat.copy_(row(member.index, at))
            ).wait(60.0)
            view, anchor = member.anchor(), torch.empty(NUMEL)
            view.copy_into(anchor)
            view.release()
            found.append((outcome, anchor))
        return found

    results = swarm.run(script)
    anchor, distances, unlike = torch.zeros(NUMEL), list[float](), 0
    for round_, (outcome, after) in enumerate(results[0]):
        assert len(outcome.contributors) == 6
        assert all(torch.equal(member[round_][1], after) for member in results)
        rows = torch.stack([row(int(share.peer[1:]), round_) for share in outcome.contributors])
        radius = sorted(distances)[(len(distances) - 1) // 2] if distances else None
        want = aggregate(
            rows, "centred_clip", 1, options={} if radius is None else {"radius": radius}
        )
        assert want.weights is not None
        assert [share.weight for share in outcome.contributors] == pytest.approx(
            want.weights.tolist(), rel=1e-5, abs=1e-7
        )
        anchor = anchor - want.value
        assert torch.allclose(after, anchor, rtol=1e-4, atol=1e-5)
        unlike += not torch.allclose(
            aggregate(rows, "centred_clip", 1).value, want.value, rtol=1e-2
        )
        distances.append(sorted(float((each - want.value).double().norm()) for each in rows)[2])
    assert unlike >= 3


def test_the_common_radius_is_none_that_the_hostile_could_choose() -> None:
    assert common_radius([2.0, 3.0, 1.0], 1) == 2.0
    assert common_radius([2.0, 1e30, 1.0, 3.0], 1) == 2.0  # the lower median
    assert common_radius([2.0, None, 3.0], 1) is None  # one of the two may be anything
    assert common_radius([2.0, 0.0, 3.0], 1) is None
    assert common_radius([1e-30, 2.0, 3.0, 4.0, 1e-30], 2) == 2.0
    assert common_radius([], 1) is None
