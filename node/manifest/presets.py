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

from ...collectives.errors import ConfigError
from ...collectives.swarm import OuterSettings
from .manifest import Manifest
from .tables import WITHOUT_MOMENTUM, OuterTable

if TYPE_CHECKING:
    from ...optim.outer.presets import Preset


AUTO = "auto"
PEERS = 4  # where the manifest does not say how many are expected
CHOICE = ("optimizer", "lr", "momentum", "warmup")
"""Keys of which a text gives none, or all that its optimizer needs."""
MEASURED_CODECS = ("fp32", "bf16", "int8", "int8_dither")
"""fp32 and int8 were measured. bf16 lies between the two; int8_dither is taken to be like int8: it
loses 1.4 % of a round in place of 1 %."""


class OuterChoice(NamedTuple):
    """How a text chooses its outer values: the preset that it names, or the keys of `CHOICE` that
    it gives.
    """

    preset: str | None = None
    given: tuple[str, ...] = ()


def take_choice(table: dict[str, Any], name: str) -> OuterChoice:
    """Take ``preset`` and ``peers`` out of the table of a manifest. ``peers``, how many are
    expected, changes nothing at present: "auto" takes the same values for every number. Raises
    ConfigError for a preset, or a number of peers, in addition to values of one's own.
    """
    train = table.get("train", {})
    outer: Any = train.get("outer", {}) if isinstance(train, dict) else {}
    if not isinstance(outer, dict):
        return OuterChoice()
    given = tuple(key for key in CHOICE if key in outer)
    for asked in ("preset", "peers"):
        if asked in outer and given:
            raise ConfigError(
                f"{name} gives both $.train.outer.{asked} and $.train.outer.{given[0]}",
                key=f"$.train.outer.{given[0]}",
                code="E414",
                why=(
                    "A preset sets optimizer, lr, momentum and warmup; peers is what it is "
                    "chosen by."
                ),
                hint="Remove one of the two.",
            )
    preset, peers = outer.pop("preset", None), outer.pop("peers", PEERS)
    if preset is not None and not isinstance(preset, str):
        raise ConfigError(
            f"{name}: $.train.outer.preset is {preset!r}",
            key="$.train.outer.preset",
            code="E413",
            hint=f'Write a name: preset = "{AUTO}"',
        )
    if type(peers) is not int or not 1 <= peers <= 100_000:
        raise ConfigError(
            f"{name}: $.train.outer.peers is {peers!r}",
            key="$.train.outer.peers",
            code="E413",
            hint="Write how many peers you expect: 4",
        )
    return OuterChoice(preset, given)


def with_choice(manifest: Manifest, choice: OuterChoice, name: str) -> Manifest:
    """The manifest with its outer values written out. Raises ConfigError for a preset that there is
    not, or that means nothing here, and for a choice of values that is not complete.
    """
    method = manifest.train.method
    if choice.preset is None and (manifest.mode == "federated" or method == "local_sgd"):
        return manifest  # [train.outer] is not read
    if choice.given:
        return _completed(manifest, choice.given, name)
    if choice.preset is None and method != "diloco":
        raise ConfigError(
            f"{name}: the method {method!r} needs $.train.outer.lr",
            key="$.train.outer.lr",
            code="E414",
            why="The outer optimizer is the run's only one, and its learning rate is yours to say.",
            hint='Such as optimizer = "adamw", lr = 1e-3, momentum = 0.9 under [train.outer].',
        )
    if method != "diloco":
        raise ConfigError(
            f"{name}: a preset with the method {method!r}",
            key="$.train.outer.preset",
            code="E414",
            why="Presets are values of diloco's outer step.",
            hint="Leave it out.",
        )
    if choice.preset is None or choice.preset == AUTO:
        preset = fitting(manifest)
    else:
        from ...optim.outer.presets import preset_named  # loads torch

        preset = preset_named(choice.preset)
    train, values = manifest.train, preset.outer
    outer = msgspec.structs.replace(
        train.outer,
        optimizer=values.kind,
        lr=values.lr,
        momentum=values.momentum,
        warmup=values.warmup,
    )
    mixing = _mixing(manifest, preset) if train.mixing is None else train.mixing
    return msgspec.structs.replace(
        manifest, train=msgspec.structs.replace(train, outer=outer, mixing=mixing)
    )


