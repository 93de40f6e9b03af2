"""Compute a committed round again from the contributions that were kept and signed, and compare
with what was decided, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...collectives.codecs.codec import Chunking, EncodedChunk
from ...collectives.digest import chunk_hash, merkle_root, part_digest
from ...collectives.errors import ConfigError, SecurityError, StorageError
from ...collectives.group import Certified, Entry
from ...collectives.identifiers import PeerId
from ...collectives.reduce import MEAN, TwoPhaseReducer, Weighing
from ...collectives.round import rounds_in
from ...collectives.trees import Tree, trees_of
from ...security.identity import verify
from ..run.signing import DOMAIN
from ..session.composing import find_reducers
from ..storage.contributions import FOLDER as CONTRIBUTIONS
from ..storage.contributions import find_kept
from .audit import AuditSource


class RecomputedPart(msgspec.Struct, frozen=True):
    """One part of a round: who added it up, and whether it is what comes of the contributions.
    ``heads``: on two levels or in a ring, who added up others' contributions for the owner."""

    owner: PeerId
    first: int
    stop: int
    same: bool
    heads: tuple[PeerId, ...] = ()


class Recomputed(msgspec.Struct, frozen=True):
    """A round that was computed again. ``entry``: its number in the log."""

    log: str
    round: int
    entry: int
    reducer: str
    contributors: tuple[PeerId, ...]
    parts: tuple[RecomputedPart, ...]

    @property
    def wrong(self) -> list[PeerId]:
        """Who added up parts that are not what comes of the contributions: their owners, and those
        who lead a site for them. Of several for one part at least one has stated what is not so."""
        return sorted(
            {peer for part in self.parts if not part.same for peer in (part.owner, *part.heads)}
        )


def recompute(
    source: AuditSource,
    log: str,
    round_: int,
    folders: Sequence[Path],
    progress: Callable[[int], None] = lambda chunk: None,
) -> Recomputed:
    """Round ``round_`` (counted from 1) of a log, from what ``folders`` and the node's own folder
    hold. The log itself is `audit`'s affair.

    Raises ConfigError where contributions are missing or the round cannot be recomputed,
    SecurityError E204 for one that is not what its contributor has signed, StorageError.
    """
    entry = _entry_of(source, log, round_).entry
    chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements)
    vectors = contributions_of(
        source,
        entry,
        chunking,
        [*folders, *(folder.parent / CONTRIBUTIONS for folder in source.folders)],
    )
    arithmetic = _Round(entry, chunking, vectors)
    hashes = arithmetic.hashes(progress)
    parts = tuple(
        RecomputedPart(
            part.owner,
            part.first,
            part.stop,
            part_digest(entry, part, hashes[part.first : part.stop]) == digest,
            heads,
        )
        for part, digest, heads in zip(
            entry.parts, entry.part_digests, arithmetic.heads, strict=True
        )
    )
    return Recomputed(
        log,
        round_,
        entry.round,
        entry.reducer,
        tuple(c.member.peer for c in entry.contributors),
        parts,
    )


def _entry_of(source: AuditSource, log: str, round_: int) -> Certified:
    rounds = 0
    for certified in source.logs[log]():
        rounds += rounds_in(certified.entry)
        if rounds >= round_ and certified.entry.contributors:
            return certified
    raise ConfigError(f"there is no round {round_} in {log}: it has {rounds}", key="--recompute")


def missing(entry: Entry, folders: Sequence[Path]) -> list[PeerId]:
    """Contributors of the entry whose contributions are in none of these folders. Raises
    StorageError for a damaged statement.
    """
    kept = find_kept(folders, entry.round)
    return [
        c.member.peer
        for c in entry.contributors
        if (found := kept.get(c.cid)) is None or found.data is None
    ]


def contributions_of(
    source: AuditSource, entry: Entry, chunking: Chunking, folders: Sequence[Path]
) -> list[memoryview]:
    """The encoded vectors of the entry's contributors, each what its contributor has signed. Raises
    as `recompute`.
    """
    folders = [folder for folder in folders if folder.is_dir()]
    if lost := missing(entry, folders):
        raise ConfigError(
            (
                f"of {len(entry.contributors)} contributions to entry {entry.round} {len(lost)} "
                f"are not here: {', '.join(lost)}"
            ),
            key="--from",
            why=(
                "Each member keeps its own, where the manifest says so: [audit] keep_contributions."
            ),
            hint=f"Ask them for their folder {CONTRIBUTIONS}, and name each copy: --from FOLDER",
        )
    kept, vectors = find_kept(folders, entry.round), list[memoryview]()
    for contributor in entry.contributors:
        peer, found = contributor.member.peer, kept[contributor.cid]
        statement = found.statement
        assert found.data is not None
        signed = verify(peer, DOMAIN, statement.payload(source.signed.run_id), statement.signature)
        if (statement.peer, statement.log, statement.entry) != (
            peer,
            entry.log,
            entry.round,
        ) or not signed:
            raise SecurityError(f"{found.data}: {peer} has not signed this", code="E204")
        try:
            data = memoryview(bytearray(found.data.read_bytes()))
        except OSError as error:
            raise StorageError(f"cannot read {found.data}: {error}") from None
        if (
            len(data) != chunking.nbytes
            or merkle_root([chunk_hash(view) for view in chunking.views(data)]) != statement.root
        ):
            raise SecurityError(f"{found.data} is not what {peer} has signed", code="E204")
        vectors.append(data)
    return vectors


