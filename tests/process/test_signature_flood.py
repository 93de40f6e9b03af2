"""Ten thousand bad signatures a second from one key cost a node a small part of a core, and no
round.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import msgspec
import psutil
import trio
from bad_input_kit import Member, ended, new_run, one_round
from process.test_garbage import Stranger
from seeds import RARE

from atoll.collectives.identifiers import PeerId
from atoll.node.run.invite import parse_invite
from atoll.node.run.membership_records import (
    RECORDS_PER_MESSAGE,
    Record,
    Records,
    SignedRecord,
    encode,
)
from atoll.node.session.session import MEMBERSHIP
from atoll.security.identity import Identity

pytestmark = [*RARE]

SIGNATURES, SECONDS = 10_000, 10.0
SHARE = 0.3
"""Of a core. At rest it is a tenth at most; others on the machine double it, since they share its
caches. Who verified all of these signatures would need more than a core.
"""
LOG_BYTES_AN_HOUR = 10_000_000
RNG = random.Random(5)


def forged(run: str, whose: PeerId, certificate: bytes, number: int) -> bytes:
    """Records of one member that it has not signed, each newer than the one before: no cheap test
    refuses them.
    """
    now_ms = int(time.time() * 1000)
    signed = tuple(
        SignedRecord(
            encode_record(
                Record(
                    run,
                    whose,
                    now_ms + number + index,
                    now_ms + 30_000,
                    certificate=certificate,
                )
            ),
            RNG.randbytes(64),
        )
        for index in range(RECORDS_PER_MESSAGE)
    )
    return MEMBERSHIP + encode(Records(signed))


def encode_record(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


class Flood(threading.Thread):
    """Sends them to a member, as many a second, until it is told to end. It has been let in by an
    invite.
    """

    def __init__(self, stranger: Stranger, victim: Member) -> None:
        super().__init__()
        self.stranger, self.victim, self.sent, self.over = (
            stranger,
            PeerId(victim.swarm.peer),
            0,
            threading.Event(),
        )
        self.there = threading.Event()

    def run(self) -> None:
        trio.run(self._main)

    async def _main(self) -> None:
        stranger, network = self.stranger, self.stranger.network
        other, now_s = Identity.generate(), time.time()
        certificate = (
            parse_invite(stranger.run.invite(), now_s=now_s).certify(other, now_s).encode()
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(network.run)
            network.on_message(
                stranger.topic,
                lambda *_: None,
                greet=lambda _: stranger.certificate,
                admit=lambda *_: True,
            )
            await stranger.greet()
            messages = [
                forged(stranger.topic, other.peer, certificate, RECORDS_PER_MESSAGE * number)
                for number in range(64)
            ]
            self.there.set()
            began = trio.current_time()
            while not self.over.is_set():
                while self.sent * RECORDS_PER_MESSAGE < SIGNATURES * (trio.current_time() - began):
                    network.send(stranger.topic, self.victim, messages[self.sent % len(messages)])
                    self.sent += 1
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


def cpu_s(member: Member) -> float:
    times = psutil.Process(member.pid).cpu_times()
    return times.user + times.system


def share(member: Member) -> float:
    """Of a core that a member's node takes, over some seconds."""
    before, began = cpu_s(member), time.monotonic()
    time.sleep(SECONDS)
    return (cpu_s(member) - before) / (time.monotonic() - began)


def test_a_flood_of_bad_signatures_costs_a_part_of_a_core_and_no_round(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    victim, other = run.organiser(), run.member("b")
    with ended(victim, other):
        one_round(victim, other)
        quiet = share(victim)
        flood = Flood(
            Stranger(run, victim, run.invite()),
            victim,
        )
        flood.start()
        try:
            assert flood.there.wait(60)
            logged = len(victim.log())
            flooded = share(victim)
            logged = len(victim.log()) - logged
            sent = flood.sent * RECORDS_PER_MESSAGE
            outcomes = [one_round(victim, other) for _ in range(3)]
        finally:
            flood.over.set()
            flood.join()
        print(
            f"{sent / SECONDS:.0f} bad signatures a second: {flooded:.3f} of a core, {quiet:.3f} without"
        )
        assert sent >= 0.9 * SIGNATURES * SECONDS
        assert flooded - quiet <= SHARE
        assert logged / SECONDS * 3600 < LOG_BYTES_AN_HOUR
        assert all(outcome.counted for outcome in outcomes for outcome in outcome)
