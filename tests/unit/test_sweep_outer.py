"""The sweep of outer settings (scripts/bench/sweep_outer.py): models of one batch are independent,
synchronous steps are those of one machine, and the outer step is the published one. The page has
the ratios of the record.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.collectives.codecs.codec import get_codec
from atoll.collectives.outer_rules import OuterSettings
from atoll.optim.outer.more_rules import RULES
from atoll.optim.outer.presets import preset_named
from atoll.optim.outer.step import warmed

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "bench"))
from _sweep_models import BETAS, DECAY, SIZES, Models, forward, initial, orthogonal, views  # noqa: E402
from sweep_outer import KEYS, Arm, Group, Play, groups, outer_step, quantise  # noqa: E402

TINY = replace(SIZES["tiny"], width=16, context=16)
STEPS = 30
TEXT = torch.randint(256, (5000,), generator=torch.Generator().manual_seed(5)).byte()
STARTS = torch.randint(4900, (4, STEPS, TINY.batch), generator=torch.Generator().manual_seed(6))


def made(owners: list[int], *, k: int = 1, sync: list[int] | None = None, **more: Any) -> Models:
    """Models of seed 0, each with its stream of batches."""
    models = Models(
        more.pop("size", TINY),
        k,
        STEPS,
        sync=sync or [0] * (len(owners) // k),
        owners=owners,
        rates=more.pop("rates", [4e-3] * len(owners)),
        muon=more.pop("muon", [0.0] * len(owners)),
        text=TEXT,
        starts=more.pop("starts", STARTS),
        device="cpu",
        half=more.pop("half", False),
    )
    models.start(initial(models.size, 0)[None], torch.zeros_like(models.owners))
    return models


def after(models: Models, steps: int) -> Tensor:
    """Their weights then."""
    for _ in range(steps):
        models.step()
    return models.master[:, : models.size.numel].clone()


@pytest.mark.parametrize("muon", [0.0, 0.02])
def test_models_of_one_batch_are_trained_as_each_alone(muon: float) -> None:
    rates = [4e-3, 1e-3, 4e-3]
    together = after(made([0, 1, 2], rates=rates, muon=[muon] * 3), 5)
    # Muon's iteration enlarges what batched products round otherwise than single ones, on some CPUs
    close = 1e-3 if muon else 1e-5
    for row, rate in enumerate(rates):
        alone = after(made([row], rates=[rate], muon=[muon]), 5)[0]
        assert torch.allclose(together[row], alone, atol=close), row
    assert not torch.allclose(together[0], together[2], atol=2 * close)


def test_it_is_the_gpt_of_torchs_own_layers_and_optimizer() -> None:
    """One step of one model, against functions of torch on single tensors."""
    models = made([0])
    w = {name: v[0].clone().requires_grad_() for name, v in views(models.master, TINY).items()}
    windows = TEXT[STARTS[0, 0][:, None] + torch.arange(TINY.context + 1)].long()
    x = F.embedding(windows[:, :-1], w["tokens"]) + w["positions"]
    mask = torch.full((TINY.context, TINY.context), -math.inf).triu(1)
    for n in range(TINY.layers):
        normed = F.layer_norm(x, (TINY.width,), w[f"{n}.mix.scale"], w[f"{n}.mix.shift"])
        q, k, v = (
            part.unflatten(-1, (TINY.heads, -1)).transpose(1, 2)
            for part in (normed @ w[f"{n}.qkv"]).chunk(3, -1)
        )
        seen = (q @ k.mT / math.sqrt(TINY.width / TINY.heads) + mask).softmax(-1) @ v
        x = x + seen.transpose(1, 2).flatten(2) @ w[f"{n}.mixed"]
        normed = F.layer_norm(x, (TINY.width,), w[f"{n}.feed.scale"], w[f"{n}.feed.shift"])
        up = F.gelu(normed @ w[f"{n}.up"] + w[f"{n}.up.bias"])
        x = x + up @ w[f"{n}.down"] + w[f"{n}.down.bias"]
    x = F.layer_norm(x, (TINY.width,), w["last.scale"], w["last.shift"])
    loss = F.cross_entropy((x @ w["head"]).flatten(0, 1), windows[:, 1:].flatten())
    assert forward(models.weights, windows[None], TINY).item() == pytest.approx(
        loss.item(), abs=1e-5
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
    torch.optim.AdamW(w.values(), lr=4e-3 / 20, betas=BETAS, weight_decay=DECAY).step()
    expected = torch.cat([tensor.detach().flatten() for tensor in w.values()])
    assert torch.allclose(after(models, 1)[0], expected, atol=1e-5)


def test_members_in_synchronous_steps_are_one_machine_with_all_their_batches() -> None:
    members = after(made([0, 1], k=2, sync=[STEPS]), 5)
    assert torch.equal(members[0], members[1])
    both = torch.cat([STARTS[:1], STARTS[1:2]], dim=2)
    machine = after(made([0], size=replace(TINY, batch=2 * TINY.batch), starts=both), 5)
    assert torch.allclose(members[0], machine[0], atol=1e-5)
    later = after(made([0, 1, 0, 1], k=2, sync=[4, 0]), 6)  # two steps apart, and never together
    assert not torch.equal(later[0], later[1])
    assert torch.allclose(later[2:], after(made([0, 1]), 6), atol=1e-5)


def test_products_in_bfloat16_train_weights_in_float32() -> None:
    group = Group("tiny", 2, (5,), STEPS, "1/0")
    found = list[float]()
    for half in (False, True):
        models, play = made([0, 1], k=2, half=half), Play(group.arms[2], 0, 4e-3, 0.0, 0, group)
        for step in range(11):
            if step:
                models.step()
            play.after(step, models)
        assert models.master.dtype == torch.float32
        assert torch.equal(models.working, models.master.to(models.working.dtype))
        windows = TEXT[STARTS[3, 0][:, None] + torch.arange(TINY.context + 1)].long()
        found += models.evaluate([0], windows)
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_muons_matrices_are_nearly_orthogonal() -> None:
    found = orthogonal(torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(1)))
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.4


@pytest.mark.parametrize(("lr", "mu"), [(1.0, 0.0), (0.9, 0.6), (0.7, 0.9)])
def test_an_outer_step_is_the_products(lr: float, mu: float) -> None:
    """Three rounds against `atoll.optim.outer`'s rule, with the mean in float64."""
    draw = torch.Generator().manual_seed(2)
    anchor, momentum = torch.randn(512, generator=draw), torch.zeros(512)
    theirs, state, scratch = anchor.clone(), [torch.zeros(512)], [torch.zeros(512)]
    rule = RULES["nesterov"](OuterSettings("nesterov", lr, mu))
    for _ in range(3):
        moves = torch.randn(3, 512, generator=draw)
        anchor = outer_step(anchor, anchor - moves, momentum, lr, mu, "fp32")
        new = torch.zeros(512)
        rule.step(theirs, moves.double().mean(0).float(), state, new, lr, scratch)
        theirs = new
        assert torch.allclose(anchor, theirs, atol=1e-5)


