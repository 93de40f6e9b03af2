"""``kind = "federated"``: data that stay at home. Its tables, what they mean together, and who can
see what, in plain words.

Importing this loads no torch.
"""

from __future__ import annotations

import math

import msgspec

from ...collectives.swarm import LEAST_SITES
from ..run.registry import MODES
from .manifest import Manifest, arrivals_of, exact_codecs, sample_of
from .methods import method_rows, work_rows
from .optional_tables import FederatedTable, PrivacyTable, SecureTable
from .refusals import Row, against, faults_of

PLAIN_LANES = "whoever is on the way between members can read and change what they exchange in bulk"
"""What is said of a run whose lanes are not encrypted."""


def federated_rows(manifest: Manifest) -> list[Row]:
    """What a federated run must be."""
    if manifest.kind != "federated":
        return []
    star = manifest.federated.topology == "coordinator"
    return [
        *against(
            '$.federated.topology = "coordinator"',
            [
                (
                    star and manifest.exchange.plan != "butterfly",
                    "$.exchange.plan",
                    "The coordinator adds up everything.",
                    "Leave it out and leave tree out and leave check out.",
                )
            ],
        ),
        *method_rows(manifest),
        *work_rows(manifest),
        *_secure_rows(manifest),
        *_privacy_rows(manifest),
    ]


def _secure_rows(manifest: Manifest) -> list[Row]:
    """What masked sums do not go with."""
    exchange, train, secure = manifest.exchange, manifest.train, manifest.secure
    if secure is None:
        return []
    plain, fewest = type(exchange)(), _fewest(manifest, secure)
    whole = "Masked values are whole numbers, and travel as they are."
    untold = "How much each site has trained is not told."
    listed = manifest.join.policy == "allow" and bool(manifest.join.allow)
    out = "Leave it out."
    rows = [
        (exchange.codec != plain.codec, "$.exchange.codec", whole, out),
        (exchange.codecs != plain.codecs, "$.exchange.codecs", whole, out),
        (exchange.exact, "$.exchange.exact", whole, out),
        (exchange.error is not None, "$.exchange.error", whole, out),
        (
            exchange.feedback,
            "$.exchange.feedback",
            "Nothing is lost on the way that could be carried.",
            out,
        ),
        (
            exchange.plan != "butterfly",
            "$.exchange.plan",
            "Masks come off the sum of all, not off partial sums.",
            "Leave it out and leave tree out and leave check out.",
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
            'policy = "invite", or leave it out.',
        ),
        (
            listed and fewest > len(manifest.join.allow) + 1,
            "$.secure.threshold",
            f"A round needs {fewest} sites, and the organiser and {len(manifest.join.allow)} on "
            "the list may enter: name more sites in [join] allow, or take a smaller threshold.",
            'Leave it out, or [join] policy = "invite" and leave [join] allow out.',
        ),
        (
            len(set(secure.metrics)) < len(secure.metrics),
            "$.secure.metrics",
            "A name is there twice.",
            'Leave it out, or metrics = ["loss"].',
        ),
        (train.target_samples is not None, "$.train.target_samples", untold, out),
        (train.inner.samples is not None, "$.train.inner.samples", untold, out),
        (
            train.share is not None,
            "$.train.share",
            "It follows what single members say of their time.",
            out,
        ),
    ]
    return against("[secure]", [*_bucket_rows(manifest, secure), *rows])


def _fewest(manifest: Manifest, secure: SecureTable) -> int:
    """How many sites' vectors a round needs."""
    parsed = manifest.robust.parsed
    return secure.threshold * (1 if parsed is None else parsed.least)


def _bucket_rows(manifest: Manifest, secure: SecureTable) -> list[tuple[bool, str, str, str]]:
    """A robust rule has something to compare with several sums only, and several sums are for a
    robust rule only.
    """
    robust, private = manifest.robust, manifest.privacy
    parsed = robust.parsed
    if parsed is None:
        what = "Several sums of fewer sites each say more than one, and a mean of them is no safer."
        rule = '[robust] rule = "median" and [robust] f = 1'
        return [
            (
                secure.buckets > 1 and robust.rule == "mean",
                "$.secure.buckets",
                what,
                f"Leave it out, or {rule}.",
            )
        ]
    single = "A robust rule compares single contributions, and with [secure] nobody can see one."
    enough = (
        f"f hostile sites spoil f buckets, and {robust.rule} with f = {parsed.f} needs "
        f"{parsed.least} of them."
    )
    moving = private is not None and private.quantile is not None
    whole = "Buckets' means are compared value by value, the same on every machine."
    sums = f"[secure] buckets = {parsed.least} (or more)"
    no_rule = "leave [robust] out and leave [secure] buckets out"
    return [
        (
            secure.buckets == 1,
            "$.robust.rule",
            f"{single} It can compare the sums of buckets of sites, at the price that more sums "
            f"are known, each of fewer sites, in runs of {parsed.least * secure.threshold} sites "
            "or more.",
            f"{sums}, or {no_rule}",
        ),
        (
            1 < secure.buckets < parsed.least,
            "$.secure.buckets",
            enough,
            f"buckets = {parsed.least} (or more), or {no_rule}",
        ),
        (
            not parsed.by_coordinate,
            "$.robust.rule",
            whole,
            f'rule = "median" and leave before out, or {no_rule}',
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
            "A bucket with a hostile site in it could say anything of it: clip is then fixed.",
            "Leave it out and leave clip_rate out and leave count_noise out.",
        ),
    ]


