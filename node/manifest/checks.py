"""What is to be refused of a manifest that its types and `kinds` do not exclude: settings that mean
something only together, as rows. Each function has the rows of one table or mode; `reading` runs
all of them and reports every row that holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...collectives.bounds import most_members, why_so_many
from ...collectives.codec_names import RESULTS
from ...collectives.errors import ConfigError
from ...collectives.schemes import PlanName, compile_places, peers_in, places
from .btard import btard_rows
from .federated import federated_rows
from .join import audit_rows, join_rows
from .manifest import Manifest
from .methods import arrival_rows
from .presets import growth_rows
from .pretrained import data_rows, pretrained_rows
from .quorum import quorum_rows
from .refusals import Row, against
from .registered import registered_rows
from .robust import robust_rows
from .tables import ExchangeTable, Tree

OF_A_MACHINE = ("factory", "path", "paths", "file", "files", "dataset", "datasets")
"""What a machine's settings and other tools' files say of where data are."""

ENDS = ("sync_every", "round_s", "target_samples")  # of rounds: a run has one of them


def find_misplaced(table: dict[str, Any], name: str) -> list[ConfigError]:
    """Settings of a machine that somebody has written into a run's manifest."""
    data: Any = table.get("data")
    return [
        ConfigError(
            f"{name} has $.data.{key}",
            key=f"$.data.{key}",
            code="E411",
            why=(
                "Where a site's data lie, and what reads them, is that site's to say: a manifest "
                "comes from somebody else, and names no code to run and no file."
            ),
            hint="Leave it out (each site types  atoll config set data.factory /path/site.py:make  "
            "or data.path /path/chats.jsonl, or gives it to atoll join RUN --data FILE).",
        )
        for key in OF_A_MACHINE
        if isinstance(data, dict) and key in data
    ]


def ends_rows(manifest: Manifest) -> list[Row]:
    """More than one setting that ends a round."""
    ends = [end for end in ENDS if getattr(manifest.train, end) is not None]
    return [
        Row(
            True,
            f"$.train.{end}",
            "A round ends after a number of steps, after a time or after a number of samples, not "
            "all of them.",
            "Leave it out.",
            says=f"both $.train.{ends[0]} and $.train.{end} are given",
        )
        for end in ends[1:]
    ]


def train_rows(manifest: Manifest) -> list[Row]:
    """Of ``[train]``."""
    train = manifest.train
    shared, steps = train.share is not None, train.sync_every
    builtin = manifest.model.entry == "builtin:gpt"
    return [
        Row(
            train.delay is not None and steps is not None and train.delay >= steps,
            "$.train.delay",
            "A result is adopted before the next contribution is made: without delay, that is when "
            "it is.",
            f"delay = {(steps or 1) - 1}, or leave it out.",
            says=f"$.train.delay is {train.delay} inner steps, and a round has {steps}",
        ),
        Row(
            shared and steps is None,
            "$.train.share",
            "What is planned again is the number of steps of a round.",
            "Leave it out.",
            says="$.train.share needs rounds that end by steps",
        ),
        Row(
            train.max_steps is not None and steps is not None and train.max_steps < steps,
            "$.train.max_steps",
            "The longest round is not shorter than the first ones.",
            f"max_steps = {max(2, steps or 2)}, or leave it out.",
            says="$.train.max_steps is below sync_every",
        ),
        Row(
            builtin and shared and train.inner.steps is not None and train.inner.samples is None,
            "$.train.inner.samples",
            "The steps of a round are planned again, so rounds do not tell how far the run is.",
            "samples = 100000 (of all members together), or leave [train] share out",
            says="$.train.share cannot be combined with a learning rate that goes by steps",
        ),
        *_warmup_rows(manifest),
        *growth_rows(manifest),
    ]


def _warmup_rows(manifest: Manifest) -> list[Row]:
    """A warm-up is of momentum in rounds for which members wait."""
    train = manifest.train
    why = (
        "lr and momentum grow from those of the plain mean; that was measured with Nesterov's "
        "momentum, in rounds for which members wait."
    )
    return [
        Row(
            given > 0 and train.overlap != "none",
            f"$.train.outer.{name}",
            why,
            'Leave it out, or [train] overlap = "none".',
            says=f'$.train.outer.{name} is given, and $.train.overlap is "{train.overlap}"',
        )
        for name, given in (("warmup", train.outer.warmup), ("hold", train.outer.hold))
    ]


