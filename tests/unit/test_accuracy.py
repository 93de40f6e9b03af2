"""The wished error of a round: which codecs it picks, what they lose, and what is told of it."""

import itertools
import math

import pytest
import torch
from torch import nn

from atoll.collectives.codec_names import BYTES_PER_VALUE, ROUND_ERROR
from atoll.collectives.codecs.accuracy import (
    bytes_per_value,
    choose_codecs,
    coarse_share,
    expected_error,
    ladder,
)
from atoll.collectives.codecs.codec import Chunking
from atoll.collectives.codecs.mixtures import codecs_of, mixture_of
from atoll.collectives.cutting import cut
from atoll.collectives.errors import ConfigError
from atoll.collectives.layout import Layout, TensorSpec, make_layout
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings, SecureSettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest import parse_manifest
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.optim.model.accuracy import measured_chunking, realised_error, realised_errors
from atoll.optim.model.flat import FlatVector


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.stats = nn.Linear(4 * width, width), nn.BatchNorm1d(width)


def model(width: int = 32, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, width), *(Block(width) for _ in range(depth)))


def layout_of(error: float | None, codecs: dict[str, str] | None = None) -> Layout:
    return FlatVector(model(), RunSettings(error=error, codecs=codecs or {})).layout


@pytest.mark.parametrize("codec", ROUND_ERROR)
def test_a_round_of_normal_values_loses_what_the_table_says(codec: str) -> None:
    found = realised_error(Chunking(codec, 1 << 20, 1 << 16), normal(1 << 20))
    assert 0.99 * ROUND_ERROR[codec] <= found <= ROUND_ERROR[codec]


def test_a_mean_of_members_is_off_by_what_one_member_measures() -> None:
    members, numel, chunking = 8, 1 << 16, Chunking("int8", 1 << 16, 1 << 14)

    def coded(values: torch.Tensor) -> torch.Tensor:
        out = torch.empty(numel)
        for chunk in range(chunking.chunks):
            wire = chunking.wire(memoryview(bytearray(chunking.wire_bytes(chunk))), chunk)
            part = slice(*(chunking.chunk_elements * k for k in (chunk, chunk + 1)))
            chunking.codec(chunk).encode(values[part], wire)
            chunking.codec(chunk).decode(wire, out[part])
        return out

    given = [normal(numel, seed) for seed in range(members)]
    exact = torch.stack(given).mean(0)
    error = coded(torch.stack([coded(each) for each in given]).mean(0)) - exact
    assert error.norm() / exact.norm() == pytest.approx(
        realised_error(chunking, given[0]), rel=0.03
    )


@pytest.mark.parametrize(
    ("error", "fine", "coarse", "share"),
    [
        (0.001, "fp32", "bf16", (0.001 / 0.00235) ** 2),
        (0.005, "bf16", "int8", (0.005**2 - 0.00235**2) / (0.0099**2 - 0.00235**2)),
        (0.01, "int8", "int4", (0.01**2 - 0.0099**2) / (0.1525**2 - 0.0099**2)),
        (0.05, "int8", "int4", (0.05**2 - 0.0099**2) / (0.1525**2 - 0.0099**2)),
        (0.1525, "int4", None, 0.0),
    ],
)
def test_two_neighbouring_codecs_share_what_may_be_lost(
    error: float, fine: str, coarse: str | None, share: float
) -> None:
    assert ladder(error) == (fine, coarse)
    assert coarse_share(error) == pytest.approx(share)
    lengths = [(fine, round((1 - share) * 10**9)), (coarse or fine, round(share * 10**9))]
    assert expected_error(lengths) == pytest.approx(error, rel=1e-6)
    assert bytes_per_value(error) == pytest.approx(
        (1 - share) * BYTES_PER_VALUE[fine] + share * BYTES_PER_VALUE[coarse or fine]
    )


def test_no_other_two_or_three_codecs_take_fewer_bytes() -> None:
    names, steps = list(ROUND_ERROR), 40
    for error in (0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1):
        best = bytes_per_value(error)
        for counts in itertools.product(range(steps + 1), repeat=len(names) - 1):
            if (last := steps - sum(counts)) < 0:
                continue
            mixed = list(zip(names, (*counts, last), strict=True))
            if expected_error(mixed) <= error:
                mean = math.fsum(BYTES_PER_VALUE[name] * count for name, count in mixed) / steps
                assert mean >= best - 1e-9


def test_the_first_tensors_are_coarse_while_the_error_allows() -> None:
    # 10.7 % of 1,000 values may be int4
    assert list(choose_codecs(0.05, [50, 50, 7, 393, 500])) == [
        "int4",
        "int4",
        "int8",
        "int8",
        "int8",
    ]
    assert list(choose_codecs(0.05, [500, 50, 450])) == ["int8"] * 3
    assert list(choose_codecs(0.1525, [3, 5])) == ["int4"] * 2


def test_small_matrices_are_coarse_large_ones_fine_and_vectors_exact() -> None:
    layout = layout_of(0.08)
    codecs = dict(
        zip((s.name for s in layout.tensors), codecs_of(layout, "int8", {}, 0.08), strict=True)
    )
    assert {name for name, codec in codecs.items() if codec == "int4"} == {
        "1.up.weight",
        "1.down.weight",
    }
    assert all(codecs[spec.name] == "fp32" for spec in layout.tensors if len(spec.shape) < 2)
    assert mixture_of(layout, "int8", {}, 0.08) == "int4:8192+int8:32768+fp32"
    assert layout.check() is None