class _Round:
    """The arithmetic of one entry, as owners do it."""

    def __init__(self, entry: Entry, chunking: Chunking, vectors: Sequence[memoryview]) -> None:
        self._entry, self._chunking, self._vectors = entry, chunking, vectors
        reducer = self._reducer = (
            MEAN if entry.reducer == "mean" else find_reducers()(entry.reducer)
        )
        self._trees: tuple[Tree, ...] = ()
        if (
            reducer is not None
            and reducer.form == "streaming"
            and entry.topology.kind != "butterfly"
        ):
            self._trees = trees_of(entry, reducer)
        self._numbers = {
            contributor.member.peer: number for number, contributor in enumerate(entry.contributors)
        }

    @property
    def heads(self) -> tuple[tuple[PeerId, ...], ...]:
        """Of each part: who adds up others' contributions for its owner."""
        if not self._trees:
            return ((),) * len(self._entry.parts)
        return tuple(
            tuple(
                peer for peer in self._numbers if peer != tree.owner and tree.sum(peer) is not None
            )
            for tree in self._trees
        )

    def _summed(
        self, tree: Tree, peer: PeerId, chunk: int, own: Sequence[EncodedChunk], out: EncodedChunk
    ) -> None:
        """What a member of a part's tree makes of what it has and what it is sent, to ``out``: the
        result, at the root.
        """
        found, wires = tree.sum(peer), list[EncodedChunk]()
        assert found is not None
        for term in found.terms:
            if term.peer == peer or tree.sum(term.peer) is None:
                wires.append(own[self._numbers[term.peer]])
                continue
            wires.append(
                self._chunking.wire(memoryview(bytearray(self._chunking.wire_bytes(chunk))), chunk)
            )
            self._summed(tree, term.peer, chunk, own, wires[-1])
        self._chunking.codec(chunk).weighted_mean(
            wires, found.factors.multipliers, found.factors.divisor, out
        )

    def hashes(self, progress: Callable[[int], None]) -> list[bytes]:
        """blake3 of each encoded chunk of the result."""
        results, found = self._chunking.results, list[bytes]()
        weighing = (
            self._weighed(self._reducer)
            if self._reducer is not None and self._reducer.form == "two-phase"
            else None
        )
        for chunk in range(self._chunking.chunks):
            out = memoryview(bytearray(results.wire_bytes(chunk)))
            self._reduce(chunk, results.wire(out, chunk), weighing)
            found.append(chunk_hash(out))
            progress(chunk)
        return found

    def _wires(self, chunk: int) -> list[EncodedChunk]:
        start, stop = self._chunking.span(chunk)
        return [self._chunking.wire(vector[start:stop], chunk) for vector in self._vectors]

    def _rows(self, chunk: int) -> Tensor:
        rows = torch.empty(len(self._vectors), self._chunking.elements(chunk))
        for wire, row in zip(self._wires(chunk), rows, strict=True):
            self._chunking.codec(chunk).decode(wire, row)
        return rows

    def _weighed(self, reducer: TwoPhaseReducer) -> Weighing:
        total = np.zeros(reducer.length(len(self._vectors)))
        for part in self._entry.parts:
            of_part = np.zeros_like(total)
            for chunk in range(part.first, part.stop):
                of_part += reducer.measure(self._rows(chunk))
            total += of_part
        contributors = self._entry.contributors
        return reducer.weigh(
            total, [c.cid for c in contributors], [c.reading.norm for c in contributors]
        )

    def _reduce(self, chunk: int, out: EncodedChunk, weighing: Weighing | None) -> None:
        codec, reducer = self._chunking.codec(chunk), self._reducer
        if self._trees:
            number = next(
                number
                for number, part in enumerate(self._entry.parts)
                if part.first <= chunk < part.stop
            )
            return self._summed(
                self._trees[number], self._entry.parts[number].owner, chunk, self._wires(chunk), out
            )
        weights = [contributor.weight for contributor in self._entry.contributors]
        if weighing is not None and weighing.factors is not None:
            used = [
                (wire, factor)
                for wire, factor in zip(
                    self._wires(chunk), weighing.factors.multipliers, strict=True
                )
                if factor
            ]
            if used:
                codec.weighted_mean(
                    [wire for wire, _ in used],
                    [factor for _, factor in used],
                    weighing.factors.divisor,
                    out,
                )
                return None
        if weighing is not None or (reducer is not None and reducer.form == "rows"):
            rows = self._rows(chunk)
            value = torch.empty(rows.shape[1])
            if weighing is not None:
                weighing.reduce(rows, value)
            elif reducer is not None and reducer.form == "rows":
                reducer.reduce(rows, weights, value)
            self._chunking.results.codec(chunk).encode(value, out)
            return None
        factors = (
            reducer if reducer is not None and reducer.form == "streaming" else MEAN
        ).factors(weights)
        codec.weighted_mean(self._wires(chunk), factors.multipliers, factors.divisor, out)
        return None
