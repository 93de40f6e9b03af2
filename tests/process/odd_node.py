"""A node with something odd about it, for tests: ``odd_node.py WHAT [arguments of python -m
atoll.node]``.

version   it speaks another version of the protocol
codec     it is of a release that knows no fp32
defect    its sessions fail with an exception nobody expects, as soon as there is a file ``defect``
          in the home
job       a job in its worker thread does
engine    its data plane does
install   taking over a fetched state does
fsize     it can write no byte to any file meanwhile
lanes     it keeps no lane that it does not need now, as in a very large configuration
aggregate in a run with BTARD, it states another aggregate of its part than it has, from the second
          step on
liar      it echoes, in a run that bears it, another value beside each
clock     its clock is two hours ahead
adder     of the parts that it owns it adds a thousand to each value of the sum, and it plans itself as
          the owner of everything
hider     it hides its plan from one member, says of the bytes that others have reduced for it that
          a contribution of another is not in them, and falls silent for the rest of the round
copier    in a run with [secure] it gives the log another mean than all have unmasked, as owner of
          parts and as convener
undrawn   it takes itself and all others for drawn in every round of a run that asks some only
patient   leaving a run, it would wait for an hour
tap       each masked vector that it hands over is a line of the file ATOLL_TEST_TAP
counting  nothing but the reference count frees memory: no garbage collector; and operations are
          soon forgotten
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from atoll.collectives import messages as m
from atoll.collectives.exchange import Exchange
from atoll.collectives.exchange.reduction import ChunkReducer
from atoll.collectives.exchange.slot import PlanState
from atoll.collectives.group import Contributor, Entry
from atoll.collectives.modes.byzantine.acceptor import ByzantineAcceptor
from atoll.collectives.modes.byzantine.convener import ByzantineConvener
from atoll.collectives.modes.byzantine.judge import Judge
from atoll.collectives.modes.byzantine.signed import slot_payload
from atoll.collectives.round import RoundMachine, machine
from atoll.node.__main__ import main
from atoll.node.manifest import reading
from atoll.node.modes.operations import operations
from atoll.node.modes.secure.rounds import SecureRounds
from atoll.node.net.measuring import Measuring
from atoll.node.net.network import PeerNetwork
from atoll.node.service import lanes, scripts
from atoll.node.service import node as service
from atoll.node.session import Session
from atoll.node.session.actions import LogActions
from atoll.node.session.replica import ModelReplica
from atoll.security.btard.attempt import Attempt
from atoll.security.btard.draw import aggregate_commitment
from atoll.security.btard.messages import Body, Kind, Result


def count_vectors() -> None:
    """What the data plane is given may have been sent, whole or in part."""
    start = SecureRounds._start

    def counted(self: SecureRounds, now: float, masking: Any, given: Any, found: Any) -> None:
        with open(os.environ["ATOLL_TEST_TAP"], "a") as tap:
            tap.write(f"{masking.binding.round} {given[0].hex()}\n")
        start(self, now, masking, given, found)

    SecureRounds._start = counted  # type: ignore[method-assign]


def defective() -> bool:
    """Whether the test wants it to fail now."""
    return (Path(os.environ["ATOLL_TEST_DEFECT"])).exists()


def fail_in(owner: Any, name: str) -> None:
    """Let a method fail when it is wanted."""
    method = getattr(owner, name)

    def failing(*args: Any, **options: Any) -> Any:
        if defective():
            raise ZeroDivisionError("a defect made for this test")
        return method(*args, **options)

    setattr(owner, name, failing)


def limit_in(owner: Any, name: str) -> None:
    """Let every write to a file fail with EFBIG while it is wanted."""
    method = getattr(owner, name)

    def limited(*args: Any, **options: Any) -> Any:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if defective() else hard, hard))
        return method(*args, **options)

    setattr(owner, name, limited)


def echo_twice() -> None:
    """Let it sign two echoes for one ballot while that is wanted."""
    honest = ByzantineAcceptor._send_echo

    def both(self: ByzantineAcceptor, ballot: int, entry: Entry) -> None:
        honest(self, ballot, entry)
        if defective():
            view, digest = self.view, b"another value".ljust(32)
            signature = view.actions.sign(slot_payload("echo", *view.slot, ballot, digest))
            view.broadcast(m.Echo(ballot, digest, signature, b""))

    ByzantineAcceptor._send_echo = both  # type: ignore[method-assign]


def add_to_sums() -> None:
    """Let its sums be wrong, and its plans unfair, while that is wanted."""
    reduce, new_plan, fair = ChunkReducer.reduce, ByzantineConvener._new_plan, Judge.fair

    def wrong(self: ChunkReducer, state: PlanState, chunk: int, own: Any, out: Any) -> Any:
        found = reduce(self, state, chunk, own, out)
        if isinstance(found, list) and state.job(chunk).owned and defective():
            codec, values = state.slot.results.codec(chunk), torch.empty(out.elements)
            codec.decode(out, values)
            codec.encode(values.add_(1000.0), out)
        return found

    def greedy(self: ByzantineConvener, now: float, offers: list[Contributor]) -> None:
        if defective():
            self.slow |= set(self.view.others)
            self._fair_share = lambda *_: None  # type: ignore[method-assign]
        new_plan(self, now, offers)

    ChunkReducer.reduce = wrong  # type: ignore[method-assign]
    ByzantineConvener._new_plan = greedy  # type: ignore[method-assign]
    Judge.fair = lambda self, bound: defective() or fair(self, bound)  # type: ignore[method-assign]


def hide_plans() -> None:
    """Let it play, in each round whose first ballot it convenes while that is wanted, with a plan
    that one member never sees.
    """
    send, offers = LogActions.send, RoundMachine.offers
    said: dict[int, Entry] = {}

    def plays(machine: RoundMachine) -> bool:
        enough = len(machine.config) >= 4 and machine.convener_of(0) == machine.me
        return machine.round in said or (defective() and enough and machine.ballot == 0)

    def without_one(self: RoundMachine) -> list[Contributor]:
        found = offers(self)
        return (
            [each for each in found if each.member.peer != hidden(self)] if plays(self) else found
        )

    def hidden(machine: RoundMachine) -> str:
        return min(machine.others)

    def bent(machine: RoundMachine, body: m.Body) -> m.Body | None:
        """What it says instead; None for nothing."""
        slot = machine.slot
        match body:
            case m.Propose(ballot=0) if machine.round in said:
                entry = said[machine.round]
                signature = machine.actions.sign(slot_payload("propose", *slot, 0, entry.hash()))
                return replace(body, entry=entry, signature=signature)
            case m.Echo(ballot=0) if machine.round in said:
                digest = said[machine.round].hash()
                return m.Echo(
                    0, digest, machine.actions.sign(slot_payload("echo", *slot, 0, digest)), b""
                )
            case _:
                return None if machine.round in said else body

    def relabel(machine: RoundMachine) -> None:
        """What it echoes itself first, and then proposes, has one contributor less than its bytes."""
        echoed = machine.journal.echoed
        if echoed is None or echoed[0] > 0 or not echoed[1].contributors:
            return
        own = [each for each in echoed[1].contributors if each.member == machine.me]
        rest = [each for each in echoed[1].contributors if each.member != machine.me]
        kept = tuple(sorted((*own, *rest[1:]), key=lambda each: each.member))
        said.setdefault(machine.round, replace(echoed[1], contributors=kept))

    def lie(self: LogActions, peer: Any, log: str, round_: int, body: m.Body) -> None:
        machine = self.session.machine
        if machine is None or round_ != machine.round or peer == machine.me.peer:
            return send(self, peer, log, round_, body)
        if not plays(machine):
            return send(self, peer, log, round_, body)
        if isinstance(body, m.PlanMessage) and peer == hidden(machine):
            return None
        relabel(machine)
        first = bent(machine, body)
        if first is None:
            return None
        send(self, peer, log, round_, first)
        if isinstance(first, m.Echo) and machine.round in said:
            signature = machine.actions.sign(
                slot_payload("vote", *machine.slot, 0, first.entry_hash)
            )
            send(self, peer, log, round_, m.Accepted(0, first.entry_hash, signature))
        return None

    LogActions.send = lie  # type: ignore[method-assign]
    RoundMachine.offers = without_one  # type: ignore[method-assign]


def state_another_aggregate() -> None:
    """Let the first value of its part be off by a hundredth, once the first step is over."""
    honest = Attempt.say

    def wrong(self: Attempt, now: float, body: Body) -> None:
        if isinstance(body, Result) and self.context.step > 0:
            held = self.vectors.held[Kind.AGGREGATE, self.me, 0]
            held[0] += 0.01
            body = replace(
                body, aggregate=aggregate_commitment(self.context, self.roster[self.me], held)
            )
        honest(self, now, body)

    Attempt.say = wrong  # type: ignore[method-assign]


def replace_the_mean() -> None:
    """Let the mean that it gives to the log, and makes results of, be off by seven while that is
    wanted.
    """
    # here: only after the session's modules
    from atoll.node.modes.secure.rounds import SecureRounds

    honest, told = SecureRounds._give, set[bytes]()

    def lie(self: SecureRounds, now: float) -> None:
        assert self.mean is not None
        cid, mean, _ = self.mean
        if defective() and cid not in told:
            told.add(cid)
            mean += 7.0
        honest(self, now)

    SecureRounds._give = lie  # type: ignore[method-assign]


def draw_all() -> None:
    """Let it contribute to every round, and plan with whoever offers something."""
    machine.draw_members = lambda run, base, config, sample: config


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "aggregate":
        state_another_aggregate()
    if what == "version":
        (PeerNetwork.__init__.__kwdefaults__ or {})["version"] = 1
    elif what == "codec":
        reading.CODECS = tuple(codec for codec in reading.CODECS if codec != "fp32")
    elif what == "defect":
        fail_in(Session, "tick")
    elif what == "job":
        fail_in(ModelReplica, "apply")
    elif what == "install":
        fail_in(ModelReplica, "install")
    elif what == "lanes":
        lanes.KEPT, lanes.HOLD_S = 0, 0.5
    elif what == "liar":
        echo_twice()
    elif what == "clock":
        right = time.time
        time.time = lambda: right() + 7200
        Measuring.__init__.__defaults__ = (time.time,)
    elif what == "adder":
        add_to_sums()
    elif what == "hider":
        hide_plans()
    elif what == "copier":
        replace_the_mean()
    elif what == "undrawn":
        draw_all()
    elif what == "patient":
        scripts.LEAVE_S = service.DRAIN_S = service.LEAVE_S = 3600.0
    elif what == "tap":
        count_vectors()
    elif what == "counting":
        gc.disable()
        operations.LIFETIME_S = 2.0
    elif what == "fsize":
        limit_in(Session, "tick")
    elif what == "engine":
        fail_in(Exchange, "work")
    sys.exit(main(sys.argv[2:]))
