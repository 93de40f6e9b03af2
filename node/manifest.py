"""A run's manifest: what it trains, signed. TOML for people, canonical msgpack for machines; the
run id is the hash of those bytes.

``parse_manifest`` reads TOML strictly, ``Manifest.encode`` gives the canonical bytes
(`manifest_form`), ``SignedManifest`` keeps the organiser's signature beside them. Nothing in a
manifest is code: models are ``builtin:*``, or each member's own script (``local:*``).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ..collectives.codec_names import CODECS
from ..collectives.errors import BadSignatureError, ConfigError, StorageError, VersionMismatchError
from ..collectives.foreign import LINES, PLAIN, WORDS, quoted
from ..collectives.group import MAX_MEMBERS, MAX_PEER_ID, TopologyKind, least_members
from ..collectives.identifiers import PeerId, RunId
from ..collectives.layout import MAX_FRAGMENTS
from ..collectives.swarm import OuterSettings, RunSettings
from ..security.rule_names import parse_reducer
from .home.paths import Paths, make_private, storage_error, write_atomic
from .home.strict_toml import Address, convert, parse_toml, together
from .manifest_btard import BtardTable, check_btard
from .manifest_checks import (
    check_exchange,
    check_fragments,
    check_places,
    check_schedule,
    check_train,
)
from .manifest_federated import (
    FederatedTable,
    PrivacyTable,
    SecureTable,
    check_budget,
    check_federated,
    rounds_of,
)
from .manifest_form import canonical, schema_of, stands_for
from .manifest_gpt import gpt_config
from .manifest_join import AuditTable, JoinTable, check_audit, check_join
from .manifest_limits import LimitsTable
from .manifest_presets import take_wish, with_preset
from .manifest_quorum import NoQuorumTable, QuorumTable, check_quorum
from .manifest_robust import RobustTable, check_robust

if TYPE_CHECKING:
    from ..security.identity import Identity

SCHEMA = 1
ENDS = ("sync_every", "round_s", "target_samples")  # of rounds: a run has one of them
MAX_MANIFEST_BYTES = 65_536
RUN_ID_LENGTH = 26
DOMAIN = "atoll/manifest/1"

Text = Annotated[
    str, msgspec.Meta(max_length=2000, pattern=LINES, description="text without control characters")
]
Line = Annotated[
    str,
    msgspec.Meta(max_length=2000, pattern=WORDS, description="one line without control characters"),
]
Scalar = int | float | Line | bool
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Natural = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[model]``: ``entry`` is ``builtin:gpt`` or ``local:NAME`` (each member brings her own
    script).
    """

    entry: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A(builtin:gpt|local:[A-Za-z0-9_.-]{1,64})\Z",
            description='"builtin:gpt", or "local:NAME" with a name of your own',
        ),
    ] = "builtin:gpt"
    config: Annotated[
        dict[Line, Scalar], msgspec.Meta(max_length=64)
    ] = {}  # for builtin:gpt the fields of GptConfig
    init: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\Aseed:[0-9]{1,10}\Z", description='"seed:NUMBER", such as "seed:0"'
        ),
    ] = "seed:0"
    parameters: Natural | None = None  # checked after construction


class DataTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[data]``: ``builtin:stdlib-text`` (ships with Python), or ``local``: every member's own,
    which never leaves her machine.
    """

    source: Literal["builtin:stdlib-text", "local"] = "builtin:stdlib-text"
    seed: Whole = 0


class InnerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[train.inner]``: the built-in recipe's optimizer; a script of one's own may use another."""

    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd: plain, of lr, schedule, batch and clip only
    lr: Positive = 2e-3  # best of the values tried for the 0.87M-parameter byte model
    steps: Natural | None = 700  # length of the schedule; None: no decay and no end
    warmup: Whole = 20
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: NotNegative = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    clip: Positive = 1.0
    batch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 8
    samples: Natural | None = (
        None  # of all members together, after which the schedule is over; None: it goes by steps
    )


class OuterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[train.outer]``: applied to the anchor, in the node, the same on all members."""

    optimizer: Literal["nesterov", "sgd", "adam", "yogi", "adagrad", "co2", "adamw"] = "nesterov"
    lr: Annotated[float, msgspec.Meta(gt=0, le=10)] = (
        0.7  # DiLoCo's published value (arXiv 2311.08105)
    )
    momentum: Fraction = 0.9  # DiLoCo's published value; 0.6 below about 50 rounds
    beta2: Fraction = 0.99  # of adam, yogi and adamw, published as epsilon is (arXiv 2003.00295)
    epsilon: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-3  # of adam, yogi, adagrad and adamw
    weight_decay: NotNegative = 0.0  # of adamw
    clip: Positive = 3.0  # of co2: times the mean norm of the momentum
    governor: bool = (
        False  # restart momentum and halve lr for a while when the update's norm or the loss jumps
    )
    stretch: bool = (
        False  # make the mean as long as its contributions are on average, however many they are
    )

    def settings(self) -> OuterSettings:
        """As the outer step takes it."""
        return OuterSettings(
            self.optimizer,
            self.lr,
            self.momentum,
            self.beta2,
            self.epsilon,
            self.weight_decay,
            self.clip,
            self.governor,
            self.stretch,
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
    local_after: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = (
        0  # rounds of one inner step before those of sync_every
    )
    overlap: Literal["none", "late", "eager"] = "none"
    delay: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    mixing: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    rounds: Natural | None = (
        # committed rounds after which the run is done; None: the built-in recipe ends with its
        # schedule
        None
    )
    inner: InnerTable = InnerTable()
    outer: OuterTable = OuterTable()
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    max_steps: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] | None = (
        None  # the longest round; None: by the size of the model
    )
    start_with: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)] | None = (
        None  # members that the first round waits for; None: whoever is there begins
    )


class ExchangeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[exchange]``: how contributions travel. ``codecs``: other codecs for tensors whose names
    match a shell pattern.

    ``plan``: on which ways they are added up (`collectives/trees.py`). ``fragments``: how many logs
    the model is cut into, each with rounds of its own (`collectives/layout.py`, `cut`). ``check``:
    on two levels another member of a site adds up what its head does; None: in federated runs.
    """

    codec: Line = "int8"
    codecs: Annotated[
        dict[
            Annotated[
                str,
                msgspec.Meta(
                    min_length=1,
                    max_length=512,
                    pattern=WORDS,
                    description="a pattern of tensors' names, without control characters",
                ),
            ],
            Line,
        ],
        msgspec.Meta(max_length=64),
    ] = {}
    # carry what the codec loses into the next contribution; stat2 and the sparse codecs always do
    feedback: bool = False
    feedback_kept: Annotated[float, msgspec.Meta(gt=0, le=1)] = (
        1.0  # share of that which is still carried a round later
    )
    plan: Literal["butterfly", "ring", "two-level"] = "butterfly"
    check: bool | None = None
    fragments: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAGMENTS)] = 1
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = (
        None  # None: from measured rates
    )


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


class DurabilityTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[durability]``: what is on each member's medium before it says anything that depends on it.

    ``all``: promises, votes, entries and the bytes of results: a power cut of all members loses
    nothing that was decided. ``votes``: not the bytes: a cut of all may lose the newest rounds, and
    then takes `atoll recertify`. ``none``: nothing is waited for: who loses power comes back as
    somebody new. It is the run's, not a node's: whether what was decided lasts depends on what the
    others' media hold.
    """

    sync: Literal["all", "votes", "none"] = "all"


class NetworkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[network]``: addresses to put into invites when the organiser's node is not running."""

    bootstrap: Annotated[
        tuple[
            Address,
            ...,
        ],
        msgspec.Meta(max_length=16),
    ] = ()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run's settings, all of them, defaults filled in. Two manifests with equal `encode` are the
    same run.
    """

    schema: int
    name: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z",
            description="1 to 64 letters, digits, dots, dashes, underscores",
        ),
    ]
    description: Text = ""
    contact: Line = ""
    model: ModelTable = ModelTable()
    data: DataTable = DataTable()
    train: TrainTable = TrainTable()
    exchange: ExchangeTable = ExchangeTable()
    lanes: LanesTable = LanesTable()
    join: JoinTable = JoinTable()
    checkpoint: CheckpointTable = CheckpointTable()
    durability: DurabilityTable = DurabilityTable()
    no_quorum: NoQuorumTable = NoQuorumTable()
    quorum: QuorumTable = QuorumTable()
    network: NetworkTable = NetworkTable()
    robust: RobustTable = RobustTable()
    mode: Literal["swarm", "federated"] = "swarm"
    federated: FederatedTable = FederatedTable()
    secure: SecureTable | None = None
    privacy: PrivacyTable | None = None
    audit: AuditTable = AuditTable()
    btard: BtardTable | None = None
    limits: LimitsTable = LimitsTable()

    def encode(self) -> bytes:
        """Canonical bytes: see `manifest_form`. What was received may be said in others: keep
        those, their hash is the run's id.
        """
        return canonical(self)

    @property
    def run_id(self) -> RunId:
        """The id of this run."""
        return run_id_of(self.encode())

    @property
    def parameters(self) -> int | None:
        """Parameters of the run's model, or None when only the members' script knows."""
        return (
            gpt_config(self.model).parameters
            if self.model.entry == "builtin:gpt"
            else self.model.parameters
        )

    @property
    def least(self) -> int:
        """How many members a round needs, by the rule and by how many may lie."""
        rule = parse_reducer(self.robust.reducer)
        return max(least_members(self.quorum.lying), 1 if rule is None else rule.least)

    @property
    def branch_after_s(self) -> float | None:
        """How long no quorum may be in sight before members go on in a branch; None: they never
        do.
        """
        return self.no_quorum.reconfigure_after_s if self.no_quorum.policy == "branch" else None

    @property
    def ways(self) -> TopologyKind:
        """On which ways contributions are added up, and whether heads of sites are checked."""
        check = self.mode == "federated" if self.exchange.check is None else self.exchange.check
        return "checked" if check and self.exchange.plan == "two-level" else self.exchange.plan

    def settings(self) -> RunSettings:
        """What governs rounds and optimizers."""
        return RunSettings(
            method=self.train.method,
            sync_every=self.train.sync_every,
            round_s=self.train.round_s,
            target_samples=self.train.target_samples,
            local_after=self.train.local_after,
            overlap=self.train.overlap,
            delay=self.train.delay,
            mixing=self.train.mixing,
            share=self.train.share,
            max_steps=self.train.max_steps,
            feedback=self.exchange.feedback,
            feedback_kept=self.exchange.feedback_kept,
            worker_momentum=self.robust.momentum,
            plan=self.ways,
            fragments=self.exchange.fragments,
            lying=self.quorum.lying,
            rounds=self.train.rounds,
            deadline_s=self.exchange.deadline_s,
            limits=self.limits.settings(),
            **rounds_of(self),
        )


_decoder = msgspec.msgpack.Decoder(Manifest)


def run_id_of(data: bytes) -> RunId:
    """base32(sha256(canonical manifest bytes))[:26], lower case."""
    return RunId(base64.b32encode(hashlib.sha256(data).digest()).decode()[:RUN_ID_LENGTH].lower())


def is_run_id(text: str) -> bool:
    """Whether ``text`` has the form of a run id."""
    return re.fullmatch(r"[a-z2-7]{26}", text) is not None


def parse_manifest(text: str, name: str = "manifest") -> Manifest:
    """The manifest of a TOML text, checked. Raises ConfigError with the path of the offending
    key.
    """
    table = parse_toml(text, name)
    check_places(table, name)
    wish = take_wish(table, name)
    manifest = convert(table, Manifest, name)
    if manifest.schema != SCHEMA:
        raise ConfigError(
            f"{name} has schema {manifest.schema}, this atoll reads schema {SCHEMA}",
            key="$.schema",
            code="E413",
            why="The file was written for another atoll.",
            hint="pip install -U atoll",
        )
    train = manifest.train
    ends = [f"$.train.{end}" for end in ENDS if getattr(train, end) is not None]
    if len(ends) > 1:
        raise ConfigError(
            f"{name} gives both {ends[0]} and {ends[1]}",
            key=ends[1],
            code="E414",
            why=(
                "A round ends after a number of steps, after a time or after a number of "
                "samples, not all of them."
            ),
            hint="Remove one of the two.",
        )
    if not ends:
        manifest = msgspec.structs.replace(
            manifest, train=msgspec.structs.replace(train, sync_every=100)
        )
    if wish is not None:
        manifest = with_preset(manifest, wish, name)
    _check(manifest, name)
    check_budget(manifest, name)
    return manifest


def load_manifest(path: Path) -> Manifest:
    """The manifest in a TOML file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)  # a device has no size
        if len(data) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_MANIFEST_BYTES} bytes",
                why="A manifest is small.",
                hint="Is this the right file?",
            )
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}",
            why="",
            hint="Look at the path; a first manifest: atoll new --example > run.toml",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is not a text file",
            code="E410",
            why="A manifest is TOML in UTF-8.",
            hint="Is this the right file?",
        ) from None
    return parse_manifest(text, path.name)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest of canonical bytes that came from outside.

    Raises ConfigError when they are no valid manifest, VersionMismatchError when they are of a
    newer schema or use a field, a method or a codec not known here.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"manifest of {len(data)} bytes, limit {MAX_MANIFEST_BYTES}")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if (
            schema_of(data) > SCHEMA
            or "unknown field" in str(error)
            or "Invalid enum value" in str(error)
        ):
            raise VersionMismatchError(
                "the run's manifest was written for a newer atoll",
                why=quoted(error),
                hint="pip install -U atoll",
            ) from None
        raise ConfigError(f"the run's manifest cannot be read: {quoted(error)}") from None
    if manifest.schema != SCHEMA:
        raise VersionMismatchError(
            f"the run's manifest has schema {manifest.schema}, not {SCHEMA}",
            hint="pip install -U atoll",
        )
    if (
        not stands_for(data, manifest)
        or sum(getattr(manifest.train, end) is not None for end in ENDS) != 1
    ):
        raise ConfigError("the run's manifest is not in canonical form")
    if unknown := [
        codec
        for codec in (manifest.exchange.codec, *manifest.exchange.codecs.values())
        if codec not in CODECS
    ]:
        raise VersionMismatchError(
            f"the run's codec {unknown[0]!r} is not known to this atoll",
            why="A newer release has it.",
            hint="pip install -U atoll",
        )
    _check(manifest, "manifest")
    return manifest


