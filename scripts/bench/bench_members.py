#!/usr/bin/env python3
"""What a member pays for the others: control messages, bytes and processor time of a round, by kind
of message, in runs of 64, 256 and 1,000 members in virtual time.

Sessions, logs, votes and the data plane are the real ones; scripts are a timer that offers a vector.
The model is tiny, so that what travels is what the protocol says, and not values.

    scripts/bench/bench_members.py                        64, 256 and 1,000 members, 20 rounds each
    scripts/bench/bench_members.py --members 8,16,32,64   fewer of them
    scripts/bench/bench_members.py --churn 0.005          that part of them is killed in each round

All are members from the beginning; the first round, in which they start, is not counted. Control
messages are those of the round; heartbeats and records of membership are counted beside them. A
member's processor time is what the simulation took, its own part included. More than 256 members
have a plan of two levels.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from functools import partial
from random import Random
from typing import Any

import msgspec
import torch
from _bench import emit, progress

from atoll.collectives.group import MAX_STAR, Certified, Vote
from atoll.collectives.group import Member as GroupMember
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.layout import make_layout
from atoll.collectives.messages import outline, shared_decoding
from atoll.collectives.pace import Pace
from atoll.collectives.round import Timing, genesis_payload
from atoll.collectives.simulation import Network, World
from atoll.collectives.swarm import RunSettings
from atoll.node.session.actions import main_log
from atoll.node.session.beginning import make_genesis
from atoll.node.session.events import ContributionRefused, RoundClosing, RoundCommitted, StateReady
from atoll.node.session.memory_storage import MemoryStorage
from atoll.node.simulation.process import NodeProcess, Place, sign_as

TRAIN_S = 4.0
"""What a turn of a script takes."""
LIMIT_S = 3600.0
"""Of virtual time."""
CLOSING_S = 0.2
"""A script that hears that a round closes contributes within so much time."""


ENTRIES = ("accept", "catch", "decided", "paced_plan", "plan", "promise")
"""Kinds of messages that name all contributors or voters: their bytes grow with the members by what
an entry is.
"""


class Counted(msgspec.Struct):
    """What was sent, by kind of message."""

    messages: Counter[str] = msgspec.field(default_factory=Counter[str])
    nbytes: Counter[str] = msgspec.field(default_factory=Counter[str])
    sent: Counter[PeerId] = msgspec.field(default_factory=Counter[PeerId])
    received: Counter[PeerId] = msgspec.field(default_factory=Counter[PeerId])


class Member:
    """A process, its disk, and a script that contributes when its turn is done."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        self.crowd, self.peer = crowd, crowd.names[index]
        self.storage = MemoryStorage(crowd.settings.effective_outer)
        self.rng = crowd.world.stream(self.peer)
        self.life = 0
        self.process: NodeProcess | None = None
        self.offered: bytes | None = None
        self.turn: Any = None

    def boot(self) -> None:
        """Start the process."""
        crowd = self.crowd
        self.life += 1
        self.offered = self.turn = None
        self.process = process = NodeProcess(
            crowd.place,
            self.peer,
            self.storage,
            crowd.world.stream(f"{self.peer}/{self.life}"),
            emit=partial(self.heard, self.life),
            died=lambda _: None,
        )
        process.start([name for name in crowd.names if name != self.peer][:1])
        with process.alive():
            process.session.attach(crowd.world.now, crowd.layout)

    def found(self) -> None:
        """Begin with a run of which all are members."""
        crowd = self.crowd
        replica = self.storage.states.replica(crowd.layout, restore=False)
        replica.initialise(torch.zeros(crowd.layout.numel))
        replica.publish(0)
        genesis = make_genesis(
            run=crowd.place.run_id,
            log=main_log(crowd.place.run_id),
            me=GroupMember(crowd.names[0], 0),
            replica=replica,
            chunk_elements=crowd.place.chunk_elements or 16,
            codec=crowd.settings.codec,
            reducer=crowd.settings.reducer,
            sign=partial(sign_as, crowd.names[0]),
        )
        config = tuple(sorted(GroupMember(name, 0) for name in crowd.names))
        entry = msgspec.structs.replace(genesis.entry, next_config=config)
        signature = sign_as(crowd.names[0], genesis_payload(crowd.place.run_id, entry.hash()))
        vote = Vote(GroupMember(crowd.names[0], 0), 0, signature)
        self.storage.found(replica, Certified(entry, (vote,)))

    def kill(self) -> None:
        """As kill -9 does."""
        if self.process is not None:
            self.process.end()
            self.process = None
            self.storage.restart()
            for other in self.crowd.members:
                if other.process is not None:
                    other.process.link(self.peer, False)

    def heard(self, life: int, event: object) -> None:
        """What the session tells."""
        if life != self.life:
            return
        match event:
            case StateReady():
                self.train(TRAIN_S * self.rng.uniform(0.9, 1.1))
            case RoundCommitted():
                self.crowd.committed(event)
                if event.cid is not None:
                    self.offered = None
                self.train(TRAIN_S * self.rng.uniform(0.9, 1.1))
            case RoundClosing():
                if self.turn is not None:
                    self.turn.cancel()
                    self.turn = None
                    self.train(CLOSING_S * self.rng.random())
            case ContributionRefused(cid=cid) if cid == self.offered:
                self.offered = None
                self.train(CLOSING_S * self.rng.random())
            case _:
                pass

    def train(self, turn_s: float) -> None:
        """A turn begins, if none is under way."""
        if self.turn is None and self.offered is None:
            self.turn = self.crowd.world.after(turn_s, partial(self.offer, self.life))

    def offer(self, life: int) -> None:
        """A turn is done."""
        process = self.process
        if process is None or life != self.life:
            return
        self.turn = None
        if process.session.machine is None or process.session.machine.stateless:
            return
        self.offered = self.rng.randbytes(16)
        vector = torch.full((self.crowd.layout.numel,), self.rng.random())
        with process.alive():
            process.session.contribute(self.crowd.world.now, self.offered, 8, vector)


