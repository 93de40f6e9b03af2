"""Which numbers of ``[federated]`` each method has, what its members do beside plain steps, and
what that does not go with.

Importing this loads no torch.
"""

from __future__ import annotations

from .manifest import Manifest, arrivals_of, sample_of, site_of
from .optional_tables import READS, FederatedTable, PrivacyTable
from .refusals import Row, against, faults_of
from .tables import ArrivalsTable


def counting(table: FederatedTable) -> list[str]:
    """Those that the method has, and that count beside the others."""
    idle = {"staleness_a"} if table.staleness_a is None else set[str]()
    idle |= {"staleness_b"} if table.staleness != "hinge" else set()
    return [name for name in READS[table.method] if name not in idle]


def rounds_text(manifest: Manifest, turn: str) -> str:
    """When there is a round, for people; ``turn``: how long one is."""
    table, arrivals = manifest.federated, manifest.exchange.arrivals
    if (work := manifest.work) is not None:
        return f"once every site that takes part has done {work}"
    if arrivals_of(manifest) is None:
        return f"every {turn}"
    if manifest.kind != "federated" and arrivals is not None:
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


def arrival_rows(manifest: Manifest) -> list[Row]:
    """What a run does not go with whose rounds do not wait for everybody."""
    if arrivals_of(manifest) is None:
        return []
    federated = manifest.kind == "federated"
    waits = '[federated] method = "fedavg"' if federated else "leave [exchange.arrivals] out"
    scaled = "Members scale what they contribute by what it is worth."
    one = f'$.federated.method = "{manifest.federated.method}"'
    settings = manifest.settings()
    exchange = manifest.exchange
    coded = "Leave it out." if exchange.feedback else 'codec = "int8", or leave codecs out'
    rows = against(
        one if federated else "[exchange.arrivals]",
        [
            (
                manifest.train.sync_every is None,
                "$.train.sync_every",
                "A turn is so many steps, whatever the others do.",
                "sync_every = 100 and leave round_s out and leave target_samples out",
            ),
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
                f"Leave [quorum] out, or {waits}.",
            ),
            (
                manifest.join.probation > 0,
                "$.join.probation",
                f"{scaled} Newcomers' are judged by their length.",
                f"Leave it out, or {waits}.",
            ),
            (
                exchange.fragments > 1,
                "$.exchange.fragments",
                "A turn is of the model as a whole.",
                f"fragments = 1, or {waits}",
            ),
            (
                manifest.train.share is not None,
                "$.train.share",
                "A turn is as long as the manifest says.",
                f"Leave it out, or {waits}.",
            ),
            (
                settings.has_feedback,
                "$.exchange.feedback",
                f"{scaled} What the codec lost of one would be carried into another of another "
                "scale.",
                coded,
            ),
        ],
    )
    return rows + (_rows_of_sites(manifest, one) if federated else _rows_of_diloco(manifest))


def _rows_of_sites(manifest: Manifest, one: str) -> list[Row]:
    """Of federated runs that do not wait."""
    table = manifest.federated
    return against(
        one,
        [
            (
                table.sample is not None,
                "$.federated.sample",
                "Whoever has come is in the round.",
                'Leave it out, or method = "fedavg".',
            ),
            (
                bool(table.own),
                "$.federated.personal",
                f"Members of {table.method} make plain steps.",
                "Leave it out and leave pull out.",
            ),
            (
                manifest.secure is not None,
                "$.secure",
                "Masks come off the sum of all that began a round together, and here nobody does.",
                '[federated] method = "fedavg", or leave it out.',
            ),
        ],
    )


