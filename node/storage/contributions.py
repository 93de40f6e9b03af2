"""Contributions that are kept, so that rounds can be recomputed: this member's own, encoded, and
what all have signed of theirs.

A folder for each entry of the log: ``PEER.signed``, the statement, and of those whose values are
here ``PEER.data``. The newest rounds only are kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ...collectives.errors import StorageError
from ...collectives.identifiers import PeerId
from ..home.private_folders import make_private
from ..session.record import Statement
from .medium import storage_error, write_atomically

FOLDER = "contributions"
SIGNED, DATA = ".signed", ".data"
_decoder = msgspec.msgpack.Decoder(Statement)


class ContributionFiles:
    """Of one log, at most ``most`` entries of it. Implements `session.ports.Contributions`;
    ``trouble`` hears what the disk refuses.
    """

    def __init__(self, folder: Path, most: int, trouble: Callable[[StorageError], None]) -> None:
        self._folder, self._most, self._trouble = folder / FOLDER, most, trouble

    def keep(self, statement: Statement, data: memoryview | None = None) -> bool:
        """Keep what somebody has signed; ``data``: the values, if here. Whether it is kept."""
        place = self._folder / f"{statement.entry:08}"
        try:
            make_private(place)
            if data is not None:
                write_atomically(place / f"{statement.peer}{DATA}", bytes(data), forced=False)
            write_atomically(
                place / f"{statement.peer}{SIGNED}",
                msgspec.msgpack.encode(statement),
                forced=False,  # for an audit only: nothing that is said depends on it
            )
        except StorageError as error:
            self._trouble(error)
            return False
        return True

    def forget(self, entry: int, but: Iterable[PeerId]) -> None:
        """Entry ``entry`` is decided: it counts these. What others have signed goes, and the oldest
        entries.
        """
        counted = set(but)
        try:
            for path in (self._folder / f"{entry:08}").glob("*"):
                if PeerId(path.stem) not in counted:
                    path.unlink(missing_ok=True)
            kept = sorted(path for path in self._folder.glob("*") if path.is_dir())
            for old in kept[: -self._most]:
                shutil.rmtree(old)
        except OSError as error:
            self._trouble(storage_error(self._folder, error))


class KeptContribution(msgspec.Struct, frozen=True):
    """A statement, and where the values are that it is about, if they are here."""

    statement: Statement
    data: Path | None


def find_kept(folders: Iterable[Path], entry: int) -> dict[bytes, KeptContribution]:
    """By cid: all statements about an entry below these folders. Raises StorageError for one that
    is damaged.
    """
    found = dict[bytes, KeptContribution]()
    for folder in folders:
        for path in sorted(folder.rglob(f"{entry:08}/*{SIGNED}")):
            try:
                statement = _decoder.decode(path.read_bytes())
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise StorageError(
                    f"{path} is damaged: {error}", code="E303", exit_code=74
                ) from None
            data = path.with_suffix(DATA)
            if statement.cid not in found or found[statement.cid].data is None:
                found[statement.cid] = KeptContribution(statement, data if data.exists() else None)
    return found
