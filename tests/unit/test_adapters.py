"""Adapters: the digest of what is frozen, factors by rounds, and the bias of a mean of factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atoll.collectives.cutting import cut
from atoll.collectives.errors import ConfigError, ModelMismatchError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import AdapterSettings, RunSettings
from atoll.node.manifest import parse_manifest
from atoll.optim import SoloSwarm, attach
from atoll.optim.model.flat import FlatVector
from atoll.optim.model.frozen import base_digest
from atoll.optim.modes.adapters import product_bias

PLAIN = OuterSettings("sgd", 1.0, 0.0)


class LoRA(nn.Module):
    """A frozen linear layer with an adapter, under PEFT's names."""

    def __init__(self, base: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = nn.Linear(4, 3, bias=False, dtype=dtype)
        self.base_layer.weight.data.fill_(base)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})
        for layer in (self.lora_A["default"], self.lora_B["default"]):
            layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x.to(self.base_layer.weight.dtype)).float() + low

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.lora_A["default"].weight, self.lora_B["default"].weight


def settings(mode: str = "plain", base: str = "values", **more) -> RunSettings:
    return RunSettings(
        sync_every=2,
        outer=PLAIN,
        codec="fp32",
        adapters=AdapterSettings(mode, base),  # type: ignore[arg-type]
        **more,
    )


def test_only_what_requires_a_gradient_travels_and_the_rest_has_a_digest() -> None:
    layout = FlatVector(LoRA()).layout
    assert [spec.name for spec in layout.tensors] == [
        "lora_A.default.weight",
        "lora_B.default.weight",
    ]
    assert len(layout.base) == 32
    assert [part.base for part in cut(layout, 2)] == [layout.base] * 2
    free = FlatVector(nn.Linear(2, 2)).layout
    assert free.base == b""


def test_the_digest_is_of_values_whatever_their_type() -> None:
    digests = {
        (base, dtype): FlatVector(LoRA(base, dtype=dtype)).layout.base
        for base in (1.0, 1.5)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    assert len(set(digests.values())) == 2
    assert digests[1.0, torch.float32] == digests[1.0, torch.bfloat16]
    by_shape = FlatVector(LoRA(1.0), settings(base="shapes")).layout.base
    assert by_shape == FlatVector(LoRA(1.5), settings(base="shapes")).layout.base
    assert by_shape not in digests.values()


def test_another_base_is_refused_with_what_to_do() -> None:
    swarm = SoloSwarm(settings())
    attach(LoRA(), None, swarm).detach()
    with pytest.raises(ModelMismatchError, match="what is frozen") as told:
        attach(LoRA(base=2.0), None, swarm)
    assert told.value.code == "E310"
    assert "revision" in told.value.hint
    attach(LoRA(dtype=torch.bfloat16), None, swarm).detach()  # the same values


def test_a_quantised_base_needs_the_manifests_word() -> None:
    packed = torch.zeros(2, 1, dtype=torch.uint8)
    packed.quant_state = type("State", (), {"shape": torch.Size((1, 4))})()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="quantised") as told:
        base_digest([("w", packed)], "values")
    assert 'base = "shapes"' in told.value.hint
    assert base_digest([("w", packed)], "shapes") == base_digest(
        [("w", torch.empty(1, 4, device="meta"))], "shapes"
    )
    with pytest.raises(ConfigError, match="no values"):
        base_digest([("w", torch.empty(1, 4, device="meta"))], "values")


def train(mode: str, steps: int) -> tuple[LoRA, list[tuple[bool, bool]]]:
    """Whether A and B moved, step by step."""
    torch.manual_seed(0)
    model = LoRA()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attachment = attach(model, optimizer, SoloSwarm(settings(mode)))
    moved = []
    for _ in range(steps):
        before = [factor.detach().clone() for factor in model.factors]
        optimizer.zero_grad(set_to_none=False)  # leaves zeros, where there is a gradient
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        a, b = (not torch.equal(old, new) for old, new in zip(before, model.factors, strict=True))
        moved.append((a, b))
    attachment.detach()
    return model, moved


def test_one_factor_trains_a_round_and_the_other_rests() -> None:
    model, moved = train("alternate", 8)
    assert moved == 2 * ([(False, True)] * 2 + [(True, False)] * 2)
    assert all(factor.requires_grad for factor in model.factors)  # detach gives them back


def test_ffa_freezes_a_and_leaves_it_out_of_what_travels() -> None:
    model, moved = train("ffa", 4)
    assert moved == [(False, True)] * 4
    swarm = SoloSwarm(settings("ffa"))
    attached = attach(model, None, swarm)
    assert [spec.name for spec in attached._flat.layout.tensors] == ["lora_B.default.weight"]
    attached.detach()
    with pytest.raises(ModelMismatchError) as told:  # another A is another base
        attach(LoRA(seed=1), None, swarm)
    assert told.value.code == "E310"


def test_factors_are_asked_for_where_the_manifest_names_a_mode() -> None:
    for mode in ("alternate", "ffa"):
        with pytest.raises(ConfigError, match="lora_A"):
            attach(nn.Linear(2, 2), None, SoloSwarm(settings(mode)))


def test_the_bias_is_that_of_the_definition_and_none_where_one_factor_is_shared() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    a, b, name = [draw(2, 5) for _ in range(3)], [draw(4, 2) for _ in range(3)], "x.lora_{}.weight"
    weights = (1.0, 2.0, 1.0)

    def members(a: list[Tensor], b: list[Tensor]):
        return [
            (weight, {name.format("A"): first, name.format("B"): second, "other": draw(1)})
            for weight, first, second in zip(weights, a, b, strict=True)
        ]

    mean = sum(w / 4 * (q @ p) for w, p, q in zip(weights, a, b, strict=True))
    p = sum(w / 4 * each for w, each in zip(weights, a, strict=True))
    q = sum(w / 4 * each for w, each in zip(weights, b, strict=True))
    expected = float((q @ p - mean).norm() / mean.norm())
    assert product_bias(members(a, b)) == pytest.approx(expected, rel=1e-5)
    assert expected > 0.3
    assert product_bias(members([a[0]] * 3, b)) < 1e-7
    assert product_bias(members(a, [b[0]] * 3)) < 1e-7


RUN = 'schema = 1\nname = "a"\nmodel.entry = "local:x"\ntrain.sync_every = 5\n'


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ('train.outer.preset = "published"', "$.train.outer.optimizer"),
        ('train.overlap = "late"', "$.train.overlap"),
        ("exchange.fragments = 2", "$.exchange.fragments"),
        ('exchange.codec = "stat2"', "$.exchange.codec"),
        ("exchange.feedback = true", "$.exchange.feedback"),
        ('kind = "federated"\nfederated.method = "fedadam"', "$.federated.method"),
    ],
)
def test_what_would_move_the_factor_at_rest_is_refused(more: str, key: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse_manifest(f'{RUN}{more}\n[adapters]\nmode = "alternate"', "run.toml")
    assert told.value.key == key


def test_modes_that_are_taken() -> None:
    found = parse_manifest(f'{RUN}[adapters]\nmode = "alternate"', "run.toml")
    assert found.settings().adapters == AdapterSettings("alternate", "values")
    found = parse_manifest(f'{RUN}[adapters]\nmode = "ffa"\nbase = "shapes"', "run.toml")
    assert found.settings().adapters == AdapterSettings("ffa", "shapes")
