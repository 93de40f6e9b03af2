"""Two processes that live under one key: a home is copied while its node runs, and the copy is
started, too.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from swarm_kit import Peer

from atoll.collectives.errors import AtollError
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient
from atoll.node.storage import journal
from atoll.node.storage.frames import read_frames


def copy_home(peer: Peer, to: Path) -> None:
    """What a cloud image, or a backup, holds of a home: all but the sockets of the node that runs."""
    shutil.copytree(
        peer.home,
        to,
        ignore=lambda folder, names: names if Path(folder).name == "run" else [],
    )


def ask(peer: Peer, what: str) -> Any:
    """What a peer's node says of its run ("status") or of its peers; None while it cannot be asked."""
    try:
        with NodeClient.connect(find_paths(peer.home)) as client:
            return client.status()["runs"][0] if what == "status" else client.peers()
    except (AtollError, OSError, IndexError):
        return None


def trouble(peer: Peer) -> str:
    """The code of the run's trouble at this peer, ""."""
    status = ask(peer, "status") or {}
    return str((status.get("trouble") or {}).get("code", ""))


def is_named(by: Peer, doubled: Peer) -> bool:
    """Whether a member calls another one doubled."""
    rows = ask(by, "peers") or []
    return any(row["peer"] == doubled.peer and row.get("doubled") for row in rows)


def find(
    began: float,
    doubled: Peer,
    twin: Peer,
    others: list[Peer],
    within_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """After how many seconds since ``began`` the two stopped with E308, and each of the others
    named them; by name.
    """
    told = dict[str, float]()
    looks = {peer.name: (lambda peer=peer: trouble(peer) == "E308") for peer in (doubled, twin)}
    looks |= {peer.name: (lambda peer=peer: is_named(peer, doubled)) for peer in others}
    while len(told) < len(looks) and time.monotonic() - began < within_s:
        meanwhile()
        for name, look in looks.items():
            if name not in told and look():
                told[name] = time.monotonic() - began
        time.sleep(0.1)
    return told


def votes(home: Path) -> dict[tuple[int, int], set[bytes]]:
    """What the journals of a home voted for, by round and ballot: hashes of entries."""
    found = dict[tuple[int, int], set[bytes]]()
    decoder = msgspec.msgpack.Decoder(journal._Vote)  # pyright: ignore[reportPrivateUsage]
    for path in home.rglob("entries"):
        with open(path, "rb") as file:
            for body in read_frames(file, path, growing=True):
                if body[:1] == journal.VOTE:
                    vote = decoder.decode(body[journal._MARK.size :])  # pyright: ignore[reportPrivateUsage]
                    if vote.accepted is not None:
                        ballot, entry = vote.accepted
                        found.setdefault((entry.round, ballot), set()).add(entry.hash())
    return found


def double_votes(one: Path, other: Path) -> list[tuple[int, int]]:
    """Round and ballot wherever two homes with one key voted for different entries."""
    first, second = votes(one), votes(other)
    return [key for key in first.keys() & second.keys() if len(first[key] | second[key]) > 1]
