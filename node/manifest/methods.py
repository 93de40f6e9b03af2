"""Which numbers of ``[federated]`` each method has, what its members do beside plain steps, and
what that does not go with.

Importing this loads no torch.
"""

from __future__ import annotations

from .manifest import Manifest, arrivals_of, sample_of, site_of
from .optional_tables import READS, FederatedTable
from .refusals import Refusal


def unread(table: FederatedTable) -> list[str]:
    """Numbers that are given, and that the method does not have."""
    plain = type(table)()
    read = {*READS[table.method], *(("pull",) if table.own else ())}
    names = dict.fromkeys((*(name for names in READS.values() for name in names), "pull"))
    return [
        name for name in names if name not in read and getattr(table, name) != getattr(plain, name)
    ]


def counting(table: FederatedTable) -> list[str]:
    """Those that the method has, and that count beside the others."""
    idle = {"staleness_a"} if table.staleness_a is None else set[str]()
    idle |= {"staleness_b"} if table.staleness != "hinge" else set()
    return [name for name in READS[table.method] if name not in idle]


def rounds_text(manifest: Manifest, turn: str) -> str:
    """When there is a round, for people; ``turn``: how long one is."""
    table = manifest.federated
    if arrivals_of(manifest) is None:
        return f"every {turn}"
    when = {
        "fedasync": "at every arrival",
        "fedbuff": f"of {table.buffer} arrivals",
        "fedfix": f"every {table.period_s:g} s of whoever has come",
        "fedcompass": "of groups that arrive together",
    }
    longer = f" to {table.longest:g} times as many" if table.method == "fedcompass" else ""
    return f"{when[table.method]}, a site's turn being {turn}{longer}"


def arrival_refusals(manifest: Manifest) -> list[Refusal]:
    """What a run does not go with whose rounds do not wait for everybody."""
    from ...optim.model.feedback import has_feedback

    if arrivals_of(manifest) is None:
        return []
    table, name = manifest.federated, manifest.federated.method
    plain = f"Members of {name} make plain steps."
    scaled = "Members scale what they contribute by what it is worth."
    return [
        (
            manifest.train.sync_every is None,
            "$.train.sync_every",
            "A turn is so many steps, whatever the others do.",
            "sync_every = 100",
        ),
        (
            table.sample is not None,
            "$.federated.sample",
            "Whoever has come is in the round.",
            "Leave it out.",
        ),
        (
            table.staleness == "constant" and table.staleness_a is not None,
            "$.federated.staleness_a",
            "Contributions that count the same however stale they are have no such number.",
            'Leave it out, or staleness = "polynomial".',
        ),
        (
            table.staleness != "hinge" and table.staleness_b != type(table)().staleness_b,
            "$.federated.staleness_b",
            "It says from how many rounds behind a contribution counts less, of the hinge.",
            'Leave it out, or staleness = "hinge".',
        ),
        (bool(table.own), "$.federated.personal", plain, "Leave it out."),
        (
            manifest.secure is not None,
            "$.secure",
            "Masks come off the sum of all that began a round together, and here nobody does.",
            'Leave [secure] out, or method = "fedavg".',
        ),
        (
            manifest.robust.rule != "mean",
            "$.robust.rule",
            f"{scaled} A rule compares contributions of one scale.",
            'Leave [robust] out, or method = "fedavg".',
        ),
        (
            manifest.quorum.lying > 0,
            "$.quorum.lying",
            "Who has come by when is the convener's word.",
            "Leave it out.",
        ),
        (
            manifest.no_quorum.policy == "branch",
            "$.no_quorum.policy",
            "Whoever is cut off makes its turn all the same.",
            'policy = "pause"',
        ),
        (
            manifest.join.probation > 0,
            "$.join.probation",
            f"{scaled} Newcomers' are judged by their length.",
            "Leave it out.",
        ),
        (
            manifest.exchange.fragments > 1,
            "$.exchange.fragments",
            "A turn is of the model as a whole.",
            "fragments = 1",
        ),
        (
            manifest.train.share is not None,
            "$.train.share",
            "A turn is as long as the manifest says.",
            "Leave it out.",
        ),
        (
            has_feedback(manifest.settings()),
            "$.exchange.feedback",
            f"{scaled} What the codec lost of one would be carried into another of another scale.",
            'Leave it out, with codec = "int8" or a finer one.',
        ),
    ]


def refusals(manifest: Manifest) -> list[Refusal]:
    """What the method of a federated run, and its members' own models, do not go with."""
    from ...optim.federated.methods import method_of_steps

    table, exchange = manifest.federated, manifest.exchange
    method, site = method_of_steps(table.method), site_of(table)
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
        (
            exchange.fragments > 1,
            "$.exchange.fragments",
            f"Steps of {_named(table)} are of the model as a whole.",
            "fragments = 1",
        ),
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
            f"In {method.name} a site's control variate must be in the sum exactly once. Which "
            "sites are in a masked sum is told to those only that were there: a site that was "
            "killed could not find out, and what the run converges to would be bent for ever.",
            'Leave [secure] out, or method = "fedavg_m", which sends nothing beside the model.',
        ),
        (
            manifest.robust.rule != "mean",
            "$.robust.rule",
            (
                "Control variates are added up: a rule in place of the sum would leave it another "
                "number than what sites keep."
            ),
            'Leave [robust] out, or method = "fedavg_m".',
        ),
        (
            manifest.no_quorum.policy == "branch",
            "$.no_quorum.policy",
            (
                "A site could not tell from the log whether its control variate "
                "was counted on a branch."
            ),
            'policy = "pause"',
        ),
    ]


def _named(table: FederatedTable) -> str:
    return "Ditto" if table.own else table.method