def _completed(manifest: Manifest, given: tuple[str, ...], name: str) -> Manifest:
    """With values of one's own, all that the optimizer has: what is left out would be of another
    choice. Two numbers without a name are Nesterov's.
    """
    outer: OuterTable = manifest.train.outer
    plain = outer.optimizer in WITHOUT_MOMENTUM
    needed = ("lr",) if plain else ("lr", "momentum")
    if missing := [key for key in needed if key not in given]:
        raise ConfigError(
            f"{name} gives $.train.outer.{given[0]} and not $.train.outer.{missing[0]}",
            key=f"$.train.outer.{missing[0]}",
            code="E414",
            why=(
                "Values of the outer step belong together: a default that suits one choice "
                "harms another."
            ),
            hint=(
                f"Give it, too; leave out {' and '.join(given)}, and the run takes what suits it; "
                'or optimizer = "sgd" with an lr, which has no momentum.'
            ),
        )
    if not plain:
        return manifest
    if "momentum" in given and outer.momentum:
        raise ConfigError(
            f"{name}: $.train.outer.momentum is given, and {outer.optimizer} has none",
            key="$.train.outer.momentum",
            code="E414",
            hint='Leave it out, or optimizer = "nesterov".',
        )
    train = msgspec.structs.replace(
        manifest.train, outer=msgspec.structs.replace(outer, momentum=0.0)
    )
    return msgspec.structs.replace(manifest, train=train)


def _mixing(manifest: Manifest, preset: Preset) -> float | None:
    return preset.mixing if manifest.train.overlap == "late" else None


def fitting(manifest: Manifest) -> Preset:
    """The preset that "auto" stands for in such a run."""
    from ...optim.outer.presets import choose  # loads torch

    return choose(worker_momentum=manifest.robust.momentum > 0, measured=_is_measured(manifest))


def _is_measured(manifest: Manifest) -> bool:
    """Whether the sweep has runs like this one (docs/benchmarks-outer.md): rounds of 20 to 100
    inner steps, at least ten of them, for which members wait; a weighted mean of all parameters; an
    inner AdamW whose learning rate decays, as far as the manifest says it.
    """
    from ...optim.outer.presets import COLD_ROUNDS, COLD_STEPS  # loads torch

    train, exchange, inner = manifest.train, manifest.exchange, manifest.train.inner
    rounds, builtin = train.rounds, manifest.model.entry == "builtin:gpt"
    if train.sync_every is None or train.sync_every not in COLD_STEPS:
        return False
    if builtin and rounds is None and inner.steps is not None and inner.samples is None:
        rounds = inner.steps // train.sync_every
    return (
        manifest.mode == "swarm"
        and manifest.secure is None
        and manifest.btard is None
        and manifest.robust == type(manifest.robust)()
        and (train.overlap, train.local_after, train.share) == ("none", 0, None)
        and not train.outer.stretch
        and exchange.arrivals is None
        and exchange.codec in MEASURED_CODECS
        and not (exchange.codecs or exchange.feedback or exchange.error)
        and exchange.fragments == 1
        and manifest.adapters.mode == "plain"
        and (rounds is None or rounds >= COLD_ROUNDS)
        and (not builtin or (inner.optimizer, inner.schedule) == ("adamw", "cosine"))
    )


def explain_outer(manifest: Manifest) -> str:
    """Where the manifest's outer values come from, and what "auto" would take: for people."""
    if manifest.mode == "federated":
        return "the federated method's, from [federated]"
    from ...optim.outer.presets import PRESETS  # loads torch

    train = manifest.train
    if train.method == "local_sgd":
        return "plain averaging: there is nothing to choose"
    if train.method != "diloco":
        return "the run's only optimizer: its values are yours"
    auto, mine = fitting(manifest), _compared(train.outer.settings(), train.mixing)
    same = [
        preset for preset in PRESETS if _compared(preset.outer, _mixing(manifest, preset)) == mine
    ]
    if auto in same:
        return f'preset "{auto.name}", which "{AUTO}" takes for this run: {auto.source}'
    values = f"{auto.outer.kind} with lr {auto.outer.lr:g}"
    if auto.outer.momentum:
        values += f" and momentum {momentum_text(auto.outer)}"
    advice = f'"{AUTO}" takes "{auto.name}" for this run, {values}: {auto.source}'
    return (
        f'preset "{same[0].name}": {same[0].source}. {advice}' if same else f"no preset. {advice}"
    )


def _compared(outer: OuterSettings, mixing: float | None) -> tuple[object, ...]:
    momentum = 0.0 if outer.kind in WITHOUT_MOMENTUM else outer.momentum
    return outer.kind, outer.lr, momentum, outer.warmup, mixing


def momentum_text(outer: OuterSettings) -> str:
    """The momentum, and after how many rounds a run has it and its lr: for people."""
    text = f"{outer.momentum:g}"
    return f"{text} after {outer.warmup} rounds of warm-up" if outer.warmup else text


def averaging_text(manifest: Manifest) -> str:
    """The outer step and the length of a round, in a line: for a verdict about them."""
    from ...optim.outer import effective_outer  # loads torch

    settings = manifest.settings()
    outer, steps = effective_outer(settings), settings.sync_every
    ends = f"H = {steps}" if steps is not None else "rounds by time or samples"
    return f"outer {outer.kind} lr {outer.lr:g} momentum {momentum_text(outer)}, {ends}"
