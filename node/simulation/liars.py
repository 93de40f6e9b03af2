"""Members that lie, in virtual time: real nodes whose control messages are bent on the way out. What they sign is theirs; nobody can forge.

Lies begin once the run is founded: until then the organiser's member is believed, and bears no liar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal, get_args

import msgspec
from blake3 import blake3

from ...collectives import messages as m
from ...collectives.group import BUTTERFLY, LAST_BALLOT, Entry, Member, least_members
from ...collectives.identifiers import PeerId
from ...collectives.round import Kind, RoundMachine, claim_payload, pledge_payload, slot_payload
from .process import NodeProcess

Lie = Literal[
    "equivocate",
    "twice",
    "promise",
    "withhold",
    "evict",
    "forge",
    "turns",
    "plans",
    "replay",
    "garble",
]
LIES: tuple[Lie, ...] = get_args(Lie)
REMEMBERED = 200


class LyingProcess(NodeProcess):
    """A node of a liar. All ``lies`` are told, or of all there are as many as the seed says; ``tell`` hears of each."""

    def __init__(
        self, *args: Any, lies: tuple[Lie, ...] = LIES, tell: Callable[[str], None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.chance = Random(self.world.stream(f"lies/{self.peer}").random())
        self.lies = {lie for lie in lies if lies != LIES or self.chance.random() < 0.5}
        self.heard: list[bytes] = []
        self.met = Counter[PeerId]()  # how often a peer has come back
        self._tell = tell
        bent: dict[type[Any], Callable[[RoundMachine, PeerId, Any], list[m.Body]]] = {
            m.Propose: self._propose,
            m.Echo: self._echo,
            m.Accepted: self._vote,
            m.Pledge: self._pledge,
            m.Claim: self._claim,
            m.PlanMessage: self._plan,
        }
        self._bent = bent

    def _deliver(self, sender: PeerId, channel: str, payload: Any) -> None:
        if channel == "control" and payload[:1] == b"R":
            self.heard = [*self.heard[-REMEMBERED:], payload]
        super()._deliver(sender, channel, payload)

    def link(self, peer: PeerId, up: bool) -> None:
        """Who comes back may have forgotten what it was told."""
        self.met[peer] += up and not self.frozen  # else it is told again at the thaw
        super().link(peer, up)

    def send(self, peer: PeerId, data: bytes) -> None:
        """Send a control message, or something else."""
        machine = self._machine(data)
        if machine is None:
            return super().send(peer, data)
        envelope = m.decode(data[1:], self.peer)
        for body in self._said(machine, peer, envelope.body):
            super().send(peer, b"R" + m.encode(msgspec.structs.replace(envelope, body=body)))
        if "replay" in self.lies and self.heard and self.chance.random() < 0.05:
            self._tell("lie: replay")
            super().send(peer, self.chance.choice(self.heard))
        return None

    def _machine(self, data: bytes) -> RoundMachine | None:
        """That of the message's log, once there are members enough."""
        if data[:1] != b"R":
            return None
        log = m.decode(data[1:], self.peer).log
        machine = next(
            (session.machine for session in self.run.sessions if session.log == log), None
        )
        founded = (
            machine is not None
            and machine.is_member
            and len(machine.config) >= least_members(machine.lying)
        )
        return machine if founded else None

    def _said(self, machine: RoundMachine, peer: PeerId, body: m.Body) -> Iterator[m.Body]:
        bend = self._bent.get(type(body))
        if (
            "withhold" in self.lies
            and bend is not None
            and self._other_side(machine, peer, "withhold")
            and self.chance.random() < 0.8
        ):
            self._tell("lie: nothing said")
            return
        said = bend(machine, peer, body) if bend is not None else [body]
        if "garble" in self.lies and bend is not None and self.chance.random() < 0.1:
            self._tell("lie: signature")
            said = [
                msgspec.structs.replace(one, signature=b"?" * 32)
                if hasattr(one, "signature")
                else one
                for one in said
            ]
        yield from said
        if "turns" in self.lies and self.chance.random() < 0.1:
            self._tell("lie: turn")
            ballot = self.chance.choice((machine.ballot + 9, LAST_BALLOT))
            while machine.convener_of(ballot) != machine.me:
                ballot -= 1
            yield from (m.Turn(ballot), m.Prepare(ballot))

    def _other_side(self, machine: RoundMachine, peer: PeerId, why: str) -> bool:
        """Liars who agree on it split the others in two, anew in each round."""
        return blake3(f"{why}/{machine.log}/{machine.round}/{peer}".encode()).digest()[0] % 2 == 0

    # ---- what is said in the place of what is so
    def _slot(self, kind: Kind, machine: RoundMachine, ballot: int, digest: bytes) -> bytes:
        return self.sign(slot_payload(kind, *machine.slot, ballot, digest))

    def _propose(self, machine: RoundMachine, peer: PeerId, body: m.Propose) -> list[m.Body]:
        entry, plot = (
            body.entry,
            self.place.plot.setdefault((machine.log, machine.round, body.ballot), {}),
        )
        other = self._other_side(machine, peer, "equivocate") ^ bool(self.met[peer] % 2)
        if "equivocate" in self.lies and entry.contributors and not body.proof and other:
            entry = msgspec.structs.replace(
                entry, contributors=(), parts=(), part_digests=(), topology=BUTTERFLY
            )
        dice = Random(f"{machine.log}/{machine.round}/{body.ballot}")  # one lie for all of them
        if "evict" in self.lies and dice.random() < 0.5 and len(entry.next_config) > 1:
            victim = dice.choice([member for member in entry.next_config if member != machine.me])
            entry = msgspec.structs.replace(
                entry, next_config=tuple(member for member in entry.next_config if member != victim)
            )
        if "forge" in self.lies and entry.contributors and dice.random() < 0.5:
            entry = self._forged(entry, dice)
        digest = entry.hash()
        plot.update({digest: entry, body.entry.hash(): body.entry})
        if entry != body.entry:
            self._tell("lie: another entry")
        lie = msgspec.structs.replace(
            body, entry=entry, signature=self._slot("propose", machine, body.ballot, digest)
        )
        return [lie, *self._twice(machine, body.ballot)]

    def _forged(self, entry: Entry, dice: Random) -> Entry:
        first, *rest = entry.contributors
        kind = dice.randrange(3)
        if kind == 0:
            first = msgspec.structs.replace(first, weight=1000 * first.weight)
        elif kind == 1:
            first = msgspec.structs.replace(first, cid=dice.randbytes(16))
        return msgspec.structs.replace(
            entry, contributors=(first, *rest) if kind < 2 else (first, first, *rest)
        )

    def _twice(self, machine: RoundMachine, ballot: int) -> list[m.Body]:
        """Echoes and votes for all that liars have proposed in a ballot."""
        plot = (
            sorted(self.place.plot.get((machine.log, machine.round, ballot), {}))
            if "twice" in self.lies
            else ()
        )
        echoes = [
            m.Echo(ballot, digest, self._slot("echo", machine, ballot, digest), b"")
            for digest in plot
        ]
        if len(plot) > 1:
            self._tell("lie: two values")
        return [
            *echoes,
            *(
                m.Accepted(ballot, digest, self._slot("vote", machine, ballot, digest))
                for digest in plot
            ),
        ]

    def _echo(self, machine: RoundMachine, peer: PeerId, body: m.Echo) -> list[m.Body]:
        early = [
            m.Accepted(
                body.ballot,
                body.entry_hash,
                self._slot("vote", machine, body.ballot, body.entry_hash),
            )
        ]
        return [body, *self._twice(machine, body.ballot), *(early if "twice" in self.lies else [])]

    def _vote(self, machine: RoundMachine, peer: PeerId, body: m.Accepted) -> list[m.Body]:
        return [body, *self._twice(machine, body.ballot)]

    def _pledge(self, machine: RoundMachine, peer: PeerId, body: m.Pledge) -> list[m.Body]:
        if "promise" not in self.lies:
            return [body]
        accepted, at, digest = None, -1, b""
        plot = [
            entry
            for at in range(body.ballot)
            for entry in self.place.plot.get((machine.log, machine.round, at), {}).values()
        ]
        if self.chance.random() < 0.7 and body.ballot > 0 and (plot or machine.open.known):
            entry = self.chance.choice(plot or list(machine.open.known.values()))
            accepted, at, digest = (
                m.Accepted1(body.ballot - 1, entry),
                body.ballot - 1,
                entry.hash(),
            )
        self._tell("lie: pledge")
        signature = self.sign(pledge_payload(*machine.slot, body.ballot, at, digest))
        return [msgspec.structs.replace(body, accepted=accepted, signature=signature)]

    def _claim(self, machine: RoundMachine, peer: PeerId, body: m.Claim) -> list[m.Body]:
        if "evict" not in self.lies:
            return [body]
        others = tuple(member for member in machine.config if member != machine.me)
        claim = msgspec.structs.replace(
            body, suspects=others, admits=(Member(PeerId("nobody"), 0),), signature=b""
        )
        self._tell("lie: claim")
        return [
            msgspec.structs.replace(
                claim,
                signature=self.sign(
                    claim_payload(machine.run, machine.log, machine.round, machine.me, claim)
                ),
            )
        ]

    def _plan(self, machine: RoundMachine, peer: PeerId, body: m.PlanMessage) -> list[m.Body]:
        if "plans" not in self.lies:
            return [body]
        plan = msgspec.structs.replace(
            body.plan, revision=body.plan.revision + self.chance.randrange(1000)
        )
        self._tell("lie: plan")
        if self.chance.random() < 0.5 and len(plan.contributors) > 1:
            plan = msgspec.structs.replace(plan, contributors=plan.contributors[:-1])
        return [m.PlanMessage(plan)]