def exchange_rows(manifest: Manifest) -> list[Row]:
    """Of ``[exchange]``."""
    exchange = manifest.exchange
    coarse = coarse_codecs(exchange)
    return [
        Row(
            exchange.plan != "butterfly" and bool(coarse),
            "$.exchange.plan",
            "The sum of some contributions is no longer as sparse as each of them, or has more "
            "than four values.",
            'plan = "butterfly", or leave it out, or codec = "int4"',
            says=f"codec {''.join(coarse[:1])} cannot be combined with $.exchange.plan = "
            f'"{exchange.plan}"',
        ),
        Row(
            exchange.feedback_kept != 1.0 and not (exchange.feedback or coarse),
            "$.exchange.feedback_kept",
            "It is the share of what a codec lost that is carried on.",
            "feedback = true, or leave it out.",
            says="$.exchange.feedback_kept is given, and nothing is carried",
        ),
        *_error_rows(exchange, coarse),
    ]


def coarse_codecs(exchange: ExchangeTable) -> list[str]:
    """The run's codecs whose results have another."""
    return sorted({exchange.codec, *exchange.codecs.values()} & RESULTS.keys())


def _error_rows(exchange: ExchangeTable, coarse: Sequence[str]) -> list[Row]:
    """What a wished error does not go with."""
    if exchange.error is None:
        return []
    named = exchange.codec != type(exchange)().codec
    listed = coarse and not (named and len(coarse) == 1 and exchange.codec in coarse)
    return against(
        f"$.exchange.error = {exchange.error:g}",
        [
            (
                named,
                "$.exchange.codec",
                "The wished error picks the codecs; tensors that need another: [exchange.codecs].",
                "Leave it out.",
            ),
            (
                bool(listed),
                "$.exchange.error",
                f"{' and '.join(coarse)} under [exchange.codecs] lose more than a round may: name "
                '"int4" or a finer codec there.',
                "Leave it out, or leave [exchange] codecs out.",
            ),
            (
                exchange.plan != "butterfly",
                "$.exchange.plan",
                "Partial sums are encoded again on their way, and lose more each time.",
                'plan = "butterfly", or leave it out.',
            ),
        ],
    )


def member_rows(manifest: Manifest) -> list[Row]:
    """Members that the run waits for, beside how many its plan bears."""
    kind, arrivals = manifest.topology, manifest.exchange.arrivals
    return [
        Row(
            count is not None and count > most_members(kind),
            key,
            why_so_many(kind),
            f'{key.rpartition(".")[2]} = {most_members(kind)}, or [exchange] plan = "three-level"',
            says=f'{key} = {count} is more than a run with plan = "{manifest.exchange.plan}" can '
            "have",
        )
        for key, count in (
            ("$.train.start_with", manifest.train.start_with),
            ("$.exchange.arrivals.quorum", arrivals.quorum if arrivals is not None else None),
        )
    ]


def plan_of(tree: str | Tree) -> PlanName:
    """The plan that a tree is compiled to. Raises ConfigError where it is none."""
    if isinstance(tree, str):
        return "ring" if tree == "ring" else "butterfly"
    plan = compile_places(places(tree)).plan
    if peers_in(tree) > most_members(plan):
        raise ConfigError(f"{peers_in(tree):,} peers", why=why_so_many(plan))
    return plan


def tree_rows(manifest: Manifest) -> list[Row]:
    """Of ``[exchange] tree``, in a text: its plan is not written out yet."""
    exchange = manifest.exchange
    if exchange.tree is None:
        return []
    try:
        plan = plan_of(exchange.tree)
    except ConfigError as error:
        why = error.why or 'Places and peers: { lab = { box-1 = 4 }, home = 1 }, or "full", "ring".'
        hint = 'tree = "full", or leave it out.'
        says = f"$.exchange.tree cannot be compiled: {error.message}"
        return [Row(True, "$.exchange.tree", why, hint, says=says)]
    return [
        Row(
            exchange.plan not in (plan, "butterfly"),
            "$.exchange.plan",
            f'The tree is what plan = "{plan}" makes.',
            "Leave it out.",
            says=f'$.exchange.plan = "{exchange.plan}" cannot be combined with its tree',
        )
    ]


def adapter_rows(manifest: Manifest) -> list[Row]:
    """What a run does not go with whose members train one factor of their adapters a round: the
    other has to stay where it is, in the outer step as well.
    """
    settings = manifest.settings()
    if settings.adapters.mode != "alternate":
        return []
    plain = settings.method == "local_sgd" or (
        settings.method == "diloco" and settings.outer.kind == "sgd"
    )
    federated = manifest.kind == "federated"
    late = "$.federated.method" if federated else "$.exchange.arrivals"
    one = "A round has one base, on which all members train the same factor."
    moved = "It would move the factor that rests, too: members would differ in both again."
    ffa = '[adapters] mode = "ffa"'
    coded = "$.exchange.feedback" if settings.feedback else "$.exchange.codec"
    return against(
        'adapters.mode = "alternate"',
        [
            (
                not plain,
                "$.federated.method" if federated else "$.train.outer.optimizer",
                moved,
                f'method = "fedavg", or {ffa}'
                if federated
                else f'optimizer = "sgd" and lr = 1.0, or {ffa}',
            ),
            (settings.overlap != "none", "$.train.overlap", one, f'overlap = "none", or {ffa}'),
            (settings.fragments > 1, "$.exchange.fragments", one, f"fragments = 1, or {ffa}"),
            (
                settings.arrivals is not None,
                late,
                one,
                f'method = "fedavg", or {ffa}' if federated else f"Leave it out, or {ffa}.",
            ),
            (
                settings.has_feedback,
                coded,
                moved,
                f"Leave it out, or {ffa}."
                if settings.feedback
                else f'codec = "int8", or leave [exchange] codecs out, or {ffa}',
            ),
            (settings.worker_momentum > 0, "$.robust.momentum", moved, f"Leave it out, or {ffa}."),
            (settings.privacy is not None, "$.privacy.noise", moved, ffa),
        ],
    )


