"""The tables of every run, as people write them: names, bounds, defaults. What tables mean together
is said in `checks` and beside it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...collectives.codec_names import LARGEST_ERROR
from ...collectives.foreign import LINES, PLAIN, WORDS
from ...collectives.group import MAX_MEMBERS, MAX_STAR
from ...collectives.growth import MOST_GROWTH
from ...collectives.layout import MAX_FRAGMENTS, BufferClass
from ...collectives.outer_rules import MOST_WARMUP, WITHOUT_MOMENTUM, OuterRule, OuterSettings
from ...collectives.schemes import PlanName
from ...collectives.swarm import AdapterSettings, CoordinateRule, EvaluateSettings, GramRule
from ...security.rule_names import (
    MAX_F,
    RUNNING,
    RuleName,
    parse_reducer,
    reducer_name,
)
from ..home.strict_toml import Address

Text = Annotated[
    str, msgspec.Meta(max_length=2000, pattern=LINES, description="text without control characters")
]
Line = Annotated[
    str,
    msgspec.Meta(max_length=2000, pattern=WORDS, description="one line without control characters"),
]
Scalar = int | float | Line | bool
Label = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[A-Za-z0-9._-]{1,64}\Z",
        description="a place: at most 64 letters, digits, dots, dashes, underscores",
    ),
]
Peers = Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]
# one level more than there is, so that what is refused is refused with the reason
Tree = dict[Label, Peers | dict[Label, Peers | dict[Label, Peers]]]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Natural = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


Pattern = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=512,
        pattern=WORDS,
        description="a pattern of tensors' names, without control characters",
    ),
]


FileName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z",
        description="the name of a file, without a folder",
    ),
]
Sha256 = Annotated[
    str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z", description="64 hexadecimal digits")
]

Short = Annotated[
    str,
    msgspec.Meta(
        max_length=128, pattern=WORDS, description="a short line without control characters"
    ),
]


Extent = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class ShapeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[model.base.shape]``: of a pretrained model's layers, so that a machine can tell whether it
    holds it before anything is downloaded (`recipes.models.shapes`).

    ``hidden``: values of a token between layers. ``inner``: inside of what stands behind attention,
    of one expert where there are ``experts``, of which ``active`` take part in a token. ``heads``
    of ``width`` ask, ``groups`` of them answer. ``tied``: the head is the embedding. ``gated``:
    three matrices behind attention, not two.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    hidden: Extent
    inner: Extent
    heads: Extent
    groups: Extent
    width: Extent
    vocabulary: Extent
    tied: bool = False
    gated: bool = True
    experts: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    active: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1


class BaseTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[model.base]``: what the founder found a pretrained model to be, which every member's must
    be, too. `atoll new` and `atoll join FILE.toml` write it into the signed manifest; nobody writes
    it by hand.

    ``files``: sha256 of each that is loaded. ``size``: their bytes. ``sizes``: of each, so that
    members can have them from one another. ``parameters``: of the whole model. ``licence``,
    ``gated``: as the hub says; "" and None: not known. ``tokenizer``: digests of what it does, by
    what they are of. ``libraries``: what the founder read it with. ``shape``: of its layers, where
    its kind is one that has them.
    """

    files: Annotated[dict[FileName, Sha256], msgspec.Meta(min_length=1, max_length=400)]
    size: Whole
    parameters: Natural
    licence: Short = ""
    gated: bool | None = None
    tokenizer: Annotated[dict[FileName, Sha256], msgspec.Meta(max_length=16)] = {}
    libraries: Short = ""
    shape: ShapeTable | None = None
    sizes: Annotated[dict[FileName, Whole], msgspec.Meta(max_length=400)] = {}


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[model]``: ``entry`` is ``builtin:gpt``, ``local:NAME`` (a script of each member), or the
    name of the setting that says which pretrained model: ``hub``, ``folder``, ``gguf``.
    ``buffers``: how buffers take part whose names match a shell pattern (`optim.model.buffers`).

    Of a pretrained model: ``hub`` is ORG/NAME there, with a ``revision``; ``folder`` and ``gguf``
    are paths of the founder's machine in her text, and only their last part in the signed manifest.
    ``method``: which parameters train. ``dtype``: of the weights; "auto": float32 where all train,
    else that of the files. ``attention``: an implementation of transformers; "auto": its own
    choice.
    """

    entry: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A(builtin:gpt|hub|folder|gguf|local:[A-Za-z0-9_.-]{1,64})\Z",
            description='"builtin:gpt", or "local:NAME" with a name of your own',
        ),
    ] = "builtin:gpt"
    # For builtin:gpt the fields of GptConfig.
    config: Annotated[dict[Line, Scalar], msgspec.Meta(max_length=64)] = {}
    init: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\Aseed:[0-9]{1,10}\Z", description='"seed:NUMBER", such as "seed:0"'
        ),
    ] = "seed:0"
    parameters: Natural | None = None  # checked after construction
    buffers: Annotated[dict[Pattern, BufferClass], msgspec.Meta(max_length=64)] = {}
    hub: (
        Annotated[
            str,
            msgspec.Meta(
                pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?\Z",
                description='a model on the hub, "ORG/NAME"',
            ),
        ]
        | None
    ) = None
    revision: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z",
            description="a branch, a tag or a commit of the hub",
        ),
    ] = "main"
    folder: Line | None = None
    gguf: Line | None = None
    method: Literal["full", "lora", "qlora"] = "full"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    checkpointing: bool = False  # activations are computed again in the backward pass
    base: BaseTable | None = None

    @property
    def pretrained(self) -> bool:
        """Whether it is read by transformers, from files."""
        return self.entry in PRETRAINED


PRETRAINED = ("hub", "folder", "gguf")
"""Settings of ``[model]`` that say where a pretrained model is; also its ``entry``."""


class LoraTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[lora]``: the adapters of a pretrained model with ``method = "lora"`` or "qlora".
    ``targets``: names of layers, or all linear ones but the head (and the routers of experts).
    """

    rank: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    alpha: Positive = 32.0
    targets: (
        Literal["all-linear"]
        | Annotated[tuple[Pattern, ...], msgspec.Meta(min_length=1, max_length=64)]
    ) = "all-linear"
    dropout: Fraction = 0.0


class DataTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[data]``: what is trained on, and as what it is read; never where it lies, which each
    machine says for itself (``--data``, or its own settings).

    ``source``: ``builtin:stdlib-text`` (ships with Python); ``local``: every member's own, which
    never leaves its machine; ``shared``: one file that all members have, bound by its ``sha256``
    and dealt out among them (`optim.data`). The rest is of runs that fine-tune a language model
    (`recipes.finetune`): ``format`` of a record, where it is not to be found out; ``length`` of a
    sample in tokens; ``loss`` on answers only, or on everything; ``packing`` of short documents
    into one row, which do not see one another; the share that is ``held_out``, chosen by each
    record's own hash, so that no member trains on what another evaluates on.
    """

    source: Literal["builtin:stdlib-text", "local", "shared"] = "builtin:stdlib-text"
    seed: Whole = 0
    format: Literal["auto", "messages", "conversations", "completion", "instruction", "text"] = (
        "auto"
    )
    length: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = 2048
    loss: Literal["completion", "all"] = "completion"
    packing: bool = True
    held_out: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.02
    sha256: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A([0-9a-f]{64})?\Z", description="what sha256sum FILE prints: 64 digits"
        ),
    ] = ""


class InnerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[train.inner]``: the built-in recipes' optimizer; a script of one's own may use another.

    A step of the byte-level GPT is of ``batch`` windows; one that fine-tunes a language model is of
    ``tokens_per_step`` tokens at each member, in micro-batches of ``micro_batch`` rows.
    """

    # sgd: plain, of lr, schedule and clip only; adamw8bit: of bitsandbytes
    optimizer: Literal["adamw", "sgd", "adamw8bit"] = "adamw"
    lr: Positive = 2e-3  # best of the values tried for the 0.87M-parameter byte model
    steps: Natural | None = 700  # length of the schedule; None: no decay and no end
    warmup: Whole = 20
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: NotNegative = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    clip: NotNegative = 1.0  # the largest norm of a step's gradient; 0: any
    batch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 8
    # Of all members together, after which the schedule is over; None: it goes by steps.
    samples: Natural | None = None
    tokens_per_step: Annotated[int, msgspec.Meta(ge=16, le=1 << 32)] = 16_384
    micro_batch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1
    # each weight steps as soon as its gradient is whole, so that gradients need no memory
    in_backward: bool = False


class OuterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[train.outer]``: applied to the anchor, in the node, the same on all members.

    These defaults are what bytes mean that leave a field out, and never change (`form`). A text
    that chooses none of ``optimizer``, ``lr`` and ``momentum`` has other values (`presets`).
    """

    optimizer: OuterRule = "nesterov"
    lr: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.7
    momentum: Fraction = 0.9
    beta2: Fraction = 0.99  # of adam, yogi and adamw, published as epsilon is (arXiv 2003.00295)
    epsilon: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-3  # of adam, yogi, adagrad and adamw
    weight_decay: NotNegative = 0.0  # of adamw
    clip: Positive = 3.0  # of co2: times the mean norm of the momentum
    # Restart momentum and halve lr for a while when the update's norm or the loss jumps.
    governor: bool = False
    # Make the mean as long as its contributions are on average, however many they are.
    stretch: bool = False
    clip_norm: Positive | None = None  # the longest mean; a longer one is scaled down to it
    # of delayed_nesterov: steps between two of momentum, and the share of it that those take
    every: Annotated[int, msgspec.Meta(ge=1, le=MAX_STAR)] = 4
    spread: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    # of heloco: the cosine with momentum from which nothing is corrected
    agreement: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    # how members keep momenta between rounds: 4 bytes each, or 2
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    # of nesterov: rounds over which lr and momentum grow from those of the plain mean, 1 and 0
    warmup: Annotated[int, msgspec.Meta(ge=0, le=MOST_WARMUP)] = 0
    # of nesterov: rounds of the plain mean before that; 0: short ones, where rounds grow
    hold: Annotated[int, msgspec.Meta(ge=0, le=MOST_WARMUP)] = 0

    def settings(self) -> OuterSettings:
        """As the outer step takes it."""
        return OuterSettings(
            self.optimizer,
            self.lr,
            0.0 if self.optimizer in WITHOUT_MOMENTUM else self.momentum,
            self.beta2,
            self.epsilon,
            self.weight_decay,
            self.clip,
            self.governor,
            self.stretch,
            self.clip_norm,
            self.every,
            self.spread,
            self.agreement,
            self.momentum_dtype,
            self.warmup,
            self.hold,
        )


class TrainTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[train]``: a round ends after ``sync_every`` inner steps, ``round_s`` seconds or
    ``target_samples`` of all members; give one of them.

    ``overlap``, ``delay`` and ``mixing`` say what members train on while a round is under way
    (`docs/training.md`). With ``share``, the part of the time to be spent on training,
    ``sync_every`` and ``delay`` are those of the first rounds: they are planned again as rounds go
    on.
    """

    method: Literal["diloco", "local_sgd", "gradient_averaging"] = "diloco"
    sync_every: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    round_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    target_samples: Natural | None = None
    # Rounds of one inner step before those of sync_every.
    local_after: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    # The first so many rounds of sync_every are made as shorter ones, of one step at first.
    growth: Annotated[int, msgspec.Meta(ge=0, le=MOST_GROWTH)] = 0
    overlap: Literal["none", "late", "eager"] = "none"
    delay: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    mixing: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    # deviations above its usual norm from which a member does not contribute its progress
    outliers: Annotated[float, msgspec.Meta(gt=0, le=1e3)] | None = None
    # Committed rounds after which the run is done; None: the built-in recipe ends with its
    # schedule.
    rounds: Natural | None = None
    inner: InnerTable = InnerTable()
    outer: OuterTable = OuterTable()
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    # The longest round; None: by the size of the model.
    max_steps: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] | None = None
    # Members that the first round waits for; None: whoever is there begins.
    start_with: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)] | None = None


class ArrivalsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[exchange.arrivals]``: asynchronous DiLoCo, whose rounds do not wait for everybody
    (`docs/unequal.md`). Members make turns of their own, and give each to the next round.

    ``wait``: a round is made of a ``quorum`` of contributions, held open for more for ``grace``
    seconds, or for one inner step of the fastest that waits (``step``); or of groups that arrive
    together (FedCompass), after turns of ``sync_every`` up to ``longest`` times as many steps, held
    open for ``slack`` times as long as they should take. ``dylu``: with a quorum, a turn is of
    ``sync_every`` steps for the fastest member, of fewer for a slower one, at least ``least``.
    ``alpha``, ``staleness`` and its numbers: what a contribution counts that is rounds behind, as
    of ``[federated]``.
    """

    wait: Literal["quorum", "groups"] = "quorum"
    quorum: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)] = 1
    grace: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | Literal["step"] = 0.0
    dylu: bool = False
    least: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    longest: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 5.0
    slack: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.5
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    staleness_a: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    staleness_b: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 4


class ExchangeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[exchange]``: how contributions travel. ``codecs``: other codecs for tensors whose names
    match a shell pattern.

    ``plan``: on which ways they are added up (`collectives/trees.py`). ``fragments``: how many logs
    the model is cut into, each with rounds of its own (`collectives/layout.py`, `cut`). ``check``:
    on two levels another member of a site adds up what its head does; None: in federated runs.
    ``tree``: a scheme in place of ``plan`` (`collectives/schemes.py`): its name, or places and how
    many peers each has, ``{ lab = { box-1 = 4, box-2 = 4 }, home = 1 }``.
    """

    # What bytes without a codec mean; a text without one is given another (`defaults`).
    codec: Line = "int8"
    codecs: Annotated[
        dict[Pattern, Line],
        msgspec.Meta(max_length=64),
    ] = {}
    # of a round, relative to the mean: picks the codec of each tensor that `codecs` does not name
    error: Annotated[float, msgspec.Meta(gt=0, le=LARGEST_ERROR)] | None = None
    # Statistics and small tensors are sent in fp32; as with codec, a text that leaves it out has
    # another value.
    exact: bool = False
    # carry what the codec loses into the next contribution; stat2 and the sparse codecs always do
    feedback: bool = False
    # Share of that which is still carried a round later.
    feedback_kept: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    plan: PlanName = "butterfly"
    check: bool | None = None
    tree: Literal["full", "ring"] | Tree | None = None
    fragments: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAGMENTS)] = 1
    # None: from measured rates.
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    arrivals: ArrivalsTable | None = None  # None: a round waits for all that can contribute


class AdaptersTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[adapters]``: of runs that train LoRA adapters (`docs/adapters.md`). ``mode``: both factors
    train (``plain``: their mean is not that of the products), one or the other by rounds
    (``alternate``), or B alone (``ffa``). ``base``: members compare the values of what is frozen,
    or, where some hold it in another precision, names and shapes only.
    """

    mode: Literal["plain", "alternate", "ffa"] = "plain"
    base: Literal["values", "shapes"] = "values"

    def settings(self) -> AdapterSettings:
        """As a script takes it."""
        return AdapterSettings(self.mode, self.base)


class LanesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[lanes]``: the connections for bulk bytes. ``encrypt = false``: for a network whose owner
    may read and alter what is averaged.
    """

    encrypt: bool = True
    per_peer: Annotated[int, msgspec.Meta(ge=1, le=8)] = 8  # no more connections than these


class CheckpointTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[checkpoint]``: every how many committed rounds each node writes the anchor to its disk;
    more than `MOST_REPLAYED` are as that.
    """

    every: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10


class NetworkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[network]``: addresses to put into invites when the organiser's node is not running."""

    bootstrap: Annotated[
        tuple[
            Address,
            ...,
        ],
        msgspec.Meta(max_length=16),
    ] = ()


class JoinTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[join]``: ``invite``: a newcomer shows a valid invite; ``open``: the run id is enough;
    ``allow``: only these peers and the organiser.

    ``probation``, of open runs: in how many rounds in a row a newcomer's work must be found to be
    in order before it counts and the newcomer is a member. ``per_hour``: how many newcomers become
    members in an hour. Whom the organiser trusts (`atoll trust`) is let in at once.
    """

    policy: Literal["invite", "open", "allow"] = "invite"
    allow: Annotated[
        tuple[
            Annotated[
                str, msgspec.Meta(pattern=PLAIN, description="a peer id, as atoll id prints it")
            ],
            ...,
        ],
        msgspec.Meta(max_length=1024),
    ] = ()
    probation: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    per_hour: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # 0: no bound


class EvaluateTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[evaluate]``: members whose script says how (``attach(evaluate=)``) evaluate the model on
    held-out data, before and after they adopt a round's model: every so many rounds at most, in a
    ``share`` of their time at most. After ``rounds`` readings in a row that speak against averaging
    a verdict says so, and ``[train.outer] governor`` takes the plain mean.
    """

    every: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    share: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.01
    rounds: Annotated[int, msgspec.Meta(ge=2, le=100)] = 3

    def settings(self) -> EvaluateSettings:
        """As a script takes it."""
        return EvaluateSettings(self.every, self.share, self.rounds)


class PromptsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[prompts]``: what the model that is fine-tuned is asked as training goes on. Every so many
    rounds one member, drawn for it, shows how the newest anchor answers, in ``tokens`` tokens at
    most. Answers are made of these ``texts``, never of anybody's data.
    """

    texts: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ("What can you do?",)
    every: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 5
    tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64


class AuditTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[audit]``: ``keep_contributions``: each member signs its contributions and keeps those to
    so many of the newest entries of each log on its disk, so that rounds can be recomputed."""

    keep_contributions: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0


# Who states sums shows the inputs of lying + 1 parts, 98 bytes a contributor: of 256 contributors
# 0.85 MB, where a message has 1 MiB.
MOST_LYING = 32


class QuorumTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[quorum]``: what decides a round. ``lying``: though so many members do anything at all, the
    log stays one; it takes 3 ``lying`` + 1 members.

    ``bans``, of such a run: the organiser's signed list bans members (``organiser``), or only
    strangers (``quorum``): a member is then evicted once 2 ``lying`` + 1 members have banned it,
    each on its own machine.
    """

    lying: Annotated[int, msgspec.Meta(ge=0, le=MOST_LYING)] = 0
    bans: Literal["organiser", "quorum"] = "organiser"


class RobustTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[robust]``: what a round makes of its contributions, where up to ``f`` of them may be
    anything. ``mean``: members are trusted.

    A round needs 2 f + 1 contributors (Krum's rules: 2 f + 3), each of which counts once, whatever
    it trained on. ``before``: steps before the rule, in their order
    (`security.rule_names.parse_step`). ``keep``: of how many contributions Multi-Krum is the mean;
    ``neighbours``: by how many others Krum's rules score one, "n-f-1" as byzfl; ``radius``: where
    centred clipping clips, at the median distance in rounds before, or in the same round.
    ``momentum``: what a member contributes is the running mean of what it would have, with this
    share of the last (worker momentum); 0: none.
    """

    rule: Literal["mean", CoordinateRule, GramRule] = "mean"
    f: Annotated[int, msgspec.Meta(ge=1, le=MAX_F)] | None = None
    before: Annotated[
        tuple[
            Annotated[
                str,
                msgspec.Meta(max_length=24, pattern=PLAIN, description="a step, such as nnm"),
            ],
            ...,
        ],
        msgspec.Meta(max_length=4),
    ] = ()
    keep: Literal["n-f", "n-f-2"] | None = None  # None: "n-f"
    neighbours: Literal["n-f-2", "n-f-1"] | None = None  # None: "n-f-2"
    radius: Literal["running", "round"] | None = None  # None: "running"
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0

    @property
    def reducer(self) -> str:
        """What plans call it."""
        if self.rule == "mean" or self.f is None:
            return self.rule
        options = {
            "k2": self.keep == "n-f-2",
            "n1": self.neighbours == "n-f-1",
            RUNNING: self.rule == "centred_clip" and self.radius != "round",
        }
        return reducer_name(
            self.rule,
            self.f,
            self.before,
            tuple(option for option, given in options.items() if given),
        )

    @property
    def parsed(self) -> RuleName | None:
        """The rule, read; None for the mean, and for steps or numbers that no rule can have."""
        return parse_reducer(self.reducer)
