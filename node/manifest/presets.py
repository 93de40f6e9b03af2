"""``[train.outer]``: which outer optimizer, lr and momentum a run has by its text: its own, a
preset's, or, where it chooses none, those that "auto" stands for; and `mixing` where that belongs
to them.

A manifest records the values and not the name: a preset, and "auto", may change from release to
release, a run may not. So the run's id is that of the manifest with the values written out, and
bytes that come from outside mean what they say: there a field that is left out has the default of
`OuterTable`, which never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...collectives.cold_start import COLD_CODECS, COLD_STEPS, GROWTH, measured_cold
from ...collectives.errors import ConfigError
from ...collectives.growth import RoundLengths
from ...collectives.outer_rules import WITHOUT_MOMENTUM, OuterSettings
from .federated import noise_text
from .manifest import Manifest
from .methods import rounds_text
from .refusals import Row

if TYPE_CHECKING:
    from ...optim.outer.presets import Preset


AUTO = "auto"
PEERS = 4  # where the manifest does not say how many are expected
CHOICE = ("optimizer", "lr", "momentum", "warmup", "hold")
"""Keys of which a text gives none, or all that its optimizer needs."""


class OuterChoice(NamedTuple):
    """How a text chooses its outer values: the preset that it names, or the keys of `CHOICE` that
    it gives. ``lengths``: whether it says how rounds begin (`growth`).
    """

    preset: str | None = None
    given: tuple[str, ...] = ()
    lengths: bool = False


def take_choice(table: dict[str, Any], name: str) -> tuple[OuterChoice, list[ConfigError]]:
    """Take ``preset`` and ``peers`` out of the table of a manifest. ``peers``, how many are
    expected, changes nothing at present: "auto" takes the same values for every number. And what is
    wrong with the two.
    """
    train = table.get("train", {})
    outer: Any = train.get("outer", {}) if isinstance(train, dict) else {}
    if not isinstance(outer, dict):
        return OuterChoice(), []
    given = tuple(key for key in CHOICE if key in outer)
    faults: list[ConfigError] = []
    for asked in ("preset", "peers"):
        if asked in outer and given:
            values = " and ".join(f"leave {key} out" for key in given)
            faults.append(
                ConfigError(
                    f"{name} gives both $.train.outer.{asked} and $.train.outer.{given[0]}",
                    key=f"$.train.outer.{given[0]}",
                    code="E414",
                    why=(
                        "A preset sets optimizer, lr, momentum, warmup and hold; peers is what "
                        "it is chosen by."
                    ),
                    hint=f"L{values[1:]}, or leave {asked} out.",
                )
            )
    preset, peers = outer.pop("preset", None), outer.pop("peers", PEERS)
    if preset is not None and not isinstance(preset, str):
        faults.append(
            ConfigError(
                f"{name}: $.train.outer.preset is {preset!r}",
                key="$.train.outer.preset",
                code="E413",
                hint=f'preset = "{AUTO}"',
            )
        )
        preset = None
    elif preset not in (None, AUTO):
        from ...optim.outer.presets import preset_named  # loads torch

        try:
            preset_named(preset)
        except ConfigError as error:
            faults.append(error)
            preset = None
    if type(peers) is not int or not 1 <= peers <= 100_000:
        faults.append(
            ConfigError(
                f"{name}: $.train.outer.peers is {peers!r}",
                key="$.train.outer.peers",
                code="E413",
                why="It says how many peers you expect.",
                hint=f"peers = {PEERS}",
            )
        )
    return OuterChoice(None if given else preset, given, "growth" in train), faults


def outer_rows(manifest: Manifest, choice: OuterChoice) -> list[Row]:
    """Choices of outer values that mean nothing here, or are not complete."""
    method, outer = manifest.train.method, manifest.train.outer
    if choice.preset is not None:
        return [
            Row(
                method != "diloco",
                "$.train.outer.preset",
                "Presets are values of diloco's outer step.",
                'Leave it out, or [train] method = "diloco".',
                says=f"$.train.outer.preset is given, and the method is {method!r}",
            )
        ]
    if manifest.kind == "federated" or method == "local_sgd":
        return []  # [train.outer] is not read
    if not choice.given:
        return [
            Row(
                method != "diloco",
                "$.train.outer.lr",
                "The outer optimizer is the run's only one, and its learning rate is yours to say.",
                'optimizer = "adamw" and lr = 0.001 and momentum = 0.9, or [train] method = '
                '"diloco"',
                says=f"the method {method!r} needs $.train.outer.lr",
            )
        ]
    plain = outer.optimizer in WITHOUT_MOMENTUM
    needed = {"lr": 1.0 if plain else 0.9} | ({} if plain else {"momentum": 0.6})
    others = " and ".join(f"leave {key} out" for key in choice.given)
    return [
        Row(
            key not in choice.given,
            f"$.train.outer.{key}",
            "Values of the outer step belong together: a default that suits one choice harms "
            "another. Without any, the run takes what suits it.",
            f"{key} = {usual} (yours to choose), or {others}",
            says=f"$.train.outer.{choice.given[0]} is given and not $.train.outer.{key}",
        )
        for key, usual in needed.items()
    ]


def with_choice(manifest: Manifest, choice: OuterChoice) -> Manifest:
    """The manifest with its outer values written out."""
    plain = manifest.kind == "federated" or manifest.train.method == "local_sgd"
    if choice.given or (choice.preset is None and plain):
        return manifest
    from ...optim.outer.presets import preset_named  # loads torch

    named = choice.preset not in (None, AUTO)
    preset = preset_named(choice.preset or AUTO) if named else fitting(manifest)
    train, growth, rounds = manifest.train, manifest.train.growth, manifest.train.rounds
    if preset.growing and not choice.lengths and not _against_growth(manifest):
        assert train.sync_every is not None
        growth = GROWTH
        if rounds is not None:  # of full length; the run has as many steps
            rounds = RoundLengths(train.sync_every, growth).rounds_for(rounds)
    values = _values(preset, growth)
    kept = values.kind not in WITHOUT_MOMENTUM
    outer = msgspec.structs.replace(
        train.outer,
        optimizer=values.kind,
        lr=values.lr,
        momentum=values.momentum if kept else train.outer.momentum,
        warmup=values.warmup,
        hold=values.hold,
    )
    mixing = _mixing(manifest, preset) if train.mixing is None else train.mixing
    return msgspec.structs.replace(
        manifest,
        train=msgspec.structs.replace(
            train, outer=outer, mixing=mixing, growth=growth, rounds=rounds
        ),
    )


def _values(preset: Preset, growth: int) -> OuterSettings:
    """Of a run whose first rounds are, or are not, shorter."""
    return preset.growing if preset.growing and growth else preset.outer


def growth_rows(manifest: Manifest) -> list[Row]:
    """Rounds that grow are as long as the log says, and are waited for."""
    given, key = manifest.train.growth > 0, "$.train.growth"
    why = "How long a round is follows from the number of rounds before it."
    return [
        Row(given, key, why, "Leave it out.", says=f"{key} is given, and {also}")
        for also in _against_growth(manifest)
    ]


def _against_growth(manifest: Manifest) -> list[str]:
    """Why the rounds of such a run do not begin short; empty: they may."""
    train, exchange = manifest.train, manifest.exchange
    rows = (
        (manifest.kind != "swarm", f'the run is of kind "{manifest.kind}"'),
        (train.sync_every is None, "rounds do not end by steps ($.train.sync_every)"),
        (train.method == "gradient_averaging", "a round is one step of the outer optimizer"),
        (train.overlap != "none", f'$.train.overlap is "{train.overlap}"'),
        (train.local_after > 0, "so is $.train.local_after, which says how rounds begin"),
        (train.share is not None, "so is $.train.share, by which rounds are planned again"),
        (train.outliers is not None, "$.train.outliers compares rounds of one length"),
        (exchange.arrivals is not None, "members make turns of their own ([exchange.arrivals])"),
        (exchange.fragments > 1, f"$.exchange.fragments is {exchange.fragments}"),
    )
    return [says for when, says in rows if when]


def rounds_said(manifest: Manifest) -> int | None:
    """Of ``sync_every`` steps, by [train] or by the schedule of the built-in model; None: nobody
    says.
    """
    train, inner = manifest.train, manifest.train.inner
    builtin = manifest.model.entry == "builtin:gpt"
    if train.rounds is not None or not builtin or train.sync_every is None:
        return train.rounds
    return inner.steps // train.sync_every if inner.steps and inner.samples is None else None


def _mixing(manifest: Manifest, preset: Preset) -> float | None:
    return preset.mixing if manifest.train.overlap == "late" else None


def fitting(manifest: Manifest) -> Preset:
    """The preset that "auto" stands for in such a run."""
    from ...optim.outer.presets import choose  # loads torch

    return choose(worker_momentum=manifest.robust.momentum > 0, measured=_is_measured(manifest))


def begins_short(manifest: Manifest) -> bool:
    """Whether "auto" begins such a run with short rounds, if these are of a length, and in a codec,
    for which that was measured, and are waited for.
    """
    train = msgspec.structs.replace(
        manifest.train, sync_every=COLD_STEPS[0], overlap="none", delay=None, rounds=None, growth=0
    )
    exchange = msgspec.structs.replace(manifest.exchange, codec=COLD_CODECS[0], fragments=1)
    inner = msgspec.structs.replace(train.inner, steps=None)
    train = msgspec.structs.replace(train, inner=inner)
    return _is_measured(msgspec.structs.replace(manifest, train=train, exchange=exchange))


def steps_of(manifest: Manifest) -> int | None:
    """Inner steps of the run, as far as its manifest says them; None: it has no end, or its rounds
    end otherwise.
    """
    train, rounds = manifest.train, rounds_said(manifest)
    if train.sync_every is None or rounds is None:
        return None
    lengths = manifest.settings().lengths
    return lengths.before(rounds) if train.rounds is not None else rounds * train.sync_every


def _is_measured(manifest: Manifest) -> bool:
    """Whether the sweep has runs like this one (docs/benchmarks-outer.md): rounds of 10 to 100
    inner steps, at least ten of them, for which members wait; a weighted mean of all parameters,
    which were random; an inner AdamW whose learning rate decays, as far as the manifest says it.
    """
    train, exchange, inner = manifest.train, manifest.exchange, manifest.train.inner
    builtin = manifest.model.entry == "builtin:gpt"
    return (
        measured_cold(train.sync_every, exchange.codec, rounds_said(manifest))
        and not _against_growth(manifest)
        and not manifest.model.pretrained
        and manifest.robust == type(manifest.robust)()
        and not train.outer.stretch
        and not (exchange.codecs or exchange.feedback or exchange.error)
        and manifest.adapters.mode == "plain"
        and (not builtin or (inner.optimizer, inner.schedule) == ("adamw", "cosine"))
    )


def explain_outer(manifest: Manifest) -> str:
    """Where the manifest's outer values come from, and what "auto" would take: for people."""
    if manifest.kind == "federated":
        return "the federated method's, from [federated]"
    from ...optim.outer.presets import PRESETS  # loads torch

    train = manifest.train
    if train.method == "local_sgd":
        return "plain averaging: there is nothing to choose"
    if train.method != "diloco":
        return "the run's only optimizer: its values are yours"
    auto, mine = fitting(manifest), _compared(train.outer.settings(), train.mixing)
    full = not (
        train.growth or _against_growth(manifest)
    )  # all rounds have one length, and need not
    same = [
        preset
        for preset in PRESETS
        if _compared(_values(preset, train.growth), _mixing(manifest, preset)) == mine
        and not (preset.growing and full)
    ]
    if auto in same:
        return f'preset "{auto.name}", which "{AUTO}" takes for this run: {auto.source}'
    best = _values(auto, GROWTH)
    values = f"{best.kind} with lr {best.lr:g}"
    if best.momentum:
        values += f" and momentum {momentum_text(best)}"
    if auto.growing:
        values += ", and rounds that are short at first"
    advice = f'"{AUTO}" takes "{auto.name}" for this run, {values}: {auto.source}'
    return (
        f'preset "{same[0].name}": {same[0].source}. {advice}' if same else f"no preset. {advice}"
    )