@pytest.mark.parametrize("error", [0.001, 0.003, 0.01, 0.05, 0.08, 0.12, 0.152])
def test_normal_values_lose_no_more_than_is_wished(error: float) -> None:
    layout = layout_of(error)
    for part in (layout, *cut(layout, 4)):
        text = mixture_of(part, "int8", {}, error)
        assert len(text.split("+")) <= 3
        assert realised_error(Chunking(text, part.numel, 4096), normal(part.numel)) <= 1.05 * error


def test_named_tensors_keep_their_codec() -> None:
    patterns = {"*.up.weight": "bf16", "*.norm.*": "fp32"}
    layout = layout_of(0.08, patterns)
    codecs = codecs_of(layout, "int8", patterns, 0.08)
    for spec, codec in zip(layout.tensors, codecs, strict=True):
        assert (codec == "bf16") == spec.name.endswith("up.weight")
        assert (codec == "fp32") == (len(spec.shape) < 2)
    assert (
        mixture_of(layout, "int8", patterns, 0.08)
        == "int4:4096+int8:20480+fp32:256+bf16:16384+fp32"
    )


def test_of_a_long_vector_some_chunks_are_measured() -> None:
    chunking, values = Chunking("int8", 1 << 20, 1 << 12), normal(1 << 20)
    assert chunking.chunks == 256
    values[1 << 12 : 1 << 14] *= 1e3  # chunks 1 to 3: between those that are looked at
    assert realised_error(chunking, values) == pytest.approx(ROUND_ERROR["int8"], rel=0.01)
    assert realised_error(chunking, torch.zeros(1 << 20)) == 0.0


@pytest.mark.parametrize(
    ("tables", "key", "why"),
    [
        ("exchange = { error = 0.01, codec = 'int4' }", "$.exchange.codec", "picks"),
        ("exchange = { error = 0.01, plan = 'ring' }", "$.exchange.plan", "encoded again"),
        (
            "exchange = { error = 0.01, codecs = { x = 'stat2' } }",
            "$.exchange.error",
            "lose more",
        ),
        ("exchange = { error = 0.3 }", "$.exchange.error", ""),
        ("exchange = { error = 0.0 }", "$.exchange.error", ""),
        (
            "kind = 'federated'\nsecure = {}\nexchange = { error = 0.01 }",
            "$.exchange.error",
            "whole numbers",
        ),
    ],
)
def test_what_a_wished_error_does_not_go_with(tables: str, key: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(f'schema = 1\nname = "x"\n{tables}')
    assert caught.value.key == key
    assert why in caught.value.why


def test_what_is_lost_is_told_by_class_of_tensor() -> None:
    """A vector whose updates are 1e4 times shorter than its neighbours' loses all of them in int8:
    of all values that is nothing, of its class everything.
    """
    specs = (
        TensorSpec("matrix", (100, 100), 0),
        TensorSpec("bias", (40,), 10_000),
        TensorSpec("more", (50, 100), 10_040),
        TensorSpec("running_var", (300,), 15_040, "variance"),
    )
    layout, values = Layout(specs, 15_340), normal(15_340)
    values[10_000:10_040] *= 1e-4
    for chunk in (256, 4096, 1 << 20):
        found = realised_errors(Chunking("int8:15040+fp32", 15_340, chunk), values, layout)
        assert found["encoding_error/vectors"] == pytest.approx(math.sqrt(2))
        assert found["encoding_error/statistics"] == 0.0
        assert 0.008 < found["encoding_error/matrices"] < 0.012
        assert 0.008 < found["encoding_error"] < 0.012
        of_all = realised_error(Chunking("int8:15040+fp32", 15_340, chunk), values)
        assert found["encoding_error"] == of_all
    assert realised_errors(Chunking("int8", 15_340, 4096), torch.zeros(15_340), layout) == {}
    values[3] = math.nan
    assert "encoding_error" not in realised_errors(Chunking("int8", 15_340, 4096), values, layout)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (RunSettings(), "int8_dither:8192+fp32"),
        (RunSettings(error=0.01), "int8:8192+fp32"),
        (RunSettings(codec="fp32"), None),  # nothing is lost
        (RunSettings(codec="stat2"), None),  # what is lost comes later
        (RunSettings(codec="bits", reducer="copy", secure=SecureSettings(3)), None),
    ],
)
def test_in_which_runs_it_is_measured(settings: RunSettings, text: str | None) -> None:
    chunking = measured_chunking(make_layout([("w", (64, 128)), ("b", (128,))]), settings)
    assert (chunking.name if chunking is not None else None) == text


def test_members_of_a_run_choose_alike_and_report_what_was_lost() -> None:
    settings = RunSettings(sync_every=2, rounds=3, error=0.09)
    reports: list[dict[str, float]] = []

    def script(swarm: Swarm) -> tuple[str, torch.Tensor]:
        assert isinstance(swarm, LocalMember)
        torch.manual_seed(swarm.index)
        net = nn.Sequential(nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        sync = attach(net, optimizer, swarm, batch_size=4, clock=swarm.clock)
        inputs = torch.randn(64, 40)
        while not sync.done:
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.sleep(0.1)
        reports.append(swarm.reports[-1])
        machine = swarm._session(0).machine
        assert machine is not None
        return machine.shape.codec, torch.cat([p.detach().flatten() for p in net.parameters()])

    found = LocalSwarm(3, settings=settings).run(script)
    assert {codec for codec, _ in found} == {"int4:4000+int8:10000+fp32"}
    for _, values in found:
        assert torch.equal(values, found[0][1])
    for report in reports:
        assert 0.02 < report["encoding_error"] < 0.2
        assert 0.02 < report["encoding_error/matrices"] < 0.2
        assert report["encoding_error/vectors"] == 0  # small ones are fp32
