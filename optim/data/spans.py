"""Sets of positions as spans [start, stop): sorted, apart from one another, none empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Span = tuple[int, int]


def united(spans: Iterable[Span]) -> list[Span]:
    """All positions of these spans, which are in any order and do not overlap."""
    out = list[Span]()
    for start, stop in sorted(spans):
        if out and out[-1][1] == start:
            out[-1] = out[-1][0], stop
        else:
            out.append((start, stop))
    return out


def without(spans: list[Span], taken: list[Span]) -> list[Span]:
    """The positions of a set that are not in another."""
    out, at = list[Span](), 0
    for start, stop in spans:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        here = at
        while here < len(taken) and taken[here][0] < stop:
            if start < taken[here][0]:
                out.append((start, taken[here][0]))
            start = max(start, taken[here][1])
            here += 1
        if start < stop:
            out.append((start, stop))
    return out


class Cursor:
    """Reads positions off a sequence of spans, so many at a time."""

    def __init__(self, spans: Iterator[Span]) -> None:
        self._spans = spans
        self._left: Span = (0, 0)

    def take(self, count: int) -> list[Span]:
        """The next ``count`` positions, in their order; fewer where the sequence ends."""
        out = list[Span]()
        while count:
            start, stop = self._left
            if start == stop:
                if (following := next(self._spans, None)) is None:
                    break
                start, stop = following
            used = min(count, stop - start)
            joins = out and out[-1][1] == start
            out[-1:] = [(out[-1][0], start + used)] if joins else [*out[-1:], (start, start + used)]
            self._left, count = (start + used, stop), count - used
        return out
