"""Which part of each tensor a rank holds: all of it (DDP), or a box of it (FSDP2).

A box has the first index and the length in each dimension. Boxes that several ranks hold alike are
written by the first of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...collectives.errors import ConfigError
from ...collectives.layout import Layout, TensorSpec
from ..model.flat import FlatVector, unwrap
from .talk import Ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and length, by dimension
UNLIKE = 0.1  # of the norm: what replicas of one model differ by is rounding


class RankVector(FlatVector):
    """The vector of one rank's slices. All ranks ask it the same questions at the same time."""

    ranks: Ranks

    def agreed(self, found: str) -> str:
        return self.ranks.agreed(found)


class Slices:
    """Where the slices of all ranks are in the whole vector of ``layout``."""

    def __init__(self, layout: Layout, boxes: list[list[Box]], rank: int) -> None:
        """``boxes``: by rank, by tensor. Raises ConfigError unless they make up the tensors."""
        self.layout, self._boxes = layout, boxes
        self._written: list[list[bool]] = [[] for _ in boxes]
        for index, spec in enumerate(layout.tensors):
            seen = set[Box]()
            for held, written in zip(boxes, self._written, strict=True):
                written.append(held[index] not in seen)
                seen.add(held[index])
            if sum(_numel(box) for box in seen) != spec.numel:
                raise ConfigError(
                    f"the ranks' slices of {spec.name} do not make up the whole tensor",
                    key="model",
                    hint="One job is one copy of the model.",
                )
        self.mine = self.of(rank)

    def of(self, rank: int) -> Layout:
        """The layout of one rank's slices."""
        offset, specs = 0, list[TensorSpec]()
        for spec, (_, shape) in zip(self.layout.tensors, self._boxes[rank], strict=True):
            specs.append(TensorSpec(spec.name, shape, offset, spec.role))
            offset += specs[-1].numel
        return Layout(tuple(specs), offset)

    @property
    def whole(self) -> bool:
        """Whether every rank holds all of every tensor."""
        return all(
            shape == spec.shape
            for held in self._boxes
            for spec, (_, shape) in zip(self.layout.tensors, held, strict=True)
        )

    def put(self, rank: int, values: Tensor, out: Tensor) -> str:
        """Write what this rank is to write into the whole vector ``out``. Returns the first
        parameter of which it has other values than the rank before it that holds the same, or "".
        """
        at, other = 0, ""
        for spec, box, written in zip(
            self.layout.tensors, self._boxes[rank], self._written[rank], strict=True
        ):
            numel = _numel(box)
            if numel:
                part = _part(out[spec.offset : spec.offset + spec.numel].view(spec.shape), box)
                mine = values[at : at + numel].view(box[1])
                if written:
                    part.copy_(mine)
                elif (
                    not other
                    and spec.role == "parameter"
                    and bool((part - mine).norm() > UNLIKE * part.norm())
                ):
                    other = spec.name
            at += numel
        return other

    def cut(self, rank: int, source: Any, out: Tensor) -> None:
        """Read a rank's slices of a `RangeSource` of the whole vector into ``out``; needs room for
        the longest tensor.
        """
        at = 0
        for spec, box in zip(self.layout.tensors, self._boxes[rank], strict=True):
            if numel := _numel(box):
                tensor = torch.empty(spec.numel, dtype=torch.float32, device="cpu")
                source.copy_into(tensor, spec.offset)
                out[at : at + numel].view(box[1]).copy_(_part(tensor.view(spec.shape), box))
                at += numel


def _numel(box: Box) -> int:
    count = 1
    for length in box[1]:
        count *= length
    return count


def _part(tensor: Tensor, box: Box) -> Tensor:
    for dim, (first, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor


def slice_model(model: nn.Module, flat: FlatVector, ranks: Ranks) -> tuple[Slices, RankVector]:
    """What each rank holds of the whole vector ``flat``, and this rank's own. Raises ConfigError
    (at all ranks) for what is not DDP or FSDP2.
    """
    fault = next(
        (why for name, tensor in _dtensors(model) if (why := _why_refused(model, name, tensor))), ""
    )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        fault = (
            "the model is in FullyShardedDataParallel, whose ranks hold slices "
            "that do not say of what"
        )
    if fault := ranks.agreed(fault):
        raise ConfigError(
            fault,
            key="model",
            why=(
                "Only DDP and FSDP2 (fully_shard) cut a model such that peers of another "
                "number of ranks can meet it."
            ),
            hint="Train with data parallelism only: DistributedDataParallel or fully_shard.",
        )
    first = ranks.tell(flat.layout.digest, bytes)
    if fault := ranks.agreed(
        ""
        if flat.layout.digest() == first
        else f"rank {ranks.rank} has other parameters than rank 0"
    ):
        raise ConfigError(
            fault,
            key="model",
            why="Stages of a pipeline are different models.",
            hint="Train without pipeline parallelism: DistributedDataParallel or fully_shard.",
        )
    boxes = ranks.gathered([_box(tensor) for tensor in flat.tensors], list[Box])
    slices = Slices(flat.layout, boxes, ranks.rank)
    mine = RankVector.of(
        slices.mine,
        [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in flat.tensors],
    )
    mine.ranks = ranks
    return slices, mine


def reshard(model: nn.Module) -> None:
    """Let FSDP2 forget gathered parameters, which are not those that were written since."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _dtensors(model: nn.Module) -> list[tuple[str, DTensor]]:
    return [
        (name, parameter)
        for name, parameter in unwrap(model).named_parameters()
        if isinstance(parameter, DTensor)
    ]


def _why_refused(model: nn.Module, name: str, tensor: DTensor) -> str:
    if not any(isinstance(module, FSDPModule) for module in unwrap(model).modules()):
        return f"parameter {name} is a DTensor of a model without fully_shard (tensor parallelism)"
    *outer, last = tensor.placements
    if (
        len(outer) > 1
        or type(last) is not Shard
        or any(type(placement) is not Replicate for placement in outer)
    ):
        return f"parameter {name} has placements {tensor.placements} (tensor parallelism)"
    return ""


def _box(tensor: Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    inside = tuple(0 if not length else start for start, length in zip(first, shape, strict=True))
    return inside, tuple(shape)
