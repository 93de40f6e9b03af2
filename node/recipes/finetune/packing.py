"""Documents into rows, and rows into micro-batches, so that no document sees another.

Several documents stand in one row, each with positions from 0. transformers' models find the
beginnings of documents by these, if they are given neither a mask nor a cache, and let none attend
to another; `packs` tries it with two short documents before anything is trained. What a
document's last token would predict is another's first, so it predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....collectives.errors import ConfigError

IGNORED = -100  # a target that is none
SAME, APART = 1e-3, 0.05
"""Packed logits may differ from those of a document alone by this share of the largest; or, where
rounding is coarser, by this share of what they differ by where documents do see one another.
"""
ROUNDING = 4  # units in the last place of the largest logit
PROBES = 7, 9  # tokens of the two documents that are tried

Document = tuple[Tensor, Tensor]
"""Token ids, int64 (tokens,), and which are learned, bool (tokens,)."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Of int64 (rows, width): ``ids``; ``targets``, what each position is to predict, or `IGNORED`;
    ``positions`` of each token in its document, None where every row is one document.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor | None

    def to(self, device: torch.device) -> PackedBatch:
        """The same on a device."""
        positions = None if self.positions is None else self.positions.to(device)
        return PackedBatch(self.ids.to(device), self.targets.to(device), positions)

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a model of transformers. A cache or a mask would let documents see one
        another.
        """
        positions = {} if self.positions is None else {"position_ids": self.positions}
        return {"input_ids": self.ids, "use_cache": False, **positions}


def targets_of(document: Document) -> Tensor:
    """What each token of a document is to predict: the next, where that is learned."""
    ids, learned = document
    targets = torch.full_like(ids, IGNORED)
    targets[:-1] = torch.where(learned[1:], ids[1:], IGNORED)
    return targets


def pack_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Documents by number in rows of at most ``length`` tokens: the longest first, each into the
    first row that has room.

    >>> pack_rows([3, 9, 6, 2], 10)
    [[1], [2, 0], [3]]
    """
    rows, room = list[list[int]](), list[int]()
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size = sizes[index]
        at = next((at for at, left in enumerate(room) if left >= size), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(length)
        rows[at].append(index)
        room[at] -= size
    return rows


def lay_out(
    documents: Sequence[Document], *, length: int, rows: int, packing: bool, cards: int = 1
) -> list[PackedBatch]:
    """Micro-batches of at most ``rows`` rows, each as wide as its longest row. What is left of a
    row is a document of its own, of which nothing is learned. ``cards``: among which micro-batches
    are dealt out, so that they have about as many rows.
    """
    sizes = [len(ids) for ids, _ in documents]
    packed = (
        pack_rows(sizes, length)
        if packing
        else [[index] for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))]
    )
    if packed and cards > 1:
        passes = -(-len(packed) // (cards * rows))
        rows = -(-len(packed) // (cards * passes))
    return [
        _batch([[documents[index] for index in row] for row in packed[at : at + rows]], packing)
        for at in range(0, len(packed), rows)
    ]


def _batch(rows: list[list[Document]], packing: bool) -> PackedBatch:
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED)
    positions = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        start = 0
        for document in row:
            stop = start + len(document[0])
            ids[at, start:stop] = document[0]
            targets[at, start:stop] = targets_of(document)
            positions[at, start:stop] = torch.arange(stop - start)
            start = stop
        positions[at, start:] = torch.arange(width - start)
    return PackedBatch(ids, targets, positions if packing else None)


@torch.no_grad()
def packs(model: Any, vocabulary: int) -> str:
    """Whether two short documents in one row get the logits that they get alone: "", or what
    speaks against it.
    """
    device = next(model.parameters()).device
    documents = [
        ((torch.arange(1, size + 1) * 7919 + size) % vocabulary, torch.ones(size, dtype=torch.bool))
        for size in PROBES
    ]

    def logits(*given: Document, packing: bool = True) -> Tensor:
        (batch,) = lay_out(given, length=sum(PROBES), rows=1, packing=packing)
        return model(**batch.to(device).inputs).logits[0].float()

    mode = model.training
    model.eval()
    try:
        # the longer document is laid out first
        alone = torch.cat([logits(document, packing=False) for document in documents[::-1]])
        joined = tuple(torch.cat(part) for part in zip(*documents[::-1], strict=True))
        seen = logits((joined[0], joined[1]), packing=False)
        packed = logits(*documents)
    except TypeError as error:
        return f"it takes no positions ({error})"
    finally:
        model.train(mode)
    off, apart = (float((each - alone).abs().max()) for each in (packed, seen))
    if off <= max(SAME * float(alone.abs().max()), APART * apart):
        return ""
    return (
        f"the logits of two short documents in one row differ by {off:.3g} from those of each alone"
    )


def check_packing(
    model: Any, vocabulary: int, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Raise ConfigError where the model lets packed documents see one another."""
    if why := packs(model, vocabulary):
        raise ConfigError(
            f"documents cannot be packed for a {model.config.model_type} model",
            key="$.data.packing",
            why=f"Each would see those before it in its row: {why}.",
            hint="packing = false  (each document is a row of its own)",
        )
    tell("packing: two documents in one row have the logits that each has alone")


@torch.no_grad()
def check_causal(model: Any, vocabulary: int) -> None:
    """Raise ConfigError where a token sees those behind it: predicting the next one would be
    copying it. Also where what the model says are no numbers.
    """
    device = next(model.parameters()).device
    ids = (torch.arange(1, PROBES[0] + 1) * 7919 % vocabulary)[None]
    other = (ids + 17) % vocabulary
    other[0, 0] = ids[0, 0]
    mode = model.training
    model.eval()
    try:
        one, two = (
            model(**PackedBatch(each, each, None).to(device).inputs).logits[0, 0]
            for each in (ids, other)
        )
    finally:
        model.train(mode)
    if not bool(one.isfinite().all()):
        raise ConfigError(
            "the model's logits are no finite numbers",
            key="$.model",
            why="Its weights hold NaN or infinity, or are too large for their type.",
            hint='Another copy of the model, or dtype = "float32".',
        )
    off = float((one - two).abs().max())
    if off > ROUNDING * torch.finfo(one.dtype).eps * float(one.abs().max()):
        raise ConfigError(
            f"a {model.config.model_type} model lets tokens see those behind them",
            key="$.model",
            why=f"What the first token says differs by {off:.3g} with what follows it: to predict "
            "the next token it would only have to copy it.",
            hint="A decoder, such as Llama, Qwen, Mistral or Gemma.",
        )
