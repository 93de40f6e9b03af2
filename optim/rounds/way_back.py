"""Whether what a member trained since the anchor leads back to where the model was rounds ago.

An earlier checkpoint that is put into the model, by whatever means, makes a contribution that takes
back for everybody what all have learnt since. Its length does not tell it from honest work: a
learning rate that begins again makes longer ones. Its end does: it lies at an earlier anchor.

Distances are those of a sample of the elements, the same in all rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import median

import torch
from torch import Tensor

from ...collectives.outcomes import AnchorView
from ..model.vector import ModelVector

LEAST = 6  # anchors before anything is looked at
SAMPLED, RUN = 2048, 16  # elements, in runs of neighbours
KEPT = 32  # anchors; of the older half every second makes room
NEAR = 0.4  # of the length, from an earlier anchor: it leads back
LEAST_SPREAD = 8.0
"""How many elements a way is at least spread over: Σ(δ²)² / Σδ⁴. Few elements go back by chance."""
ORDINARY, COMPARED = 4.0, 8
"""Times the median of so many moves of the anchor before: a longer one is a jump."""
UNSTEADY = 8.0  # the longest of so many recent moves, in shortest ones
HABIT = 3  # ways back, after which the script is one that goes back
LONGEST = 2.0
"""Times the longest way that was trained from an anchor before: no more lies between an earlier
anchor and what was trained from it. Where a learning rate rises or other data come, one step is as
long as all that the anchors have moved, and may end near an earlier one."""


@dataclass(slots=True)
class _Anchor:
    """One that is remembered, and the longest move a round since the one remembered before."""

    round: int
    sample: Tensor
    move: float


class WayBack:
    """The earlier anchors of one vector, in a sample of its parameters."""

    def __init__(self, flat: ModelVector, rng: Random) -> None:
        """``rng`` draws the sample; 256 KiB are kept."""
        self._flat, numel = flat, flat.parameters
        # Elements [start, start + run) for each of the starts, in order, are the sample.
        self._starts, self._run = [0], numel
        if numel > SAMPLED:
            part = numel // (SAMPLED // RUN)
            self._starts = [
                at + rng.randrange(part - RUN + 1) for at in range(0, numel - part + 1, part)
            ]
            self._run = RUN
        self._found = 0  # ways back
        self._longest = 0.0  # way that was trained from an anchor, squared
        self._anchors: list[_Anchor] = []

    def add(self, anchor: AnchorView) -> None:
        """Remember the sample of an anchor, if it is a new one."""
        last = self._anchors[-1] if self._anchors else None
        if last is not None and anchor.round <= last.round:
            return
        sample = torch.empty(len(self._starts) * self._run, dtype=torch.float32, device="cpu")
        for start, part in zip(self._starts, sample.split(self._run), strict=True):
            anchor.copy_into(part, start)
        move = 0.0
        if last is not None:
            move = float((sample - last.sample).double().norm()) / (anchor.round - last.round)
        self._anchors.append(_Anchor(anchor.round, sample, move))
        if len(self._anchors) > KEPT:
            # The first is kept: what begins anew goes back to it.
            for index in range(1, KEPT // 2, 2):
                kept = self._anchors[index + 1]
                kept.move = max(kept.move, self._anchors[index].move)
            del self._anchors[1 : KEPT // 2 : 2]

    def leads_to(self, *, jumped: bool = True) -> int | None:
        """The round of the earlier anchor that the live values have come back to from the newest
        one, None where they have not, and where the script is one that goes back now and then.
        ``jumped``: False where each step on the way was as long as the script's always are, since
        what is put in comes at once.
        """
        if not self._anchors:
            return None
        base = self._anchors[-1].sample
        live = self._flat.sample(self._starts, self._run)
        way = (live - base).double()
        squares = way.square()
        length = float(squares.sum())
        spread = length**2 >= LEAST_SPREAD * float(squares.square().sum())
        found = self._nearest(live, length) if jumped and length > 0 and spread else None
        if found is None:
            self._longest = max(self._longest, length)
            return None
        self._found += 1
        return None if self._found > HABIT else self._anchors[found].round

    def _nearest(self, live: Tensor, length: float) -> int | None:
        """The index of the anchor that a way of this length, squared, leads back to."""
        if len(self._anchors) < LEAST:
            return None
        distances = [
            (float((live - anchor.sample).double().square().sum()), index)
            for index, anchor in enumerate(self._anchors[:-2])
        ]
        nearest, index = min(distances)
        far = nearest > NEAR**2 * length or 0 < LONGEST**2 * self._longest < nearest
        return None if far or self._astray(index) else index

    def _astray(self, since: int) -> bool:
        """Whether the anchor has jumped since, or does all the time: where others' work, or an
        outer step that harms, has led it astray is rightly left.
        """
        moves = [anchor.move for anchor in self._anchors]
        recent = moves[-COMPARED:] if len(moves) > COMPARED else moves[1:]
        return max(recent) > UNSTEADY * min(recent) or any(
            moves[index] > ORDINARY * median(moves[max(1, index - COMPARED) : index])
            for index in range(max(2, since + 1), len(moves))
        )
