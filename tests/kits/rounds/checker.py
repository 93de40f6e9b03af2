"""The oracle: what must hold whatever happens. It trusts nothing a member says and recomputes every
result from its inputs.

The predicates are those of docs/internals/protocol/round.md: agreement, honest outcome, nothing
lost, one entry a ballot, durability, contiguity; where the organiser recertifies, that a chosen
value is lost only if nobody who is left voted for it or applied it. Liveness after healing is
checked by `swarm`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from atoll.collectives.codecs.codec import Chunking, EncodedChunk
from atoll.collectives.digest import chunk_hash, part_digest
from atoll.collectives.group import (
    Certified,
    Config,
    Entry,
    Member,
    Part,
    is_quorum,
    least_members,
)
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.partition import is_fair
from atoll.collectives.reduce import MEAN, TwoPhaseReducer, Weighing, least_of
from atoll.collectives.trees import trees_of
from atoll.optim.outer import OuterStep
from atoll.security.rule_names import parse_reducer
from atoll.security.rules.reducers import find_reducer

_chunking = lru_cache(16)(Chunking)
OTHER_BIT = 1  # in which a liar's other contribution differs, in the first byte of each chunk


class Violation(AssertionError):
    """A predicate does not hold. The message begins with its name."""

    def __init__(self, predicate: str, detail: str) -> None:
        super().__init__(f"{predicate}: {detail}")
        self.predicate = predicate


def _name(digest: bytes) -> str:
    """The beginning of an entry's hash, as logs have it."""
    return digest.hex()[:12]


def _decided(certified: Certified) -> str:
    """The hash of a decided entry, and the ballot of each vote for it."""
    votes = ", ".join(f"{vote.member.peer} in ballot {vote.ballot}" for vote in certified.votes)
    return f"{_name(certified.entry.hash())} (votes: {votes or 'none'})"


MOST_BALLOTS = 1000  # of a round in which honest members turn by their clocks


@dataclass(frozen=True, slots=True)
class FrozenContribution:
    """A contribution as its script froze it. ``units``: the units of work in it; ``weight``
    samples.
    """

    peer: PeerId
    life: int
    weight: int
    units: tuple[int, ...]
    vector: Tensor


Holders = Callable[[Entry], Collection[Member]]
"""Members whose disk holds now all bytes of this entry, the state before it, and their vote (or the
applied entry).
"""