class Crowd:
    """All of one run."""

    def __init__(
        self, count: int, rounds: int, churn: float, seed: int, rtt_s: float, heartbeat_s: float
    ) -> None:
        self.world = World(seed)
        self.network = Network(self.world, latency_s=rtt_s / 2, jitter_s=rtt_s / 20)
        # as long as real names are
        self.names = [PeerId(f"12D3KooW{index:044d}") for index in range(count)]
        kind = "two-level" if count > MAX_STAR else "butterfly"
        self.settings = RunSettings(codec="fp32", sync_every=1, plan=kind)
        self.layout = make_layout([("w", (64,))])
        self.rounds, self.churn, self.rng = rounds, churn, Random(seed)
        self.place = Place(
            self.world,
            self.network,
            self.names,
            RunId("crowd"),
            self.names[0],
            self.settings,
            Timing(
                heartbeat_s=heartbeat_s, detect_s=5 * heartbeat_s, takeover_s=0.4 + 5 * heartbeat_s
            ),
            chunk_elements=16,
            paces={name: Pace(rtt_s=rtt_s) for name in self.names},
            # places of √n members, of a plan of two levels
            sites={name: f"s{at // math.isqrt(count)}" for at, name in enumerate(self.names)},
        )
        self.members = [Member(self, index) for index in range(count)]
        self.counted = Counted()
        self.entry, self.config = 0, 1
        self.whole_at: int | None = None
        self.contributors: list[int] = []
        self.killed = 0
        self.began_cpu = self.began_s = 0.0
        self.network.tap = self.tap

    def tap(self, sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        """Counts what is sent once all members are in."""
        if self.whole_at is None:
            return False
        if channel == "record":
            kind, size = "record", len(payload[0]) + len(payload[1])
        elif payload[:1] == b"R":
            kind, size = outline(payload[1:], sender).tag, len(payload)
        else:
            kind, size = "membership", len(payload)
        counted = self.counted
        counted.messages[kind] += 1
        counted.nbytes[kind] += size
        if kind not in ("membership", "record"):
            counted.sent[sender] += 1
            counted.received[receiver] += 1
        return False

    def committed(self, event: RoundCommitted) -> None:
        """The first word of an entry."""
        if event.entry <= self.entry:
            return
        self.entry, self.config = event.entry, len(event.config)
        progress(
            f"  {self.world.now:8.2f} s: entry {event.entry}, {len(event.contributors)} contributed,"
            f" {self.config} members, {time.process_time():.0f} s of CPU"
        )
        if self.whole_at is not None:
            self.contributors.append(len(event.contributors))
            for member in self.members[1:]:
                if self.rng.random() < self.churn and member.process is not None:
                    self.killed += 1
                    self.world.after(self.rng.random() * TRAIN_S, member.kill)
                    self.world.after(
                        TRAIN_S * (1.5 + self.rng.random()), partial(self.back, member)
                    )
        else:
            self.whole_at, self.began_s = event.entry, self.world.now
            self.began_cpu = time.process_time()

    def back(self, member: Member) -> None:
        """A killed member starts again, on the same disk."""
        if member.process is None:
            member.boot()
            for other in self.members:
                if other is not member and other.process is not None:
                    other.process.link(member.peer, True)

    def run(self) -> dict[str, Any]:
        """Play it; what a member paid in a round."""
        for member in self.members:
            member.found()
            self.world.at(self.rng.random(), member.boot)

        def done() -> bool:
            return self.whole_at is not None and self.entry - self.whole_at >= self.rounds

        with shared_decoding():
            finished = self.world.run(until=LIMIT_S, stop=done)
        n, rounds = len(self.members), max(1, self.entry - (self.whole_at or self.entry))
        per = 1.0 / n / rounds
        counted = self.counted
        control = [kind for kind in counted.messages if kind not in ("membership", "record")]
        return {
            "members": n,
            "rounds": rounds if finished else 0,
            "finished": finished,
            "contributors": sum(self.contributors) / max(1, len(self.contributors)),
            "killed": self.killed,
            "virtual_s": round(self.world.now - self.began_s, 1),
            "messages": round(per * sum(counted.messages[kind] for kind in control), 2),
            "heartbeats": round(per * counted.messages["membership"], 2),
            "bytes_of_entries": round(
                per * sum(counted.nbytes[kind] for kind in control if kind in ENTRIES)
            ),
            "bytes_else": round(
                per * sum(counted.nbytes[kind] for kind in control if kind not in ENTRIES)
            ),
            "busiest_sent": round(max(counted.sent.values(), default=0) / rounds, 1),
            "cpu_ms": round(1000 * per * (time.process_time() - self.began_cpu), 3),
            "kinds": {
                kind: [round(per * count, 3), round(per * counted.nbytes[kind])]
                for kind, count in sorted(counted.messages.items())
            },
        }


def growth(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By which power of the number of members each figure grows from one size to the next."""
    grown = dict[str, list[float]]()
    for what in ("messages", "bytes_else", "bytes_of_entries", "busiest_sent", "cpu_ms"):
        grown[what] = [
            round(
                math.log(after[what] / before[what])
                / math.log(after["members"] / before["members"]),
                2,
            )
            for before, after in itertools.pairwise(rows)
        ]
    return grown


def main() -> int:
    """Exit code of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", default="64,256,1000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--churn", type=float, default=0.0, help="killed in a round, of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heartbeat-s", type=float, default=0.2, help="between two heartbeats")
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[dict[str, Any]]()
    for count in map(int, arguments.members.split(",")):
        progress(f"{count} members")
        crowd = Crowd(
            count,
            arguments.rounds,
            arguments.churn,
            arguments.seed,
            arguments.rtt_ms / 1000,
            arguments.heartbeat_s,
        )
        rows.append(crowd.run())
        progress(str(rows[-1]))
    grown = growth(rows)
    for what, exponents in grown.items():
        progress(f"{what}: grows as n to the {', '.join(map(str, exponents))} (√n: 0.5)")
    emit("members", vars(arguments), [], sizes=rows, growth=grown)
    return 0 if all(row["finished"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
