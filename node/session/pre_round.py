"""What members do together before anything is given to the log: the seam between a session and
secure rounds (`node.modes.secure`), or BTARD (`node.modes.btard`).

Both end with one vector that all who took part have, and each of them contributes a copy of it:
cids that begin alike (`round.KIN_BYTES`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...collectives.round.site_names import SiteNames

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.exchange import BlobProgress
    from ...collectives.group import Admitted, Entry, Plan, SpentWord
    from ...collectives.identifiers import PeerId
    from ...collectives.round.log import Log
    from ...collectives.swarm import Spent
    from . import events as ev


class PreRound(Protocol):
    """Methods take `now` in seconds. None of them blocks."""

    prefix: bytes
    """What its control messages begin with: one byte."""

    def names(self, entries: Log, name: Callable[[Admitted], str]) -> SiteNames:
        """The names of sites in a log, as `site_names.SiteNamesMaker`; none where no privacy is
        counted.
        """
        return SiteNames()

    @property
    def active(self) -> bool:
        """Whether something is under way."""
        ...

    def offer(self, now: float) -> None:
        """There may be something to contribute, or a new round."""
        ...

    def on_message(self, now: float, peer: PeerId, data: bytes) -> None:
        """A control message, after its prefix. Raises RemoteProtocolError, BadSignatureError."""
        ...

    def tick(self, now: float) -> None:
        """What waits, what was lost, and what takes too long."""
        ...

    def decided(self, entry: Entry) -> tuple[bytes | None, bool]:
        """A round is over: the script's cid, if one is free again, and whether its vector is in the
        result.
        """
        ...

    def gave(self, cid: bytes) -> bool:
        """Whether an earlier life handed over this vector: it may be in a result, and is not to be
        in another.
        """
        return False

    def execute(self, plan: Plan) -> bool:
        """A plan of the log; whether its result is made here, without the data plane."""
        return False

    def may_fetch(self, entry: Entry) -> bool:
        """Whether result bytes may be fetched before the decision, to vote for the entry."""
        return True

    def contradicts(self, entry: Entry) -> bool | None:
        """Whether an entry is not what this member has found itself; None: it is looked into."""
        return False

    def may_vote(self, entry: Entry, voters: Collection[PeerId]) -> bool:
        """Whether this member votes for an entry whose bytes are here, and for which these others
        have voted.
        """
        return True

    def on_false(self, entry: Entry, convener: PeerId, ballot: int) -> None:
        """A convener proposes what contradicts this member's own result."""

    def on_result(self, plan: Plan, digests: tuple[bytes, ...]) -> bool:
        """The owners of a plan's parts have stated its result; whether it is not needed, as it is
        made here.
        """
        return False

    def takes(self, event: ev.OperationDone | ev.OperationRefused) -> bool:
        """A free-standing operation is over; whether it was one of this, and not the script's."""
        return False

    def on_blob(self, now: float, event: BlobProgress) -> bool:
        """Content on its way; whether it is one of those asked for here."""
        return False

    @property
    def needed(self) -> int:
        """How many members' vectors the open round needs."""
        return 1

    def at_work(self, now: float) -> list[PeerId]:
        """Whom the open round waits for, before its vectors meet."""
        return []

    def awaited(self) -> list[PeerId]:
        """All whose vectors may be needed before the open round has its result."""
        return []

    def gone(self) -> list[PeerId]:
        """Who was a member and is none any more, where too few are left for a result."""
        return []

    def spent(self) -> Spent | None:
        """What this member has spent of its privacy; None where nothing is counted."""
        return None

    @property
    def over(self) -> str:
        """Why this run is finished here, though it has not all its rounds; "" where it is not."""
        return ""

    def spent_words(self) -> Sequence[SpentWord]:
        """What members have said of themselves that may spend no more of their privacy."""
        return ()

    def computed(self, now: float, number: int, vector: Tensor, part: int = 0) -> None:
        """The script has computed what it was asked for, or ``part`` of it; ``vector``, float32
        (numel,), is copied.
        """

    def starts(self, number: int) -> Tensor | None:
        """What the work begins at that the script was asked for, where that is no anchor; None:
        nobody wants it any more.
        """
        return None

    def report(self, metrics: Mapping[str, float]) -> None:
        """What the script has reported last."""

    def view(self) -> dict[str, Any]:
        """For `atoll status`: JSON-able."""
        return {}

    def drop_all(self) -> None:
        """The end of the session: the data plane lets go of what it holds."""
