"""Words that a shell completes: runs by name or id, from the folders; peers, from the running node.
Quick, and silent about whatever is wrong.

Names come from manifests that somebody else may have written, and a shell reads what is printed:
only plain ones are offered, by a pattern.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..home.paths import Paths

MOST = 200  # runs that are looked at
NODE_S = 0.15  # how long the node may take to answer
MOST_BYTES = 1 << 17
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN_ID = re.compile(r"[a-z2-7]{26}")
_PEER = re.compile(r"[A-Za-z0-9]{16,128}")


def runs(paths: Paths, begun: str) -> Iterator[tuple[str, str]]:
    """What a run that is stored here may be called where ``begun`` is typed, and what it is: its
    name, or its id where names do not tell it.
    """
    known = list(_stored(paths))
    names = [name for _, name in known]
    for run_id, name in known:
        if name and names.count(name) == 1 and name.startswith(begun):
            yield name, run_id[:8]
        elif run_id.startswith(begun) and (begun or names.count(name) > 1 or not name):
            yield run_id, name


def _stored(paths: Paths) -> Iterator[tuple[str, str]]:
    import msgspec

    for file in sorted(paths.runs_dir.glob("*/manifest"))[:MOST]:
        run_id = file.parent.name
        if not _RUN_ID.fullmatch(run_id):
            continue
        try:
            with file.open("rb") as opened:
                signed: Any = msgspec.msgpack.decode(opened.read(MOST_BYTES))
            name = str(msgspec.msgpack.decode(signed[0])["name"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            name = ""  # damaged, or another version's: its id still names it
        yield run_id, name if _NAME.fullmatch(name) else ""


def peers(paths: Paths, begun: str) -> Iterator[tuple[str, str]]:
    """Ids of members and of the banned, in all runs of the node, with two-word names."""
    from ..client.link import Link
    from ..control import protocol as p
    from ..home.names import name_of

    link = Link.connect(paths.control_socket, timeout_s=NODE_S)
    try:
        rows = link.ask(p.Runs, timeout_s=NODE_S).value["runs"]
    finally:
        link.close()
    found = {str(peer) for row in rows for key in ("members", "banned") for peer in row[key]}
    for peer in sorted(found):
        if _PEER.fullmatch(peer) and peer.startswith(begun):
            yield peer, name_of(peer)  # type: ignore[arg-type]  # any text has a name
