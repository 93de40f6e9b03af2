"""What governs the rounds of a run, and what comes of them: settings, outcomes, anchors. What a
script asks of its swarm beside these is in `script_swarm`.
"""

from __future__ import annotations

import math
import operator
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
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
from .group import TopologyKind
from .layout import MAX_FRAGMENTS, BufferClass
from .outer_rules import PLAIN_MEAN, WARMING, OuterSettings
from .round_settings import MAX_SAMPLES, RoundSettings, SampleSettings, WorkSettings
from .seeded import BtardSettings

if TYPE_CHECKING:
    pass

MAX_REDUCER = 64  # characters of its name

CoordinateRule = Literal["median", "trimmed_mean", "meamed"]
GramRule = Literal["krum", "multi_krum", "mda", "geometric_median", "centred_clip", "caf", "flag"]
"""What a round makes of contributions of which some may be anything (`security.rules`): each
element by itself, or rows by their Gram matrix."""


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


class RunSettings(RoundSettings, frozen=True, forbid_unknown_fields=True):
    """The part of a run's manifest that governs rounds and optimizers. The manifest has authority
    over the script.
    """

    method: Literal["diloco", "local_sgd", "gradient_averaging"] = "diloco"
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
    codecs: dict[str, str] = msgspec.field(default_factory=dict[str, str])
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
    buffers: dict[str, BufferClass] = msgspec.field(default_factory=dict[str, BufferClass])
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
    def work(self) -> WorkSettings | None:
        return self.site.work if self.site is not None else None

    @property
    def noised(self) -> bool:
        return self.privacy is not None

    @property
    def effective_outer(self) -> OuterSettings:
        """Plain averaging for the method "local_sgd", else ``outer``, whose momentum waits for
        ``hold`` rounds, or else until rounds have their full length: in the first ones after one
        another it adds up what they have in common.
        """
        if self.method == "local_sgd":
            return PLAIN_MEAN
        if not self.growth or self.outer.kind not in WARMING:
            return self.outer
        short = self.lengths.short_rounds
        return msgspec.structs.replace(self.outer, hold=self.outer.hold or short, short=short)

    @property
    def may_be_without(self) -> bool:
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
