"""Blocking scripts in virtual time: each in a thread of its own, exactly one running at a time.

The baton is with the world or with one actor. An actor keeps it until it waits; the world moves on
only when all actors wait. So the order of everything is a function of the seed, and a script needs
no change to run here. Each actor has its own global random state (torch, numpy, random), as if it
were a process.
"""

from __future__ import annotations

import random
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...collectives.errors import AtollError, SwarmClosedError
from ...collectives.simulation import World


class Dismissed(BaseException):
    """Ends a script whose stage is being torn down; scripts do not catch it."""


class Actor:
    """One script and its thread. Scripts call `wait` and `sleep`; everybody else calls `poke`."""

    def __init__(self, stage: Stage, name: str, body: Callable[[], object], seed: int) -> None:
        self.stage, self.name, self.number = stage, name, len(stage.actors)
        self.result: object = None
        self.error: BaseException | None = None
        self.finished = False
        self.dead = False  # its process was killed: it never runs again
        self._body = body
        self._turn = threading.Semaphore(0)
        self._until: Callable[[], bool] = lambda: True
        self._poked = True
        self._dismissed = False
        self._rng_state = _seeded_rng(seed)
        self.frozen = False  # stopped, with its process
        self.thread = threading.Thread(target=self._run, name=f"atoll-script-{name}", daemon=True)
        self.thread.start()

    # ---- called by the script's thread
    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Give the baton away until ``until()`` holds (asked when poked) or the time has passed;
        returns ``until()``.
        """
        if self._dismissed:
            raise Dismissed
        if until():
            return True
        world = self.stage.world
        deadline = float("inf") if timeout_s is None else world.now + timeout_s
        timer = world.at(deadline, self.poke) if timeout_s is not None else None
        self._until = lambda: until() or world.now >= deadline
        self._poked = False
        self._hand_over()
        if timer is not None:
            timer.cancel()
        return until()

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        if seconds > 0:
            self.wait(lambda: False, seconds)

    def _hand_over(self) -> None:
        self._rng_state = _rng()
        self.stage.baton.release()
        self._turn.acquire()
        if self._dismissed:
            raise Dismissed
        _set_rng(self._rng_state)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._dismissed:
                _set_rng(self._rng_state)
                self.result = self._body()
        except Dismissed as end:
            # Handles that a killed process held are nobody's to wait for.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                traceback.clear_frames(end.__traceback__)
        except BaseException as error:
            self.error = error
        self.finished = True
        self.stage.baton.release()

    # ---- called by the world
    def poke(self) -> None:
        """Something happened that this actor may wait for."""
        self._poked = True
        self.stage.poked.add(self.number)

    @property
    def runnable(self) -> bool:
        """Whether the actor would go on if it had the baton."""
        if self.finished or self.dead or self.frozen or not self._poked:
            return False
        self._poked = self._until()
        return self._poked

    def go(self) -> None:
        """Hand the baton over and take it back when the actor waits or ends."""
        self._turn.release()
        self.stage.baton.acquire()

    def dismiss(self) -> None:
        """End the thread: the script's wait raises, and its clean-up runs."""
        if not self.finished:
            self._dismissed = True
            self.go()
            self.thread.join(timeout=60)


class Stage:
    """Actors and the world they play in."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.baton = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.poked = set[int]()  # who was, or has come, since all had their turns, by number

    def enter(self, name: str, body: Callable[[], object], seed: int) -> Actor:
        """Add a script; it starts in the next turn."""
        actor = Actor(self, name, body, seed)
        self.actors.append(actor)
        self.poked.add(actor.number)
        return actor

    def run(self, limit_s: float, until: Callable[[], bool] = lambda: True) -> None:
        """Play until every script has ended and ``until()`` holds (scripts may still enter before).

        Raises the first error of a script, or SwarmClosedError after ``limit_s`` virtual seconds.
        """
        rng = _rng()
        try:
            while self._turns() or not (until() or self._failed()):
                if not self.world.step():
                    raise SwarmClosedError(
                        f"all scripts wait and nothing will ever happen ({self._waiting()})"
                    )
                if self.world.now > limit_s:
                    raise SwarmClosedError(
                        f"scripts have not ended after {limit_s:g} virtual "
                        f"seconds ({self._waiting()})"
                    )
        finally:
            for actor in self.actors:
                actor.dismiss()
            _set_rng(rng)
        for actor in self.actors:
            if actor.error is not None:
                raise actor.error

    def _turns(self) -> bool:
        """Let everybody run who can; False when all have ended or one has failed."""
        while self.poked:
            last = -1  # in the order in which they came, over and over
            while later := [number for number in self.poked if number > last]:
                last = min(later)
                self.poked.discard(last)
                actor = self.actors[last]
                if actor.runnable:
                    actor.go()
                    if actor.error is not None and not isinstance(actor.error, AtollError):
                        return False
        return any(not actor.finished and not actor.dead for actor in self.actors)

    def _failed(self) -> bool:
        return any(actor.error is not None for actor in self.actors)

    def _waiting(self) -> str:
        return ", ".join(
            actor.name for actor in self.actors if not actor.finished and not actor.dead
        )


def _rng() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_rng(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _seeded_rng(seed: int) -> tuple[Any, ...]:
    return (
        random.Random(seed).getstate(),
        np.random.RandomState(seed).get_state(),
        torch.Generator().manual_seed(seed).get_state(),
    )
