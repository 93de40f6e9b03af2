"""``[train.outer] preset``: outer values by name, or "auto" by what the run is, and `mixing` where
that belongs to them.

A manifest records the values and not the name: a preset may change from release to release, a run
may not. So the run's id is that of the manifest with the values written out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...collectives.errors import ConfigError
from .manifest import Manifest

if TYPE_CHECKING:
    from ...optim.outer.presets import Overlap, Preset


AUTO = "auto"
PEERS = 4  # where the manifest does not say how many are expected
SET_BY_PRESET = ("optimizer", "lr", "momentum")

Wish = tuple[str, int]
"""The preset's name or AUTO, and how many peers are expected."""


def take_wish(table: dict[str, Any], name: str) -> Wish | None:
    """Take ``preset`` and ``peers`` out of the table of a manifest. Raises ConfigError for a preset
    beside values of one's own.
    """
    outer: Any = (
        table.get("train", {}).get("outer", {}) if isinstance(table.get("train", {}), dict) else {}
    )
    if not isinstance(outer, dict) or "preset" not in outer:
        return None
    preset, peers = outer.pop("preset"), outer.pop("peers", PEERS)
    if both := [key for key in SET_BY_PRESET if key in outer]:
        raise ConfigError(
            f"{name} gives both $.train.outer.preset and $.train.outer.{both[0]}",
            key=f"$.train.outer.{both[0]}",
            code="E414",
            why="A preset sets optimizer, lr and momentum.",
            hint="Remove one of the two.",
        )
    if not isinstance(preset, str):
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
    return preset, peers


def with_preset(manifest: Manifest, wish: Wish, name: str) -> Manifest:
    """The manifest with the values that were asked for. Raises ConfigError for a preset that there
    is not, or where it means nothing.
    """
    from ...optim.outer.presets import PRESETS  # loads torch

    wanted, peers = wish
    named = {preset.name: preset for preset in PRESETS}
    if wanted != AUTO and wanted not in named:
        raise ConfigError(
            f"{name}: $.train.outer.preset is {wanted!r}, which is no preset",
            key="$.train.outer.preset",
            code="E413",
            hint=f"Choose one of: {', '.join([AUTO, *named])}",
        )
    if manifest.train.method != "diloco":
        raise ConfigError(
            f"{name}: a preset with the method {manifest.train.method!r}",
            key="$.train.outer.preset",
            code="E414",
            why="Presets are values of diloco's outer step.",
            hint="Leave it out.",
        )
    preset = fitting(manifest, peers) if wanted == AUTO else named[wanted]
    values = {
        "optimizer": preset.outer.kind,
        "lr": preset.outer.lr,
        "momentum": preset.outer.momentum,
    }
    train = manifest.train
    mixing = _mixing(preset, train.overlap) if train.mixing is None else train.mixing
    outer = msgspec.structs.replace(train.outer, **values)
    return msgspec.structs.replace(
        manifest, train=msgspec.structs.replace(train, outer=outer, mixing=mixing)
    )


def _mixing(preset: Preset, overlap: Overlap) -> float | None:
    return preset.mixing if overlap == "late" else None


def expected_rounds(manifest: Manifest) -> int | None:
    """How many rounds the run will have; None where nobody knows. The built-in recipe ends with its
    schedule.
    """
    train = manifest.train
    if (
        train.rounds is None
        and manifest.model.entry == "builtin:gpt"
        and train.sync_every is not None
        and train.inner.samples is None
    ):
        return train.inner.steps // train.sync_every if train.inner.steps is not None else None
    return train.rounds


def fitting(manifest: Manifest, peers: int) -> Preset:
    """The preset for such a run with so many peers."""
    from ...optim.outer.presets import choose

    train = manifest.train
    return choose(
        rounds=expected_rounds(manifest),
        peers=peers,
        sync_every=train.sync_every,
        overlap=train.overlap,
        delay=train.delay,
        worker_momentum=manifest.robust.momentum > 0,
    )


def explain_outer(manifest: Manifest, peers: int = PEERS) -> str:
    """Where the manifest's outer values come from, and what would be taken for such a run: for
    people.
    """
    if manifest.mode == "federated":
        return "the federated method's, from [federated]"
    from ...optim.outer.presets import PRESETS  # loads torch

    train = manifest.train
    if train.method == "local_sgd":
        return "plain averaging: there is nothing to choose"
    if train.method != "diloco":
        return "the run's only optimizer: its values are yours"
    rounds, mine = (
        expected_rounds(manifest),
        (train.outer.optimizer, train.outer.lr, train.outer.momentum, train.mixing),
    )
    length = f"{rounds} rounds" if rounds is not None else "a run without end"
    ends = f"H = {train.sync_every}" if train.sync_every else "rounds by time or samples"
    shape = f"{length}, {ends}, overlap {train.overlap}, {peers} peer{'' if peers == 1 else 's'}"
    best = fitting(manifest, peers)
    mixing = {preset.name: _mixing(preset, train.overlap) for preset in PRESETS}
    same = [
        preset
        for preset in PRESETS
        if (preset.outer.kind, preset.outer.lr, preset.outer.momentum, mixing[preset.name]) == mine
    ]
    if best in same:
        return f'preset "{best.name}", which is for {shape}. {best.source}'
    values = f"lr {best.outer.lr:g}, momentum {best.outer.momentum:g}" + (
        f", mixing {found:g}" if (found := mixing[best.name]) is not None else ""
    )
    advice = f'For {shape} there is the preset "{best.name}": {values}. {best.source}'
    if same:
        return f'preset "{same[0].name}". {same[0].source}. {advice}'
    return f"no preset. {advice}"
