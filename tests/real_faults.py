"""The kit of faults (`faults`) on real peers: whoever is to be struck tells by its own events when
it is in the phase.

    with Armed(swarm, fault("blackhole").of("owner").during("gather")) as armed:
        swarm.contribute(seed)
        …outcomes of those that are not armed.victim…
        armed.revive()

Faults of processes are signals. Faults of the network need peers on hosts of a laboratory; the
command that makes one is started before and waits for its input, and the victim's node is stopped
for the milliseconds that it takes. What was really hit is found out afterwards, by the clock of the
events.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from faults import SLOW_SHARE, Fault, choose
from swarm_kit import Peer, Peers, unfold

from atoll.collectives.errors import AtollError
from atoll.collectives.outer_rules import OuterSettings
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient
from atoll.optim.outer import OuterStep

NETWORK = ("blackhole", "reset", "slow", "corrupt")
BACK_S = 90.0  # a bound for hangs, not a measurement


@dataclass(frozen=True, slots=True)
class Seen:
    """An event of a node."""

    peer: Peer
    event: dict[str, Any]

    @property
    def at(self) -> float:
        """When the node said it, in Unix time."""
        return float(self.event["at"])


class Watch:
    """Follows the events of some peers' nodes, each in a thread of its own; a context manager.
    ``take`` is called there.
    """

    def __init__(self, peers: Sequence[Peer], take: Callable[[Seen], None]) -> None:
        self._clients = [NodeClient.connect(find_paths(peer.home)) for peer in peers]
        told = [client.events() for client in self._clients]  # from here on none is missed
        self._threads = [
            threading.Thread(target=self._follow, args=(*one, take), daemon=True)
            for one in zip(peers, told, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _follow(peer: Peer, events: Iterator[dict[str, Any]], take: Callable[[Seen], None]) -> None:
        with contextlib.suppress(AtollError):  # the node was killed, or the watch is over
            for event in events:
                take(Seen(peer, event))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.join(10)


@dataclass(slots=True)
class Blow:
    """A fault that has struck: whom, in which round, and when, by two clocks. By the plan it was
    aimed by, ``planned`` are counted, and the victim ``owns`` a part or none."""

    victim: Peer
    convener: str
    round: int
    planned: int
    owns: bool
    at: float = field(default_factory=time.time)
    monotonic: float = field(default_factory=time.monotonic)


class Armed:
    """One fault waiting for its moment; a context manager. ``blow`` is what struck, if anything
    did.

    ``slow_mbit``: what "slow" leaves of the victim's rate; by default 1 % of its host's. ``spared``
    are never victims.
    """

    def __init__(
        self,
        swarm: Peers,
        fault: Fault,
        *,
        slow_mbit: float | None = None,
        spared: Sequence[Peer] = (),
    ) -> None:
        self.swarm, self.fault = swarm, fault
        self.blow: Blow | None = None
        self.seen: list[Seen] = []
        self._spared = [peer.peer for peer in spared]
        self._aim: tuple[Peer, str, int, int, bool] | None = None
        self._struck = False  # or about to be
        self._lock = threading.Lock()
        self._leaving: threading.Thread | None = None
        self._ready = {peer.peer: self._prepare(peer, slow_mbit) for peer in swarm.all}
        self._watch = Watch(swarm.all, self._take)

    @property
    def victim(self) -> Peer | None:
        """Who was struck."""
        return self.blow.victim if self.blow else None

    @property
    def others(self) -> list[Peer]:
        """Everybody else."""
        return [peer for peer in self.swarm.all if peer is not self.victim]

    def __enter__(self) -> Armed:
        return self

    def __exit__(self, *exc: object) -> None:
        self._watch.__exit__()
        for _, cancel in self._ready.values():
            cancel()

    # ---- before
    def _prepare(
        self, peer: Peer, slow_mbit: float | None
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """What strikes this peer, and what puts it away unused."""
        kind, part, host = self.fault.kind, self.fault.part, peer.host
        if kind in ("kill", "stop"):
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            return lambda: peer.signal(part, number), _nothing
        if kind == "leave":
            return lambda: self._leave(peer), _nothing
        assert kind != "lie", "a lie is for simulations: no real node knows how"
        assert host is not None, f"{kind} needs peers on hosts of a laboratory"
        switch = host.prepare(kind, mbit=slow_mbit or SLOW_SHARE * (host.mbit or 1000.0))
        return switch, switch.cancel

    def _leave(self, peer: Peer) -> None:
        def leave() -> None:
            with (
                contextlib.suppress(AtollError),
                NodeClient.connect(find_paths(peer.home)) as client,
            ):
                client.leave()

        self._leaving = threading.Thread(target=leave, daemon=True)
        self._leaving.start()

    # ---- the moment
    def _take(self, seen: Seen) -> None:
        event = seen.event
        if event["event"] == "round.phase" and not event["log"].startswith("main/"):
            return
        with self._lock:
            self.seen.append(seen)
            if self._struck or event["event"] != "round.phase" or not self._now(seen.peer, event):
                return
            self._struck = True
            if not self.fault.after_s:
                return self._strike()
        time.sleep(self.fault.after_s)
        with self._lock:
            self._strike()

    def _now(self, peer: Peer, event: dict[str, Any]) -> bool:
        """Whether this event of this peer is the moment."""
        if self._aim is None or event["round"] != self._aim[2]:
            name = choose(
                self.fault.target,
                event["convener"],
                event["owners"],
                event["contributors"],
                self._spared,
            )
            victim = next((known for known in self.swarm.all if known.peer == name), None)
            self._aim = None
            if victim is not None:
                self._aim = (
                    victim,
                    event["convener"],
                    event["round"],
                    len(event["contributors"]),
                    victim.peer in event["owners"],
                )
        if self._aim is None or event["phase"] != self.fault.phase:
            return False
        victim, *_, owns = self._aim
        return peer is victim or (
            self.fault.phase == "gather" and not owns
        )  # to it, results begin to travel with the first part

    def _strike(self) -> None:
        assert self._aim is not None
        victim, *rest = self._aim
        self.blow = blow = Blow(
            victim, *rest
        )  # first: what the victim says from now on is no survivor's word
        held = (
            self.fault.kind in NETWORK
        )  # the command takes its time: the victim does not leave the phase meanwhile
        if held:
            victim.signal("node", signal.SIGSTOP)
        blow.at = time.time()
        try:
            self._ready[victim.peer][0]()
        finally:
            if held:
                victim.signal("node", signal.SIGCONT)
        blow.at, blow.monotonic = blow.at if held else time.time(), time.monotonic()

    # ---- afterwards
    def outcomes(self, timeout_s: float = BACK_S) -> dict[Peer, dict[str, Any]]:
        """The next outcome of everybody but the victim (that of the victim too, if it came before
        it was known who is struck).

        Raises AssertionError when somebody does not tell in time, or tells something else.
        """
        told: dict[Peer, dict[str, Any]] = {}
        until = time.monotonic() + timeout_s
        while missing := [peer for peer in self.others if peer not in told]:
            for peer in missing:
                with contextlib.suppress(queue.Empty):
                    answer = peer.expect_any(0.02)
                    if answer["event"] == "frozen":
                        continue
                    assert answer["event"] == "outcome" or peer is self.victim, (
                        peer.name,
                        answer,
                        peer.log(),
                    )
                    if answer["event"] == "outcome":
                        told[peer] = answer
            assert time.monotonic() < until, (
                f"no outcome of {', '.join(peer.name for peer in missing)}; the first one's log:\n{missing[0].log()}"
            )
        return told

    @property
    def hit(self) -> bool:
        """Whether the victim was still in the phase when it was struck, as far as it could tell."""
        if self.blow is None:
            return False
        earlier = [
            seen.event
            for seen in self.seen
            if seen.peer is self.blow.victim and seen.at <= self.blow.at
        ]
        phases = [
            e
            for e in earlier
            if e["event"] in ("round.phase", "round.committed")
            and e.get("round") == self.blow.round
        ]
        said = (
            "reduce" if self.fault.phase == "gather" and not self.blow.owns else self.fault.phase
        )  # who owns nothing says no "gather"
        return bool(phases) and phases[-1].get("phase") == said

    def expelled(self) -> bool:
        """Whether a survivor's configuration is without the victim now."""
        assert self.blow is not None
        configs = list[list[str]]()
        for peer in self.others:
            with NodeClient.connect(find_paths(peer.home)) as client:
                configs.append(client.status()["runs"][0]["members"])
        return any(self.blow.victim.peer not in config for config in configs)

    def heal(self) -> None:
        """End what lasts: wake the stopped, mend the network."""
        if self.blow is None:
            return
        victim = self.blow.victim
        if self.fault.kind == "stop":
            victim.signal(self.fault.part, signal.SIGCONT)
        elif self.fault.kind in NETWORK and victim.host is not None:
            victim.host.heal()

    def revive(self) -> dict[str, Any] | None:
        """`heal`, and wait until the victim is a whole peer again: its outcome of the round, if it
        has one to tell.
        """
        victim, fault = self.victim, self.fault
        if victim is None:
            return None
        self.heal()
        if fault.kind == "leave":
            assert self._leaving is not None
            self._leaving.join(BACK_S)
            victim.end()
            victim.start()
            victim.expect("ready", BACK_S)
            return None
        if fault.kind != "kill" or fault.part == "node":
            return victim.expect("outcome", BACK_S)
        victim.process.wait(30)
        with contextlib.suppress(queue.Empty):
            while victim.expect_any(1.0)["event"] != "end":
                pass
        victim.start()
        victim.expect("ready", BACK_S)
        return None