def _compared(outer: OuterSettings, mixing: float | None) -> tuple[object, ...]:
    momentum = 0.0 if outer.kind in WITHOUT_MOMENTUM else outer.momentum
    return outer.kind, outer.lr, momentum, outer.warmup, outer.hold, mixing


def momentum_text(outer: OuterSettings, rounds: int | None = None) -> str:
    """The momentum, and after how many rounds a run has it and its lr: for people. ``rounds``: how
    many the run has, if it ends.
    """
    text = f"{outer.momentum:g}"
    if rounds is not None and 0 < rounds <= outer.hold:
        return f"{text} after {outer.hold} rounds, which are all: the plain mean throughout"
    if outer.hold:
        text += f" after {outer.hold} rounds of the plain mean"
        return f"{text} and {outer.warmup} of warm-up" if outer.warmup else text
    return f"{text} after {outer.warmup} rounds of warm-up" if outer.warmup else text


def growth_text(manifest: Manifest) -> str:
    """How a run's rounds begin, where the first are shorter: for people; else ""."""
    train, lengths = manifest.train, manifest.settings().lengths
    if not train.growth:
        return ""
    short = min(lengths.short_rounds, train.rounds or lengths.short_rounds)
    text = f"the first {short} shorter, from one step on, {lengths.before(short)} steps in all"
    if (train.start_with or 1) > 1:
        return text
    return f"{text}: who is first uses them up alone, unless [train] start_with = 2"


def averaging_text(manifest: Manifest) -> str:
    """The outer step and the length of a round, in a line: for a verdict about them."""

    settings = manifest.settings()
    outer, steps = settings.effective_outer, settings.sync_every
    ends = f"H = {steps}" if steps is not None else "rounds by time or samples"
    if manifest.kind == "federated":
        ends = f"a round {rounds_text(manifest, ends)}" if manifest.work is not None else ends
        text = f"{manifest.federated.method}, lr {outer.lr:g}, {ends}"
        least = manifest.secure.threshold if manifest.secure is not None else 1
        noise = noise_text(manifest, least)
        return f"{text}; the noise of [privacy] is {noise}" if noise else text
    return f"outer {outer.kind} lr {outer.lr:g} momentum {momentum_text(outer)}, {ends}"