class Checker:
    """Watches one log. ``holders`` answers who holds an entry durably at the moment it is asked."""

    def __init__(
        self,
        *,
        organiser: PeerId | None,
        outer: OuterSettings,
        holders: Holders,
        lying: int = 0,
        witnesses: Callable[[Entry], int] = lambda entry: 0,
        liars: Collection[PeerId] = (),
        stored: Callable[[Entry], memoryview | None] = lambda entry: None,
    ) -> None:
        """``lying``: how many members of a configuration may lie; ``witnesses``: of each part of an
        entry; ``liars``: who does; ``stored``: an entry's bytes as members hold them.
        """
        self.lying, self.liars, self._stored, self._witnesses = lying, liars, stored, witnesses
        self.organiser, self.outer, self._holders = organiser, outer, holders
        self.entries: list[Certified] = []  # as first applied by anybody; [0] is the genesis
        self.results: list[bytes] = []
        self.anchors: list[Tensor] = []  # float32 (numel,), expected after each entry
        self.used: dict[int, int] = {}  # unit of work -> the round that counts it
        self.frozen: dict[bytes, FrozenContribution] = {}
        self._given_up: set[bytes] = set()  # contributions that scripts were told are not counted
        self._momenta: list[Tensor] = []  # after each entry
        self.retired: set[Member] = (
            set()
        )  # whose votes the organiser has said will never come; that is so
        self.recertified = self.revoked = 0
        self._voters: dict[tuple[int, int, bytes], set[Member]] = {}  # (round, ballot, entry hash)
        self._appliers: dict[int, set[Member]] = {}  # by round, of the value in `entries`
        self._step = OuterStep(outer)
        self._ballots: dict[tuple[int, int], bytes] = {}  # (round, ballot) -> entry hash
        self._applied: dict[
            tuple[PeerId, int], int
        ] = {}  # (peer, incarnation) -> last applied round

    # ---- what members do
    def found(self, genesis: Certified, initial: Tensor) -> None:
        """The run begins: its genesis and initial parameters, float32 (numel,)."""
        self.entries, self.results, self.anchors = [genesis], [b""], [initial.clone()]
        self._momenta = [torch.zeros(self._step.state_numel(initial.numel()))]

    def freeze(self, cid: bytes, contribution: FrozenContribution) -> None:
        """A script froze a contribution. The vector must not be changed by the caller."""
        self.frozen[cid] = contribution

    def settled(self, who: PeerId, cid: bytes, counted: bool) -> None:
        """A script that outlived its node is told whether an earlier contribution is counted, so
        that it may contribute the work again.
        """
        if counted != any(
            c.cid == cid for certified in self.entries for c in certified.entry.contributors
        ):
            raise Violation(
                "honest verdict",
                (
                    f"{who} is told that its earlier contribution is "
                    f"{'' if counted else 'not '}counted"
                ),
            )
        if not counted:
            self._given_up.add(cid)

    def voted(
        self, who: Member, ballot: int, entry: Entry, *, holds_bytes: bool, generation: int
    ) -> None:
        """A member records a vote: with all bytes and the state before stored, as a member of the
        configuration.
        """
        self._one_entry(entry.round, ballot, entry, who.peer)
        if who in self.retired:
            raise Violation(
                "silence",
                f"{who.peer}/{who.incarnation} votes in round {entry.round} after it was removed",
            )
        if self.lying and ballot > MOST_BALLOTS:
            raise Violation(
                "turns",
                (
                    f"{who.peer} votes in ballot {ballot} of round {entry.round}, which no "
                    "honest member has come to"
                ),
            )
        self._voters.setdefault((entry.round, ballot, entry.hash()), set()).add(who)
        if entry.contributors and not holds_bytes:
            raise Violation(
                "vote without bytes", f"{who.peer} votes in round {entry.round}, ballot {ballot}"
            )
        if generation != entry.round - 1:
            raise Violation(
                "vote without state",
                f"{who.peer} votes in round {entry.round} and holds state {generation}",
            )
        config = self._config(entry.round)
        if config is not None and who not in config and who.peer not in self.liars:
            raise Violation(
                "vote of a stranger",
                f"{who.peer}/{who.incarnation} is no acceptor of round {entry.round}",
            )

    def applied(self, who: Member, certified: Certified, *, last: int) -> None:
        """A member appends an entry to its log after ``last`` entries."""
        entry = certified.entry
        if entry.round != last:
            raise Violation(
                "contiguity", f"{who.peer} appends entry {entry.round} to a log of {last} entries"
            )
        if (
            entry.round < len(self.entries)
            and certified.removed
            and self.entries[entry.round].entry.hash() != entry.hash()
        ):
            self._revoke(certified)
        if entry.round < len(self.entries):
            if self.entries[entry.round].entry.hash() != entry.hash():
                first = self.entries[entry.round]
                raise Violation(
                    "agreement",
                    f"round {entry.round}: {who.peer} applies entry {_decided(certified)}, and "
                    f"before it was entry {_decided(first)}",
                )
        else:
            self._decide(certified)
        self._appliers.setdefault(entry.round, set()).add(who)

    def called_committed(self, who: PeerId, entry: int, digest: bytes) -> None:
        """A member tells its script that a round is committed."""
        if entry >= len(self.entries) or self.entries[entry].entry.hash() != digest:
            raise Violation("certainty", f"{who} calls committed what is not certified")

    def published(self, who: PeerId, round_: int, anchor: Tensor) -> None:
        """A member makes an anchor current."""
        if round_ >= len(self.anchors):
            raise Violation(
                "agreement", f"{who} publishes the anchor of round {round_}, which nobody decided"
            )
        if not torch.equal(anchor.view(torch.int32), self.anchors[round_].view(torch.int32)):
            raise Violation("agreement", f"{who} publishes another anchor of round {round_}")

    def finished(
        self,
        who: PeerId,
        *,
        produced: Iterable[int],
        held: Collection[int],
        destroyed: Collection[int],
        log: int,
    ) -> None:
        """At the end: every unit of work is in one entry, or still held, or was destroyed with its
        process.
        """
        for unit in produced:
            used = self.used.get(unit)
            if used is None and unit not in held and unit not in destroyed:
                raise Violation("nothing lost", f"unit {unit} of {who} is neither counted nor held")
            if used is not None and used < log and unit in held:
                raise Violation(
                    "nothing lost",
                    f"unit {unit} of {who} was counted in round {used} and is still held",
                )

    # ---- recertifying
    def _lost_only_with_the_removed(self, certified: Certified) -> None:
        """No value that was chosen in this round is passed over, unless all who voted for it are
        removed.
        """
        entry, config = certified.entry, self._config(certified.entry.round)
        if not set(certified.removed) <= self.retired or [
            vote.member.peer for vote in certified.votes
        ] != [self.organiser]:
            raise Violation(
                "certificate", f"entry {entry.round} is recertified without the organiser's word"
            )
        for (round_, ballot, digest), voters in self._voters.items():
            chosen = (
                round_ == entry.round
                and digest != entry.hash()
                and config is not None
                and is_quorum(config, voters, self.organiser)
            )
            if chosen and not voters <= self.retired:
                names = ", ".join(sorted(member.peer for member in voters - self.retired))
                raise Violation(
                    "chosen",
                    (
                        f"entry {entry.round} is recertified over a value of ballot {ballot} "
                        f"for which {names} voted"
                    ),
                )

    def _revoke(self, certified: Certified) -> None:
        """The organiser's word overrides a value that only removed members knew."""
        round_ = certified.entry.round
        left = self._appliers[round_] - self.retired
        if left:
            raise Violation(
                "agreement",
                (
                    f"round {round_} is recertified; "
                    f"{', '.join(sorted(m.peer for m in left))} applied another value"
                ),
            )
        self.revoked += 1
        self.forget(round_, votes=round_ + 1)

    def forget(self, round_: int, *, votes: int) -> None:
        """What was decided from ``round_`` on, and the votes from round ``votes`` on, are on no
        disk any more.
        """
        gone = {member.peer for member in self.retired}
        for kept in (self.entries, self.results, self.anchors, self._momenta):
            del kept[round_:]
        self.used = {unit: at for unit, at in self.used.items() if at < round_}
        self._given_up = {cid for cid in self._given_up if self.frozen[cid].peer not in gone}
        self._ballots = {key: digest for key, digest in self._ballots.items() if key[0] < votes}
        self._voters = {key: who for key, who in self._voters.items() if key[0] < votes}
        self._appliers = {at: who for at, who in self._appliers.items() if at < round_}

    # ---- predicates
    def _one_entry(self, round_: int, ballot: int, entry: Entry, who: PeerId) -> None:
        known = self._ballots.setdefault((round_, ballot), entry.hash())
        if known != entry.hash():
            raise Violation(
                "one entry a ballot",
                f"round {round_}, ballot {ballot}: entries {_name(known)} and "
                f"{_name(entry.hash())}, the second seen at {who}",
            )

    def _claimed(self, entry: Entry, config: Config) -> None:
        """What liars cannot invent: contributions of others, members that nobody let in."""
        for contributor in entry.contributors if self.liars else ():
            frozen, peer = self.frozen.get(contributor.cid), contributor.member.peer
            if peer not in self.liars and (
                frozen is None or (frozen.peer, frozen.weight) != (peer, contributor.weight)
            ):
                raise Violation(
                    "honest outcome", f"entry {entry.round} names what {peer} did not contribute"
                )
        if (
            self.lying
            and len(entry.next_config) < len(config)
            and len(entry.next_config) < least_members(self.lying) <= len(config)
        ):
            raise Violation(
                "membership", f"entry {entry.round} leaves {len(entry.next_config)} members"
            )

        if self.lying and not is_fair(entry, self.lying):
            raise Violation(
                "fair shares", f"entry {entry.round} gives a member more parts than its share"
            )

    def _quorum(self, config: Config, voters: set[Member]) -> bool:
        return is_quorum(config, voters, self.organiser, self.lying)

    def _config(self, round_: int) -> Config | None:
        return (
            self.entries[round_ - 1].entry.next_config if 0 < round_ <= len(self.entries) else None
        )

    def _decide(self, certified: Certified) -> None:
        entry, config = certified.entry, self._config(certified.entry.round)
        if config is None or entry.base != self.entries[-1].entry.hash():
            raise Violation(
                "contiguity", f"entry {entry.round} does not follow entry {len(self.entries) - 1}"
            )
        if certified.removed:
            self._lost_only_with_the_removed(certified)
            self.recertified += 1
        elif not self._quorum(config, {vote.member for vote in certified.votes}):
            raise Violation(
                "certificate",
                f"round {entry.round} is applied without the votes of a quorum: entry "
                f"{_decided(certified)}",
            )
        elif len({vote.ballot for vote in certified.votes}) > 1:
            raise Violation(
                "certificate",
                f"round {entry.round} is applied with votes of several ballots: entry "
                f"{_decided(certified)}",
            )
        self._claimed(entry, config)
        holders = set(self._holders(entry))
        if not certified.removed and not self._quorum(
            config, holders | {who for who in config if who.peer in self.liars}
        ):
            names = ", ".join(sorted(member.peer for member in holders))
            raise Violation(
                "durability",
                (
                    f"entry {entry.round} is applied while only {names or 'nobody'} of "
                    f"{len(config)} holds it"
                ),
            )
        result = self._honest(entry)
        anchor, momentum = self._outer(entry, result, self.anchors[-1], self._momenta[-1])
        self._count(entry)
        self.entries.append(certified)
        self.results.append(result)
        self.anchors.append(anchor)
        self._momenta.append(momentum)

    def _count(self, entry: Entry) -> None:
        members = [c.member for c in entry.contributors]
        if len(set(members)) != len(members):
            raise Violation("honest outcome", f"entry {entry.round} counts a member twice")
        for contributor in entry.contributors:
            if contributor.cid in self._given_up:
                raise Violation(
                    "honest verdict",
                    f"entry {entry.round} counts what {contributor.member.peer} was told is lost",
                )
            for unit in self.frozen[contributor.cid].units:
                if unit in self.used:
                    raise Violation(
                        "nothing counted twice",
                        f"unit {unit} in rounds {self.used[unit]} and {entry.round}",
                    )
                self.used[unit] = entry.round

    def _honest(self, entry: Entry) -> bytes:
        """The result's bytes, recomputed from exactly the named contributions; raises unless the
        entry's digests are theirs.
        """
        if not entry.contributors:
            return b""
        robust = find_reducer(entry.reducer) if parse_reducer(entry.reducer) else None
        if len(entry.contributors) < least_of(robust or MEAN):
            raise Violation(
                "honest outcome",
                (
                    f"entry {entry.round} is the {entry.reducer} of "
                    f"{len(entry.contributors)} contributions"
                ),
            )
        for contributor in entry.contributors:
            frozen = self.frozen.get(contributor.cid)
            if (
                frozen is None
                or frozen.peer != contributor.member.peer
                or frozen.weight != contributor.weight
            ):
                raise Violation(
                    "honest outcome",
                    (
                        f"entry {entry.round} names a contribution that "
                        f"{contributor.member.peer} did not freeze"
                    ),
                )
        chunking = _chunking(entry.codec, entry.numel, entry.chunk_elements)
        result = bytearray(chunking.results.nbytes)
        hashes: list[bytes] = []
        weighing = (
            self._weigh(chunking, entry, robust)
            if robust is not None and robust.form == "two-phase"
            else None
        )
        for chunk, view in enumerate(chunking.results.views(memoryview(result))):
            self._reduce_chunk(chunking, entry, chunk, view, weighing)
            hashes.append(chunk_hash(view))
        for part, digest in zip(entry.parts, entry.part_digests, strict=True):
            if part_digest(entry, part, hashes[part.first : part.stop]) == digest:
                continue
            witnessed = self._witnesses(entry) > 0
            if witnessed and self._of_other_contributions(chunking, entry, part, result):
                continue
            excused = part.owner in self.liars and not witnessed
            if not excused or not self._as_stated(chunking, entry, part, result):
                raise Violation(
                    "honest outcome",
                    (
                        f"entry {entry.round}: part of {part.owner} is not the "
                        f"{entry.reducer} over its contributors"
                    ),
                )
        return bytes(result)

    def _of_other_contributions(
        self, chunking: Chunking, entry: Entry, part: Part, result: bytearray
    ) -> bool:
        """Whether a part is the sum that it must be if liars have sent their other contributions
        (`OTHER_BIT`) to all who state it; its bytes are put into ``result``.
        """
        false = [c.cid for c in entry.contributors if c.member.peer in self.liars]
        views, wanted = (
            list(chunking.results.views(memoryview(result))),
            entry.part_digests[entry.parts.index(part)],
        )
        for count in range(1, len(false) + 1):
            for bent in combinations(false, count):
                hashes: list[bytes] = []
                for chunk in range(part.first, part.stop):
                    self._reduce_chunk(chunking, entry, chunk, views[chunk], None, bent)
                    hashes.append(chunk_hash(views[chunk]))
                if part_digest(entry, part, hashes) == wanted:
                    return True
        return False

    def _as_stated(self, chunking: Chunking, entry: Entry, part: Part, result: bytearray) -> bool:
        """Of a part that a liar owns, and of which there are no witnesses, the bytes are the
        liar's: they are put into ``result`` as members hold them. Whether they have its digest.
        """
        stored = self._stored(entry)
        if stored is None:
            return False
        views = [list(chunking.results.views(data)) for data in (memoryview(result), stored)]
        chunks = range(part.first, part.stop)
        for chunk in chunks:
            views[0][chunk][:] = views[1][chunk]
        digest = part_digest(entry, part, [chunk_hash(views[1][chunk]) for chunk in chunks])
        return digest == entry.part_digests[entry.parts.index(part)]

    def _encoded(
        self, chunking: Chunking, entry: Entry, chunk: int, bent: Collection[bytes] = ()
    ) -> tuple[dict[bytes, EncodedChunk], Tensor]:
        """What was contributed to a chunk, as it travels and decoded."""
        codec, first, elements = (
            chunking.codec(chunk),
            chunk * entry.chunk_elements,
            chunking.elements(chunk),
        )
        wires = {
            c.cid: chunking.wire(memoryview(bytearray(chunking.wire_bytes(chunk))), chunk)
            for c in entry.contributors
        }
        rows = torch.empty(len(wires), elements)
        for (cid, wire), row in zip(wires.items(), rows, strict=True):
            codec.encode(self.frozen[cid].vector[first : first + elements], wire)
            wire.data[0] ^= OTHER_BIT * (cid in bent)
            codec.decode(wire, row)
        return wires, rows

    def _weigh(self, chunking: Chunking, entry: Entry, reducer: TwoPhaseReducer) -> Weighing:
        """By statistics added up over the chunks of each part, then over parts."""
        total = np.zeros(reducer.length(len(entry.contributors)))
        for part in entry.parts:
            of_part = np.zeros_like(total)
            for chunk in range(part.first, part.stop):
                of_part += reducer.measure(self._encoded(chunking, entry, chunk)[1])
            total += of_part
        return reducer.weigh(
            total, [c.cid for c in entry.contributors], [c.reading.norm for c in entry.contributors]
        )

    def _reduce_chunk(
        self,
        chunking: Chunking,
        entry: Entry,
        chunk: int,
        out: memoryview,
        weighing: Weighing | None,
        bent: Collection[bytes] = (),
    ) -> None:
        codec, (wires, rows) = chunking.codec(chunk), self._encoded(chunking, entry, chunk, bent)
        robust = find_reducer(entry.reducer) if parse_reducer(entry.reducer) else None
        if weighing is not None and weighing.factors is not None:
            used = [
                (wire, weight)
                for wire, weight in zip(wires.values(), weighing.weights, strict=True)
                if weight
            ]
            codec.weighted_mean(
                [wire for wire, _ in used],
                [weight for _, weight in used],
                1.0,
                chunking.results.wire(out, chunk),
            )
            return
        if robust is not None and robust.form in ("rows", "two-phase"):
            value = torch.empty(rows.shape[1])
            if weighing is not None:
                weighing.reduce(rows, value)
            elif robust.form == "rows":
                robust.reduce(rows, [c.weight for c in entry.contributors], value)
            chunking.results.codec(chunk).encode(value, chunking.results.wire(out, chunk))
            return
        if entry.topology.kind == "butterfly":
            factors = MEAN.factors([c.weight for c in entry.contributors])
            codec.weighted_mean(
                list(wires.values()),
                factors.multipliers,
                factors.divisor,
                chunking.results.wire(out, chunk),
            )
            return
        tree = next(
            tree
            for part, tree in zip(entry.parts, trees_of(entry, MEAN), strict=True)
            if part.first <= chunk < part.stop
        )

        def add(peer: PeerId, target: memoryview) -> EncodedChunk:
            total, wire = tree.sum(peer), chunking.wire(target, chunk)
            assert total is not None
            terms = [
                wires[term.cid]
                if term.cid in wires
                else add(term.peer, memoryview(bytearray(len(out))))
                for term in total.terms
            ]
            codec.weighted_mean(terms, total.factors.multipliers, total.factors.divisor, wire)
            return wire

        add(tree.owner, out)

    def _outer(
        self, entry: Entry, result: bytes, before: Tensor, momentum: Tensor
    ) -> tuple[Tensor, Tensor]:
        anchor, momentum = before.clone(), momentum.clone()
        if result:
            means = _chunking(entry.codec, entry.numel, entry.chunk_elements).results.decode(
                memoryview(bytearray(result))
            )
            self._step.run(
                before, means, momentum, anchor, [(c.weight, c.reading) for c in entry.contributors]
            )
        return anchor, momentum