def _check(manifest: Manifest, name: str) -> None:
    """What types alone do not say."""
    exchange, model = manifest.exchange, manifest.model
    for key, codec in [
        ("$.exchange.codec", exchange.codec),
        *((f"$.exchange.codecs.{key}", codec) for key, codec in exchange.codecs.items()),
    ]:
        if codec not in CODECS:
            raise ConfigError(
                f"{name}: {key} is {codec!r}, which is no codec",
                key=key,
                code="E413",
                why="Codecs turn vectors into bytes.",
                hint=f"Choose one of: {', '.join(CODECS)}",
            )
    gpt = model.entry == "builtin:gpt"
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("E414", lambda: check_exchange(exchange, name)),
        ("E414", lambda: exchange.fragments > 1 and check_fragments(manifest, name)),
        ("E414", lambda: check_train(manifest.train, manifest.no_quorum, name)),
        ("E414", lambda: check_join(manifest, name)),
        ("E414", lambda: check_audit(manifest, name)),
        ("E414", lambda: check_robust(manifest, name)),
        ("E414", lambda: check_btard(manifest, name)),
        ("E414", lambda: check_quorum(manifest, name)),
        ("E414", lambda: check_federated(manifest, name)),
        ("E413", lambda: gpt and gpt_config(model, name)),
        ("E414", lambda: gpt and check_schedule(manifest.train, name)),
    )
    refusals = list[ConfigError]()
    for code, check in checks:
        try:
            check()
        except ConfigError as error:
            if error.code == ConfigError.code:
                error.code = code
            refusals.append(error)
        except Exception:
            if not refusals:  # else it stumbled over what was refused before
                raise
    if refusals:
        raise together(refusals)
    if len(manifest.encode()) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"{name} is longer than {MAX_MANIFEST_BYTES} bytes")


