"""Error feedback: nothing is lost for good, only what was counted is settled, and who has it."""

from __future__ import annotations

import pytest
import torch

from atoll.collectives.layout import make_layout
from atoll.collectives.swarm import RunSettings
from atoll.optim import SoloSwarm
from atoll.optim.model.feedback import Feedback, as_decoded, contribution_grid

LAYOUT = make_layout([("embedding", (40, 30)), ("weight", (70, 70)), ("bias", (9,))])


def delta(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", ["int4", "stat2", "sparse64"])
def test_what_was_counted_and_what_is_carried_are_all_that_was_contributed(codec: str) -> None:
    settings = RunSettings(codec=codec, codecs={"bias": "fp32"}, feedback=True)
    feedback, chunking = Feedback(LAYOUT, settings), contribution_grid(LAYOUT, settings)
    given, arrived = torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    for seed, counted in enumerate([True, False, True, True, False]):
        contribution, before = delta(seed), feedback.residual.clone()
        feedback.add_to(contribution)
        assert torch.equal(contribution, delta(seed) + before)
        assert torch.equal(feedback.residual, before)  # undecided
        feedback.settle(counted)
        if counted:
            decoded = torch.empty(LAYOUT.numel)
            as_decoded(chunking, contribution, decoded)
            given += delta(seed)
            arrived += decoded
        else:
            assert torch.equal(feedback.residual, before)
        assert torch.allclose(arrived + feedback.residual, given, atol=1e-5)
    assert feedback.residual[-9:].abs().max() == 0  # fp32 loses nothing
    assert feedback.residual.abs().max() > 0.1
    feedback.zero()
    assert feedback.residual.abs().max() == 0


def test_there_is_one_vector_of_residuals_and_an_interrupted_settling_is_made_again() -> None:
    feedback, contribution = Feedback(LAYOUT, RunSettings(codec="int4", feedback=True)), delta(0)
    place = feedback.residual.data_ptr()
    feedback.add_to(contribution)
    lost = delta(0)
    as_decoded(contribution_grid(LAYOUT, RunSettings(codec="int4")), delta(0), lost)
    feedback.residual[:500] = 7.0  # half of it had been written when Ctrl-C came
    feedback.settle(True)
    assert torch.equal(feedback.residual, delta(0) - lost)
    assert feedback.residual.data_ptr() == place
    assert torch.equal(contribution, delta(0))  # the node may still be asked for it


def test_a_part_of_it_fades() -> None:
    feedback = Feedback(LAYOUT, RunSettings(codec="sparse64", feedback_kept=0.75))
    feedback.add_to(delta(0))
    feedback.settle(True)
    contribution = torch.zeros(LAYOUT.numel)
    before = feedback.residual.clone()
    feedback.add_to(contribution)
    assert torch.equal(contribution, before * 0.75)
    feedback.settle(False)
    assert torch.equal(feedback.residual, before)


def test_who_has_it() -> None:
    assert not RunSettings(codec="int4").has_feedback
    assert RunSettings(codec="int4", feedback=True).has_feedback
    assert RunSettings(codec="stat2").has_feedback
    assert RunSettings(codec="fp32", codecs={"*.weight": "sparse32"}).has_feedback


def test_a_swarm_of_one_takes_what_others_would_get() -> None:
    """Otherwise what is carried would be applied twice."""
    settings = RunSettings(codec="sparse64", codecs={"*": "sparse64"}, method="local_sgd")
    swarm, expected = SoloSwarm(settings), torch.empty(LAYOUT.numel)

    def begin(out: torch.Tensor) -> None:
        out.zero_()

    def write(out: torch.Tensor) -> None:
        out.copy_(delta(3))

    swarm.open(LAYOUT, begin).release()
    swarm.contribute(samples=1, write=write)
    as_decoded(contribution_grid(LAYOUT, settings), delta(3), expected)
    found = torch.empty(LAYOUT.numel)
    swarm.anchor().copy_into(found)
    assert torch.equal(found, -expected)
    assert (found != 0).sum() < 200
