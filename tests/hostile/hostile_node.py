"""A node that speaks the real protocol and misbehaves when told: ``hostile_node.py FOLDER
[arguments of python -m atoll.node]``.

In FOLDER a test writes `order.json`: a number that grows, one of KINDS (or several, with + between
them), for how many seconds, and against which peer. The node, which is otherwise like any other,
sends well-formed messages of those kinds in turn as fast as it can, RATE a second at most, and
writes to `report.json` how many. With "slow" among them it reads one message of that peer a second
meanwhile. Of WITHHELD are what it does not send though it offers it, to anybody.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

if __name__ == "__main__":  # run as a node: the kits are beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hostile.distinct import KINDS as TYPES
from hostile.distinct import Flood
from hostile.invented import invented

from atoll.collectives import messages as m
from atoll.collectives.exchange.outbox import Flow, Outbox, Outgoing, Sender
from atoll.collectives.group import Certified, Entry, Member
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.pace import Pace
from atoll.collectives.script_swarm import Call
from atoll.node.__main__ import main
from atoll.node.run.membership_records import Record, Records, SignedRecord, encode, sign_record
from atoll.node.service.bans import MESSAGE
from atoll.node.service.ports import DOMAIN, RunPorts
from atoll.node.service.run import ASK_MANIFEST, RunService
from atoll.node.session.actions import ROUND_PREFIX, main_log
from atoll.node.session.session import MEMBERSHIP
from atoll.security.identity import Identity

RATE, AT_ONCE = 4000, 100
MUCH = 1 << 47
HEARD = 500  # messages of others that are kept to be replayed
SLOW, SLOW_S = "slow", 1.0
FLAP_S = 0.1
BURN, BURNT_S = "burn@", 0.02
OTHER_RUN = RunId("o" * 26)
Make = Callable[[int], bytes]


class Liar:
    """What one run of this node says that it should not."""

    def __init__(self, run: RunService) -> None:
        self.run = run
        self.heard: deque[bytes] = deque(maxlen=HEARD)
        self.lying_pace = False
        self.slow_to: PeerId | None = None

    # ---- what it may say
    def envelope(self, body: m.Body, *, log: str = "", round_: int | None = None) -> bytes:
        """A message of the run's log, or of another."""
        machine = self.machine
        return ROUND_PREFIX + m.encode(
            m.Envelope(
                log or self.session.log,
                machine.round if round_ is None else round_,
                machine.me.incarnation,
                body,
            )
        )

    @property
    def session(self) -> Any:
        return self.run.session

    @property
    def machine(self) -> Any:
        return self.session.machine

    @property
    def entry(self) -> Entry:
        """The newest entry that is decided here."""
        return self.machine.journal.entries[-1].entry

    def maker(self, kind: str, victim: PeerId) -> Make:
        """What makes the n-th message of a kind."""
        if kind in DISTINCT:
            return self._distinct(kind)
        if kind in BODIES:
            return self._same(self.envelope(BODIES[kind](self)))
        if kind == "manifest":
            return self._same(ASK_MANIFEST)
        if kind == "ban":
            return self._same(MESSAGE + bytes(200))
        if kind == "records":
            return self._records
        if kind in REPLAYS:
            kept = list(self.heard) or [self.envelope(m.Fetch())]
            moved = [REPLAYS[kind](self, data) for data in kept]
            return lambda number: moved[number % len(moved)]
        if kind == "in_and_out":
            leave = self.envelope(m.Ready(self.machine.base, None, 0, True))
            return lambda number: self.envelope(m.Join()) if number % 2 else leave
        assert kind in OPERATIONS, kind
        return self._about_operations(kind)

    def _distinct(self, kind: str) -> Make:
        """Of one type, each unlike all before it, about the round that is open."""
        identity, numbers = self.run.node.identity, itertools.count()

        def make(number: int) -> bytes:
            flood = Flood(self.machine, self.machine.me, lambda data: identity.sign(DOMAIN, data))
            return self.envelope(flood.make(DISTINCT[kind], next(numbers)))

        return make

    @staticmethod
    def _same(data: bytes) -> Make:
        return lambda number: data

    def of_another_run(self, data: bytes) -> bytes:
        """The same message as it was said in another run; a membership record is one of this node's
        there.
        """
        if data[:1] == ROUND_PREFIX:
            told = m.decode(data[1:], self.run.node.identity.peer)
            return ROUND_PREFIX + m.encode(msgspec.structs.replace(told, log=main_log(OTHER_RUN)))
        identity, now_ms = self.run.node.identity, int(time.time() * 1000)
        record = Record(OTHER_RUN, identity.peer, now_ms, now_ms + 30_000)
        return MEMBERSHIP + encode(
            Records((sign_record(record, lambda payload: identity.sign(DOMAIN, payload)),))
        )

    def of_another_life(self, data: bytes) -> bytes:
        """The same message as an earlier life of its sender said it, or one to come."""
        if data[:1] != ROUND_PREFIX:
            return data
        told = m.decode(data[1:], self.run.node.identity.peer)
        life = max(0, told.incarnation + (1 if len(data) % 2 else -1))
        return ROUND_PREFIX + m.encode(msgspec.structs.replace(told, incarnation=life))

    def _records(self, number: int) -> bytes:
        """A record of somebody who has not signed it."""
        now_ms = int(time.time() * 1000)
        record = Record(self.run.run_id, Identity.generate().peer, now_ms + number, now_ms + 30_000)
        return MEMBERSHIP + encode(
            Records((SignedRecord(msgspec.msgpack.encode(record), bytes(64)),))
        )

    def _about_operations(self, kind: str) -> Make:
        """About ones that nobody called, another each few messages."""
        config, me, began = self.machine.config, self.machine.me.peer, time.time()

        plans = [invented(self.run.run_id, config, me, f"{began}/{number}") for number in range(64)]

        def make(number: int) -> bytes:
            found = plans[number % len(plans)]
            body: m.Body = m.PlanMessage(found)
            if kind == "op_prepare":
                body = m.Prepare(1 + number % 7)
            elif kind == "op_call":
                body = m.Ready(found.base, found.contributors[0].cid, 1, False)
            elif kind == "op_accept":
                body = m.Accept(0, self.proposal(found))
            return self.envelope(body, log=found.log, round_=1)

        return make

    def proposal(self, plan: Any) -> Entry:
        """That a plan came to something."""
        return msgspec.structs.replace(
            self.machine.journal.entries[0].entry,
            log=plan.log,
            round=1,
            base=plan.base,
            base_state=bytes(32),
            contributors=plan.contributors,
            parts=plan.parts,
            part_digests=tuple(bytes([7]) * 32 for _ in plan.parts),
            numel=plan.numel,
            chunk_elements=plan.chunk_elements,
            codec=plan.codec,
            reducer=plan.reducer,
            next_config=self.machine.config,
        )

    # ---- doing it
    async def obey(self, folder: Path) -> None:
        """Wait for orders."""
        done = 0
        while True:
            await trio.sleep(0.05)
            try:
                order = json.loads((folder / "order.json").read_text())
            except (OSError, ValueError):
                continue
            if order["number"] > done and self.machine is not None:
                done = order["number"]
                sent = await self.misbehave(
                    order["kind"], PeerId(order["victim"]), order["seconds"]
                )
                written = folder / "report.tmp"
                written.write_text(json.dumps({"number": done, "sent": sent}))
                written.rename(folder / "report.json")

    async def misbehave(self, kind: str, victim: PeerId, seconds: float) -> int:
        """How many messages, or deeds, came of it."""
        until = trio.current_time() + seconds
        deeds: dict[str, Callable[[], Awaitable[int]]] = {
            "churn": lambda: self._churn(victim, until),
            "calls": lambda: self._call(until),
            "rates": lambda: self._boast(until),
            "blobs": lambda: self._unwanted(victim, until),
            "half_blobs": lambda: self._half(victim, until),
            **{each: lambda each=each: self._withhold(each, until) for each in WITHHELD},
        }
        if kind.startswith(BURN):
            return await self._burn(float(kind.removeprefix(BURN)), until)
        kinds, done = kind.split("+"), list[int]()
        makes = [self.maker(each, victim) for each in kinds if each not in deeds and each != SLOW]
        if not makes and not deeds.keys() & kinds:
            makes = [self.envelope_of_all]

        async def flood() -> int:
            sent = await self._flood(
                victim, lambda number: makes[number % len(makes)](number // len(makes)), until
            )
            await self.run.node.network.close_topic(
                self.run.run_id, victim
            )  # what is still on its way is none of the next order
            return sent

        async def do(deed: Callable[[], Awaitable[int]]) -> None:
            done.append(await deed())

        self.slow_to = victim if SLOW in kinds else None
        async with trio.open_nursery() as nursery:
            for deed in [*(deeds[each] for each in kinds if each in deeds), *[flood] * bool(makes)]:
                nursery.start_soon(do, deed)
        self.slow_to = None
        return sum(done)

    def envelope_of_all(self, number: int) -> bytes:
        """Asks for something else each time, all of which is answered."""
        asks = ("get", "get_unknown", "ask_state", "fetch")
        return self.envelope(BODIES[asks[number % len(asks)]](self))

    async def _burn(self, share: float, until: float) -> int:
        """Processor time and no messages: ``share`` of a core beside what the node takes anyhow."""
        while trio.current_time() < until:
            began = time.thread_time()
            while time.thread_time() - began < BURNT_S * min(share, 0.95):
                pass
            await trio.sleep(BURNT_S * max(0.05, 1.0 - share))
        return 1

    async def _boast(self, until: float) -> int:
        self.lying_pace = True
        await trio.sleep_until(until)
        self.lying_pace = False
        return 1

    async def _withhold(self, kind: str, until: float) -> int:
        WITHHOLDING.begin(kind)
        await trio.sleep_until(until)
        WITHHOLDING.end()
        return 1

    async def _flood(self, victim: PeerId, make: Make, until: float) -> int:
        network, topic = self.run.node.network, self.run.run_id
        counters = network._streams.counters
        before = counters.messages_sent
        for number in itertools.count():
            if trio.current_time() >= until:
                break
            outbox = network._streams._outboxes.get((victim, topic))
            if outbox is None or len(outbox._queue) < AT_ONCE:
                for index in range(AT_ONCE):
                    network.send(topic, victim, make(number * AT_ONCE + index))
            await trio.sleep(AT_ONCE / RATE)
        return counters.messages_sent - before

    async def _churn(self, victim: PeerId, until: float) -> int:
        """Ten times a second it leaves the topic and comes back."""
        network, topic, count = self.run.node.network, self.run.run_id, 0
        while trio.current_time() < until:
            await network.close_topic(topic, victim)
            network.send(topic, victim, self.envelope(m.Fetch()))
            await trio.sleep(FLAP_S)
            count += 1
        return count

    async def _call(self, until: float) -> int:
        """Operations of a million elements that it alone calls, one after another."""
        count, vector = 0, torch.ones(1 << 20)
        began = time.time()
        while trio.current_time() < until:
            name, count = f"alone/{began}/{count}", count + 1
            with_cid = name.encode()[-16:].rjust(16, b".")
            call = Call(name, codec="fp32")
            self.run.guard(
                lambda call=call, cid=with_cid: self.session.operations.start(
                    trio.current_time(), call, vector.numel(), vector, cid
                )
            )
            self.run.guard(lambda: self.session.settle(trio.current_time()))
            await trio.sleep(0.2)
            self.session.operations.abandon(trio.current_time(), name)
        return count

    async def _unwanted(self, victim: PeerId, until: float) -> int:
        """Content that nobody asked for, over the lane."""
        exchange, data, count = self.run.node.engine.exchange, memoryview(bytes(16 << 20)), 0
        while trio.current_time() < until:
            name = count.to_bytes(32, "big")
            exchange.provide(name, data, 1 << 18)
            exchange.send_blob(victim, name, ((0, MUCH),))
            await trio.sleep(0.2)
            exchange.withdraw(name)
            count += 1
        return count

    async def _half(self, victim: PeerId, until: float) -> int:
        """Content over the lane, which ends in the midst of it, ten times a second; then there is
        another lane.
        """
        engine, data, count = self.run.node.engine, memoryview(bytes(64 << 20)), 0
        while trio.current_time() < until:
            name = count.to_bytes(32, "little")
            engine.exchange.provide(name, data, 1 << 22)
            engine.exchange.send_blob(victim, name, ((0, MUCH),))
            await trio.sleep(FLAP_S)
            engine.drop_lane(victim)
            engine.exchange.withdraw(name)
            self.run.node.network.ensure_lane(victim)
            count += 1
        return count


class Withholding:
    """What of rounds this node does not send: parts of its contribution, results of the parts that
    it owns, or both; but one record for each peer every ``EACH_S`` where it trickles.
    """

    EACH_S = 0.5

    def __init__(self) -> None:
        self.kind = ""
        self.due: dict[PeerId, float] = {}

    def begin(self, kind: str) -> None:
        self.due.clear()
        self.kind = kind

    def end(self) -> None:
        self.kind = ""

    def next_of(
        self, sender: Sender, flow: Flow, box: Outbox, peer: PeerId, lane: int
    ) -> Outgoing | None:
        """In place of `Sender._next_of`, in the engine's thread."""
        how, _, what = self.kind.partition("_")
        if not how:
            return HONEST_NEXT(sender, flow, box, peer, lane)
        found = None
        if what:  # the other is sent as ever
            held = "parts" if what == "parts" else "results"
            kept = getattr(flow, held)
            setattr(flow, held, OrderedDict())
            found = HONEST_NEXT(sender, flow, box, peer, lane)
            kept.update(getattr(flow, held))
            setattr(flow, held, kept)
        now = time.monotonic()
        if found is None and how == "trickle" and now >= self.due.get(peer, 0.0):
            found = HONEST_NEXT(sender, flow, box, peer, lane)
            if found is not None:
                self.due[peer] = now + self.EACH_S
        return found


HONEST_NEXT = Sender._next_of
WITHHOLDING = Withholding()
WITHHELD = [f"{how}{what}" for how in ("hold", "trickle") for what in ("", "_parts", "_results")]
"""What only members can, and offer to do."""
REPLAYS: dict[str, Callable[[Liar, bytes], bytes]] = {
    "replays": lambda liar, data: data,
    "other_runs": Liar.of_another_run,
    "other_lives": Liar.of_another_life,
}
"""What was heard, said once more: as it was, or as of elsewhere."""
BODIES: dict[str, Callable[[Liar], m.Body]] = {
    "get": lambda liar: m.Get(liar.entry.hash(), ()),
    "get_chunks": lambda liar: m.Get(liar.entry.hash(), ((0, MUCH),) * 4096),
    "get_unknown": lambda liar: m.Get(bytes(32), ()),
    "ask_state": lambda liar: m.AskState(),
    "fetch": lambda liar: m.Fetch(),
    "join": lambda liar: m.Join(),
    "offer": lambda liar: m.Offer(bytes(32), bytes(m.MAX_HASHES), None),
    "gone": lambda liar: m.Gone(bytes(32)),
    "catch": lambda liar: m.Catch((Certified(liar.entry, ()),), 1, 1),
    "trial": lambda liar: m.Trial(bytes(16), bytes(m.MAX_HASHES)),
    "sample": lambda liar: m.Sample(bytes(16), 0, bytes(m.MAX_SAMPLE_BYTES)),
    "retained": lambda liar: m.Retained(bytes(16), bytes(32), bytes(64)),
    "ready": lambda liar: m.Ready(liar.machine.base, None, 0, False),
    "prepare": lambda liar: m.Prepare(MUCH),
    "plan": lambda liar: m.PlanMessage(
        invented(liar.run.run_id, liar.machine.config, liar.machine.config[0].peer, "main")
    ),
    "missing": lambda liar: m.Missing(bytes(16), ((bytes(16), ((0, MUCH),) * 4096),)),
    "need": lambda liar: m.Need(bytes(16), ((0, MUCH),) * 4096),
    "accepted": lambda liar: m.Accepted(0, bytes(32), bytes(64)),
    "seal": lambda liar: m.Seal(bytes(32), (Member("x", 1),), bytes(64)),
    "turn": lambda liar: m.Turn(MUCH),
}
DISTINCT = {f"distinct_{kind.__name__.lower()}": kind for kind in TYPES}
"""All types of messages about a round. What of them breaks a rule shuts the sender out."""
OPERATIONS = ("op_plan", "op_prepare", "op_call", "op_accept")
IN_AND_OUT = "in_and_out"
BREACHES = [
    *("join", "catch", "prepare", "plan", "accepted", "fork", "consent", "seal", "turn"),
    *("ban", "records", "other_runs"),
]
"""Of which some messages break a rule: after 16 of these the sender is not listened to for a
minute, whatever it says.
"""
KINDS = [
    kind
    for kind in [*BODIES, "manifest", *REPLAYS, SLOW, "churn", "blobs", "half_blobs"]
    if kind not in BREACHES
]
"""What anybody who is admitted can do without breaking a rule."""
OF_MEMBERS = [*OPERATIONS, "calls", "rates", IN_AND_OUT]
"""What only members can."""


def corrupt(folder: Path) -> None:
    """Every run of this node gets a liar."""
    honest, on_message, pace = RunService._drive, RunService._on_message, RunPorts.pace
    unread = RunPorts.unread
    made: dict[int, Liar] = {}

    async def drive(self: RunService) -> None:
        liar = made[id(self)] = Liar(self)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.obey, folder)
            await honest(self)

    def hear(self: RunService, peer: PeerId, data: bytes) -> float:
        if (liar := made.get(id(self))) is not None:
            liar.heard.append(data)
        pause = on_message(self, peer, data)
        return max(pause, SLOW_S) if liar is not None and liar.slow_to == peer else pause

    def boast(self: RunPorts) -> Pace:
        liar = made.get(id(self._run))
        if liar is None or not liar.lying_pace:
            return pace(self)
        return pace(self)._replace(up=1 << 40, down=1 << 40, proven=1 << 40)

    def looks(self: RunPorts, peer: PeerId) -> bool:
        """Who reads a flood slowly would be left out of the rounds that this node convenes, as any
        convener may do at any time: it is not, so that what is lost is lost to the flood."""
        return id(self._run) not in made and unread(self, peer)

    Sender._next_of = lambda *args: WITHHOLDING.next_of(*args)  # type: ignore[method-assign]
    RunPorts.unread = looks  # type: ignore[method-assign]
    RunService._drive = drive  # type: ignore[method-assign]
    RunService._on_message = hear  # type: ignore[method-assign]
    RunPorts.pace = boast  # type: ignore[method-assign]


if __name__ == "__main__":
    corrupt(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
