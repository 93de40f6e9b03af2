"""The loss of a micro-batch as a sum over what is learned, without logits of anything else.

With activation checkpointing the logits are the peak: a row of 2,048 tokens and a vocabulary of
128,000 make 3.4 GiB of them and of what their gradient needs. So only positions that predict
something are put through the head, so many at a time, and again in the backward pass.

The negative log-likelihoods, float32, are added in float64: that is exact, so a sum has the same
bits in whatever order, and what is masked adds nothing at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .packing import IGNORED, PackedBatch
from .sharding import ONE_CARD, Cards

CHUNK = 1 << 25  # logits at a time: 128 MiB of float32
LARGE = 100.0  # what the logits are raised to where the head is tried: caps are seen there only
TOLERANCE = 1e-3  # of the loss, between the head on its own and the whole model


class SummedLoss:
    """Of one model of transformers, also inside PEFT.

    ``chunked``: whether hidden states are put through the head in chunks. Not so where that gives
    another loss than the whole model: some scale or cap their logits, or have no head of their own.
    """

    def __init__(self, model: Any, cards: Cards = ONE_CARD, *, chunk: int = CHUNK) -> None:
        self.model = model
        self._chunk = chunk
        plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._plain = plain
        self._decoder: Any = plain.get_decoder() if hasattr(plain, "get_decoder") else None
        self._head: Any = plain.get_output_embeddings()
        # decoder and head are called on their own, which FSDP2 is to notice
        self._in_chunks = cards.forward(plain, self._by_head)
        self.chunked = self._decoder is not None and self._head is not None and self._agrees()

    def __call__(self, batch: PackedBatch) -> Tensor:
        """The summed negative log-likelihood in nats of the targets of ``batch``: float64, a
        scalar, with its gradient.
        """
        kept = batch.targets != IGNORED
        targets = batch.targets[kept]
        if not self.chunked:
            logits = self.model(**batch.inputs).logits[kept]
            return _summed(logits, targets)
        return self._in_chunks(batch)

    def _by_head(self, batch: PackedBatch) -> Tensor:
        kept = batch.targets != IGNORED
        targets = batch.targets[kept]
        hidden = self._decoder(**batch.inputs).last_hidden_state[kept]
        width = int(getattr(self._head, "out_features", 0) or self._head.weight.shape[0])
        size = max(1, self._chunk // width)
        total = hidden.new_zeros((), dtype=torch.float64)
        for at in range(0, len(targets), size):
            part, wanted = hidden[at : at + size], targets[at : at + size]
            if torch.is_grad_enabled() and len(targets) > size:
                total = total + checkpoint(
                    self._of_part, part, wanted, use_reentrant=False, preserve_rng_state=False
                )
            else:
                total = total + self._of_part(part, wanted)
        return total

    def _of_part(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return _summed(self._head(hidden), targets)

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether the head makes of hidden states what the whole model does, on a few tokens whose
        logits are made large: those of a model that has learned little are below any cap.
        """
        device = next(self.model.parameters()).device
        ids = (
            torch.arange(1, 17, device=device) * 31 % len(self._plain.get_input_embeddings().weight)
        )[None]
        targets = ids.roll(-1, 1)
        mode = self.model.training
        self.model.eval()
        raised: Any = None
        try:
            batch = PackedBatch(ids, targets, None)
            largest = self.model(**batch.inputs).logits.abs().max().clamp_min(1e-9)
            raised = self._head.register_forward_hook(
                lambda head, given, logits: logits * (LARGE / largest)
            )
            apart = self._in_chunks(batch)
            whole = _summed(self.model(**batch.inputs).logits[0], targets[0])
        except (AttributeError, TypeError, RuntimeError):
            return False
        finally:
            if raised is not None:
                raised.remove()
            self.model.train(mode)
        return bool((apart - whole).abs() <= TOLERANCE * whole.abs())


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    """(tokens, vocabulary) and int64 (tokens,) → float64, a scalar."""
    return F.cross_entropy(logits.float(), targets, reduction="none").double().sum()
