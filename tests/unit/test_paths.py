"""Folders: XDG or ATOLL_HOME, private, written atomically."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.collectives.errors import StorageError
from atoll.collectives.identifiers import PeerId
from atoll.node.home.last_resort import refused
from atoll.node.home.paths import bytes_in, find_paths, make_private, write_atomic
from atoll.node.home.refusals import storage_error
from atoll.node.net.transport.peerbook import PeerBook
from atoll.node.storage.medium import storage_error as medium_error
from atoll.node.watching.disk import AGAIN_S, DiskUsage
from atoll.security.identity import Identity
from atoll.security.key_file import load_or_create


def test_xdg(tmp_path: Path) -> None:
    paths = find_paths(
        environ={"HOME": "/home/u", "XDG_STATE_HOME": "/s", "XDG_DATA_HOME": "relative"}
    )
    assert paths.config_file == Path("/home/u/.config/atoll/config.toml")
    assert paths.identity_file == Path("/home/u/.local/share/atoll/identity.key")
    assert paths.run_dir("abc") == Path("/s/atoll/runs/abc")
    assert paths.control_socket == Path("/s/atoll/run/control.sock")
    environ = {"HOME": "/home/u"}  # of a service of the machine, which has no session
    assert find_paths(environ=environ | {"XDG_RUNTIME_DIR": "/run/user/1"}) == find_paths(
        environ=environ
    )


def test_one_folder(tmp_path: Path) -> None:
    paths = find_paths(environ={"ATOLL_HOME": str(tmp_path)})
    assert paths == find_paths(tmp_path)
    assert paths.identity_file == tmp_path / "identity.key"
    paths.ensure()
    for folder in (tmp_path, paths.state_dir, paths.runs_dir, paths.runtime_dir):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    first, second = find_paths(long), find_paths(long / "y")
    assert len(os.fsencode(first.control_socket)) <= 100
    assert first.control_socket != second.control_socket
    assert first.control_socket == find_paths(long).control_socket


def test_others_rights_are_taken(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    make_private(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_writing_replaces_or_leaves(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomic(file, b"one")
    write_atomic(file, b"two")
    assert file.read_bytes() == b"two"
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["f"]
    with pytest.raises(StorageError, match="cannot write") as caught:
        write_atomic(tmp_path / "none" / "f", b"")
    assert caught.value.code == "E501"


@pytest.mark.parametrize(
    ("number", "why", "hint"),
    [
        (errno.ENOSPC, "the disk is full", "free some space"),
        (errno.EDQUOT, "the disk is full", "free some space"),
        (errno.EIO, "the medium failed", "dmesg"),
        (errno.EROFS, "can only be read", "dmesg"),
        (errno.EACCES, "belongs to somebody else", "chown"),
        (errno.ENAMETOOLONG, "too long", "ATOLL_HOME=/short"),
        (errno.EMFILE, "more files and connections are open", "ulimit -n"),
        (errno.ENOTDIR, "", "atoll config path"),
    ],
)
@pytest.mark.parametrize("told", [storage_error, lambda path, e: medium_error(Path(path), e)])
def test_advice_fits_the_failure(
    told: Callable[[str, OSError], StorageError], number: int, why: str, hint: str
) -> None:
    error = told("a/b", OSError(number, os.strerror(number)))
    assert (error.code, error.exit_code) == ("E501", 73)
    assert "a/b" in error.message
    assert os.strerror(number) in error.message
    assert why in error.why
    assert hint in error.hint
    assert ("free some space" in error.hint) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_what_a_run_takes_on_disk_is_counted_once_a_minute(tmp_path: Path) -> None:
    disk, folder = DiskUsage(tmp_path / "run"), tmp_path / "run" / "journal"
    assert disk.used(0.0) == 0  # nothing is there yet
    folder.mkdir(parents=True)
    (folder / "entries").write_bytes(b"x" * 100_000)
    (folder / "link").symlink_to(tmp_path)
    assert disk.used(AGAIN_S - 1) == 0
    assert 100_000 <= disk.used(AGAIN_S) < 150_000
    assert disk.used(AGAIN_S) == bytes_in(tmp_path / "run")


class Forced:
    """What the system was told to force, as a power cut would leave it: contents of files by inode,
    names of folders.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files, self._names = dict[int, bytes](), dict[int, set[str]]()
        real = os.fsync

        def fsync(file: int) -> None:
            found = os.fstat(file)
            place = Path(os.readlink(f"/proc/self/fd/{file}"))
            if stat.S_ISDIR(found.st_mode):
                self._names[found.st_ino] = set(os.listdir(place))
            else:
                self._files[found.st_ino] = place.read_bytes()
            real(file)

        monkeypatch.setattr(os, "fsync", fsync)

    def left(self, path: Path, root: Path) -> bytes | None:
        """The content that is found at ``path`` after the cut, where ``root`` was there before;
        None where a name on the way is lost.
        """
        for place in (path, *path.parents):
            if place == root:
                return self._files.get(path.stat().st_ino)
            if place.name not in self._names.get(place.parent.stat().st_ino, set()):
                return None
        return None


def test_a_power_cut_leaves_the_key_and_the_addresses_of_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = Forced(monkeypatch)
    paths = find_paths(tmp_path / "a" / "home")
    load_or_create(paths.identity_file)
    paths.ensure()
    book = PeerBook(PeerId("me"))
    book.add(Identity(bytes(32)).peer, ("/ip4/127.0.0.1/tcp/4001",))
    book.save(paths.state_dir / "peers.json")
    make_private(paths.run_dir("abc"))
    write_atomic(paths.run_dir("abc") / "manifest", b"signed")
    for path in (
        paths.identity_file,
        paths.state_dir / "peers.json",
        paths.run_dir("abc") / "manifest",
    ):
        assert forced.left(path, tmp_path) == path.read_bytes(), path


def test_a_librarys_word_for_a_full_disk_is_the_systems() -> None:
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    error = refused(Exception(said), "training has ended")  # as safetensors and tokenizers say it
    assert isinstance(error, StorageError)
    assert "the disk is full" in error.why
    assert refused(Exception("no such tensor"), "x") is None
