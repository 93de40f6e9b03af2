"""What types alone do not say of a manifest: settings that mean something only together. Raises
ConfigError with the key and a way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...collectives.bounds import most_members, why_so_many
from ...collectives.codec_names import RESULTS
from ...collectives.errors import ConfigError
from ...collectives.schemes import PlanName, compile_places, peers_in, places
from .manifest import Manifest
from .refusals import Refusal, refuse
from .tables import WITHOUT_MOMENTUM, ExchangeTable, TrainTable, Tree

OF_ONE_OPTIMIZER = {
    "every": "delayed_nesterov",
    "spread": "delayed_nesterov",
    "agreement": "heloco",
}


def check_places(table: dict[str, Any], name: str) -> None:
    """Settings of a machine that somebody has written into a run's manifest."""
    data: Any = table.get("data")
    if isinstance(data, dict) and "factory" in data:
        raise ConfigError(
            f"{name} has $.data.factory",
            key="$.data.factory",
            code="E411",
            why=(
                "Where a site's data lie, and what reads them, is that site's to say: a manifest "
                "comes from somebody else, and names no code to run."
            ),
            hint=(
                "Leave it out; each site types  atoll config set data.factory /path/site.py:make  "
                "or gives it to atoll join --data"
            ),
        )


def check_train(train: TrainTable, name: str) -> None:
    """Settings of `[train]` that mean something only together."""
    if train.delay is not None and train.overlap == "none":
        raise ConfigError(
            f'{name}: $.train.delay is given, and $.train.overlap is "none"',
            key="$.train.delay",
            why="Without overlap members wait for the round's result and take it as it is.",
            hint='overlap = "late"',
        )
    if train.mixing is not None and train.method == "gradient_averaging":
        raise ConfigError(
            f"{name}: $.train.mixing cannot be combined with the method {train.method!r}",
            key="$.train.mixing",
            why="Its members have gradients, and no parameters of their own to be mixed.",
            hint='Leave it out, or method = "diloco".',
        )
    if train.delay is not None and train.sync_every is not None and train.delay >= train.sync_every:
        raise ConfigError(
            (
                f"{name}: $.train.delay is {train.delay} inner steps, and a round "
                f"has {train.sync_every}"
            ),
            key="$.train.delay",
            why="A result is adopted before the next contribution is made.",
            hint="Give a smaller delay, or leave it out: then that is when the result is adopted.",
        )
    if train.method == "gradient_averaging" and train.overlap != "none":
        raise ConfigError(
            f"{name}: gradients cannot be averaged with overlap",
            key="$.train.overlap",
            why=(
                "A gradient is one of the anchor it was taken at; training goes on "
                "when the step is made."
            ),
            hint='overlap = "none", or method = "diloco"',
        )
    check_share(train, name)
    _check_outer(train, name)


def _check_outer(train: TrainTable, name: str) -> None:
    outer = train.outer
    if outer.stretch and train.method != "diloco":
        raise ConfigError(
            f"{name}: $.train.outer.stretch cannot be combined with the method {train.method!r}",
            key="$.train.outer.stretch",
            why=(
                "It makes an outer step independent of the number of members; the mean itself is "
                "what this method is about."
            ),
            hint='Leave it out, or method = "diloco".',
        )
    plain = type(outer)()
    for key, optimizer in OF_ONE_OPTIMIZER.items():
        if getattr(outer, key) != getattr(plain, key) and outer.optimizer != optimizer:
            raise ConfigError(
                f"{name}: $.train.outer.{key} is given, and {outer.optimizer} has no such number",
                key=f"$.train.outer.{key}",
                hint=f'Leave it out, or optimizer = "{optimizer}".',
            )
    if outer.momentum_dtype != "fp32" and (
        outer.optimizer in WITHOUT_MOMENTUM or train.method == "local_sgd"
    ):
        raise ConfigError(
            f"{name}: $.train.outer.momentum_dtype is given, and this outer step has no momentum",
            key="$.train.outer.momentum_dtype",
            hint="Leave it out, or choose an outer step with momentum (docs/optimizers.md).",
        )
    if outer.warmup:
        _check_warmup(train, name)


