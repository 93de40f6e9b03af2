"""A session's part in BTARD: inputs for the peer, what it asks of its script and of others, and
what the log is given.

The peer's work (signatures, hashes, fixed points) is done beside the control loop, as jobs in the
order of their inputs; what it says meanwhile is sent when the job is done. Its memory is volatile:
a node that begins again in the midst of the run takes no more part, as it could say something else
than it has said.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from ....collectives.exchange import BlobProgress
from ....collectives.group import Config, Entry
from ....collectives.identifiers import PeerId
from ....collectives.round import KIN_BYTES
from ....collectives.seeded import BtardSettings
from ....security.btard import AttemptSettings, BtardPeer, Bundle, GradientTask
from ....security.btard.finished import Finished
from ....security.btard.messages import CommittedVector, Frame, Vector
from ....security.btard.trail import Trail
from ....security.identity import verify
from ...session import events as ev
from ...session.contribution_queue import Given
from ...session.pre_round import NO_SPENDING, PreRoundView
from .evidence import removal
from .results import StepResults
from .tasks import SeededTasks
from .vectors import VectorTransfers
from .wire import PREFIX, Offered, Taken, decode, encode

if TYPE_CHECKING:
    from ....security.identity import Identity
    from ...session.session import Session

BEGUN = "btard/begun"  # in what storage remembers: this member has spoken in the run's steps
AGAIN = "this node began again in the midst of the run: it cannot know what it has said before"
# Bytes of one peer's messages that wait for the peer's work, beside two vectors.
MOST_INPUTS = 1 << 22

MOST_REPEATED = 256  # messages of a step that are said again
LOOKS = 6  # ticks in `timeout_s`

Output = Callable[[float], None]


class StepOutcome(NamedTuple):
    """A step's result: the aggregate, float32 (numel,), and whether our vector is in it."""

    step: int
    vector: Tensor
    counted: bool

    @property
    def kin(self) -> bytes:
        """What the cids of its copies begin with."""
        data = blake3(b"atoll/btard/kin\0" + self.step.to_bytes(8, "big"))
        return data.update(self.vector.numpy().tobytes()).digest(KIN_BYTES)


