"""Manifests as text and as bytes: read strictly, checked, and refused with all that is wrong.

``parse_manifest`` reads TOML, ``decode_manifest`` canonical bytes that came from outside. Nothing
in a manifest is code: models are ``builtin:*``, or each member's own script (``local:*``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ...collectives.codec_names import CODECS, REMOVED, unknown_codec
from ...collectives.errors import ConfigError, VersionMismatchError
from ...collectives.foreign import quoted
from ..home.strict_toml import convert, parse_toml, together
from .btard import check_btard
from .checks import (
    check_adapters,
    check_buffers,
    check_evaluate,
    check_exchange,
    check_fragments,
    check_members,
    check_outliers,
    check_places,
    check_schedule,
    check_train,
    check_tree,
    with_tree,
)
from .defaults import named_in, with_defaults
from .federated import check_budget, check_federated
from .form import schema_of, stands_for
from .gpt import gpt_config
from .join import check_audit, check_join
from .manifest import Manifest
from .presets import take_choice, with_choice
from .quorum import check_quorum
from .removed import refuse_removed
from .robust import check_robust

SCHEMA = 1
ENDS = ("sync_every", "round_s", "target_samples")  # of rounds: a run has one of them
MAX_MANIFEST_BYTES = 65_536


_decoder = msgspec.msgpack.Decoder(Manifest)


def parse_manifest(text: str, name: str = "manifest") -> Manifest:
    """The manifest of a TOML text, checked. Raises ConfigError naming the offending key."""
    table = parse_toml(text, name)
    refuse_removed(table, name)
    check_places(table, name)
    choice, named = take_choice(table, name), named_in(table)
    manifest = convert(table, Manifest, name)
    if manifest.schema != SCHEMA:
        raise ConfigError(
            f"{name} has schema {manifest.schema}, this atoll reads schema {SCHEMA}",
            key="$.schema",
            code="E413",
            why="The file was written for another atoll.",
            hint="pip install -U atoll",
        )
    train = manifest.train
    ends = [f"$.train.{end}" for end in ENDS if getattr(train, end) is not None]
    if len(ends) > 1:
        raise ConfigError(
            f"{name} gives both {ends[0]} and {ends[1]}",
            key=ends[1],
            code="E414",
            why=(
                "A round ends after a number of steps, after a time or after a number of "
                "samples, not all of them."
            ),
            hint="Remove one of the two.",
        )
    if not ends:
        manifest = msgspec.structs.replace(
            manifest, train=msgspec.structs.replace(train, sync_every=100)
        )
    manifest = with_defaults(with_choice(manifest, choice, name), named)
    manifest = with_tree(manifest, name)
    _check(manifest, name)
    check_budget(manifest, name)
    return manifest


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
        or sum(getattr(manifest.train, end) is not None for end in ENDS) != 1
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
    _check(manifest, "manifest")
    return manifest


def _refuse_removed_in(data: bytes) -> None:
    """Raise ConfigError if a manifest of an earlier atoll has something that was removed."""
    try:
        table = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    refuse_removed(table, "the run's manifest", "Its organiser founds the run again without it.")


def _check(manifest: Manifest, name: str) -> None:
    """What types alone do not say."""
    exchange, model = manifest.exchange, manifest.model
    for key, codec in [
        ("$.exchange.codec", exchange.codec),
        *((f"$.exchange.codecs.{key}", codec) for key, codec in exchange.codecs.items()),
    ]:
        if codec not in CODECS:
            raise unknown_codec(codec, key, f"{name}: {key}: ", "E413")
    gpt = model.entry == "builtin:gpt"
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("E414", lambda: check_exchange(exchange, name)),
        ("E414", lambda: exchange.fragments > 1 and check_fragments(manifest, name)),
        ("E414", lambda: check_tree(manifest, name)),
        ("E414", lambda: check_members(manifest, name)),
        ("E414", lambda: check_train(manifest.train, name)),
        ("E414", lambda: check_adapters(manifest, name)),
        ("E414", lambda: check_buffers(manifest, name)),
        ("E414", lambda: check_outliers(manifest, name)),
        ("E414", lambda: check_evaluate(manifest, name)),
        ("E414", lambda: check_join(manifest, name)),
        ("E414", lambda: check_audit(manifest, name)),
        ("E414", lambda: check_robust(manifest, name)),
        ("E414", lambda: check_btard(manifest, name)),
        ("E414", lambda: check_quorum(manifest, name)),
        ("E414", lambda: check_federated(manifest, name)),
        ("E413", lambda: gpt and gpt_config(model, name)),
        ("E414", lambda: gpt and check_schedule(manifest.train, name)),
    )
    refusals = list[ConfigError]()
    for code, check in checks:
        try:
            check()
        except ConfigError as error:
            if error.code == ConfigError.code:
                error.code = code
            refusals.append(error)
        except Exception:
            if not refusals:  # else it stumbled over what was refused before
                raise
    if refusals:
        raise together(refusals)
    if len(manifest.encode()) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"{name} is longer than {MAX_MANIFEST_BYTES} bytes")
