"""``mode = "federated"``: data that stay at home. Its tables, what they mean together, and who can
see what, in plain words.

Importing this loads no torch.
"""

from __future__ import annotations

import math

from ...collectives.errors import ConfigError
from .manifest import Manifest, arrivals_of, exact_codecs
from .methods import arrival_refusals, refusals, unread
from .optional_tables import FederatedTable, PrivacyTable, SecureTable
from .refusals import Refusal, refuse

PLAIN_LANES = "whoever is on the way between members can read and change what they exchange in bulk"
"""What is said of a run whose lanes are not encrypted."""


def check_federated(manifest: Manifest, name: str) -> None:
    """What a federated run must be, and what only such a run can have. Raises ConfigError."""
    federated = manifest.federated
    if manifest.mode != "federated":
        for table in ("federated", "secure", "privacy"):
            if getattr(manifest, table) != getattr(type(manifest)(schema=1, name="x"), table):
                raise ConfigError(
                    f"{name}: $.{table} is given, and the run is not federated",
                    key=f"$.{table}",
                    why="Its table would be ignored, and you might rely on it.",
                    hint='mode = "federated", at the top',
                )
        refuse(arrival_refusals(manifest), manifest, name, "[exchange.arrivals]")
        return
    strange = unread(federated)
    train = manifest.train
    star = federated.topology == "coordinator"
    refused: list[Refusal] = [
        (
            star and manifest.exchange.plan != "butterfly",
            "$.exchange.plan",
            "The coordinator adds up everything.",
            "Leave it out.",
        ),
        (
            bool(strange),
            f"$.federated.{strange[0] if strange else ''}",
            f"{federated.method} has no such number.",
            "Leave it out.",
        ),
        (
            train.outer != type(train.outer)(),
            "$.train.outer",
            "The federated method is the outer step.",
            "Leave [train.outer] out, and set lr and the like under [federated].",
        ),
        (
            manifest.exchange.arrivals is not None,
            "$.exchange.arrivals",
            "The federated method says for whom a round waits.",
            'Leave it out, or method = "fedbuff", "fedcompass" or another such one.',
        ),
        (
            train.method != "diloco",
            "$.train.method",
            "The federated method says what a round does.",
            "Leave it out.",
        ),
        (
            train.overlap != "none",
            "$.train.overlap",
            "A site's work of one round would be in the sums of two.",
            "Leave it out.",
        ),
    ]
    refuse(refused, manifest, name, 'mode = "federated"')
    refuse(
        arrival_refusals(manifest) + refusals(manifest),
        manifest,
        name,
        f'$.federated.method = "{federated.method}"',
    )
    if manifest.secure is not None:
        _check_secure(manifest, name)
    if manifest.privacy is not None:
        _check_privacy(manifest, name)


def _check_secure(manifest: Manifest, name: str) -> None:
    """Long, since it is a table of refusals."""
    exchange, train, secure = manifest.exchange, manifest.train, manifest.secure
    assert secure is not None
    plain = type(exchange)()
    refused: list[Refusal] = [
        (
            (exchange.codec, exchange.codecs) != (plain.codec, plain.codecs),
            "$.exchange.codecs" if exchange.codec == plain.codec else "$.exchange.codec",
            "Masked values are whole numbers of 32 bits, and travel as they are.",
            "Leave it out.",
        ),
        (
            exchange.exact,
            "$.exchange.exact",
            "Masked values are whole numbers of 32 bits, and travel as they are.",
            "Leave it out.",
        ),
        (
            exchange.error is not None,
            "$.exchange.error",
            "Masked values are whole numbers of 32 bits, and travel as they are.",
            "Leave it out.",
        ),
        (
            exchange.feedback,
            "$.exchange.feedback",
            "Nothing is lost on the way that could be carried.",
            "Leave it out.",
        ),
        (
            exchange.plan != "butterfly",
            "$.exchange.plan",
            "Masks come off the sum of all, not off partial sums.",
            'plan = "butterfly"',
        ),
        (
            exchange.fragments > 1,
            "$.exchange.fragments",
            "Masks are made for the model as a whole.",
            "fragments = 1",
        ),
        (
            manifest.join.policy == "open",
            "$.join.policy",
            "Whoever may join as many members as he likes could be everybody in a sum but one.",
            'policy = "invite"',
        ),
        (
            manifest.join.policy == "allow"
            and _fewest(manifest, secure) > len(manifest.join.allow) + 1,
            "$.secure.threshold",
            (
                f"A round needs {_fewest(manifest, secure)} sites, and the organiser and "
                f"{len(manifest.join.allow)} on the list may enter."
            ),
            "A smaller threshold, or more sites in [join] allow.",
        ),
        (
            len(set(secure.metrics)) < len(secure.metrics),
            "$.secure.metrics",
            "A name is there twice.",
            'metrics = ["loss"]',
        ),
        (
            train.target_samples is not None,
            "$.train.target_samples",
            "How much each site has trained is not told.",
            "sync_every = 100",
        ),
        (
            train.inner.samples is not None,
            "$.train.inner.samples",
            "How much each site has trained is not told.",
            "steps = 1000",
        ),
        (
            train.share is not None,
            "$.train.share",
            "It follows what single members say of their time.",
            "Leave it out.",
        ),
    ]
    refuse(_bucket_refusals(manifest, secure) + refused, manifest, name, "[secure]")