def _check_warmup(train: TrainTable, name: str) -> None:
    """Refuse a warm-up of anything but momentum in rounds for which members wait."""
    clash = (
        ("optimizer", train.outer.optimizer, "nesterov"),
        ("method", train.method, "diloco"),
        ("overlap", train.overlap, "none"),
    )
    for key, given, needed in clash:
        if given != needed:
            path = "$.train.outer.optimizer" if key == "optimizer" else f"$.train.{key}"
            raise ConfigError(
                f'{name}: $.train.outer.warmup is given, and {path} is "{given}"',
                key="$.train.outer.warmup",
                why=(
                    "lr and momentum grow from those of the plain mean; that was measured with "
                    "Nesterov's momentum, in rounds for which members wait."
                ),
                hint=f'Leave it out, or {key} = "{needed}".',
            )


def check_share(train: TrainTable, name: str) -> None:
    """What a run whose rounds are planned again must be."""
    if train.share is None:
        if train.max_steps is not None:
            raise ConfigError(
                f"{name}: $.train.max_steps is given, and nothing is planned again",
                key="$.train.max_steps",
                hint="share = 0.95",
            )
        return
    if train.sync_every is None:
        raise ConfigError(
            f"{name}: $.train.share needs rounds that end by steps",
            key="$.train.share",
            why="What is planned again is the number of steps of a round.",
            hint="sync_every = 50, for the first rounds",
        )
    if train.max_steps is not None and train.max_steps < train.sync_every:
        raise ConfigError(
            f"{name}: $.train.max_steps is below sync_every",
            key="$.train.max_steps",
            hint="Give at least sync_every.",
        )
    if train.method == "gradient_averaging":
        raise ConfigError(
            f"{name}: $.train.share cannot be combined with gradient averaging",
            key="$.train.share",
            why="The steps of a round are its batch, and the learning rate is tuned for that.",
            hint='Leave it out, or method = "diloco".',
        )


def check_schedule(train: TrainTable, name: str) -> None:
    """What the built-in recipe's learning rate can follow."""
    if train.share is not None and train.inner.steps is not None and train.inner.samples is None:
        raise ConfigError(
            f"{name}: $.train.share cannot be combined with a learning rate that goes by steps",
            key="$.train.inner.samples",
            why=(
                "How many steps a round has is planned again, so rounds do not "
                "tell how far the run is."
            ),
            hint="samples = 100000, of all members together, under [train.inner]",
        )


def check_exchange(exchange: ExchangeTable, name: str) -> None:
    """Settings of `[exchange]` that mean something only together."""
    codecs = {exchange.codec, *exchange.codecs.values()}
    coarse = sorted(codecs & RESULTS.keys())
    if exchange.plan != "butterfly" and coarse:
        raise ConfigError(
            (
                f"{name}: codec {coarse[0]} cannot be combined with "
                f'$.exchange.plan = "{exchange.plan}"'
            ),
            key="$.exchange.plan",
            why=(
                "The sum of some contributions is no longer as sparse as each of them, or has "
                "more than four values."
            ),
            hint='plan = "butterfly", or codec = "int4"',
        )
    check_error(exchange, coarse, name)
    if exchange.check and exchange.plan != "two-level":
        raise ConfigError(
            f'{name}: $.exchange.check cannot be combined with plan = "{exchange.plan}"',
            key="$.exchange.check",
            why=(
                "Only heads of sites are checked: in a butterfly nobody adds up for another "
                "member, in a ring everybody does, and on three levels a site's head adds up sums "
                "of hosts, which only their hosts could check."
            ),
            hint='plan = "two-level", or leave it out',
        )
    if exchange.feedback_kept != 1.0 and not (exchange.feedback or coarse):
        raise ConfigError(
            f"{name}: $.exchange.feedback_kept is given, and nothing is carried",
            key="$.exchange.feedback_kept",
            hint="feedback = true",
        )


def check_members(manifest: Manifest, name: str) -> None:
    """Members that the run waits for, beside how many its plan bears."""
    kind, arrivals = manifest.topology, manifest.exchange.arrivals
    for key, count in (
        ("$.train.start_with", manifest.train.start_with),
        ("$.exchange.arrivals.quorum", arrivals.quorum if arrivals is not None else None),
    ):
        if count is not None and count > most_members(kind):
            raise ConfigError(
                f"{name}: {key} = {count} is more than a run with "
                f'plan = "{manifest.exchange.plan}" can have',
                key=key,
                why=why_so_many(kind),
                hint='[exchange] plan = "three-level", or fewer',
            )


