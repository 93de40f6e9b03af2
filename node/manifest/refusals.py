"""Settings of a manifest that exclude each other, as sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ...collectives.errors import ConfigError

Refusal = tuple[bool, str, str, str]
"""Whether a setting cannot be as it is, its key, why, and what to write instead."""


def refuse(refused: Sequence[Refusal], manifest: msgspec.Struct, name: str, beside: str) -> None:
    """Raise ConfigError for the first setting that cannot be as it is. ``name``: of the file;
    ``beside``: what it is at odds with, such as ``[privacy]``.
    """
    for wrong, key, why, hint in refused:
        if wrong:
            raise ConfigError(
                f"{name}: {_at_odds(manifest, key, beside)}", key=key, why=why, hint=hint
            )


def _at_odds(manifest: msgspec.Struct, key: str, beside: str) -> str:
    value = _value_at(manifest, key)
    if value is None:
        return f"{key} is missing, and {beside} needs it"
    if isinstance(value, str | bool | int | float):
        key = f"{key} = {json.dumps(value, ensure_ascii=False)}"
    return f"{key} cannot be combined with {beside}"


def _value_at(manifest: msgspec.Struct, key: str) -> Any:
    value: Any = manifest
    for step in key.removeprefix("$.").split("."):
        names = {field.encode_name: field.name for field in msgspec.structs.fields(type(value))}
        value = getattr(value, names[step])
    return value