def _fewest(manifest: Manifest, secure: SecureTable) -> int:
    """How many sites' vectors a round needs."""
    parsed = manifest.robust.parsed
    return secure.threshold * (1 if parsed is None else parsed.least)


def _bucket_refusals(manifest: Manifest, secure: SecureTable) -> list[Refusal]:
    """A robust rule has something to compare with several sums only, and several sums are for a
    robust rule only.
    """
    robust, private = manifest.robust, manifest.privacy
    parsed = robust.parsed
    if parsed is None:
        what = "Several sums of fewer sites each say more than one, and a mean of them is no safer."
        return [
            (
                secure.buckets > 1,
                "$.secure.buckets",
                what,
                'Add [robust] rule = "median" and f, or leave buckets out.',
            )
        ]
    single = "A robust rule compares single contributions, and with [secure] nobody can see one."
    enough = (
        f"f hostile sites spoil f buckets, and {robust.rule} with f = {parsed.f} needs "
        f"{parsed.least} of them."
    )
    moving = private is not None and private.quantile is not None
    whole = "Buckets' means are compared value by value, the same on every machine."
    return [
        (
            secure.buckets == 1,
            "$.robust.rule",
            (
                f"{single} It can compare the sums of buckets of sites, at the price that more "
                "sums are known, each of fewer sites."
            ),
            (
                f"buckets = {parsed.least} or more under [secure], for runs of "
                f"{parsed.least * secure.threshold} sites or more; or leave out [robust]."
            ),
        ),
        (
            secure.buckets < parsed.least,
            "$.secure.buckets",
            enough,
            f"buckets = {parsed.least}, or more",
        ),
        (
            not parsed.by_coordinate,
            "$.robust.rule",
            whole,
            'rule = "median", "trimmed_mean" or "meamed", without before',
        ),
        (
            secure.max_weight != 1,
            "$.secure.max_weight",
            "A rule counts every bucket once, whatever its sites claim.",
            "Leave it out.",
        ),
        (
            bool(secure.metrics),
            "$.secure.metrics",
            "A bucket with a hostile site in it could say anything of them.",
            "Leave it out.",
        ),
        (
            moving,
            "$.privacy.quantile",
            "A bucket with a hostile site in it could say anything of it.",
            "Leave it out: clip is then fixed.",
        ),
    ]


def _check_privacy(manifest: Manifest, name: str) -> None:
    privacy, secure = manifest.privacy, manifest.secure
    assert privacy is not None
    if secure is None:
        raise ConfigError(
            f"{name}: $.privacy is given, and [secure] is not",
            key="$.privacy",
            why=(
                "Each site adds a part of the noise only, which protects the sum; without [secure] "
                "members see single contributions."
            ),
            hint="Add [secure].",
        )
    refused: list[Refusal] = [
        (
            secure.max_weight != 1,
            "$.secure.max_weight",
            "A site of larger weight would need more noise than the others.",
            "Leave it out.",
        ),
        (
            bool(secure.metrics),
            "$.secure.metrics",
            (
                "The mean of a metric is of the sites' data as the model is, and "
                "would go out without noise."
            ),
            "Leave it out: each site sees its own in atoll status.",
        ),
        (
            secure.reach != SecureTable().reach,
            "$.secure.reach",
            "[privacy] clip bounds contributions.",
            "Leave it out.",
        ),
        (
            privacy.colluding >= secure.threshold,
            "$.privacy.colluding",
            (
                "The noise of those who are left in the smallest sum must be "
                "enough: nobody would be left."
            ),
            "Give less than [secure] threshold, or a larger threshold.",
        ),
        (
            manifest.train.rounds is None,
            "$.train.rounds",
            (
                "Every round spends of epsilon: a run without end would stop in the middle, at "
                "one site after another."
            ),
            "rounds = 100, under [train]",
        ),
    ]
    refuse(refused + _bound_refusals(privacy), manifest, name, "[privacy]")


