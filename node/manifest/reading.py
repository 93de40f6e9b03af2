"""Manifests as text and as bytes: read strictly, checked, and refused with all that is wrong.

``parse_manifest`` reads TOML, ``decode_manifest`` canonical bytes that came from outside. Nothing
in a manifest is code: models are ``builtin:*``, files of weights that the manifest's digests bind,
or each member's own script (``local:*``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...collectives.codec_names import CODECS, REMOVED, unknown_codec
from ...collectives.errors import ConfigError, VersionMismatchError
from ...collectives.foreign import quoted
from ..home.strict_toml import find_faults, parse_toml, together
from .checks import ENDS, ROWS, find_misplaced, plan_of, tree_rows
from .defaults import named_in, with_defaults
from .federated import budget_rows
from .form import schema_of, stands_for
from .gpt import gpt_faults
from .hints import Edit, find_path, follow, read_hint
from .kinds import choice_rows, kind_rows
from .manifest import Manifest
from .mending import give_hints
from .optional_tables import BtardTable
from .presets import OuterChoice, outer_rows, take_choice, with_choice
from .pretrained import check_bound, name_entry
from .refusals import Row, faults_of
from .removed import find_removed

SCHEMA = 1
MAX_MANIFEST_BYTES = 65_536
NEEDED: dict[str, Any] = {
    "$.schema": SCHEMA,
    "$.name": "x",
    "$.prompts.texts": ["x"],
    "$.model.base.files": {"x": 64 * "0"},
    "$.model.base.size": 1,
    "$.model.base.parameters": 1,
}
"""In place of wrong ones, to look at the rest."""


_decoder = msgspec.msgpack.Decoder(Manifest)


class ExaminedText(NamedTuple):
    """What a text's table means, with defaults and presets written out, and its faults. With
    faults the manifest is that of the rest, and nobody is to have it.
    """

    manifest: Manifest
    faults: list[ConfigError]


def parse_manifest(text: str, name: str = "manifest") -> Manifest:
    """The manifest of a TOML text, checked. Raises ConfigError that names every fault, each with a
    hint; a text in which all hints were followed is a manifest.
    """
    table = parse_toml(text, name)
    found = examine_table(table, name)
    if found.faults:
        raise together(list_faults(table, name, found.faults))
    if len(found.manifest.encode()) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"{name} is longer than {MAX_MANIFEST_BYTES} bytes")
    return found.manifest


def list_faults(
    table: Mapping[str, Any], name: str, faults: list[ConfigError] | None = None
) -> list[ConfigError]:
    """All faults of a text's table, with hints that hold together; none of a valid one."""
    if faults is None:
        faults = examine_table(table, name).faults
    return give_hints(table, faults, lambda tried: examine_table(tried, name).faults)


def examine_table(table: Mapping[str, Any], name: str) -> ExaminedText:
    """The manifest of a text's table, which stays as it is, and all that is wrong with it.

    First what stands there at all, key by key: settings that were removed, those of another kind of
    run, wrong types. Then, of the rest, what settings mean together.
    """
    rest: dict[str, Any] = copy.deepcopy(dict(table))
    faults = [*find_removed(rest, name), *find_misplaced(rest, name)]
    rest = _without(rest, faults)
    name_entry(rest)
    strange = _unlike(str(rest.get("kind", "swarm")), rest, name)
    choice, outer = take_choice(rest, name)
    others = tuple(fault.key for fault in strange)
    wrong = [
        fault
        for fault in (*find_faults(rest, Manifest, name), *_unknown_codecs(rest, name))
        if fault.code != "E412" or not fault.key.startswith(others)
    ]
    rest = _without_halves(_without(rest, wrong + strange), name)
    if "$.train.outer" in {fault.key for fault in strange}:
        choice, outer = OuterChoice(), []
    manifest, rows = _written_out(msgspec.convert(rest, Manifest), choice, named_in(rest))
    faults += wrong + strange + outer
    if manifest.schema != SCHEMA:
        faults.append(
            ConfigError(
                f"{name} has schema {manifest.schema}, this atoll reads schema {SCHEMA}",
                key="$.schema",
                code="E413",
                why="The file was written for another atoll.",
                hint=f"schema = {SCHEMA} (or, for a file of a newer atoll: pip install -U atoll)",
            )
        )
    faults += faults_of(rows, manifest, name)
    faults += _faults_together(manifest, rest, name)
    faults += faults_of(budget_rows(manifest), manifest, name)
    return ExaminedText(manifest, faults)


def _unlike(kind: str, given: Mapping[str, Any], name: str) -> list[ConfigError]:
    """Settings that a kind of run does not have."""
    return [
        ConfigError(f"{name}: {row.says}", key=row.key, code="E414", why=row.why, hint=row.hint)
        for row in kind_rows(kind, given)
    ]


def _without(table: dict[str, Any], faults: list[ConfigError]) -> dict[str, Any]:
    """The table without what is wrong, and with an example of what is missing."""
    for fault in faults:
        path = find_path(table, fault.key)
        edits = [Edit(path, NEEDED.get(fault.key))]
        missing = fault.code == "E412" and fault.key not in NEEDED
        if missing and (added := read_hint(fault.hint, fault.key, table)):
            edits = [*added[0].edits]
        table = follow(table, edits)
    return table


def _without_halves(table: dict[str, Any], name: str) -> dict[str, Any]:
    """The table with examples of what its tables must have, now that what was wrong is gone;
    without a table where there is no example.
    """
    for fault in find_faults(table, Manifest, name):
        if added := read_hint(fault.hint, fault.key, table):
            table = follow(table, [*added[0].edits])
        else:
            table = follow(table, [Edit(find_path(table, fault.key)[:-1])])
    return table


