"""Statistics and small tensors are sent in fp32: blocks of a codec would round them away next to
larger values."""

from functools import lru_cache

import pytest
import torch
from torch import nn

from atoll.collectives.codec_costs import EXACT_LEAST, most_bytes, most_exact, round_bytes_per_value
from atoll.collectives.codec_names import CODECS
from atoll.collectives.codecs.mixtures import (
    SMALL_ELEMENTS,
    arranged,
    codecs_of,
    mixture_of,
)
from atoll.collectives.cutting import cut
from atoll.collectives.layout import Layout, make_layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.optim import attach


def ordered(layout: Layout) -> Layout:
    return Layout(tuple(arranged(layout.tensors, "int8", {})), layout.numel)


def gpt(width: int, depth: int) -> Layout:
    block = [
        ("norm.weight", (width,)),
        ("attention", (3 * width, width)),
        ("attention.bias", (3 * width,)),
        ("up", (4 * width, width)),
        ("up.bias", (4 * width,)),
        ("down", (width, 4 * width)),
    ]
    return ordered(
        make_layout(
            [
                ("embedding", (10_000, width)),
                *((f"{i}.{name}", shape) for i in range(depth) for name, shape in block),
            ]
        )
    )


@pytest.mark.parametrize(("width", "depth"), [(64, 2), (256, 6), (768, 12), (2048, 24)])
def test_vectors_of_a_transformer_are_exact_and_a_hundredth_of_it_at_most(
    width: int, depth: int
) -> None:
    layout = gpt(width, depth)
    exact = [
        spec
        for spec, codec in zip(layout.tensors, codecs_of(layout, "int8", {}), strict=True)
        if codec == "fp32"
    ]
    assert {spec.name for spec in exact} == {
        spec.name for spec in layout.tensors if len(spec.shape) == 1
    }
    count = sum(spec.numel for spec in exact)
    assert count <= most_exact("int8", layout.numel)
    assert mixture_of(layout, "int8", {}) == f"int8:{layout.numel - count}+fp32"


@pytest.mark.parametrize("codec", CODECS)
def test_small_tensors_cost_three_bytes_in_a_hundred_at_most(codec: str) -> None:
    for parameters in (10, EXACT_LEAST, 10**6, 10**9):
        bytes_ = sum(most_bytes(codec, parameters)) / 2
        least = parameters * round_bytes_per_value(codec)
        assert least <= bytes_ <= max(1.031 * least, least + 4 * EXACT_LEAST)
    assert most_exact("int8", 10**9) == pytest.approx(10**7, rel=0.03)


def test_a_run_made_before_sends_all_tensors_in_its_codec_and_in_its_order() -> None:
    layout = make_layout([("a", (9,)), ("b", (300, 70)), ("c", (7,))])
    assert arranged(layout.tensors, "int8", {}, exact=False) == list(layout.tensors)
    assert mixture_of(layout, "int8", {}, exact=False) == "int8"
    assert mixture_of(layout, "int8", {}) == "fp32:9+int8:21000+fp32"


def test_where_small_tensors_are_many_the_smallest_are_exact() -> None:
    layout = ordered(make_layout([(f"t{size}", (size,)) for size in range(1000, 8000, 500)]))
    text = mixture_of(layout, "int8", {})
    assert text == f"int8:{layout.numel - 2500}+fp32"  # 1,000 and 1,500; 2,000 more are too many
    assert [spec.numel for spec in layout.tensors][-2:] == [1000, 1500]
    above = make_layout([("w", (SMALL_ELEMENTS * 200, 1)), ("a", (SMALL_ELEMENTS + 1,))])
    assert mixture_of(above, "int8", {}) == "int8"


def test_each_fragment_is_one_range_of_each_codec() -> None:
    for fragments in (2, 3, 7):
        for part in cut(gpt(256, 6), fragments):
            text = mixture_of(part, "int8", {})
            assert len(text.split("+")) <= 2
            small = sum(spec.numel for spec in part.tensors if len(spec.shape) == 1)
            assert ("fp32" in text) == bool(small and len(part.tensors) > 1)


def test_a_parameter_without_neighbours_keeps_the_codec() -> None:
    assert mixture_of(make_layout([("w", (100,))]), "int8", {}) == "int8"
    assert mixture_of(make_layout([("w", (100,)), ("none", (0,))]), "int8", {}) == "int8"


