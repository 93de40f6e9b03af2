"""Members that lie, in virtual time: real nodes whose control messages are bent on the way out.
What they sign is theirs; nobody can forge.

Lies begin once the run is founded: until then the organiser's member is believed, and bears no
liar.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal, cast, get_args

import msgspec
import torch
from blake3 import blake3

from atoll.collectives import messages as m
from atoll.collectives.codecs.codec import EncodedChunk
from atoll.collectives.digest import chunk_hash, meaning, merkle_root
from atoll.collectives.exchange import header as record_header
from atoll.collectives.exchange.slot import PlanState
from atoll.collectives.group import (
    BUTTERFLY,
    LAST_BALLOT,
    Contributor,
    Entry,
    Member,
    least_members,
)
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes.byzantine.acceptor import ByzantineAcceptor
from atoll.collectives.modes.byzantine.signed import (
    Kind,
    account_payload,
    claim_payload,
    given_payload,
    pledge_payload,
    receipts_digest,
    reduced_payload,
    slot_payload,
)
from atoll.collectives.round import RoundMachine
from atoll.node.session.serving import part_digests, result_hashes
from atoll.node.simulation.process import NodeProcess, sign_as

from .bending import bent
from .checker import OTHER_BIT

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
    "subset",
    "superset",
    "weight",
    "hide",
    "hoard",
    "slander",
    "starve",
    "lives",
    "bend",
    "drip",
    "choose",
    "mute",
    "memory",
    "own",
    "add",
    "missum",
    "frame",
    "two",
    "unsigned",
]
LIES: tuple[Lie, ...] = get_args(Lie)
LATER: tuple[Lie, ...] = ("memory", "own", "add", "missum", "frame", "two", "unsigned")
"""Lies that draw from streams of their own, so that seeds from before tell the others as ever."""
REMEMBERED = 200
ADDED = 1000.0  # to each value of a sum
DRIP_S = 0.45  # between two records of one that drips: no reduction stands still for so short
WITHHELD: tuple[tuple[Lie, int, str], ...] = (
    ("hoard", record_header.RESULT, "result"),
    ("starve", record_header.PART, "contribution"),
)


class LyingProcess(NodeProcess):
    """A node of a liar. All ``lies`` are told, or of all there are as many as the seed says;
    ``tell`` hears of each.
    """

    def __init__(
        self, *args: Any, lies: tuple[Lie, ...] = LIES, tell: Callable[[str], None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.rng = Random(self.world.stream(f"lies/{self.peer}").random())
        drawn = {lie: self.world.stream(f"{lie}/{self.peer}") for lie in LATER}
        self.lies = {lie for lie in lies if lies != LIES or drawn.get(lie, self.rng).random() < 0.5}
        self.heard: list[bytes] = []
        self.met = Counter[PeerId]()  # how often a peer has come back
        self._tell = tell
        self.stands_by: dict[tuple[str, int, int], bytes] = {}
        """What it echoes and votes for in the place of what its own node does: by log, round and
        ballot.
        """
        # Chunks of contributions that it sends bent: by whom, cid and number, their hashes.
        self._others: dict[tuple[PeerId, bytes, int], bytes] = {}
        self.life = 0  # how many later ones it has asked in under
        self._asked_at = self._slandered_at = 0.0
        bent: dict[type[Any], Callable[[RoundMachine, PeerId, Any], list[m.Body]]] = {
            m.Reduced: self._states,
            m.Contributed: self._gives,
            m.Propose: self._propose,
            m.Echo: self._echo,
            m.Accepted: self._vote,
            m.Pledge: self._pledge,
            m.Claim: self._claim,
            m.PlanMessage: self._plan,
        }
        self._bent = bent

    def start(self, *args: Any, **kwargs: Any) -> None:
        super().start(*args, **kwargs)
        if "add" in self.lies and not self.ended:
            self._adds()

    def _adds(self) -> None:
        """Where it owns a part, its sum is another by a thousand in each value; and so is what it
        says of it.
        """
        reducer = self.plane._reducer
        honest = reducer.reduce

        def reduce(state: PlanState, chunk: int, own: Any, out: EncodedChunk) -> Any:
            found = honest(state, chunk, own, out)
            machine = self.session.machine
            if isinstance(found, tuple) or not state.job(chunk).owned or machine is None:
                return found
            if state.plan.log.startswith("op") or self._founding(machine):
                return found
            codec = state.slot.results.codec(chunk)
            values = torch.empty(out.elements)
            codec.decode(out, values)
            codec.encode(values.add_(ADDED), out)
            self._tell("lie: sum")
            return found

        reducer.reduce = reduce  # type: ignore[method-assign]

    def deliver(self, sender: PeerId, channel: str, payload: Any) -> None:
        if channel == "control" and payload[:1] == b"R":
            self.heard = [*self.heard[-REMEMBERED:], payload]
        super().deliver(sender, channel, payload)

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
            if "bend" in self.lies and type(body) in self._bent:
                body = self._bend(machine, peer, body)
            with contextlib.suppress(OverflowError):  # no number on the wire
                super().send(peer, b"R" + m.encode(msgspec.structs.replace(envelope, body=body)))
        if "replay" in self.lies and self.heard and self.rng.random() < 0.05:
            self._tell("lie: replay")
            super().send(peer, self.rng.choice(self.heard))
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
            and len(machine.config) >= least_members(machine.tolerated)
        )
        if founded and machine is not None and not hasattr(machine, "plotted"):
            self._plots(machine)
        return machine if founded else None

    def _plots(self, machine: RoundMachine) -> None:
        """Plans of this convener are over what it likes; what others claim does not bind it."""
        offers = machine.offers
        machine.plotted = True  # type: ignore[attr-defined]

        def chosen() -> list[Contributor]:
            found, dice = offers(), Random(f"plan/{machine.log}/{machine.round}")
            honest = [offer for offer in found if offer.member.peer not in self.place.liars]
            if not honest or machine.convener_of(machine.ballot) != machine.me:
                return found
            if "own" in self.lies:
                self._owns_all(machine)
            victim, others = dice.choice(honest), len(found) > machine.shape.least
            if "choose" in self.lies and others:
                self._tell("lie: contribution not planned")
                return [offer for offer in found if offer != victim]
            if "hide" in self.lies and len(found) > 2:  # those to whom the plan is shown
                hidden = self._hidden(machine)
                return [offer for offer in found if offer.member.peer not in hidden]
            if "superset" in self.lies and others and dice.random() < 0.7:
                return [offer for offer in found if offer != victim]
            if "weight" in self.lies and dice.random() < 0.7:
                self._tell("lie: weight")
                acceptor = cast("ByzantineAcceptor", machine.acceptor)
                acceptor.vouched = lambda offers: [  # type: ignore[method-assign]
                    offer for offer in offers if offer.cid in acceptor.offered
                ]
                acceptor.judge.why_not = lambda body, known: ""  # type: ignore[method-assign]
                false = msgspec.structs.replace(victim, weight=7 * victim.weight)
                return [false if offer == victim else offer for offer in found]
            return found

        machine.offers = chosen  # type: ignore[method-assign]

    def _owns_all(self, machine: RoundMachine) -> None:
        """The plan that is made now gives all parts to its convener, which follows it."""
        self._tell("lie: owner of everything")
        acceptor = cast("ByzantineAcceptor", machine.acceptor)
        machine.convening.slow |= {who.peer for who in machine.config} - {self.peer}
        machine.convening._fair_share = lambda *_: None  # type: ignore[method-assign]
        acceptor.judge.fair = lambda bound: True  # type: ignore[method-assign]

    def _states(self, machine: RoundMachine, peer: PeerId, body: m.Reduced) -> list[m.Body]:
        """As a witness it states another sum than it found, perhaps of other inputs."""
        plan = machine.open.plan
        if body.account is None or plan is None or not {"missum", "frame"} & self.lies:
            return [body]
        others = {at for at, part in enumerate(plan.parts) if part.owner != self.peer}
        dice = Random(f"missum/{machine.log}/{machine.round}")
        if dice.random() < 0.4:
            return [body]
        self._tell("lie: statement")
        parts = tuple(
            (at, digest if at not in others else blake3(digest).digest())
            for at, digest in body.parts
        )
        inputs = body.account.inputs
        if "frame" in self.lies:
            victim = dice.randrange(len(plan.contributors)) % len(inputs[0])  # of an older plan
            inputs = tuple(
                (*of[:victim], blake3(of[victim]).digest(), *of[victim + 1 :]) for of in inputs
            )
        payload = reduced_payload(machine.run, self.peer, body.meaning, parts)
        receipts = body.account.receipts
        account = account_payload(
            machine.run, self.peer, body.meaning, parts, inputs, receipts_digest(receipts)
        )
        return [
            m.Reduced(
                body.meaning,
                parts,
                self.sign(payload),
                m.Account(inputs, receipts, self.sign(account)),
            )
        ]

    def _gives(self, machine: RoundMachine, peer: PeerId, body: m.Contributed) -> list[m.Body]:
        """It signs for those to whom it sends another contribution what they get; or nothing that
        fits."""
        if not self._sends_other(machine, peer):
            return [body]
        if "unsigned" in self.lies:
            self._tell("lie: nothing signed")
            return []
        chunks = range(body.first, body.stop)
        hashes = [self._others.get((peer, body.cid, chunk)) for chunk in chunks]
        if None in hashes:  # they have not all gone out: it is asked again
            return []
        root = merkle_root([digest for digest in hashes if digest is not None])
        self._tell("lie: two signed")
        of = (body.cid, body.first, body.stop, root)
        return [m.Contributed(*of, self.sign(given_payload(*machine.slot, *of)))]

    def _bend(self, machine: RoundMachine, peer: PeerId, body: Any) -> Any:
        """One field of it is another, the signature is right; now and then, and for some of the
        others.
        """
        kind = type(body).__name__
        dice = Random(f"bend/{machine.log}/{machine.round}/{kind}/{self.peer}")
        if dice.random() < 0.5 or not self._other_side(machine, peer, kind):
            return body
        try:
            changed, what = bent(body, dice)
            match changed:
                case m.Propose():
                    digest = changed.entry.hash()
                    signature = self._slot("propose", machine, changed.ballot, digest)
                case m.Echo():
                    signature = self._slot("echo", machine, changed.ballot, changed.entry_hash)
                case m.Accepted():
                    signature = self._slot("vote", machine, changed.ballot, changed.entry_hash)
                case m.Claim():
                    signature = self.sign(
                        claim_payload(machine.run, machine.log, machine.round, machine.me, changed)
                    )
                case m.Pledge():
                    voted = changed.accepted
                    at, digest = (voted.ballot, voted.entry.hash()) if voted else (-1, b"")
                    signature = self.sign(pledge_payload(*machine.slot, changed.ballot, at, digest))
                case m.Contributed():
                    of = (changed.cid, changed.first, changed.stop, changed.root)
                    signature = self.sign(given_payload(*machine.slot, *of))
                case m.Reduced():
                    signature = self.sign(
                        reduced_payload(machine.run, self.peer, changed.meaning, changed.parts)
                    )
                    if (account := changed.account) is not None:
                        of = (changed.meaning, changed.parts, account.inputs)
                        digest = receipts_digest(account.receipts)
                        by = self.sign(account_payload(machine.run, self.peer, *of, digest))
                        account = msgspec.structs.replace(account, signature=by)
                        changed = msgspec.structs.replace(changed, account=account)
                case _:
                    signature = b""
            if signature:
                changed = msgspec.structs.replace(changed, signature=signature)
            m.encode(m.Envelope(machine.log, machine.round, 0, changed))
        except (TypeError, ValueError, OverflowError):
            return body
        self._tell("lie: bent")
        self._tell(f"lie: bent {kind}.{what.partition('.')[0]}")
        return changed

    def _pump(self, peer: PeerId) -> None:
        """Results of the own parts, and the own contribution, do not go to those from whom they are
        withheld.
        """
        machine = self.session.machine
        kept = machine is not None and {
            kind: what
            for lie, kind, what in WITHHELD
            if (lie in self.lies and self._other_side(machine, peer, lie))
            or ("mute" in self.lies and self._other_side(machine, peer, "mute"))
        }
        if machine is not None and self._sends_other(machine, peer):
            return self._send_other(peer)
        if machine is not None and "drip" in self.lies and not self._founding(machine):
            return self._drip(peer, kept or {})
        if kept:
            while (record := self.plane.next_record(peer)) is not None:
                if (what := kept.get(bytes(record.header)[1])) is not None:
                    self._tell(f"lie: {what} withheld")
                    continue
                self.network.send(
                    self.peer, peer, "record", (bytes(record.header), bytes(record.payload))
                )
            return
        super()._pump(peer)

    def _sends_other(self, machine: RoundMachine, peer: PeerId) -> bool:
        return (
            bool({"two", "unsigned"} & self.lies)
            and bool(machine.shape.witnesses)
            and not self._founding(machine)
            and self._other_side(machine, peer, "two")
        )

    def _send_other(self, peer: PeerId) -> None:
        """Its contribution is another one to some."""
        while (record := self.plane.next_record(peer)) is not None:
            payload = bytearray(record.payload)
            header = record_header.parse(bytes(record.header), self.peer)
            if header.kind == record_header.PART:
                payload[0] ^= OTHER_BIT
                self._others[peer, header.sub, header.chunk] = chunk_hash(payload)
                self._tell("lie: two contributions")
            self.network.send(self.peer, peer, "record", (bytes(record.header), bytes(payload)))

    def _drip(self, peer: PeerId, kept: dict[int, str]) -> None:
        """One record, and the next after a while."""
        while (record := self.plane.next_record(peer)) is not None:
            if bytes(record.header)[1] in kept:
                continue
            self._tell("lie: record dripped")
            self.network.send(
                self.peer, peer, "record", (bytes(record.header), bytes(record.payload))
            )
            self._pumps[peer] = self.world.after(DRIP_S, lambda: self._room(peer))
            return

    def _tick(self) -> None:
        super()._tick()
        machine = self.session.machine
        if self.ended or self.frozen or machine is None or self._founding(machine):
            return
        with self.alive():  # a trap may kill it while it speaks
            self._speak_up(self.world.now, machine)

    def _speak_up(self, now: float, machine: RoundMachine) -> None:
        """What it says unasked."""
        plan = machine.open.plan
        if "slander" in self.lies and plan is not None and now - self._slandered_at > 0.1:
            self._slandered_at = now
            others = [c.cid for c in plan.contributors if c.member.peer not in self.place.liars]
            lacking = tuple((cid, ()) for cid in others[: len(plan.contributors) // 2])
            if lacking and self.peer in {part.owner for part in plan.parts}:
                self._tell("lie: report")
                self._as(
                    machine.convener_of(plan.ballot).peer, machine, m.Missing(plan.plan_id, lacking)
                )
        if "lives" in self.lies and now - self._asked_at > 0.2:
            self._asked_at, self.life = now, self.life + 1
            self._tell("lie: another life")
            for peer in machine.others:
                self._as(peer, machine, m.Join(), self.life)

    def _as(self, peer: PeerId, machine: RoundMachine, body: m.Body, later: int = 0) -> None:
        envelope = m.Envelope(machine.log, machine.round, machine.me.incarnation + later, body)
        super().send(peer, b"R" + m.encode(envelope))

    @staticmethod
    def _founding(machine: RoundMachine) -> bool:
        return len(machine.config) < least_members(machine.tolerated)

    def _said(self, machine: RoundMachine, peer: PeerId, body: m.Body) -> Iterator[m.Body]:
        bend = self._bent.get(type(body))
        if "memory" in self.lies and isinstance(body, m.Catch) and body.anew:
            body = self._misremembered(machine, peer, body)
        if "mute" in self.lies and peer != self.peer and self._other_side(machine, peer, "mute"):
            self._tell("lie: mute")
            return
        if (
            "withhold" in self.lies
            and bend is not None
            and self._other_side(machine, peer, "withhold")
            and self.rng.random() < 0.8
        ):
            self._tell("lie: nothing said")
            return
        said = bend(machine, peer, body) if bend is not None else [body]
        if "garble" in self.lies and bend is not None and self.rng.random() < 0.1:
            self._tell("lie: signature")
            said = [
                msgspec.structs.replace(one, signature=b"?" * 32)
                if hasattr(one, "signature")
                else one
                for one in said
            ]
        yield from said
        if "turns" in self.lies and self.rng.random() < 0.1:
            self._tell("lie: turn")
            ballot = self.rng.choice((machine.ballot + 9, LAST_BALLOT))
            while machine.convener_of(ballot) != machine.me:
                ballot -= 1
            yield from (m.Turn(ballot), m.Prepare(ballot))

    def _misremembered(self, machine: RoundMachine, peer: PeerId, body: m.Catch) -> m.Catch:
        """To some that were started again: that they said more than they did, or nothing; and that
        more was decided than was."""
        dice = Random(f"memory/{machine.log}/{machine.round}/{peer}")
        self._tell("lie: memory")
        later = m.Said(dice.choice((0, 1, 1000)), machine.round + dice.randrange(3), 2)
        return msgspec.structs.replace(
            body,
            heard=dice.choice((None, later)),
            head=body.head + dice.choice((0, 0, 1_000_000)),
        )

    def _other_side(self, machine: RoundMachine, peer: PeerId, why: str) -> bool:
        """Liars who agree on it split the others in two, anew in each round."""
        return blake3(f"{why}/{machine.log}/{machine.round}/{peer}".encode()).digest()[0] % 2 == 0

    # ---- what is said in the place of what is so
    def _hidden(self, machine: RoundMachine) -> set[PeerId]:
        """As many honest members as are not needed for a quorum."""
        honest = sorted(
            (member.peer for member in machine.config if member.peer not in self.place.liars),
            key=lambda peer: blake3(f"{machine.round}/{peer}".encode()).digest(),
        )
        spare = (len(machine.config) - machine.tolerated - 1) // 2
        return set(honest[: max(1, spare)])

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
        entry = self._stands(machine, body.ballot, entry)
        digest = entry.hash()
        plot.update({digest: entry, body.entry.hash(): body.entry})
        if entry != body.entry:
            self._tell("lie: another entry")
        lie = msgspec.structs.replace(
            body,
            entry=entry,
            signature=self._slot("propose", machine, body.ballot, digest),
            claims=body.claims if entry == body.entry else self._claims(machine, body, entry),
            reduced=body.reduced if entry == body.entry else self._stated(machine, body, entry),
        )
        return [lie, *self._twice(machine, body.ballot)]

    def _stands(self, machine: RoundMachine, ballot: int, entry: Entry) -> Entry:
        """What it says in a ballot that it convenes, in the place of what its own node would."""
        if machine.convener_of(ballot) != machine.me:
            return entry
        dice = Random(f"label/{machine.log}/{machine.round}/{ballot}")
        said = self._relabelled(machine, entry, dice)
        if said != entry:
            self.stands_by[machine.log, machine.round, ballot] = said.hash()
        return said

    def _relabelled(self, machine: RoundMachine, entry: Entry, dice: Random) -> Entry:
        """The bytes are what they are; whose they are said to be is not. Under the digests that the
        others have, or under new ones.
        """
        honest = [c for c in entry.contributors if c.member.peer not in self.place.liars]
        offered = {c.cid: c for c in machine.offered() if c.member.peer not in self.place.liars}
        more = [offered[cid] for cid in offered if cid not in {c.cid for c in entry.contributors}]
        contributors = entry.contributors
        if {"subset", "hide"} & self.lies and len(contributors) > machine.shape.least and honest:
            struck = dice.choice(honest)
            contributors = tuple(c for c in contributors if c != struck)
        elif "superset" in self.lies and more:
            contributors = tuple(sorted((*contributors, dice.choice(more)), key=lambda c: c.member))
        if contributors == entry.contributors or not contributors:
            return entry
        ways = BUTTERFLY if entry.topology.groups else entry.topology
        said = msgspec.structs.replace(entry, contributors=contributors, topology=ways)
        self._tell("lie: contributors")
        results = self.session.actions.results if machine is self.session.machine else {}
        data = results.get(entry.part_digests)
        if "hide" not in self.lies and data is not None and dice.random() < 0.5:
            digests = part_digests(said, result_hashes(said, data))
            said = msgspec.structs.replace(said, part_digests=digests)
            results[digests], machine.open.known[said.hash()] = data, said
        return said

    def _claims(
        self, machine: RoundMachine, body: m.Propose, entry: Entry
    ) -> tuple[tuple[Member, m.Claim], ...]:
        """Those of whom it names: they are true."""
        offered = cast("ByzantineAcceptor", machine.acceptor).offered
        of = [offered[c.cid] for c in entry.contributors if c.cid in offered]
        return tuple(dict.fromkeys((*body.claims, *of)))

    def _stated(
        self, machine: RoundMachine, body: m.Propose, entry: Entry
    ) -> tuple[tuple[PeerId, bytes], ...]:
        """What liars sign of their own parts; of others only what they have signed."""
        said = dict(body.reduced)
        for owner in {part.owner for part in entry.parts} & self.place.liars:
            parts = tuple(
                (index, entry.part_digests[index])
                for index, part in enumerate(entry.parts)
                if part.owner == owner
            )
            said[owner] = sign_as(owner, reduced_payload(machine.run, owner, meaning(entry), parts))
        return tuple(said.items())

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
        own = machine.journal.echoed
        if own is not None and own[0] == body.ballot and own[1].hash() == body.entry_hash:
            self._stands(machine, body.ballot, own[1])
        digest = self.stands_by.get((machine.log, machine.round, body.ballot))
        if digest is not None:
            return [
                m.Echo(body.ballot, digest, self._slot("echo", machine, body.ballot, digest), b"")
            ]
        early = [
            m.Accepted(
                body.ballot,
                body.entry_hash,
                self._slot("vote", machine, body.ballot, body.entry_hash),
            )
        ]
        return [body, *self._twice(machine, body.ballot), *(early if "twice" in self.lies else [])]

    def _vote(self, machine: RoundMachine, peer: PeerId, body: m.Accepted) -> list[m.Body]:
        digest = self.stands_by.get((machine.log, machine.round, body.ballot))
        if digest is not None:
            return [
                m.Accepted(body.ballot, digest, self._slot("vote", machine, body.ballot, digest))
            ]
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
        if self.rng.random() < 0.7 and body.ballot > 0 and (plot or machine.open.known):
            entry = self.rng.choice(plot or list(machine.open.known.values()))
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
        if "hide" in self.lies and peer in self._hidden(machine):
            self._tell("lie: plan hidden")
            return []
        if "plans" not in self.lies:
            return [body]
        plan = msgspec.structs.replace(
            body.plan, revision=body.plan.revision + self.rng.randrange(1000)
        )
        self._tell("lie: plan")
        if self.rng.random() < 0.5 and len(plan.contributors) > 1:
            plan = msgspec.structs.replace(plan, contributors=plan.contributors[:-1])
        return [m.PlanMessage(plan)]
