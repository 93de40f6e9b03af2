"""The Swarm seam: what a training script sees of its swarm. No implementation lives here.

Implemented by the node's client (`atoll.node.client`), by `LocalSwarm` in virtual time
(`atoll.node.local`) and by nothing else. All methods are called from one thread of the script and
none of them needs trio or libp2p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

import msgspec

from .foreign import PLAIN, WORDS
from .group import Evaluated
from .groups import MAX_GROUP_NAME
from .identifiers import PeerId, RunId
from .layout import Layout
from .outcomes import AnchorView, Outcome, Pending, Tally
from .swarm import MAX_REDUCER, RunSettings

if TYPE_CHECKING:
    from torch import Tensor

MAX_OP_ID = 64  # characters
MAX_TAG = 48
TAG = r"\A[!-.0-?A-~]*\Z"
"""Of tags: visible ASCII but for "/" and "@", which stand around them in the name of a log."""
MAX_UNDER = 16
Reduction = Literal["mean", "sum", "max", "min", "product"]


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A free-standing operation, as one caller asks for it. All callers must say the same, but for
    ``weight`` and ``deadline_s``.

    ``op_id``: serves once in the life of a run. ``reducer``: one of `collectives.reduce.REDUCERS`,
    or a robust rule. ``codec``: "" is "fp32" (and "bits" for reducers of bits). ``weight`` 0:
    gives nothing, receives the result. ``everyone``: wait for every live member whose script has
    not ended, instead of a few seconds. ``tag``: in words, what else callers must agree in, such as
    a tensor's dtype and shape: callers with another tag have called something else, and with a tag
    such a difference ends the operation at all of them. ``group``: among this member's group of
    that name only (`collectives.groups`); "" is everybody. ``under``: the `Outcome.config` of an
    operation before, whose groups these are; "": the newest configuration. One that is no longer
    known is refused.
    """

    op_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_OP_ID, pattern=WORDS)]
    reducer: Annotated[str, msgspec.Meta(max_length=MAX_REDUCER, pattern=PLAIN)] = "mean"
    codec: Annotated[str, msgspec.Meta(max_length=16, pattern=PLAIN)] = ""
    weight: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 1
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 60.0
    everyone: bool = False
    tag: Annotated[str, msgspec.Meta(max_length=MAX_TAG, pattern=TAG)] = ""
    group: Annotated[str, msgspec.Meta(max_length=MAX_GROUP_NAME, pattern=PLAIN)] = ""
    under: Annotated[str, msgspec.Meta(max_length=MAX_UNDER, pattern=PLAIN)] = ""

    @property
    def name(self) -> str:
        """What its user knows it by."""
        return f"operation {self.op_id!r}"


@dataclass(frozen=True, slots=True)
class PeerView:
    """One member of the run as a script sees it."""

    peer: PeerId
    round: int
    live: bool
    path: str = ""  # "self", "direct", "relay", "lan", "" when unknown
    organiser: bool = False  # its member counts double in a tie
    # In how many rounds running it has read what this member's script has; 0: it is not known to.
    same_order: int = 0
    # Whether the open round of a run of sites waits for its work.
    at_work: bool = False


@runtime_checkable
class Shelf(Protocol):
    """Where a member keeps what is its own in one run and must outlive its processes: one value, of
    which a crash leaves the old or the new.
    """

    def load(self) -> bytes | None:
        """What was saved last, None where nothing was. Raises StorageError."""
        ...

    def save(self, data: bytes) -> None:
        """Replace it, durably. Raises StorageError: then the old value is there."""
        ...


@runtime_checkable
class Shelved(Protocol):
    """A Swarm whose member has a shelf: all but those of a job of several ranks."""

    def shelf(self) -> Shelf:
        """This member's, in this run."""
        ...


