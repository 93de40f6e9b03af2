"""The flat vector: what it holds, and that values cross it exactly."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from atoll.collectives.codecs.mixtures import mixture_of
from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.optim.model import flat as flat_module
from atoll.optim.model.flat import FlatVector
from atoll.optim.model.pseudograd import write_pseudo_gradient
from atoll.optim.model.reconcile import rebase
from atoll.optim.model.vector import FlatTensor


class Mixed(nn.Module):
    """Tied weights, a frozen layer, BatchNorm, a buffer that is a constant, and a weight that is
    not contiguous.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        nn.init.ones_(self.frozen.weight)  # what is frozen is in the layout's digest
        nn.init.ones_(self.frozen.bias)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.full((3,), float("-inf")))


@pytest.fixture(params=[1 << 20, 5])
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One segment for all, or tiny ones that cut tensors."""
    monkeypatch.setattr(flat_module, "SEGMENT_ELEMENTS", request.param)
    return request.param


def live(flat: FlatVector) -> torch.Tensor:
    out = torch.empty(flat.numel)
    flat.write_to(out)
    return out


def test_layout_holds_parameters_then_running_statistics_and_tied_weights_once() -> None:
    flat = FlatVector(Mixed())
    assert [(spec.name, spec.shape, spec.role) for spec in flat.layout.tensors] == [
        ("turned", (5, 3), "parameter"),
        ("scale", (), "parameter"),
        ("embed.weight", (7, 4), "parameter"),
        ("norm.weight", (4,), "parameter"),
        ("norm.bias", (4,), "parameter"),
        ("norm.running_mean", (4,), "mean"),
        ("norm.running_var", (4,), "variance"),
    ]
    assert flat.layout.check() is None
    assert flat.numel == 15 + 1 + 28 + 8 + 8
    assert FlatVector(Mixed()).layout.digest() == flat.layout.digest()


def test_values_cross_exactly_in_logical_order(segments: int) -> None:
    model = Mixed()
    flat = FlatVector(model)
    expected = torch.cat([tensor.detach().reshape(-1) for tensor in flat.tensors])
    assert torch.equal(live(flat), expected)
    values = torch.randn(flat.numel)
    frozen = model.frozen.weight.clone()
    pointers = [tensor.data_ptr() for tensor in flat.tensors]
    flat.read_from(FlatTensor(values))
    assert torch.equal(live(flat), values)
    assert torch.equal(model.turned.detach(), values[:15].view(5, 3))
    assert torch.equal(model.head.weight, model.embed.weight)
    assert torch.equal(model.frozen.weight, frozen)
    assert [tensor.data_ptr() for tensor in flat.tensors] == pointers
    assert all(tensor.grad_fn is None for tensor in flat.tensors)


def test_segments_cover_the_vector_without_gaps_and_are_bounded(segments: int) -> None:
    flat = FlatVector(Mixed())
    found = list(flat.segments())
    assert found[0].start == 0
    assert found[-1].stop == flat.numel
    assert all(a.stop == b.start for a, b in pairwise(found))
    assert all(
        s.numel <= segments or len(s.pieces) == 1 for s in found
    )  # a tensor that is not contiguous is one piece
    assert all(piece.stop - piece.start == piece.live.numel() for s in found for piece in s.pieces)


def test_a_model_that_changed_its_memory_format_still_crosses(segments: int) -> None:
    model = nn.Conv2d(3, 4, 3)
    flat = FlatVector(model)
    before = live(flat)
    model.to(memory_format=torch.channels_last)
    assert torch.equal(live(flat), before)
    values = torch.randn(flat.numel)
    flat.read_from(FlatTensor(values))
    assert torch.equal(model.weight.detach().reshape(-1), values[: model.weight.numel()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_measure_progress_from_what_they_started_from(
    dtype: torch.dtype, segments: int
) -> None:
    flat = FlatVector(nn.Linear(6, 5).to(dtype))
    anchor = torch.randn(flat.numel)
    flat.read_from(FlatTensor(anchor))
    assert torch.equal(live(flat), anchor.to(dtype).float())
    out = torch.empty(flat.numel)
    write_pseudo_gradient(flat, FlatTensor(anchor), out)
    assert torch.equal(out, torch.zeros(flat.numel))  # nothing was trained: rounding is no progress
    new = anchor + 0.25
    rebase(flat, FlatTensor(new), FlatTensor(anchor))
    assert torch.equal(live(flat), new.to(dtype).float())


def test_float64_models_cross_as_float32() -> None:
    flat = FlatVector(nn.Linear(3, 2).double())
    values = torch.randn(flat.numel)
    flat.read_from(FlatTensor(values))
    assert torch.equal(live(flat), values)


def test_names_do_not_depend_on_wrappers() -> None:
    model = Mixed()
    names = FlatVector(model).layout
    assert FlatVector(torch.compile(copy.deepcopy(model), backend="eager")).layout == names  # type: ignore[arg-type]
    assert FlatVector(nn.DataParallel(copy.deepcopy(model))).layout == names


def test_nan_and_infinity_are_seen_anywhere_and_the_first_tensor_named() -> None:
    model = Mixed()
    flat = FlatVector(model)
    assert flat.not_finite() == ""  # the constant mask is not part of it
    for bad in (float("nan"), float("inf"), float("-inf")):
        with torch.no_grad():
            model.norm.bias[3] = bad
        assert flat.not_finite() == "norm.bias"
    with torch.no_grad():
        model.norm.running_var[0] = float("nan")
    assert flat.not_finite() == "norm.bias"


def test_tensors_of_one_codec_are_neighbours() -> None:
    plain = FlatVector(Mixed())
    flat = FlatVector(Mixed(), RunSettings(codecs={"norm.*": "bf16"}))
    names, before = (
        [spec.name for spec in flat.layout.tensors],
        [spec.name for spec in plain.layout.tensors],
    )
    assert flat.layout.check() is None
    assert mixture_of(flat.layout, "int8", {"norm.*": "bf16"}) == "bf16:8+fp32:44+bf16"
    parameters = sum(spec.role == "parameter" for spec in plain.layout.tensors)
    assert names[:parameters] == sorted(
        before[:parameters], key=lambda name: not name.startswith("norm.")
    )
    assert names[parameters:] == before[parameters:]
    for spec, tensor in zip(flat.layout.tensors, flat.tensors, strict=True):
        assert tuple(tensor.shape) == spec.shape
    out, again = (
        torch.empty(flat.numel),
        FlatVector(Mixed(), RunSettings(codecs={"norm.*": "bf16"})),
    )
    flat.write_to(out)
    again.read_from(FlatTensor(out))
    assert all(torch.equal(a, b) for a, b in zip(flat.tensors, again.tensors, strict=True))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (nn.ReLU(), "no trainable parameters"),
        (nn.Linear(2, 2, device="meta"), "meta device"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
        (nn.ParameterList([nn.Parameter(torch.zeros([1] * 9))]), "9 dimensions"),
        (nn.ParameterList([nn.Parameter(torch.zeros(0))]), "0 elements"),
    ],
)
def test_what_cannot_be_averaged_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        FlatVector(model)
    assert error.value.key == "model"


def test_dtensors_are_refused() -> None:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Replicate()]))
        with pytest.raises(ConfigError, match="weight is a DTensor"):
            FlatVector(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_values_cross_from_and_to_a_gpu(segments: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = Mixed().cuda()
    flat = FlatVector(model)
    values, new = torch.randn(flat.numel), torch.randn(flat.numel)
    flat.read_from(FlatTensor(values))
    assert torch.equal(live(flat), values)
    with torch.no_grad():
        for tensor in flat.tensors:
            tensor.add_(1.0)
    expected = live(flat)
    out = torch.empty(flat.numel)
    write_pseudo_gradient(flat, FlatTensor(values), out)
    assert torch.equal(out, values - expected)
    rebase(flat, FlatTensor(new), FlatTensor(values))
    assert torch.equal(live(flat), new + (expected - values))
