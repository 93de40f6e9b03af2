"""Free-standing operations: each is a log of one entry over the configuration of the run, with
volatile votes.

The log's name (`naming.py`) says all that a member must know to take part as an acceptor without
having called: length, codec, reducer, a hash of the operation's id and one of the configuration. A
member takes part in one log of an operation only, so that two views of the configuration, or
callers who want different things under one id, do not give two results. Until it has called,
promised or voted it may change over to the log that more others have called. One that restarts
remembers (through `Storage.spend`) in which operations its earlier life promised or voted, and
never takes part in those again.

An operation of groups is one log for each group: its members alone vote, exchange and hold the
result. Where one of them is lost, the first of the group decides a tie, and a group that lost its
quorum is given up at once: its callers have other groups to go to.

A caller that is late, after the others have committed, gets their result, uncounted. One whose
deadline passes takes its contribution back where no plan names it yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ....collectives import exchange as x
from ....collectives import messages as m
from ....collectives.codecs.codec import Chunking
from ....collectives.codecs.encoded import EncodedVector
from ....collectives.errors import ConfigError, LocalProtocolError, NotEnoughPeersError
from ....collectives.group import Config, Entry, Plan
from ....collectives.identifiers import PeerId
from ....collectives.op_names import OWN_NAME
from ....collectives.script_swarm import Call
from ....collectives.series import number_of
from ....collectives.swarm import LimitSettings
from ...session import events as ev
from ...session.budgets import MADE
from ...session.other_logs import OtherLogs
from ...session.record import MAX_SPENT
from ...session.serving import Serving
from .naming import MASKED_SUMS, Spec, config_key, operation_key, parse, spec_of
from .operation import Operation

if TYPE_CHECKING:
    from ...session.session import Session

MAX_REFUSED = 64
SHARE = 3, 4  # of all operations at once: as many may be known here by one peer's messages alone
ACCOUNTS = 4  # so many members' bytes the operations of all others may take together
# how long one is remembered that nobody here has called or voted in, once nothing is heard of it
UNCALLED_S = 20.0
UNCALLED_KEPT = 32 << 20  # bytes of results that nobody here has called, kept for longer than that
LIFETIME_S = 120.0  # how long a decided or abandoned operation is remembered for laggards
# Results of decided operations that somebody may still lack; the newest is kept whatever its size.
KEPT_BYTES = 256 << 20
# entries whose configurations an operation may be called under: a caller may be that far behind
RECENT_CONFIGS = 4


class Operations(OtherLogs):
    """The operations of one run that this member takes part in, as caller or only as acceptor.
    Bounded in number, memory and life.
    """

    def __init__(
        self, session: Session, serving: Serving, limits: LimitSettings, *, masked: bool
    ) -> None:
        """``masked``: the run's contributions are: some operations are sums of its rounds."""
        self.session, self.serving = session, serving
        self.by_key: dict[str, Operation] = {}
        self.undone: dict[str, Operation] = {}  # those of them that are not decided
        self.limits, self._masked = limits, masked
        self._trimmed_at = 0.0
        self._spent: dict[str, None] | None = None  # oldest first
        # What our script called in other words than the others, oldest first.
        self._refused: dict[str, None] = {}

    @property
    def spent(self) -> dict[str, None]:
        """Operations that this member promised or voted in, in this life or an earlier one."""
        if self._spent is None:
            self._spent = dict.fromkeys(self.session.ports.storage.spent.operations()[-MAX_SPENT:])
        return self._spent

    def spend(self, key: str) -> None:
        """Before the first promise or vote."""
        self.session.ports.storage.spent.spend(key)
        self.spent[key] = None
        while len(self.spent) > MAX_SPENT:
            del self.spent[next(iter(self.spent))]

    @property
    def under_way(self) -> bool:
        return bool(self.undone) and any(operation.under_way for operation in self.undone.values())

    # ---- the script
    def prepare(self, now: float, call: Call, numel: int) -> Operation:
        """The operation that a call is about: its configuration and the vector's shape are fixed
        from now on.

        Raises NotEnoughPeersError while this peer is not a member, ConfigError, and
        LocalProtocolError when it was called already, otherwise by other members, or when too many
        are under way.
        """
        main = self.session.machine
        if main is None or not main.is_member:
            raise NotEnoughPeersError("this peer is not a member of the run yet", retryable=True)
        self._check_length(call, numel)
        op_id, spec, key = (
            call.op_id,
            spec_of(call, numel),
            operation_key(self.session.run, call.op_id),
        )
        known, before = self.by_key.get(key), None
        if known is not None and known.spec != spec and not known.bound:
            self._forget(known)  # what others call under this id need not be what we call
            known, before = None, known
        if known is None and key not in self.spent:
            config = self._recent(call.under) if call.under else main.config
            if config is None:
                raise LocalProtocolError(
                    f"operation {op_id!r} is called under a configuration that is no longer known"
                )
            self._check_members(call, spec, config, key)
            known = self._make(now, spec, key, config, ours=True)
            if known is None:
                raise LocalProtocolError(
                    f"{self.limits.operations} operations are under way",
                    hint="wait() for some of them first",
                )
            if before is not None and known.strict:
                calls = {**before.others, **dict.fromkeys(before.callers, before.log)}
                known.others.update((who, log) for who, log in calls.items() if log != known.log)
        if known is None:
            raise LocalProtocolError(
                f"operation {op_id!r} was called already, or long ago without this peer",
                why=(
                    "This peer has voted in it, perhaps in an earlier life, and its "
                    "result is no longer kept."
                ),
                hint=OWN_NAME,
            )
        if (
            known.op_id is not None
            or known.machine.contribution is not None
            or known.served
            or (known.done and not known.results)
        ):
            raise LocalProtocolError(f"operation {op_id!r} was called already", hint=OWN_NAME)
        if known.spec != spec:
            raise LocalProtocolError(
                f"operation {op_id!r} is of {known.spec} at other members, of {spec} here"
            )
        return known

    def next_number(self, name: str, least: int) -> int:
        number = least
        for operation in self.by_key.values():
            found = number_of(operation.spec.tag, name)
            if found is not None and (operation.done or operation.callers):
                number = max(number, found + operation.done)
        while self._is_used(operation_key(self.session.run, f"{name}/{number}")):
            number += 1
        return number

    def _is_used(self, key: str) -> bool:
        """Whether an operation cannot be called by our script any more."""
        known = self.by_key.get(key)
        if known is None:
            return key in self.spent
        return known.done or known.op_id is not None or known.machine.contribution is not None

    def _check_members(self, call: Call, spec: Spec, config: Config, key: str) -> None:
        main, plan = self.session.machine, self.session.settings.plan
        assert main is not None
        count = len(spec.acceptors(key, config, main.me))
        if count > (most := spec.shape((), plan).most):
            raise ConfigError(
                f"operation {call.op_id!r} among {count:,} members: {spec.reducer!r} works in a "
                f"star, of {most} at most",
                key="op",
                why="Each member's share of it grows with their number.",
                hint="average() goes over groups; where the plan is a tree, sums and means work.",
            )

    def _check_length(self, call: Call, numel: int) -> None:
        most = self.limits.operation_elements
        if numel > most:
            raise ConfigError(
                (
                    f"operation {call.op_id!r} is of {numel} elements, this run's "
                    f"are of {most} at most"
                ),
                key="$.limits.operation_elements",
                hint=(
                    "Call it in pieces, or found the run with a larger [limits] operation_elements."
                ),
            )

    def start(
        self, now: float, call: Call, numel: int, vector: Tensor | EncodedVector, cid: bytes
    ) -> None:
        """Call an operation that `prepare` made, with ``vector`` of its shape, untouched until
        OperationDone or `abandon`.
        """
        operation = self.prepare(now, call, numel)
        self.session.budgets.called()
        if vector.numel() != operation.machine.shape.numel:
            raise LocalProtocolError(
                f"{vector.numel()} elements for a vector of {operation.machine.shape.numel}"
            )
        if operation.done:
            operation.op_id = call.op_id
            operation.serve(None)
        else:
            operation.pinned = bool(call.under)
            operation.call(now, call.op_id, cid, call.weight, vector)
            if operation.offered is not None:
                for peer in operation.different:  # which called before us and wait
                    self.session.actions.send(peer, operation.log, 1, operation.offered)
            self._give_up(now, operation)

    def abandon(self, now: float, op_id: str) -> str:
        """The caller no longer waits. The operation goes on without it; its promises and votes
        hold. Returns why it is open.
        """
        for operation in self.by_key.values():
            if operation.op_id == op_id and not operation.done:
                says = operation.standing()
                operation.withdraw(now)
                return says
        return ""

    def detach(self, now: float) -> None:
        """The script is gone: nobody needs to wait for a call of it."""
        for operation in self.by_key.values():
            if not operation.done and operation.machine.contribution is None:
                operation.machine.set_idle(now, True)

    def _give_up(self, now: float, operation: Operation) -> None:
        """Tell the caller of an operation that cannot be decided any more, since others want
        something else under its id.
        """
        if (
            operation.op_id is not None
            and (operation.spec.group or operation.machine.open.plan is None)
            and (operation.hopeless or (operation.strict and operation.different))
        ):
            op_id, says, differs = operation.op_id, operation.standing(), bool(operation.different)
            says = f"operation {op_id!r}: {says}" if differs else says
            operation.withdraw(now)
            operation.others.clear()  # those who call again are heard again
            self._refused[operation.key] = None
            while len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            self.session.tell(ev.OperationRefused(op_id, says, differs))

    def _refuse(self, now: float, cid: bytes) -> bool:
        """The own contribution cannot be sent (NaN, infinity)."""
        found = False
        for operation in self.by_key.values():
            if operation.machine.contribution and operation.machine.contribution[0] == cid:
                operation.machine.drop_plan()  # it names a contribution that never comes
                operation.withdraw(now)
                found = True
        return found

    # ---- inputs
    def on_message(self, now: float, peer: PeerId, envelope: m.Envelope) -> None:
        """A control message of an operation."""
        body = envelope.body
        calls = isinstance(body, m.Ready) and body.cid is not None
        operation = self._of(now, envelope.log, peer if calls else None, peer)
        if operation is None:
            return
        operation.speaker = peer
        inside, tells = peer in operation.peers, calls or isinstance(body, m.PlanMessage)
        if inside and (tells or operation.gives(peer)):
            # What others say, or those who gave nothing, keeps nothing alive.
            operation.heard_at = now
        proposal = (
            body
            if isinstance(body, m.Accept)
            else body.accepted
            if isinstance(body, m.Promise)
            else None
        )
        if isinstance(body, m.Join) or (proposal is not None and not proposal.entry.contributors):
            return  # nobody is let into an operation, and it decides a result
        if inside and tells:
            operation.touched_at = now
            if calls:
                operation.callers.add(peer)
                operation.others.pop(peer, None)
        elif inside and isinstance(body, m.Accepted):
            operation.holders.add(peer)
            if operation.done:
                self.trim()
        if calls and isinstance(body, m.Ready) and not body.weight:
            return  # it only listens, and says so to those who have called something else
        operation.timeline.heard(now, peer, body)
        operation.machine.on_message(now, peer, envelope.incarnation, envelope.round, body)

    def _of(
        self, now: float, log: str, caller: PeerId | None = None, by: PeerId | None = None
    ) -> Operation | None:
        """The operation of a log; made when it is one that this member can take part in.
        ``caller``: who calls it just now; ``by``: who says something of it."""
        main, found = self.session.machine, parse(log)
        if main is None or found is None:
            return None
        spec, key, _ = found
        known = self.by_key.get(key)
        if known is not None and known.log != log and caller is not None and caller in known.peers:
            self._called_otherwise(now, known, caller, log)
            known = self.by_key.get(key)
        if known is not None:
            return known if known.log == log else None
        if key in self.spent:
            return None
        for config in self._configs():
            if main.me not in config:
                continue
            acceptors = spec.acceptors(key, config, main.me)
            if spec.log_name(key, config, acceptors) == log:
                if by is not None and (
                    all(member.peer != by for member in acceptors)  # it has no say in this one
                    or not self.session.budgets.request(now, by, MADE)
                ):
                    return None
                return self._make(now, spec, key, config, by=by)
        return None

    def _configs(self) -> list[Config]:
        """Recent configurations of the run, the newest first."""
        main = self.session.machine
        assert main is not None
        return [
            certified.entry.next_config
            for certified in reversed(main.journal.entries[-RECENT_CONFIGS:])
        ]

    def _recent(self, name: str) -> Config | None:
        """A recent configuration that this member is in, by name."""
        main = self.session.machine
        return next(
            (
                config
                for config in self._configs()
                if main and main.me in config and config_key(config) == name
            ),
            None,
        )

    def _follow(self, now: float, known: Operation) -> None:
        """Others called the operation under the configuration that is the newest by now: come
        along, unless this one is under way.
        """
        main = self.session.machine
        under_way = known.done or known.journal.spent or known.machine.open.plan is not None
        if (
            main is None
            or under_way
            or known.pinned
            or not main.is_member
            or known.whole == main.config
        ):
            return
        newest = known.spec.log_name(
            known.key, main.config, known.spec.acceptors(known.key, main.config, main.me)
        )
        if newest not in known.others.values():
            return
        op_id, given = known.op_id, known.given
        self._forget(known)
        fresh = self._make(now, known.spec, known.key, main.config)
        if fresh is None or op_id is None or given is None:
            return
        if given[2].numel() == fresh.machine.shape.numel:
            fresh.call(now, op_id, *given)
        else:  # a gather's slots are others
            self.session.tell(
                ev.OperationRefused(
                    op_id, "the members of the run have just changed: call it again"
                )
            )

    def _called_otherwise(self, now: float, known: Operation, caller: PeerId, log: str) -> None:
        """A member calls the operation with other words than those we know."""
        known.others[caller] = log
        known.callers.discard(caller)
        if known.offered is not None:  # it must not wait for us, nor we for it
            self.session.actions.send(caller, known.log, 1, known.offered)
        if known.alike(log):
            return self._follow(now, known)
        self._give_up(now, known)  # before anybody is left out of it, which may begin it
        known.leave_out(now, caller)
        self._give_up(now, known)
        ours = known.strict and known.offered is not None  # so others hear what our script called
        followers = sum(other == log for other in known.others.values())
        if not known.bound and not ours and followers > len(known.callers):
            self._forget(known)

    def _make(
        self,
        now: float,
        spec: Spec,
        key: str,
        config: Config,
        *,
        ours: bool = False,
        by: PeerId | None = None,
    ) -> Operation | None:
        """None when too many are under way, or it is too long. ``ours``: our script is about to
        call it; ``by``: who speaks of it.
        """
        me = self.session.machine.me if self.session.machine is not None else None
        if by is not None and (
            me is None
            or not self._bearable(spec, spec.acceptors(key, config, me))
            or not self._make_room(by)
        ):
            self.session.budgets.refuse(now, by, MADE)
            return None
        if len(self.by_key) >= self.limits.operations:
            if (least := self._least(ours)) is None:
                return None
            self._forget(least)
        operation = Operation(self.session, self, spec, key, config, now)
        operation.by = by
        self.by_key[operation.key] = self.undone[operation.key] = operation
        if self.session.script is None or operation.key in self._refused or self._watches(spec):
            # Nobody here who could call: the others need not wait.
            operation.machine.set_idle(now, True)
        return operation

    def _bearable(self, spec: Spec, acceptors: Config) -> bool:
        """Whether an operation that only others have called is one that this run may have."""
        if len(acceptors) > spec.shape((), self.session.settings.plan).most:
            return False
        return spec.shape(acceptors).numel <= self.limits.operation_elements

    def _make_room(self, by: PeerId) -> bool:
        """Where one peer's messages have made known as many operations as may be, its oldest gives
        its place, if nothing was promised in it.
        """
        most = self.limits.operations * SHARE[0] // SHARE[1]
        theirs = [
            operation
            for operation in self.by_key.values()
            if operation.by == by and not operation.called and not operation.done
        ]
        if len(theirs) < most:
            return True
        least = next((operation for operation in theirs if not operation.bound), None)
        if least is not None:
            self._forget(least)
        return least is not None

    def affordable(self, operation: Operation, nbytes: int) -> bool:
        """Whether an operation may take ``nbytes`` here: where the own script has called it, it
        may; else on the account of who spoke of it last.
        """
        peer = operation.speaker or operation.by
        if operation.called or peer is None:
            operation.charged = None
            return True
        before, operation.charged = operation.charged, None
        nbytes = max(nbytes, before[1]) if before is not None else nbytes
        charged = [each.charged for each in self.by_key.values() if each.charged is not None]
        theirs = sum(taken for who, taken in charged if who == peer)
        every = sum(taken for _, taken in charged)
        most = self.limits.member_bytes
        if theirs + nbytes > most or every + nbytes > ACCOUNTS * most:
            self.session.budgets.refuse(self.session.clock(), peer, "operation_bytes")
            return False
        operation.charged = peer, nbytes
        return True

    def _least(self, ours: bool) -> Operation | None:
        """The oldest that may give its place to another: decided; or only heard of; or, for a call
        of our script, one that it waits for no longer (what was promised there is spent)."""
        known = self.by_key.values()
        over = [operation for operation in known if operation.done] or [
            operation for operation in known if not operation.bound
        ]
        if not over and ours:
            over = [operation for operation in known if operation.op_id is None]
        return next(iter(over), None)

    def _watches(self, spec: Spec) -> bool:
        """Whether this is a masked sum for a round in which this member takes no part."""
        machine = self.session.machine
        return (
            self._masked
            and spec.reducer in MASKED_SUMS.values()
            and machine is not None
            and not machine.takes_part
        )

    def on_exchange(self, now: float, event: Any) -> bool:
        """Results, what is waited for, and contributions that cannot be sent; False when it is none
        of ours.
        """
        match event:
            case x.ResultComplete():
                return self._on_result(now, event)
            case x.ReductionReport():
                return self._on_report(now, event)
            case x.NonFinite():
                return self._refuse(now, event.cid)
            case _:
                return False

    def _on_result(self, now: float, event: x.ResultComplete) -> bool:
        operation = self._planned(event.plan_id)
        if operation is not None:
            operation.complete_at = now
            operation.timeline.reduced(now, event.since)
            operation.weights[event.digests] = event.weights
            if event.overflowed:
                operation.overflowed.add(event.digests)
            plan = operation.machine.open.plan
            assert plan is not None
            self._hold(now, operation, plan, event.digests, event.data)
        return operation is not None

    def _hold(
        self,
        now: float,
        operation: Operation,
        bound: Plan | Entry,
        digests: tuple[bytes, ...],
        data: memoryview,
    ) -> None:
        """The bytes are here: it may be voted on."""
        if not operation.done:
            operation.results[digests] = data
            operation.machine.on_result(now, bound, digests)

    def _on_report(self, now: float, event: x.ReductionReport) -> bool:
        operation = self._planned(event.plan_id)
        if operation is not None:
            operation.machine.on_report(
                now, event.plan_id, event.missing, event.lacking, event.resumed, event.disputed
            )
        return operation is not None

    def _planned(self, plan_id: bytes) -> Operation | None:
        for operation in reversed(
            self.by_key.values()
        ):  # it is one of the newest, and a plan's name is a hash
            plan = operation.machine.open.plan
            if plan is not None and plan.plan_id == plan_id:
                return operation
        return None

    def result_arrived(self, now: float, entry: Entry, data: memoryview) -> None:
        """Fetched result bytes."""
        operation = self._of(now, entry.log)
        if operation is not None and not operation.done:
            operation.complete_at = now
            chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements).results
            fetched = EncodedVector(chunking, data)
            if not all(
                chunking.codec(chunk).finite(fetched.wire(chunk))
                for chunk in range(chunking.chunks)
            ):
                operation.overflowed.add(entry.part_digests)
            self._hold(now, operation, entry, entry.part_digests, data)

    def find(self, name: bytes) -> tuple[Entry, memoryview] | None:
        """An operation's entry by hash, with its bytes."""
        for operation in self.by_key.values():
            entry = operation.entry or operation.machine.open.known.get(name)
            if (
                entry is not None
                and entry.hash() == name
                and entry.part_digests in operation.results
            ):
                return entry, operation.results[entry.part_digests]
        return None

    # ---- the end
    def over(self, operation: Operation) -> None:
        """It is decided, and its result delivered."""
        self.undone.pop(operation.key, None)

    def trim(self) -> None:
        """Let go of results that everybody has, and of the oldest beyond KEPT_BYTES."""
        kept = 0
        for operation in reversed(
            [
                operation
                for operation in self.by_key.values()
                if operation.done and operation.results
            ]
        ):
            everywhere = operation.served and operation.holders >= set(operation.peers)
            size = sum(len(data) for data in operation.results.values())
            old = (
                operation.op_id is None
                and self.session.clock() - operation.touched_at > UNCALLED_S
                and kept + size > UNCALLED_KEPT
            )
            if everywhere or old or (kept and kept + size > KEPT_BYTES):
                operation.drop_results()
                operation.charged = None
            else:
                kept += size

    def tick(self, now: float) -> None:
        """Repair loss; forget what is over."""
        if now - self._trimmed_at > UNCALLED_S / 2:
            self._trimmed_at = now
            self.trim()
        for operation in list(self.by_key.values()):
            if (
                (operation.done or operation.op_id is None)
                and now - operation.touched_at > LIFETIME_S
            ) or self._deserted(now, operation):
                self._forget(operation)
                continue
            if operation.done:
                continue
            if operation.others:
                self._follow(now, operation)
            operation = self.by_key[operation.key]
            if operation.under_way:
                operation.machine.tick(now)
                if operation.spec.group:
                    self._give_up(now, operation)

    def _deserted(self, now: float, operation: Operation) -> bool:
        """Whether nobody here has called it or voted in it, and nobody speaks of it any more."""
        return (
            operation.by is not None
            and not operation.called
            and not operation.done
            and operation.journal.accepted is None
            and now - operation.heard_at > UNCALLED_S
        )

    def drop_all(self) -> None:
        """Take part in nothing any more, in this life."""
        for operation in self.by_key.values():
            operation.end()
        self.by_key.clear()
        self.undone.clear()

    def _forget(self, operation: Operation) -> None:
        del self.by_key[operation.key]
        self.undone.pop(operation.key, None)
        operation.end()


def operations_of(session: Session) -> Operations:
    """Those of a session. Raises LocalProtocolError where it takes part in none."""
    found = session.operations
    if not isinstance(found, Operations):
        raise LocalProtocolError("this member takes part in no free-standing operations")
    return found
