"""A member that hears what liars say, message by message."""

from __future__ import annotations

import msgspec
from kits.rounds.swarm import Options, SimSwarm

from atoll.collectives import messages as m
from atoll.collectives.group import NO_READING, Contributor, Entry, Member, Part, Plan, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.byzantine.signed import claim_payload, pledge_payload, slot_payload
from atoll.node.session import Session
from atoll.node.session.events import Equivocated, PeerMisbehaved
from atoll.node.simulation.process import sign_as


class Scene:
    """Five members in an open round; the test speaks for all but the one that hears. ``owner``
    convenes ballot 0, ``next_`` ballot 1.
    """

    def __init__(self) -> None:
        swarm = SimSwarm(11, Options(peers=(5, 5), faults=(), rounds=50, lying=1, lies=()))
        swarm._start()
        swarm.world.run(until=4.0)
        machines = {
            peer: member.process.session.machine
            for peer, member in swarm.members.items()
            if member.process is not None
        }
        top = max(machine.round for machine in machines.values() if machine is not None)
        self.swarm, self.events, self.sent = swarm, list[object](), list[tuple[PeerId, m.Body]]()
        for peer, machine in machines.items():  # one that convenes none of the first ballots
            assert machine is not None
            self.order = [machine.convener_of(ballot) for ballot in range(5)]
            if (
                machine.round == top
                and peer not in [owner.peer for owner in self.order[:3]]
                and not machine.open.applying
            ):
                break
        process = swarm.members[peer].process
        assert process is not None
        assert machine is not None
        self.session: Session = process.session
        self.machine = machine
        machine._open(swarm.world.now)  # nothing that was said so far
        machine.open.born -= 60.0  # long ago: an entry without contributors comes late in its round
        machine.journal.promised, machine.journal.accepted, machine.journal.echoed = -1, None, None
        machine.root = machine.root or b"r" * 32
        machine.actions.suspected = lambda who: False  # type: ignore[method-assign]
        self.session.ports.emit = self.events.append  # type: ignore[method-assign]
        self.session.ports.send = self._send  # type: ignore[method-assign]
        self.session.ports.after_sync = lambda act: False  # type: ignore[method-assign]  # at once
        self.others = [who for who in machine.config if who != machine.me]

    def _send(self, peer: PeerId, data: bytes) -> None:
        if data[:1] == b"R":
            self.sent.append((peer, m.decode(data[1:], peer).body))

    def hear(self, who: Member, body: m.Body) -> list[object]:
        """What is told after this message."""
        self.events.clear()
        self.sent.clear()
        envelope = m.Envelope(self.session.log, self.machine.round, who.incarnation, body)
        self.session.on_message(self.swarm.world.now, who.peer, b"R" + m.encode(envelope))
        return [event for event in self.events if isinstance(event, Equivocated | PeerMisbehaved)]

    def said(self, kind: type[m.Body]) -> list[m.Body]:
        return [body for _, body in self.sent if type(body) is kind]

    @property
    def slot(self) -> tuple[str, str, int, bytes]:
        return self.machine.slot

    def claim(self, who: Member, **changes: object) -> tuple[Member, m.Claim]:
        claim = msgspec.structs.replace(
            m.Claim(self.machine.base, None, 0, NO_READING, False, (), ()), **changes
        )
        return who, msgspec.structs.replace(
            claim, signature=sign_as(who.peer, claim_payload(*self.slot[:3], who, claim))
        )

    def entry(self, **changes: object) -> Entry:
        machine, shape = self.machine, self.machine.shape
        assert machine.root is not None
        blank = Entry(
            machine.log,
            machine.round,
            machine.base,
            machine.root,
            (),
            (),
            (),
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            shape.reducer,
            machine.config,
        )
        return msgspec.structs.replace(blank, **changes)

    def propose(
        self, entry: Entry, ballot: int = 0, *claims: tuple[Member, m.Claim], **changes: object
    ) -> m.Propose:
        owner = self.machine.convener_of(ballot)
        signature = sign_as(owner.peer, slot_payload("propose", *self.slot, ballot, entry.hash()))
        return msgspec.structs.replace(
            m.Propose(ballot, entry, claims, (), (), signature), **changes
        )

    def plan(self, contributors: tuple[Contributor, ...], *parts: Part) -> Plan:
        machine, shape = self.machine, self.machine.shape
        whole = (Part(machine.me.peer, 0, -(-shape.numel // shape.chunk_elements)),)
        return Plan(
            machine.log,
            machine.round,
            0,
            1,
            machine.base,
            contributors,
            parts or whole,
            shape.numel,
            shape.chunk_elements,
            shape.codec,
        )

    def echo(self, who: Member, ballot: int, digest: bytes, proposed: bytes = b"") -> m.Echo:
        return m.Echo(
            ballot,
            digest,
            sign_as(who.peer, slot_payload("echo", *self.slot, ballot, digest)),
            proposed,
        )

    def pledged(self, who: Member, ballot: int, at: int = -1, digest: bytes = b"") -> m.Pledged:
        return m.Pledged(
            who, at, digest, sign_as(who.peer, pledge_payload(*self.slot, ballot, at, digest))
        )

    def proof(self, ballot: int, digest: bytes, count: int = 4) -> tuple[Vote, ...]:
        return tuple(
            Vote(who, ballot, self.echo(who, ballot, digest).signature)
            for who in self.machine.config[:count]
        )


def reasons(events: list[object]) -> str:
    return "; ".join(event.reason for event in events if isinstance(event, PeerMisbehaved))
