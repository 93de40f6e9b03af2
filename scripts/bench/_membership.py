"""Membership of many in virtual time: how soon a changed record is everywhere, and what that costs
each member.

The state machines and signatures are real, the network is simulated (50 to 100 ms one way). Nobody
watches anybody: heartbeats belong to the members of a configuration, and are another matter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from _bench import progress

from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.simulation import Network, World
from atoll.node.run.membership import Membership
from atoll.security.identity import Identity, verify

RUN = RunId("bench-membership")
DOMAIN = "bench/membership"
AROUND_BYTES = 24 + 52
"""What a message has around it on a wire: frame, record and tag; IP and TCP."""
UNIX_S = 1_800_000_000.0
SETTLE_S = 20.0


@dataclass(slots=True)
class Change:
    """A record that says something new, and who holds it by now."""

    peer: PeerId
    round: int
    at: float
    holders: set[PeerId]


class Crowd:
    """``count`` members of a run; each knows one other at first."""

    def __init__(self, count: int, seed: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world, latency_s=0.05, jitter_s=0.05)
        self.members: dict[PeerId, Membership] = {}
        self.changes: list[Change] = []
        self.spread_s: list[float] = []
        self.messages = 0
        phase = self.world.stream("phase")
        first = PeerId("")
        for number in range(count):
            identity = Identity(phase.randbytes(32))
            m = self.members[identity.peer] = Membership(
                identity.peer,
                RUN,
                sign=lambda data, identity=identity: identity.sign(DOMAIN, data),
                verify=lambda peer, data, signature: verify(peer, DOMAIN, data, signature),
                rng=self.world.stream(f"member {number}"),
                unix_offset_s=UNIX_S,
            )
            m.announce(0.0, addresses=(f"/ip4/10.0.{number // 250}.{number % 250}/tcp/4001",))
            self.network.attach(
                identity.peer,
                lambda sender, _, data, peer=identity.peer: self._deliver(peer, sender, data),  # type: ignore[misc]
            )
            if number:
                m.learn(0.0, [self.members[first]._table[first].known.signed], first)  # pyright: ignore[reportPrivateUsage]
            else:
                first = identity.peer
            self.world.at(phase.random(), lambda peer=identity.peer: self._tick(peer))

    def change(self) -> None:
        """A member taken at random says something new."""
        peer = self.world.stream(f"change {len(self.changes)} {self.world.now}").choice(
            sorted(self.members)
        )
        number = 1 + max((change.round for change in self.changes), default=0) + len(self.spread_s)
        self.changes.append(Change(peer, number, self.world.now, {peer}))
        self.members[peer].announce(self.world.now, round=number)
        self._flush(peer)

    def _deliver(self, peer: PeerId, sender: PeerId, data: bytes) -> None:
        self.messages += 1
        m = self.members[peer]
        m.on_message(self.world.now, sender, data)
        for change in list(self.changes):
            record = m.record(change.peer)
            if record is not None and record.round >= change.round:
                change.holders.add(peer)
                if len(change.holders) == len(self.members):
                    self.spread_s.append(self.world.now - change.at)
                    self.changes.remove(change)
        self._flush(peer)

    def _tick(self, peer: PeerId) -> None:
        self.members[peer].tick(self.world.now)
        self._flush(peer)
        self.world.at(self.members[peer].next_due(), lambda: self._tick(peer))

    def _flush(self, peer: PeerId) -> None:
        for receiver, data in self.members[peer].drain():
            self.network.send(peer, receiver, "membership", data)

    def nbytes(self) -> int:
        """Bytes sent by all so far, as they would be on wires."""
        return sum(self.network.bytes_sent.values()) + AROUND_BYTES * self.messages


def simulate(count: int, changes: int, seed: int) -> tuple[list[float], dict[str, float]]:
    """Seconds until each of ``changes`` was known to all, and per member: KB/s both ways, share of
    a core, messages a second both ways.
    """
    crowd = Crowd(count, seed)
    crowd.world.run(until=SETTLE_S)
    known = min(len(m.records()) for m in crowd.members.values())
    progress(f"{count} members, each knows {known} at least after {SETTLE_S:g} s")
    nbytes, messages, cpu = crowd.nbytes(), crowd.messages, time.process_time()
    for _ in range(changes):
        crowd.change()
        crowd.world.run(until=crowd.world.now + 0.5)
    crowd.world.run(until=crowd.world.now + 10.0)
    seconds = crowd.world.now - SETTLE_S
    each = 1 / (count * seconds)
    return crowd.spread_s + [float("inf")] * len(crowd.changes), {
        "kb_per_s": 2 * (crowd.nbytes() - nbytes) * each / 1000,
        "core_share": (time.process_time() - cpu) * each,
        "messages_per_s": 2 * (crowd.messages - messages) * each,
        "virtual_s": seconds,
    }