class BtardRounds:
    """What a session of a run with ``[btard]`` has in place of giving its script's vectors to the
    log: a `PreRound`. Is the Host of its peer.
    """

    prefix = PREFIX

    def __init__(
        self,
        session: Session,
        terms: BtardSettings,
        identity: Identity,
        rng: random.Random | None,
    ) -> None:
        """``rng`` makes shares of draws; None, outside simulations: `random.SystemRandom()`."""
        self.session, self.terms, self.identity = session, terms, identity
        self.rng = rng or random.SystemRandom()
        self.given: Given | None = None  # the script waits for the round
        self.step = -1  # that the peer has begun
        self.found: StepOutcome | None = None  # what the newest step that is over came to
        self.results = StepResults(session)
        self.spending = NO_SPENDING
        self.work = SeededTasks(session, terms.intervals, self._computed)
        self._peer: BtardPeer | None = None
        self._vectors: VectorTransfers | None = None
        self._barred = ""  # why this member takes no part
        self._inputs: list[Callable[[BtardPeer], None]] = []
        self._queued = Counter[PeerId]()
        self._outputs: list[Output] = []
        # After those: who is removed is told on what evidence before it is banned.
        self._removals: list[Output] = []
        self._busy = False
        self._ticked_at = -1e9
        self._to_repeat: list[tuple[list[PeerId], bytes]] = []  # in the step, and to whom
        self._quiet = True  # nothing was said since the last tick

    @property
    def active(self) -> bool:
        return self.given is not None

    def look(self, now: float) -> PreRoundView:
        """Its document has ``missing``: peers that are no members yet, without which
        no step begins; ``step``: -1 before the first.
        """
        members = set(self.session.config_peers())
        removed = sorted(self._peer.removed) if self._peer is not None else []
        missing = (
            [] if self.step >= 0 else [peer for peer in self.terms.peers if peer not in members]
        )
        document = {
            "peers": list(self.terms.peers),
            "missing": missing,
            "step": self.step,
            "removed": removed,
            "out": self._barred,
        }
        return PreRoundView(document=document)

    # ---- the script
    def offer(self, now: float) -> None:
        """Begin the step, or give the log what it came to."""
        session, machine = self.session, self.session.machine
        if machine is None or machine.stateless or machine.open.applying:
            return
        first = session.queue.first()
        if first is None:
            return
        if self._why_barred():
            session.queue.take()
            self.given = None
            return session.ports.emit(ev.ContributionRefused(first[0], self._barred, unfit=True))
        again = self.given is not None and self.given[0] != first[0]
        self.given = first
        if again:
            self.work.ask_again()
        self._begin(now)
        self._give(now)

    def _why_barred(self) -> str:
        session = self.session
        if not self._barred and session.me not in self.terms.peers:
            self._barred = "this node is none of the peers that the run's manifest names"
        elif (
            not self._barred
            and self.step < 0
            and (session.completed > 0 or BEGUN in session.ports.storage.spent.operations())
        ):
            self._barred = AGAIN
        return self._barred

    def _all_in(self) -> bool:
        """Whether the run's first step can begin: none of its peers is missing. If so it was
        before, when this one was an earlier life on a disk that is lost, it may have spoken in that
        step, and is barred."""
        machine = self.session.machine
        assert machine is not None

        def full(config: Config) -> bool:
            return set(self.terms.peers) <= {member.peer for member in config}

        if not machine.is_member or not full(machine.config):
            return False
        configs = (certified.entry.next_config for certified in machine.journal.entries)
        self._barred = (
            AGAIN if any(full(config) and machine.me not in config for config in configs) else ""
        )
        return not self._barred

    def _begin(self, now: float) -> None:
        """Begin the open round's step once all are there, and the step before is over."""
        session, step = self.session, self.session.completed
        if self.step >= step or (
            self.step >= 0 and (self.found is None or self.found.step < self.step)
        ):
            return
        if self._made() is None:
            return
        if self.step < 0 and not self._all_in():
            return
        if self.step < 0:
            session.ports.storage.spent.spend(BEGUN)
        self.step, self._to_repeat = step, []
        state, start = self._state(), self._start()
        self.work.begin(step, start)
        if self._vectors is not None:
            self._vectors.forget(step)
        self._input(lambda peer: peer.begin(now, step, state, start))

    def _state(self) -> bytes:
        """What names the anchor alike everywhere: the hash of the newest entry that moved it."""
        machine = self.session.machine
        assert machine is not None
        entries, at = machine.journal.entries, machine.round - 1
        while at and not entries[at].entry.contributors:
            at -= 1
        return entries[at].entry.hash()

    def _start(self) -> Vector | None:
        """Where trails begin: a copy of the anchor, which is what scripts begin at."""
        replica, machine = self.session.replica, self.session.machine
        assert replica is not None
        assert machine is not None
        if not self.terms.intervals:
            return None
        return replica.anchor[: machine.shape.numel].clone().numpy()

    def _made(self) -> BtardPeer | None:
        session, terms = self.session, self.terms
        if self._why_barred():
            return None
        if self._peer is None and session.machine is not None:
            settings = AttemptSettings(
                terms.radius,
                terms.validators,
                terms.tolerance,
                terms.timeout_s,
                terms.compute_s,
                intervals=terms.intervals,
            )
            numel = session.machine.shape.numel
            self._vectors = VectorTransfers(session, numel, min(2.0, terms.timeout_s / LOOKS))
            self._peer = BtardPeer(
                session.run, self.identity, verify, terms.peers, numel, settings, self, self.rng
            )  # type: ignore[arg-type]
        return self._peer

    # ---- the peer's inputs, and what comes of them
    def _computed(
        self, now: float, task: GradientTask, values: Vector, trail: Trail | None
    ) -> None:
        self._input(lambda peer: peer.computed(now, task, values, trail))

    def _input(
        self, act: Callable[[BtardPeer], None], sender: PeerId | None = None, nbytes: int = 0
    ) -> None:
        peer = self._peer
        if sender is not None and peer is not None:
            if self._queued[sender] + nbytes > MOST_INPUTS + 8 * peer.size:
                return  # it will say it again
            self._queued[sender] += nbytes
        self._inputs.append(act)
        self._work()

    def _work(self) -> None:
        peer = self._peer
        if self._busy or peer is None or not self._inputs:
            return
        inputs, self._inputs, self._busy = self._inputs, [], True
        self._queued.clear()

        def work() -> list[Output]:
            for act in inputs:
                act(peer)
            outputs, self._outputs = [*self._outputs, *self._removals], []
            self._removals = []
            return outputs

        self.session.ports.offload(work, self._worked)

    def _worked(self, now: float, outputs: list[Output]) -> None:
        self._busy = False
        if self._peer is not None and self._peer.ended and not self._barred:
            self._barred = f"fewer than {self._peer.settings.least} of the run's peers are left"
        for output in outputs:
            output(now)
        self._work()
        self.session.settle(now)

    # ---- Host: called in a job
    def tell(self, to: PeerId | None, frame: Frame) -> None:
        self._outputs.append(lambda now: self._tell(to, frame))

    def compute(self, task: GradientTask) -> None:
        self._outputs.append(lambda now: self._ask(task))

    def finished(self, now: float, step: Finished) -> None:
        found = StepOutcome(
            step.context.step, torch.from_numpy(step.vector), self.session.me in step.residuals
        )
        kin = found.kin
        self._outputs.append(lambda now: self._end(now, found, kin))

    def removed(self, now: float, bundle: Bundle, gone: PeerId) -> None:
        assert self._peer is not None
        evidence = removal(self._peer.evidence, bundle)
        self._removals.append(lambda now: self._remove(gone, evidence))

    def offended(self, sender: PeerId, what: str) -> None:
        self._outputs.append(lambda now: self.session.misbehaved(now, sender, what))

    # ---- what comes of them
    def _tell(self, to: PeerId | None, frame: Frame) -> None:
        receivers = (
            [to]
            if to is not None
            else [peer for peer in self.terms.peers if peer != self.session.me]
        )
        if isinstance(frame, CommittedVector):
            assert self._vectors is not None
            return self._vectors.offer(frame, receivers)
        message = (receivers, encode(frame))
        if len(self._to_repeat) < MOST_REPEATED:
            self._to_repeat.append(message)
        self._quiet = False
        return self._send(*message)

    def _send(self, receivers: list[PeerId], data: bytes) -> None:
        for peer in receivers:
            self.session.ports.send(peer, data)

    def _ask(self, task: GradientTask) -> None:
        if task.start is not None and not np.isfinite(task.start).all():
            # No script is given what another peer says is a state and cannot be one.
            nothing = np.full_like(task.start, np.nan)
            return self._input(lambda peer: peer.computed(self.session.clock(), task, nothing))
        return self.work.ask(task)

    def _end(self, now: float, found: StepOutcome, kin: bytes) -> None:
        self.found = found
        if found.step == self.session.completed:
            self.results.copies.have(kin, found.vector)
        self.offer(now)

    def _remove(self, gone: PeerId, evidence: bytes) -> None:
        if gone == self.session.me:
            self._barred = (
                "the other peers have removed this node from the run, with proof: atoll bans, at "
                "one of them, says for what"
            )
        self.session.ports.emit(ev.Equivocated(gone, evidence))

    # ---- the log
    def _give(self, now: float) -> None:
        """The aggregate is this member's contribution to the log; the same as the others'."""
        session, machine, found = self.session, self.session.machine, self.found
        assert machine is not None
        if (
            found is None
            or found.step != session.completed
            or machine.contribution is not None
            or machine.open.applying
        ):
            return
        machine.contribute(now, self.results.copies.cid(), 1)

    def decided(self, entry: Entry) -> tuple[bytes | None, bool]:
        """Where the step is not over here yet, this member's vector is taken for counted."""
        if entry.contributors:
            self.results.copies.forget()
        if not entry.contributors or self.given is None:
            return None, False
        given, self.given, found = self.given, None, self.found
        self.session.queue.take()
        return given[0], found is None or found.step < self.step or found.counted

    # ---- messages
    def on_message(self, now: float, peer: PeerId, data: bytes) -> None:
        message = decode(data, peer)
        if peer not in self.terms.peers or self._made() is None or self._vectors is None:
            return
        match message:
            case Offered():
                self._vectors.on_offered(now, peer, message)
            case Taken():
                self._vectors.on_taken(peer, message)
            case _:
                self._input(lambda machine: machine.receive(now, peer, message), peer, len(data))

    def takes(
        self, now: float, event: ev.OperationDone | ev.OperationRefused | BlobProgress
    ) -> bool:
        if not isinstance(event, BlobProgress):
            return False
        if self._vectors is None or not self._vectors.takes(event.name):
            return False
        arrived = self._vectors.on_blob(now, event)
        if arrived is not None:
            sender, piece = arrived
            self._input(
                lambda machine: machine.receive(now, sender, piece), sender, piece.values.nbytes
            )
        return True

    def tick(self, now: float) -> None:
        self.offer(now)
        if self._vectors is not None:
            self._vectors.tick(now)
        if self.step >= 0 and now - self._ticked_at >= self.terms.timeout_s / LOOKS:
            self._ticked_at = now
            self._input(lambda peer: peer.tick(now))
            if (
                self._quiet
            ):  # what was lost with a connection must not look as if it had never been said
                for receivers, data in self._to_repeat:
                    self._send(receivers, data)
            self._quiet = True

    def drop_all(self) -> None:
        if self._vectors is not None:
            self._vectors.forget(1 << 62)
