"""Whether a peer reads what we say to it: a state machine without I/O; ``now``: monotonic seconds.

A peer that reads slowly speaks as fast as any, so nothing that it says tells that our messages wait
unread. Its answers to our questions for a sign of life do: they come in the order of what was said.
While somebody wants to know, a question is always under way.

Nor does it read what was on a stream that it ended: who ends one after another is told little,
though it may be told something in between.
"""

from __future__ import annotations

from collections import deque

ASK_S = 0.5
"""So often a peer is asked while somebody wants to know whether it reads."""
WATCHED_S = 30.0
"""So long after somebody wanted to know it is asked that often."""
UNREAD_S = 2.0
"""What is answered so late was not read. Who says nothing for one second is suspected already, so a
busy machine or lost packets do not depend on this."""
AGAIN_S = 0.3
"""It must be late for so long: who was stopped itself has not taken in the answers that came
meanwhile (`Echoes.stopped`).
"""
ENDS, ENDS_S = 5, 10.0
"""Who ends so many streams in so many seconds does not read. A node that starts again, or is
dialled from both sides, ends one or two.
"""


class Echoes:
    """Of all streams to one peer in one topic, one after another."""

    def __init__(self) -> None:
        self._watched_at = self._asked_at = self._stopped_at = float("-inf")
        self._asked = deque[float]()  # questions that are not answered, oldest first
        self._took_s = 0.0  # from the question to the last answer
        self._late_since: float | None = None  # by the looks at it
        self._ends = deque[float](maxlen=ENDS)  # when streams were lost

    def due(self, now: float) -> bool:
        """Whether to ask now: somebody wants to know, and no question is under way."""
        return (
            not self._asked and now - self._watched_at < WATCHED_S and now - self._asked_at >= ASK_S
        )

    def asked(self, now: float) -> None:
        """A question is under way."""
        self._asked_at = now
        self._asked.append(now)

    def answered(self, now: float) -> None:
        """The oldest question was answered."""
        if self._asked:
            self._took_s = now - max(self._asked.popleft(), self._stopped_at)

    def ended(self, now: float, *, lost: bool = True) -> None:
        """The stream ended, and the next one begins anew. ``lost``: so is what was unread."""
        self._asked.clear()
        self._took_s, self._late_since = 0.0, None
        if lost:
            self._ends.append(now)

    def stopped(self, now: float) -> None:
        """This process was held up until now, so its peers may have answered long ago."""
        self._stopped_at, self._took_s, self._late_since = now, 0.0, None

    def unread(self, now: float, rtt_s: float) -> bool:
        """Whether what we say to the peer is not read for now; ``rtt_s``: the round-trip time to
        it, as far as it is known.
        """
        self._watched_at = now
        if len(self._ends) == ENDS and now - self._ends[0] < ENDS_S:
            return True
        waits = now - max(self._asked[0], self._stopped_at) if self._asked else 0.0
        if max(waits, self._took_s) <= max(UNREAD_S, 4 * rtt_s):
            self._late_since = None
            return False
        if self._late_since is None:
            self._late_since = now
        return now - self._late_since >= AGAIN_S
