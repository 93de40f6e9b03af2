"""A run's settings as one value, and what follows from it for machines (`RunSettings`)."""

from __future__ import annotations

import base64
import hashlib
import math
from typing import Annotated, Any, Literal

import msgspec

from ...collectives.arrivals import (
    ArrivalSettings,
    DynamicSteps,
    Fading,
    GraceWindow,
    Groups,
)
from ...collectives.codec_names import MASKED_CODEC
from ...collectives.group import TopologyKind, least_members
from ...collectives.identifiers import RunId
from ...collectives.layout import STEPS
from ...collectives.outer_rules import OuterSettings
from ...collectives.round_settings import SampleSettings, WorkSettings
from ...collectives.swarm import RunSettings, SecureSettings, SiteSettings
from .form import canonical
from .gpt import gpt_config
from .limits import LimitsTable
from .optional_tables import BtardTable, FederatedTable, PrivacyTable, SecureTable
from .tables import (
    AdaptersTable,
    ArrivalsTable,
    AuditTable,
    CheckpointTable,
    DataTable,
    EvaluateTable,
    ExchangeTable,
    JoinTable,
    LanesTable,
    Line,
    LoraTable,
    ModelTable,
    NetworkTable,
    PromptsTable,
    QuorumTable,
    RobustTable,
    Text,
    TrainTable,
)

RUN_ID_LENGTH = 26


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run's settings, all of them, defaults filled in. Two manifests with equal `encode` are the
    same run.
    """

    schema: Annotated[int, msgspec.Meta(examples=[1])]
    name: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z",
            description="1 to 64 letters, digits, dots, dashes, underscores",
            examples=["my-run"],
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
    quorum: QuorumTable = QuorumTable()
    network: NetworkTable = NetworkTable()
    robust: RobustTable = RobustTable()
    kind: Literal["swarm", "federated", "seeded"] = "swarm"
    federated: FederatedTable = FederatedTable()
    secure: SecureTable | None = None
    privacy: PrivacyTable | None = None
    audit: AuditTable = AuditTable()
    btard: BtardTable | None = None
    limits: LimitsTable = LimitsTable()
    adapters: AdaptersTable = AdaptersTable()
    evaluate: EvaluateTable | None = None
    prompts: PromptsTable | None = None
    lora: LoraTable | None = None
    # Of two runs with the same settings each has its own. Whoever founds one from a file gives it.
    nonce: Annotated[
        str,
        msgspec.Meta(pattern=r"\A[a-z0-9]{0,32}\Z", description="up to 32 of a-z and 0-9"),
    ] = ""

    def encode(self) -> bytes:
        """Canonical bytes: see `form`. A received manifest may be encoded differently:
        keep its bytes, since their hash is the run's id.
        """
        return canonical(self)

    @property
    def run_id(self) -> RunId:
        return run_id_of(self.encode())

    @property
    def parameters(self) -> int | None:
        """Parameters that travel, or None when only the members' script knows."""
        return (
            gpt_config(self.model).parameters
            if self.model.entry == "builtin:gpt"
            else self.model.parameters
        )

    @property
    def least(self) -> int:
        """How many members a round needs, by the rule and by how many may lie."""
        rule = self.robust.parsed
        return max(least_members(self.quorum.lying), 1 if rule is None else rule.least)

    @property
    def work(self) -> WorkSettings | None:
        """What a site of a federated run does in a round; None where it is not said."""
        given = self.federated.work if self.kind == "federated" else None
        if given is None:
            return None
        return WorkSettings(given.steps, given.samples, given.epochs, self.federated.weights)

    @property
    def unit(self) -> str:
        """What members count by: what their scripts say, and of a pretrained model "tokens", those
        that are learned, or "documents" where the run deals these out.
        """
        if not self.model.pretrained:
            return "samples"
        return "tokens" if self.data.source == "local" else "documents"

    @property
    def names_sites(self) -> bool:
        """Whether an invite must say which site it is for."""
        return self.privacy is not None and self.join.policy == "invite"

    @property
    def topology(self) -> TopologyKind:
        """On which ways contributions are added up, and whether heads of sites are checked."""
        check = self.kind == "federated" if self.exchange.check is None else self.exchange.check
        return "checked" if check and self.exchange.plan == "two-level" else self.exchange.plan

    def settings(self) -> RunSettings:
        """What governs rounds and optimizers."""
        rounds = rounds_of(self)
        rounds["outer"] = self._governed(rounds["outer"])
        return RunSettings(
            method=self.train.method,
            sync_every=self.train.sync_every if self.work is None else self.work.steps,
            round_s=self.train.round_s,
            target_samples=self.train.target_samples,
            local_after=self.train.local_after,
            growth=self.train.growth,
            overlap=self.train.overlap,
            delay=self.train.delay,
            mixing=self.train.mixing,
            outliers=self.train.outliers,
            share=self.train.share,
            max_steps=self.train.max_steps,
            feedback=self.exchange.feedback,
            feedback_kept=self.exchange.feedback_kept,
            worker_momentum=self.robust.momentum,
            plan=self.topology,
            fragments=self.exchange.fragments,
            lying=self.quorum.lying,
            rounds=self.train.rounds,
            deadline_s=self.exchange.deadline_s,
            limits=self.limits.settings(),
            adapters=self.adapters.settings(),
            buffers=self.model.buffers,
            evaluate=self.evaluate.settings() if self.evaluate is not None else None,
            **rounds,
        )

    def _governed(self, outer: OuterSettings) -> OuterSettings:
        """With a governor that goes by evaluations, if the run has both. Where some may lie it
        advises only: what it sees are words and vectors of members, so one could move it.
        """
        if not outer.governor:
            return outer
        if self.quorum.lying:
            return msgspec.structs.replace(outer, advises=True)
        rounds = self.evaluate.rounds if self.evaluate is not None else 0
        return msgspec.structs.replace(outer, watch=rounds)