def _privacy_rows(manifest: Manifest) -> list[Row]:
    """What noise does not go with."""
    privacy, secure = manifest.privacy, manifest.secure
    if privacy is None:
        return []
    if secure is None:
        return [
            Row(
                True,
                "$.privacy",
                "Each site adds a part of the noise only, which protects the sum; without [secure] "
                "members see single contributions.",
                "[secure] threshold = 3, or leave it out",
                says="$.privacy is given, and [secure] is not",
            )
        ]
    few = privacy.count_noise is not None and privacy.count_noise <= privacy.noise / 2
    return against(
        "[privacy]",
        [
            (
                secure.max_weight != 1,
                "$.secure.max_weight",
                "A site of larger weight would need more noise than the others.",
                "Leave it out.",
            ),
            (
                bool(secure.metrics),
                "$.secure.metrics",
                "The mean of a metric is of the sites' data as the model is, and would go out "
                "without noise: each site sees its own in atoll status.",
                "Leave it out.",
            ),
            *_bound_rows(secure, privacy),
            (
                privacy.colluding >= secure.threshold,
                "$.privacy.colluding",
                "The noise of those who are left in the smallest sum must be enough: nobody would "
                "be left.",
                f"colluding = {secure.threshold - 1}, or leave it out.",
            ),
            (
                manifest.train.rounds is None,
                "$.train.rounds",
                "Every round spends of epsilon: a run without end would stop in the middle, at one "
                "site after another.",
                "rounds = 10, or leave [privacy] out",
            ),
            (
                privacy.quantile is not None and few,
                "$.privacy.count_noise",
                "So little noise on the count alone would cost more than noise allows for both.",
                f"count_noise = {float(2 * privacy.noise):g}, or leave it out.",
            ),
        ],
    )


def _bound_rows(secure: SecureTable, privacy: PrivacyTable) -> list[tuple[bool, str, str, str]]:
    """One kind of bound on a contribution."""
    bounds = "[privacy] clip bounds contributions."
    fixed = "Leave it out, or leave quantile out and leave clip_rate out and leave count_noise out."
    return [
        (secure.reach != SecureTable().reach, "$.secure.reach", bounds, "Leave it out."),
        (bool(secure.reaches), "$.secure.reaches", bounds, "Leave it out."),
        (
            privacy.quantile is not None and bool(privacy.clips),
            "$.privacy.clips",
            "The bound of one group would move, and those of the others would not.",
            fixed,
        ),
    ]


def budget_rows(manifest: Manifest) -> list[Row]:
    """Of a new run whose rounds would spend more than it allows. (Not asked of a run that is there:
    logarithms differ in the last digit between machines, and each site counts for itself.) Also of
    a run that draws some of its members: rounds for which too many are drawn who may not take part
    any more would be drawn again and again.
    """
    rounds, privacy = manifest.train.rounds, manifest.privacy
    if privacy is None or rounds is None or manifest.secure is None:
        return []
    if privacy.count_noise is not None and privacy.count_noise <= privacy.noise / 2:
        return []  # refused already, and nothing can be counted
    most_rounds = MODES.load("privacy.budget", "most_rounds", key="[privacy]")

    most = most_rounds(privacy.settings())
    fewer = f"rounds = {most}, or " if most else ""
    return [
        Row(
            rounds > most,
            "$.train.rounds",
            f"One more would pass stop_at_epsilon = {privacy.stop_at_epsilon:g} at every site that "
            "takes part in all; so would they not with a larger noise or stop_at_epsilon.",
            f"{fewer}[privacy] noise = 100.0, or leave [privacy] out",
            says=f"$.train.rounds is {rounds}, and [privacy] is enough for {most}",
        )
    ]


