"""Helpers of the exchange and engine tests: plans, an independent numpy reference, and a network of
records in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from codec_kit import reference

from atoll.collectives.codecs.codec import Chunking
from atoll.collectives.digest import chunk_hash, part_digest
from atoll.collectives.exchange import Exchange, ExchangeEvent, ReductionReport, ResultComplete
from atoll.collectives.group import (
    BUTTERFLY,
    Contributor,
    Member,
    Part,
    Plan,
    Topology,
    TopologyKind,
)
from atoll.collectives.identifiers import PeerId
from atoll.collectives.pace import Lead
from atoll.collectives.partition import parts_for
from atoll.collectives.reduce import FindReducer
from atoll.collectives.reducers import REDUCERS
from atoll.collectives.terms import senders_of

LOG = "run"


def cid_of(index: int, life: int = 0) -> bytes:
    return bytes([index, life]) * 8


def peers_of(n: int) -> list[PeerId]:
    return [PeerId(f"peer-{index}") for index in range(n)]


def make_plan(
    contributors: Sequence[tuple[PeerId, bytes, int]],
    owners: Sequence[PeerId],
    numel: int,
    chunk_elements: int,
    codec: str,
    *,
    round_: int = 1,
    ballot: int = 0,
    revision: int = 0,
    reducer: str = "mean",
    log: str = LOG,
    parts: tuple[Part, ...] | None = None,
    topology: Topology = BUTTERFLY,
) -> Plan:
    chunks = -(-numel // chunk_elements)
    return Plan(
        log,
        round_,
        ballot,
        revision,
        bytes(32),
        tuple(Contributor(Member(peer, 0), cid, weight) for peer, cid, weight in contributors),
        parts or parts_for(chunks, [(owner, 1.0) for owner in owners]),
        numel,
        chunk_elements,
        codec,
        reducer,
        topology,
    )


def ways(kind: TopologyKind, sites: Sequence[int] = (), hosts: Sequence[int] = ()) -> Topology:
    """A topology of contributors at these sites; ``hosts``, for three levels, numbers within them."""
    names = dict[tuple[int, int], int]()
    within = hosts if kind == "three-level" else ()
    return Topology(
        kind,
        tuple(sites),
        tuple(names.setdefault(pair, len(names)) for pair in zip(sites, within, strict=False)),
    )


def vector(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))


# ---- independent reference, numpy only


ref_encode, ref_decode = reference.encode, reference.decode


def chunking_of(plan: Plan) -> Chunking:
    """Of its result."""
    return Chunking(plan.codec, plan.numel, plan.chunk_elements).results


def pieces_of(plan: Plan) -> list[tuple[str, int, int]]:
    """(codec, first element, last element + 1) of every piece, in the order of their bytes: chunks,
    cut where the codec changes.
    """
    ranges, at = [], 0
    for piece in plan.codec.split("+"):
        name, _, count = piece.partition(":")
        stop = at + int(count) if count else plan.numel
        ranges.append((name, at, stop))
        at = stop
    found = []
    for first in range(0, plan.numel, plan.chunk_elements):
        last = min(plan.numel, first + plan.chunk_elements)
        found += [
            (name, max(first, start), min(last, stop))
            for name, start, stop in ranges
            if start < last and first < stop
        ]
    return found


def ref_result(plan: Plan, vectors: dict[bytes, torch.Tensor]) -> bytes:
    """Encoded result of a plan, piece by piece, computed the plain way."""
    weights = np.array([c.weight for c in plan.contributors])
    weights = weights // np.gcd.reduce(weights)
    shift, out = ref_shift(weights.tolist()), b""
    for codec, first, stop in pieces_of(plan):
        encoded = [ref_encode(codec, vectors[c.cid][first:stop].numpy()) for c in plan.contributors]
        out += reference.mean(
            codec, encoded, [w * shift for w in weights], weights.sum() * shift, stop - first
        )
    return out


def ref_shift(weights: list[int]) -> float:
    """The power of two that brings the sum of weights down to about 2^20. It rounds nothing; dithered
    codes follow from the bits of the sum, and so from it.
    """
    return 2.0 ** -max(0, sum(weights).bit_length() - 20)


def ref_tree(plan: Plan, number: int) -> dict[PeerId, list[PeerId]]:
    """Who sends something to whom for a part, itself included, in the plan's order: written from
    the words of the protocol's page.
    """
    owner, peers = plan.parts[number].owner, [c.member.peer for c in plan.contributors]
    site = (
        dict(zip(peers, plan.topology.groups, strict=True))
        if plan.topology.groups
        else {peer: peer for peer in peers}
    )
    above = dict.fromkeys(peers, owner)
    if plan.topology.kind == "three-level":
        host = dict(zip(peers, plan.topology.hosts or range(len(peers)), strict=True))
        turns: dict[tuple[object, object], int] = {}  # (site or host, its number): heads before
        for part in plan.parts[: number + 1]:
            above = {}
            for name in dict.fromkeys(site[peer] for peer in peers):
                mates = [peer for peer in peers if site[peer] == name]
                top = part.owner
                if top not in mates:
                    turn = turns["site", name] = turns.get(("site", name), -1) + 1
                    top = mates[turn % len(mates)]
                    above[top] = part.owner
                for one in dict.fromkeys(host[peer] for peer in mates):
                    local = [peer for peer in mates if host[peer] == one]
                    head = top
                    if head not in local:
                        turn = turns["host", one] = turns.get(("host", one), -1) + 1
                        head = local[turn % len(local)]
                        above[head] = top
                    above |= {peer: head for peer in local if peer not in (head, top)}
    if plan.topology.kind in ("two-level", "checked"):
        for name in set(site.values()):
            mates = [peer for peer in peers if site[peer] == name]
            if owner not in mates:
                head = mates[
                    sum(part.owner not in mates for part in plan.parts[:number]) % len(mates)
                ]
                above.update({peer: owner if peer == head else head for peer in mates})
    if plan.topology.kind == "ring":
        names = list(dict.fromkeys(site[peer] for peer in peers))
        circle = sorted(peers, key=lambda peer: names.index(site[peer]))
        while owner in circle and circle[-1] != owner:
            circle = circle[1:] + circle[:1]
        above = dict(zip(circle, [*circle[1:], owner], strict=True))
    above.pop(owner, None)
    inner = {owner, *above.values()}
    return {one: [peer for peer in peers if above.get(peer) == one or peer == one] for one in inner}


def ref_sums(plan: Plan, number: int, data: dict[PeerId, bytes], codec: str, n: int) -> bytes:
    """The encoded result of a piece of a part, sum by sum. ``data``: the encoded contributions to
    it.
    """
    tree, owner = ref_tree(plan, number), plan.parts[number].owner
    weight = {c.member.peer: c.weight for c in plan.contributors}

    def add(one: PeerId) -> tuple[bytes, int, int]:
        """(bytes, weight as a term of the next sum, weight of the contributions)"""
        if one not in tree:
            return data[one], weight[one], weight[one]
        terms = [
            (data[peer], weight[peer], weight[peer]) if peer == one else add(peer)
            for peer in tree[one]
        ]
        common = int(np.gcd.reduce([term[1] for term in terms]))
        small, total = [term[1] // common for term in terms], sum(term[2] for term in terms)
        power = 1
        while power * common < total:
            power *= 2
        divisor, shift = total / common if one == owner else power, ref_shift(small)
        return (
            reference.mean(
                codec, [term[0] for term in terms], [w * shift for w in small], divisor * shift, n
            ),
            power * common,
            total,
        )

    return add(owner)[0]


def ref_tree_result(plan: Plan, vectors: dict[bytes, torch.Tensor]) -> bytes:
    """Encoded result of a mean over a plan's trees."""
    out, size = b"", plan.chunk_elements
    for codec, first, stop in pieces_of(plan):
        number = next(
            i for i, part in enumerate(plan.parts) if part.first * size <= first < part.stop * size
        )
        data = {
            c.member.peer: ref_encode(codec, vectors[c.cid][first:stop].numpy())
            for c in plan.contributors
        }
        out += ref_sums(plan, number, data, codec, stop - first)
    return out