def run_id_of(data: bytes) -> RunId:
    """base32(sha256(canonical manifest bytes))[:26], lower case."""
    return RunId(base64.b32encode(hashlib.sha256(data).digest()).decode()[:RUN_ID_LENGTH].lower())


MOST_MASKED_STEPS = 4096
"""Inner steps of a site's round in a masked run of FedNova that says samples or epochs; a site that
makes more is told which line has room for them."""


def rounds_of(manifest: Manifest) -> dict[str, Any]:
    """Fields of RunSettings: how contributions travel, what becomes of them and of that."""
    exchange, secure = manifest.exchange, manifest.secure
    if manifest.btard is not None:
        return {  # vectors are the log's word by word
            "codec": MASKED_CODEC,
            "reducer": "copy",
            "outer": manifest.train.outer.settings(),
            "btard": manifest.btard.settings(manifest.join.allow),
        }
    outer = (
        manifest.federated.settings()
        if manifest.kind == "federated"
        else manifest.train.outer.settings()
    )
    star = manifest.federated.topology == "coordinator"
    site = site_of(manifest.federated) if manifest.kind == "federated" else None
    if site is not None:
        site = msgspec.structs.replace(site, work=manifest.work)
    arrivals = arrivals_of(manifest)
    if secure is not None:
        privacy = manifest.privacy.settings() if manifest.privacy is not None else None
        return {
            "codec": MASKED_CODEC,
            "reducer": "copy",
            "outer": outer,
            "coordinator": star,
            "secure": _masked(secure.settings(manifest.robust.reducer), site),
            "privacy": privacy,
            "site": site,
            "sample": sample_of(manifest),
        }
    return {
        "codec": exchange.codec,
        "codecs": {**exchange.codecs, **exact_codecs(manifest.federated)},
        "error": exchange.error,
        "exact": exchange.exact,
        "reducer": "sum"
        if arrivals is not None and (arrivals.period_s or arrivals.groups)
        else manifest.robust.reducer,
        "outer": outer,
        "coordinator": star,
        "site": site,
        "sample": sample_of(manifest),
        "arrivals": arrivals,
    }


