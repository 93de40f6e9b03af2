"""TOML into typed settings, strictly: an unknown key, a wrong type or a value out of range names
its path and what to write.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from ..collectives.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<field>.*?)`(?: - at `(?P<path>.*)`)?\Z", re.DOTALL
)
_MISSING = re.compile(
    r"Object missing required field `(?P<field>.*?)`(?: - at `(?P<path>.*)`)?\Z", re.DOTALL
)
_OTHER = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>.*)`)?\Z", re.DOTALL)


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The table of a TOML text. ``name`` (a file name) is for the message. Raises ConfigError with
    line and column.
    """
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{name} is not valid TOML: {error}",
            code="E410",
            why="Strings need quotes, tables look like [train.outer].",
            hint=f"Mend {name} and try again.",
        ) from None


def convert(table: dict[str, Any], kind: type[T], name: str) -> T:
    """``table`` as a ``kind``. Raises ConfigError whose ``key`` is the path of the offending value."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, name) from None


def _explain(text: str, kind: type[msgspec.Struct], name: str) -> ConfigError:
    if found := _UNKNOWN.match(text):
        path, field = found["path"] or "$", found["field"]
        known = [field.name for field in _fields_at(kind, path)]
        close = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
        hint = f"Did you mean `{close[0]}`?" if close else f"Known here: {', '.join(known)}"
        return ConfigError(
            f"{name} has an unknown key {path}.{field}",
            key=f"{path}.{field}",
            code="E411",
            why="No setting has this name.",
            hint=hint,
        )
    if found := _MISSING.match(text):
        path = f"{found['path'] or '$'}.{found['field']}"
        return ConfigError(
            f"{name} lacks {path}",
            key=path,
            code="E412",
            why="This setting has no default.",
            hint=f"Add `{found['field']} = …`.",
        )
    found = cast("re.Match[str]", _OTHER.match(text))
    path = found["path"] or "$"
    return ConfigError(
        f"{name}: {path} is wrong: {found['what']}",
        key=path,
        code="E413",
        why="The value has another type or lies out of range.",
        hint=_choices(kind, path) or f"Change {path}.",
    )


def _choices(kind: Any, path: str) -> str:
    """What a value at a path may be, where it is one of a few words or its type describes it."""
    parent, _, name = path.rpartition(".")
    wanted = next((field.type for field in _fields_at(kind, parent) if field.name == name), None)
    if get_origin(wanted) is Literal:
        return f"Choose one of: {', '.join(map(str, get_args(wanted)))}"
    described = next(
        (meta.description for meta in getattr(wanted, "__metadata__", ()) if meta.description), ""
    )
    return f"Write {described}." if described else ""


def _fields_at(kind: Any, path: str) -> Sequence[msgspec.structs.FieldInfo]:
    """The fields of the struct at a msgspec path such as ``$.train.outer``."""
    for step in [s for s in re.split(r"[.\[\]]+", path.removeprefix("$")) if s]:
        fields = {f.name: f.type for f in msgspec.structs.fields(kind)}
        kind = fields.get(step, kind)
    return (
        msgspec.structs.fields(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        else ()
    )