def _bound_refusals(privacy: PrivacyTable) -> list[Refusal]:
    """What the bound of a contribution, fixed or following a quantile, does not go with."""
    if privacy.quantile is None:
        fixed = PrivacyTable(privacy.noise, privacy.clip, privacy.delta, privacy.stop_at_epsilon)
        unread = [
            key
            for key in ("clip_rate", "count_noise")
            if getattr(privacy, key) != getattr(fixed, key)
        ]
        return [
            (
                bool(unread),
                f"$.privacy.{unread[0] if unread else ''}",
                "The bound is fixed.",
                "quantile = 0.5, or leave it out",
            )
        ]
    if privacy.count_noise is not None:
        few = privacy.count_noise <= privacy.noise / 2
        why = "So little noise on the count alone would cost more than noise allows for both."
        return [
            (
                few,
                "$.privacy.count_noise",
                why,
                f"count_noise = {2 * privacy.noise:g}, or leave it out",
            )
        ]
    return []


def check_budget(manifest: Manifest, name: str) -> None:
    """Raises ConfigError for a new run whose rounds would spend more than it allows. (Not asked of
    a run that is there: logarithms differ in the last digit between machines, and each site counts
    for itself.) Also of a run that draws some of its members: rounds for which too many are drawn
    who may not take part any more would be drawn again and again."""
    rounds = manifest.train.rounds
    if manifest.privacy is None or rounds is None:
        return
    from ...security.privacy.budget import most_rounds

    if rounds > (most := most_rounds(manifest.privacy.settings())):
        raise ConfigError(
            f"{name}: $.train.rounds is {rounds}, and [privacy] is enough for {most}",
            key="$.train.rounds",
            code="E414",
            why=(
                f"One more would pass stop_at_epsilon = {manifest.privacy.stop_at_epsilon:g} at "
                "every site that takes part in all."
            ),
            hint=f"rounds = {most}, or a larger noise or stop_at_epsilon",
        )


def privacy_lines(manifest: Manifest) -> list[str]:
    """Who can see what, in plain words, for whoever is asked to take part."""
    way = (
        "nobody outside the run can read what travels (a relay, or a router on the way, sees who "
        "talks to whom, when and how much)"
    )
    if not manifest.lanes.encrypt:
        what = "masked updates, their sums" if manifest.secure is not None else "updates"
        way = (
            f"{PLAIN_LANES}, that is {what} and the model ([lanes] encrypt = false); the rest "
            "nobody outside the run can read"
        )
    always = [
        (
            "everybody in the run sees the model after each round, who is a member and who "
            "contributed to a round, and members' IP addresses"
        ),
        way,
        (
            "which nodes, with which addresses, belong to one run is in the DHT, where nodes "
            "outside the run may keep it (not of nodes with --no-dht)"
        ),
        "your data are read by your own script only; atoll sends no sample of them",
    ]
    if manifest.secure is None:
        return _open_lines(manifest) + always
    return _masked_lines(manifest, manifest.secure) + always


def _open_lines(manifest: Manifest) -> list[str]:
    """Who can see what of updates that are not masked."""
    what = (
        "each member that adds up a part of the vector sees that part of your update in a "
        "round; all see how much you trained"
    )
    if manifest.federated.topology == "coordinator":
        what = (
            "the coordinator, which is the organiser's node or another member's, sees your "
            "updates; all see how much you trained"
        )
    lines = [
        what + "; an update can give away what it was trained on",
        _metrics_line(SecureTable())
        if manifest.evaluate is None
        else "everybody in the run sees the losses on your held-out data, where your script "
        "evaluates ([evaluate]); other metrics are not told to anybody",
    ]
    if (arrivals := arrivals_of(manifest)) is not None:
        lines.append(
            "a round can be of your update alone: then everybody in the run sees it, as "
            "the difference of two models"
        )
        if arrivals.groups is not None:
            lines.append("all see how long a step takes on your machine")
    if exact_codecs(manifest.federated):
        lines.append(
            "your control variate, a mean gradient of your data, travels beside your "
            "update and is seen by the same members"
        )
    return lines


