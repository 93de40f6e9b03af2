"""How much memory a step of training takes, counted: one micro-batch goes forward and backward on
the meta device, where tensors have shapes and no values, and every storage is followed from its
making to its end. What a library keeps is so counted as it is, and nothing is allocated.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ....collectives.errors import ConfigError
from ...manifest.tables import LoraTable, ModelTable, ShapeTable
from .libraries import first_line, library
from .loading import with_adapters
from .sizing import CHUNK, StepBytes, StepSettings, sum_up, with_settings


@dataclass(frozen=True, slots=True)
class CountedStep:
    """Bytes. ``weights``: of the model. ``trained``: of what requires a gradient. ``peak``: the
    most of weights, activations and gradients together, over one micro-batch.
    """

    weights: int
    trained: int
    peak: int


class _LiveBytes(TorchDispatchMode):
    """Follows each storage that an operation makes until nobody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = set[int]()

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self.add(each)
        return found


class _Attention(torch.autograd.Function):
    """What a fused attention keeps: its inputs, its output, and a float a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens = query.shape[:-1]
        # laid out token by token, as the fused ones do
        found = query.new_empty((rows, tokens, heads, value.shape[-1])).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, found, sums)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend(query: Tensor, key: Tensor, value: Tensor, *given: Any, **more: Any) -> Tensor:
    return _Attention.apply(query, key, value)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _fused() -> Generator[None]:
    """On meta, attention takes the kernel that writes all scores, and the search for packed
    documents looks at values: put others in their places.
    """
    functional: Any = torch.nn.functional
    masking = library("transformers.masking_utils")
    search = "find_packed_sequence_indices"
    before = functional.scaled_dot_product_attention, getattr(masking, search, None)
    functional.scaled_dot_product_attention = _attend
    setattr(masking, search, lambda position_ids: None)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before[0]
        setattr(masking, search, before[1])


def config_of(values: Mapping[str, Any]) -> Any:
    """transformers' configuration of what config.json says. Raises ConfigError E415."""
    transformers = library("transformers")
    try:
        kind = str(values["model_type"])
        rest = {key: value for key, value in values.items() if key != "model_type"}
        return transformers.AutoConfig.for_model(kind, **rest)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"transformers does not know this model: {first_line(error)}",
            code="E415",
            hint="pip install -U 'atoll[models]'",
        ) from None


def counted_bytes(config: Any, shape: ShapeTable, settings: StepSettings) -> StepBytes:
    """As `step_bytes`, with activations as counted."""
    alone = count_step(config, with_settings(settings, in_backward=True))
    activations = alone.peak - alone.weights
    together = activations
    if settings.accumulated == 1 and not settings.in_backward:
        found = count_step(config, settings)
        together = found.peak - found.weights
    return sum_up(shape, settings, activations, together)


def count_step(config: Any, settings: StepSettings) -> CountedStep:
    """Count a micro-batch of the model of ``config``, every token of which is learned. Four bits
    are counted as 16. Raises ConfigError E415 where the libraries cannot make the model.
    """
    model = _made(config, settings)
    counted = _LiveBytes()
    distinct = {id(each): each for each in model.parameters()}
    for each in [*distinct.values(), *model.buffers()]:
        counted.add(each)
    weights, trains = counted.live, [each for each in distinct.values() if each.requires_grad]
    if settings.in_backward:
        for each in trains:
            each.register_post_accumulate_grad_hook(_let_go)
    shape = settings.micro_batch, settings.length
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    with counted, _fused():
        _loss(model, ids, config).backward()
    return CountedStep(weights, sum(each.nbytes for each in trains), counted.peak)


def _made(config: Any, settings: StepSettings) -> Any:
    """The model on meta, in train mode."""
    transformers = library("transformers")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=False,
            dtype=getattr(torch, settings.dtype),
            attn_implementation="sdpa",
        )
        model.tie_weights()
        if settings.method != "full":
            table = ModelTable(entry="folder", folder="counted", method="lora")
            model = with_adapters(model, table, LoraTable(rank=settings.rank))
    if settings.checkpointing:
        # transformers has renamed the method, and the old name warns
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    return model


def _loss(model: Any, ids: Tensor, config: Any) -> Tensor:
    """As `SummedLoss` computes it, which cannot look at values here."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, decoder = plain.get_output_embeddings(), plain.get_decoder()
    targets = ids.flatten()
    scaled = any(
        getattr(config, key, None) not in (None, 1.0)
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")
    )
    if head is None or decoder is None or scaled:
        return _summed(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), targets)
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    size = max(1, CHUNK // head.weight.shape[0])
    total = torch.zeros((), dtype=torch.float64, device="meta")
    for at in range(0, len(targets), size):
        part, wanted = hidden[at : at + size], targets[at : at + size]
        if len(targets) > size:
            total = total + checkpoint(
                lambda h, t: _summed(head(h), t),
                part,
                wanted,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            total = total + _summed(head(part), wanted)
    return total


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none").double().sum()


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None
