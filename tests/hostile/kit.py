"""A small swarm with a liar in it, and what its misbehaviour costs the others: rounds, memory,
disk.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from bad_input_kit import LAYOUT, PATIENCE_S, Member, ended, new_home, new_run, one_round, soon

from atoll.collectives.layout import Layout

HOSTILE = Path(__file__).with_name("hostile_node.py")
TRAINING_S = 1.0
"""How long a round's training takes here; what follows is the round's exchange and decision."""
STEP_S = 0.05
SAMPLE_S = 0.1
BACK_S = 30.0
EARLY_S = 30.0
STATUS_S = 1.0  # between two questions for the status


@dataclass
class Cost:
    """What the victim took meanwhile. Rounds in seconds, training included; memory and disk in
    bytes beyond what there was before.
    """

    kind: str
    sent: int = 0
    refused: int = 0
    rounds: list[float] = field(default_factory=list[float])
    lost: int = 0
    shares: list[int] = field(default_factory=list[int])  # contributions that each round counted
    rss: int = 0
    rss_early: int = 0  # the most within the first `EARLY_S`
    disk: int = 0
    cpu: float = 0.0
    liar_cpu: float = 0.0  # of a core, of the liar's node
    status_s: float = 0.0  # the longest that the victim took to say its status

    @property
    def round_s(self) -> float:
        """The median round."""
        return median(self.rounds) if self.rounds else float("inf")


class Rounds(threading.Thread):
    """Rounds of these members, one after another, until `stop`; each after TRAINING_S of training,
    or sooner where the round closes before, as any script's turn ends then. What is lost is lost to
    all of them.
    """

    def __init__(self, members: list[Member]) -> None:
        super().__init__(daemon=True)
        self.members, self.over = members, threading.Event()
        self.took: list[float] = []
        self.shares: list[int] = []
        self.lost = 0
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                began = time.monotonic()
                if not self._train(began + TRAINING_S):
                    return
                tickets = [
                    m.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
                    for m in self.members
                ]
                outcomes = [ticket.wait(PATIENCE_S) for ticket in tickets]
                self.took.append(time.monotonic() - began)
                self.shares.append(len(outcomes[0].contributors))
                self.lost += not all(outcome.counted for outcome in outcomes)
        except BaseException as error:
            self.failed = error

    def _train(self, until: float) -> bool:
        """False where it is over."""
        swarms = [member.swarm for member in self.members]
        bases = list[int]()
        for swarm in swarms:
            view = swarm.anchor()
            bases.append(view.round)
            view.release()
        while not self.over.wait(min(STEP_S, max(0.0, until - time.monotonic()))):
            closes = any(swarm.closing > at for swarm, at in zip(swarms, bases, strict=True))
            if closes or time.monotonic() >= until:
                return True
        return False

    def stop(self) -> None:
        """After the round that is under way."""
        self.over.set()
        self.join()
        if self.failed is not None:
            raise self.failed


def rss(member: Member) -> int:
    """Bytes that its node has in memory."""
    return psutil.Process(member.pid).memory_info().rss


def disk(member: Member) -> int:
    """Bytes that its node's home takes on disk."""
    total = 0
    for file in member.home.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except OSError:
            continue
    return total


def cpu(member: Member) -> float:
    """Processor seconds of its node."""
    times = psutil.Process(member.pid).cpu_times()
    return times.user + times.system


