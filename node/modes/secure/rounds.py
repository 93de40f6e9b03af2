"""A session's part in secure rounds: attempts at a masking, the operation that adds up, what must
be remembered, what the script is told.

A vector is given for unmasking once, ever. Before that an attempt that comes to nothing is followed
by another one, with fresh masks; after it, a sum that could not be unmasked takes its vectors with
it: their members are told, go back to the anchor and train anew.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from ....collectives.codecs.codec import Chunking
from ....collectives.errors import (
    GroupError,
    LocalProtocolError,
    RemoteProtocolError,
    SecurityError,
    StorageError,
)
from ....collectives.exchange import BlobProgress
from ....collectives.group import CID_BYTES, Entry, Reading
from ....collectives.identifiers import PeerId
from ....collectives.round import KIN_BYTES
from ....collectives.round.log import RECENT
from ....collectives.round.turns import AWAY_S
from ....collectives.script_swarm import MAX_OP_ID, Call
from ....collectives.swarm import PrivacySettings, SecureSettings
from ....security.masking import Binding, DealerError, Unmasking
from ....security.masking.binding import LEAST_MEMBERS
from ....security.masking.keys import Words
from ....security.masking.messages import Keys
from ...session import events as ev
from ...session.contribution_queue import Given
from ...session.mode_events import MaskingFailed, PrivacySpent, Unmasked
from ...session.pre_round import PreRoundView
from ..operations.naming import MASKED_SUMS, config_key
from ..operations.operations import operations_of
from .bound import bound_at
from .masking import Masking, MaskingStep
from .results import MaskedResults
from .spending import BEGUN, GIVEN, ReportedMetrics, SiteSpending
from .vectors import (
    RingLayout,
    Summed,
    bits_of,
    in_bucket,
    least_buckets,
    length_of,
    threshold_of,
)
from .wire import PREFIX, AttemptMessage, AuthoredMessage, Fixed, Pass, Want, decode, encode

if TYPE_CHECKING:
    from ....security.identity import Identity
    from ...session.session import Session

# how the operations of secure rounds are called, at greater length than any script's
OPERATION = "masking/"
# Attempts at a round that are followed at once: to the last that can be said, one member could lead
# all.
MOST_AHEAD = 1 << 16
REPEAT_S = 0.4
SUM_S = 30.0  # how long a sum, or its unmasking, may stand still


class Refused(NamedTuple):
    """What a member revealed is none of the shares that were dealt to it."""

    peer: PeerId
    why: str


class SecureRounds:
    """What a session of a run with ``[secure]`` has in place of giving its vectors to the log: a
    `PreRound`.
    """

    prefix = PREFIX

    def __init__(
        self,
        session: Session,
        terms: SecureSettings,
        privacy: PrivacySettings | None,
        identity: Identity,
        rng: random.Random | None,
    ) -> None:
        """``rng`` makes secrets and rounds; None (no simulation): `random.SystemRandom()`."""
        self.session, self.terms, self.identity = session, terms, identity
        self.privacy = privacy
        self._operations = operations_of(session)
        self.rng = rng or random.SystemRandom()
        self.masking: Masking | None = None
        self.given: Given | None = None  # the script's vector, in the attempt
        self.vectors: RingLayout | None = None  # how they lie on the ring, in the attempt
        self.mean: tuple[bytes, Tensor, Reading] | None = None  # what came out, for the log
        self.results = MaskedResults(session)
        self.bad: set[PeerId] = set()  # whose words did not hold: left out of later attempts
        self.spending = SiteSpending(session, terms, privacy)
        self.work = ReportedMetrics()
        self._left_out = False  # its bucket is decided to stay masked
        # the vector was handed over, masked: unless it is decided otherwise, it may be in a sum
        self._handed = False
        self._number = 0
        self._total: Words | None = None
        self._busy = False
        self._tried = 0  # so many members' shares are needed for another try
        self._since = self._announced_at = -1e9
        self._away: dict[PeerId, float] = {}  # who is not heard, since when

    # ---- views
    @property
    def active(self) -> bool:
        return self.masking is not None

    @property
    def needed(self) -> int:
        """How many vectors the open round needs: of those who may contribute to it."""
        machine = self.session.machine
        return threshold_of(
            self.terms,
            len({member.peer for member in machine.draw.members}) if machine is not None else 0,
        )

    def look(self, now: float) -> PreRoundView:
        return PreRoundView(self.needed, self._at_work(), self._awaited(), self._gone())

    @property
    def patient(self) -> bool:
        """Whether an attempt waits for the work of all who take part (`round.turns`)."""
        return self.session.settings.by_work

    def _at_work(self) -> list[PeerId]:
        """Those of the round whose keys are not here: they have nothing to be masked yet."""
        machine, masking = self.session.machine, self.masking
        if machine is None or self.mean is not None:
            return []
        roster = sorted({member.peer for member in machine.draw.members})
        if masking is None:
            return roster
        if masking.fixed:
            return []
        here = masking.messages[0].keys() | masking.passed | self.bad
        return [peer for peer in roster if peer not in here]

    def _awaited(self) -> list[PeerId]:
        """All who are drawn, until the sum is here: also one that dies in the middle of it."""
        machine = self.session.machine
        if machine is None or machine.stateless or self.mean is not None:
            return []
        return sorted({member.peer for member in machine.draw.members})

    def _gone(self) -> list[PeerId]:
        """Without whom the configuration is too small for a sum: by the newest entry that left
        enough of them, of those in memory."""
        machine = self.session.machine
        if machine is None or machine.stateless:
            return []
        inside = {member.peer for member in machine.config}
        if len(inside) >= (needed := self.needed):
            return []
        entries = machine.journal.entries
        for number in range(len(entries) - 1, max(-1, len(entries) - RECENT), -1):
            before = {member.peer for member in entries[number].entry.next_config}
            if len(before) >= needed:
                return sorted(before - inside)
        return []

    def _judge_budget(self, now: float) -> None:
        """A vector that was handed over is waited for."""
        self.spending.judge(now, pending=self._handed or self.mean is not None)

    def _silent(self, now: float, roster: Collection[PeerId]) -> list[PeerId]:
        """Who is not heard, and not waited for: at once where a round does not wait for work, and
        until it may be gone where it does."""
        suspected = [peer for peer in roster if self.session.actions.suspected(peer)]
        self._away = {peer: self._away.get(peer, now) for peer in suspected}
        least = AWAY_S if self.patient else 0.0
        return [peer for peer, since in self._away.items() if now - since >= least]

    # ---- the script's vector
    def offer(self, now: float) -> None:
        """There may be something to contribute, or a new round."""
        machine = self.session.machine
        if machine is None or machine.stateless or machine.open.applying:
            return
        if self.mean is not None:
            return self._give(now)
        masking = self.masking
        if (
            masking is not None
            and masking.step < MaskingStep.MASKED
            and masking.binding.round != machine.round
        ):
            self._drop()  # only the configuration changed: another roster
        if self.given is None and (self.masking is None or self.masking.step < MaskingStep.MASKED):
            first = self.session.queue.first()
            if first is None:
                return None
            self._judge_budget(now)
            if self.spending.over:
                self.session.queue.take()
                over = self.spending.over
                return self.session.ports.emit(ev.ContributionRefused(first[0], over, over=over))
            self.given = first
        if self.masking is None and not self.spending.may_give:
            return self.spending.wait_for_entry()
        if self.masking is None:
            self._open(now, self._number)
        return self._join(now)

    def _give(self, now: float) -> None:
        """The mean is this member's contribution to the log; the same as the others'."""
        session, machine = self.session, self.session.machine
        assert machine is not None
        assert self.mean is not None
        if machine.contribution is None and not machine.open.applying:
            cid, mean, reading = self.mean
            session.ports.exchange.freeze(session.log, machine.round, cid, mean)
            machine.contribute(now, cid, 1, reading)

    def decided(self, entry: Entry) -> tuple[bytes | None, bool]:
        """A round is over: the script's cid, if one is free again, and whether its vector is in the
        result.
        """
        masking, given = self.masking, self.given
        if not entry.contributors:
            return None, False
        same = (
            masking is not None
            and masking.digest is not None
            and entry.contributors[0].cid[:KIN_BYTES] == masking.digest[:KIN_BYTES]
        )
        # where the sum is not known here, a vector that was handed over for it is taken for
        # counted: counting it twice would be wrong
        counted = same and self._handed and not self._left_out
        burnt = self._handed and not counted
        if self.mean is not None:
            self.session.ports.exchange.release(self.mean[0])
        self.results.forget()
        self.mean, self._number = None, 0
        self._drop()
        self.given = None
        if given is None:
            return None, False
        self.session.queue.take()
        self._judge_budget(self.session.clock())  # before the script hears of it, and looks
        if burnt:
            self._tell_burnt(given)
            return None, False
        return given[0], counted

    def _tell_burnt(self, given: Given) -> None:
        why = (
            "its masked sum failed, so this contribution was discarded: a masked "
            "vector is never used twice"
        )
        self.session.ports.emit(ev.ContributionRefused(given[0], why, unfit=True))

    # ---- attempts
    def _open(self, now: float, number: int) -> bool:
        """Prepare for an attempt of the open round. Whether there are members enough."""
        fresh = self._fresh(number)
        if fresh is None:
            return False
        self._drop()
        self.masking, self._number, self._since, self._announced_at = fresh, number, now, now
        return True

    def _fresh(self, number: int) -> Masking | None:
        session, machine = self.session, self.session.machine
        assert machine is not None
        roster = tuple(sorted({member.peer for member in machine.draw.members}))
        threshold = threshold_of(self.terms, len(roster))
        if (
            not machine.is_member
            or session.me not in roster
            or not LEAST_MEMBERS <= threshold <= len(roster)
        ):
            return None
        binding = Binding(
            session.run,
            machine.round,
            number,
            roster,
            threshold,
            length_of(self.terms, self.privacy, machine.shape.numel),
            bits_of(self.terms, self.privacy, len(roster)),
        )
        return Masking(
            binding, machine.convener_of(number).peer, session.me, config_key(machine.config)
        )

    def _join(self, now: float) -> None:
        """Take part with the script's vector."""
        masking = self.masking
        while (
            masking is not None
            and masking.client is None
            and self.given is not None
            and not masking.fixed
        ):
            digest = masking.binding.digest
            try:
                if digest not in self.spending.memory.begun:
                    self.session.ports.storage.spent.spend(BEGUN + digest.hex())
                masking.join(self.identity, self.spending.memory, self.rng)
                if self.session.machine is not None:
                    self.session.machine.turns.done(now)
            except SecurityError:  # in an earlier life
                self._open(now, self._number + 1)
                masking = self.masking
        self._step(now)

    def _drop(self) -> None:
        """Let go of the attempt. The vector stays."""
        masking = self.masking
        if masking is not None and masking.digest is not None:
            self._operations.abandon(self.session.clock(), self._op_id(masking))
        self.masking, self._total, self._handed, self._left_out = None, None, False, False
        self._tried = 0

    def _fail(self, now: float, reason: str) -> None:
        """The attempt came to nothing: another one, with fresh masks; and with another vector,
        where this one may be in a sum.
        """
        masking, given = self.masking, self.given
        assert masking is not None
        self.session.ports.emit(MaskingFailed(*masking.key, reason))
        burnt, number = self._handed, masking.binding.attempt + 1
        self._drop()
        self._number = number
        if burnt and given is not None:
            self.given = None
            self.session.queue.take()
            self._judge_budget(now)  # before the script hears of it, and looks
            self._tell_burnt(given)
        self.offer(now)

    def _op_id(self, masking: Masking) -> str:
        assert masking.digest is not None
        return OPERATION + masking.digest.hex()

    def drop_all(self) -> None:
        """A masking lives in memory alone, and its sum is an operation, which the session drops."""

    # ---- messages
    def on_message(self, now: float, peer: PeerId, data: bytes) -> None:
        """About a masking. Raises RemoteProtocolError, BadSignatureError."""
        talk, machine = decode(data, peer), self.session.machine
        if machine is None or machine.stateless or not machine.is_member:
            return
        key, body, masking = (talk.round, talk.attempt), talk.body, self.masking
        opens = (
            isinstance(body, AuthoredMessage)
            and talk.round == machine.round
            and not machine.open.applying
            and self.mean is None
        )
        near = self._number <= talk.attempt <= self._number + MOST_AHEAD
        if (
            opens
            and near
            and (masking is None or (key > masking.key and masking.step < MaskingStep.MASKED))
        ):
            fresh = self._fresh(talk.attempt)
            if fresh is None or not isinstance(body, AuthoredMessage) or not fresh.hear(peer, body):
                return
            self._open(now, talk.attempt)
            self._invited(now)
            masking = self.masking
        if masking is None or key != masking.key:
            return
        match body:
            case AuthoredMessage():
                news = masking.hear(peer, body)
            case Fixed():
                news = masking.fix(peer, body)
            case Want():
                masking.answer(peer, body.stage, body.numbers)
                news = False
            case Pass():
                news = (
                    peer in masking.binding.roster
                    and peer not in masking.messages[0]
                    and peer not in masking.passed
                )
                if news:
                    masking.passed.add(peer)
        if news:
            self._since = now
            if isinstance(body, AuthoredMessage) and isinstance(body.message, Keys):
                machine.turns.done(now)
        if self.masking is masking and masking.client is None:
            self.offer(now)
        self._step(now)

    def _invited(self, now: float) -> None:
        """Others have begun: the script contributes now, or nobody need wait for it."""
        session, masking = self.session, self.masking
        assert masking is not None
        if session.script is None or self.spending.over or not self.spending.may_give:
            masking.out.append((masking.leader, Pass()))
        elif self.given is None and session.queue.first() is None:
            session.ports.emit(ev.RoundClosing(session.completed + 1))

    def _flush(self) -> None:
        masking = self.masking
        if masking is None:
            return
        out, masking.out = masking.out, []
        for peer, body in out:
            data = encode(AttemptMessage(*masking.key, body))
            for each in masking.binding.roster if peer is None else (peer,):
                if each != masking.me:
                    self.session.ports.send(each, data)

    def tick(self, now: float) -> None:
        """What waits, what was lost, and what takes too long."""
        machine, masking = self.session.machine, self.masking
        if machine is None or machine.stateless:
            return
        self._judge_budget(now)
        if self.spending.over and self.given is not None and not self._handed and not self._busy:
            given, self.given = self.given, None
            self._drop()
            self.session.queue.take()
            over = self.spending.over
            self.session.ports.emit(ev.ContributionRefused(given[0], over, over=over))
            masking = None
        if masking is None or masking.client is None or self.mean is not None:
            self.offer(now)
        masking = self.masking
        if masking is None:
            return
        if now - self._announced_at >= REPEAT_S:
            self._announced_at = now
            masking.repeat()
            masking.ask(self.session.rng.choice(masking.binding.roster))
        if self._overdue(now, masking):
            return self._fail(now, f"nothing came on any more after {masking.step.name.lower()}")
        self._step(now)

    def _overdue(self, now: float, masking: Masking) -> bool:
        session, machine = self.session, self.session.machine
        assert machine is not None
        waited, many = now - self._since, 1 + min(6.0, masking.binding.attempt / 2)
        if self.mean is not None or self._busy:
            return False
        if masking.client is None:  # others began without us, and may be gone, or could not go on
            waits = self.given is not None or session.queue.first() is not None
            return waits and waited > many * SUM_S
        if masking.step >= MaskingStep.MASKED:
            return waited > many * SUM_S
        if len(masking.messages[0].keys() - {masking.me}) + 1 < masking.binding.threshold:
            return False
        if self.patient and not masking.fixed and self._works(now, masking):
            waits = masking.leader != masking.me and self.session.actions.suspected(masking.leader)
            return waits and waited > session.timing.detect_s
        patience = many * (session.timing.takeover_s + 2 * machine.timing.grace(machine.round_s))
        return waited > patience or (
            waited > session.timing.detect_s and session.actions.suspected(masking.leader)
        )

    def _works(self, now: float, masking: Masking) -> bool:
        """Whether somebody of the attempt still works, and is waited for."""
        machine = self.session.machine
        if machine is None or machine.turns.over(now):
            return False
        gone = {*self._silent(now, masking.binding.roster), *masking.passed, *self.bad}
        return bool(set(masking.binding.roster) - masking.messages[0].keys() - gone)

    # ---- progress
    def _step(self, now: float) -> None:
        """Go on as far as what is known allows."""
        masking, machine = self.masking, self.session.machine
        if masking is None or machine is None:
            return
        silent = self._silent(now, masking.binding.roster)
        if masking.fixed:
            late = now - self._since > 2 * machine.timing.detect_s
        elif self.patient:
            late = machine.turns.over(now)
        else:
            late = now - self._since > machine.timing.grace(machine.round_s)
        if masking.lead(silent, self.bad, late):
            self._since = now
        try:
            masking.advance()
        except RemoteProtocolError as error:
            return self._blame(now, error)
        if (
            masking.digest is not None
            and self._total is None
            and not self._busy
            and masking.client is not None
        ):
            if not masking.takes_part:
                pass  # fixed without us: our vector is for the next attempt or round
            elif masking.survivors is None and self._op_id(masking) not in self._called():
                self._mask(now, masking)
        if masking.survivors is not None and not self._busy:
            self._unmask_when_ready(now, masking)
        return self._flush()

    def _called(self) -> set[str]:
        return {
            operation.op_id
            for operation in self._operations.by_key.values()
            if operation.op_id is not None
        }

    def _blame(self, now: float, error: RemoteProtocolError) -> None:
        """What a member said does not hold: the next attempt is without it."""
        peer = PeerId(error.peer)
        self.bad.add(peer)
        self.session.ports.emit(ev.PeerMisbehaved(peer, error.message))
        self._fail(now, error.message)

    # ---- the sum
    def _mask(self, now: float, masking: Masking) -> None:
        """Put the vector on the ring and mask it, beside; then it goes into the sum."""
        given, client = self.given, masking.client
        assert given is not None
        assert client is not None
        cid, samples, vector, _ = given
        privacy, roster = self.privacy, masking.binding.roster
        bound = (
            bound_at(self.session, privacy, masking.binding.round) if privacy is not None else 0.0
        )
        self.vectors = vectors = RingLayout(
            self.terms,
            privacy,
            vector.numel(),
            len(roster),
            self._threshold(masking),
            bound,
            self.session.ports.storage.states.layout(),
        )
        buckets = masking.buckets(self.terms)
        self._busy, metrics = True, dict(self.work.metrics)

        def work() -> Words | str | RemoteProtocolError:
            words = vectors.words(vector, samples, self.rng, metrics)
            try:
                if not isinstance(words, str):
                    client.mask(words, cid, masking.deals, buckets)
                    words = in_bucket(words, buckets.of(masking.me), len(buckets.members))
            except RemoteProtocolError as error:
                return error
            return words

        self.session.ports.offload(
            work, lambda now, found: self._masked(now, masking, given, found)
        )

    def _threshold(self, masking: Masking) -> int:
        """How many vectors the smallest sum of an attempt has."""
        return self.terms.threshold if self.terms.buckets > 1 else masking.binding.threshold

    def _masked(
        self, now: float, masking: Masking, given: Given, found: Words | str | RemoteProtocolError
    ) -> None:
        self._busy, self._since = False, now
        if self.masking is not masking or self.given is not given:
            return
        if isinstance(found, str):
            self.session.queue.take()
            self.given = None
            self.session.ports.emit(ev.ContributionRefused(given[0], found, unfit=True))
            masking.client = None  # the others' sum is without us
        elif isinstance(found, RemoteProtocolError):
            self._blame(now, found)
        else:
            self._hand_over(now, masking, given, found)
        self.session.settle(now)

    def _hand_over(self, now: float, masking: Masking, given: Given, words: Words) -> None:
        """Into the sum, once what is spent of the privacy by it is on the medium. That is waited
        for beside the loop.
        """
        budget = self.spending.budget
        if budget is None:
            return self._start(now, masking, given, words)

        entry = masking.binding.round
        if budget.last == entry:  # `judge` has not seen the round yet
            if self.masking is masking:
                self._drop()
            return self.spending.wait_for_entry()

        def count() -> StorageError | None:
            try:
                budget.record(entry)
            except StorageError as error:
                return error
            return None

        def counted(now: float, error: StorageError | None) -> None:
            self._busy, self._since = False, now
            if error is None:  # also where the attempt is over meanwhile: the medium says so
                budget.spend()
                self.session.ports.emit(PrivacySpent(budget.epsilon, budget.steps, budget.room))
            if self.masking is masking and self.given is given:
                if error is not None:
                    self._fail(now, error.message)
                else:
                    self._start(now, masking, given, words)
            self.session.settle(now)
            if error is not None:
                raise error

        self._busy = True
        return self.session.ports.persist(count, counted)

    def _start(self, now: float, masking: Masking, given: Given, found: Words) -> None:
        """The sum's operation. Raises StorageError: then nothing was handed over."""
        session, words = self.session, torch.from_numpy(found.view(np.float32))
        try:
            session.ports.storage.spent.spend(GIVEN + given[0].hex())
        except StorageError as error:
            self._fail(now, error.message)
            raise
        self._handed = True
        call = Call(
            self._op_id(masking),
            reducer=MASKED_SUMS[masking.binding.bits],
            weight=1,
            deadline_s=1e9,
            under=masking.config,
        )
        try:
            self._operations.start(now, call, words.numel(), words, self.rng.randbytes(CID_BYTES))
        except (GroupError, LocalProtocolError) as error:
            self._fail(now, str(error))

    def takes(
        self, now: float, event: ev.OperationDone | ev.OperationRefused | BlobProgress
    ) -> bool:
        """Whether an operation that is over was a sum of a secure round."""
        if (
            isinstance(event, BlobProgress)
            or not event.op_id.startswith(OPERATION)
            or len(event.op_id) <= MAX_OP_ID
        ):
            return False
        masking = self.masking
        if (
            masking is None
            or masking.digest is None
            or event.op_id != self._op_id(masking)
            or masking.survivors is not None
        ):
            return True
        if isinstance(event, ev.OperationRefused):
            self._fail(now, event.reason)
            return True
        survivors = tuple(sorted(share.peer for share in event.contributors))
        self._handed = masking.me in survivors  # decided: no other sum of this attempt will ever be
        if len(survivors) < masking.binding.threshold:
            self._handed = False  # nobody consents to it
        if len(survivors) < masking.binding.threshold or not set(survivors) <= set(
            masking.fixed[1]
        ):
            self._fail(
                now,
                (
                    f"vectors of {len(survivors)} members came together; "
                    f"{masking.binding.threshold} are needed"
                ),
            )
            return True
        buckets = masking.buckets(self.terms)
        if len(buckets.open(survivors)) < least_buckets(self.terms):
            self._handed = False  # the same
            self._fail(
                now,
                (
                    f"{len(buckets.open(survivors))} buckets have vectors enough; the rule needs "
                    f"{least_buckets(self.terms)}"
                ),
            )
            return True
        self._left_out = masking.me in buckets.hidden(survivors)
        bits = masking.binding.bits
        numel = masking.binding.numel * len(buckets.members) * bits // 32
        total = torch.empty(numel, dtype=torch.float32)
        for _ in Chunking(event.codec, numel, event.chunk_elements).results.decode(
            event.result, total
        ):
            pass
        words = total.numpy()
        self._total = words.view(np.uint32) if bits == 32 else words.view(np.uint64)
        masking.survivors, self._since = survivors, now
        if masking.me in survivors and masking.client is not None:
            masking.say(masking.client.consent(survivors))
        self._step(now)
        return True

    def _unmask_when_ready(self, now: float, masking: Masking) -> None:
        client, enough = masking.client, masking.binding.threshold
        consents, reveals = masking.consents(), masking.reveals()
        if (
            client is not None
            and masking.me in (masking.survivors or ())
            and masking.me not in masking.messages[3]
            and len(consents) >= enough
        ):
            masking.say(client.reveal(consents))
            reveals = masking.reveals()
        if self._total is None or self.mean is not None or len(reveals) < max(enough, self._tried):
            return
        total, vectors, self._busy = self._total, self.vectors, True
        assert vectors is not None
        buckets, length = masking.buckets(self.terms), masking.binding.numel

        def work() -> Summed | RemoteProtocolError | SecurityError | Refused:
            try:
                unmasking = Unmasking(
                    masking.binding, masking.keys, masking.deals, masking.survivors or (), buckets
                )
                for peer, reveal in reveals.items():
                    try:
                        unmasking.add(peer, reveal)
                    except RemoteProtocolError as error:
                        return Refused(peer, error.message)
                sums = [total[index * length : (index + 1) * length] for index in unmasking.open]
                for index, each in zip(unmasking.open, sums, strict=True):
                    unmasking.unmask(each, bucket=index)
                return vectors.ruled(sums) if self.terms.buckets > 1 else vectors.summed(total)
            except (RemoteProtocolError, SecurityError) as error:
                return error

        self.session.ports.offload(work, lambda now, found: self._unmasked(now, masking, found))

    def _unmasked(
        self,
        now: float,
        masking: Masking,
        found: Summed | RemoteProtocolError | SecurityError | Refused,
    ) -> None:
        self._busy, self._since = False, now
        if self.masking is masking:
            if isinstance(found, Summed):
                assert masking.digest is not None
                survivors, moving = (
                    masking.survivors or (),
                    self.vectors.moving if self.vectors else None,
                )
                bound = (
                    moving.next(found.within, len(survivors)).bound
                    if moving and found.within is not None
                    else None
                )
                self.results.copies.have(masking.digest[:KIN_BYTES], found.mean)
                self.mean, self._total = (
                    (self.results.copies.cid(), found.mean, Reading(norm=bound)),
                    None,
                )
                buckets = masking.buckets(self.terms)
                sums = tuple(
                    tuple(sorted(buckets.members[index] & set(survivors)))
                    for index in buckets.open(survivors)
                )
                members = tuple(sorted(peer for each in sums for peer in each))
                terms = (
                    members,
                    self._threshold(masking),
                    found.weight,
                    found.metrics,
                    bound,
                    sums,
                )
                self.session.ports.emit(Unmasked(*masking.key, *terms))
                self._give(now)
            elif isinstance(found, Refused):
                masking.refuse(3, found.peer)  # its shares are none; others may do
                self.bad.add(found.peer)
                self.session.ports.emit(ev.PeerMisbehaved(found.peer, found.why))
            elif isinstance(found, DealerError):
                self._misdealt(now, masking, found)
            else:
                self._fail(now, found.message)
        self.session.settle(now)

    def _misdealt(self, now: float, masking: Masking, error: DealerError) -> None:
        """Shares of one dealer do not fit each other. It is named once, with the proof; with the
        shares of all who can still tell theirs, some may do: else its mask stays on the sum, and
        the next attempt is without it."""
        peer, revealed = PeerId(error.peer), len(masking.reveals())
        if peer not in self.bad:
            self.bad.add(peer)
            self.session.ports.emit(ev.Equivocated(peer, msgspec.msgpack.encode(error.proof)))
        silent = self.session.actions.suspected
        if all(
            each in masking.messages[3] or (3, each) in masking.refused or silent(each)
            for each in masking.survivors or ()
        ):
            return self._fail(now, error.message)
        self._tried = revealed + 1
        return None
