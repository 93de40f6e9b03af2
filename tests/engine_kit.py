"""Engine threads over real sockets, for tests."""

from __future__ import annotations

import queue
import socket
import time

import pytest
from exchange_kit import peers_of

from atoll.collectives.engine import EngineSettings, EngineThread, derive_lane_keys
from atoll.collectives.exchange import LaneUp, ReductionReport, ResultComplete

WAIT_S = 20.0
PATIENT = EngineSettings(
    dead_after_s=15.0, hello_s=15.0
)  # a loaded machine must not look like a dead peer


class Peer:
    """An engine and the queue of its events."""

    def __init__(self, name, settings=PATIENT):
        self.events = queue.SimpleQueue()
        self.seen = []
        self.engine = EngineThread(name, emit=self.events.put, settings=settings)

    def wait(self, kind, match=lambda event: True):
        """The next event of this kind."""
        for event in list(self.seen):
            if isinstance(event, kind) and match(event):
                self.seen.remove(event)
                return event
        while True:
            event = self.events.get(timeout=WAIT_S)
            if isinstance(event, kind) and match(event):
                return event
            self.seen.append(event)


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def keys(number=0, cipher="aes-128-gcm"):
    a, b = bytes([number]) * 32, bytes([number + 1]) * 32
    return derive_lane_keys(a, b, b"", initiator=True, cipher=cipher), derive_lane_keys(
        b, a, b"", initiator=False, cipher=cipher
    )


def link(one, other, make=tcp_pair, number=0, cipher="aes-128-gcm", index=0):
    sockets, both = make(), keys(number, cipher)
    for (x, y), sock, key in zip(((one, other), (other, one)), sockets, both, strict=True):
        x.engine.add_lane(y.engine.me, sock, key, "direct", index)
    for x, y in ((one, other), (other, one)):
        assert x.wait(LaneUp) == LaneUp(y.engine.me, "direct")
    return sockets


@pytest.fixture
def swarm():
    made = []

    def make(n, settings=PATIENT, **options):
        peers = [Peer(name, settings) for name in peers_of(n)]
        made.extend(peers)
        for peer in peers:
            peer.engine.start()
        for i, one in enumerate(peers):
            for other in peers[i + 1 :]:
                link(one, other, **options)
        return peers

    yield make
    for peer in made:
        peer.engine.stop()
        assert not peer.engine.alive


def start(peers, plan, vectors):
    names = [p.engine.me for p in peers]
    for peer in (
        peers
    ):  # whoever has not opened the round yet would drop what comes, until it is asked for again
        peer.engine.exchange.open_round(
            plan.log, plan.round, names, plan.numel, plan.chunk_elements, plan.codec
        )
        assert peer.engine.sync(WAIT_S)
    for peer in peers:
        exchange = peer.engine.exchange
        for c in plan.contributors:
            if c.member.peer == peer.engine.me:
                exchange.freeze(plan.log, plan.round, c.cid, vectors[c.cid])
        exchange.execute(plan, names)


def pull_until_complete(peers, plan, by_cid):
    """What sessions do: ask for what is lacking, until everybody has the result."""
    by_name = {p.engine.me: p for p in peers}
    left, deadline = list(peers), time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        left = [
            p
            for p in left
            if not any(
                isinstance(e, ResultComplete) and e.plan_id == plan.plan_id for e in drain(p)
            )
        ]
        if not left:
            break
        for peer in peers:
            peer.engine.exchange.report(plan.plan_id)
            report = peer.wait(ReductionReport)
            for cid, spans in report.missing.items():
                by_cid[cid].engine.exchange.resend_parts(peer.engine.me, plan.plan_id, cid, spans)
            for owner, spans in report.lacking.items():
                by_name[owner].engine.exchange.resend_results(peer.engine.me, plan.plan_id, spans)
            peer.engine.sync(WAIT_S)


def drain(peer):
    while not peer.events.empty():
        peer.seen.append(peer.events.get())
    return peer.seen
