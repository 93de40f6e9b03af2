"""Settings that manifests once had: each is refused with a sentence that names what holds instead.
Codecs that were removed stand in `collectives.codec_names`.
"""

from __future__ import annotations

from typing import Any

from ...collectives.errors import ConfigError

REMOVED = {
    "durability": "[durability] was removed: every run is as under its default, so that a power "
    "cut takes nothing that a member has told others",
    "no_quorum": "[no_quorum] was removed: a member without a quorum trains on alone and is "
    "rebased when a quorum is back; if it is lost for ever: atoll recertify RUN --without PEER",
    "mode": "mode was removed: the key is called kind, and names a schema",
}
"""By the name of a setting: what was removed and what holds instead, as one sentence without its
full stop."""


def find_removed(table: Any, name: str) -> list[ConfigError]:
    """An error for each setting of `REMOVED` that a manifest has. ``name``: of the file."""
    return [
        ConfigError(
            f"{name} has $.{key}: {REMOVED[key]}",
            key=f"$.{key}",
            code="E411",
            hint=_renamed(table) if key == "mode" else "Leave it out.",
        )
        for key in REMOVED
        if isinstance(table, dict) and key in table
    ]


def _renamed(table: dict[str, Any]) -> str:
    """The line in place of one with ``mode``."""
    kind = "federated" if table["mode"] == "federated" else "swarm"
    return f'Leave it out and kind = "{kind}".'
