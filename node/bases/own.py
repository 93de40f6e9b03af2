"""Where this machine has a run's pretrained model. In the run's folder ``base.json``, written when
every file was compared with the manifest (`recipes.models.bringing`); and the folder of the cache
that files from other members are written into.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from blake3 import blake3

from ..home.paths import write_atomic
from ..manifest.tables import BaseTable

OWN_FILE = "base.json"
_FETCHED = "models"  # below the cache


class OwnBase(msgspec.Struct, frozen=True):
    """``source``: the folder or file that the user has named, or that members' files are in; None:
    the hub's cache. ``files``: each that was compared, by its resolved path, as it was then
    (`stamp_of`). ``named``: the path of each file of the manifest. ``gated``: the hub has told this
    machine so.
    """

    source: str | None = None
    files: dict[str, tuple[int, int]] = {}
    named: dict[str, str] = {}
    gated: bool = False


def read_own(run: Path) -> OwnBase:
    """What is known in the run's folder ``run``; nothing where it was not looked for yet."""
    try:
        return msgspec.json.decode((run / OWN_FILE).read_bytes(), type=OwnBase)
    except (OSError, msgspec.MsgspecError):
        return OwnBase()


def keep_own(run: Path, own: OwnBase) -> None:
    """Raises StorageError."""
    write_atomic(run / OWN_FILE, msgspec.json.encode(own))


def stamp_of(path: Path) -> tuple[int, int]:
    """Changes when the file does: its size, and when it was written, in nanoseconds. Raises
    OSError.
    """
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def unchanged(own: OwnBase, name: str) -> Path | None:
    """The file of this name in the manifest, if it is as it was when it was compared: only then
    others may be given it.
    """
    path = Path(own.named.get(name, ""))
    try:
        known = name in own.named and own.files.get(str(path.resolve())) == stamp_of(path)
    except OSError:
        return None
    return path if known else None


def fetched_folder(cache: Path, base: BaseTable) -> Path:
    """Where files from members are written: one folder for equal files, whichever run they are
    of. Its name is a digest, and no word of a manifest.
    """
    said = "".join(f"{name} {digest}\n" for name, digest in sorted(base.files.items()))
    return cache / _FETCHED / blake3(said.encode()).hexdigest(16)