def test_a_warm_up_is_the_products() -> None:
    """That of the preset "cold", where rounds begin short."""
    arm, growing = Arm.of("0.9/0.6 hold=40 warm=40", 20), preset_named("cold").growing
    assert growing is not None
    assert [arm.outer(index, 0.5) for index in range(99)] == [
        warmed(growing, index) for index in range(99)
    ]


def test_int8_is_the_codecs() -> None:
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(3))
    codec = get_codec("int8")
    for row, found in zip(x, quantise(x), strict=True):
        wire = codec.wire(memoryview(bytearray(codec.wire_bytes(1024))), 1024)
        assert codec.encode(row, wire)
        decoded = torch.zeros(1024)
        codec.decode(wire, decoded)
        assert torch.allclose(found, decoded, atol=1e-6)
    anchor = outer_step(torch.zeros(1024), -x, torch.zeros(1024), 1.0, 0.0, "int8")
    assert torch.allclose(-anchor, quantise(quantise(x).mean(0)))


def test_rounds_grow_to_h_and_keep_to_its_multiples() -> None:
    assert Arm.of("1/0", 20).ends(50) == [20, 40, 50]
    assert Arm.of("1/0 sync=5", 20).ends(50) == [20, 40, 50]
    assert Arm.of("1/0 stages=4:1,20:8", 20).ends(60) == [1, 2, 3, 4, 12, 20, 40, 60]
    grown = Arm.of("1/0 grow=5", 20).ends(500)
    lengths = [after - before for before, after in pairwise([0, *grown])]
    assert lengths[:15] == [1] * 10 + [2, 2, 2, 3, 1]  # 20 is a multiple of H
    assert lengths[-20:] == [20] * 20
    assert len(grown) == 47
    for group in groups():
        for arm in group.arms[2:]:
            ends = arm.ends(group.steps)
            assert ends[-1] == group.steps
            assert set(range(arm.h, group.steps, arm.h)) - set(ends) <= set(range(arm.sync + 1))


