"""Contributions over a link that is much thinner than others: each round that counts one lasts
as long as its upload. So it is in every n-th round only, and costs the others no more than a part
of their time. What it is not in, its script carries on to the next. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ..group import Entry, Member
from ..messages import Ready

THIN = 4.0  # times below the median of all rates: members that differ by less wait for each other
FEWEST = 2  # of those with better links: one alone exchanges nothing


class ThinLinks:
    """What members have said of their links, when they were last counted, and who is left ``out``
    of the open round: nobody waits for its contribution, or counts it.
    """

    def __init__(self, spare: float) -> None:
        """``spare``: the part of the time that one such member may cost; 0: all are waited for."""
        self.out: frozenset[Member] = frozenset()
        self._spare = spare
        self._entries = 0  # with contributors, since this member is there
        self._counted: dict[Member, int] = {}  # the newest of them that counts it
        self._rates: dict[Member, int] = {}

    def decided(
        self,
        entry: Entry,
        ready: Mapping[Member, Ready],
        nbytes: tuple[float, float],
        round_s: float | None,
    ) -> None:
        """The next entry of the log. ``ready``: what was said in its round; ``nbytes``: of one
        contribution and of a result; ``round_s``: how long that round took.
        """
        if not self._spare:
            return
        there = set(entry.next_config)
        self._rates |= {who: rate for who, said in ready.items() if (rate := _rate(said))}
        self._rates = {who: rate for who, rate in self._rates.items() if who in there}
        self._counted = {who: at for who, at in self._counted.items() if who in there}
        if entry.contributors:
            self._entries += 1
            counted = [each.member for each in entry.contributors if each.member in there]
            self._counted |= dict.fromkeys(counted, self._entries)
        self.out = frozenset(self._thin(nbytes, self._spare * round_s) if round_s else ())

    def _thin(self, nbytes: tuple[float, float], spare_s: float) -> Iterator[Member]:
        """``spare_s``: seconds of a round that may be waited. Whoever was in no round that is known
        here is left out of none.
        """
        if len(self._rates) <= FEWEST:
            return
        usual = median(self._rates.values())
        others_s = sum(nbytes) / usual
        for who, rate in self._rates.items():
            if THIN * rate <= usual and (last := self._counted.get(who)) is not None:
                rounds = self._entries + 1 - last
                if nbytes[0] / rate - others_s > rounds * spare_s:
                    yield who


def _rate(ready: Ready) -> int:
    """Bytes a second that a member's link carries, by its own word; 0: not known."""
    return min((rate for rate in (ready.up, ready.down) if rate > 0), default=0)
