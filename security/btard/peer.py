"""One peer over all its steps: who is removed and on what evidence, which attempt is open, what the
next one needs.

Evidence is a set that only grows and that anybody can check, so peers that have the same of it have
the same roster, and an attempt is named by its roster. Who hears of a fault in an open step begins
it again without the peer at fault, with the same gradient and a fresh draw. Who is spoken to in an
attempt that it has left sends the evidence; who is behind is sent the last messages of the step
that it has not finished.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

import numpy as np

from ...collectives.errors import SecurityError
from ...collectives.identifiers import PeerId, RunId
from ..identity import Identity
from .attempt import Attempt
from .draw import seed_of
from .evidence import belongs, verify_evidence
from .finished import Finished
from .history import ResidualNorms
from .messages import Bundle, CommittedVector, Context, Frame, Kind, Signed, Vector, Verify
from .settings import AttemptSettings
from .stages import AttemptStage
from .trail import Trail
from .waiting import Late

EARLY = 32  # messages kept of each peer that is ahead
# of one peer in a step: what it sends is checked no more, as that costs more than to send it
MOST_OFFENCES = 16


class GradientTask(NamedTuple):
    """A gradient to compute at the state before ``step``, from a public seed; or the state at the
    end of one interval of its local steps, from the one at the interval's start."""

    step: int
    peer: PeerId
    seed: bytes
    interval: int = -1
    start: Vector | None = None


class PeerDriver(Protocol):
    """What a peer asks of its driver."""

    def tell(self, to: PeerId | None, frame: Frame) -> None:
        """Send to one peer, or to all others."""
        ...

    def compute(self, task: GradientTask) -> None:
        """Compute this and call `BtardPeer.computed`, but not from here; states of the last two
        steps are needed.
        """
        ...

    def finished(self, now: float, step: Finished) -> None:
        """A step is over: apply its vector, then call `BtardPeer.begin` for the next."""
        ...

    def removed(self, now: float, bundle: Bundle, gone: PeerId) -> None:
        """Somebody is removed, perhaps this peer itself, on this evidence."""
        ...

    def offended(self, sender: PeerId, what: str) -> None:
        """Who sent a frame would not have sent it, had it looked at it."""
        ...