def _masked_lines(manifest: Manifest, secure: SecureTable) -> list[str]:
    """Who can see what of updates of which only sums are seen."""
    count = (
        "how much you trained is in the sum, too"
        if secure.max_weight > 1
        else "all sites count the same, and how much you trained is not told"
    )
    return [
        "nobody sees your update, not even a part of it: it is masked, and the masks come off "
        f"the sum of at least {secure.threshold} sites "
        f"{_sums_text(secure, manifest.federated)}; {count}",
        _metrics_line(secure),
        *(
            [
                (
                    "the coordinator, which is the organiser's node or another member's, adds up "
                    "masked updates: it sees no more than the others"
                )
            ]
            if manifest.federated.topology == "coordinator"
            else []
        ),
        "if all others in a sum work together against you, they can subtract their own updates and "
        "see yours; so may somebody who has been invited under many names",
        _privacy_line(manifest),
        (
            "a site can spoil the sum by what it contributes, and nobody can see who did: take in "
            "only sites you trust to follow the rules"
        )
        if secure.buckets == 1
        else f"up to {manifest.robust.f} sites may contribute anything: each spoils the sum of its "
        "bucket, which the rule then outvotes, and nobody can see who did; those who could "
        "work together against you are fewer: the others of your bucket",
    ]


def _sums_text(secure: SecureTable, federated: FederatedTable) -> str:
    if secure.buckets == 1:
        return (
            "(more than two thirds of "
            f"{'the members' if federated.sample is None else 'those drawn for the round'})"
        )
    return (
        f"at a time, up to {secure.buckets} such sums a round, of sites dealt to buckets at "
        "random; a robust rule then takes what most of the buckets bear out"
    )


def _metrics_line(secure: SecureTable) -> str:
    if not secure.metrics:
        return (
            "your loss and other metrics are not told to anybody; atoll status shows yours to you"
        )
    names = ", ".join(secure.metrics)
    return (
        f"of {names} everybody sees the mean over the sites of a sum, never yours: it is masked as "
        "your update is; other metrics are not told at all"
    )


def _privacy_line(manifest: Manifest) -> str:
    privacy, rounds = manifest.privacy, manifest.train.rounds
    if privacy is None or rounds is None:
        return (
            "the sum itself, and the model, can still give away something of what they were "
            "trained on: there is no [privacy] in this run"
        )
    from ...security.privacy.budget import epsilon_after

    spent = epsilon_after(privacy.settings(), rounds)
    moving = (
        ""
        if privacy.quantile is None
        else (
            f"; the bound on an update's length follows the quantile {privacy.quantile:g} of all "
            "sites', of which only a noisy count is known"
        )
    )
    return (
        "what the sums and the model can give away of all data of one site together is bounded: a "
        f"site that takes part in all {rounds} rounds spends epsilon {spent:.3g} at delta "
        f"{privacy.delta:g} (smaller is safer; above 10 it says little), against members too, as "
        f"long as no more than {privacy.colluding} of those in a sum tell the others their noise; "
        f"a site stops by itself before {privacy.stop_at_epsilon:g}" + moving
    )


def noise_text(manifest: Manifest, peers: int) -> str | None:
    """How large the noise of `[privacy]` is beside what it hides, in a run of so many sites; None
    without.
    """
    privacy, secure = manifest.privacy, manifest.secure
    if privacy is None or secure is None:
        return None
    least = max(_fewest(manifest, secure), 2 * peers // 3 + 1)
    sites, smallest = max(peers, least), secure.threshold if secure.buckets > 1 else least
    deviation = (
        privacy.noise * privacy.clip * math.sqrt(sites / (smallest - privacy.colluding)) / sites
    )
    longer = (
        ""
        if manifest.parameters is None
        else (
            f": it is {deviation * math.sqrt(manifest.parameters) / privacy.clip:.3g} times as long"
        )
    )
    return (
        f"about {deviation:.2g} in every value of the mean of {sites} sites, whose updates are "
        f"{privacy.clip:g} long at most{longer}; atoll simulate shows what can be learnt under it"
    )
