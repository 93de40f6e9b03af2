"""The Swarm seam: what a training script sees of its swarm. No implementation lives here.

Implemented by the node's client (`atoll.node.client`), by `LocalSwarm` in virtual time
(`atoll.node.local`) and by nothing else. All methods are called from one thread of the script and
none of them needs trio or libp2p.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import msgspec

from .arrivals import ArrivalSettings
from .codec_names import (
    CODECS,
    DEFAULT_CODEC,
    LARGEST_ERROR,
    MASKED_CODEC,
    RESULTS,
    unknown_codec,
)
from .errors import ConfigError
from .foreign import PLAIN, WORDS
from .group import Config, Count, Evaluated, Member, TopologyKind
from .groups import MAX_GROUP_NAME
from .growth import MOST_GROWTH, RoundLengths
from .identifiers import PeerId, RunId
from .layout import MAX_FRAGMENTS, BufferClass, Layout
from .seeded import BtardSettings

if TYPE_CHECKING:
    from torch import Tensor

Status = Literal["committed", "open", "lost"]
MAX_OP_ID = 64  # characters
MAX_TAG = 48
TAG = r"\A[!-.0-?A-~]*\Z"
"""Of tags: visible ASCII but for "/" and "@", which stand around them in the name of a log."""
MAX_UNDER = 16
MAX_REDUCER = 64  # characters of its name
T = TypeVar("T", covariant=True)
OuterRule = Literal[
    "nesterov",
    "sgd",
    "adam",
    "yogi",
    "adagrad",
    "co2",
    "adamw",
    "delayed_nesterov",
    "heloco",
]
"""What steps the anchor (`optim.outer.rules`), as manifests name it."""

Reduction = Literal["mean", "sum", "max", "min", "product"]
CoordinateRule = Literal["median", "trimmed_mean", "meamed"]
GramRule = Literal["krum", "multi_krum", "mda", "geometric_median", "centred_clip", "caf", "flag"]
"""What a round makes of contributions of which some may be anything (`security.rules`): each
element by itself, or rows by their Gram matrix."""


MAX_SAMPLES = 1 << 48
"""A contribution has fewer."""


def sample_count(samples: Any) -> int:
    """``samples`` as an int: any integer, also numpy's or a tensor of one. Raises ConfigError for
    anything else, such as 2.5, and from `MAX_SAMPLES` on.
    """
    try:
        count = operator.index(samples)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{samples!r} is not a number of samples",
            key="samples",
            why="Members are weighted by whole samples.",
        ) from None
    if abs(count) >= MAX_SAMPLES:
        raise ConfigError(
            f"a number of {count:.3g} samples is more than a step or a round has"
            if abs(count) < 1 << 1000
            else "a number of samples that is longer than 1000 bits",
            key="samples",
            why=f"A round takes fewer than 2^{MAX_SAMPLES.bit_length() - 1} samples of a member.",
            hint="samples(n) is told how many the step under way processes, such as len(batch).",
        )
    return count


MOST_WARMUP = 1_000_000
"""Outer steps, which a float32 counts."""


class OuterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outer optimizer, applied to the anchor in the node: one of `optim.outer.rules`. Each
    reads what it needs of the rest. `optim.outer.presets` has values that were tried.
    """

    kind: Literal[OuterRule, "momentum"]
    lr: float
    momentum: float = 0.0
    # Of adam, yogi and adamw; this and the next are published values (arXiv 2003.00295).
    beta2: float = 0.99
    epsilon: float = 1e-3  # of adam, yogi, adagrad and adamw
    weight_decay: float = 0.0  # of adamw
    clip: float = 3.0  # of co2: times the mean norm of the momentum
    # Restart momentum and halve lr for a while when the update's norm or the loss jumps.
    governor: bool = False
    # Make the mean as long as its contributions are on average, however many they are.
    stretch: bool = False
    clip_norm: float | None = None  # the longest mean; a longer one is scaled down to it
    every: int = 4  # of delayed_nesterov: steps between two of momentum
    spread: float = 0.0  # of delayed_nesterov: the share of momentum that the steps between take
    agreement: float = 0.5  # of heloco: the cosine with momentum from which nothing is corrected
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"  # how momenta are kept between rounds
    # Of nesterov and momentum: outer steps over which lr and momentum grow from 1 and 0, those of
    # the plain mean.
    warmup: int = 0
    # Steps of the plain mean before the warm-up. 0: where rounds grow (`growth`), until they have
    # their full length.
    hold: int = 0
    # With a governor that goes by evaluations: after so many readings in a row that speak against
    # averaging it takes the plain mean. 0: it does not go by them.
    watch: int = 0
    # The governor says what it sees, and changes nothing: members that lie could move it.
    advises: bool = False
    # Of how many steps the rounds are short and grow: none of them is a jump to the governor.
    short: int = 0