def check_budget(manifest: Manifest, name: str) -> None:
    """Raises ConfigError for rounds that would spend more than a run allows (`budget_rows`)."""
    if faults := faults_of(budget_rows(manifest), manifest, name):
        raise faults[0]


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
    if manifest.work is not None and manifest.work.weights == "examples":
        what = what.replace("how much you trained", "how many examples you have")
    lines = [
        *_work_lines(manifest),
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
        "how many examples all have together is in the sum, too"
        if manifest.work is not None and secure.max_weight > 1
        else "how much you trained is in the sum, too"
        if secure.max_weight > 1
        else "all sites count the same, and how much you trained is not told"
        if manifest.privacy is None or manifest.privacy.most_examples is None
        else "you count by your examples, up to "
        f"{manifest.privacy.most_examples:,}, and how many you have is under the noise"
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
        *_work_lines(manifest),
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


def _work_lines(manifest: Manifest) -> list[str]:
    """What the work of a round tells of a site."""
    work = manifest.work
    if work is None:
        return []
    if work.steps is not None:
        return ["all sites make as many steps, so a round tells nothing of how much data you have"]
    return [
        f"a round is {work} at each site, and all see when you are done: with how fast your "
        "machine is, that tells about how many examples you have ({ steps = 100 } does not)"
        if work.epochs is not None
        else f"a round is {work} at each site, so it tells how fast your machine is"
    ]


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
    epsilon_after = MODES.load("privacy.budget", "epsilon_after", key="[privacy]")

    terms = privacy.settings()
    spent = epsilon_after(terms, rounds)
    # where one contribution takes the place of another it moves the sum by twice the bound
    exchanged = epsilon_after(msgspec.structs.replace(terms, noise=terms.noise / 2), rounds)
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
        f"a site stops by itself before {privacy.stop_at_epsilon:g}"
        + moving
        + "; that is of a site's "
        "contribution being there or null; of its data being others' in its place it is epsilon "
        f"{exchanged:.3g}"
    )


def site_lines(manifest: Manifest, peers: int) -> list[str]:
    """How many of so many sites may be away, and how many contributions may be lost, of a run with
    masked sums; empty for others.
    """
    secure, privacy, rounds = manifest.secure, manifest.privacy, manifest.train.rounds
    if secure is None or manifest.kind != "federated":
        return []
    drawn = sample.wanted(peers) if (sample := sample_of(manifest)) is not None else peers
    needed = max(_fewest(manifest, secure), 2 * drawn // 3 + 1)
    among = f"{peers} sites" if drawn == peers else f"the {drawn} of {peers} sites that are drawn"
    if needed > drawn:
        lines = [f"{among} are too few: a sum needs {needed}"]
    else:
        away = "none" if needed == drawn else f"{drawn - needed}"
        lines = [f"of {among} {away} may be away: a sum needs {needed}"]
        lines += _ring_lines(secure, drawn) if privacy is None else []
    if privacy is None or rounds is None:
        return lines
    most_rounds = MODES.load("privacy.budget", "most_rounds", key="[privacy]")

    slack = most_rounds(privacy.settings()) - rounds
    lost = "no contribution may be lost" if slack < 1 else f"{slack} contributions may be lost"
    return [
        *lines,
        f"{lost} of a site, as where its machine is killed in the middle of a sum: one more, and "
        "it stops before the last round"
        + ("; fewer rounds, more noise or a larger stop_at_epsilon leave room" * (slack < 1)),
    ]


def masked_bits(manifest: Manifest) -> int:
    """Of a word of a masked sum, with as few sites as the run can begin with: more of them, or
    heavier ones, may take twice as many (`site_lines` says of how many)."""
    secure = manifest.secure
    if secure is None or manifest.privacy is not None:
        return 32
    bits_for = MODES.load("secure.ring", "bits_for", key="[secure]")
    sites = max(manifest.train.start_with or 1, LEAST_SITES, _fewest(manifest, secure))
    return bits_for(sites, secure.max_weight)


def _ring_lines(secure: SecureTable, members: int) -> list[str]:
    """What so many sites of such weight cost beyond 32 bits a value."""
    bits_for = MODES.load("secure.ring", "bits_for", key="[secure]")

    if bits_for(members, secure.max_weight) == 32:
        return []
    return [
        f"a masked value has 64 bits, for {members} sites that count up to {secure.max_weight:,} "
        "each: a masked sum takes twice the bytes of one of 32"
    ]


def too_few_sites(manifest: Manifest, peers: int) -> str:
    """Why so many sites make no masked round; "" where they do."""
    lines = site_lines(manifest, peers)
    return lines[0] if lines and "too few" in lines[0] else ""


def noise_text(manifest: Manifest, peers: int) -> str | None:
    """How large the noise of `[privacy]` is beside what it hides, in a run of so many sites; None
    without.
    """
    privacy, secure = manifest.privacy, manifest.secure
    if privacy is None or secure is None:
        return None
    least = max(_fewest(manifest, secure), 2 * peers // 3 + 1)
    sites, smallest = max(peers, least), secure.threshold if secure.buckets > 1 else least
    divided, longest = privacy.normaliser or sites, privacy.settings().norm(privacy.clip)
    deviation = (
        privacy.noise * longest * math.sqrt(sites / (smallest - privacy.colluding)) / divided
    )
    longer = (
        ""
        if manifest.parameters is None
        else (f": it is {deviation * math.sqrt(manifest.parameters) / longest:.3g} times as long")
    )
    return (
        f"about {deviation:.2g} in every value of the mean of {sites} sites, whose updates are "
        f"{longest:g} long at most{longer}; atoll simulate shows what can be learnt under it"
    )
