"""Which numbers of ``[federated]`` each method has, what its members do beside plain steps, and
what that does not go with.

Importing this loads no torch.
"""

from __future__ import annotations

from .manifest import Manifest, arrivals_of, sample_of, site_of
from .optional_tables import READS, FederatedTable
from .refusals import Refusal
from .tables import ArrivalsTable


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
    table, arrivals = manifest.federated, manifest.exchange.arrivals
    if arrivals_of(manifest) is None:
        return f"every {turn}"
    if manifest.mode != "federated" and arrivals is not None:
        return _asynchronous_text(arrivals, turn)
    when = {
        "fedasync": "at every arrival",
        "fedbuff": f"of {table.buffer} arrivals",
        "fedfix": f"every {table.period_s:g} s of whoever has come",
        "fedcompass": "of groups that arrive together",
    }
    longer = f" to {table.longest:g} times as many" if table.method == "fedcompass" else ""
    return f"{when[table.method]}, a site's turn being {turn}{longer}"


def _asynchronous_text(table: ArrivalsTable, turn: str) -> str:
    if table.wait == "groups":
        longer = f"{turn} to {table.longest:g} times as many"
        return f"of groups that arrive together, a member's turn being {longer}"
    grace = {"step": ", held open for one inner step", 0.0: ""}.get(
        table.grace, f", held open for {table.grace} s"
    )
    own = "; slower members make fewer steps" if table.dylu else ""
    return f"of {table.quorum} or more arrivals{grace}, a member's turn being {turn}{own}"


def arrival_refusals(manifest: Manifest) -> list[Refusal]:
    """What a run does not go with whose rounds do not wait for everybody."""
    if arrivals_of(manifest) is None:
        return []
    federated = manifest.mode == "federated"
    waits = 'method = "fedavg"' if federated else "leave [exchange.arrivals] out"
    scaled = "Members scale what they contribute by what it is worth."
    return [
        (
            manifest.train.sync_every is None,
            "$.train.sync_every",
            "A turn is so many steps, whatever the others do.",
            "sync_every = 100",
        ),
        *(_of_sites(manifest) if federated else _of_diloco(manifest)),
        (
            manifest.robust.rule != "mean",
            "$.robust.rule",
            f"{scaled} A rule compares contributions of one scale.",
            f"Leave [robust] out, or {waits}.",
        ),
        (
            manifest.quorum.lying > 0,
            "$.quorum.lying",
            "Who has come by when is the convener's word.",
            "Leave it out.",
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
            manifest.settings().has_feedback,
            "$.exchange.feedback",
            f"{scaled} What the codec lost of one would be carried into another of another scale.",
            'Leave it out, with codec = "int8" or a finer one.',
        ),
    ]


def _fading_refusals(table: FederatedTable | ArrivalsTable, at: str) -> list[Refusal]:
    return [
        (
            table.staleness == "constant" and table.staleness_a is not None,
            f"{at}.staleness_a",
            "Contributions that count the same however stale they are have no such number.",
            'Leave it out, or staleness = "polynomial".',
        ),
        (
            table.staleness != "hinge" and table.staleness_b != type(table)().staleness_b,
            f"{at}.staleness_b",
            "It says from how many rounds behind a contribution counts less, of the hinge.",
            'Leave it out, or staleness = "hinge".',
        ),
    ]


def _of_sites(manifest: Manifest) -> list[Refusal]:
    """Of federated runs that do not wait."""
    table = manifest.federated
    return [
        (
            table.sample is not None,
            "$.federated.sample",
            "Whoever has come is in the round.",
            "Leave it out.",
        ),
        *_fading_refusals(table, "$.federated"),
        (
            bool(table.own),
            "$.federated.personal",
            f"Members of {table.method} make plain steps.",
            "Leave it out.",
        ),
        (
            manifest.secure is not None,
            "$.secure",
            "Masks come off the sum of all that began a round together, and here nobody does.",
            'Leave [secure] out, or method = "fedavg".',
        ),
    ]


def _of_diloco(manifest: Manifest) -> list[Refusal]:
    """Of asynchronous DiLoCo."""
    train, table = manifest.train, manifest.exchange.arrivals
    assert table is not None
    at, plain = "$.exchange.arrivals", type(table)()
    groups = table.wait == "groups"
    idle = ("quorum", "grace", "dylu", "least") if groups else ("longest", "slack")
    given = [key for key in idle if getattr(table, key) != getattr(plain, key)]
    return [
        (
            bool(given),
            f"{at}.{given[0] if given else ''}",
            "It is of rounds of a quorum." if groups else "It is of groups that arrive together.",
            f'Leave it out, or wait = "{"quorum" if groups else "groups"}".',
        ),
        (
            not groups and not table.dylu and table.least != plain.least,
            f"{at}.least",
            "All members make as many steps.",
            "dylu = true",
        ),
        (
            table.least > (train.sync_every or table.least),
            f"{at}.least",
            f"A turn of the fastest member has {train.sync_every} steps.",
            "Give at most sync_every.",
        ),
        *_fading_refusals(table, at),
        (
            train.method != "diloco",
            "$.train.method",
            "What is added up are changes of the anchors that members began at.",
            'method = "diloco"',
        ),
        (
            train.outer.warmup > 0,
            "$.train.outer.warmup",
            "It was measured in rounds of all members.",
            "Leave it out.",
        ),
        (
            train.overlap != "none",
            "$.train.overlap",
            "A member's work of one turn would be in two contributions.",
            "Leave it out: a member waits for one exchange at most.",
        ),
        (
            train.local_after > 0,
            "$.train.local_after",
            "A turn is as long as the manifest says from the first on.",
            "Leave it out.",
        ),
        (
            manifest.robust.momentum > 0,
            "$.robust.momentum",
            "A running mean of contributions to different anchors is of none of them.",
            "Leave it out.",
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
    return refused + _control_refusals(manifest, method.name) if method.control else refused


def _control_refusals(manifest: Manifest, method: str) -> list[Refusal]:
    """What control variates do not go with: each site's must be counted exactly once."""
    return [
        (
            manifest.secure is not None,
            "$.secure",
            f"In {method} a site's control variate must be in the sum exactly once. Which "
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
    ]


def _named(table: FederatedTable) -> str:
    return "Ditto" if table.own else table.method
