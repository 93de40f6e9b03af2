"""Tables that manifests once had: each is refused with a sentence that names what holds instead.
Codecs that were removed stand in `collectives.codec_names`.
"""

from __future__ import annotations

from typing import Any

from ...collectives.errors import ConfigError
from ..home.strict_toml import together

REMOVED = {
    "durability": "[durability] was removed: every run is as under its default, so that a power "
    "cut takes nothing that a member has told others",
    "no_quorum": "[no_quorum] was removed: a member without a quorum trains on alone and is "
    "rebased when a quorum is back; if it is lost for ever: atoll recertify",
}
"""By the name of a table: what was removed and what holds instead, as one sentence without its full
stop."""


def refuse_removed(table: Any, name: str, hint: str = "Remove it from the file.") -> None:
    """Raise ConfigError, which names all of them, if a manifest has tables of `REMOVED`.

    ``name``: of the file; ``hint``: the cure.
    """
    if faults := [
        ConfigError(f"{name} has $.{key}: {REMOVED[key]}", key=f"$.{key}", code="E411", hint=hint)
        for key in REMOVED
        if isinstance(table, dict) and key in table
    ]:
        raise together(faults)
