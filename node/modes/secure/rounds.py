"""A session's part in secure rounds: attempts at a masking, the operation that adds up, what must
be remembered, what the script is told.

A vector is given for unmasking once, ever. Before that an attempt that comes to nothing is followed
by another one, with fresh masks; after it, a sum that could not be unmasked takes its vectors with
it: their members are told, go back to the anchor and train anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
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
from ....collectives.group import CID_BYTES, Admitted, Entry, Plan, Reading, SpentWord
from ....collectives.identifiers import PeerId
from ....collectives.modes.site_ledger import SiteLedger
from ....collectives.round import KIN_BYTES
from ....collectives.round.log import RECENT, Log
from ....collectives.round.site_names import SiteNames, spent_payload
from ....collectives.round.turns import AWAY_S
from ....collectives.swarm import MAX_OP_ID, Call, SecureSettings, Spent
from ....security.masking import Binding, DealerError, Memory, Unmasking
from ....security.masking.binding import LEAST_MEMBERS
from ....security.masking.keys import Words
from ....security.masking.messages import Keys
from ...session import events as ev
from ...session.contribution_queue import Given
from ...session.copies import Copies
from ...session.pre_round import PreRound
from ..operations.naming import MASKED_SUMS, config_key
from ..operations.operations import operations_of
from .bound import bound_at
from .budget import Budget
from .masking import Masking, MaskingStep
from .vectors import (
    RingLayout,
    Summed,
    bits_of,
    fewest_sites,
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
# In what storage remembers: attempts, and vectors that were handed over masked.
BEGUN, GIVEN = (
    "begun/",
    "given/",
)
# Attempts at a round that are followed at once: to the last that can be said, one member could lead
# all.
MOST_AHEAD = 1 << 16
REPEAT_S = 0.4
SUM_S = 30.0  # how long a sum, or its unmasking, may stand still
ENOUGH_VOTERS = 2  # whom a member follows that has no mean of its own: one of them does not lie


class Refused(NamedTuple):
    """What a member revealed is none of the shares that were dealt to it."""

    peer: PeerId
    why: str


class SecureRounds(PreRound):
    """What a session of a run with ``[secure]`` has in place of giving its vectors to the log."""

    prefix = PREFIX

    def __init__(
        self,
        session: Session,
        terms: SecureSettings,
        identity: Identity,
        rng: random.Random | None,
    ) -> None:
        """``rng`` makes secrets and rounds; None (no simulation): `random.SystemRandom()`."""
        self.session, self.terms, self.identity = session, terms, identity
        self._ledger: SiteLedger | None = None  # of a run with noise, once there is a log
        self._operations = operations_of(session)
        self.rng = rng or random.SystemRandom()
        self.masking: Masking | None = None
        self.given: Given | None = None  # the script's vector, in the attempt
        self.vectors: RingLayout | None = None  # how they lie on the ring, in the attempt
        self.mean: tuple[bytes, Tensor, Reading] | None = None  # what came out, for the log
        self._copies = Copies(session)  # of it
        self._following: tuple[bytes, float] | None = None  # an entry that others made, since when
        self.metrics: dict[str, float] = {}  # what the script has reported last
        self.bad: set[PeerId] = set()  # whose words did not hold: left out of later attempts
        self._memory: Memory | None = None
        self._budget: Budget | None = None
        self._left_out = False  # its bucket is decided to stay masked
        # the vector was handed over, masked: unless it is decided otherwise, it may be in a sum
        self._handed = False
        self._number = 0
        self._total: Words | None = None
        self._busy = False
        self._tried = 0  # so many members' shares are needed for another try
        self._since = self._announced_at = -1e9
        self._away: dict[PeerId, float] = {}  # who is not heard, since when
        self._over = ""  # why no vector of this member is given any more
        # how many steps were spent, and whether one more was allowed then
        self._judged: tuple[int, bool] | None = None

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

    @property
    def memory(self) -> Memory:
        """What this member must not do again, from all its lives."""
        if self._memory is None:
            spent = self.session.ports.storage.spent()
            begun = {bytes.fromhex(key[len(BEGUN) :]) for key in spent if key.startswith(BEGUN)}
            self._memory = Memory(
                begun, {bytes.fromhex(key[len(GIVEN) :]) for key in spent if key.startswith(GIVEN)}
            )
        return self._memory

    @property
    def budget(self) -> Budget | None:
        """Of a run with ``[privacy]``. Raises StorageError."""
        if self._budget is None and self.session.settings.privacy is not None:
            self._budget = Budget(self.session.settings.privacy, self.session.ports.storage)
        return self._budget

    def report(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def spent(self) -> Spent | None:
        """What this member has spent of its privacy; None in a run without noise. Raises
        StorageError."""
        budget, session = self.budget, self.session
        if budget is None:
            return None
        terms, machine = budget.terms, session.machine
        return Spent(
            bound_at(session, terms, machine.round) if machine is not None else terms.clip,
            terms.quantile,
            budget.epsilon,
            terms.delta,
            terms.stop_at_epsilon,
            budget.steps,
            budget.room,
        )

    @property
    def over(self) -> str:
        """Why this member gives no vector any more: its privacy is spent, an entry says that too
        few sites are left for a sum, or another key has its name."""
        return self._over

    def spent_words(self) -> list[SpentWord]:
        """What members have said of themselves, this one too: in their records, which are signed
        besides."""
        records, machine = self.session.membership, self.session.machine
        peers = {member.peer for member in machine.config} if machine is not None else set[PeerId]()
        found = [(peer, records.record(peer)) for peer in sorted(peers)]
        return [SpentWord(peer, of.spent) for peer, of in found if of is not None and of.spent]

    def names(self, entries: Log, name: Callable[[Admitted], str]) -> SiteNames:
        """What a site spends is bound to its name."""
        settings = self.session.settings
        if settings.privacy is None:
            return SiteNames()
        self._ledger = SiteLedger(
            entries,
            run=self.session.run,
            fewest=fewest_sites(self.terms),
            sample=settings.sample,
            name=name,
            heard=self.spent_words,
        )
        return self._ledger

    def _judge_budgets(self, now: float) -> None:
        """Note whether the run is over here, and tell others where this member's budget is. A
        vector that was handed over is waited for.

        A site that may spend no more is done, and signs that. Once too few are left, an entry with
        what they have signed ends the run for all.
        """
        budget, session, machine = self.budget, self.session, self.session.machine
        sites, me = self._ledger, session.me
        if budget is None or machine is None or sites is None or self._over:
            return
        if sites.retired(me):
            self._over = (
                f"another key has the name of this site, {sites.name_of(me)}, now: the organiser's "
                "invite let it in under that"
            )
            return
        if self._handed or self.mean is not None:
            return
        before = sites.before(machine.me, session.membership.certificate)
        budget.raise_to(before)
        if self._judged is None or self._judged[0] != budget.steps:
            self._judged = (budget.steps, budget.allows)
        if not self._judged[1]:
            signature = session.actions.sign(spent_payload(session.run, me))
            session.membership.announce(now, spent=signature)
            self._over = (
                f"this site has spent epsilon {budget.epsilon:.3g}, and one more round would pass "
                f"{budget.terms.stop_at_epsilon:g}"
            )
            if before:  # of what it was asked for, nobody knows what that life had handed over
                self._over += (
                    f"; {before} of its {budget.steps} contributions are all that it may have made "
                    "before the run let it in again"
                )
        elif sites.over:
            self._over = sites.over

    @property
    def _may_give(self) -> bool:
        """Whether a vector may be handed over for the open entry. With noise that is one an entry,
        over all attempts: so the log bounds what a site has given, also where its disk is lost
        (`site_ledger`). An entry without contributors opens the next."""
        budget, machine = self.budget, self.session.machine
        return budget is None or machine is None or budget.last != machine.round

    def _wait_for_entry(self) -> None:
        """What was given for the open entry came to nothing: ask for one that ends it."""
        machine = self.session.machine
        if machine is not None and not machine.unsettled:
            machine.set_unsettled(self.session.clock(), True)

    @property
    def patient(self) -> bool:
        """Whether an attempt waits for the work of all who take part (`round.turns`)."""
        return self.session.settings.work is not None

    def at_work(self, now: float) -> list[PeerId]:
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

    def awaited(self) -> list[PeerId]:
        """All who are drawn, until the sum is here: also one that dies in the middle of it."""
        machine = self.session.machine
        if machine is None or machine.stateless or self.mean is not None:
            return []
        return sorted({member.peer for member in machine.draw.members})

    def gone(self) -> list[PeerId]:
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

    def _silent(self, now: float, roster: Collection[PeerId]) -> list[PeerId]:
        """Who is not heard, and not waited for: at once where a round does not wait for work, and
        until it may be gone where it does."""
        suspected = [peer for peer in roster if self.session.actions.suspected(peer)]
        self._away = {peer: self._away.get(peer, now) for peer in suspected}
        least = AWAY_S if self.patient else 0.0
        return [peer for peer, since in self._away.items() if now - since >= least]

    def gave(self, cid: bytes) -> bool:
        """Whether an earlier life handed over this vector: it may be in a sum, and is not to be in
        another.
        """
        return cid in self.memory.consented

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
            self._judge_budgets(now)
            if self._over:
                self.session.queue.take()
                return self.session.ports.emit(
                    ev.ContributionRefused(first[0], self._over, over=self._over)
                )
            self.given = first
        if self.masking is None and not self._may_give:
            return self._wait_for_entry()
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
        self._copies.forget()
        self.mean, self._number, self._following = None, 0, None
        self._drop()
        self.given = None
        if given is None:
            return None, False
        self.session.queue.take()
        self._judge_budgets(self.session.clock())  # before the script hears of it, and looks
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

    # ---- the log
    def execute(self, plan: Plan) -> bool:
        """Who has the mean makes the result itself; it travels only where a member has none."""
        self._copies.look(plan)
        members = set(self.session.config_peers())
        return self._copies.are(plan) and members <= {c.member.peer for c in plan.contributors}

    def may_fetch(self, entry: Entry) -> bool:
        """Of the mean that is here, nothing but what is made here."""
        machine = self.session.machine
        if machine is not None and machine.open.decided is not None:
            return True
        if self._copies.are(entry):
            self._copies.look(entry)
            return False
        return True

    def contradicts(self, entry: Entry) -> bool | None:
        return self._copies.contradict(entry)

    def may_vote(self, entry: Entry, voters: Collection[PeerId]) -> bool:
        """For the mean that is here; who has none (it sat out, or began again) goes by members who
        have, and one may lie. Where nobody else is left who could vote, too, it follows a single
        one after a while: else the round would never end.
        """
        if self._copies.are(entry):
            return self._copies.digests(entry) == entry.part_digests
        digest, now = entry.hash(), self.session.clock()
        if self._following is None or self._following[0] != digest:
            self._following = (digest, now)
        patient = bool(voters) and now - self._following[1] > SUM_S
        return len(voters) >= ENOUGH_VOTERS or patient

    def on_false(self, entry: Entry, convener: PeerId, ballot: int) -> None:
        """In a later ballot it may have been made to adopt what another has voted for."""
        if ballot == 0 and any(convener == c.member.peer for c in entry.contributors):
            self._name(convener, "it proposes another mean than was unmasked")

    def on_result(self, plan: Plan, digests: tuple[bytes, ...]) -> bool:
        for owner in self._copies.otherwise(plan, digests):
            self._name(owner, "its part of the result is not of the mean that was unmasked")
        return self._copies.are(plan)

    def _name(self, peer: PeerId, what: str) -> None:
        """It signed nothing of that, so this is no proof; and left out of sums it would cost the
        others more time than its ballots do.
        """
        self.session.ports.emit(ev.PeerMisbehaved(peer, what))

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
            length_of(self.terms, session.settings.privacy, machine.shape.numel),
            bits_of(self.terms, session.settings.privacy, len(roster)),
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
                if digest not in self.memory.begun:
                    self.session.ports.storage.spend(BEGUN + digest.hex())
                masking.join(self.identity, self.memory, self.rng)
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
        self.session.ports.emit(ev.MaskingFailed(*masking.key, reason))
        burnt, number = self._handed, masking.binding.attempt + 1
        self._drop()
        self._number = number
        if burnt and given is not None:
            self.given = None
            self.session.queue.take()
            self._judge_budgets(now)  # before the script hears of it, and looks
            self._tell_burnt(given)
        self.offer(now)

    def _op_id(self, masking: Masking) -> str:
        assert masking.digest is not None
        return OPERATION + masking.digest.hex()

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
        if session.script is None or self._over or not self._may_give:
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
        self._judge_budgets(now)
        if self._over and self.given is not None and not self._handed and not self._busy:
            given, self.given = self.given, None
            self._drop()
            self.session.queue.take()
            self.session.ports.emit(ev.ContributionRefused(given[0], self._over, over=self._over))
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
        privacy, roster = self.session.settings.privacy, masking.binding.roster
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
            self.session.ports.storage.layout(),
        )
        buckets = masking.buckets(self.terms)
        self._busy, metrics = True, dict(self.metrics)

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
        budget = self.budget
        if budget is None:
            return self._start(now, masking, given, words)

        entry = masking.binding.round
        if budget.last == entry:  # `_judge_budgets` has not seen the round yet
            if self.masking is masking:
                self._drop()
            return self._wait_for_entry()

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
                self.session.ports.emit(ev.PrivacySpent(budget.epsilon, budget.steps, budget.room))
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
            session.ports.storage.spend(GIVEN + given[0].hex())
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

    def takes(self, event: ev.OperationDone | ev.OperationRefused) -> bool:
        """Whether an operation that is over was a sum of a secure round."""
        if not event.op_id.startswith(OPERATION) or len(event.op_id) <= MAX_OP_ID:
            return False
        masking, now = self.masking, self.session.clock()
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
                self._copies.have(masking.digest[:KIN_BYTES], found.mean)
                self.mean, self._total = (
                    (self._copies.cid(), found.mean, Reading(norm=bound)),
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
                self.session.ports.emit(ev.Unmasked(*masking.key, *terms))
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
