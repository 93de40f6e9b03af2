"""What members do together before anything is given to the log: the seam between a session and
secure rounds (`node.modes.secure`), or BTARD (`node.modes.btard`).

Both end with one vector that all who took part have, and each of them contributes a copy of it:
cids that begin alike (`round.KIN_BYTES`).

What the kernel asks of them is in four parts: the way to that vector (`PreRound`), its bytes in
the log (`OwnResults`), what a member has given (`Spending`), what its script does (`ScriptWork`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...collectives.round.own_results import OwnResults
from ...collectives.round.site_names import SiteNames

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.exchange import BlobProgress
    from ...collectives.group import Admitted, Entry
    from ...collectives.identifiers import PeerId
    from ...collectives.outcomes import Spent
    from ...collectives.round.log import Log
    from . import events as ev


class Spending:
    """What a member has given, and what that has cost it: nothing, where nothing is counted."""

    over = ""
    """Why this run is finished here, though it has not all its rounds; "" where it is not."""

    def gave(self, cid: bytes) -> bool:
        """Whether an earlier life handed over this vector: it may be in a result, and is not to be
        in another.
        """
        return False

    def spent(self) -> Spent | None:
        """What this member has spent of its privacy; None where nothing is counted. Raises
        StorageError.
        """
        return None

    def names(self, entries: Log, name: Callable[[Admitted], str]) -> SiteNames:
        """The names of sites in a log, as `site_names.SiteNamesMaker`; none where no privacy is
        counted.
        """
        return SiteNames()


class ScriptWork:
    """What a script computes or reports beside its contributions: nothing is asked of it."""

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


class PreRoundView(NamedTuple):
    """How many members' vectors the open round needs, whom it waits for before they meet, all who
    may be needed before it has its result, who is no member any more where too few are left for
    one; and for `atoll status`, JSON-able.
    """

    needed: int = 1
    at_work: Sequence[PeerId] = ()
    awaited: Sequence[PeerId] = ()
    gone: Sequence[PeerId] = ()
    document: dict[str, Any] | None = None


class PreRound(Protocol):
    """Methods take `now` in seconds. None of them blocks."""

    prefix: bytes
    """What its control messages begin with: one byte."""

    @property
    def results(self) -> OwnResults: ...

    @property
    def spending(self) -> Spending: ...

    @property
    def work(self) -> ScriptWork: ...

    @property
    def active(self) -> bool:
        """Whether something is under way."""
        ...

    def look(self, now: float) -> PreRoundView:
        """How the open round stands."""
        ...

    def offer(self, now: float) -> None:
        """There may be something to contribute, or a new round."""

    def on_message(self, now: float, peer: PeerId, data: bytes) -> None:
        """A control message, after its prefix. Raises RemoteProtocolError, BadSignatureError."""

    def takes(
        self, now: float, event: ev.OperationDone | ev.OperationRefused | BlobProgress
    ) -> bool:
        """A free-standing operation is over, or content is on its way; whether it was asked for
        here, and is not the script's, or the log's.
        """
        ...

    def tick(self, now: float) -> None:
        """What waits, what was lost, and what takes too long."""

    def decided(self, entry: Entry) -> tuple[bytes | None, bool]:
        """A round is over: the script's cid, if one is free again, and whether its vector is in the
        result.
        """
        ...

    def drop_all(self) -> None:
        """The end of the session: the data plane lets go of what it holds."""


NO_SPENDING, NO_WORK = Spending(), ScriptWork()
