"""What comes of rounds: outcomes of contributions, entries of the log, anchors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Generic, Literal, Protocol, TypeVar

import msgspec

from .group import Config, Count, Member
from .identifiers import PeerId

if TYPE_CHECKING:
    from torch import Tensor

Status = Literal["committed", "open", "lost"]


T = TypeVar("T", covariant=True)


class Spent(msgspec.Struct, frozen=True):
    """What a member has spent of its privacy, counted before each contribution leaves it: never
    below what others can know.

    ``epsilon``: so far, for ``delta``; ``steps``: contributions handed over; ``left``: how many
    more stay within ``stop_at_epsilon``. ``clip``: the bound of the open round, which follows
    ``quantile`` where that is not None.
    """

    clip: float
    quantile: float | None
    epsilon: float
    delta: float
    stop_at_epsilon: float
    steps: int
    left: int


@dataclass(frozen=True, slots=True)
class Share:
    """One counted contribution of a committed round. ``weight``: what a robust rule of whole
    vectors gave it (after mixing: its share in all mixtures), as far as this member saw it weighed.
    """

    peer: PeerId
    samples: int
    weight: float | None = None


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """What one certified entry of the log says of the data: who was counted for how many samples,
    and who is a member from then on.

    ``round``: committed rounds in the state after it. ``hash``: the entry's; "" where there is no
    log.
    """

    entry: Count
    round: Count
    shares: tuple[tuple[Member, Count], ...]
    members: Config
    hash: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a contribution. A lost peer is a value here, not an exception.

    ``committed``: decided and applied; ``contributors`` names exactly what the mean was taken over,
    ``counted`` says whether one's own contribution is among it. ``open``: the deadline passed and
    the round is still undecided: the contribution stays frozen, training goes on. ``lost``: no
    round counts it or ever will, since it was lost with an earlier node (``round`` is 0), or
    refused (``round``: the newest committed by then). No contributors are named; what was trained
    is the script's to contribute again.

    ``bytes_sent`` and ``bytes_received``: what this peer's node moved, encryption and control
    messages included, since the outcome of the contribution before (so that they add up over
    rounds), or while the all-reduce was under way.

    ``unfit``: the contribution was refused for what it holds (NaN, infinity, a value too large for
    its codec), and always would be.

    ``over``: why this member contributes nothing more to the run ("" where it may): its privacy is
    spent, or that of so many others that no round can be made.

    ``differs``: others have called something else under this name; ``overflows``: what was decided
    is more than its codec holds. What an operation's caller waits for raises either, with
    ``reason``, as LocalProtocolError.

    ``vanished``: of a free-standing operation with a codec, the share of this member's values that
    are not 0 and that its codec turned into 0 on the way (`codecs.vanished`).
    """

    status: Status
    round: int
    contributors: tuple[Share, ...] = ()
    counted: bool = False
    lost: tuple[PeerId, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    elapsed_s: float = 0.0
    reason: str = ""
    # Of an operation: name and size of the configuration that it was decided under.
    config: str = ""
    members: int = 0
    unfit: bool = False
    vanished: float = 0.0
    differs: bool = False
    overflows: bool = False
    over: str = ""


class AnchorView(Protocol):
    """A committed generation of the anchor: float32 (numel,), read-only. Valid until `release`."""

    @property
    def round(self) -> int:
        """Committed rounds that are in it."""
        ...

    @property
    def samples(self) -> int:
        """How many samples all members together have contributed to it: what learning-rate
        schedules follow.
        """
        ...

    @property
    def lag(self) -> float:
        """How many inner steps a round takes to be decided, by what the contributors of the newest
        round in it measured: their median. 0 where none says so."""
        ...

    @property
    def steps(self) -> int:
        """How many inner steps this member makes from it, where the run gives members each their
        number (`Groups`); 0: as the manifest says, or, for one that has a contribution to offer,
        that its group was counted without it."""
        ...

    @property
    def digest(self) -> str:
        """blake3 of its bytes, in hex; may be computed when first asked for."""
        ...

    @property
    def numel(self) -> int:
        """Number of elements."""
        ...

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Copy elements [start, start + destination.numel()) into ``destination`` (float32,
        contiguous, on the CPU).
        """
        ...

    def release(self) -> None:
        """Give the lease back; the view must not be used afterwards. Idempotent."""
        ...


class Pending(Protocol, Generic[T]):
    """A result to come. `wait` with a timeout never raises for lateness: it returns the state."""

    def done(self) -> bool:
        """Whether `wait` would return the final result at once."""
        ...

    def wait(self, timeout_s: float | None = None) -> T:
        """The result; after ``timeout_s`` seconds an "open" Outcome. May be called again."""
        ...
