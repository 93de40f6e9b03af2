"""A training script reduced to what the round protocol sees of it: units of work that must not be
lost nor counted twice.

A unit is a stretch of training. The script trains, freezes all units it holds into one
contribution, and goes on training. When a round is committed, the units counted are gone and the
rest goes into the next contribution.
"""

from __future__ import annotations

import random
from typing import Protocol

import torch

from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import Layout
from atoll.collectives.simulation import Timer, World
from atoll.node.session.events import (
    ContributionRefused,
    RoundClosing,
    RoundCommitted,
    StateReady,
)

from .checker import FrozenContribution
from .plant import Plant


class ScriptNode(Protocol):
    """What a script may ask of its member."""

    def contribute(self, cid: bytes, contribution: FrozenContribution, base: int | None) -> None:
        """Freeze and offer a contribution, made on the anchor of round ``base``."""
        ...


class Scene(Protocol):
    """What all scripts of a run share."""

    world: World
    layout: Layout
    plant: Plant
    train_s: float


class Units:
    """The books of all units of work of one member, over all its lives. For the checker."""

    def __init__(self) -> None:
        self.produced: list[int] = []
        self.first = 0  # the number of the first
        self.destroyed: set[int] = set()


class Script:
    """One life of a script."""

    def __init__(
        self,
        scene: Scene,
        rng: random.Random,
        node: ScriptNode,
        units: Units,
        *,
        peer: PeerId,
        life: int,
    ) -> None:
        self.scene, self.world, self.rng, self.node, self.units = (
            scene,
            scene.world,
            rng,
            node,
            units,
        )
        self.peer, self.life = peer, life
        self.rounds = 0  # contributions of this life
        self.held: list[int] = []
        self.pending: tuple[bytes, tuple[int, ...]] | None = None
        self.has_state = False
        self.base = -1  # round of the newest anchor heard of
        self.careful = rng.random() < 0.5  # says on which anchor a contribution was made
        self.stopped = False
        self._timer: Timer | None = None

    def on_event(self, event: object) -> None:
        """What the session tells its script."""
        match event:
            case StateReady(round=round_):
                self.has_state, self.base = True, round_
                self._train()
            case RoundCommitted(cid=cid, counted=counted):
                self.base = event.round
                if self.pending and cid == self.pending[0]:
                    if counted:
                        self.held = [unit for unit in self.held if unit not in self.pending[1]]
                    self.pending = None
                self._train()
            case ContributionRefused(cid=cid) if self.pending and cid == self.pending[0]:
                self.pending = None  # made on an older anchor: to be offered again
                self._train()
            case RoundClosing() if (
                self._timer is not None and self.held and self.rng.random() < 0.5
            ):
                self._timer.cancel()
                self._timer = self.world.after(0.0, self._trained)
            case _:
                pass

    def late(self, cid: bytes, vector: torch.Tensor) -> None:
        """A contribution was frozen a while ago."""
        if self.pending is not None and self.pending[0] == cid and not self.stopped:
            self.scene.plant.late(vector)

    def die(self) -> None:
        """The process ends; what was not counted is gone with it (unless it turns out to be
        counted).
        """
        self.stopped = True
        self.units.destroyed.update(self.held)
        if self._timer:
            self._timer.cancel()

    def _train(self) -> None:
        if self._timer is None and self.has_state and not self.stopped:
            self._timer = self.world.after(
                self.scene.train_s * self.rng.uniform(0.3, 1.7), self._trained
            )

    def _trained(self) -> None:
        self._timer = None
        if self.stopped:
            return
        unit = ((self.units.first + len(self.units.produced)) << 16) + int(self.peer[1:])
        self.units.produced.append(unit)
        self.held.append(unit)
        if self.pending is None:
            cid, units = self.scene.plant.cid(self.rng, self), tuple(self.held)
            self.rounds += 1
            self.pending = (cid, units)
            generator = torch.Generator().manual_seed(self.rng.getrandbits(48))
            vector = torch.randn(self.scene.layout.numel, generator=generator)
            base = self.base if self.careful else None
            self.node.contribute(
                cid, FrozenContribution(self.peer, self.life, 8 * len(units), units, vector), base
            )
