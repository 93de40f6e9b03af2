"""Events of a run as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from ..home.output import bytes_text, short_peer, span_text
from ..run.events import EntryCommittedEvent, RoundUnmaskedEvent, RunEvent


class Words:
    """Events as lines for a person. It remembers who was a member, to say who came and went, and
    whether contributions are masked: then what an entry counts of each is no number of samples.
    """

    def __init__(self) -> None:
        self._members: set[str] | None = None
        self._masked = False

    def of(self, event: RunEvent) -> Iterator[str]:
        """The lines of one event."""
        if isinstance(event, EntryCommittedEvent):
            yield from self._entry(event)
            return
        self._masked |= isinstance(event, RoundUnmaskedEvent)
        yield event.words()

    def _entry(self, event: EntryCommittedEvent) -> Iterator[str]:
        now, before = set(event.members), self._members
        self._members = now
        for peer in sorted(now - before) if before is not None else ():
            yield f"{short_peer(peer)} is a member, of {len(now)} now"
        for peer in sorted(before - now) if before is not None else ():
            if peer in event.left:
                yield f"{short_peer(peer)} has left; {len(now)} are members"
            else:
                yield f"{short_peer(peer)} is no member any more; {len(now)} are"
        for peer in event.lost:
            yield f"{short_peer(peer)} was lost in the round; it was decided without it"
        if event.contributors:
            mine = "" if event.counted else ", this peer did not"
            samples = "" if self._masked else f"{sum(event.contributors.values())} samples, "
            yield (
                f"round {event.round}: {len(event.contributors)} contributed{mine}, "
                f"{samples}{span_text(event.elapsed_s)}, "
                f"{bytes_text(event.bytes_sent)} sent so far"
            )