PLAIN_MEAN = OuterSettings("sgd", 1.0)
"""The new anchor is the mean of the members' models (`optim.outer.presets` says for whom)."""


TensorPattern = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=WORDS)]
"""A shell pattern of tensors' names."""


LEAST_SITES = 3
"""Of a masked sum: of two, each would know the other's vector."""


class SecureSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Secure aggregation of what members contribute: nobody sees more than a sum.

    ``threshold``: the fewest vectors that a sum may be of; more than two thirds of the members, if
    those are more. ``reach``: the largest absolute value an element can have. ``max_weight``: what
    a member counts at most, by its samples; 1: all count the same. ``metrics``: what scripts report
    of their training that is added up in the same sum; of a single member nobody else learns it.

    ``buckets``: how many sums there are at most, each of at least ``threshold`` vectors, of members
    dealt at random; ``rule``, a robust one by coordinate, is then what a round makes of their
    means.

    ``reaches``: of tensors whose names match a shell pattern, in place of ``reach``; the longest
    that matches decides.
    """

    threshold: Annotated[int, msgspec.Meta(ge=LEAST_SITES, le=1024)] = LEAST_SITES
    reach: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 16.0
    max_weight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    metrics: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=PLAIN)], ...],
        msgspec.Meta(max_length=16),
    ] = ()
    buckets: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    rule: Annotated[str, msgspec.Meta(max_length=MAX_REDUCER, pattern=PLAIN)] = "mean"
    reaches: dict[TensorPattern, Annotated[float, msgspec.Meta(gt=0, le=1e9)]] = {}


class PrivacySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Differential privacy of what a member contributes as a whole, by noise in the masked sum.

    ``noise``: its standard deviation in units of ``clip``, the largest Euclidean norm of a
    contribution. ``delta``, ``stop_at_epsilon``: what a member spends at most. ``colluding``: how
    many members of a sum may tell each other the noise they added (each knows its own).

    ``quantile``: ``clip`` is only the first bound, which then follows this quantile of the
    contributions' norms, by ``clip_rate`` (arXiv 1905.03871); ``count_noise``: the deviation of the
    noise on how many were within it (None: twice ``noise``). ``noise`` is what both together cost.

    ``most_examples``: a member of n examples is multiplied by min(n, ``most_examples``) /
    ``most_examples``, once it is clipped, so that none moves the sum by more than ``clip``; the
    sum is divided by ``normaliser`` then, a constant that says nothing of who has how many (McMahan
    et al. 2018, arXiv 1710.06963). None: all count the same, and the sum is divided by their
    number, which everybody knows.

    ``clips``: tensors whose names match a shell pattern are a group with a bound of their own, the
    longest that matches decides; ``clip`` is that of all others. `norm` bounds the whole.
    """

    noise: Annotated[float, msgspec.Meta(ge=0.1, le=100)]
    clip: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    delta: Annotated[float, msgspec.Meta(gt=0, lt=0.1)]
    stop_at_epsilon: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    colluding: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    quantile: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    clip_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.2
    count_noise: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    most_examples: Annotated[int, msgspec.Meta(ge=1, lt=MAX_SAMPLES)] | None = None
    normaliser: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    clips: dict[TensorPattern, Annotated[float, msgspec.Meta(gt=0, le=1e6)]] = {}

    def norm(self, clip: float) -> float:
        """The largest norm of a contribution whose tensors of no group are bounded by ``clip``:
        what noise is measured by (arXiv 1710.06963, per-layer clipping).
        """
        square = clip * clip
        for pattern in sorted(self.clips):  # one after another: the same bits on every machine
            square += self.clips[pattern] * self.clips[pattern]
        return math.sqrt(square)

    def share(self, examples: int) -> float:
        """What a member of so many examples counts: above 0, at most 1."""
        if self.most_examples is None:
            return 1.0
        return min(examples, self.most_examples) / self.most_examples


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


class WorkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a site of a run of sites does in a round, one of the three: so many inner ``steps``,
    so many ``samples``, or so many ``epochs`` of its own examples. It contributes when that is
    done, whatever others have done, and the round waits for all who take part (`round.turns`).

    ``weights``: what a site counts in the mean: its number of examples, which it has declared, or
    as much as any other. Never what it has processed.
    """

    steps: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    samples: Annotated[int, msgspec.Meta(ge=1, lt=MAX_SAMPLES)] | None = None
    epochs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    weights: Literal["examples", "equal"] = "examples"

    @property
    def declares(self) -> bool:
        """Whether each site must say how many examples it has."""
        return self.weights == "examples" or self.epochs is not None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps} steps"
        if self.samples is not None:
            return f"{self.samples} samples"
        return "one epoch" if self.epochs == 1 else f"{self.epochs} epochs"


class SiteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What members of a run of sites do beside plain inner steps, and keep for themselves
    (`optim.federated.methods`, `optim.federated.personal`).

    ``mu``: FedProx' pull to the anchor. ``beta``: the share of the own direction in those of
    FedAvg-M and SCAFFOLD-M. ``ahead``: Per-FedAvg's step ahead. ``pull``: of a personal model
    beside the run's (Ditto) to the anchor; None: there is none. ``work``: what a site does in a
    round; None: as much as in the time that the fastest takes for ``sync_every``.
    """

    method: Annotated[str, msgspec.Meta(max_length=32, pattern=PLAIN)] = "fedavg"
    mu: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.01
    beta: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    ahead: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 0.01
    pull: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    work: WorkSettings | None = None


class SampleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many members take part in a round: a share of them, or a number (``count``), and at least
    ``least`` (`round.sampling`).
    """

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    least: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1

    def wanted(self, members: int) -> int:
        """How many of so many."""
        return min(
            members,
            max(
                self.least,
                self.count if self.count is not None else math.ceil(self.share * members),
            ),
        )


class EvaluateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often members evaluate the model on held-out data before and after they adopt a round's
    result, where their scripts say how (`optim.script.evaluation`).

    ``every``: rounds from one evaluation to the next, at least; ``share``: of the script's time
    that evaluations take, at most; ``rounds``: how many readings in a row speak against averaging
    before a verdict says so, and a governor takes the plain mean.
    """

    every: int = 1
    share: float = 0.01
    rounds: int = 3


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How adapters are trained (`optim.modes.adapters`). ``mode``: which of the two factors of a
    LoRA train in a round. ``base``: what members compare of parameters that are frozen.
    """

    mode: Literal["plain", "alternate", "ffa"] = "plain"
    base: Literal["values", "shapes"] = "values"


MOST_OPERATION_ELEMENTS = 1 << 34


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What free-standing operations may take of a member: elements of a vector, operations at once,
    and bytes of those that one other member speaks of and the own script has not called."""

    operation_elements: int = 1 << 32
    operations: int = 64
    member_bytes: int = 256 << 20


