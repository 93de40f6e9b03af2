"""The model as one float32 vector.

What it holds, in this order: every parameter that requires a gradient when the vector is made, or
that the script includes, then the buffers that are averaged (`buffers`): running means and
variances, and those that the run's settings declare. What it leaves out: frozen parameters (the
layout has their digest, so all members have the same) and all other buffers, which are constants or
a peer's own. A tensor used in several places (tied weights) is there once, under its first name.
Later changes of ``requires_grad`` do not change the vector. Where the run's settings
give tensors codecs of their own, those of one codec are neighbours, parameters and statistics each
for themselves. In a run whose method has them, sums that no model has come beside it
(`SumsBeside`).

Values cross in segments through one small scratch, so no second copy of the model is made. Models
of float16 and bfloat16 have a float32 vector: progress is measured against what the live tensors
really started from, the anchor rounded to their type (`FlatVector.round_to_live`). Where an
optimizer keeps a wider master of a tensor (`FlatVector.masters`), values are the master's, in both
directions, and the tensor holds them rounded. float64 crosses as float32; counts and flags that are
averaged do, too, and are rounded to the next whole number.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...collectives.codecs.mixtures import arranged
from ...collectives.cutting import cut
from ...collectives.errors import ConfigError
from ...collectives.layout import (
    MAX_DIMS,
    MAX_TENSORS,
    STEPS,
    BufferClass,
    Layout,
    Role,
    TensorSpec,
    pattern_of,
)
from ...collectives.swarm import RunSettings
from .buffers import ModelBuffer, check_patterns, model_buffers
from .frozen import base_digest
from .traits import traits_of
from .vector import SEGMENT_ELEMENTS, ModelVector, Piece, RangeSource, Segment

# Of a segment on the CPU: as fast as longer ones, and its scratch is no part of a model.
HOST_ELEMENTS = 1 << 17
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COUNTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Torch.compile and activation checkpointing put these into names.
WRAPPERS = (
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
)


SumsBeside = Callable[[RunSettings, int], dict[str, Tensor]]
"""What a run's flat vector has beside a model of so many parameters, by name, float32 and zero at
first.
"""


def no_sums(settings: RunSettings, parameters: int) -> dict[str, Tensor]:
    """Nothing."""
    return {}


class FlatVector(ModelVector):
    """The flat vector of ``model`` in a run with these settings. Refuses with ConfigError what it
    cannot represent.

    ``layout`` names the tensors; ``tensors`` are the live ones, in its order. Nothing is copied
    when it is made. ``masters``: wider tensors that an optimizer makes live ones of at each step,
    by the id of the live one; of the parts of a `cut`, too. Filled at boundaries, empty otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: RunSettings | None = None,
        *,
        included: Collection[str] = (),
        sharded: bool = False,
        beside: SumsBeside = no_sums,
    ) -> None:
        """``included``: names of parameters that are in the vector though they are frozen now.
        ``sharded``: DTensors are taken, for `optim.ranks` to cut; such a vector itself can only be
        described. ``beside``: what the run's method has beside the model.
        """
        settings = settings or RunSettings()
        buffers = buffers_of(model, settings.buffers)
        check_patterns(buffers, settings.buffers)
        named = list(_named_tensors(model, included, buffers))
        if not any(role == "parameter" for _, _, role in named):
            raise ConfigError(
                "the model has no trainable parameters",
                key="model",
                why="Every parameter has requires_grad False, or there is none.",
                hint="Unfreeze what is to be trained before attach().",
            )
        specs: list[TensorSpec] = []
        for name, tensor, role in named:
            _check_tensor(name, tensor, role, sharded)
            specs.append(TensorSpec(name, tuple(tensor.shape), 0, role))
        if settings.privacy is not None:
            _check_statistics(specs)
            _check_groups(specs, settings.privacy.clips, "$.privacy.clips")
        self._sums = beside(settings, sum(spec.numel for spec in specs if spec.role == "parameter"))
        specs += [
            TensorSpec(name, tuple(tensor.shape), 0, "mean" if name == STEPS else "sum")
            for name, tensor in self._sums.items()
        ]
        if settings.secure is not None:
            _check_groups(specs, settings.secure.reaches, "$.secure.reaches")
        specs = arranged(
            specs, settings.codec, settings.codecs, settings.error, exact=settings.exact
        )
        live = {name: tensor for name, tensor, _ in named} | self._sums
        offset = specs[-1].offset + specs[-1].numel
        if len(specs) > MAX_TENSORS or offset == 0:
            raise ConfigError(
                (
                    f"the model has {len(specs)} tensors of {offset} elements in all, limit "
                    f"{MAX_TENSORS} tensors"
                ),
                key="model",
            )
        base = base_digest(list(_frozen(model, included)), settings.adapters.base)
        traits = tuple(
            (clean_name(name), told[:200]) for name, told in traits_of(unwrap(model)).items()
        )
        layout = Layout(tuple(specs), offset, base, traits)
        self._take(layout, [live[spec.name] for spec in specs])
        self._model = weakref.ref(model)

    @classmethod
    def of(cls, layout: Layout, tensors: list[Tensor]) -> Self:
        """The vector of these live tensors."""
        vector = cls.__new__(cls)
        vector._take(layout, tensors)
        return vector

    def _take(self, layout: Layout, tensors: list[Tensor]) -> None:
        self.layout, self.tensors, self.numel = layout, tensors, layout.numel
        # They come first.
        self.parameters = sum(spec.numel for spec in layout.tensors if spec.role == "parameter")
        self.masters: dict[int, Tensor] = {}
        self._slots = (_Slot(), _Slot())
        self._parts: list[FlatVector] = []
        # A vector that was made of tensors has none to follow.
        self._model: Callable[[], nn.Module | None] = lambda: None

    def cut(self, fragments: int) -> list[FlatVector]:
        """The vector in so many fragments (`collectives.layout.cut`), each a vector of its own over
        the same live tensors.
        """
        tensors = iter(self.tensors)
        self._parts = [
            FlatVector.of(layout, [next(tensors) for _ in layout.tensors])
            for layout in cut(self.layout, fragments)
        ]
        for part in self._parts:
            part.masters = self.masters
        return self._parts

    def follow(self) -> None:
        """Take up the tensors that the model has now under the names of the layout: `Module.to`
        replaces buffers. Raises ConfigError where a tensor is gone or of another shape."""
        if (model := self._model()) is None:
            return
        inner = unwrap(model)
        named = chain(
            inner.named_parameters(remove_duplicate=False),
            inner.named_buffers(remove_duplicate=False),
        )
        live = {clean_name(name): tensor for name, tensor in named} | self._sums
        for spec in self.layout.tensors:
            shape = tuple(live[spec.name].shape) if spec.name in live else None
            if shape != spec.shape:
                now = "gone from the model" if shape is None else f"of shape {list(shape)} now"
                raise ConfigError(
                    f"{spec.name} is {now}; it was attached as {list(spec.shape)}",
                    key="model",
                    why="All members of a run have the same tensors.",
                    hint="Change the model before attach(); a changed model is another run's.",
                )
        self.tensors[:] = [live[spec.name] for spec in self.layout.tensors]
        tensors = iter(self.tensors)
        for part in self._parts:
            part.tensors[:] = [next(tensors) for _ in part.tensors]

    def segments(self) -> Iterator[Segment]:
        """The vector cut into segments of at most `SEGMENT_ELEMENTS` elements (`HOST_ELEMENTS` on
        the CPU), or one tensor that is not contiguous.
        """
        pieces: list[Piece] = []
        begin = end = 0
        for spec, tensor in zip(self.layout.tensors, self.tensors, strict=True):
            live, rounded = tensor.detach(), None
            if (master := self.masters.get(id(tensor))) is not None:
                live, rounded = master, live
            whole = not (live.is_contiguous() and tensor.is_contiguous())
            done = 0
            while done < spec.numel:
                longest = SEGMENT_ELEMENTS if live.is_cuda else min(HOST_ELEMENTS, SEGMENT_ELEMENTS)
                if pieces and (
                    whole or end - begin == longest or pieces[0].live.device != live.device
                ):
                    yield Segment(begin, end, tuple(pieces))
                    pieces, begin = [], end
                count = spec.numel if whole else min(spec.numel - done, longest - (end - begin))
                part, also = live, rounded
                if not whole:
                    part = live.view(-1)[done : done + count]
                    also = None if rounded is None else rounded.view(-1)[done : done + count]
                pieces.append(Piece(end - begin, end - begin + count, part, also))
                done += count
                end += count
                if whole:
                    yield Segment(begin, end, tuple(pieces))
                    pieces, begin = [], end
        if pieces:
            yield Segment(begin, end, tuple(pieces))

    @torch.no_grad()
    def pull(self) -> Iterator[tuple[Segment, Tensor]]:
        """Each segment with its live values: float32, shape (segment.numel,), contiguous, on the
        CPU.

        The values are a scratch copy the caller may overwrite and `push` back before it asks for
        the next. From a CUDA device the next segment is on its way, on a side stream, while the
        caller works on this one.
        """
        waiting: tuple[Segment, _Slot] | None = None
        for index, segment in enumerate(self.segments()):
            slot = self._slots[index % 2]
            slot.fetch(segment)
            if waiting is not None:
                yield waiting[0], waiting[1].host(waiting[0])
            waiting = (segment, slot)
        if waiting is not None:
            yield waiting[0], waiting[1].host(waiting[0])
        self._settle()

    @torch.no_grad()
    def push(self, segment: Segment, values: Tensor) -> None:
        """Write ``values``, the tensor that came with ``segment``, into the live tensors."""
        slot = next(slot for slot in self._slots if slot.holds(values))
        slot.store(segment, values)

    @torch.no_grad()
    def write_to(self, out: Tensor) -> None:
        """Write the live values into ``out``: float32, shape (numel,), on the CPU."""
        if any(tensor.is_cuda for tensor in self.tensors):
            for segment, values in self.pull():
                out[segment.start : segment.stop].copy_(values)
        else:  # without a scratch in between
            for segment in self.segments():
                for piece in segment.pieces:
                    _shaped(out[segment.start : segment.stop], piece).copy_(piece.live)

    @torch.no_grad()
    def sample(self, starts: Sequence[int], run: int) -> Tensor:
        """The live elements [start, start + run) for each of ``starts``, which ascend and are at
        least ``run`` apart: float32, shape (len(starts) * run,), on the CPU.
        """
        wanted = (torch.tensor(starts).unsqueeze(1) + torch.arange(run)).view(-1)
        ends = torch.tensor([spec.offset + spec.numel for spec in self.layout.tensors])
        until = torch.searchsorted(wanted, ends).tolist()
        parts: list[Tensor] = []
        for spec, tensor, begin, end in zip(
            self.layout.tensors, self.tensors, [0, *until], until, strict=False
        ):
            if end > begin:
                at = (wanted[begin:end] - spec.offset).to(tensor.device)
                parts.append(torch.take(tensor.detach(), at).float().cpu())
        return torch.cat(parts) if parts else torch.empty(0)

    def write_initial(self, out: Tensor) -> None:
        """Write the live values as the first anchor of a run. Raises ConfigError where they hold
        NaN or infinity: every member would start there.
        """
        if bad := self.not_finite():
            raise ConfigError(
                f"{bad} holds NaN or infinity",
                key="model",
                why=(
                    "The founder's parameters are the run's first anchor, from "
                    "which every member starts."
                ),
                hint="Look at how the model is initialised or loaded, then attach again. An "
                "observer's range is infinite until it has seen a batch: call the model on one, "
                "once, before.",
            )
        self.write_to(out)

    @torch.no_grad()
    def read_from(self, source: RangeSource) -> None:
        """Make the live values those of ``source``, exactly (rounded to the live type where that is
        narrower).
        """
        for index, segment in enumerate(self.segments()):
            slot = self._slots[index % 2]
            values = slot.host(segment)
            source.copy_into(values, segment.start)
            self.push(segment, values)
        self._settle()

    @torch.no_grad()
    def round_to_live(self, segment: Segment, values: Tensor) -> None:
        """Round ``values`` in place to what the segment's live tensors would hold; nothing happens
        to float32 and float64.
        """
        for piece in segment.pieces:
            part = values[piece.start : piece.stop]
            if piece.live.dtype in (torch.bfloat16, torch.float16):
                part.copy_(part.to(piece.live.dtype))
            elif piece.live.dtype in COUNTS:
                part.round_()

    @torch.no_grad()
    def not_finite(self) -> str:
        """The first tensor that holds NaN or infinity, "" when none does. One pass over the live
        values; a CUDA device is waited for once.
        """
        bounds: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(self.tensors):
            if tensor.numel() and tensor.dtype not in COUNTS:
                low, high = torch.aminmax(tensor.detach())  # NaN spreads to both
                bounds.setdefault(tensor.device, []).append(
                    (index, torch.stack((low.float(), high.float())))
                )
        bad: list[int] = []
        for found in bounds.values():
            finite = torch.isfinite(torch.stack([pair for _, pair in found])).all(1).tolist()
            bad += [index for (index, _), good in zip(found, finite, strict=True) if not good]
        return self.agreed(self.layout.tensors[min(bad)].name if bad else "")

    def agreed(self, found: str) -> str:
        """What was found in this vector; in a job of several ranks, in the vector of any of them
        ("": nothing).
        """
        return found

    def _settle(self) -> None:
        for slot in self._slots:
            slot.settle()


