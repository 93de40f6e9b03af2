"""Rows of settings that cannot be as they are, as errors that say so in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from ...collectives.errors import ConfigError
from ..home.strict_toml import fields_of

AT_ODDS = "E414"
"""Code of settings that mean something only together."""


class Row(NamedTuple):
    """A setting that cannot be as it is when ``when`` holds: its key, why, and what to write
    instead (`hints`).

    ``beside``: what it is at odds with, such as ``[privacy]``. ``says``: the message without the
    file's name, in place of "KEY = VALUE cannot be combined with BESIDE".
    """

    when: bool
    key: str
    why: str
    hint: str
    beside: str = ""
    says: str = ""


def against(beside: str, rows: Iterable[tuple[bool, str, str, str]]) -> list[Row]:
    """Rows of settings that are at odds with ``beside``."""
    return [Row(*row, beside) for row in rows]


def faults_of(rows: Iterable[Row], manifest: msgspec.Struct, name: str) -> list[ConfigError]:
    """An error for each row that holds. ``name``: of the file."""
    return [
        ConfigError(
            f"{name}: {row.says or _at_odds(manifest, row.key, row.beside)}",
            key=row.key,
            code=AT_ODDS,
            why=row.why,
            hint=row.hint,
        )
        for row in rows
        if row.when
    ]


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
        names = {field.encode_name: field.name for field in fields_of(type(value))}
        value = getattr(value, names[step])
    return value
