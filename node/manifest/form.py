"""Which bytes stand for a manifest: the canonical ones, and what earlier releases wrote.

Canonical is msgpack, fields in the order of their tables, keys that users choose sorted, without
the fields that are at their default: so a release with a new field gives a manifest that does not
use it the same bytes, and run id, as the one before. Therefore **a default that was released never
changes**, nor does the order: that needs another schema. Releases before this rule wrote every
field they knew; such bytes are taken as they are, since the run id is their hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ...collectives.outer_rules import WITHOUT_MOMENTUM
from .defaults import open_in

if TYPE_CHECKING:
    from .manifest import Manifest

_encode = msgspec.msgpack.Encoder().encode  # keeps the order of a dictionary
_sorted = msgspec.msgpack.Encoder(order="deterministic").encode


def canonical(table: msgspec.Struct) -> bytes:
    return _encode(_sparse(table))


def as_toml(manifest: Manifest) -> str:
    """The text of a manifest, as `parse_manifest` reads it again: without the fields that are at
    their default, but for those that a text is given otherwise: outer values (`presets`), and what
    `defaults` adds to ``[exchange]``.
    """
    added = open_in(manifest)
    top, spelt = ("exchange",) if added else (), {"exchange": added}
    if manifest.kind != "federated" and manifest.train.method != "local_sgd":
        outer = manifest.train.outer
        numbers = ("lr",) if outer.optimizer in WITHOUT_MOMENTUM else ("lr", "momentum")
        top = (*top, "train")
        spelt |= {"train": ("outer",), "train.outer": ("optimizer", *numbers)}
    return "".join(_sections(manifest, "", {"": top, **spelt}))


def stands_for(data: bytes, table: msgspec.Struct) -> bool:
    """Whether ``data``, which was decoded to ``table``, says it in order, each key once, with
    defaults or without them.
    """
    plain = msgspec.msgpack.decode(data)
    return _encode(plain) == data and _says(plain, table)


def schema_of(data: bytes) -> int:
    """The schema that a manifest's bytes name; 0 where they name none."""

    class Head(msgspec.Struct):
        schema: int = 0

    try:
        return msgspec.msgpack.decode(data, type=Head).schema
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0


def _sparse(table: msgspec.Struct) -> dict[str, Any]:
    held = [
        (field.encode_name, getattr(table, field.name))
        for field in msgspec.structs.fields(table)
        if not _at_default(table, field)
    ]
    return {
        name: _sparse(value) if isinstance(value, msgspec.Struct) else msgspec.Raw(_sorted(value))
        for name, value in held
    }


def _sections(table: msgspec.Struct, path: str, spelt: Mapping[str, tuple[str, ...]]) -> list[str]:
    """``spelt``: by the path of a table, its fields that are written though at their default."""
    fields = [
        field
        for field in msgspec.structs.fields(table)
        if field.name in spelt.get(path, ()) or not _at_default(table, field)
    ]
    held = [(field.encode_name, getattr(table, field.name)) for field in fields]
    plain = [
        f"{name} = {_toml(msgspec.to_builtins(value))}\n"
        for name, value in held
        if not isinstance(value, msgspec.Struct)
    ]
    head = [f"\n[{path}]\n"] if path and (plain or not held) else []
    inner = [
        (f"{path}.{name}" if path else name, value)
        for name, value in held
        if isinstance(value, msgspec.Struct)
    ]
    deeper = [line for name, value in inner for line in _sections(value, name, spelt)]
    return [*head, *plain, *deeper]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # Booleans, numbers and texts are written alike in both.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _says(plain: dict[str, Any], table: msgspec.Struct) -> bool:
    fields = msgspec.structs.fields(table)
    if [*plain] != [field.encode_name for field in fields if field.encode_name in plain]:
        return False
    for field in fields:
        value = getattr(table, field.name)
        if field.encode_name not in plain:
            same = _at_default(table, field)
        elif isinstance(value, msgspec.Struct):
            same = _says(plain[field.encode_name], value)
        else:
            same = _encode(plain[field.encode_name]) == _sorted(value)  # 1 is not 1.0
        if not same:
            return False
    return True


def _at_default(table: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    default = (
        field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    )
    return getattr(table, field.name) == default