def test_outer_values_warm_up_and_fade() -> None:
    assert Arm.of("0.9/0.6", 20).outer(0, 0.01) == (0.9, 0.6)
    arm = Arm.of("0.8/0.6 hold=2 warm=3 fade=0.5", 20)
    found = [arm.outer(index, 0.1) for index in (0, 1, 2, 3, 4, 5, 9)]
    assert [mu for _, mu in found] == pytest.approx([0, 0, 0.15, 0.3, 0.45, 0.6, 0.6])
    assert [lr for lr, _ in found] == pytest.approx([1, 1, 0.95, 0.9, 0.85, 0.8, 0.8])
    assert arm.outer(9, 0.75) == pytest.approx((0.9, 0.3))
    assert arm.outer(9, 1.0) == (1.0, 0.0)


def test_members_take_the_anchor_and_keep_their_optimizers() -> None:
    group = Group("tiny", 2, (5,), STEPS, "0.9/0.6 int8")
    play = Play(group.arms[2], 0, 4e-3, 0.0, 0, group)
    models = made([0, 1], k=2)
    play.after(0, models)
    begin, moments = (
        models.master[0].clone(),
        models.adam.state[models.adam.param_groups[0]["params"][0]],
    )
    for step in range(1, 6):
        models.step()
        if step == 5:
            expected = outer_step(
                begin, models.master.clone(), torch.zeros_like(begin), 0.9, 0.6, "int8"
            )
            kept = moments["exp_avg"].clone()
        play.after(step, models)
        assert play.measured(step) == (step == 5)
    assert torch.equal(models.master[0], expected)
    assert torch.equal(models.master[1], expected)
    assert torch.equal(moments["exp_avg"], kept)
    assert kept.abs().sum() > 0
    assert play.exchanges(5) == 1


def rows(heading: str) -> list[dict[str, str]]:
    """The table below that heading of docs/benchmarks-outer.md, its rows by column."""
    page = (ROOT / "docs" / "benchmarks-outer.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(head, cells, strict=True)) for cells in body]


def test_the_page_has_the_ratios_of_the_record() -> None:
    """Each cell is the mean over seeds; bold where a seed was above alone."""
    with gzip.open(ROOT / "docs" / "benchmarks-outer.jsonl.gz", "rt", encoding="utf-8") as file:
        lines: list[dict[str, Any]] = [json.loads(line) for line in file]
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if not line["tune"]:
            found.setdefault((*(line[key] for key in KEYS[1:6]), line["arm"]), []).append(line)

    def cell(*setting: Any) -> str:
        of = found[setting]
        ratio = f"{sum(line['ratio'] for line in of) / len(of):.3f}"
        return f"**{ratio}**" if any((line["to_alone"] or 0) > 1 for line in of) else ratio

    compared = 0
    for row in rows("All settings"):
        k, h, steps = (int(row[key]) for key in ("K", "H", "steps"))
        setting = row["size"], row["inner"].lower(), k, h, steps
        assert int(row["seeds"]) == len(found[(*setting, "1/0")])
        for arm, said in row.items():
            if "/" in arm and said:
                assert said == cell(*setting, arm), (setting, arm)
                compared += 1
    for row in rows("One million parameters, 1,000 steps, AdamW"):
        columns = ("K = 4, H = 10", 4, 10), ("20", 4, 20), ("50", 4, 50), ("100", 4, 100)
        for column, k, h in (*columns, ("K = 2, H = 20", 2, 20)):
            if row[column]:
                assert row[column] == cell("1m", "adamw", k, h, 1000, row["arm"]), row
                compared += 1
    assert compared > 250
