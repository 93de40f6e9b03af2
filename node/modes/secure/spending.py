"""What a site has given in a run of secure rounds, over all its lives, and may give yet: attempts
that it has begun, vectors that it has handed over, and what these have spent of its privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ....collectives.group import Admitted, SpentWord
from ....collectives.identifiers import PeerId
from ....collectives.modes.site_ledger import SiteLedger
from ....collectives.outcomes import Spent
from ....collectives.round.log import Log
from ....collectives.round.site_names import SiteNames, spent_payload
from ....collectives.swarm import PrivacySettings, SecureSettings
from ....security.masking import Memory
from ...session.pre_round import ScriptWork, Spending
from .bound import bound_at
from .budget import Budget
from .vectors import fewest_sites

if TYPE_CHECKING:
    from ...session.session import Session

# In what storage remembers: attempts, and vectors that were handed over masked.
BEGUN, GIVEN = "begun/", "given/"


class ReportedMetrics(ScriptWork):
    """What the script has reported last: it goes into the next masked sum."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def report(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)


class SiteSpending(Spending):
    """``over``: why this member gives no vector any more: its privacy is spent, an entry says that
    too few sites are left for a sum, or another key has its name.
    """

    def __init__(
        self, session: Session, terms: SecureSettings, privacy: PrivacySettings | None
    ) -> None:
        self.session, self.terms, self.privacy = session, terms, privacy
        self.over = ""
        self._memory: Memory | None = None
        self._budget: Budget | None = None
        self._ledger: SiteLedger | None = None  # of a run with noise, once there is a log
        # how many steps were spent, and whether one more was allowed then
        self._judged: tuple[int, bool] | None = None

    @property
    def memory(self) -> Memory:
        """What this member must not do again, from all its lives."""
        if self._memory is None:
            spent = self.session.ports.storage.spent.operations()
            begun = {bytes.fromhex(key[len(BEGUN) :]) for key in spent if key.startswith(BEGUN)}
            self._memory = Memory(
                begun, {bytes.fromhex(key[len(GIVEN) :]) for key in spent if key.startswith(GIVEN)}
            )
        return self._memory

    @property
    def budget(self) -> Budget | None:
        """Of a run with ``[privacy]``. Raises StorageError."""
        if self._budget is None and self.privacy is not None:
            self._budget = Budget(self.privacy, self.session.ports.storage)
        return self._budget

    def gave(self, cid: bytes) -> bool:
        return cid in self.memory.consented

    def spent(self) -> Spent | None:
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

    def _heard(self) -> list[SpentWord]:
        """What members have said of themselves, this one too: in their records, which are signed
        besides."""
        records, machine = self.session.membership, self.session.machine
        peers = {member.peer for member in machine.config} if machine is not None else set[PeerId]()
        found = [(peer, records.record(peer)) for peer in sorted(peers)]
        return [SpentWord(peer, of.spent) for peer, of in found if of is not None and of.spent]

    def names(self, entries: Log, name: Callable[[Admitted], str]) -> SiteNames:
        """What a site spends is bound to its name."""
        if self.privacy is None:
            return SiteNames()
        self._ledger = SiteLedger(
            entries,
            run=self.session.run,
            fewest=fewest_sites(self.terms),
            sample=self.session.settings.sample,
            name=name,
            heard=self._heard,
        )
        return self._ledger

    def judge(self, now: float, *, pending: bool) -> None:
        """Note whether the run is over here, and tell others where this member's budget is.
        ``pending``: a vector was handed over, and its round is not decided: that is waited for.

        A site that may spend no more is done, and signs that. Once too few are left, an entry with
        what they have signed ends the run for all.
        """
        budget, session, machine = self.budget, self.session, self.session.machine
        sites, me = self._ledger, session.me
        if budget is None or machine is None or sites is None or self.over:
            return
        if sites.retired(me):
            self.over = (
                f"another key has the name of this site, {sites.name_of(me)}, now: the organiser's "
                "invite let it in under that"
            )
            return
        if pending:
            return
        before = sites.before(machine.me, session.membership.certificate)
        budget.raise_to(before)
        if self._judged is None or self._judged[0] != budget.steps:
            self._judged = (budget.steps, budget.allows)
        if not self._judged[1]:
            signature = session.actions.sign(spent_payload(session.run, me))
            session.membership.announce(now, spent=signature)
            self.over = (
                f"this site has spent epsilon {budget.epsilon:.3g}, and one more round would pass "
                f"{budget.terms.stop_at_epsilon:g}"
            )
            if before:  # of what it was asked for, nobody knows what that life had handed over
                self.over += (
                    f"; {before} of its {budget.steps} contributions are all that it may have made "
                    "before the run let it in again"
                )
        elif sites.over:
            self.over = sites.over

    @property
    def may_give(self) -> bool:
        """Whether a vector may be handed over for the open entry. With noise that is one an entry,
        over all attempts: so the log bounds what a site has given, also where its disk is lost
        (`site_ledger`). An entry without contributors opens the next."""
        budget, machine = self.budget, self.session.machine
        return budget is None or machine is None or budget.last != machine.round

    def wait_for_entry(self) -> None:
        """What was given for the open entry came to nothing: ask for one that ends it."""
        machine = self.session.machine
        if machine is not None and not machine.unsettled:
            machine.set_unsettled(self.session.clock(), True)
