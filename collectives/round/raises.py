"""Who has begun later ballots of which nothing came.

Whoever follows a member into its ballot carries out no other's plan: one that begins a ballot
whenever a round comes on, as slowly as clocks do, would keep all from deciding. So after a few in
vain it is *restless*: nobody follows it but out of a ballot that stands still, and nobody waits
long in its own. (So servers of Raft that hear their leader give no candidate a vote.)
"""

from __future__ import annotations

from collections.abc import Collection

from ..group import Member

MOST_IN_VAIN = 8  # ballots of a member of which nothing came, until it is restless
EACH = 8  # entries after which one of them is forgotten
CAME = 2  # so many are forgotten for an entry of a later ballot of its own


class Raises:
    """Of a log, over its rounds, as one member saw them: forgotten by a restart."""

    def __init__(self) -> None:
        self._in_vain: dict[Member, int] = {}  # times `EACH`

    def restless(self, who: Member) -> bool:
        """Whether too many of its ballots came to nothing."""
        return self._in_vain.get(who, 0) > MOST_IN_VAIN * EACH

    def note(self, who: Member) -> None:
        """It has begun a later ballot than any before it in the round."""
        most = (MOST_IN_VAIN + 1) * EACH
        self._in_vain[who] = min(self._in_vain.get(who, 0) + EACH, most)

    def decided(self, config: Collection[Member], convener: Member | None) -> None:
        """An entry, in a ballot of this convener; None: in the first of its round. ``config``: who
        is a member after it."""
        for who in config:
            less = 1 + (CAME * EACH if who == convener else 0)
            self._in_vain[who] = max(0, self._in_vain.get(who, 0) - less)
        self._in_vain = {who: each for who, each in self._in_vain.items() if each and who in config}
