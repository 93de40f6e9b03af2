"""A layout binds what changes a model's function beside its tensors, and names it at joining."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ModelMismatchError
from atoll.collectives.swarm import RunSettings
from atoll.node.session.beginning import check_model
from atoll.optim import SoloSwarm, attach
from atoll.optim.model.flat import FlatVector
from atoll.optim.model.traits import traits_of


class Adapted(nn.Module):
    """A LoRA layer as PEFT makes them."""

    def __init__(
        self, alpha: int, rank: int = 4, rslora: bool = False, name: str = "default"
    ) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({name: nn.Linear(3, rank, bias=False)})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, 3, bias=False)})
        self.lora_alpha = {name: alpha}
        self.scaling = {name: alpha / (rank**0.5 if rslora else rank)}
        self.use_rslora = {name: rslora}


def norms(epsilon: float = 1e-5, momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, eps=epsilon, momentum=momentum), nn.LayerNorm(4)
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "name", "values"),
    [
        (Adapted(64), Adapted(8), "the model", ("scaling 16 (alpha 64)", "scaling 2 (alpha 8)")),
        (
            Adapted(8, rslora=True),
            Adapted(8),
            "the model",
            ("scaling 4 (alpha 8, rslora)", "scaling 2 (alpha 8)"),
        ),
        (
            norms(epsilon=1e-3),
            norms(),
            "1",
            ("epsilon 0.001, momentum 0.1", "epsilon 1e-05, momentum 0.1"),
        ),
        (
            norms(momentum=None),
            norms(),
            "1",
            ("epsilon 1e-05, momentum cumulative", "epsilon 1e-05, momentum 0.1"),
        ),
        (nn.GroupNorm(2, 4), nn.GroupNorm(4, 4), "the model", ("groups 2", "groups 4")),
    ],
)
def test_what_changes_the_function_is_named_with_both_values(
    mine: nn.Module, theirs: nn.Module, name: str, values: tuple[str, str]
) -> None:
    """The tensors are the same by name and shape."""
    ours, runs = FlatVector(mine).layout, FlatVector(theirs).layout
    assert ours.tensors == runs.tensors
    assert ours.digest() != runs.digest()
    with pytest.raises(ModelMismatchError) as refused:
        check_model(ours, runs)
    assert name in refused.value.message
    for value in values:
        assert value in refused.value.message


def test_a_script_whose_adapter_has_another_scale_is_refused() -> None:
    swarm = SoloSwarm(RunSettings(sync_every=1))
    first = Adapted(8)
    attach(first, torch.optim.SGD(first.parameters(), lr=0.1), swarm).detach()
    other = Adapted(64)
    with pytest.raises(ModelMismatchError, match=r"yours scaling 16 .*run scaling 2"):
        attach(other, torch.optim.SGD(other.parameters(), lr=0.1), swarm)


def test_an_adapter_may_have_a_name_of_ones_own() -> None:
    assert traits_of(Adapted(8)) == traits_of(Adapted(8, name="hospital"))


def test_a_model_without_any_is_bound_as_before() -> None:
    assert FlatVector(nn.Linear(2, 2)).layout.traits == ()
