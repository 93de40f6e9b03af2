"""How much memory a step of fine-tuning takes, of a model of which only the shape is known: sums of
what each layer keeps for the backward pass, without a library. `counting` counts the same with one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...manifest.tables import ShapeTable
from .shapes import (
    adapter_parameters,
    linear_parameters,
    matrices,
    other_parameters,
    whole_parameters,
)

CHUNK = 1 << 25  # logits at a time: 128 MiB of float32
FLOAT = 4
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATES = {"adamw": 2.0, "sgd": 0.0}  # values of a parameter, of its own type
_BYTES_8BIT = 2.1  # two of one byte, and the scales of their blocks
_NF4 = 0.516  # four bits, and the scales, quantized themselves
PROGRAMS = 390 << 20
"""Of a process that has imported torch, transformers and peft: host memory."""
WORKING = 64 << 20
"""What libraries keep on the CPU beside tensors, once they have made a step."""
GPU_CONTEXT, GPU_LOSS = 512 << 20, 0.07
"""On a GPU: the driver's own, and the share that the allocator's blocks leave unused. Not measured
here."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """``method``, ``dtype`` and ``checkpointing`` as in ``[model]``, ``length`` as in ``[data]``,
    ``micro_batch``, ``optimizer`` and ``in_backward`` as in ``[train.inner]``, ``rank`` as in
    ``[lora]``. ``accumulated``: micro-batches a step. ``autocast``: float32 weights, calculations
    in bfloat16.
    """

    method: Literal["full", "lora", "qlora"] = "full"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    checkpointing: bool = False
    length: int = 1024
    micro_batch: int = 1
    accumulated: int = 8
    optimizer: Literal["adamw", "sgd", "adamw8bit"] = "adamw"
    rank: int = 16
    in_backward: bool = False
    autocast: bool = False


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes where the model trains. ``activations``: what is kept from forward to backward, and
    logits; without them the parts are there all the time. ``peak``: the most together.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


def trained_of(shape: ShapeTable, settings: StepSettings) -> int:
    """Parameters that train, and travel."""
    if settings.method == "full":
        return whole_parameters(shape)
    return adapter_parameters(shape, settings.rank)


def step_bytes(shape: ShapeTable, settings: StepSettings) -> StepBytes:
    """Of one member that trains `shape` so, on the CPU; without the libraries' own.

    >>> from .shapes import KNOWN
    >>> settings = StepSettings("qlora", "bfloat16", checkpointing=True)
    >>> round(step_bytes(KNOWN["Llama-3.1-8B"], settings).peak / 2**30)
    7
    """
    activations = activation_bytes(shape, settings)
    gradients = _gradients(shape, settings)
    return sum_up(shape, settings, activations, activations + gradients)


def sum_up(shape: ShapeTable, settings: StepSettings, activations: int, together: int) -> StepBytes:
    """The parts and their peak. ``together``: the most of activations and gradients in a step of
    one micro-batch, where gradients grow as activations go.
    """
    weights, optimizer = weight_bytes(shape, settings), optimizer_bytes(shape, settings)
    gradients = _gradients(shape, settings)
    most = activations if settings.in_backward else max(activations, gradients)
    if settings.accumulated > 1 and not settings.in_backward:
        most = activations + gradients  # those of the micro-batches before are there
    elif not settings.in_backward:
        most = min(together, activations + gradients)
    return StepBytes(
        weights, gradients, optimizer, activations, weights + optimizer + most + WORKING
    )


def weight_bytes(shape: ShapeTable, settings: StepSettings) -> int:
    """Of base and adapters, which are float32."""
    size, linear = _SIZES[settings.dtype], linear_parameters(shape)
    if settings.method == "qlora":
        base = linear * _NF4 + other_parameters(shape) * size
    else:
        base = whole_parameters(shape) * float(size)
    copies = linear * 2 if settings.autocast and settings.dtype == "float32" else 0
    return round(base + copies + _adapters(shape, settings))


def optimizer_bytes(shape: ShapeTable, settings: StepSettings) -> int:
    """Of what the optimizer keeps."""
    trained, size = trained_of(shape, settings), _trained_size(settings)
    if settings.optimizer == "adamw8bit":
        return round(trained * _BYTES_8BIT)
    return round(trained * size * _STATES[settings.optimizer])


def activation_bytes(shape: ShapeTable, settings: StepSettings) -> int:
    """What forward keeps for backward, logits included, and what backward needs of one layer."""
    tokens = settings.length * settings.micro_batch
    layer, size = tokens * _layer_bytes(shape, settings), _computed(settings)
    # what one layer's backward pass makes beside: gradients of the values between its layers
    wide = tokens * size * (3 * shape.inner + 2 * shape.hidden)
    kept = layer * shape.layers
    if settings.checkpointing:
        kept = shape.layers * tokens * shape.hidden * size
        wide += layer
    head = tokens * shape.hidden * (2 * size + FLOAT)
    embedding = shape.vocabulary * shape.hidden * _SIZES[settings.dtype]
    logits = min(tokens, max(1, CHUNK // shape.vocabulary)) * shape.vocabulary
    loss = logits * 3 * FLOAT  # log-softmax, its gradient, and that of the losses
    if settings.method == "full":  # then the gradient of the head, before the embedding's is added
        loss = max(loss, logits * size + embedding)
    if settings.method == "qlora":
        wide += max(one * other for one, other in matrices(shape)) * 2  # of a layer, unpacked
    return round(kept + head + max(wide, loss))


def _layer_bytes(shape: ShapeTable, settings: StepSettings) -> float:
    """Bytes of a token that one layer keeps for its backward pass."""
    hidden, size = shape.hidden, _computed(settings)
    query, key = shape.heads * shape.width, shape.groups * shape.width
    chosen = min(shape.active, shape.experts) if shape.experts else 1
    inner = shape.inner * chosen
    behind = (3 if shape.gated else 1) * inner * size  # gate, its activation, up
    attention = size * (2 * query + 2 * key) + FLOAT * shape.heads
    if settings.method == "full":
        norms = 24.0 * hidden if size == FLOAT else 16.0 * hidden
        return norms + behind + size * inner + attention
    # inputs of adapters are float32, one copy for each
    ranks = FLOAT * settings.rank * (4 + chosen * (3 if shape.gated else 2))
    if size == FLOAT:
        return 16.0 * hidden + behind + FLOAT * inner + attention + ranks
    inputs = 3 * hidden + query + chosen * hidden * (2 if shape.gated else 1) + inner
    return 8.0 * hidden + behind + FLOAT * inputs + attention + ranks


def _gradients(shape: ShapeTable, settings: StepSettings) -> int:
    if settings.in_backward:
        return 0
    return trained_of(shape, settings) * _trained_size(settings)


def _adapters(shape: ShapeTable, settings: StepSettings) -> int:
    return 0 if settings.method == "full" else FLOAT * adapter_parameters(shape, settings.rank)


def _trained_size(settings: StepSettings) -> int:
    """Bytes of a value that trains: adapters are float32 on every base."""
    return _SIZES[settings.dtype] if settings.method == "full" else FLOAT


def _computed(settings: StepSettings) -> int:
    """Bytes of a value between layers."""
    return 2 if settings.autocast else _SIZES[settings.dtype]


def on_gpu(found: StepBytes) -> int:
    """The peak on a GPU, with the driver's and the allocator's share."""
    return round((found.peak - WORKING) * (1 + GPU_LOSS)) + GPU_CONTEXT


def sharded_bytes(shape: ShapeTable, settings: StepSettings) -> tuple[int, int]:
    """Of the peak on a GPU: what several cards hold in shards, and what each gathers besides, for
    as long as it needs it: embeddings, head and norms for a whole pass, layers two at a time, and
    where they train their gradients.
    """
    shared = weight_bytes(shape, settings) + optimizer_bytes(shape, settings)
    shared += _gradients(shape, settings)
    values = other_parameters(shape) + 2 * linear_parameters(shape) // max(1, shape.layers)
    size = _computed(settings) + (FLOAT if settings.method == "full" else 0)
    return round(shared * (1 + GPU_LOSS)), round(values * size * (1 + GPU_LOSS))


def with_settings(settings: StepSettings, **more: object) -> StepSettings:
    """The same but for these."""
    return replace(settings, **more)  # type: ignore[arg-type]
