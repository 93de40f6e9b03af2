"""Which chunks of one content are asked of which source. Pure bookkeeping, no I/O.

Chunks are verified by their hash, so sources mix freely and nothing that came is lost. The next
chunk is asked of the source with the fewest outstanding ones, hence each gets as many as it brings.
Once nothing else is left to ask for, an idle source is asked for chunks of one that will need long
for them, the last ones first: the two meet in the middle (a hedge). Over a slow link of one's own,
which all sources share, that costs no time; a source that trickles is worked around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...collectives.identifiers import PeerId
from ...collectives.messages import Span

SPAN_CHUNKS = 8  # chunks asked of one source at a time
WINDOW_CHUNKS = 64  # chunks asked for and not yet here
# a source is slow that needs so many times as long for a chunk as all do in the mean
SLOW = 4.0
UNMEASURED = 1_000_000  # bytes/s to expect before anything has come
# So often a source that still has chunks to send is asked for the last one again: it serves a state
# for as long as somebody asks for it
REMIND_S = 3.0
MOST_TRIES = 6  # the wait before the same is asked again doubles so often

Get = tuple[PeerId, list[Span]]


@dataclass
class ChunkSource:
    """What one source was asked for, and how fast it brings it."""

    chunks: dict[int, None] = field(default_factory=dict[int, None])  # outstanding, oldest first
    asked_at: float = 0.0
    moved_at: float = 0.0  # when it brought something last, or was asked while it had nothing
    tries: int = 0  # how often it was asked again since
    brought: int = 0
    busy_s: float = 0.0  # how long it took for that


class ChunkRequests:
    """Outstanding chunks of one content."""

    def __init__(self, now: float, chunk_bytes: int, most: int = WINDOW_CHUNKS) -> None:
        """``most``: chunks outstanding at once."""
        self.most, self._chunk_bytes = most, chunk_bytes
        self._moved_at = now
        self._came, self._took_s = 0, 0.0
        self._of: dict[PeerId, ChunkSource] = {}
        self._turn = 0

    def came(self, now: float, source: PeerId | None, missing: Sequence[Span]) -> None:
        """``source`` brought a chunk, and these are missing now."""
        # a stall of all sources, such as a partition, says nothing of how fast they are: counted
        # whole, it would make each later wait a multiple of it
        self._took_s += min(now - self._moved_at, SLOW * self._each_s)
        self._came, self._moved_at = self._came + 1, now
        if source is not None and source in self._of:
            known = self._of[source]
            known.busy_s += now - known.moved_at
            known.brought, known.moved_at, known.tries = known.brought + 1, now, 0
        for known in self._of.values():
            for chunk in [each for each in known.chunks if not _within(each, missing)]:
                del known.chunks[chunk]

    def next(self, now: float, missing: Sequence[Span], sources: Sequence[PeerId]) -> list[Get]:
        """Fill the window, each span from the source that has the fewest chunks outstanding."""
        asked = {chunk for known in self._of.values() for chunk in known.chunks}
        room = self.most - len(asked)
        if not sources or (asked and room < min(SPAN_CHUNKS, self.most)):
            return []
        wanted = list[int]()
        for first, stop in missing:
            if len(wanted) >= room:
                break
            some = (chunk for chunk in range(first, stop) if chunk not in asked)
            wanted += [chunk for chunk, _ in zip(some, range(room - len(wanted)), strict=False)]
        size = min(SPAN_CHUNKS, max(1, len(wanted) // len(sources)))
        gets = dict[PeerId, list[int]]()
        for at in range(0, len(wanted), size):
            peer = self._least(sources)
            self._ask(now, peer, wanted[at : at + size])
            gets.setdefault(peer, []).extend(wanted[at : at + size])
        return [(peer, _spans(chunks)) for peer, chunks in gets.items()]

    def late(self, now: float, sources: Sequence[PeerId], pull_s: float) -> list[Get]:
        """Hedge who is slow, ask again for what may be lost, remind who has more to send."""
        gets, usual_s = list[Get](), self._usual_s
        idle = [peer for peer in sources if peer not in self._of or not self._of[peer].chunks]
        for peer, known in list(self._of.items()):
            if not known.chunks:
                continue
            if idle and (last := self._to_hedge(now, peer, usual_s, pull_s)):
                self._ask(now, idle[0], last)
                gets.append((idle.pop(0), [(chunk, chunk + 1) for chunk in last]))
            again_s = max(4 * pull_s, 2 * usual_s) * 2 ** min(known.tries, MOST_TRIES)
            if now - max(known.moved_at, known.asked_at) > again_s:
                known.tries, known.asked_at = known.tries + 1, now
                gets.append((peer, _spans(list(known.chunks))))
            elif now - known.asked_at > REMIND_S and len(known.chunks) > 1:
                known.asked_at, newest = now, next(reversed(known.chunks))
                gets.append((peer, [(newest, newest + 1)]))
        return gets

    def _to_hedge(self, now: float, peer: PeerId, usual_s: float, pull_s: float) -> list[int]:
        """Chunks that another source should be asked for as well, the last one first. What was
        asked of another in vain counts as asked of nobody: any number of sources may bring nothing.
        """
        known, patience_s = self._of[peer], max(8 * pull_s, SLOW * usual_s)
        each_s = known.busy_s / known.brought if known.brought else usual_s
        others = {
            chunk
            for who, held in self._of.items()
            if who != peer and now - held.moved_at <= patience_s
            for chunk in held.chunks
        }
        alone = [chunk for chunk in reversed(known.chunks) if chunk not in others]
        if now - known.moved_at > patience_s:
            return alone[:SPAN_CHUNKS]
        if len(known.chunks) * each_s > patience_s:  # the oldest is on its way
            alone = [chunk for chunk in alone if chunk != next(iter(known.chunks))]
            return alone[: min(SPAN_CHUNKS, -(-len(alone) // 2))]
        return []

    @property
    def _usual_s(self) -> float:
        """Between two chunks of one source, if all that were asked for any bring alike."""
        return sum(bool(known.chunks) for known in self._of.values()) * self._each_s

    @property
    def _each_s(self) -> float:
        """Between two chunks, of whatever source."""
        return self._took_s / self._came if self._came else self._chunk_bytes / UNMEASURED

    def _ask(self, now: float, peer: PeerId, chunks: Sequence[int]) -> None:
        known = self._of.setdefault(peer, ChunkSource())
        if not known.chunks:
            known.moved_at, known.tries = now, 0
        known.asked_at = now
        known.chunks.update(dict.fromkeys(chunks))

    def _least(self, sources: Sequence[PeerId]) -> PeerId:
        """The source with the fewest chunks outstanding; of several, in turn."""
        self._turn += 1
        turned = [sources[(at + self._turn) % len(sources)] for at in range(len(sources))]
        return min(turned, key=lambda peer: len(self._of[peer].chunks) if peer in self._of else 0)


def _within(chunk: int, spans: Sequence[Span]) -> bool:
    return any(first <= chunk < stop for first, stop in spans)


def _spans(chunks: Sequence[int]) -> list[Span]:
    """Runs of neighbours as spans, in the given order."""
    spans = list[Span]()
    for chunk in chunks:
        if spans and spans[-1][1] == chunk:
            spans[-1] = (spans[-1][0], chunk + 1)
        else:
            spans.append((chunk, chunk + 1))
    return spans