def _nothing() -> None:
    pass


class Ledger:
    """The anchor as it must be, from the contributors that outcomes name. Peers' anchors start at
    zero, and all rounds must go through it.
    """

    def __init__(self, swarm: Peers) -> None:
        self.swarm = swarm
        self.digests: dict[int, str] = {}
        self._anchor = torch.zeros_like(
            swarm.folded_mean(0, {swarm.all[0].peer: 1})
        )  # folded as they are: the step is elementwise
        self._momentum = torch.zeros_like(self._anchor)
        self._step = OuterStep(OuterSettings(kind="sgd", lr=1.0, momentum=0.0))

    def take(self, seed: int, outcomes: Sequence[dict[str, Any]]) -> Judgement:
        """Judge the outcomes of peers that contributed with this seed; all rounds they tell of are
        applied.
        """
        committed = [outcome for outcome in outcomes if outcome["status"] == "committed"]
        named = {outcome["round"]: outcome["contributors"] for outcome in committed}
        weights = {peer.peer: index + 1 for index, peer in enumerate(self.swarm.all)}
        agreed = all(outcome["contributors"] == named[outcome["round"]] for outcome in committed)
        right = agreed and all(
            weights.get(peer) == weight
            for names in named.values()
            for peer, weight in names.items()
        )
        for round_ in sorted(named.keys() - self.digests.keys()):
            if right:
                target = torch.empty_like(self._anchor)
                self._step.apply_range(
                    self._anchor,
                    self.swarm.folded_mean(seed, named[round_]),
                    self._momentum,
                    target,
                    0,
                    len(target),
                )
                self._anchor = target
                self.digests[round_] = blake3(
                    memoryview(unfold(target, self.swarm.numel).numpy()).cast("B")
                ).hexdigest()
        anchors = {
            outcome["anchor_round"]: {
                o["digest"] for o in committed if o["anchor_round"] == outcome["anchor_round"]
            }
            for outcome in committed
        }
        return Judgement(
            committed=len(committed) == len(outcomes),
            contributors_right=right,
            bit_equal=all(len(found) == 1 for found in anchors.values()),
            exact=right
            and all(
                found == {self.digests.get(round_, *found)}
                for round_, found in anchors.items()
                if len(found) == 1
            ),
            counted=min((len(names) for names in named.values()), default=0),
        )

    def common_round(self, seed: int, tries: int = 30, who: Sequence[Peer] = ()) -> Judgement:
        """Rounds, until one counts everybody in ``who`` (default: all). Raises AssertionError when
        that takes too many, or one is not honest.
        """
        peers = list(who or self.swarm.all)
        for attempt in range(tries):
            self.swarm.contribute(seed + 100_000 * attempt, who=peers)
            outcomes = [peer.expect("outcome", BACK_S) for peer in peers]
            found = self.take(seed + 100_000 * attempt, outcomes)
            assert found.honest, (found, outcomes)
            if found.committed and all(
                peer.peer in outcome["contributors"] for outcome in outcomes for peer in peers
            ):
                return found
        raise AssertionError(f"no common round of {len(peers)} in {tries} tries")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a set of outcomes is worth. ``counted``: contributors of the round that has fewest."""

    committed: bool
    contributors_right: bool
    bit_equal: bool
    exact: bool
    counted: int

    @property
    def honest(self) -> bool:
        """Whatever was committed is what it says."""
        return self.contributors_right and self.bit_equal and self.exact
