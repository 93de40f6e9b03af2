"""The door at which a mode gives the members of a log names, under which their privacy is counted.
The other implementation is `atoll.collectives.modes.site_ledger`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from ..group import Admitted, Entry, SpentWord
from ..identifiers import PeerId
from .log import Log


def spent_payload(run: str, peer: PeerId) -> bytes:
    """The bytes under a site's signature that it may spend no more of its privacy in a run."""
    return msgspec.msgpack.encode(("atoll/spent/1", run, peer))


class SiteNames:
    """None: nothing is counted. One object serves one log, and goes by its entries alone."""

    def clashes(self, admitted: Admitted, beside: Collection[Admitted] = ()) -> bool:
        """Whether a peer may not enter by this, for its name or for those of others beside it."""
        return False

    def retires(self, admitted: Collection[Admitted]) -> set[PeerId]:
        """Whose names these take."""
        return set()

    def fits(self, entry: Entry) -> bool:
        """Whether an entry keeps to the names, and its words are news of members; their signatures
        are looked at elsewhere.
        """
        return not entry.spent

    def heard(self) -> Sequence[SpentWord]:
        """What members have said of themselves that may spend no more; not verified."""
        return ()

    def news(self, words: Sequence[SpentWord]) -> tuple[SpentWord, ...]:
        """Those of members that no entry has yet, in the order of an entry."""
        return ()

    def ends(self, words: Sequence[SpentWord]) -> bool:
        """Whether an entry with these would end the run."""
        return False


SiteNamesMaker = Callable[[Log, Callable[[Admitted], str]], SiteNames]
"""What a log is given: makes its names. Arguments: the log, and what a certificate says."""


def no_names(entries: Log, name: Callable[[Admitted], str]) -> SiteNames:
    """Make the names of a run that counts nothing."""
    return SiteNames()