def with_tree(manifest: Manifest, name: str) -> Manifest:
    """With the plan that `[exchange] tree` is compiled to. Raises ConfigError where it is none, or
    where another plan is named beside it.
    """
    exchange = manifest.exchange
    if exchange.tree is None:
        return manifest
    plan = plan_of(exchange.tree, name)
    if exchange.plan not in (plan, "butterfly"):
        raise ConfigError(
            f'{name}: $.exchange.plan = "{exchange.plan}" cannot be combined with its tree',
            key="$.exchange.plan",
            code="E414",
            why=f'The tree is what plan = "{plan}" makes.',
            hint="Leave plan out.",
        )
    return msgspec.structs.replace(manifest, exchange=msgspec.structs.replace(exchange, plan=plan))


def plan_of(tree: str | Tree, name: str) -> PlanName:
    """The plan that a tree is compiled to. Raises ConfigError with the reason where it is none."""
    try:
        if isinstance(tree, str):
            return "ring" if tree == "ring" else "butterfly"
        plan = compile_places(places(tree)).plan
        if peers_in(tree) > most_members(plan):
            raise ConfigError(f"{peers_in(tree):,} peers", why=why_so_many(plan))
    except ConfigError as error:
        raise ConfigError(
            f"{name}: $.exchange.tree: {error.message}",
            key="$.exchange.tree",
            code="E414",
            why=error.why,
            hint='Places and peers, { lab = { box-1 = 4 }, home = 1 }, or "full", or "ring".',
        ) from None
    return plan


def check_tree(manifest: Manifest, name: str) -> None:
    """The plan is what the tree is compiled to, in a manifest that others have made."""
    if with_tree(manifest, name) != manifest:
        raise ConfigError(f"{name}: $.exchange.plan is not that of its tree", key="$.exchange.plan")


def check_error(exchange: ExchangeTable, coarse: Sequence[str], name: str) -> None:
    """What a wished error does not go with. ``coarse``: codecs whose results have another."""
    if exchange.error is None:
        return
    refused: list[Refusal] = [
        (
            exchange.codec != type(exchange)().codec,
            "$.exchange.codec",
            "The wished error picks the codecs.",
            "Leave codec out; tensors that need another: [exchange.codecs]",
        ),
        (
            bool(coarse),
            "$.exchange.error",
            f"{' and '.join(coarse)} under [exchange.codecs] lose more than a round may.",
            'Name "int4" or a finer codec there.',
        ),
        (
            exchange.plan != "butterfly",
            "$.exchange.plan",
            "Partial sums are encoded again on their way, and lose more each time.",
            'plan = "butterfly"',
        ),
    ]
    for wrong, key, why, hint in refused:
        if wrong:
            raise ConfigError(
                f"{name}: {key} cannot be combined with $.exchange.error = {exchange.error:g}",
                key=key,
                why=why,
                hint=hint,
            )


def check_adapters(manifest: Manifest, name: str) -> None:
    """What a run does not go with whose members train one factor of their adapters a round: the
    other has to stay where it is, in the outer step as well.
    """
    settings = manifest.settings()
    if settings.adapters.mode != "alternate":
        return
    plain = settings.method == "local_sgd" or (
        settings.method == "diloco" and settings.outer.kind == "sgd"
    )
    federated = manifest.mode == "federated"
    late = "$.federated.method" if federated else "$.exchange.arrivals"
    one = "A round has one base, on which all members train the same factor."
    moved = "It would move the factor that rests, too: members would differ in both again."
    refused: list[Refusal] = [
        (
            not plain,
            "$.federated.method" if federated else "$.train.outer.optimizer",
            moved,
            'optimizer = "sgd" and lr = 1.0; in a federated run method = "fedavg"',
        ),
        (settings.overlap != "none", "$.train.overlap", one, 'overlap = "none"'),
        (settings.fragments > 1, "$.exchange.fragments", one, "fragments = 1"),
        (
            settings.arrivals is not None,
            late,
            one,
            'method = "fedavg"' if federated else "Leave it out.",
        ),
        (
            settings.has_feedback,
            "$.exchange.codec" if not settings.feedback else "$.exchange.feedback",
            moved,
            'codec = "int8" or a finer one, without feedback',
        ),
        (settings.worker_momentum > 0, "$.robust.momentum", moved, "Leave it out."),
        (settings.privacy is not None, "$.privacy.noise", moved, 'mode = "ffa"'),
    ]
    refuse(refused, manifest, name, 'adapters.mode = "alternate"')


