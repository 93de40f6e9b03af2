"""TOML into typed settings, strictly: an unknown key, a wrong type or a value out of range names
its path and what to write.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from ...collectives.errors import ConfigError
from ...collectives.foreign import PLAIN
from .other_names import our_hint

T = TypeVar("T", bound=msgspec.Struct)

Address = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=512,
        pattern=PLAIN,
        description="an address, such as /ip4/203.0.113.7/tcp/4150/p2p/PEER",
    ),
]
"""An address of a peer, as settings and recipes hold it."""

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
    """``table`` as a ``kind``. Raises ConfigError whose ``key`` is the path of the first offending
    value, and which tells the other faults, too: unknown and missing keys and wrong values.
    """
    if faults := list(find_faults(table, kind, name)):
        raise together(faults)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, name) from None


def find_faults(
    table: dict[str, Any], kind: type[msgspec.Struct], name: str
) -> Iterator[ConfigError]:
    """All that is wrong with a table by the types of ``kind``: unknown and missing keys and wrong
    values, each with its path as ``key``.
    """
    return _faults(table, kind, kind, "$", name)


def together(faults: Sequence[ConfigError]) -> ConfigError:
    """One error for several faults, at least one: the first, which tells the others, too, each with
    its hint beside it, so that a person mends all of them at once. ``faults`` are its ``faults``.
    """
    first, *others = faults
    if not others:
        return first
    further = [" ".join(filter(None, (f"Also, {e.message}.", e.hint))) for e in others]
    whole = ConfigError(
        f"{first.message} (the first of {len(faults)} faults)",
        key=first.key,
        code=first.code,
        why="\n".join([" ".join(filter(None, (first.why, first.hint))), *further]),
        hint=f"Mend all {len(faults)}, then try again.",
    )
    whole.faults = tuple(faults)
    return whole


def _faults(
    table: dict[str, Any], kind: type[msgspec.Struct], root: type[T], path: str, name: str
) -> Iterator[ConfigError]:
    """What is wrong with each key of a table and of the tables in it. ``msgspec`` stops at the
    first, so each value is converted by itself.
    """
    fields = {field.encode_name: field for field in fields_of(kind)}
    for key, value in table.items():
        if key not in fields:
            text = f"Object contains unknown field `{key}` - at `{path}`"
            yield _explain(text, root, name)
            continue
        wanted = fields[key].type
        if isinstance(value, dict) and (inner := _struct_in(wanted)) is not None:
            yield from _faults(value, inner, root, f"{path}.{key}", name)
            continue
        held = _held_by(wanted) if isinstance(value, dict) else None
        if held and (wrong := list(_wrong_in(value, *held, f"{path}.{key}", name))):
            yield from wrong
            continue
        try:
            msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            found = cast("re.Match[str]", _OTHER.match(str(error)))
            at = f"{path}.{key}{(found['path'] or '$')[1:]}"
            yield _explain(f"{found['what']} - at `{at}`", root, name)
    for key, field in fields.items():
        if field.required and key not in table:
            yield _explain(f"Object missing required field `{key}` - at `{path}`", root, name)


def _wrong_in(
    table: dict[str, Any], keys: Any, held: Any, path: str, name: str
) -> Iterator[ConfigError]:
    """What is wrong with a table whose keys are the user's, each by its key. ``keys`` and ``held``:
    the types of keys and values.
    """
    for key, value in table.items():
        at = f"{path}.{json.dumps(key, ensure_ascii=False)}"
        for each, kind, of in ((key, keys, "the key of "), (value, held, "")):
            try:
                msgspec.convert(each, kind)
            except msgspec.ValidationError as error:
                found = cast("re.Match[str]", _OTHER.match(str(error)))
                inside = (found["path"] or "$")[1:]
                yield _wrong(found["what"], at + inside, None if inside else kind, name, of)


def _held_by(wanted: Any) -> tuple[Any, Any] | None:
    """The types of a free table's keys and values, alone or beside None; None for what is no such
    table.
    """
    while getattr(wanted, "__metadata__", None):
        wanted = get_args(wanted)[0]
    for kind in (wanted, *get_args(wanted)):
        if get_origin(kind) in (dict, Mapping):
            keys, held = get_args(kind)
            return keys, held
    return None


def _struct_in(wanted: Any) -> type[msgspec.Struct] | None:
    """The table that a field takes, alone or beside None."""
    return next(
        (
            kind
            for kind in (wanted, *get_args(wanted))
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        ),
        None,
    )


def _explain(text: str, kind: type[msgspec.Struct], name: str) -> ConfigError:
    if found := _UNKNOWN.match(text):
        path, field = found["path"] or "$", found["field"]
        known = [field.name for field in _fields_at(kind, path)]
        close = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
        hint = f"Did you mean `{close[0]}`?" if close else f"Known here: {', '.join(known)}"
        hint = our_hint(field, known) or hint
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
            hint=f"Add `{found['field']} = {_example(_wanted_at(kind, path))}`.",
        )
    found = cast("re.Match[str]", _OTHER.match(text))
    path = found["path"] or "$"
    return _wrong(found["what"], path, _wanted_at(kind, path), name)


def _wrong(what: str, path: str, wanted: Any, name: str, of: str = "") -> ConfigError:
    """``what`` msgspec says of the value at ``path``, whose type is ``wanted``, or ``of`` it."""
    described = _description(wanted)
    words = f"must be {described}" if described else _in_words(what)
    if choices := _choices(wanted):
        hint = f"Choose one of: {', '.join(map(str, choices))}"
    else:
        hint = f"Write {described}." if described else f"Change {of}{path}."
        if (example := _example(wanted)) != "…":
            described = described or "another value"
            hint = f"Write {described}, such as `{path.rpartition('.')[2]} = {example}`."
    return ConfigError(
        f"{name}: {of}{path} {words}",
        key=path,
        code="E413",
        why="The value has another type or lies out of range.",
        hint=hint,
    )


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "left out",
}
_BOUND = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_GOT = re.compile(r"Expected `(?P<wanted>[a-z |]+)`, got `(?P<got>\w+)`")
_RANGE = re.compile(
    r"Expected `(?P<wanted>\w+)` (?P<length>of length )?(?P<sign>[<>]=?) (?P<most>.+)"
)
_ENUM = re.compile(r"Invalid enum value (?P<value>.+)", re.DOTALL)


def _in_words(text: str) -> str:
    """What msgspec says of a value, as the end of a sentence about it."""
    if found := _GOT.fullmatch(text):
        kinds = [_TYPES.get(kind, kind) for kind in found["wanted"].split(" | ")]
        return f"must be {' or '.join(kinds)}, and is {_TYPES.get(found['got'], found['got'])}"
    if found := _RANGE.fullmatch(text):
        kind, bound = _TYPES.get(found["wanted"], found["wanted"]), _BOUND[found["sign"]]
        length = "with a length of " if found["length"] else "of "
        return f"must be {kind} {length}{bound} {found['most']}"
    if found := _ENUM.fullmatch(text):
        return f"cannot be {found['value']}"
    if " matching regex " in text:
        return "must have no control characters"
    return f"is wrong: {text}"


def _wanted_at(kind: Any, path: str) -> Any:
    """The type of the value at a path; of a list or a free table, that of its values."""
    inside = re.search(r"\[[^\[\]]*\]\Z", path)
    path = path[: inside.start()] if inside else path
    parent, _, at = path.rpartition(".")
    wanted = next((field.type for field in _fields_at(kind, parent) if field.name == at), None)
    return _item_of(wanted) if inside else wanted


def _item_of(wanted: Any) -> Any:
    """The type of what a list's or table's type holds."""
    while getattr(wanted, "__metadata__", None):
        wanted = get_args(wanted)[0]
    found = [kind for kind in get_args(wanted) if kind is not Ellipsis]
    return found[-1] if found else None


def _choices(wanted: Any) -> Sequence[Any]:
    """The words that a type consists of, alone or beside None."""
    found = (get_args(kind) for kind in (wanted, *get_args(wanted)) if get_origin(kind) is Literal)
    return next(found, ())


def _description(wanted: Any) -> str:
    """What a type says of its values, alone or beside None."""
    for kind in (wanted, *get_args(wanted)):
        for meta in getattr(kind, "__metadata__", ()):
            if meta.description:
                return str(meta.description)
    return ""


def _example(wanted: Any) -> str:
    """A value of a type, as a text has it; dots where the type gives none."""
    for meta in getattr(wanted, "__metadata__", ()):
        if meta.examples:
            return json.dumps(meta.examples[0])
    return "…"


@cache
def fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a table's type. (msgspec reads its annotations anew each time.)"""
    return msgspec.structs.fields(kind)


def _fields_at(kind: Any, path: str) -> Sequence[msgspec.structs.FieldInfo]:
    """The fields of the struct at a msgspec path such as ``$.train.outer``."""
    for step in [s for s in re.split(r"[.\[\]]+", path.removeprefix("$")) if s]:
        fields = {f.name: f.type for f in fields_of(kind)}
        wanted = fields.get(step, kind)
        kind = _struct_in(wanted) or wanted
    return fields_of(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()