MOST_REPLAYED = 16
"""Rounds: a checkpoint is tried after so many at the latest, since all results that follow one are
kept.
"""


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a run's manifest that governs rounds and optimizers. The manifest has authority
    over the script.
    """

    method: Literal["diloco", "local_sgd", "gradient_averaging"] = "diloco"
    sync_every: int | None = 100  # H: inner steps a round; None: rounds end by time
    round_s: float | None = None  # seconds a round, when sync_every is None
    target_samples: int | None = None  # samples of all members a round, when both are None
    local_after: int = 0  # rounds of one inner step before those of sync_every (post-local SGD)
    # The first so many rounds of sync_every are made as shorter ones, of one step at first
    # (`collectives.growth`).
    growth: Annotated[int, msgspec.Meta(ge=0, le=MOST_GROWTH)] = 0
    # What is trained on while a round is under way (`optim.rounds.replica`).
    overlap: Literal["none", "late", "eager"] = "none"
    # Inner steps from a contribution to its result, with overlap; None: to the end of the next
    # round.
    delay: int | None = None
    # Of the time to be spent on training: sync_every and delay are planned again as rounds go on;
    # None: never.
    share: float | None = None
    # The longest round that is planned; None: by the size of the model.
    max_steps: int | None = None
    # Share of live parameters kept on an anchor without all of one's own progress; None: all of
    # that.
    mixing: float | None = None
    # carry what the codec loses into the next contribution; those of a bit or two a value always do
    feedback: bool = False
    # Share of that which is still carried a round later (SparseLoCo's β).
    feedback_kept: float = 1.0
    # Share of the last in a contribution, which is then a running mean.
    worker_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    # Deviations above its usual norm from which a member does not contribute its progress.
    outliers: Annotated[float, msgspec.Meta(gt=0, le=1e3)] | None = None
    outer: OuterSettings = PLAIN_MEAN
    codec: str = DEFAULT_CODEC
    # Shell pattern of tensor names -> their codec, where it is another; the longest that matches
    # decides.
    codecs: dict[str, str] = {}
    # Of a round, that picks the codec of each tensor that ``codecs`` does not name.
    error: Annotated[float, msgspec.Meta(gt=0, le=LARGEST_ERROR)] | None = None
    # Statistics and small tensors are sent in fp32 (`codecs.mixtures.exact_of`).
    exact: bool = True
    plan: TopologyKind = "butterfly"  # on which ways contributions are added up
    # what becomes of them: the weighted mean, or a robust rule (`atoll.security.rule_names`)
    reducer: str = "mean"
    # How many logs the model is cut into.
    fragments: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAGMENTS)] = 1
    lying: int = 0  # members of a configuration that may do anything, and the log stays one
    rounds: int | None = None  # committed rounds after which the run is done; None: no end
    # How long a script waits for a round before it trains on; None: from measured rates.
    deadline_s: float | None = None
    # One member adds up all of a round: the organiser's, or another while that is away.
    coordinator: bool = False
    # Contributions are masked: ``reducer`` is then "copy", and ``codec`` "bits".
    secure: SecureSettings | None = None
    privacy: PrivacySettings | None = None  # with ``secure``: they are bounded, and get noise
    # Of a run of sites: what members do beside plain inner steps; None: nothing.
    site: SiteSettings | None = None
    # Who takes part in a round, with ``site``; None: all that can.
    sample: SampleSettings | None = None
    # A round is of whoever has come, on whichever anchor; None: of all, on the newest.
    arrivals: ArrivalSettings | None = None
    # Contributions follow from public seeds, and who gives another is found and removed.
    btard: BtardSettings | None = None
    limits: LimitSettings = LimitSettings()  # of free-standing operations
    adapters: AdapterSettings = AdapterSettings()
    # Shell pattern of names of buffers -> their class; the longest that matches decides.
    buffers: dict[str, BufferClass] = {}
    evaluate: EvaluateSettings | None = None  # None: members do not evaluate

    def __post_init__(self) -> None:
        """Raises ConfigError for an impossible length of rounds or an unknown codec."""
        positive = {
            "sync_every": self.sync_every,
            "round_s": self.round_s,
            "target_samples": self.target_samples,
            "rounds": self.rounds,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(
                    f"{name} = {value!r} is not a positive number", key=f"$.train.{name}"
                )
        for codec in (self.codec, *self.codecs.values()):
            if codec not in CODECS and codec != MASKED_CODEC:
                raise unknown_codec(codec, "$.exchange.codec")

    @property
    def has_feedback(self) -> bool:
        """Whether members carry what encoding loses: where the manifest says so, or a codec loses
        most of it.
        """
        return self.feedback or not RESULTS.keys().isdisjoint({self.codec, *self.codecs.values()})

    @property
    def lengths(self) -> RoundLengths:
        """How many inner steps each round has."""
        return RoundLengths(self.sync_every, self.growth, self.local_after)

    @property
    def work(self) -> WorkSettings | None:
        """What a site does in a round of a run of sites; None in other runs."""
        return self.site.work if self.site is not None else None

    @property
    def may_be_without(self) -> bool:
        """Whether rounds may be without a member that would hold up all others: not where each has
        to take part, or where rounds choose whom they wait for in another way.
        """
        apart = self.secure or self.privacy or self.btard or self.site or self.sample
        plain = not (apart or self.arrivals or self.lying or self.coordinator)
        return plain and self.reducer == "mean" and self.method != "gradient_averaging"

    @property
    def trains_on(self) -> bool:
        """Whether training goes on while a contribution is under way, as a matter of course: with
        overlap, or of who is late for its group.
        """
        return self.overlap != "none" or (
            self.arrivals is not None and self.arrivals.groups is not None
        )


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


@runtime_checkable
class Shelved(Protocol):
    """A Swarm whose member has a shelf: all but those of a job of several ranks."""

    def shelf(self) -> Shelf:
        """This member's, in this run."""
        ...


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

    def release(self) -> None:
        """Give the lease back; the view must not be used afterwards. Idempotent."""


class Pending(Protocol, Generic[T]):
    """A result to come. `wait` with a timeout never raises for lateness: it returns the state."""

    def done(self) -> bool:
        """Whether `wait` would return the final result at once."""
        ...

    def wait(self, timeout_s: float | None = None) -> T:
        """The result; after ``timeout_s`` seconds an "open" Outcome. May be called again."""
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

    def release(self) -> None:
        """The result is no longer needed. Idempotent; an operation under way is not disturbed."""

    def cancel(self) -> None:
        """Wait for it no longer: unless it is decided, `wait` says "open" from now on.

        The contribution is taken back where no plan names it yet; else it may still be counted by
        the others.
        """


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

    def leave(self) -> None:
        """Leave the run: finish or hand over the round, then only seed."""

    def close(self) -> None:
        """Drop the connection to the node. A private node ends with it. Idempotent."""


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