def _unknown_codecs(table: Mapping[str, Any], name: str) -> list[ConfigError]:
    """Codecs that there are not."""
    exchange: Any = table.get("exchange")
    if not isinstance(exchange, dict):
        return []
    listed: Any = exchange.get("codecs")
    named = [("$.exchange.codec", exchange.get("codec"))]
    if isinstance(listed, dict):
        named += [(f"$.exchange.codecs.{key}", codec) for key, codec in listed.items()]
    return [
        unknown_codec(codec, key, f"{name}: {key}: ", "E413")
        for key, codec in named
        if isinstance(codec, str) and codec not in CODECS
    ]


def _written_out(
    manifest: Manifest, choice: OuterChoice, named: frozenset[str]
) -> tuple[Manifest, list[Row]]:
    """The manifest with all that its text leaves to defaults, presets and trees, and rows of what
    cannot be written out.
    """
    change = msgspec.structs.replace
    if manifest.kind == "seeded" and manifest.btard is None:
        manifest = change(manifest, btard=BtardTable())
    if manifest.work is None and all(getattr(manifest.train, end) is None for end in ENDS):
        manifest = change(manifest, train=change(manifest.train, sync_every=100))
    rows = outer_rows(manifest, choice)
    if not any(row.when for row in rows):
        manifest = with_choice(manifest, choice)
    manifest = with_defaults(manifest, named)
    rows += tree_rows(manifest)
    exchange = manifest.exchange
    if exchange.tree is not None and not any(row.when for row in tree_rows(manifest)):
        manifest = change(manifest, exchange=change(exchange, plan=plan_of(exchange.tree)))
    return manifest, rows


def _faults_together(manifest: Manifest, given: Mapping[str, Any], name: str) -> list[ConfigError]:
    """The one loop over all rows: what settings mean together. ``given``: those that a text, or
    bytes, have.
    """
    rows = [*choice_rows(manifest, given), *(row for find in ROWS for row in find(manifest))]
    faults = faults_of(rows, manifest, name)
    if manifest.model.entry == "builtin:gpt":
        faults += gpt_faults(manifest.model, name)
    return faults


def load_manifest(path: Path) -> Manifest:
    """The manifest in a TOML file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)  # a device has no size
        if len(data) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_MANIFEST_BYTES} bytes",
                why="A manifest is small.",
                hint="Is this the right file?",
            )
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}",
            why="",
            hint="Look at the path; a first manifest: atoll new --example > run.toml",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is not a text file",
            code="E410",
            why="A manifest is TOML in UTF-8.",
            hint="Is this the right file?",
        ) from None
    return parse_manifest(text, path.name)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest of canonical bytes that came from outside.

    Raises ConfigError when they are no valid manifest or use what was removed,
    VersionMismatchError when they are of a newer schema or use a field, a method or a codec not
    known here.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"manifest of {len(data)} bytes, limit {MAX_MANIFEST_BYTES}")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _refuse_removed_in(data)
        if (
            schema_of(data) > SCHEMA
            or "unknown field" in str(error)
            or "Invalid enum value" in str(error)
        ):
            raise VersionMismatchError(
                "the run's manifest was written for a newer atoll",
                why=quoted(error),
                hint="pip install -U atoll",
            ) from None
        raise ConfigError(f"the run's manifest cannot be read: {quoted(error)}") from None
    if manifest.schema != SCHEMA:
        raise VersionMismatchError(
            f"the run's manifest has schema {manifest.schema}, not {SCHEMA}",
            hint="pip install -U atoll",
        )
    if (
        not stands_for(data, manifest)
        or sum(getattr(manifest.train, end) is not None for end in ENDS) != (manifest.work is None)
        or (manifest.kind == "seeded") != (manifest.btard is not None)
    ):
        raise ConfigError("the run's manifest is not in canonical form")
    if unknown := [
        codec
        for codec in (manifest.exchange.codec, *manifest.exchange.codecs.values())
        if codec not in CODECS
    ]:
        if unknown[0] in REMOVED:
            raise VersionMismatchError(
                f"the run's {unknown_codec(unknown[0]).message}",
                why="The run was made by an earlier atoll.",
                hint="Its organiser makes a new run with that codec.",
            )
        raise VersionMismatchError(
            f"the run's codec {unknown[0]!r} is not known to this atoll",
            why="A newer release has it.",
            hint="pip install -U atoll",
        )
    given = msgspec.msgpack.decode(manifest.encode())  # without defaults
    faults = [
        *_unlike(manifest.kind, given, "manifest"),
        *_faults_together(manifest, given, "manifest"),
        *_tree_faults(manifest),
    ]
    if faults:
        raise together(faults)
    check_bound(manifest.model)
    return manifest


def _tree_faults(manifest: Manifest) -> list[ConfigError]:
    """In bytes the plan is what the tree is compiled to."""
    faults = faults_of(tree_rows(manifest), manifest, "manifest")
    tree, plan = manifest.exchange.tree, manifest.exchange.plan
    if not faults and tree is not None and plan_of(tree) != plan:
        says = "manifest: $.exchange.plan is not that of its tree"
        faults.append(ConfigError(says, key="$.exchange.plan", code="E414"))
    return faults


def _refuse_removed_in(data: bytes) -> None:
    """Raise ConfigError if a manifest of an earlier atoll has something that was removed."""
    try:
        table = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    if faults := find_removed(table, "the run's manifest"):
        for fault in faults:
            fault.hint = "Its organiser founds the run again without it."
        raise together(faults)