class Pair(nn.Module):
    """Updates of ``large`` are 1e5 times as long as those of ``small``."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(8))
        self.small = nn.Parameter(torch.zeros(64))

    def forward(self) -> torch.Tensor:
        large, small = (self.large - 1000.0).square().mean(), (self.small - 1.0).square().mean()
        return 1e-3 * (large + small)


def test_a_small_tensor_moves_next_to_one_of_long_updates() -> None:
    def script(swarm: Swarm) -> torch.Tensor:
        model = Pair()
        optimizer = torch.optim.SGD(
            [{"params": [model.large], "lr": 100.0}, {"params": [model.small], "lr": 1000.0}]
        )
        sync = attach(model, optimizer, swarm, batch_size=1)
        while not sync.done:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        with sync.evaluate_anchor():
            return model.small.detach().clone()

    settings = RunSettings(
        sync_every=10, rounds=40, codec="int8", outer=OuterSettings("sgd", 0.5, 0.0)
    )
    for small in LocalSwarm(2, settings=settings).run(script, step_s=0.1):
        assert small.min() > 0.99


FEATURES = 16


def raw(count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of spreads from 1e-3 to 1e4, and classes that each feature has a part in."""
    x = torch.randn(count, FEATURES, generator=rng)
    classes = (x[:, ::2].sum(1) > x[:, 1::2].sum(1)).long()
    spread = torch.logspace(-3, 4, FEATURES)
    return x * spread + 3 * spread, classes


@lru_cache
def accuracy_of(codec: str, *, exact: bool = True) -> tuple[float, torch.Tensor]:
    """Of the anchor, in eval mode; and the running variances over the true ones."""

    def script(swarm: Swarm) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(FEATURES)
        first, second = nn.Linear(FEATURES, 256), nn.Linear(256, 256)  # too large to be exact
        hidden = (nn.ReLU(), nn.BatchNorm1d(256), second, nn.ReLU())
        model = nn.Sequential(norm, first, *hidden, nn.Linear(256, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sync = attach(model, optimizer, swarm, batch_size=64)
        rng = torch.Generator().manual_seed(1 + int(str(swarm.peer)[-1]))
        while not sync.done:
            x, classes = raw(64, rng)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), classes).backward()
            optimizer.step()
        with sync.evaluate_anchor(), torch.no_grad():
            model.eval()
            x, classes = raw(4096, torch.Generator().manual_seed(99))
            right = (model(x).argmax(1) == classes).float().mean()
            assert norm.running_var is not None
            return float(right), norm.running_var / torch.logspace(-3, 4, FEATURES).square()

    settings = RunSettings(sync_every=10, rounds=20, codec=codec, exact=exact)
    return LocalSwarm(2, settings=settings).run(script, step_s=0.1)[0]


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "fp32"])
def test_running_statistics_of_raw_features_are_as_good_as_in_fp32(codec: str) -> None:
    best, _ = accuracy_of("fp32")
    found, variances = accuracy_of(codec)
    assert best > 0.95
    assert found >= 0.98 * best
    assert ((variances > 0.8) & (variances < 1.25)).all()


def test_running_statistics_of_raw_features_do_not_move_in_int8() -> None:
    """So it was before they travelled in fp32."""
    best, _ = accuracy_of("fp32")
    found, variances = accuracy_of("int8", exact=False)
    assert found < 0.8 * best
    assert variances.max() > 100


ROWS, WIDTH = 50_000, 4


def zipf_way(codec: str) -> tuple[float, float]:
    """How far rare and common rows of an embedding went, over the way they had to go. A row's
    update is as long as its token is frequent, by Zipf's law; rare rows have one in their block
    that is at least 300 times as frequent.
    """
    blocks = ROWS * WIDTH // 256
    order = torch.arange(blocks * (256 // WIDTH)).view(-1, blocks).T.flatten()
    order = torch.cat((order, torch.arange(len(order), ROWS)))  # each block has a frequent one
    often = 1.0 / (1 + order)[:, None].expand(ROWS, WIDTH)
    direction = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)).sign()

    def script(swarm: Swarm) -> torch.Tensor:
        table = nn.Embedding(ROWS, WIDTH)
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        sync = attach(table, optimizer, swarm, batch_size=1)
        rng = torch.Generator().manual_seed(int(str(swarm.peer)[-1]))
        while not sync.done:
            noise = 1 + 0.5 * torch.randn(ROWS, WIDTH, generator=rng)
            optimizer.zero_grad()
            (table.weight * direction * often * noise).sum().backward()
            optimizer.step()
        with sync.evaluate_anchor():
            return table.weight.detach().clone()

    rounds, steps = 40, 2
    settings = RunSettings(sync_every=steps, rounds=rounds, codec=codec)
    weight = LocalSwarm(2, settings=settings).run(script, step_s=0.1)[0]
    way = -weight * direction / (often * rounds * steps)
    longest = often[: blocks * 256 // WIDTH].reshape(blocks, 256).amax(1, keepdim=True)
    rare = torch.zeros(ROWS * WIDTH, dtype=torch.bool)
    rare[: blocks * 256] = (
        often.flatten()[: blocks * 256].view(blocks, 256) * 300 < longest
    ).flatten()
    assert rare.sum() > 10_000
    return float(way.flatten()[rare].mean()), float(way[order < 100].mean())


def test_rare_rows_of_an_embedding_go_their_way() -> None:
    assert zipf_way("int8")[0] < 0.1
    rare, common = zipf_way(RunSettings().codec)
    assert 0.9 < rare < 1.1
    assert 0.95 < common < 1.05
