"""``./atoll.toml``: settings of the current folder. They can name code (``[data] factory``), so a
folder that merely contains the file decides nothing.

The file is used where its owner named it (``--config FILE``, ``ATOLL_CONFIG=FILE``), or once she
has said so of this path and these contents (a question of `atoll up` and `atoll join`, or `atoll
config trust`), which ``trusted.json`` in the settings folder remembers. Whoever uses the settings
parses the text that was compared, so a file that is replaced meanwhile is another one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...collectives.errors import ConfigError
from .paths import Paths, make_private, user_path, write_atomic
from .refusals import storage_error

LOCAL_FILE = "atoll.toml"
CONFIG_VARIABLE = "ATOLL_CONFIG"
MAX_BYTES = 1 << 20
_TRUSTED_FILE = "trusted.json"
_MOST_TRUSTED = 1024


class LocalSettings(msgspec.Struct, frozen=True):
    """A settings file that is not the user's ``config.toml``: absolute ``path``, ``text``, and
    whether its entries may be used.
    """

    path: Path
    text: str
    named: bool
    trusted: bool

    @property
    def digest(self) -> str:
        """SHA-256 of the text, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_settings(file: Path) -> str | None:
    """The text of a settings file, None where there is none. Raises StorageError, ConfigError (no
    text, more than 1 MiB).
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(f"cannot read {file}", error) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = None
    if text is None or len(data) > MAX_BYTES:
        raise ConfigError(
            f"{file} is not a text file of at most {MAX_BYTES >> 20} MiB",
            hint=f"Move it away: mv {file} {file}.old",
        )
    return text


def local_settings(
    paths: Paths, environ: Mapping[str, str] = os.environ, *, named: str | None = None
) -> LocalSettings | None:
    """The file ``named``, else the one that ``ATOLL_CONFIG`` names, else ``./atoll.toml`` if there
    is one.

    Raises ConfigError where a named file is missing, or a named or trusted one is no text;
    StorageError.
    """
    name = named or environ.get(CONFIG_VARIABLE, "")
    try:
        path = user_path(name or LOCAL_FILE)
        text = read_settings(path)
    except ConfigError:
        if name:
            raise
        return None  # whatever it is (or a current folder that was deleted), nobody has named it
    if text is None and name:
        raise ConfigError(f"there is no file {path}", hint="--config FILE names one that exists.")
    if text is None:
        return None
    found = LocalSettings(path, text, bool(name), False)
    trusted = found.named or _trusted(paths).get(str(path)) == found.digest
    return msgspec.structs.replace(found, trusted=trusted)


def trust(paths: Paths, found: LocalSettings) -> None:
    """Remember that this file may be used until its contents change. Raises StorageError."""
    kept = _trusted(paths)
    kept.pop(str(found.path), None)
    kept[str(found.path)] = found.digest
    newest = dict(list(kept.items())[-_MOST_TRUSTED:])
    make_private(paths.config_dir)
    write_atomic(paths.config_dir / _TRUSTED_FILE, msgspec.json.encode(newest))


def unused_words(found: LocalSettings) -> str:
    """One line for a person: that the file is not used, and how it would be."""
    return (
        f"{str(found.path)!r} is not used: nobody here has said that it may set anything. "
        "Use it: --config atoll.toml (once), or atoll config trust (until it changes)"
    )


def _trusted(paths: Paths) -> dict[str, str]:
    """Path → digest. A damaged file trusts nothing."""
    try:
        return msgspec.json.decode(
            (paths.config_dir / _TRUSTED_FILE).read_bytes(), type=dict[str, str]
        )
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