class SignedManifest(msgspec.Struct, frozen=True, array_like=True):
    """Manifest bytes with the organiser's signature. This is what members hand each other and keep
    on disk.
    """

    manifest: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)]
    organiser: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    @property
    def run_id(self) -> RunId:
        """The id of the run."""
        return run_id_of(self.manifest)

    def encode(self) -> bytes:
        """Wire and file bytes."""
        return msgspec.msgpack.encode(self)

    def open(self) -> Manifest:
        """The manifest, after checking the signature. Raises BadSignatureError, ConfigError,
        VersionMismatchError.
        """
        from ..security.identity import verify

        if not verify(self.organiser, DOMAIN, self.manifest, self.signature):
            raise BadSignatureError(
                f"the manifest of run {self.run_id} is not signed by {self.organiser}",
                peer=self.organiser,
                why="It was changed on the way, or it is somebody else's.",
                hint="Ask the organiser for a new invite.",
            )
        return decode_manifest(self.manifest)


def sign_manifest(manifest: Manifest, identity: Identity) -> SignedManifest:
    """The manifest, signed by its organiser."""
    data = manifest.encode()
    return SignedManifest(data, identity.peer, identity.sign(DOMAIN, data))


def decode_signed(data: bytes) -> SignedManifest:
    """A signed manifest from bytes (not yet verified: call ``open``). Raises ConfigError."""
    if len(data) > MAX_MANIFEST_BYTES + 1024:
        raise ConfigError(
            f"signed manifest of {len(data)} bytes, limit {MAX_MANIFEST_BYTES + 1024}"
        )
    try:
        return msgspec.msgpack.decode(data, type=SignedManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"the signed manifest cannot be read: {quoted(error)}") from None


def save_run(paths: Paths, signed: SignedManifest) -> Path:
    """Keep a run's signed manifest in its folder, which is returned.

    Raises ConfigError when the run is known here as another organiser's (the same settings have the
    same id), StorageError.
    """
    folder = paths.run_dir(signed.run_id)
    make_private(folder)
    known = list_runs(paths, []).get(signed.run_id)
    if known is not None and known.organiser != signed.organiser:
        raise ConfigError(
            f"run {signed.run_id} is known here as one of another organiser, {known.organiser}",
            why=(
                "The same settings are the same run; whoever signed them first on this "
                "machine is its organiser."
            ),
            hint="For a run of your own change anything, such as its name or description.",
        )
    write_atomic(folder / "manifest", signed.encode())
    return folder


def load_run(paths: Paths, run: str) -> SignedManifest:
    """The signed manifest of a stored run, by id, by a unique beginning of it, or by name. Raises
    ConfigError, StorageError.
    """
    damaged: list[StorageError] = []
    stored = list_runs(paths, damaged)
    if exact := stored.get(RunId(run)):
        return exact
    found = {
        i: s
        for i, s in stored.items()
        if (run and i.startswith(run)) or decode_manifest(s.manifest).name == run
    }
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ConfigError(
            f"{run!r} fits {len(found)} runs: {', '.join(sorted(found))}",
            hint="Give more of the id.",
        )
    if damaged:
        raise damaged[0]
    raise ConfigError(
        f"no run {run!r} on this node",
        why="It was neither made nor joined here. (An invite starts with atoll2:)",
        hint="See the runs: atoll ls",
    )


def list_runs(
    paths: Paths, damaged: list[StorageError] | None = None
) -> dict[RunId, SignedManifest]:
    """All runs whose manifest is stored on this node, by id. A damaged one is added to ``damaged``,
    else raised: StorageError.
    """
    runs = dict[RunId, SignedManifest]()
    if not paths.runs_dir.is_dir():
        return runs
    for file in sorted(paths.runs_dir.glob("*/manifest")):
        try:
            signed = _read_signed(file)
        except StorageError as error:
            if damaged is None:
                raise
            damaged.append(error)
        else:
            runs[signed.run_id] = signed
    return runs


def _read_signed(file: Path) -> SignedManifest:
    try:
        signed = decode_signed(file.read_bytes())
    except OSError as error:
        raise storage_error(f"cannot read {file}", error) from None
    except ConfigError as error:
        raise StorageError(
            f"{file} is damaged: {error}",
            code="E303",
            hint=f"Remove the folder and join again: {file.parent}",
        ) from None
    if signed.run_id != file.parent.name:
        raise StorageError(
            f"{file} is not the manifest of this folder",
            code="E303",
            hint=f"Remove the folder and join again: {file.parent}",
        )
    return signed