def _masked(secure: SecureSettings, site: SiteSettings | None) -> SecureSettings:
    """With room for the number of inner steps, where that travels behind masks, too: twice what
    the manifest says, since what travels is a difference of two; up to `MOST_MASKED_STEPS`, if it
    says none.
    """
    from ...optim.federated.methods import method_of_steps

    if site is None or not method_of_steps(site.method).normalised:
        return secure
    steps = site.work.steps if site.work is not None else None
    room = float(2 * steps if steps is not None else MOST_MASKED_STEPS)
    return msgspec.structs.replace(secure, reaches={STEPS: room} | dict(secure.reaches))


def site_of(table: FederatedTable) -> SiteSettings | None:
    """What members do beside plain inner steps; None: nothing."""
    from ...optim.federated.methods import method_of_steps

    pull = table.pull if table.own else None
    plain = method_of_steps(table.method).plain and pull is None and table.sample is None
    if plain and table.work is None:
        return None
    return SiteSettings(table.method, table.mu, table.beta, table.ahead, pull)


def sample_of(manifest: Manifest) -> SampleSettings | None:
    """Who takes part in a round; None: all that can."""
    given, secure, rule = manifest.federated.sample, manifest.secure, manifest.robust.parsed
    if given is None or manifest.kind != "federated":
        return None
    least = max(
        secure.threshold if secure is not None else 1, rule.least if rule is not None else 1
    )
    return (
        SampleSettings(count=given, least=least)
        if isinstance(given, int)
        else SampleSettings(given, least=least)
    )


def exact_codecs(table: FederatedTable) -> dict[str, str]:
    """Codecs of what travels beside the model: a control variate that lost something on the way
    would not be what its member keeps.
    """
    from ...optim.federated.methods import SUMS, method_of_steps

    method = method_of_steps(table.method)
    beside = SUMS if method.control else (STEPS,) if method.normalised else ()
    return dict.fromkeys(beside, "fp32")


def arrivals_of(manifest: Manifest) -> ArrivalSettings | None:
    """For whom a round waits; None: for all that can contribute."""
    table, least = manifest.federated, manifest.train.sync_every or 1  # refused where not given
    if manifest.kind != "federated":
        arrivals = manifest.exchange.arrivals
        return None if arrivals is None else _asynchronous(arrivals, least)
    match table.method:
        case "fedasync":
            return ArrivalSettings(count=1, fading=fading_of(table))
        case "fedbuff":
            return ArrivalSettings(count=table.buffer)
        case "fedfix":
            return ArrivalSettings(period_s=table.period_s)
        case "fedcompass":
            groups = Groups(least, math.ceil(table.longest * least), least, table.slack)
            return ArrivalSettings(fading=fading_of(table), groups=groups)
        case _:
            return None


def _asynchronous(table: ArrivalsTable, steps: int) -> ArrivalSettings:
    """Asynchronous DiLoCo with turns of so many inner steps."""
    fading = fading_of(table)
    if table.wait == "groups":
        most = math.ceil(table.longest * steps)
        return ArrivalSettings(fading=fading, groups=Groups(steps, most, steps, table.slack))
    window = GraceWindow(None if table.grace == "step" else table.grace)
    dynamic = DynamicSteps(steps, min(table.least, steps)) if table.dylu else None
    return ArrivalSettings(table.quorum, fading=fading, window=window, dynamic=dynamic)


def fading_of(table: FederatedTable | ArrivalsTable) -> Fading:
    """How far contributions move the anchor, of a method that has such numbers."""
    return Fading(table.alpha, table.staleness, table.staleness_a, table.staleness_b)