class BtardPeer:
    """A peer of a run from its first step on."""

    attempt_type: type[Attempt] = Attempt

    def __init__(
        self,
        run: RunId,
        signer: Identity,
        verify: Verify,
        roster: Sequence[PeerId],
        size: int,
        settings: AttemptSettings,
        host: PeerDriver,
        rng: Random,
    ) -> None:
        """``roster``: all that the run begins with; ``size``: values of a gradient; ``rng``:
        unpredictable to others.
        """
        self.run, self.signer, self.verify, self.settings, self.host, self.rng = (
            run,
            signer,
            verify,
            settings,
            host,
            rng,
        )
        self.first = tuple(sorted(roster))
        self.size = size
        self.distances = ResidualNorms(settings.radius, size)
        self.previous: Finished | None = None
        self.gradient: Vector = np.zeros(size, np.float32)
        self.trail = b""
        self.start: Vector = self.gradient
        self._trails: list[Trail | None] = [None, None]  # of the last step and of this one
        self.removed: dict[PeerId, Bundle] = {}
        self.evidence: list[Bundle] = []
        self.attempt: Attempt | None = None
        self.step = -1
        self.ended = False  # removed, or too few are left
        self._state = b""
        self._computed = False
        self._left: list[Attempt] = []  # attempts at the open step whose place another has taken
        self.closed: Attempt | None = None  # the last step's
        self._errors: dict[PeerId, float | None] = {}
        self._early: dict[PeerId, deque[Signed]] = {}
        self._answered: set[tuple[PeerId, bytes]] = set()
        self.late = Late(settings.patience)
        self._offences = Counter[PeerId]()  # in this step

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """Who is left."""
        return tuple(peer for peer in self.first if peer not in self.removed)

    def begin(self, now: float, step: int, state: bytes, start: Vector | None = None) -> None:
        """The next step: ``state`` is the hash of what its gradients are computed at. ``start``:
        what trails begin with.
        """
        self.step, self._state = step, state
        self.start = self.gradient if start is None else start
        self._trails = [self._trails[1], None]
        self.trail = b""
        self._computed = False
        self._errors, self._left = {}, []
        self._answered.clear()
        self._offences.clear()
        self._attempt(now)

    def computed(
        self, now: float, task: GradientTask, gradient: Vector, trail: Trail | None = None
    ) -> None:
        """A gradient is there, with its trail if there are local steps; or an interval's end."""
        if self.attempt is None:
            return
        if task.step == self.step and task.peer == self.signer.peer and not self._computed:
            self.gradient, self._computed = gradient, True
            self._trails[1], self.trail = trail, b"" if trail is None else trail.root
            self.attempt.commit(now)
        elif self.previous is not None and task.step == self.step - 1 and task.peer in self._errors:
            ends = None if task.interval < 0 else self.attempt.states_of(task.peer)
            error = (
                self.previous.error(task.peer, gradient)
                if ends is None
                else self.previous.interval_error(task.peer, ends, gradient)
            )
            self._errors[task.peer] = error
            self.attempt.advance(now)

    def receive(self, now: float, sender: PeerId, frame: Frame) -> None:
        """A frame from an authenticated peer."""
        if self.ended or self._offences[sender] >= MOST_OFFENCES:
            return
        if isinstance(frame, Bundle):
            self._on_evidence(now, sender, frame)
            return
        open_ = [
            each
            for each in (self.attempt, *self._left)
            if each is not None and each.context.tag == frame.tag
        ]
        if not open_:
            self._elsewhere(now, sender, frame)
        elif isinstance(frame, CommittedVector):
            open_[0].on_piece(now, sender, frame)
        else:
            if open_[0].muted:
                self._behind(sender, frame)
            if not open_[0].on_signed(now, frame):
                self._offended(sender, "a message of a step that its sender has not signed")

    def tick(self, now: float) -> None:
        """Look at the time; every half of `AttemptSettings.timeout_s`, or more often."""
        if self.attempt is not None and not self.ended:
            self.attempt.tick(now)

    # What an attempt asks.

    def tell(self, to: PeerId | None, frame: Frame) -> None:
        """Send a frame to one peer, or to all others."""
        self.host.tell(to, frame)

    def examine(self, target: PeerId) -> float | None:
        """How far the last gradient of ``target`` is from the right one; None: still computing."""
        if target not in self._errors:
            previous, attempt = self.previous, self.attempt
            assert previous is not None
            assert attempt is not None
            task = GradientTask(self.step - 1, target, previous.seed(target))
            ends = attempt.states_of(target)
            if ends is not None:
                task = task._replace(interval=previous.interval(target), start=ends[: self.size])
            elif self.settings.intervals:
                return None
            self._errors[target] = None
            self.host.compute(task)
        return self._errors[target]

    def shown(self) -> CommittedVector | None:
        """Both ends of the checked interval of one's own last trail; None if there is none."""
        me, trail, previous, attempt = (
            self.signer.peer,
            self._trails[0],
            self.previous,
            self.attempt,
        )
        if trail is None or previous is None or attempt is None or me not in previous.trails:
            return None
        return CommittedVector(
            self.step,
            attempt.context.tag,
            (Kind.STATES, attempt.me, 0),
            trail.show(previous.interval(me)),
            trail.path,
        )

    def finished(self, now: float, attempt: Attempt) -> None:
        """The step is over. One whose place another attempt has taken counts where this peer has
        not yet spoken its last word in that one.
        """
        current = self.attempt
        if current is None or (
            attempt is not current
            and (
                current.context.step != attempt.context.step or current.stage >= AttemptStage.CHECKS
            )
        ):
            return
        self.closed, self.attempt, self._left = attempt, None, []
        current.muted = attempt.muted = True
        step = self.previous = attempt.outcome()
        lengths = [len(centre) for centre in step.centres]
        self.distances.saw(
            (each.norm, length)
            for row in step.residuals.values()
            for each, length in zip(row, lengths, strict=True)
        )
        self.host.finished(now, step)

    def convict(self, now: float, bundles: list[Bundle]) -> None:
        """Remove whom these prove to be at fault, tell all others, and begin the step again."""
        new = [bundle for bundle in bundles if self._take(now, bundle)]
        for bundle in new:
            self.host.tell(None, bundle)
        if new and not self.ended and self.attempt is not None:
            self._attempt(now)

    def _take(self, now: float, bundle: Bundle) -> bool:
        """Check evidence; whether it removes somebody who was still there. Raises SecurityError
        where it proves nothing.
        """
        if not self._is_news(bundle):
            return False
        gone = verify_evidence(bundle, self.verify)
        self.removed[gone] = bundle
        self.evidence.append(bundle)
        self.host.removed(now, bundle, gone)
        self.ended = self.signer.peer in self.removed or len(self.roster) < self.settings.least
        if self.ended and self.attempt is not None:
            self.attempt.muted = True
        return True

    def _is_news(self, bundle: Bundle) -> bool:
        """The cheap test: whether evidence is of an attempt of this run, and against somebody who
        is still there.
        """
        context = bundle.context
        known = bundle.whom < len(context.roster) and context.roster[bundle.whom] in self.removed
        return not known and belongs(context, self.run, self.first, self.removed)

    def _on_evidence(self, now: float, sender: PeerId, bundle: Bundle) -> None:
        try:
            news = self._take(now, bundle)
        except SecurityError as error:
            self._offended(sender, error.message)
            return
        if news and not self.ended and self.attempt is not None:
            self._attempt(now)

    def _offended(self, sender: PeerId, what: str) -> None:
        self._offences[sender] += 1
        self.host.offended(sender, what)

    def _attempt(self, now: float) -> None:
        """Begin an attempt at the open step with who is left."""
        if self.attempt is not None:
            self.attempt.muted = True
            self._left.append(self.attempt)
        self.attempt = attempt = self.attempt_type(
            Context(self.run, self.step, self._state, self.roster), self
        )
        if self._computed or self.signer.peer in attempt.targets:
            attempt.commit(now)
        else:
            draw = self.previous.draw if self.previous else attempt.seeds
            self.host.compute(
                GradientTask(
                    self.step, self.signer.peer, seed_of(draw, self.step, self.signer.peer)
                )
            )
        early, self._early = self._early, {}
        for peer, messages in early.items():
            for signed in messages:
                self.receive(now, peer, signed)

    # Peers that are elsewhere.

    def _elsewhere(self, now: float, sender: PeerId, frame: Signed | CommittedVector) -> None:
        """A frame of an attempt that is not open here: later ones are kept; who says what shows
        that it is behind is told what it does not know.
        """
        if isinstance(frame, CommittedVector):
            return
        if frame.step > self.step and self.attempt is not None:
            self.attempt.overtaken(now)
        if frame.step >= self.step:
            self._early.setdefault(sender, deque(maxlen=EARLY)).append(frame)
        if frame.step <= self.step and not (self.closed is not None and self.closed.knows(frame)):
            self._behind(sender, frame)

    def _behind(self, sender: PeerId, frame: Signed) -> None:
        """Send, once per attempt, what ends it: all evidence of this step and the last, and the
        messages that ended the last.
        """
        if (sender, frame.tag) in self._answered or sum(
            each == sender for each, _ in self._answered
        ) > len(self.first):
            return
        self._answered.add((sender, frame.tag))
        for bundle in self.evidence:
            if bundle.context.step >= self.step - 1:
                self.host.tell(sender, bundle)
        closed = self.closed
        if closed is not None and frame.step == closed.context.step:
            for kind in (Kind.CHECKS, Kind.JUDGEMENT):
                for number in range(len(closed.roster)):
                    signed = closed.table.signed(kind, number)
                    if signed is not None:
                        self.host.tell(sender, signed)