def _rows_of_diloco(manifest: Manifest) -> list[Row]:
    """Of asynchronous DiLoCo."""
    train, table = manifest.train, manifest.exchange.arrivals
    assert table is not None
    waits = "leave [exchange.arrivals] out"
    return against(
        "[exchange.arrivals]",
        [
            (
                table.least > (train.sync_every or table.least),
                "$.exchange.arrivals.least",
                f"A turn of the fastest member has {train.sync_every} steps.",
                f"least = {train.sync_every}, or leave it out.",
            ),
            (
                train.method != "diloco",
                "$.train.method",
                "What is added up are changes of the anchors that members began at.",
                f'method = "diloco", or {waits}',
            ),
            *(
                (
                    given > 0,
                    f"$.train.outer.{name}",
                    "It was measured in rounds of all members.",
                    "Leave it out.",
                )
                for name, given in (("warmup", train.outer.warmup), ("hold", train.outer.hold))
            ),
            (
                train.overlap != "none",
                "$.train.overlap",
                "A member's work of one turn would be in two contributions, and a member waits for "
                "one exchange at most.",
                "Leave it out and leave delay out.",
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
        ],
    )


_ENDS = ("sync_every", "round_s", "target_samples")
"""Settings of ``[train]`` that end a round where no work does."""


def work_rows(manifest: Manifest) -> list[Row]:
    """What a federated run does not go with whose sites each do a work of their own in a round, and
    what is of such a run only."""
    from ...optim.federated.methods import method_of_steps

    table, train, privacy = manifest.federated, manifest.train, manifest.privacy
    method, plain = method_of_steps(table.method), '[federated] method = "fedavg"'
    if table.work is None:
        return _rows_without_work(manifest, normalised=method.normalised)
    given = [name for name in ("steps", "samples", "epochs") if getattr(table.work, name)]
    rows = [
        (
            len(given) != 1,
            "$.federated.work",
            "A site's work in a round is so many steps, samples or epochs.",
            "work = { epochs = 1 }, or work = { steps = 100 }",
        ),
        *(
            (
                getattr(train, end) is not None,
                f"$.train.{end}",
                "[federated] work says when a site contributes.",
                "Leave it out, or leave [federated] work out.",
            )
            for end in _ENDS
        ),
        (
            arrivals_of(manifest) is not None,
            "$.federated.work",
            f"A site's turn in {table.method} is sync_every steps, and its rounds wait for some.",
            'Leave it out and [train] sync_every = 100, or method = "fedavg".',
        ),
        (
            method.momentum and table.work.steps is None,
            "$.federated.work",
            f"{table.method} takes the way of a round for as many steps at every site.",
            "work = { steps = 100 }",
        ),
        (
            method.normalised and privacy is not None,
            "$.privacy",
            f"How many steps a site made is of its data, and travels beside its update in "
            f"{table.method}. Where all make as many, it is fedavg.",
            f"Leave it out, or {plain} and work = {{ steps = 100 }}.",
        ),
        (
            method.normalised and manifest.robust.rule != "mean",
            "$.robust.rule",
            "What sites give is compared at one length each, and made longer after it.",
            f"Leave [robust] out, or {plain}.",
        ),
        (
            train.local_after > 0,
            "$.train.local_after",
            "A round is as long as its work from the first on.",
            "Leave it out.",
        ),
        (
            manifest.quorum.lying > 0,
            "$.quorum.lying",
            "Until when a round waits is the convener's word.",
            "Leave [quorum] out.",
        ),
    ]
    return against("$.federated.work", [*rows, *_weight_rows(manifest, privacy)])


def check_work(manifest: Manifest, name: str) -> None:
    """Raises ConfigError for a federated run whose rounds end when the first site is done: they are
    not its method's. (Asked where a run is made or validated, not of one that is there.)"""
    if faults := faults_of(_new_work_rows(manifest), manifest, name):
        raise faults[0]


def _new_work_rows(manifest: Manifest) -> list[Row]:
    from ...optim.federated.methods import method_of_steps

    waits_for_some = arrivals_of(manifest) is not None or manifest.quorum.lying > 0
    if manifest.kind != "federated" or manifest.work is not None or waits_for_some:
        return []
    steps = manifest.train.sync_every
    momentum = method_of_steps(manifest.federated.method).momentum
    work = f"{{ steps = {steps or 100} }}" if momentum or steps else "{ epochs = 1 }"
    given = [end for end in _ENDS if getattr(manifest.train, end) is not None]
    given += ["local_after"] if manifest.train.local_after else []
    out = "".join(f" and leave [train] {end} out" for end in given)
    return [
        Row(
            True,
            "$.federated.work",
            "A round of a federated method is its sites' work: without it the fastest site ends "
            "it, and what the others did by then counts.",
            f"work = {work}{out}",
            says='$.kind is "federated", and $.federated.work does not say what a site does in a '
            "round",
        )
    ]


def _rows_without_work(manifest: Manifest, *, normalised: bool) -> list[Row]:
    """Of what only runs with a work have."""
    privacy, why = manifest.privacy, "All sites count the same in a masked run without work."
    return against(
        "a run without [federated] work",
        [
            (
                manifest.federated.weights != "examples",
                "$.federated.weights",
                "A site that contributes when another is done counts by what it has processed.",
                "Leave it out.",
            ),
            *(
                (privacy is not None and bool(value), f"$.privacy.{key}", why, "Leave it out.")
                for key, value in _numbers(privacy).items()
            ),
            (
                normalised,
                "$.federated.method",
                "It is for sites whose work differs on purpose: work = { epochs = 1 }.",
                'method = "fedavg"',
            ),
        ],
    )


def _numbers(privacy: PrivacyTable | None) -> dict[str, float | None]:
    """What a weighted private sum needs."""
    return (
        {}
        if privacy is None
        else {
            "most_examples": privacy.most_examples,
            "normaliser": privacy.normaliser,
        }
    )


def _weight_rows(
    manifest: Manifest, privacy: PrivacyTable | None
) -> list[tuple[bool, str, str, str]]:
    """What sites count, beside masks, noise and robust rules."""
    secure, robust = manifest.secure, manifest.robust.parsed
    if secure is None:
        return []
    examples = manifest.federated.weights == "examples"
    same, ways = "All sites count the same.", {"most_examples": 1000, "normaliser": 2.5}
    why = (
        "Sites count by their examples. How many one has is of its data, so no sum of them may be "
        "known: a site counts min(n, most_examples) / most_examples, and the sum of a round is "
        "divided by normaliser, about what the sites count together."
    )
    return [
        (
            examples and robust is not None,
            "$.federated.weights",
            "A rule counts every bucket once, whatever its sites have.",
            'weights = "equal"',
        ),
        (
            examples and robust is None and privacy is None and secure.max_weight == 1,
            "$.secure.max_weight",
            "Sites count by their examples, and a masked sum needs room for the largest site's.",
            'max_weight = 1000 (or more), or [federated] weights = "equal"',
        ),
        (
            not examples and secure.max_weight != 1,
            "$.secure.max_weight",
            same,
            'Leave it out, or [federated] weights = "examples".',
        ),
        *(
            (
                examples and value is None,
                f"$.privacy.{key}",
                why,
                f'{key} = {ways[key]}, or [federated] weights = "equal"',
            )
            for key, value in _numbers(privacy).items()
        ),
        *(
            (not examples and value is not None, f"$.privacy.{key}", same, "Leave it out.")
            for key, value in _numbers(privacy).items()
        ),
    ]


def method_rows(manifest: Manifest) -> list[Row]:
    """What the method of a federated run, and its members' own models, do not go with."""
    from ...optim.federated.methods import method_of_steps

    table, exchange = manifest.federated, manifest.exchange
    method, site = method_of_steps(table.method), site_of(table)
    if site is None:
        return []
    gpt = manifest.model.entry == "builtin:gpt"
    least = 1 if (sample := sample_of(manifest)) is None else sample.least
    of_gradients = method.control or method.momentum
    named, plain = _named(table), 'or [federated] method = "fedavg"'
    rows = against(
        f'$.federated.method = "{table.method}"',
        [
            (
                sample is not None and sample.count is not None and sample.count < least,
                "$.federated.sample",
                f"A round of this run needs {least} contributions.",
                f"sample = {least} (or more), or leave it out.",
            ),
            (
                sample is not None and manifest.join.probation > 0,
                "$.join.probation",
                "Newcomers are drawn for no round, and would be on probation for ever.",
                "Leave it out, or leave [federated] sample out.",
            ),
            (
                exchange.fragments > 1,
                "$.exchange.fragments",
                f"Steps of {named} are of the model as a whole.",
                "fragments = 1",
            ),
            (
                gpt and of_gradients and manifest.train.inner.optimizer != "sgd",
                "$.train.inner.optimizer",
                f"{method.name} takes a round's way for a sum of gradients times a learning rate.",
                f'optimizer = "sgd" (with an lr for that), {plain}',
            ),
        ],
    )
    return rows + _control_rows(manifest, method.name) if method.control else rows


def _control_rows(manifest: Manifest, method: str) -> list[Row]:
    """What control variates do not go with: each site's must be counted exactly once."""
    other = '[federated] method = "fedavg_m"'
    return against(
        f'$.federated.method = "{manifest.federated.method}"',
        [
            (
                manifest.secure is not None,
                "$.secure",
                f"In {method} a site's control variate must be in the sum exactly once. Which "
                "sites are in a masked sum is told to those only that were there: a site that was "
                "killed could not find out, and what the run converges to would be bent for ever. "
                "fedavg_m sends nothing beside the model.",
                f"{other}, or leave it out.",
            ),
            (
                manifest.robust.rule != "mean",
                "$.robust.rule",
                "Control variates are added up: a rule in place of the sum would leave it another "
                "number than what sites keep.",
                f"Leave [robust] out, or {other}.",
            ),
        ],
    )


def _named(table: FederatedTable) -> str:
    return "Ditto" if table.own else table.method
