"""What one seed decides, as plain values and as short hashes of them: what a change of the code may
not change unnoticed (`scripts/check_decided.py`).

Values, not encodings: a message, an entry or a digest may get another form, and a record made of
these hashes stays equal as long as the same is decided. A member is a pair: its number in the seed
and its incarnation.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from atoll.collectives.codecs.codec import Chunking
from atoll.collectives.group import Certified, Member
from atoll.collectives.identifiers import PeerId
from atoll.node.session.events import ContributionRefused, EarlierSettled, RoundCommitted

from .checker import Checker
from .member import Disk, Watch
from .plant import Plant
from .swarm import Options, SeedResult, SimSwarm

ASPECTS = ("contributors and weights", "results", "next configuration", "statuses")
"""Of an entry, in the order of its hashes."""
DIGITS = 3  # of base64 for each aspect: one change in 262,144 is missed in one aspect of one entry
ENTRY_DIGITS = DIGITS * len(ASPECTS)


def short_hash(value: Any) -> str:
    """``DIGITS`` characters of a hash of a value of tuples, numbers, text and bytes."""
    digest = blake3(msgspec.msgpack.encode(value)).digest()
    return b64encode(digest[:9], b"-_").decode()[:DIGITS]


@dataclass(frozen=True, slots=True)
class DecidedEntry:
    """An entry, by aspects. ``contributors``: (member, weight in samples, units of work) each;
    ``results``: (owner, first chunk, stop, hash of the bytes) for each part, then the hash of the
    anchor after the entry; ``statuses``: (number and life of a script, status of its contribution,
    units), of those who were told.
    """

    contributors: tuple[Any, ...]
    results: tuple[Any, ...]
    next_config: tuple[Any, ...]
    statuses: tuple[Any, ...]

    def hashes(self) -> str:
        """``ENTRY_DIGITS`` characters."""
        aspects = (self.contributors, self.results, self.next_config, self.statuses)
        return "".join(map(short_hash, aspects))


@dataclass(frozen=True, slots=True)
class DecidedLog:
    """A log at the end of a seed; there is one for each fragment. ``fates``: of each contribution
    that was frozen (number, life, weight, units, the entry that counts it or None, what its script
    was told outside of a round).
    """

    entries: tuple[DecidedEntry, ...]
    fates: tuple[Any, ...]

    def hashes(self) -> str:
        """Those of all entries, ":", and one of the fates."""
        return "".join(entry.hashes() for entry in self.entries) + ":" + short_hash(self.fates)


class ListeningSwarm(SimSwarm):
    """A seed that keeps what scripts are told of their contributions."""

    def __init__(self, seed: int, options: Options) -> None:
        self.by_entry: dict[tuple[int, int], list[tuple[Any, ...]]] = {}  # (log, entry)
        self.later: dict[tuple[int, bytes], list[str]] = {}  # (log, cid)
        super().__init__(seed, options)

    def heard(self, disk: Disk, event: object) -> None:
        """An event of a session."""
        super().heard(disk, event)
        number = disk.watch.number
        match event:
            case RoundCommitted(entry=entry, cid=cid, counted=counted):
                frozen = disk.checker.frozen.get(cid) if cid is not None else None
                status = "counted" if counted else "left out" if cid else "nothing contributed"
                told = (
                    self.number(disk.peer),
                    disk.member.life,
                    status,
                    frozen.units if frozen is not None else (),
                )
                self.by_entry.setdefault((number, entry), []).append(told)
            case EarlierSettled(cid=cid, counted=counted):
                told = f"an earlier one, {'counted' if counted else 'lost'}"
                self.later.setdefault((number, cid), []).append(told)
            case ContributionRefused(cid=cid):
                self.later.setdefault((number, cid), []).append("refused")
            case _:
                pass

    def number(self, peer: PeerId) -> int | str:
        """A peer's number; its name where a liar has invented it."""
        return self.names.index(peer) if peer in self.names else str(peer)

    def decided(self) -> tuple[DecidedLog, ...]:
        """What is decided so far, log by log."""
        return tuple(self._log(watch) for watch in self.watches)

    def _log(self, watch: Watch) -> DecidedLog:
        checker, counting = watch.checker, dict[bytes, int]()
        for certified in checker.entries:
            counting.update({c.cid: certified.entry.round for c in certified.entry.contributors})
        fates = sorted(
            (
                (
                    self.number(frozen.peer),
                    frozen.life,
                    frozen.weight,
                    frozen.units,
                    counting.get(cid),
                    tuple(self.later.get((watch.number, cid), ())),
                )
                for cid, frozen in checker.frozen.items()
            ),
            key=repr,
        )
        entries = (
            self._entry(watch, certified, checker.results[at], checker.anchors[at].numpy())
            for at, certified in enumerate(checker.entries)
        )
        return DecidedLog(tuple(entries), tuple(fates))

    def _entry(
        self, watch: Watch, certified: Certified, result: bytes, anchor: Any
    ) -> DecidedEntry:
        entry = certified.entry
        return DecidedEntry(
            tuple(
                (self._member(c.member), c.weight, self._units(watch.checker, c.cid))
                for c in entry.contributors
            ),
            (*self._parts(certified, result), blake3(anchor.tobytes()).digest(16)),
            tuple(map(self._member, entry.next_config)),
            tuple(sorted(self.by_entry.get((watch.number, entry.round), ()), key=repr)),
        )

    def _parts(self, certified: Certified, result: bytes) -> list[tuple[Any, ...]]:
        """Without a result, as of an adopted branch, there are none."""
        if not result:
            return []
        entry, found = certified.entry, list[tuple[Any, ...]]()
        chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements)
        views = list(chunking.results.views(memoryview(bytearray(result))))
        for part in entry.parts:
            digest = blake3(b"".join(views[part.first : part.stop])).digest(16)
            found.append((self.number(part.owner), part.first, part.stop, digest))
        return found

    def _member(self, member: Member) -> tuple[int | str, int]:
        return self.number(member.peer), member.incarnation

    def _units(self, checker: Checker, cid: bytes) -> tuple[int, ...]:
        frozen = checker.frozen.get(cid)
        return frozen.units if frozen is not None else ()


def play_decided(
    seed: int, options: Options
) -> tuple[SeedResult, tuple[DecidedLog, ...], Mapping[str, int]]:
    """Play one seed: its verdict, what it decides, and counters of what it entered (faults as
    "fault: NAME").
    """
    with Plant().planted(options.relayed_above):
        swarm = ListeningSwarm(seed, options)
        verdict = swarm.run()
    struck = {f"fault: {kind}": times for kind, times in verdict.struck.items()}
    return verdict, swarm.decided(), {**verdict.stats, **struck}
