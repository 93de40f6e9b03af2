"""Tables that few runs have: `[federated]`, `[secure]`, `[privacy]`, `[btard]`.

Importing this loads no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...collectives.identifiers import PeerId
from ...collectives.outer_rules import OuterSettings
from ...collectives.seeded import MOST_PEERS, BtardSettings
from ...collectives.swarm import PrivacySettings, SecureSettings
from .tables import Pattern

LEAST_LEFT = 3  # as `security.btard.AttemptSettings.least`: with fewer nothing goes on
LEAST_PEERS = LEAST_LEFT + 1  # so that one of them may be removed
MOST_INTERVALS = 63  # whose states' hashes one message holds
Weights = Literal["examples", "equal"]
Times = Annotated[float, msgspec.Meta(ge=0.1, le=86_400)]


def liars_borne(peers: int) -> int:
    """How many of so many peers may lie without ending the run: fewer than half, and three that do
    not must be left.
    """
    return max(0, min((peers - 1) // 2, peers - LEAST_LEFT))


class BtardTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[btard]``: as `security.btard.AttemptSettings`. The peers are those that ``[join] allow``
    names, fewer than half of which may do anything. Up to `liars_borne` of them cannot end the run,
    nor have one removed that does not lie.

    ``radius``: about the distance of one peer's vector from the mean of all, in the first step.
    ``validators``: how many peers of a step look into another's last vector instead of computing
    one. ``tolerance``: relative difference between two machines' vectors of one seed above which
    one of them lied. ``timeout_s``: a peer that owes a message for more than twice as long is
    removed; ``compute_s``: where a vector is computed. ``intervals``: into how many parts a peer's
    work is cut, whose states it commits to: a validator computes one of them again; 0: the whole
    work.
    """

    radius: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    validators: Annotated[int, msgspec.Meta(ge=1, le=MOST_PEERS // 2)] = 1
    tolerance: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-2
    timeout_s: Times = 10.0
    compute_s: Times = 120.0
    intervals: Annotated[int, msgspec.Meta(ge=0, le=MOST_INTERVALS)] = 0

    def settings(self, allow: tuple[str, ...]) -> BtardSettings:
        """As a session takes it. ``allow``: the peers of the run."""
        peers = tuple(sorted(PeerId(peer) for peer in allow))
        return BtardSettings(
            peers,
            self.radius,
            self.validators,
            self.tolerance,
            self.timeout_s,
            self.compute_s,
            self.intervals,
        )


class WorkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``[federated] work``: what a site does in a round before it contributes, one of the three
    (`WorkSettings`).
    """

    steps: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    epochs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None


class FederatedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[federated]``: what becomes of the mean of a round's contributions, on all members alike.
    ``lr`` 1 takes it as it is.

    ``sample``: who takes part in a round: a share of the members (0.5), or so many of them (10),
    drawn by the log (`round.sampling`); where not given, all that can. ``topology``: who adds up:
    each member a part, or one, the coordinator: the organiser's, and another one while that is
    away. ``work``: when a site contributes, in place of ``sync_every``: when it has done that,
    whatever others have done; a round waits for all who take part. ``weights``: whether a site
    counts by its examples, as it has declared them, or as much as any other.
    """

    method: Method = "fedavg"
    lr: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.99  # this and epsilon: arXiv 2003.00295
    epsilon: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-3
    bias_correction: bool = False
    # FedProx' pull to the anchor; usual are 0.001 to 1.
    mu: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.01
    # Share of the own direction in those of fedavg_m and scaffold_m.
    beta: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    ahead: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 0.01  # per_fedavg's step ahead
    # A model of each site's own beside the run's, which never leaves it.
    personal: Literal["none", "ditto"] = "none"
    pull: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.1  # of that to the run's
    # fedasync's: how far a fresh contribution moves the anchor to the site's model.
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    # How much less a stale one does.
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    # polynomial: (1 + u)^-a, 0.5; hinge: 1 / (a (u - b) + 1), 10.
    staleness_a: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    # hinge: up to so many rounds behind it counts in full.
    staleness_b: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 4
    # fedbuff's: how many contributions make a round.
    buffer: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 3
    period_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 60.0  # fedfix': how often there is one
    # fedcompass': a turn is of sync_every steps up to so many times as many.
    longest: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 5.0
    # fedcompass': how much longer than it should take a group is waited for.
    slack: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.5
    sample: (
        Annotated[int, msgspec.Meta(ge=1, le=1024)]
        | Annotated[float, msgspec.Meta(gt=0, lt=1)]
        | None
    ) = None  # drawn for each round
    topology: Literal["serverless", "coordinator"] = "serverless"
    work: WorkTable | None = None
    weights: Weights = "examples"

    @property
    def own(self) -> Literal["ditto"] | None:
        """What sites have for models of their own."""
        return "ditto" if self.personal == "ditto" else None

    def settings(self) -> OuterSettings:
        """As the outer step takes it."""
        from ...optim.federated.methods import server_settings

        numbers = {name: getattr(self, name) for name in READS[self.method] if name in OF_A_SERVER}
        return server_settings(self.method, **numbers)


class SecureTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[secure]``: contributions are masked, and nobody sees more than a sum of at least
    ``threshold`` of them (`SecureSettings`).

    ``metrics``: what sites report of their training (``attachment.log``) whose mean over a sum
    everybody may know, such as ``["loss"]``. ``buckets``: sites are dealt to so many sums at most,
    of at least ``threshold`` each, and ``[robust]`` compares their means.
    """

    threshold: Annotated[int, msgspec.Meta(ge=3, le=256)] = 3
    reach: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 16.0
    max_weight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    metrics: Annotated[
        tuple[
            Annotated[
                str,
                msgspec.Meta(
                    pattern=r"\A[A-Za-z][A-Za-z0-9_.-]{0,63}\Z", description="a name, such as loss"
                ),
            ],
            ...,
        ],
        msgspec.Meta(max_length=16),
    ] = ()

    buckets: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    # Of tensors by their names, in place of reach; the longest pattern that matches decides.
    reaches: Annotated[
        dict[Pattern, Annotated[float, msgspec.Meta(gt=0, le=1e9)]], msgspec.Meta(max_length=64)
    ] = {}

    def settings(self, rule: str) -> SecureSettings:
        """As a session takes it. ``rule``: of buckets' means."""
        return SecureSettings(
            self.threshold,
            self.reach,
            self.max_weight,
            self.metrics,
            self.buckets,
            rule,
            self.reaches,
        )


class PrivacyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[privacy]``: each contribution is bounded and gets noise, and a site stops before it has
    spent ``stop_at_epsilon`` (`PrivacySettings`).

    ``quantile``: the bound begins at ``clip`` and follows this quantile of the norms, by
    ``clip_rate``, with ``count_noise`` on the count. Where sites count by their examples, a site of
    n counts min(n, ``most_examples``) / ``most_examples``, and the sum is divided by
    ``normaliser``.
    """

    noise: Annotated[float, msgspec.Meta(ge=0.1, le=100, examples=[5.0])]
    clip: Annotated[float, msgspec.Meta(gt=0, le=1e6, examples=[1.0])]
    delta: Annotated[float, msgspec.Meta(gt=0, lt=0.1, examples=[1e-5])]
    stop_at_epsilon: Annotated[float, msgspec.Meta(gt=0, le=1e6, examples=[12.0])]
    colluding: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    quantile: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    # This and quantile 0.5: arXiv 1905.03871.
    clip_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.2
    count_noise: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None  # None: twice noise
    # Where sites count by their examples: those from which on a site counts in full.
    most_examples: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    # By what the sum of a round is divided then, whoever is in it: public, the same in all rounds.
    normaliser: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    # Groups of tensors by their names, each with a bound of its own; clip is that of the others.
    clips: Annotated[
        dict[Pattern, Annotated[float, msgspec.Meta(gt=0, le=1e6)]], msgspec.Meta(max_length=64)
    ] = {}

    def settings(self) -> PrivacySettings:
        """As a session takes it."""
        return PrivacySettings(*msgspec.structs.astuple(self))


Method = Literal[
    "fedavg",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fedprox",
    "scaffold",
    "fedavg_m",
    "scaffold_m",
    "fedavg_m_vr",
    "scaffold_m_vr",
    "per_fedavg",
    "fedasync",
    "fedbuff",
    "fedfix",
    "fedcompass",
    "fednova",
]
READS: dict[Method, tuple[str, ...]] = {
    "fedavg": ("lr",),
    "fedavgm": ("lr", "momentum"),
    "fedadam": ("lr", "momentum", "beta2", "epsilon", "bias_correction"),
    "fedyogi": ("lr", "momentum", "beta2", "epsilon"),
    "fedadagrad": ("lr", "epsilon"),
    "fedprox": ("lr", "mu"),
    "scaffold": ("lr",),
    "fedavg_m": ("lr", "beta"),
    "scaffold_m": ("lr", "beta"),
    "fedavg_m_vr": ("lr", "beta"),
    "scaffold_m_vr": ("lr", "beta"),
    "per_fedavg": ("lr", "ahead"),
    "fedasync": ("alpha", "staleness", "staleness_a", "staleness_b"),
    "fedbuff": ("lr", "buffer"),
    "fedfix": ("lr", "period_s"),
    "fednova": ("lr",),
    "fedcompass": ("lr", "alpha", "staleness", "staleness_a", "staleness_b", "longest", "slack"),
}
"""Which numbers of ``[federated]`` a method has."""

OF_A_SERVER = ("lr", "momentum", "beta2", "epsilon", "bias_correction")
