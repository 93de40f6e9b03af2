"""Frozen parameters that are no part of the run, and change here all the same.

An adapter that is merged into the frozen weights for an evaluation and left there, or taken out
again in bfloat16 with another rounding each time, makes this member's model another one than the
others': what it contributes fits weights that nobody else has. So do codebooks and centres that are
kept as parameters without gradients. No round sees it, since such parameters do not travel.

They are looked at at boundaries, some elements of each, other ones in each round. What follows the
trained weights (a teacher, a target network, averages) is meant to be one member's own.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from random import Random

import torch
from torch import Tensor, nn

from ...collectives.errors import AtollError
from ...collectives.layout import Layout
from ...collectives.script_swarm import Swarm
from ..model.flat import clean_name, unwrap
from .buffer_watch import MOST_NAMED, NAME, is_average
from .saving import some
from .weights import WeightSample

logger = logging.getLogger("atoll")


class FrozenWatch:
    """Of one attachment: `look` at its boundaries."""

    def __init__(self, model: nn.Module, layout: Layout, swarm: Swarm) -> None:
        """``layout``: of the run's whole vector. What is in it is no concern of this one."""
        self._model, self._swarm = weakref.ref(model), swarm
        in_run = {spec.name for spec in layout.tensors}
        frozen: dict[str, Tensor] = {
            clean_name(name): each
            for name, each in unwrap(model).named_parameters()
            if not each.requires_grad and clean_name(name) not in in_run and not each.is_meta
        }
        self._told = set[str]()
        self._rng = Random(0)
        self._sample = WeightSample(frozen, self._rng) if frozen else None
        self._mark = self._rows()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def look(self) -> None:
        """Name what has changed since the last look, once each."""
        if self._sample is None:
            return
        before, now = self._mark, self._rows()
        changed = [
            name
            for name, (kind, row) in now.items()
            if name in before
            and name not in self._told
            and before[name][0] == kind  # else it was converted
            and not torch.equal(before[name][1], row)
        ]
        if changed and (model := self._model()) is not None:
            self._tell(model, changed)
        self._sample.draw()
        self._mark = self._rows()

    def _rows(self) -> dict[str, tuple[torch.dtype, Tensor]]:
        """The type and the sampled elements of each, on the CPU."""
        if self._sample is None:
            return {}
        self._sample.moved()
        found = dict[str, tuple[torch.dtype, Tensor]]()
        for group in self._sample.groups:
            kinds = [view.dtype for view in group.views]
            rows = group.gather().cpu().split([view.numel() for view in group.views])
            found.update(zip(group.names, zip(kinds, rows, strict=True), strict=True))
        return found

    def _tell(self, model: nn.Module, changed: list[str]) -> None:
        self._told.update(changed)
        live = {clean_name(name): each for name, each in unwrap(model).named_parameters()}
        own = [
            name
            for name in changed
            if (each := live.get(name)) is not None
            and not each.requires_grad  # that is told of as such
            and not is_average(each, model)
        ]
        if not own:
            return
        logger.warning(
            "frozen, no part of the run, and changed here by the script: %s. This member trains on "
            "other weights than the others have, and an export has them as they were. Merge "
            "adapters into a copy of the model, or put the very weights back that were there; what "
            "is to change belongs to the run: attach(..., include=[%r]) in the scripts of all "
            "members of a new run",
            some(own),
            own[0],
        )
        with suppress(AtollError):  # without a node the script has been told
            self._swarm.report({f"frozen_changed/{name[-NAME:]}": 1.0 for name in own[:MOST_NAMED]})
