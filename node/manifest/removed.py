"""Settings and values that manifests once had: each is refused with a sentence that names what to
use instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...collectives.errors import ConfigError
from ..home.strict_toml import together

REMOVED: dict[str, str] = {
    "$.durability": "[durability] was removed: every run is as under its default, so that a power "
    "cut takes nothing that a member has told others",
    "$.no_quorum": (
        "[no_quorum] was removed: a member without a quorum trains on alone and is rebased when a "
        "quorum is back; if it is lost for ever: atoll recertify"
    ),
}
"""By the path of a key, or by ``path = value`` where only that value of a text was removed: what
was removed, and what to use instead, as one sentence without its full stop. A step ``*`` stands for
each key of a table, as in ``$.exchange.codecs.* = NAME``.
"""


def refuse_removed(table: Any, name: str, hint: str = "Remove it from the file.") -> None:
    """Raise ConfigError, which names all of them, if a manifest's table has keys or values of
    `REMOVED`. ``name``: of the file; ``hint``: the cure.
    """
    faults = list[ConfigError]()
    for row, sentence in REMOVED.items():
        path, _, value = row.partition(" = ")
        found = list(_values_at(table, path.split(".")[1:]))
        if value in found if value else found:
            faults.append(
                ConfigError(
                    f"{name} has {row}: {sentence}",
                    key=path,
                    code="E413" if value else "E411",
                    hint=hint,
                )
            )
    if faults:
        raise together(faults)


def _values_at(value: Any, steps: Sequence[str]) -> Iterator[Any]:
    """The values at a path of keys, of which each may be ``*``."""
    if not steps:
        yield value
    elif isinstance(value, dict):
        key, *rest = steps
        for each in value if key == "*" else [key]:
            if each in value:
                yield from _values_at(value[each], rest)
