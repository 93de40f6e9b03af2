"""Where atoll keeps its files: XDG folders, or one folder named by ``ATOLL_HOME`` (containers,
tests, second nodes).

================  ==============================  =======================
what              default                         with ATOLL_HOME=H
================  ==============================  =======================
config.toml       $XDG_CONFIG_HOME/atoll          H
identity.key      $XDG_DATA_HOME/atoll            H
founded/          $XDG_DATA_HOME/atoll            H
runs/, log/       $XDG_STATE_HOME/atoll           H/state
caches            $XDG_CACHE_HOME/atoll           H/cache
control.sock      $XDG_STATE_HOME/atoll/run       H/run
================  ==============================  =======================

The socket and the lock of a home's one node are not in $XDG_RUNTIME_DIR: a service of the machine
and a cron job have none, so they and their user's shell would each see another place, and start a
second node with the same key.

Folders are made 0700 and files 0600, whatever the user's umask is: a node sets its own
(`only_mine`), `write_atomic` and `open_private` say it. What an earlier version left open to others
is closed by `Paths.tighten`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...collectives.errors import ConfigError
from .private_files import open_private as open_private
from .private_files import write_atomic as write_atomic
from .private_folders import make_private as make_private

MAX_SOCKET_PATH = 100  # sun_path holds 104 bytes on macOS, 108 on Linux, the final zero included


@dataclass(frozen=True, slots=True)
class Paths:
    """The folders of one node. Nothing is made before `ensure`."""

    config_dir: Path
    data_dir: Path
    state_dir: Path
    cache_dir: Path
    runtime_dir: Path

    @property
    def config_file(self) -> Path:
        """The user's settings."""
        return self.config_dir / "config.toml"

    @property
    def identity_file(self) -> Path:
        """The node's private key."""
        return self.data_dir / "identity.key"

    def founded_file(self, run_id: str, fragment: int | None = None) -> Path:
        """Says that this key has founded the run (or a fragment); beside the key, so that whoever
        keeps that does not found it again.
        """
        return self.data_dir / "founded" / (run_id if fragment is None else f"{run_id}.{fragment}")

    @property
    def control_socket(self) -> Path:
        """The unix socket of the running node; moved to a short private folder when the path is too
        long for a socket.
        """
        usual = self.runtime_dir / "control.sock"
        if len(os.fsencode(usual)) <= MAX_SOCKET_PATH:
            return usual
        name = hashlib.sha256(os.fsencode(usual)).hexdigest()[:16]
        # not where TMPDIR says: a job and its user's shell must find the same, and it may be long
        # (nosec: `ensure` makes the folder private, and refuses one of somebody else)
        return Path("/tmp") / f"atoll-{os.getuid()}-{name}" / "control.sock"  # nosec B108

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "log"

    @property
    def runs_dir(self) -> Path:
        """One folder a run."""
        return self.state_dir / "runs"

    def run_dir(self, run_id: str) -> Path:
        """All that this node keeps of a run: signed manifest, journal, checkpoint."""
        return self.runs_dir / run_id

    def state_dirs(self, run_id: str, fragments: int) -> list[Path]:
        """Where journal, results and checkpoint are: in the run's folder, or in one for each
        fragment of a model that is cut.
        """
        folder = self.run_dir(run_id)
        return (
            [folder]
            if fragments == 1
            else [folder / "fragments" / str(number) for number in range(fragments)]
        )

    def ensure(self) -> None:
        """Make all folders, private to the user. Raises StorageError when that fails."""
        for folder in (
            self.config_dir,
            self.data_dir,
            self.state_dir,
            self.cache_dir,
            self.runtime_dir,
            self.runs_dir,
            self.log_dir,
        ):
            make_private(folder)
        make_private(self.control_socket.parent)

    def tighten(self) -> int:
        """Take the rights of others from everything of this user's in these folders; how many files
        and folders had any.

        Links are not followed. Of folders that may hold something else, too, only atoll's own files
        are looked at.
        """
        roots = [self.state_dir, self.cache_dir, self.runtime_dir, self.founded_file("").parent]
        found = [_close(file) for file in (self.config_file,)]
        for root in dict.fromkeys(roots):
            for folder, folders, files in os.walk(root):
                found += [_close(Path(folder, name)) for name in (*folders, *files)]
        return sum(found)


def find_paths(home: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Paths:
    """The paths to use: ``home`` (a --home flag), else ``ATOLL_HOME``, else the XDG folders."""
    root = home or environ.get("ATOLL_HOME")
    if root:
        base = user_path(root)
        return Paths(base, base, base / "state", base / "cache", base / "run")
    user = user_path(environ.get("HOME") or "~")
    config = _xdg(environ, "XDG_CONFIG_HOME", user / ".config")
    data = _xdg(environ, "XDG_DATA_HOME", user / ".local/share")
    state = _xdg(environ, "XDG_STATE_HOME", user / ".local/state")
    cache = _xdg(environ, "XDG_CACHE_HOME", user / ".cache")
    state /= "atoll"
    return Paths(config / "atoll", data / "atoll", state, cache / "atoll", state / "run")


def user_path(name: str | Path) -> Path:
    """A path as a user types it, absolute: ``~`` and ``~user`` are their folders.

    Raises ConfigError where there is no such folder, or the current one was deleted.
    """
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"no home folder is known for {name}",
            why=f"HOME is not set, and the system has no entry for user {os.getuid()}"
            if str(name).startswith("~/") or str(name) == "~"
            else "The system has no user of this name.",
            hint="Name a folder: ATOLL_HOME=/folder atoll ...",
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"the current folder was deleted, so {name} leads nowhere",
            hint="Change into a folder that exists: cd",
        ) from None


def _xdg(environ: Mapping[str, str], name: str, default: Path) -> Path:
    value = environ.get(name, "")
    # The specification: relative paths are to be ignored.
    return Path(value) if os.path.isabs(value) else default


def bytes_in(folder: Path) -> int:
    """Bytes that the files below a folder take on their medium, as ``du`` counts; links are not
    followed, and what goes away meanwhile is left out.
    """
    total = 0
    for below, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(below, name)).st_blocks * 512
    return total


def only_mine() -> None:
    """From now on this process makes files that nobody else can read, and folders that nobody else
    can enter.
    """
    os.umask(0o077)


def _close(path: Path) -> bool:
    """Whether others had rights to this file or folder of ours; now they have none."""
    try:
        found = path.lstat()
        if found.st_uid != os.geteuid() or not stat.S_IMODE(found.st_mode) & 0o077:
            return False
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            return False
        path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    except OSError:  # gone, or on a medium that cannot be written
        return False
    return True
