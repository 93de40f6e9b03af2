"""Known bugs of branches and their adoption, planted to see that the checker finds them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.collectives import messages as m
from atoll.collectives.group import Contributor, Entry, Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import adopted_rounds, adopts, tip_entry
from atoll.collectives.round import machine as machine_module
from atoll.node.session import branch as branch_module
from atoll.node.session import branching as branching_module
from atoll.node.session import events as ev

from .plant import Plant


class BranchPlant(Plant):
    """A bug that shows only where members without a quorum go on in branches."""

    branches = 1.0


class _StaleBase(branching_module.Branching):
    def settled(self, entry: Entry) -> tuple[bytes | None, bool] | None:
        """The tip outlives its base: it is offered for the entry after the next one."""
        tip, machine = self.tip, self.session.machine
        state = self.state_of(tip.digest) if tip is not None else None
        told = super().settled(entry)
        if (
            tip is not None
            and state is not None
            and machine is not None
            and adopted_rounds(entry) == 0
        ):
            blank = msgspec.structs.replace(tip, base=entry.hash())
            moved = branch_module.measured(machine.log, machine.round, blank, machine.shape, state)
            self.record = msgspec.structs.replace(self.record, base=moved.base, tip=moved)
            self._keep_tip(tip_entry(machine.log, machine.round, moved, machine.shape), state)
        return told


class BranchOfAnOlderBase(BranchPlant):
    """A branch is adopted whose base is not the last certified entry."""

    branching = _StaleBase


class _LastEntryOnly(branch_module.Branch):
    def path_after(self, before: m.Tip | None, entry: Entry) -> tuple[Contributor, ...]:
        """Only those of the last round."""
        return entry.contributors


class PathForgotten(BranchPlant):
    """A branch names the contributions of its last round only."""

    branch = _LastEntryOnly


class _CallsCommitted(branching_module.Branching):
    def decided(self, entry: Entry, counted: bool) -> None:
        """A round of a branch is told as if it were certified."""
        peers = tuple(who.peer for who in entry.next_config)
        self.session.ports.emit(
            ev.RoundCommitted(
                self.session.completed,
                self.session.round + 1,
                (),
                peers,
                (),
                (),
                None,
                False,
                entry.hash(),
                0.0,
            )
        )
        super().decided(entry, counted)


class UncertifiedCalledCommitted(BranchPlant):
    """What a branch decides is called committed."""

    branching = _CallsCommitted


class _AnyHalf(machine_module.RoundMachine):
    def quorum(self, voters: list[Member]) -> bool:  # type: ignore[override]
        """Half of the configuration decides, whoever is in it."""
        return 2 * len(set(voters) & set(self.config)) >= len(self.config)


class AnyHalfDecides(BranchPlant):
    """Exactly half of the members decide, with or without the organiser."""

    machine = _AnyHalf


class _BlindAdoption(machine_module.RoundMachine):
    def holds(self, now: float, entry: Entry, holders: Sequence[PeerId]) -> bool:
        """The certified state is enough."""
        blind = adopts(entry, self.shape) and self.root == entry.base_state
        return blind or super().holds(now, entry, holders)


class AdoptionWithoutBytes(BranchPlant):
    """A member votes for the adoption of a branch whose state it does not hold."""

    machine = _BlindAdoption


BRANCH_PLANTS: dict[str, type[Plant]] = {
    "branch-of-older-base": BranchOfAnOlderBase,
    "branch-path-forgotten": PathForgotten,
    "uncertified-called-committed": UncertifiedCalledCommitted,
    "any-half-decides": AnyHalfDecides,
    "adoption-without-bytes": AdoptionWithoutBytes,
}
