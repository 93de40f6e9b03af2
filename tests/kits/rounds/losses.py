"""What else real members meet: loss that never ends, homes that come back from a backup, disks that
fail or are full at any call.

Each kind is drawn from a stream of its own, so that a seed without it is played as it always was.

* "loss": 20 to 30 % of all messages are lost from the first moment to the last, also while rounds
  must go on at the end; some are doubled or late. Half as many where the model is in fragments,
  which wait for each other: such seeds would cost as much as ten others.
* "backup": a copy is made of a member's disks; some time later its process is killed, and the copy
  is what the next one finds. As of a journal that is lost, a majority must hold without it all that
  was decided; and others must be able to tell, from their logs or since they heard it, that the
  member has said more than the copy knows (docs/internals/protocol/liveness.md, the second
assumption). * "disk": calls that change something on a member's disk fail with ENOSPC or EIO, until
  the faults are healed.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from atoll.collectives.group import Member, is_quorum
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Said
from atoll.collectives.simulation.network import Weather

from .injection import FaultKind
from .member import Disk, SwarmView

if TYPE_CHECKING:
    from .storage import Backup

SHARE = 0.25  # of the seeds in which each of these kinds is drawn
LATEST = 0.9  # a backup comes back by this part of the time in which faults strike
AGAIN_S = 0.2  # where it may not come back at its time, it may soon after
AWAY_S = (0.0, 0.05, 0.5, 2.0)  # so long after the kill the process begins on the copy
# times the patience where loss never ends: fragments are at different rounds, and the slowest is
# waited for
SLOWER = 4
LOSSY_ROUNDS = 4  # are asked for then
FAIL_EVERY = (60, 200, 1000)  # calls between two failures of a disk, in the mean


class SeedLosses:
    """Which of these a seed has."""

    def __init__(self, swarm: SwarmView) -> None:
        self.swarm = swarm
        self.rng = swarm.world.stream("losses")
        self.weather: Weather | None = None
        self.backups = 0
        self.fail_every = 0
        self.restored: set[Member] = set()  # lives that forgot what they had voted since the copy

    def plan(self, share: float, kinds: Sequence[FaultKind]) -> None:
        """Draw them."""
        rng = self.rng
        lossy, copied, failing = (rng.random() < share for _ in range(3))
        if lossy and "loss" in kinds:
            loss = rng.uniform(0.2, 0.3) / (1 if self.swarm.settings.fragments == 1 else 2)
            self.weather = Weather(loss, rng.choice((0.0, 0.1)), rng.choice((0.0, 0.2)), 0.05)
        if copied and "backup" in kinds:
            self.backups = rng.choice((1, 1, 2, 3))
        if failing and "disk" in kinds:
            self.fail_every = rng.choice(FAIL_EVERY)

    def start(self) -> None:
        """Schedule them."""
        swarm, plan = self.swarm, self.swarm.faults.plan
        if self.weather is not None:
            swarm.count("seeds with loss that never ends")
            swarm.network.always = self.weather
        span = plan.heal_s - plan.start_s
        for _ in range(self.backups):
            made, back = sorted(self.rng.uniform(0.0, LATEST) for _ in range(2))
            peer = self.rng.choice(swarm.names)
            swarm.world.at(plan.start_s + made * span, partial(self._copy, peer, back * span))
        if self.fail_every:
            for member in swarm.members.values():
                for disk in member.disks:
                    self._fail_later(disk)
            swarm.world.at(plan.heal_s, self._mend)

    # ---- disks
    def _fail_later(self, disk: Disk) -> None:
        medium = disk.storage.medium
        at = medium.calls
        while at < medium.calls + 20 * self.fail_every:
            at += 1 + int(self.rng.expovariate(1 / self.fail_every))
            medium.fail[at] = self.rng.choice((errno.ENOSPC, errno.EIO))

    def _mend(self) -> None:
        for member in self.swarm.members.values():
            for disk in member.disks:
                medium = disk.storage.medium
                medium.fail.clear()
                self.swarm.count("disk refused a call", medium.failed)

    # ---- backups
    def _copy(self, peer: PeerId, back_s: float) -> None:
        swarm = self.swarm
        member = swarm.members[peer]
        copies = [disk.storage.backup() for disk in member.disks]
        if any(copy is None for copy in copies):
            return
        whole = [copy for copy in copies if copy is not None]
        swarm.world.at(swarm.faults.plan.start_s + back_s, partial(self._bring_back, peer, whole))

    def _bring_back(self, peer: PeerId, copies: Sequence[Backup]) -> None:
        swarm, member = self.swarm, self.swarm.members[peer]
        if swarm.faults.healed or member.buried or swarm.left or swarm.removal.planned:
            return swarm.count("backup not played")
        if (
            member.process is None
            or not swarm.expendable(peer)
            or not all(map(self.assumed, member.disks, copies))
        ):
            swarm.world.after(AGAIN_S, partial(self._bring_back, peer, copies))
            return None
        swarm.count("backup restored")
        swarm.world.note(f"backup {peer}".encode())
        swarm.kill(member)
        self.restored.update(disk.me for disk in member.disks)
        for disk, copy in zip(member.disks, copies, strict=True):
            disk.restore(copy)
        swarm.world.after(self.rng.choice(AWAY_S), partial(swarm.restart, peer))
        return None

    def assumed(self, disk: Disk, copy: Backup) -> bool:
        """Whether others can tell the copy from the life that went on: in no round since the copy
        are those a quorum together with it who still vote there and can tell nothing that it said
        since.
        """
        me, journal = Member(disk.peer, copy.incarnation), disk.storage.journal()
        log, left = disk.checker.entries, Said(copy.incarnation, copy.entries, copy.promised)
        if copy.incarnation != journal.incarnation and not any(
            disk.peer == other.peer and copy.incarnation < other.incarnation
            for certified in log[copy.entries :]
            for other in certified.entry.next_config
        ):
            # the life after it was let in nowhere yet: a copy as new as what was lost is no old one
            return False
        last = len(log)  # a round in which nobody has been yet
        if copy.incarnation == journal.incarnation:
            last = len(journal.entries) if journal.promised < 0 else len(journal.entries) + 1
            if left >= Said(copy.incarnation, len(journal.entries), journal.promised):
                return True
        ignorant = [
            other
            for other in disk.watch.disks
            if other is not disk
            and not other.member.buried
            and not ((said := other.heard(disk.peer)) is not None and said > left)
        ]
        for round_ in range(copy.entries, max(last, copy.entries + 1)):
            config = log[round_ - 1].entry.next_config
            with_it = {other.me for other in ignorant if len(other.log) <= round_} | {me}
            if me in config and is_quorum(config, with_it, disk.swarm.organiser):
                return False
        return True
