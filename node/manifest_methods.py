"""Which numbers of ``[federated]`` each method has, what its members do beside plain steps, and what that does not go with.

Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..collectives.swarm import Sample, SiteSettings

if TYPE_CHECKING:
    from .manifest import Manifest
    from .manifest_federated import FederatedTable

Method = Literal[
    "fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedprox", "scaffold", "fedavg_m", "scaffold_m", "fedavg_m_vr", "scaffold_m_vr",
    "per_fedavg",
]  # fmt: skip
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
}
"""Which numbers of ``[federated]`` a method has."""

OF_A_SERVER = ("lr", "momentum", "beta2", "epsilon", "bias_correction")
Refusal = tuple[bool, str, str, str]
"""Whether it is so, the key, why that cannot be, a way out."""


def unread(table: FederatedTable) -> list[str]:
    """Numbers that are given, and that the method does not have."""
    plain = type(table)()
    read = {*READS[table.method], *(("pull",) if table.own else ())}
    names = dict.fromkeys((*(name for names in READS.values() for name in names), "pull"))
    return [name for name in names if name not in read and getattr(table, name) != getattr(plain, name)]


def site_of(table: FederatedTable) -> SiteSettings | None:
    """What members do beside plain inner steps; None: nothing."""
    from ..optim.federated.methods import METHODS

    pull = table.pull if table.own else None
    if METHODS[table.method].plain and pull is None and table.sample is None:
        return None
    return SiteSettings(table.method, table.mu, table.beta, table.ahead, pull)


def sample_of(manifest: Manifest) -> Sample | None:
    """Who takes part in a round; None: all that can."""
    from ..security.rule_names import parse_reducer

    given, secure, rule = manifest.federated.sample, manifest.secure, parse_reducer(manifest.robust.reducer)
    if given is None or manifest.mode != "federated":
        return None
    least = max(secure.threshold if secure is not None else 1, rule.least if rule is not None else 1)
    return Sample(count=given, least=least) if isinstance(given, int) else Sample(given, least=least)


def exact_codecs(table: FederatedTable) -> dict[str, str]:
    """Codecs of what travels beside the model: a control variate that lost something on the way would not be what its member keeps."""
    from ..optim.federated.methods import METHODS, SUMS

    return dict.fromkeys(SUMS, "fp32") if METHODS[table.method].control else {}


def refusals(manifest: Manifest) -> list[Refusal]:
    """What the method of a federated run, and its members' own models, do not go with."""
    from ..optim.federated.methods import METHODS

    table, exchange = manifest.federated, manifest.exchange
    method, site = METHODS[table.method], site_of(table)
    if site is None:
        return []
    gpt = manifest.model.entry == "builtin:gpt"
    least = 1 if (sample := sample_of(manifest)) is None else sample.least
    refused: list[Refusal] = [
        (
            sample is not None and sample.count is not None and sample.count < least,
            "$.federated.sample",
            f"A round of this run needs {least} contributions.",
            f"sample = {least}, or more",
        ),
        (
            sample is not None and manifest.join.probation > 0,
            "$.join.probation",
            "Newcomers are drawn for no round, and would be on probation for ever.",
            "Leave it out, or sample.",
        ),
        (
            sample is not None and manifest.no_quorum.policy == "branch",
            "$.no_quorum.policy",
            "Who is in a branch was not drawn.",
            'policy = "pause"',
        ),
        (exchange.fragments > 1, "$.exchange.fragments", f"Steps of {_named(table)} are of the model as a whole.", "fragments = 1"),
        (
            gpt and (method.control or method.momentum) and manifest.train.inner.optimizer != "sgd",
            "$.train.inner.optimizer",
            f"{method.name} takes a round's way for a sum of gradients times a learning rate.",
            'optimizer = "sgd", under [train.inner], with an lr for that',
        ),
    ]
    if not method.control:
        return refused
    return [
        *refused,
        (
            manifest.secure is not None,
            "$.secure",
            f"In {method.name} a site's control variate must be in the sum exactly once. Which sites are in a masked sum is told to those only that "
            "were there: a site that was killed could not find out, and what the run converges to would be bent for ever.",
            'Leave [secure] out, or method = "fedavg_m", which sends nothing beside the model.',
        ),
        (
            manifest.robust.rule != "mean",
            "$.robust.rule",
            "Control variates are added up: a rule in place of the sum would leave it another number than what sites keep.",
            'Leave [robust] out, or method = "fedavg_m".',
        ),
        (
            manifest.no_quorum.policy == "branch",
            "$.no_quorum.policy",
            "A site could not tell from the log whether its control variate was counted on a branch.",
            'policy = "pause"',
        ),
    ]


def _named(table: FederatedTable) -> str:
    return "Ditto" if table.own else table.method
