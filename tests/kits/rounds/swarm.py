"""One seed, one run: members, world, network, faults, checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec
import torch
from msgspec import structs

from atoll.collectives.arrivals import ArrivalSettings, Fading, GraceWindow
from atoll.collectives.cutting import cut
from atoll.collectives.errors import StorageError
from atoll.collectives.exchange import header as record_header
from atoll.collectives.group import Member, TopologyKind, least_members
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.layout import make_layout
from atoll.collectives.messages import QuorumVotes, RoundCloses, decode
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import Timing
from atoll.collectives.simulation import Network, World
from atoll.collectives.swarm import RunSettings
from atoll.node.modes.byzantine import UNFOUNDED
from atoll.node.run.evidence import RELABELLED, check
from atoll.node.session.events import (
    ContributionRefused,
    EarlierSettled,
    Equivocated,
    PeerMisbehaved,
    Renewed,
    RoundCommitted,
    StateDiverged,
    StateReady,
)
from atoll.node.simulation.process import Place, verify_as

from .checker import Checker, Violation
from .deaths import Deaths
from .injection import (
    AIMED,
    ALL_FAULTS,
    LYING_MESSAGES,
    RELAY_MESSAGES,
    ROUND_MESSAGES,
    FaultInjector,
    FaultKind,
    quiet_plan,
    random_plan,
    shatter_plan,
)
from .liars import LIES, Lie
from .losses import LOSSY_ROUNDS, SHARE, SLOWER, SeedLosses
from .member import Disk, SimMember, Watch
from .moments import Moments
from .plant import Plant
from .removal import Removal
from .twins import Twins

CUTS = (1, 1, 1, 2, 3)  # in how many fragments the model is, in seeds whose swarm is not shattered
RECERTIFIED = (
    0.15  # share of the seeds in which a quorum is lost for ever, and the organiser recertifies
)
CHECKED = 0.5  # share of the seeds with two levels in which heads of sites are checked
THREE = 0.5  # share of the others of them that have three levels
# share of the seeds in which members die for good, of those where nothing else is lost for ever
DYING = 0.5
POWER = 0.4  # share of the seeds in which half of the deaths are power cuts
SYNCS_S = (0.0005, 0.002, 0.01, 0.03)  # what media take for a sync, in such seeds
ARRIVALS_S = 1.2  # that turns are longer in rounds that wait for few
SHATTERED = 0.4  # share of the seeds in which for long nobody sees a quorum, most likely
RECORD_KINDS = {
    record_header.PART: "part",
    record_header.PARTIAL: "part",
    record_header.ACCOUNT: "part",
    record_header.RESULT: "result",
    record_header.MEASURE: "measure",
    record_header.BLOB: "blob",
}
TIMING = Timing(pull_s=0.1, heartbeat_s=0.25, keep_rounds=4)


@dataclass(frozen=True, slots=True)
class Options:
    """What a seed is run with. ``rounds``: entries that must be decided; ``patience_s``: how long
    after healing, virtual; ``plan``: the topology of its plans, ``fragments``: into how many the
    model is cut, ``codec``: all by the seed where they are None; ``reducer``: what becomes of
    contributions; ``lying``: so many members tell ``lies``; ``losing``: the share of the seeds with each of the
    kinds of `losses`, and of faults that aim, where these are asked for. ``arrivals``: rounds wait
    for a quorum of contributions and a grace window, both by the seed. ``halved``: momenta are kept
    in bf16; ``warmup``: of the outer step. ``relayed_above``: of how many members on a configuration has relays, None: as in a
    node; half of the seeds with relays have one member that passes nothing on. ``sparse_above``, ``evict_s``: see `Timing`."""

    peers: tuple[int, int] = (5, 9)
    rounds: int = 10
    faults: tuple[FaultKind, ...] = ALL_FAULTS
    horizon_s: float = 8.0
    patience_s: float = 90.0
    plan: TopologyKind | None = None
    fragments: int | None = None
    codec: str | None = None
    reducer: str = "mean"
    lying: int = 0
    lies: tuple[Lie, ...] = LIES
    losing: float = SHARE
    arrivals: bool = False
    halved: bool = False
    warmup: int = 0
    relayed_above: int | None = None
    sparse_above: int = TIMING.sparse_above
    evict_s: float = 0.0


class _Body(msgspec.Struct, array_like=True):
    tag: str


class _EnvelopePeek(msgspec.Struct, array_like=True):
    """An envelope as far as traps look at it."""

    log: str
    round: int
    incarnation: int
    body: _Body


_head = msgspec.msgpack.Decoder(_EnvelopePeek)


@dataclass(slots=True)
class SeedResult:
    """What became of a seed. ``problem`` is "" when all predicates held; ``unfinished`` when only
    liveness failed.
    """

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

    def __init__(
        self, seed: int, options: Options | None = None, plant: Plant | None = None
    ) -> None:
        share = SHATTERED if plant is None else plant.shattered
        self.options, self.plant = options or Options(), plant or Plant()
        if self.plant.lying:
            self.options = replace(
                self.options, peers=(4, 6), lying=self.plant.lying, lies=self.plant.lies or LIES
            )
        self.world = World(seed)
        self.rng, self.knocks = self.world.stream("swarm"), self.world.stream("knocks")
        self.network = Network(self.world, latency_s=0.0005, jitter_s=0.004)
        self.train_s = self.rng.choice((0.1, 0.3, 0.6))
        if self.options.arrivals:
            # every turn is a round: with shorter ones there are more in the time in which a
            # newcomer asks once than members keep results of, and it is never let in
            self.train_s += ARRIVALS_S
        count = self.rng.randint(*self.options.peers)
        self.names = [PeerId(f"p{index}") for index in range(count)]
        kinds, policy = self.options.faults, self.world.stream("policy")
        shattered = (
            "shatter" in kinds
            and policy.random() < share
            and self.options.fragments in (None, 1)
            and not (self.options.arrivals or self.options.halved)
        )
        drawn = (
            self.world.stream("fragments").choice(CUTS)
            if kinds and plant is None and not shattered and not self.options.arrivals
            else 1
        )
        fragments = self.options.fragments or drawn
        self.organiser = self.names[0]
        self.run_id = RunId(f"run{seed}")
        ways = self.world.stream("ways")
        plain = self.rng.choice(("fp32", "int8"))
        coarse = self.world.stream("codecs").choice(
            (plain, plain, "stat2", "sparse64")
        )  # results travel in another codec
        self.settings = RunSettings(
            codec=self.options.codec
            or (plain if plant is not None or self.options.reducer != "mean" else coarse),
            exact=False,  # else all of so small a model would be fp32
            outer=OuterSettings(
                "nesterov",
                0.7,
                0.5,
                momentum_dtype="bf16" if self.options.halved else "fp32",
                warmup=self.options.warmup,
            ),
            reducer=self.options.reducer,
            plan=self.options.plan or self._drawn(ways),
            fragments=fragments,
            lying=self.options.lying,
            arrivals=self._arrivals() if self.options.arrivals else None,
        )
        length = self.rng.choice((1, 40, 90, 140))
        self.layout = make_layout(
            [("w" if fragments == 1 else f"w{number}", (length,)) for number in range(fragments)]
        )
        self.initial = torch.randn(self.layout.numel, generator=torch.Generator().manual_seed(seed))
        self.place = Place(
            self.world,
            self.network,
            self.names,
            self.run_id,
            self.organiser,
            self.settings,
            structs.replace(
                TIMING, sparse_above=self.options.sparse_above, evict_s=self.options.evict_s
            ),
            chunk_elements=16,
            exchange=self.plant.exchange,
            sites=self._sites(ways),
        )
        self.liars = frozenset(self.world.stream("liars").sample(self.names, self.options.lying))
        self.place.liars = self.liars
        self.selfish = frozenset[PeerId]()  # relays that pass nothing on
        self.stats: dict[str, int] = {}
        self.power = self.world.stream("power")
        self.powered = self.power.random() < (POWER if plant is None else plant.power)
        if self.powered:
            self.place.sync_s = self.power.choice(SYNCS_S)
        self.watches = [
            Watch(self, number, part) for number, part in enumerate(cut(self.layout, fragments))
        ]
        self.members = {peer: SimMember(self, peer) for peer in self.names}
        self.wiped: set[Member] = set()
        self.left = False
        messages, rng = (
            LYING_MESSAGES if self.options.lying else ROUND_MESSAGES,
            self.world.stream("plan"),
        )
        if self.options.relayed_above is not None:
            messages = (*messages, *RELAY_MESSAGES)
            selfish = self.world.stream("selfish")
            if selfish.random() < 0.5:
                self.selfish = frozenset({selfish.choice(self.names)})
        plan = (
            random_plan(
                rng, self.names, horizon_s=self.options.horizon_s, kinds=kinds, messages=messages
            )
            if kinds
            else quiet_plan()
        )
        if shattered:
            policy.randrange(3)  # not used: the plan of a seed stays what it once was
            shatter_plan(policy, self.names, plan)
        self.removal = Removal(self, self.world.stream("removal"))
        self.removal.plan(
            0.0 if self.options.lying else RECERTIFIED if plant is None else plant.recertified,
            kinds,
        )
        self.faults = FaultInjector(
            self.world, self.network, self, plan, self.world.stream("faults")
        )
        self.deaths = Deaths(self, self.world.stream("deaths"))
        if not (self.removal.planned or shattered):
            self.deaths.plan(DYING if plant is None else self.plant.dying, kinds)
        self.losses = SeedLosses(self)
        if not (shattered or self.options.lying):
            self.losses.plan(self.options.losing if plant is None else plant.losing, kinds)
        self.moments = Moments(self)
        asked = {kind: self.options.losing if kind in kinds else 0.0 for kind in AIMED}
        aimed = plant.moments if plant is not None else asked["moment"]
        if not (shattered or self.options.lying or self.removal.planned):
            self.moments.plan(aimed)
            self.deaths.plan_relay(aimed)
        self.twins = Twins(self)
        if not (shattered or self.options.lying or self.removal.planned):
            self.twins.plan(plant.twins if plant is not None else asked["twin"])
        self.network.tap = self._tap

    def _arrivals(self) -> ArrivalSettings:
        """For whom rounds wait."""
        rng = self.world.stream("arrivals")
        window = GraceWindow(rng.choice((0.0, 0.1, 0.5, 2.0)))
        return ArrivalSettings(
            rng.choice((1, 1, 2, 3)), fading=Fading(1.0, "constant"), window=window
        )

    @property
    def checker(self) -> Checker:
        """Of the first log."""
        return self.watches[0].checker

    # ---- a run
    def run(self) -> SeedResult:
        """Play the seed to its end."""
        problem, unfinished = "", False
        try:
            self._start()
            horizon = self.faults.plan.heal_s
            self.world.run(until=horizon)
            rounds, patience_s = self.options.rounds, self.options.patience_s
            if self.losses.weather is not None:  # its rounds are slow, and each is dear to play
                rounds, patience_s = min(rounds, LOSSY_ROUNDS), patience_s * SLOWER
            for watch in self.watches:
                watch.target = max(len(watch.checker.entries) + 2, rounds + 1)
            if not self.world.run(until=horizon + patience_s, stop=self._settled):
                unfinished = True
                raise Violation("liveness", self._stuck())
            if unknown := self.twins.unknown():
                raise Violation("twins", f"{', '.join(unknown)} know of no twins")
            if silent := self.deaths.silent():
                raise Violation("no silence", f"nobody hears why {', '.join(silent)} waits")
            self.count("logs halted for want of a quorum", len(self._halted()))
            for watch in self.watches:
                watch.finish()
        except Violation as violation:
            if self.twins.apart:
                unfinished = False
                self.count("twins that broke a promise before they met")
            else:
                problem = str(violation)
        finally:
            self.twins.end()
            for member in self.members.values():
                if member.process is not None:
                    member.process.end()
        seed, entries = (
            self.world.seed if isinstance(self.world.seed, int) else 0,
            [len(watch.checker.entries) for watch in self.watches],
        )
        return SeedResult(
            seed,
            problem,
            unfinished,
            self.world.now,
            min(entries) - 1,
            self.world.trace(),
            self.faults.struck,
            self.stats,
        )

    def _start(self) -> None:
        self.members[self.organiser].boot()
        for peer in self.names[1:]:
            late = self.rng.random() < 0.2
            self.world.at(
                self.rng.random() * (0.6 * self.options.horizon_s if late else 0.05),
                self.members[peer].boot,
            )
        self.faults.start()
        self.removal.start()
        self.deaths.start()
        self.losses.start()
        self.moments.start()
        self.twins.start()

    def _settled(self) -> bool:
        if self.world.events % 16 or (self.deaths.relay is not None and self.deaths.relay.running):
            return False
        if self.twins.unknown() and not self.twins.still:
            return False
        halted = self._halted()
        return all(watch.settled() or watch in halted for watch in self.watches)

    def _halted(self) -> list[Watch]:
        """Logs that do not go on, and need not: those who are left are no quorum."""
        died = self.deaths.still or self.twins.still
        return [
            watch
            for watch in self.watches
            if not watch.settled()
            and (died or self.removal.stops(watch))
            and not self.deaths.promised(watch)
        ]

    def _stuck(self) -> str:
        where = "; ".join(watch.where() for watch in self.watches)
        return (
            f"not all reached the entries in time after healing that they were to ({where}; ! = "
            "not in the configuration)"
        )

    def _drawn(self, ways: Random) -> TopologyKind:
        kind = ways.choice(("butterfly", "ring", "two-level"))
        if kind != "two-level":
            return kind
        if self.world.stream("checks").random() < CHECKED:
            return "checked"
        return "three-level" if self.world.stream("levels").random() < THREE else kind

    def _sites(self, ways: Random) -> dict[PeerId, str]:
        """Each member's place, with its host where that counts."""
        sites = {peer: ways.choice(("", "a", "b")) for peer in self.names}
        if self.settings.plan == "three-level":
            hosts = self.world.stream("hosts")
            drawn = {peer: hosts.choice(("", "/x", "/x", "/y")) for peer in self.names}
            sites = {peer: site and site + drawn[peer] for peer, site in sites.items()}
        return sites

    # ---- what members report
    def heard(self, disk: Disk, event: object) -> None:
        """An event of a session."""
        if isinstance(event, StateDiverged):
            raise Violation(
                "agreement",
                f"{disk.peer}'s state before entry {event.entry} is not the decided one",
            )
        if isinstance(event, Renewed) and not (
            disk.copied or self.twins.mute(disk.peer) or disk.peer in self.liars
        ):
            raise Violation("old copies", f"{disk.peer} takes its own home for an old copy")
        if isinstance(event, Renewed) and not self.twins.mute(disk.peer):
            # it says itself that its earlier lives never vote again
            disk.checker.retired.update(
                Member(disk.peer, life) for life in range(event.incarnation)
            )
        if isinstance(event, PeerMisbehaved | Equivocated):
            self._accused(disk.peer, event)
        if isinstance(event, PeerMisbehaved) and not self.liars & {event.peer, disk.peer}:
            raise Violation("honest peers", f"{disk.peer} accuses {event.peer}: {event.reason}")
        if isinstance(event, RoundCommitted):
            disk.checker.called_committed(disk.peer, event.entry, event.entry_hash)
            self.count(
                "contribution counted"
                if event.counted
                else "contribution left out"
                if event.cid
                else "nothing contributed"
            )
            if event.lost:
                self.count("eviction or leave")
            if unknown := {*event.config} - {*self.names}:
                raise Violation("membership", f"{sorted(unknown)} are members, whom nobody has met")
            if (
                self.options.lying
                and not self.options.faults
                and not self.liars.issuperset(event.lost)
            ):
                raise Violation(
                    "membership",
                    (
                        f"{', '.join(event.lost)} of which some are honest and there "
                        "are removed from the run"
                    ),
                )
        if isinstance(event, ContributionRefused):
            self.count("stale contribution refused")
        if isinstance(event, EarlierSettled):
            self.count(f"earlier contribution {'counted' if event.counted else 'lost'}")
        if isinstance(event, StateReady):
            self.count("state ready")

    def _accused(self, by: PeerId, event: PeerMisbehaved | Equivocated) -> None:
        """Proof is against liars only, and holds."""
        if isinstance(event, PeerMisbehaved):
            return self.count("refused")
        if msgspec.msgpack.decode(event.evidence)[0] in ("relabelled", "missummed", "unfounded"):
            return self._relabelled(by, event.evidence)
        _, peer, one, one_signature, other, other_signature = msgspec.msgpack.decode(event.evidence)
        kind, *slot = msgspec.msgpack.decode(one)
        same = [kind, *slot[:-1]] == msgspec.msgpack.decode(other)[:-1] and one != other
        proved = (
            same and verify_as(peer, one, one_signature) and verify_as(peer, other, other_signature)
        )
        if peer not in self.liars or not proved:
            raise Violation(
                "honest peers", f"{by} has proof that {peer} signed two values for {kind}"
            )
        return self.count(f"proof of two for {kind}")

    def _relabelled(self, by: PeerId, evidence: bytes) -> None:
        configurations = [
            [member.peer for member in certified.entry.next_config]
            for watch in self.watches
            for certified in watch.checker.entries
        ]
        peer, proves = check(
            evidence, self.run_id, verify_as, by, (), self.options.lying, configurations
        )
        if peer not in self.liars:
            raise Violation("honest peers", f"{by} has proof against {peer}: {proves}")
        said = {RELABELLED: "another label", UNFOUNDED: "inputs that nobody gave"}
        self.count(f"proof of {said.get(proves, 'a wrong sum')}")

    def count(self, what: str, by: int = 1) -> None:
        """Statistics."""
        self.stats[what] = self.stats.get(what, 0) + by

    def add(self, peer: PeerId) -> None:
        """A peer more, that has not begun."""
        self.names.append(peer)
        self.members[peer] = SimMember(self, peer)

    # ---- the network
    def contacts(self, peer: PeerId) -> Sequence[PeerId]:
        """What discovery tells a starting process."""
        others = self.deaths.living(peer)
        return (
            [self.organiser] * (peer != self.organiser) + [self.rng.choice(others)]
            if others
            else []
        )

    def _tap(self, sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        data = payload if channel == "control" else payload[0]
        self.world.note(b"%b>%b %b" % (sender.encode(), receiver.encode(), data))
        if channel == "record":
            kind, round_ = RECORD_KINDS.get(data[1], ""), 0
        elif data[:1] == b"R" and (
            self.faults.plan.traps or self.moments.planned or self.options.relayed_above is not None
        ):
            head = _head.decode(data[1:])
            if self._withheld(sender, data, head.body.tag):
                return True
            kind, round_ = head.body.tag, head.round
        else:
            return False
        lost = self.event(kind, sender, receiver)
        return lost or (self.moments.planned and self.moments.heard(kind, round_, sender, receiver))

    def _withheld(self, sender: PeerId, data: bytes, kind: str) -> bool:
        """Whether a relay keeps to itself what it is to pass on."""
        if kind not in RELAY_MESSAGES or self.options.relayed_above is None:
            return False
        self.count(f"relayed: {kind}")
        if sender not in self.selfish:
            return False
        body = decode(data[1:], sender).body
        withheld = isinstance(body, RoundCloses) or (
            isinstance(body, QuorumVotes) and not body.pass_on
        )
        self.count("withheld by a relay", withheld)
        return withheld

    def event(self, kind: str, sender: PeerId, receiver: PeerId | None) -> bool:
        """Something a trap may wait for; whether it is lost. Raises ProcessDied."""
        return bool(self.faults.plan.traps) and self.faults.event(kind, sender, receiver)

    # ---- Subject
    def peers(self) -> Sequence[PeerId]:
        """All peers."""
        return self.names

    def crash(self, peer: PeerId, *, amnesia: bool = False) -> bool:
        """Kill a process; with amnesia its disk is lost too (once a run, only where a quorum is
        left, and no other home forgot its votes).
        """
        member = self.members[peer]
        if member.process is None:
            return False
        if amnesia and (
            self.wiped
            or self.losses.restored
            or self.left
            or self.removal.planned
            or not self.expendable(peer)
        ):
            return False
        self.kill(member)
        if amnesia:
            self.wipe(member)
        return True

    def wipe(self, member: SimMember) -> None:
        """The disks of a dead member are lost."""
        self._retire(member)
        for disk in member.disks:
            disk.wipe()

    def _retire(self, member: SimMember) -> None:
        """Its present life never votes again. After a backup it may be another one in each log."""
        for watch, disk in zip(self.watches, member.disks, strict=True):
            self.wiped.add(disk.me)
            watch.checker.retired.add(disk.me)

    def renew(self, peer: PeerId) -> None:
        """A member's process ends, its user restores an old copy of its home, and the next process
        has found that out: it goes on in a new life.
        """
        member = self.members[peer]
        if self.crash(peer):
            self._retire(member)
            self._renew(member)

    def _renew(self, member: SimMember) -> None:
        """The next life of a member begins."""
        try:
            for disk in member.disks:
                disk.storage.renew()
        except (
            StorageError
        ):  # a node whose disk refuses that does not begin: its user starts it again
            self.world.after(1.0, lambda: self._renew(member))
        else:
            self.restart(member.peer)

    def expendable(self, peer: PeerId) -> bool:
        """Whether majorities of all configurations hold all that was decided without this peer's
        disks (the organiser may decide alone).

        Of those that were voted on as well: a vote may still be adopted, with a configuration of
        two that counts on the lost one."""
        held = all(2 * len(watch.holding(peer)) > len(watch.config) >= 3 for watch in self.watches)
        configs = [config for watch in self.watches for config in watch.proposed()]
        lost = self.wiped | self.losses.restored
        return held and all(
            2 * sum(who.peer != peer and who not in lost for who in config) > len(config)
            for config in configs
        )

    def died(self, peer: PeerId, back_after_s: float) -> None:
        """A trap killed the process inside a call."""
        self.kill(self.members[peer])
        self.world.after(back_after_s, lambda: self.restart(peer))

    def kill(self, member: SimMember, *, power: bool | None = None) -> None:
        """End its process, as kill -9 does, or with the power of its machine; which of them is
        drawn, or given.
        """
        member.die(power=self.powered and self.power.random() < 0.5 if power is None else power)
        self.twins.hear()
        for other in self.members.values():
            if other is not member and other.process is not None and self.rng.random() < 0.5:
                process = other.process
                self.world.after(0.001, lambda p=process: p.link(member.peer, False))
                if (
                    self.options.faults and self.knocks.random() < 0.5
                ):  # a machine that refuses connections tells more than a lost one
                    self.world.after(
                        0.002,
                        lambda p=process: p.gone(member.peer) if member.process is None else None,
                    )

    def restart(self, peer: PeerId) -> None:
        """Start a process again."""
        member = self.members[peer]
        if member.process is None and member.life >= 0:
            self.boot(member)

    def boot(self, member: SimMember) -> None:
        """Start its process; the others have new connections to it."""
        member.boot()
        self.twins.hear()
        for other in self.members.values():
            if other is not member and other.process is not None:
                process = other.process
                self.world.after(0.001, lambda p=process: p.link(member.peer, False))
                self.world.after(0.002, lambda p=process: p.link(member.peer, True))

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
        configs = [watch.config for watch in self.watches]
        refused = (
            member.process is None
            or member.process.frozen
            or self.left
            or self.wiped
            or peer == self.organiser
        )
        fewest = max(
            4, least_members(self.options.lying)
        )  # a run that is still being founded waits for everybody
        if refused or any(member.me not in config or len(config) < fewest for config in configs):
            return False
        self.left = True
        member.leave()
        return True


def run_seed(seed: int, options: Options | None = None, plant: Plant | None = None) -> SeedResult:
    """Play one seed. Deterministic: the same arguments give the same verdict and trace."""
    relayed_above = (options or Options()).relayed_above
    with (plant or Plant()).planted(relayed_above):
        return SimSwarm(seed, options, plant).run()