def check_buffers(manifest: Manifest, name: str) -> None:
    """Classes of buffers in runs whose model has none of them, or whose members cannot compare."""
    buffers, key = manifest.model.buffers, "$.model.buffers"
    if not buffers:
        return
    gpt = manifest.model.entry == "builtin:gpt"
    none = "The model that ships with atoll has no buffers that training changes."
    refuse([(gpt, key, none, "Leave it out.")], manifest, name, f'entry = "{manifest.model.entry}"')
    if "same" not in buffers.values():
        return
    settings = manifest.settings()
    unseen = (
        "Members compare digests of what is the same, and here a site shows nothing of its own."
    )
    apart = "Members compare buffers at the end of a round, and here they do not meet there."
    own = '"mean" averages, "own" declares that nobody compares.'
    for wrong, why, beside in (
        (settings.secure is not None, unseen, "[secure]"),
        (settings.sample is not None, apart, "federated.sample"),
        (settings.arrivals is not None, apart, "rounds that do not wait for everybody"),
    ):
        refuse([(wrong, key, why, own)], manifest, name, f'"same": {beside}')


def check_evaluate(manifest: Manifest, name: str) -> None:
    """Runs in which nobody may know a member's losses, or no round's model is adopted by all."""
    if manifest.evaluate is None:
        return
    settings = manifest.settings()
    private = "A member's losses are its own in such a run."
    apart = "Members do not adopt one round's model together, so there is nothing to compare."
    out = "Leave [evaluate] out."
    refused: list[Refusal] = [
        (manifest.privacy is not None, "$.privacy.noise", private, out),
        (manifest.secure is not None, "$.secure.threshold", private, out),
        (manifest.btard is not None, "$.btard.radius", "Peers give only what a seed says.", out),
        (
            settings.method == "gradient_averaging",
            "$.train.method",
            "Between two rounds members have no weights of their own.",
            out,
        ),
        (settings.sample is not None, "$.federated.sample", apart, out),
        (
            settings.arrivals is not None,
            "$.federated.method" if manifest.mode == "federated" else "$.exchange.arrivals",
            apart,
            out,
        ),
    ]
    refuse(refused, manifest, name, "[evaluate]")


def check_outliers(manifest: Manifest, name: str) -> None:
    """What members do not go with that leave their own outliers out."""
    if manifest.train.outliers is None:
        return
    refused: list[Refusal] = [
        (
            manifest.train.method == "gradient_averaging",
            "$.train.method",
            "Every member's gradient is in a step of one batch.",
            'method = "diloco"',
        ),
        (
            manifest.mode == "federated",
            "$.mode",
            "A site that leaves a round out would not have its share in sums, masks and budgets.",
            "Leave outliers out.",
        ),
        (
            manifest.exchange.arrivals is not None,
            "$.exchange.arrivals",
            "There contributions are scaled by how late they are, and have no usual norm.",
            "Leave one of the two out.",
        ),
        (
            manifest.btard is not None,
            "$.btard",
            "Others check that a peer contributes what its seed says.",
            "Leave outliers out.",
        ),
    ]
    for wrong, key, why, hint in refused:
        if wrong:
            raise ConfigError(
                f"{name}: {key} cannot be combined with $.train.outliers",
                key=key,
                why=why,
                hint=hint,
            )


def check_fragments(manifest: Manifest, name: str) -> None:
    """What a run in fragments cannot be."""
    if manifest.train.share is not None:
        raise ConfigError(
            (
                f"{name}: $.train.share cannot be combined with $.exchange.fragments = "
                f"{manifest.exchange.fragments}"
            ),
            key="$.train.share",
            why=(
                "Each fragment would get rounds of its own length, and no longer "
                "come at a time of its own."
            ),
            hint="Leave one of the two out: fragments = 1.",
        )
    if (
        manifest.train.sync_every is not None
        and manifest.train.sync_every < manifest.exchange.fragments
    ):
        raise ConfigError(
            (
                f"{name}: $.exchange.fragments is {manifest.exchange.fragments}, and a round has "
                f"{manifest.train.sync_every} inner steps"
            ),
            key="$.exchange.fragments",
            why="Fragments end their rounds one after another, at different inner steps.",
            hint="Give fewer fragments than sync_every.",
        )
