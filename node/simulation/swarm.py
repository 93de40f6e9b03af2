"""One seed, one run: members, world, network, faults, checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from ...collectives import messages as m
from ...collectives.exchange import header as record_header
from ...collectives.group import Config, Entry, Member, TopologyKind
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import make_layout
from ...collectives.round import Timing
from ...collectives.simulation import Faults, Network, World, quiet_plan, random_plan
from ...collectives.simulation.faults import ALL_FAULTS, FaultKind, shatter_plan
from ...collectives.swarm import OuterSettings, RunSettings
from ..session.events import (
    BranchBegun,
    BranchEnded,
    ContributionRefused,
    EarlierSettled,
    PeerMisbehaved,
    RoundCommitted,
    StateDiverged,
    StateReady,
)
from .checker import Checker, Violation
from .member import SimMember
from .plant import Plant
from .process import Place
from .removal import Removal

RECERTIFIED = 0.15  # share of the seeds in which a quorum is lost for ever, and the organiser recertifies
BRANCHED = 0.4  # share of the seeds in which members without a quorum go on in branches
RECORD_KINDS = {
    record_header.PART: "part",
    record_header.PARTIAL: "part",
    record_header.RESULT: "result",
    record_header.BLOB: "blob",
}
TIMING = Timing(pull_s=0.1, heartbeat_s=0.25, keep_rounds=4)


@dataclass(frozen=True, slots=True)
class Options:
    """What a seed is run with. ``rounds``: entries that must be decided; ``patience_s``: how long after healing, virtual; ``plan``: the
    topology of its plans, by the seed where it is None."""

    peers: tuple[int, int] = (5, 9)
    rounds: int = 10
    faults: tuple[FaultKind, ...] = ALL_FAULTS
    horizon_s: float = 8.0
    patience_s: float = 90.0
    plan: TopologyKind | None = None


@dataclass(slots=True)
class Verdict:
    """What became of a seed. ``problem`` is "" when all predicates held; ``unfinished`` when only liveness failed."""

    seed: int
    problem: str
    unfinished: bool
    virtual_s: float
    rounds: int
    trace: str
    struck: dict[str, int] = field(default_factory=dict[str, int])
    stats: dict[str, int] = field(default_factory=dict[str, int])


class SimSwarm:
    """All of one run. Implements `Subject` for the faults."""

    def __init__(self, seed: int, options: Options | None = None, plant: Plant | None = None) -> None:
        branches = BRANCHED if plant is None else plant.branches
        self.options, self.plant = options or Options(), plant or Plant()
        self.world = World(seed)
        self.rng = self.world.stream("swarm")
        self.network = Network(self.world, latency_s=0.0005, jitter_s=0.004)
        self.train_s = self.rng.choice((0.1, 0.3, 0.6))
        count = self.rng.randint(*self.options.peers)
        self.names = [PeerId(f"p{index}") for index in range(count)]
        self.organiser = self.names[0]
        self.run_id = RunId(f"run{seed}")
        ways = self.world.stream("ways")
        self.settings = RunSettings(
            codec=self.rng.choice(("fp32", "int8")),
            outer=OuterSettings(lr=0.7, momentum=0.5),
            plan=self.options.plan or ways.choice(get_args(TopologyKind)),
        )
        self.layout = make_layout([("w", (self.rng.choice((1, 40, 90, 140)),))])
        self.initial = torch.randn(self.layout.numel, generator=torch.Generator().manual_seed(seed))
        self.place = Place(
            self.world, self.network, self.names, self.run_id, self.organiser, self.settings, TIMING,
            chunk_elements=16, exchange=self.plant.exchange, sites={peer: ways.choice(("", "a", "b")) for peer in self.names},
        )  # fmt: skip
        self.stats: dict[str, int] = {}
        self.checker = Checker(organiser=self.organiser, outer=self.settings.outer, holders=self._holders)
        self.members = {peer: SimMember(self, peer) for peer in self.names}
        self.wiped: set[Member] = set()
        self._votes: dict[bytes, set[Member]] = {}
        self._first_ballot: dict[bytes, int] = {}
        self._unchecked: dict[PeerId, tuple[int, Tensor]] = {}
        self.left = False
        kinds = self.options.faults
        plan = random_plan(self.world.stream("plan"), self.names, horizon_s=self.options.horizon_s, kinds=kinds) if kinds else quiet_plan()
        policy = self.world.stream("policy")
        if "shatter" in kinds and policy.random() < branches:
            self.place.branch_after_s = policy.choice((0.5, 0.8, 1.5))
            shatter_plan(policy, self.names, plan)
        self.removal = Removal(self, self.world.stream("removal"))
        self.removal.plan(RECERTIFIED if plant is None else plant.recertified, kinds)
        self.faults = Faults(self.world, self.network, self, plan, self.world.stream("faults"))
        self.network.tap = self._tap

    # ---- a run
    def run(self) -> Verdict:
        """Play the seed to its end."""
        problem, unfinished = "", False
        try:
            self._start()
            horizon = self.faults.plan.heal_s
            self.world.run(until=horizon)
            top = len(self.checker.entries)
            target = max(top + 2, self.options.rounds + 1)
            if not self.world.run(until=horizon + self.options.patience_s, stop=lambda: self._settled(target)):
                unfinished = True
                raise Violation("liveness", self._stuck(target))
            self._finish()
        except Violation as violation:
            problem = str(violation)
        finally:
            for member in self.members.values():
                if member.process is not None:
                    member.process.end()
        return Verdict(
            self.world.seed if isinstance(self.world.seed, int) else 0, problem, unfinished, self.world.now, len(self.checker.entries) - 1,
            self.world.trace(), self.faults.struck, self.stats,
        )  # fmt: skip

    def _start(self) -> None:
        self.members[self.organiser].boot()
        for peer in self.names[1:]:
            late = self.rng.random() < 0.2
            self.world.at(self.rng.random() * (0.6 * self.options.horizon_s if late else 0.05), self.members[peer].boot)
        self.faults.start()
        self.removal.start()

    def _settled(self, target: int) -> bool:
        if self.world.events % 16:
            return False
        top = self.checker.entries[-1].entry.next_config if self.checker.entries else ()
        for member in self.members.values():
            if member.leaving and member.me not in top:
                continue
            if len(member.log) < target or (member.me not in top and not member.leaving):
                return False
        return True

    def _stuck(self, target: int) -> str:
        where = ", ".join(
            f"{peer}:{len(member.log)}{'' if self.checker.entries and member.me in self.checker.entries[-1].entry.next_config else '!'}"
            for peer, member in self.members.items()
        )
        return (
            f"not all reached {target} entries within {self.options.patience_s:g} s after healing ({where}; ! = not in the configuration)"
        )

    def _finish(self) -> None:
        self.count("branches absorbed", self.checker.absorbed)
        self.count("entries recertified", self.checker.recertified)
        self.count("chosen values lost with all who held them", self.checker.revoked)
        self.count("rounds of branches", self.checker.branch_rounds)
        for peer, member in self.members.items():
            units, held = member.units, set(member.script.held if member.script is not None else ())
            if member.leaving:  # it may have left before its branch was over
                held.update(unit for staked in units.staked.values() for unit in staked if unit not in self.checker.used)
            destroyed = units.destroyed | units.lost
            self.checker.finished(peer, produced=units.produced, held=held, destroyed=destroyed, log=len(member.log))

    # ---- what members report
    def heard(self, member: SimMember, event: object) -> None:
        """An event of a session."""
        if isinstance(event, StateDiverged):
            raise Violation("agreement", f"{member.peer}'s state before entry {event.entry} is not the decided one")
        if isinstance(event, PeerMisbehaved):
            raise Violation("honest peers", f"{member.peer} accuses {event.peer}: {event.reason}")
        if isinstance(event, BranchBegun):
            self.count("branch begun")
        if isinstance(event, BranchEnded):
            self.count("branch adopted" if event.adopted else "branch left")
            self.count("contribution lost with a branch", len(event.lost))
        if isinstance(event, RoundCommitted):
            self.checker.called_committed(member.peer, event.entry, event.entry_hash)
            self.count("contribution counted" if event.counted else "contribution left out" if event.cid else "nothing contributed")
            if event.lost:
                self.count("eviction or leave")
        if isinstance(event, ContributionRefused):
            self.count("stale contribution refused")
        if isinstance(event, EarlierSettled):
            self.count(f"earlier contribution {'counted' if event.counted else 'lost'}")
        if isinstance(event, StateReady):
            self.count("state ready")

    def published(self, peer: PeerId, round_: int, anchor: Tensor) -> None:
        """An anchor became current; the entry may be recorded a moment later."""
        if round_ < len(self.members[peer].log):
            self.checker.published(peer, round_, anchor)
        else:
            self._unchecked[peer] = (round_, anchor.clone())

    def recorded(self, peer: PeerId) -> None:
        """An entry was recorded: check the anchor that was published before it."""
        waiting = self._unchecked.pop(peer, None)
        if waiting is not None:
            self.checker.published(peer, *waiting)

    def voted(self, who: Member, ballot: int, entry: Entry) -> None:
        """A vote was recorded."""
        self.count("votes")
        if ballot > 0:
            self.count("votes above ballot 0")
        first = self._first_ballot.setdefault(entry.hash(), ballot)
        if first != ballot:
            self.count("votes for an adopted value")
        self._votes.setdefault(entry.hash(), set()).add(who)

    def _holders(self, entry: Entry) -> set[Member]:
        digest = entry.hash()
        found = {who for who in self._votes.get(digest, ()) if who in self.wiped}  # it did hold it, and will never vote again
        for member in self.members.values():
            journal = member.storage.journal()
            accepted = journal.accepted is not None and journal.accepted[1].hash() == digest and len(journal.entries) == entry.round
            if accepted and member.storage.holds(entry):
                found.add(member.me)
        return found

    def count(self, what: str, by: int = 1) -> None:
        """Statistics."""
        self.stats[what] = self.stats.get(what, 0) + by

    # ---- the network
    def contacts(self, peer: PeerId) -> Sequence[PeerId]:
        """What discovery tells a starting process."""
        others = [name for name in self.names if name != peer]
        return [self.organiser] * (peer != self.organiser) + [self.rng.choice(others)] if others else []

    def _tap(self, sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        data = payload if channel == "control" else payload[0]
        self.world.note(b"%s>%s " % (sender.encode(), receiver.encode()) + data)
        if channel == "record":
            return self.event(RECORD_KINDS.get(data[1], ""), sender, receiver)
        if data[:1] == b"R" and self.faults.plan.traps:
            return self.event(str(type(m.decode(data[1:], sender).body).__struct_config__.tag), sender, receiver)
        return False

    def event(self, kind: str, sender: PeerId, receiver: PeerId | None) -> bool:
        """Something a trap may wait for; whether it is lost. Raises ProcessDied."""
        return bool(self.faults.plan.traps) and self.faults.event(kind, sender, receiver)

    # ---- Subject
    def peers(self) -> Sequence[PeerId]:
        """All peers."""
        return self.names

    def config(self) -> Config:
        """The acceptors of the open round."""
        return self.checker.entries[-1].entry.next_config if self.checker.entries else ()

    def crash(self, peer: PeerId, *, amnesia: bool = False) -> bool:
        """Kill a process; with amnesia its disk is lost too (once a run, and only where a quorum is left)."""
        member = self.members[peer]
        if member.process is None:
            return False
        if amnesia and (self.wiped or self.left or self.removal.planned or not self._expendable(peer)):
            return False
        self._kill(member)
        if amnesia:
            self.wipe(member)
        return True

    def wipe(self, member: SimMember) -> None:
        """The disk of a dead member is lost, and with it what it gave to branches."""
        self.wiped.add(member.me)
        member.storage.wipe()
        member.units.destroyed.update(unit for staked in member.units.staked.values() for unit in staked)

    def _expendable(self, peer: PeerId) -> bool:
        """Whether a majority of the configuration holds all that was decided without this peer's disk (the organiser may decide alone)."""
        config, top = self.config(), len(self.checker.entries)
        fresh = [member for member in config if member.peer != peer and len(self.members[member.peer].log) >= top]
        return 2 * len(fresh) > len(config) >= 3

    def died(self, peer: PeerId, back_after_s: float) -> None:
        """A trap killed the process inside a call."""
        self._kill(self.members[peer])
        self.world.after(back_after_s, lambda: self.restart(peer))

    def _kill(self, member: SimMember) -> None:
        member.die()
        self._unchecked.pop(member.peer, None)
        for other in self.members.values():
            if other is not member and other.process is not None and self.rng.random() < 0.5:
                process = other.process
                self.world.after(0.001, lambda p=process: p.link(member.peer, False))

    def restart(self, peer: PeerId) -> None:
        """Start a process again."""
        member = self.members[peer]
        if member.process is None and member.life >= 0:
            member.boot()
            for other in self.members.values():
                if other is not member and other.process is not None:
                    process = other.process
                    self.world.after(0.001, lambda p=process: p.link(peer, False))
                    self.world.after(0.002, lambda p=process: p.link(peer, True))

    def freeze(self, peer: PeerId) -> bool:
        """Stop a process."""
        member = self.members[peer]
        if member.process is None or member.process.frozen:
            return False
        member.process.freeze()
        return True

    def thaw(self, peer: PeerId) -> None:
        """Let it go on."""
        process = self.members[peer].process
        if process is not None:
            process.thaw()

    def leave(self, peer: PeerId) -> bool:
        """Leave in good order (once a run)."""
        member = self.members[peer]
        config = self.config()
        refused = member.process is None or member.process.frozen or self.left or self.wiped or peer == self.organiser
        if refused or member.me not in config or len(config) < 4:
            return False
        self.left = True
        member.leave()
        return True


def run_seed(seed: int, options: Options | None = None, plant: Plant | None = None) -> Verdict:
    """Play one seed. Deterministic: the same arguments give the same verdict and trace."""
    with (plant or Plant()).planted():
        return SimSwarm(seed, options, plant).run()