def ref_digests(plan: Plan, data: bytes) -> tuple[bytes, ...]:
    hashes = [chunk_hash(chunk) for chunk in chunking_of(plan).views(memoryview(data))]
    return tuple(part_digest(plan, part, hashes[part.first : part.stop]) for part in plan.parts)


def decoded(plan: Plan, data: bytes) -> np.ndarray:
    found, at = [], 0
    for codec, first, stop in pieces_of(plan):
        codec = reference.result_of(codec)
        found.append(ref_decode(codec, data[at:], stop - first))
        at += len(ref_encode(codec, np.zeros(stop - first, np.float32)))
    return np.concatenate(found)


def expected_bytes(plan: Plan) -> int:
    return chunking_of(plan).nbytes


# ---- a network of records


@dataclass
class Net:
    """N exchanges and the records between them. `step` moves one record of a random pair; any may
    be lost.
    """

    n: int
    seed: int = 0
    loss: float = 0.0
    eager: bool = True
    lead: Lead = Lead()
    clock: Callable[[], float] = lambda: 0.0
    result_buffer: Callable[[Plan], memoryview] | None = None
    reducers: FindReducer = REDUCERS.get
    peers: list[PeerId] = field(default_factory=list)
    nodes: dict[PeerId, Exchange] = field(default_factory=dict)
    events: dict[PeerId, list[ExchangeEvent]] = field(default_factory=dict)
    flying: dict[tuple[PeerId, PeerId], list[tuple[bytes, bytes]]] = field(default_factory=dict)
    down: set[PeerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.peers = peers_of(self.n)
        for peer in self.peers:
            self.events[peer] = []
            emit = self.events[peer].append
            self.nodes[peer] = Exchange(
                peer,
                emit=emit,
                result_buffer=self.result_buffer,
                reducers=self.reducers,
                eager=self.eager,
                lead=lambda: self.lead,
                clock=self.clock,
            )
        for peer in self.peers:
            for other in self.peers:
                if peer != other:
                    self.nodes[peer].lane_up(other)

    def kill(self, peer: PeerId) -> None:
        self.down.add(peer)
        for pair in [p for p in self.flying if peer in p]:
            del self.flying[pair]
        for other in self.peers:
            if other != peer:
                self.nodes[other].lane_down(peer)

    def cut(self, a: PeerId, b: PeerId) -> None:
        """The lane of a pair breaks and comes back; what was in flight is gone."""
        self.flying.pop((a, b), None)
        self.flying.pop((b, a), None)
        for one, other in ((a, b), (b, a)):
            self.nodes[one].lane_down(other)
            self.nodes[one].lane_up(other)

    def pull(self, a: PeerId, b: PeerId) -> bool:
        record = self.nodes[a].next_record(b)
        if record is None:
            return False
        self.flying.setdefault((a, b), []).append((record.header, bytes(record.payload)))
        return True

    def deliver(self, a: PeerId, b: PeerId, header: bytes, payload: bytes) -> None:
        view = self.nodes[b].destination(a, header)
        if view is not None:
            view[:] = payload
            self.nodes[b].received(a, header)

    def run(self, limit: int | None = None) -> int:
        """Move records in random order until nothing is left (or ``limit`` were moved)."""
        live = [p for p in self.peers if p not in self.down]
        pairs = [(a, b) for a in live for b in live if a != b]
        moved = 0
        idle = False
        while not idle and (limit is None or moved < limit):
            idle = True
            self.rng.shuffle(pairs)
            for pair in pairs:
                for _ in range(self.rng.randrange(1, 4)):
                    idle = not self.pull(*pair) and idle
                queue = self.flying.get(pair)
                if queue:
                    idle = False
                    header, payload = queue.pop(0)
                    moved += 1
                    if self.rng.random() >= self.loss:
                        self.deliver(*pair, header, payload)
                if not self.eager:
                    idle = not self.nodes[pair[1]].work() and idle
        return moved

    def repair(self, plan: Plan) -> None:
        """What a session does: report, then ask for what is lacking."""
        for peer in self.peers:
            if peer in self.down:
                continue
            seen = len(self.events[peer])
            self.nodes[peer].report(plan.plan_id)
            for event in self.events[peer][seen:]:
                assert isinstance(event, ReductionReport)
                for cid, spans in event.missing.items():
                    for sender in senders_of(plan, peer)[cid] - self.down:
                        self.nodes[sender].resend_parts(peer, plan.plan_id, cid, spans)
                for owner, spans in event.lacking.items():
                    if owner not in self.down:
                        self.nodes[owner].resend_results(peer, plan.plan_id, spans)

    def results(self, peer: PeerId, plan: Plan) -> list[ResultComplete]:
        return [
            e
            for e in self.events[peer]
            if isinstance(e, ResultComplete) and e.plan_id == plan.plan_id
        ]

    def of(self, peer: PeerId, kind: type) -> list[ExchangeEvent]:
        return [e for e in self.events[peer] if isinstance(e, kind)]


def start(net: Net, plan: Plan, vectors: dict[bytes, torch.Tensor]) -> None:
    """Open the round, freeze and execute everywhere."""
    for peer in net.peers:
        node = net.nodes[peer]
        node.open_round(
            plan.log, plan.round, net.peers, plan.numel, plan.chunk_elements, plan.codec
        )
        for c in plan.contributors:
            if c.member.peer == peer and c.cid in vectors:
                node.freeze(plan.log, plan.round, c.cid, vectors[c.cid])
        node.execute(plan, net.peers)