def buffer_rows(manifest: Manifest) -> list[Row]:
    """Classes of buffers in runs whose model has none of them, or whose members cannot compare."""
    buffers, key = manifest.model.buffers, "$.model.buffers"
    if not buffers:
        return []
    gpt = manifest.model.entry == "builtin:gpt"
    none = "The model that ships with atoll has no buffers that training changes."
    out = "Leave it out."
    rows = against(f'entry = "{manifest.model.entry}"', [(gpt, key, none, out)])
    if "same" not in buffers.values():
        return rows
    settings = manifest.settings()
    own = ' In place of "same", "mean" averages, and "own" declares that nobody compares.'
    unseen = (
        "Members compare digests of what is the same, and here a site shows nothing of its own."
    )
    apart = "Members compare buffers at the end of a round, and here they do not meet there."
    for wrong, why, beside in (
        (settings.secure is not None, unseen, "[secure]"),
        (settings.sample is not None, apart, "federated.sample"),
        (settings.arrivals is not None, apart, "rounds that do not wait for everybody"),
    ):
        rows += against(f'"same": {beside}', [(wrong, key, why + own, out)])
    return rows


def evaluate_rows(manifest: Manifest) -> list[Row]:
    """Runs in which nobody may know a member's losses, or no round's model is adopted by all."""
    if manifest.evaluate is None:
        return []
    settings = manifest.settings()
    private = "A member's losses are its own in such a run."
    apart = "Members do not adopt one round's model together, so there is nothing to compare."
    out = "Leave [evaluate] out."
    return against(
        "[evaluate]",
        [
            (manifest.privacy is not None, "$.privacy.noise", private, out),
            (manifest.secure is not None, "$.secure.threshold", private, out),
            (
                manifest.kind != "federated" and settings.method == "gradient_averaging",
                "$.train.method",
                "Between two rounds members have no weights of their own.",
                out,
            ),
            (settings.sample is not None, "$.federated.sample", apart, out),
            (
                settings.arrivals is not None,
                "$.federated.method" if manifest.kind == "federated" else "$.exchange.arrivals",
                apart,
                out,
            ),
        ],
    )


def outlier_rows(manifest: Manifest) -> list[Row]:
    """What members do not go with that leave their own outliers out."""
    return against(
        "$.train.outliers",
        [
            (
                manifest.train.outliers is not None and manifest.exchange.arrivals is not None,
                "$.exchange.arrivals",
                "There contributions are scaled by how late they are, and have no usual norm.",
                "Leave it out, or leave [train] outliers out.",
            )
        ],
    )


def fragment_rows(manifest: Manifest) -> list[Row]:
    """What a run in fragments cannot be."""
    train, fragments = manifest.train, manifest.exchange.fragments
    if fragments == 1:
        return []
    return [
        Row(
            train.share is not None,
            "$.train.share",
            "Each fragment would get rounds of its own length, and no longer come at a time of its "
            "own.",
            "Leave it out, or [exchange] fragments = 1.",
            f"$.exchange.fragments = {fragments}",
        ),
        Row(
            train.sync_every is not None and train.sync_every < fragments,
            "$.exchange.fragments",
            "Fragments end their rounds one after another, at different inner steps.",
            f"fragments = {train.sync_every}, or leave it out.",
            says=f"$.exchange.fragments is {fragments}, and a round has {train.sync_every} inner "
            "steps",
        ),
    ]


ROWS: tuple[Callable[[Manifest], list[Row]], ...] = (
    registered_rows,
    ends_rows,
    exchange_rows,
    fragment_rows,
    member_rows,
    train_rows,
    adapter_rows,
    buffer_rows,
    data_rows,
    pretrained_rows,
    outlier_rows,
    evaluate_rows,
    join_rows,
    audit_rows,
    robust_rows,
    btard_rows,
    quorum_rows,
    arrival_rows,
    federated_rows,
)
"""All rows, in the order in which their faults are named."""