class Operating(Protocol):
    """A free-standing operation under way (a Pending[Outcome]). Any thread may call."""

    @property
    def op_id(self) -> str:
        """Its name."""
        ...

    @property
    def members(self) -> Sequence[PeerId]:
        """The configuration it was called under, or the group of it. A gather's result has a slot
        for each, in this order, all equally long.
        """
        ...

    @property
    def numel(self) -> int:
        """Length of the result."""
        ...

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """See Pending. Raises what the node refused the call with."""
        ...

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Copy elements [start, start + destination.numel()) of a committed result: float32, or
        words in its place.
        """
        ...

    def release(self) -> None:
        """The result is no longer needed. Idempotent; an operation under way is not disturbed."""
        ...

    def cancel(self) -> None:
        """Wait for it no longer: unless it is decided, `wait` says "open" from now on.

        The contribution is taken back where no plan names it yet; else it may still be counted by
        the others.
        """
        ...


@runtime_checkable
class Swarm(Protocol):
    """A run, as the script of one member sees it."""

    peer: PeerId
    run_id: RunId
    settings: RunSettings

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> AnchorView:
        """Enter the run with a model of this layout and return the newest anchor.

        Where the run has no state yet and this member founds it, ``initial`` writes the initial
        parameters into a float32 tensor of shape (numel,). Raises ModelMismatchError (naming the
        tensors) when the run's model is another one. Calling it again after the node was restarted
        re-enters.
        """
        ...

    def anchor(self) -> AnchorView:
        """A lease on the newest committed anchor. Release it."""
        ...

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> Pending[Outcome]:
        """Freeze a contribution and offer it to the open round.

        ``write`` fills a float32 tensor of shape (numel,) with the pseudo-gradient (anchor -
        parameters), weighted by ``samples`` (an integer > 0; 0 only to wait for the end of a round
        that this member was not sampled for) in the mean; it may keep the tensor, which stays as
        written until the next contribution. With ``base``, the round of the anchor it was made on,
        it is refused (committed, not counted, with the reason) when that anchor is no longer the
        newest. ``loss``: the mean loss of the inner steps in it, for a run with a governor, or with
        it what an evaluation found;
        ``lag``: how many inner steps rounds take here, for one that is planned again, or seconds a
        step takes, for one with `Groups`. ``hold_s`` above 0: it is not to end the round; it is
        offered once another member has ended it, or after so many seconds, and until the next call
        nobody waits for this member while it has offered nothing. At most one contribution is
        frozen at a time: a second call while one is undecided raises LocalProtocolError.
        """
        ...

    @property
    def closing(self) -> int:
        """The newest round that another member has finished, 0 before the first: whoever has
        trained contributes now, so that the fastest member sets the pace and nobody is left out.
        Cheap: read after every step."""
        ...

    @property
    def paused(self) -> str:
        """Why this machine's owner does not want it to train now, "" where she does: read between
        two rounds, and again until it is over.
        """
        ...

    @property
    def model_folder(self) -> Path | None:
        """Where the script leaves what `atoll export` writes beside the anchor: in the run's folder
        at the node on this machine. None where no node keeps the run.
        """
        ...

    def buffer(self, numel: int) -> Tensor:
        """A tensor, float32 (numel,), zero at first, that the node can read where it lies: means,
        sums and maxima of it are neither copied nor encoded in this process. Do not write to it
        from such a call until `done` or `wait` says that it is over, nor call another with it
        (LocalProtocolError); an "open" operation leaves it as it was, and it may be used again at
        once."""
        ...

    def vanished(self, flat: Tensor, codec: str) -> float:
        """The share of the values of ``flat`` (float32) that are not 0 and that ``codec`` makes
        0; of a long vector an estimate.
        """
        ...

    def operate(self, call: Call, source: Tensor) -> Operating:
        """Call a free-standing operation with ``source`` (float32, contiguous, CPU, or words in its
        place), which is read before this returns, unless it is a whole `buffer`.
        `atoll.collectives.api` makes the operations that people use of it.

        The result is bit-identical on all members. Who does not call is waited for a few seconds,
        then left out; a member that calls after that gets the same result, uncounted. A source with
        NaN or infinity ends as "open". Raises NotEnoughPeersError while this peer is not yet a
        member, LocalProtocolError for an ``op_id`` used before or otherwise by others, ConfigError.
        """
        ...

    def all_reduce(
        self,
        flat: Tensor,
        *,
        op_id: str,
        op: Reduction = "mean",
        weight: int = 1,
        deadline_s: float = 60.0,
        codec: str = "",
        everyone: bool = False,
    ) -> Pending[Outcome]:
        """See `atoll.collectives.api.all_reduce`: in place when the outcome is committed; ``flat``
        is untouched otherwise.
        """
        ...

    def members(self) -> Sequence[PeerView]:
        """The members of the run's current configuration."""
        ...

    def tallies(self, first: int) -> Sequence[Tally]:
        """The certified entries from number ``first`` on, oldest first, the genesis being 0: some
        of them where there are many, none where there is none yet. Of a run in fragments, those of
        the first. Raises SwarmClosedError without a node."""
        ...

    def shard(self, loader: Any) -> Iterable[Any]:
        """The batches of ``loader`` that are this member's: see `atoll.optim.data.shard`."""
        ...

    def report(self, metrics: Mapping[str, float]) -> None:
        """Tell the node about training ("step", "loss", …): shown by `atoll status`. Never blocks,
        and never raises: a value that is no number is left out, with a warning.
        """
        ...

    def leave(self) -> None:
        """Leave the run: finish or hand over the round, then only seed."""
        ...

    def close(self) -> None:
        """Drop the connection to the node. A private node ends with it. Idempotent."""
        ...


@runtime_checkable
class FragmentSwarm(Swarm, Protocol):
    """A run whose model is cut into fragments (`collectives.layout.cut`), each with a log and
    rounds of its own. `contribute` is for runs of one; `anchor` is of all, and its round that of
    the fragment that is behind; `closing` is of the first."""

    @property
    def fragments(self) -> int:
        """How many."""
        ...

    def fragment_anchor(self, fragment: int) -> AnchorView:
        """A lease on the newest committed anchor of one fragment."""
        ...

    def fragment_closing(self, fragment: int) -> int:
        """`closing` of one fragment."""
        ...

    def contribute_fragment(
        self,
        fragment: int,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> Pending[Outcome]:
        """`contribute` for one fragment: ``write`` fills a tensor of its length. One contribution
        of each may be frozen at a time.
        """
        ...