@contextmanager
def showing(flat: FlatVector, source: RangeSource, replaced: Callable[[], None]) -> Generator[None]:
    """The live values are those of ``source`` for a with block, and come back after it, bit for
    bit. ``replaced`` hears of both. Masters are left as they are.
    """
    live = [tensor.detach().to("cpu", copy=True) for tensor in flat.tensors]
    masters, flat.masters = flat.masters, {}
    try:
        flat.read_from(source)
        replaced()
        yield
    finally:
        with torch.no_grad():
            for tensor, saved in zip(flat.tensors, live, strict=True):
                tensor.copy_(saved)
        flat.masters = masters
        replaced()


class _Slot:
    """A scratch of one segment; for CUDA also page-locked memory, side stream and last event."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        self._streams: dict[torch.device, Any] = {}
        self._event: Any = None
        self._used: set[torch.device] = set()

    def holds(self, values: Tensor) -> bool:
        return values.data_ptr() == self._scratch.data_ptr()

    def host(self, segment: Segment) -> Tensor:
        """The scratch for a segment, once copies under way from or to it have ended."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        cuda = segment.pieces[0].live.is_cuda
        if self._scratch.numel() < segment.numel or (cuda and not self._scratch.is_pinned()):
            size = max(segment.numel, min(SEGMENT_ELEMENTS, 2 * segment.numel))
            self._scratch = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=cuda)
        return self._scratch[: segment.numel]

    def fetch(self, segment: Segment) -> None:
        values = self.host(segment)
        self._copy(segment, [(_shaped(values, piece), piece.live) for piece in segment.pieces])

    def store(self, segment: Segment, values: Tensor) -> None:
        pairs = [
            (piece.live, _rounded(_shaped(values, piece), piece.live)) for piece in segment.pieces
        ]
        pairs += [
            (piece.rounded, _shaped(values, piece))
            for piece in segment.pieces
            if piece.rounded is not None
        ]
        self._copy(segment, pairs)

    def _copy(self, segment: Segment, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy (destination, source) pairs; on CUDA on a side stream, after what the model's stream
        has queued so far.
        """
        device = segment.pieces[0].live.device
        if device.type != "cuda":
            for destination, source in pairs:
                destination.copy_(source)
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)
        self._used.add(device)

    def settle(self) -> None:
        """Let the model's stream wait for the copies of the side stream."""
        for device in self._used:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        self._used.clear()


def _shaped(values: Tensor, piece: Piece) -> Tensor:
    return values[piece.start : piece.stop].view(piece.live.shape)


def _rounded(values: Tensor, live: Tensor) -> Tensor:
    """As ``live`` can hold them: a conversion to whole numbers cuts off, and does not round."""
    return values.round() if live.dtype in COUNTS else values


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel, torch.compile and opacus'
    wrapper of single examples' gradients, so that names agree between peers.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(
            model, (nn.parallel.DistributedDataParallel, nn.DataParallel)
        ):
            inner = model.module
        if inner is None and type(model).__module__.partition(".")[0] == "opacus":
            inner = getattr(model, "_module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def buffers_of(model: nn.Module, patterns: Mapping[str, BufferClass]) -> list[ModelBuffer]:
    """The buffers of the user's own module, under the names that all members have."""
    modules = unwrap(model).named_modules()
    return model_buffers(((clean_name(f"{name}."), module) for name, module in modules), patterns)


def _named_tensors(
    model: nn.Module, included: Collection[str], buffers: Sequence[ModelBuffer]
) -> Iterator[tuple[str, Tensor, Role]]:
    seen: set[object] = set()
    for name, parameter in unwrap(model).named_parameters():
        _check_made(name, parameter)
        name = clean_name(name)
        if (parameter.requires_grad or name in included) and _first(parameter, seen):
            yield name, parameter, "parameter"
    for buffer in buffers:
        if buffer.kind == "mean":
            _check_made(buffer.name, buffer.tensor)
            if _first(buffer.tensor, seen):
                yield buffer.name, buffer.tensor, buffer.role


def _frozen(model: nn.Module, included: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Parameters that require no gradient and are not included, under their names."""
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad and (name := clean_name(name)) not in included:
            yield name, parameter


def memory_of(tensor: Tensor) -> tuple[object, ...] | None:
    """Equal for two tensors over exactly the same memory; None where that cannot be told."""
    if tensor.device.type not in ("cpu", "cuda") or not tensor.numel() or _is_dtensor(tensor):
        return None
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _first(tensor: Tensor, seen: set[object]) -> bool:
    """Whether this tensor, or another over exactly the same memory, comes for the first time."""
    keys: set[object] = {id(tensor)}
    if (memory := memory_of(tensor)) is not None:
        keys.add(memory)
    known = bool(keys & seen)
    seen |= keys
    return not known


def clean_name(name: str) -> str:
    """The name of a tensor without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has loaded it
    return module is not None and isinstance(tensor, module.DTensor)


def _check_statistics(specs: Sequence[TensorSpec]) -> None:
    """Of a run with noise: refuse running statistics, which the bound on a contribution's length
    and the noise would take for parameters: a variance of 10,000 is no progress of that length, and
    a model with noise in its variances is none.
    """
    layers = dict.fromkeys(
        spec.name.rpartition(".")[0] for spec in specs if spec.role in ("mean", "variance")
    )
    if layers:
        own = {
            "*running_*" if "running_" in spec.name else spec.name
            for spec in specs
            if spec.role in ("mean", "variance")
        }
        declared = ", ".join(f'"{name}" = "own"' for name in sorted(own)[:6])
        some = ", ".join(f"“{name}”" for name in [*layers][:6]) + (" …" if len(layers) > 6 else "")
        raise ConfigError(
            f"{'1 layer keeps' if len(layers) == 1 else f'{len(layers)} layers keep'} running "
            f"statistics, and the run has [privacy]: {some}",
            key="model",
            why=(
                "One bound and one noise are for everything that a site gives, and statistics are "
                "of another size than a round's progress: they take up the bound, and the noise "
                "ruins them."
            ),
            hint=(
                "GroupNorm or LayerNorm in their place, or track_running_stats=False; or each site "
                f"keeps its own: [model] buffers = {{ {declared} }} in the run's manifest"
            ),
        )


def _check_groups(specs: Sequence[TensorSpec], patterns: Collection[str], key: str) -> None:
    """Refuse a pattern that decides for no tensor: it would do nothing, in silence."""
    deciding = {pattern_of(spec.name, patterns) for spec in specs}
    for pattern in patterns:
        if pattern not in deciding:
            some = ", ".join([spec.name for spec in specs][:6]) + (" …" if len(specs) > 6 else "")
            raise ConfigError(
                f"the run's manifest has a number for the tensors {pattern!r}, and decides by it "
                "for none of the model's",
                key=key,
                why=f"Its tensors are: {some}.",
                hint="Make the model that the run is for, or a run with other patterns.",
            )


def _check_made(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ConfigError(
            f"{clean_name(name)} has no shape yet: its module is a lazy one",
            key="model",
            why="All members of a run have the same tensors, which must be known before training.",
            hint="Call the model once on a batch, then make the optimizer, then attach().",
        )
    if tensor.requires_grad and tensor.layout != torch.strided:
        raise ConfigError(
            f"{clean_name(name)} has the layout {tensor.layout}",
            key="model",
            why="Only a dense tensor can be averaged.",
            hint=f"Make a dense parameter of it: nn.Parameter({name}.detach().to_dense())",
        )


def _check_tensor(name: str, tensor: Tensor, role: Role, sharded: bool) -> None:
    if not _is_dtensor(tensor) and any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ConfigError(
            f"{name} is expanded: several of its elements are one place in memory",
            key="model",
            why="The run writes each element of it.",
            hint=f"Give it memory of its own: nn.Parameter({name}.detach().clone())",
        )
    if _is_dtensor(tensor) and not sharded:
        raise ConfigError(
            f"parameter {name} is a DTensor",
            key="model",
            why=(
                "Only attach() puts the slices of a sharded model "
                "together, in all ranks of the job."
            ),
            hint=(
                "attach(model, optimizer, swarm) in every rank, with swarm None in all but rank 0."
            ),
        )
    if tensor.dtype not in FLOATS and (role == "parameter" or tensor.dtype not in COUNTS):
        raise ConfigError(
            (
                f"{name} has dtype {tensor.dtype}; only float32, bfloat16, float16 and "
                "float64 can be averaged"
            ),
            key="model",
        )
    if any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ConfigError(
            f"{name} is expanded: several of its elements are one in memory",
            key="model",
            why="An anchor has a value for each element, so it cannot be written there.",
            hint=f"Give the model {name} as tensor.expand(...).clone(), or the tensor without "
            "expand(), expanded in forward().",
        )
    if tensor.device.type == "meta":
        raise ConfigError(
            f"{name} is on the meta device and has no values",
            key="model",
            hint="Materialise the model before attach().",
        )
    if tensor.dim() > MAX_DIMS:
        raise ConfigError(f"{name} has {tensor.dim()} dimensions, limit {MAX_DIMS}", key="model")
