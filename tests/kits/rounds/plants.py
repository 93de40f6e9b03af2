"""Known bugs, planted in the harness to see that the checker finds them. Production code has no
switch for any of them.

Each plant overrides what it breaks, for the time of one run. scripts/simulate_rounds.py --plant
NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

import msgspec
from blake3 import blake3
from torch import Tensor

from atoll.collectives import messages as m
from atoll.collectives.exchange import Exchange
from atoll.collectives.group import Certified, Entry, Member, Plan, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import convener as convener_module
from atoll.collectives.round import machine as machine_module
from atoll.collectives.round import vote_payload
from atoll.node.session.barrier import Barrier

from .loss_plants import LOSS_PLANTS
from .lying_plants import LYING_PLANTS
from .plant import Life, Plant
from .seal_plants import SEAL_PLANTS
from .storage import SimStorage


class VoteNotPersisted(Plant):
    """Promise and vote are gone after a crash."""

    moments = 1.0

    def crashed(self, storage: SimStorage) -> None:
        """Forget them."""
        journal = storage.journal()
        journal.promised, journal.accepted = -1, None


class JournalNotForced(Plant):
    """The sync of the journal does nothing: what was voted is gone with the power."""

    power, unforced = 1.0, "entries"


class MetaNotForced(Plant):
    """The sync of what tells lives apart does nothing."""

    power, unforced = 1.0, "meta.json"


class CheckpointNotForced(Plant):
    """The sync of a checkpoint does nothing, and it is renamed: it may be empty after a power
    cut.
    """

    power, unforced = 1.0, "safetensors"


class FolderNotForced(Plant):
    """The sync of a folder does nothing: files whose bytes are on the medium have no names
    there.
    """

    power, unforced = 1.0, "folder"


class _NoBarrier(Barrier):
    def hold(self, act: Callable[[float], None]) -> bool:
        """Nothing waits."""
        super().hold(lambda _: None)
        for storage in self._storages:
            cast(SimStorage, storage).journal().note()
        return False


class ToldBeforeForced(Plant):
    """Votes are sent before they are on the medium."""

    moments, power, barrier = 1.0, 1.0, _NoBarrier


class _IgnoresAccepted(convener_module.Convener):
    def on_promise(self, now: float, who: Member, promise: m.Promise) -> None:
        if self.phase is convener_module.Phase.PREPARE:
            # nor does it take up what an earlier plan brought: that would be the same value again
            self.view.open.reduced = None
        super().on_promise(now, who, m.Promise(promise.ballot, None, promise.ready))


class AcceptedValueIgnored(Plant):
    """A convener proposes its own value although a promise names one accepted before."""

    convener = _IgnoresAccepted


class _OwnerDecides(Exchange):
    def report(self, plan_id: bytes) -> None:
        """Reduce over what is here, without those that have not come."""
        state = self._plans.get(plan_id)
        for job in (
            dict.fromkeys(route.job for route in state.routes if route.job)
            if state is not None
            else ()
        ):
            assert state is not None
            waiting = [chunk for chunk in state.waiting if state.job(chunk) is job]
            kept = [
                i
                for i, (peer, _, held) in enumerate(job.sources)
                if peer == self.me or all(chunk in held for chunk in waiting)
            ]
            if waiting and 0 < len(kept) < len(job.sources) and state.reducer.form == "streaming":
                job.sources = [job.sources[i] for i in kept]
                job.factors = state.reducer.factors([job.weights[i] for i in kept])
                state.waiting.update(dict.fromkeys(waiting, 0))
                self._start(state)
        super().report(plan_id)


class ContributorsPerOwner(Plant):
    """The owner of a part leaves out whoever is late, by itself."""

    exchange = _OwnerDecides


class _VotesBlind(machine_module.RoundMachine):
    def holds(self, now: float, entry: Entry, holders: Sequence[PeerId]) -> bool:
        """The state is enough."""
        return self.root == entry.base_state


class VoteWithoutBytes(Plant):
    """A member votes before it holds the result."""

    machine = _VotesBlind


class _LiveConvener(machine_module.RoundMachine):
    def convener_of(self, ballot: int) -> Member:
        """The first in order that is not suspected *here*."""
        owners = [
            super(_LiveConvener, self).convener_of(ballot + step)
            for step in range(len(self.config))
        ]
        return next(
            (
                owner
                for owner in owners
                if owner == self.me or not self.actions.suspected(owner.peer)
            ),
            owners[0],
        )


class _TrustingLiveConvener(_LiveConvener):
    """Anybody may be the live convener in somebody's opinion, so whoever speaks as one is
    believed.
    """

    _speaker: Member | None = None

    def convener_of(self, ballot: int) -> Member:
        """The speaker while it speaks."""
        return self._speaker or super().convener_of(ballot)

    def _dispatch(self, now: float, who: Member, body: m.Body) -> None:
        self._speaker = who if isinstance(body, m.Accept | m.PlanMessage | m.Prepare) else None
        try:
            super()._dispatch(now, who, body)
        finally:
            self._speaker = None


class ConvenerByLiveness(Plant):
    """A ballot belongs to the first member that seems alive, so two members may own it."""

    machine = _TrustingLiveConvener


class ContributionWithoutCid(Plant):
    """Contributions are named by peer and count, so a restarted process uses a name again for other
    content.
    """

    def cid(self, rng: Random, script: Life) -> bytes:
        """The same names in every life."""
        return blake3(f"{script.peer}/{script.rounds}".encode()).digest(16)


class _AnyHalf(machine_module.RoundMachine):
    def quorum(self, voters: list[Member]) -> bool:  # type: ignore[override]
        """Half of the configuration decides, whoever is in it."""
        return 2 * len(set(voters) & set(self.config)) >= len(self.config)


class AnyHalfDecides(Plant):
    """Exactly half of the members decide, with or without the organiser."""

    shattered = 1.0
    machine = _AnyHalf


class _EarlyApply(convener_module.Convener):
    def _propose(self, now: float, entry: Entry) -> None:
        super()._propose(now, entry)
        machine = self.view
        if self.entry is entry and machine.open.decided is None:
            payload = vote_payload(*machine.slot, self.ballot, entry.hash())
            machine.open.decided = Certified(
                entry, (Vote(machine.me, self.ballot, machine.actions.sign(payload)),)
            )
            machine._try_apply(now)


class ApplyBeforeMajority(Plant):
    """The convener applies what it proposes without waiting for votes."""

    convener = _EarlyApply


class _RepeatIsProgress(machine_module.RoundMachine):
    def _on_plan(self, now: float, who: Member, plan: Plan) -> None:
        super()._on_plan(now, who, plan)
        if self.open.plan == plan:
            self.progress(now)
            self.convening.bulk_progress(now)
            self.convening.due_at = float("inf")  # its deadline never comes either


class RepeatedPlanAsProgress(Plant):
    """Hearing the same plan again counts as progress, so a hopeless ballot lives for ever."""

    machine = _RepeatIsProgress


class BufferReused(Plant):
    """A script that has waited long enough writes its next contribution into the buffer of one that
    is still undecided.
    """

    def late(self, vector: Tensor) -> None:
        """Write over it."""
        vector.add_(1.0)


class _SilentSnapshot(machine_module.RoundMachine):
    def adopt_snapshot(self, now: float, skipped: Sequence[Certified], root: bytes) -> None:
        """The state without the entries it skips: nobody asks whether one's own contribution is in
        them.
        """
        cid = self.contribution[0] if self.contribution else None
        blind = [
            Certified(_without(certified.entry, cid), certified.votes) for certified in skipped
        ]
        before = len(self.journal.entries)
        journal = cast(Any, self.journal)
        append, journal.append = (
            journal.append,
            lambda certified: append(skipped[len(self.journal.entries) - before]),
        )
        try:
            super().adopt_snapshot(now, blind, root)
        finally:
            del journal.append


def _without(entry: Entry, cid: bytes | None) -> Entry:
    return msgspec.structs.replace(
        entry, contributors=tuple(c for c in entry.contributors if c.cid != cid)
    )


class SnapshotWithoutEntries(Plant):
    """A member that takes a snapshot does not look whether the entries it skips counted its
    contribution.
    """

    machine = _SilentSnapshot


PLANTS: dict[str, type[Plant]] = {
    "vote-not-persisted": VoteNotPersisted,
    "journal-not-forced": JournalNotForced,
    "meta-not-forced": MetaNotForced,
    "checkpoint-not-forced": CheckpointNotForced,
    "folder-not-forced": FolderNotForced,
    "told-before-forced": ToldBeforeForced,
    "accepted-ignored": AcceptedValueIgnored,
    "owner-decides": ContributorsPerOwner,
    "vote-without-bytes": VoteWithoutBytes,
    "live-convener": ConvenerByLiveness,
    "no-cid": ContributionWithoutCid,
    "early-apply": ApplyBeforeMajority,
    "repeat-is-progress": RepeatedPlanAsProgress,
    "buffer-reused": BufferReused,
    "snapshot-without-entries": SnapshotWithoutEntries,
    "any-half-decides": AnyHalfDecides,
    **LOSS_PLANTS,
    **SEAL_PLANTS,
    **LYING_PLANTS,
}