class Swarm:
    """Two honest members, the first of them the victim, and a liar: a member, or an observer."""

    def __init__(
        self, victim: Member, other: Member, liar: Member, folder: Path, *, member: bool
    ) -> None:
        self.victim, self.other, self.liar, self.folder, self.member = (
            victim,
            other,
            liar,
            folder,
            member,
        )
        self._orders = 0

    @property
    def members(self) -> list[Member]:
        """Who contributes."""
        return [*self.honest, *([self.liar] if self.member else [])]

    @property
    def honest(self) -> list[Member]:
        """Whose rounds are measured."""
        return [self.victim, self.other]

    def refused(self) -> dict[str, int]:
        """What the victim refused to the liar until now, by kind."""
        from atoll.node.joining import NodeClient

        with NodeClient.connect(self.victim.paths) as client:
            rows = client.peers(self.victim.swarm.run_id)
        return next(
            (row.get("over_budget") or {} for row in rows if row["peer"] == self.liar.swarm.peer),
            {},
        )

    def order(self, kind: str, seconds: float) -> None:
        """Let the liar do it from now on."""
        self._orders += 1
        order = {
            "number": self._orders,
            "kind": kind,
            "seconds": seconds,
            "victim": self.victim.swarm.peer,
        }
        written = self.folder / "order.tmp"
        written.write_text(json.dumps(order))
        written.rename(self.folder / "order.json")

    def report(self) -> int | None:
        """How much it did; None until it is over."""
        try:
            found = json.loads((self.folder / "report.json").read_text())
        except (OSError, ValueError):
            return None
        return int(found["sent"]) if found["number"] == self._orders else None

    def quiet(self, seconds: float) -> Cost:
        """Rounds without misbehaviour."""
        until = time.monotonic() + seconds
        return self._watch("quiet", lambda: time.monotonic() > until)

    def suffer(self, kind: str, seconds: float) -> Cost:
        """Rounds with it."""
        self.order(kind, seconds)
        return self._watch(kind, lambda: self.report() is not None)

    def _watch(self, kind: str, over: Any) -> Cost:
        cost, rounds = Cost(kind), Rounds(self.honest)
        besides = Rounds([self.liar]) if self.member else None  # nobody waits for its scripts
        memory, room, busy, began = (
            rss(self.victim),
            disk(self.victim),
            cpu(self.victim),
            time.monotonic(),
        )
        before, burnt, asked_at = sum(self.refused().values()), cpu(self.liar), began
        rounds.start()
        if besides is not None:
            besides.start()
        until = began + 10 * PATIENCE_S
        while not over():
            time.sleep(SAMPLE_S)
            cost.rss = max(cost.rss, rss(self.victim) - memory)
            if time.monotonic() - began < EARLY_S:
                cost.rss_early = cost.rss
            if time.monotonic() - asked_at > STATUS_S:
                asked_at = time.monotonic()
                self.victim.state()
                cost.status_s = max(cost.status_s, time.monotonic() - asked_at)
            cost.disk = max(cost.disk, disk(self.victim) - room)
            assert rounds.is_alive(), rounds.failed
            assert time.monotonic() < until
        cost.cpu = (cpu(self.victim) - busy) / (time.monotonic() - began)
        cost.liar_cpu = (cpu(self.liar) - burnt) / (time.monotonic() - began)
        rounds.stop()
        if besides is not None:
            besides.stop()
        cost.rounds, cost.lost, cost.sent = rounds.took, rounds.lost, self.report() or 0
        cost.shares = rounds.shares
        cost.refused = sum(self.refused().values()) - before
        return cost

    def took(self) -> tuple[int, int]:
        """Bytes of memory and disk that the victim takes now."""
        return rss(self.victim), disk(self.victim)

    def back(self, memory: int, room: int) -> float:
        """Seconds until the victim takes no more than so many bytes of memory and disk; infinite
        where it does after all that may be.
        """
        began = time.monotonic()
        while rss(self.victim) > memory or disk(self.victim) > room:
            if time.monotonic() - began > BACK_S:
                return float("inf")
            time.sleep(SAMPLE_S)
        return time.monotonic() - began


@contextmanager
def hostile_swarm(
    folder: Path, *, member: bool, manifest: str = "", layout: Layout = LAYOUT
) -> Iterator[Swarm]:
    """Real nodes. ``member``: whether the liar is one."""
    run = new_run(folder, model=manifest)
    orders = folder / "orders"
    orders.mkdir()
    command = [sys.executable, str(HOSTILE), str(orders)]
    with (
        ended(victim := run.organiser(layout=layout)),
        ended(other := run.member("b", layout=layout)),
    ):
        one_round(victim, other)
        invite = run.invite() if member else run.invite(role="observe")
        with ended(
            liar := Member(new_home(folder / "liar"), invite, command=command, layout=layout)
        ):
            swarm = Swarm(victim, other, liar, orders, member=member)
            if member:
                one_round(*swarm.members)
            else:
                soon(lambda: liar.state()["role"] == "observe", "it observes")
            yield swarm
