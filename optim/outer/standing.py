"""What stands against averaging in a run, for people, and what helps."""

from __future__ import annotations

from .worth import NUMBERS, Worth, calmed, judge, said

CURES = (
    'outer momentum in a run that started cold: [train.outer] preset = "plain-mean", or warmup; '
    "rounds that are too long: a smaller [train] sync_every"
)
"""What helps, for people."""


class WorthWatch:
    """Of one run, over the entries of its logs as they are decided."""

    def __init__(self) -> None:
        self.standing = ""  # what speaks against averaging, in words
        self._states = dict[int, list[float]]()  # by fragment

    def take(self, fragment: int, worth: Worth, rounds: int, plain_since: int = 0) -> str:
        """One more reading of a fragment's log; what stands after it, "" for nothing.
        ``plain_since``: the entry from which on the governor takes the plain mean there.

        >>> watch, bad = WorthWatch(), Worth(3.0, 1.0, 0.6, 0.6, 2)
        >>> watch.take(0, bad, 3, plain_since=7).partition(": ")[2]
        '3 and 1 on held-out data; the outer step takes the plain mean from entry 7 on'
        >>> [watch.take(0, Worth(1.0, 1.1, -0.1, -0.1, 2), 2, 7)[:3] for _ in range(2)]
        ['a r', '']
        """
        state = self._states.setdefault(fragment, [0.0] * NUMBERS)
        finding = judge(state, worth, rounds)
        if finding and not self.standing:
            cure = (
                f"the outer step takes the plain mean from entry {plain_since} on"
                if plain_since
                else f"what helps: {CURES}"
            )
            self.standing = f"{said(worth, finding)}; {cure}"
        elif not finding and all(calmed(each, rounds) for each in self._states.values()):
            self.standing = ""
        return self.standing
