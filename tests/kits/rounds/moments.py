"""Faults that aim at the one moment at which a bug of what is kept can show; at random times they
hardly ever meet it.

* *A lapse*: a machine loses power just after one of its messages has left. What that message told
  must be on the medium.
* *A usurpation*: a convener is cut off with its proposal, together with too few others. The rest go
  on to a later ballot. One of them promises that ballot; at this moment its process is killed, or
  its machine loses power, or an old copy of its home takes the place of its disk, and the next
  process hears the cut-off convener alone. If it votes for the proposal, which its promise forbids,
  the convener decides, tells nobody and is cut off again; the rest, who count on the promise,
  decide otherwise.

Drawn from a stream of its own: a seed without them is played as it always was.
`deaths.DyingHolders` has the third kind, of members that die for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from atoll.collectives.group import Config, is_quorum
from atoll.collectives.identifiers import PeerId
from atoll.collectives.simulation.network import Weather

from .member import SimMember, SwarmView
from .storage import Backup

ON_ITS_WAY_S = 0.006  # a message has arrived so long after it was sent
ARMED_S = 1.5  # the proposal comes so soon after its plan, or another one is waited for
ALONE_S = 4.0  # the others come to a later ballot so soon
HEARD_S = 3.0  # so long the next process hears the cut-off convener, unless it votes before
AWAY_S = (0.02, 0.1, 0.3)  # so long after its end the next process begins
APART_S = (2.5, 4.0)  # so long the rest have for a decision of their own
LONGER_S = 5.0  # so much later the faults end: a usurpation takes several ballots
# share of the seeds with usurpations in which nothing else parts members, so that they come to
# their end
CALM = 0.7
WAYS = (
    "crash",
    "power",
    "backup",
    "backup",
)  # to end; not always is there a copy that may be restored
PLANS = (2, 8, 20)  # messages of plans before one begins, at most
COPY_EVERY_S = 0.5  # copies of all disks are made so often
COPIES = 6  # of each member, the newest, each of another round
LAPSES = ("promise", "promise", "accepted", "ready", "catch")  # what has just been told


@dataclass(slots=True)
class Lapse:
    """After the ``left``-th message of a kind from now on, ``delay_s`` later, its sender's machine
    loses power.
    """

    kind: str
    left: int
    delay_s: float
    away_s: float


class UsurpationStage(Enum):
    """How far a usurpation has come."""

    IDLE = "a plan is waited for"
    ARMED = "the proposal is waited for; others do not get all results"
    APART = "the convener is cut off; a promise of the others is waited for"
    FALLING = "who promised is about to end, or has not begun again"
    BACK = "its next process hears the convener"
    TOLD = "it has voted; nothing else passes"
    OVER = "the convener is cut off again"


class Moments:
    """Which of these a seed has, and what becomes of them."""

    def __init__(self, swarm: SwarmView) -> None:
        self.swarm = swarm
        self.rng = swarm.world.stream("moments")
        self.lapses: list[Lapse] = []
        self.usurpations = 0
        self.stage = UsurpationStage.IDLE
        self._plans = 0  # messages until one begins
        self._began = 0  # how many have begun: a timer of an earlier one does nothing
        self._round = 0
        self._convener = PeerId("")
        self._few = frozenset[PeerId]()  # the convener, and who is cut off with it
        self._fallen = PeerId("")
        self._copies: dict[PeerId, list[list[Backup]]] = {}

    @property
    def planned(self) -> bool:
        """Whether messages are to be looked at."""
        return bool(self.lapses) or self.usurpations > 0

    def plan(self, share: float) -> None:
        """Draw them, in ``share`` of the seeds."""
        rng = self.rng
        if rng.random() >= share:
            return
        for _ in range(rng.choice((1, 2, 4))):
            kind = rng.choice(LAPSES)
            most = 8 if kind == "promise" else rng.choice((10, 40, 150))
            delay_s = rng.choice((0.0, 0.0002, 0.002))
            self.lapses.append(Lapse(kind, rng.randint(1, most), delay_s, rng.choice(AWAY_S)))
        if self.swarm.settings.fragments == 1:
            self.usurpations = rng.choice((1, 2, 3))
            self._plans = rng.randint(1, rng.choice(PLANS))
            plan = self.swarm.faults.plan
            plan.heal_s += LONGER_S
            if rng.random() < CALM:
                plan.weather, plan.traps = Weather(), []
                plan.faults = [fault for fault in plan.faults if fault.kind in ("crash", "freeze")]

    def start(self) -> None:
        """Schedule what is not told by messages."""
        if self.usurpations:
            self.swarm.world.at(self.swarm.faults.plan.start_s, self._copy)

    def heard(self, kind: str, round_: int, sender: PeerId, receiver: PeerId) -> bool:
        """A message, or a record of the data plane, leaves. Whether it is lost."""
        if self.swarm.faults.healed or self.swarm.world.now < self.swarm.faults.plan.start_s:
            return False
        for lapse in self.lapses:
            if lapse.kind == kind and lapse.left > 0:
                lapse.left -= 1
                if lapse.left == 0:
                    self.swarm.world.after(lapse.delay_s, partial(self._lapse, sender, lapse))
        return self.usurpations > 0 and self._usurped(kind, round_, sender, receiver)

    # ---- lapses
    def _lapse(self, peer: PeerId, lapse: Lapse) -> None:
        swarm, member = self.swarm, self.swarm.members[peer]
        if member.process is None or swarm.faults.healed:
            return
        swarm.count(f"power lost after {lapse.kind}")
        swarm.kill(member, power=True)
        swarm.world.after(lapse.away_s, partial(swarm.restart, peer))

    # ---- usurpations
    def _usurped(self, kind: str, round_: int, sender: PeerId, receiver: PeerId) -> bool:
        few = self._few
        match self.stage:
            case UsurpationStage.IDLE if kind == "plan":
                self._plans -= 1
                if self._plans <= 0:
                    self._arm(round_, sender)
            case UsurpationStage.ARMED if kind == "result" and sender == self._convener:
                return receiver not in few
            case UsurpationStage.ARMED if kind == "accept" and sender == self._convener:
                self.stage = UsurpationStage.APART
                self._part(few)
                self._later(ALONE_S, lambda: self._idle(UsurpationStage.APART))
            case UsurpationStage.APART if kind == "promise" and not {sender, receiver} & few:
                self.stage, self._fallen = UsurpationStage.FALLING, sender
                self._later(ON_ITS_WAY_S, self._fall)
            case UsurpationStage.BACK if kind == "accepted" and round_ == self._round:
                if (sender, receiver) == (self._fallen, self._convener):
                    self.stage = UsurpationStage.TOLD
                    self.swarm.count("usurpation: a vote for the earlier proposal")
                    self._later(ON_ITS_WAY_S, self._leave)
                return receiver != self._convener
            case UsurpationStage.TOLD:
                return (sender in few) != (receiver in few)
            case _:
                pass
        return False

    def _arm(self, round_: int, convener: PeerId) -> None:
        """Cut off the convener of a plan with so many others that one more makes them a quorum,
        while the rest with that one are a quorum, too.
        """
        config = self.swarm.watches[0].config
        self._plans = self.rng.randint(1, self.rng.choice(PLANS))
        few = self._chosen(config, convener)
        if few is not None:
            self._round, self._convener, self._few = round_, convener, few
            self.stage, self._began = UsurpationStage.ARMED, self._began + 1
            self._later(ARMED_S, lambda: self._idle(UsurpationStage.ARMED))

    def _chosen(self, config: Config, convener: PeerId) -> frozenset[PeerId] | None:
        organiser, peers = self.swarm.organiser, [member.peer for member in config]

        def decides(some: frozenset[PeerId]) -> bool:
            return is_quorum(config, {who for who in config if who.peer in some}, organiser)

        for _ in range(8 if convener in peers and len(peers) >= 3 else 0):
            others = [peer for peer in peers if peer != convener]
            chosen = self.rng.sample(others, self.rng.randint(0, len(peers) // 2 - 1))
            few = frozenset([convener, *chosen])
            rest = frozenset(peers) - few
            if not decides(few) and decides(rest) and all(decides(few | {one}) for one in rest):
                return few
        return None

    def _fall(self) -> None:
        """Who promised ends, and comes back among the few."""
        swarm, rng, member = self.swarm, self.rng, self.swarm.members[self._fallen]
        if member.process is None or swarm.left or swarm.removal.planned:
            return self._idle(UsurpationStage.FALLING)
        how, copies = rng.choice(WAYS), None
        if how == "backup":
            copies = self._old_copy(member)
        swarm.count(f"usurpation: {'crash' if how == 'backup' and copies is None else how}")
        swarm.kill(member, power=how == "power")
        for disk, copy in zip(member.disks, copies or (), strict=copies is not None):
            disk.restore(copy)
        self._part(self._few | {self._fallen})
        self.stage = UsurpationStage.BACK
        swarm.world.after(rng.choice(AWAY_S), partial(swarm.restart, self._fallen))
        return self._later(HEARD_S, lambda: self._leave(UsurpationStage.BACK))

    def _old_copy(self, member: SimMember) -> Sequence[Backup] | None:
        """A copy of its disks that the log tells from them, if it can be done without."""
        allowed = self.swarm.losses.assumed
        found = [
            copies
            for copies in self._copies.get(member.peer, ())
            if all(map(allowed, member.disks, copies))
        ]
        return self.rng.choice(found) if found and self.swarm.expendable(member.peer) else None

    def _leave(self, only: UsurpationStage | None = None) -> None:
        """The few are cut off, without who was among them for a while."""
        if only in (None, self.stage):
            self.stage = UsurpationStage.OVER
            self._part(self._few)
            self._later(self.rng.choice(APART_S), lambda: self._idle(UsurpationStage.OVER))

    def _idle(self, only: UsurpationStage) -> None:
        """It is over; perhaps another one begins."""
        if self.stage is only:
            if only is not UsurpationStage.ARMED:
                self.usurpations -= 1
                self.swarm.network.partition(None)
            self.stage = UsurpationStage.IDLE

    def _part(self, few: frozenset[PeerId]) -> None:
        self.swarm.network.partition({peer: int(peer in few) for peer in self.swarm.peers()})

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        began = self._began

        def due() -> None:
            if began == self._began and not self.swarm.faults.healed:
                act()

        self.swarm.world.after(delay_s, due)

    # ---- copies
    def _copy(self) -> None:
        swarm = self.swarm
        if swarm.faults.healed or not self.usurpations:
            return
        for peer, member in swarm.members.items():
            copies = [disk.storage.backup() for disk in member.disks]
            whole = [copy for copy in copies if copy is not None]
            known = self._copies.setdefault(peer, [])
            if len(whole) == len(copies) and whole[0].entries not in {
                each[0].entries for each in known
            }:
                self._copies[peer] = [*known, whole][-COPIES:]
        swarm.world.after(COPY_EVERY_S, self._copy)
