"""A full disk: a clear error where a node cannot start; where it runs, training goes on, nothing is
lost, and it resumes when there is room.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_input_kit import Member, atoll, ended, new_home, new_run, odd, one_round, refused, soon
from seeds import RARE

from atoll.collectives.errors import StorageError
from atoll.collectives.layout import make_layout

pytestmark = [*RARE]


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self._filler = path, path / "filler"

    def fill(self) -> None:
        """Leave no free block."""
        with self._filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink()

    def grow(self, size: str) -> None:
        """Another size."""
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)


@contextmanager
def mounted(path: Path, size: str) -> Iterator[Disk]:
    """A tmpfs at ``path``."""
    path.mkdir(parents=True)
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=False
        ).returncode
    ):
        pytest.skip("mounting a tmpfs is refused here")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_node_does_not_start_on_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        home = new_home(disk.path / "home")
        disk.fill()
        for argv in (("init",), ("up",), ("up", "--background")):
            assert "No space left" in refused(home, "E501", 73, *argv)["message"]
        run = new_run(tmp_path)
        with pytest.raises(StorageError) as told:
            Member(home, run.invite())
        assert (told.value.code, told.value.exit_code) == ("E501", 73)
        assert "free some space" in told.value.hint.lower()
        told_people = atoll(home, "up")
        assert told_people.status == 73
        assert told_people.err.startswith("E501 ")
        disk.free()
        assert atoll(home, "up", "--background").status == 0
        assert atoll(home, "down").status == 0


def test_a_run_is_not_founded_by_halves(tmp_path: Path) -> None:
    with mounted(tmp_path / "organiser", "4m") as disk:
        run = new_run(tmp_path)
        layout = make_layout([("w", (1_000_000,))])  # 8 MB of state
        for _ in range(2):
            with pytest.raises(StorageError) as told:
                run.organiser(layout=layout)
            assert (told.value.code, told.value.exit_code) == ("E501", 73)
            assert "state.safetensors" in told.value.message
        disk.grow("64m")
        with ended(a := run.organiser(layout=layout)):
            one_round(a)
            assert a.state()["trouble"] is None


@contextmanager
def filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> Iterator[tuple[Path, list[str], Callable[[], None], Callable[[], None]]]:
    """A place for a home, a node's command, and how to fill and to free its disk."""
    defect = tmp_path / "defect"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(defect))
    if how == "limit":
        yield tmp_path, odd("fsize"), defect.touch, defect.unlink
    else:
        with mounted(tmp_path / "disk", "8m") as disk:
            yield disk.path, [], disk.fill, disk.free


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_the_others_go_on_and_the_member_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = new_run(tmp_path)
    with (
        filled(tmp_path, monkeypatch, how) as (place, command, fill, free),
        ended(a := run.organiser()),
        ended(b := Member(new_home(place / "b"), run.invite(), command=command)),
    ):
        one_round(a, b)
        pid, before = b.pid, b.anchor()
        fill()
        mine = b.swarm.contribute(samples=1, write=lambda out: out.fill_(7.0))
        for _ in range(3):
            assert (
                a.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(60).status
                == "committed"
            )
        soon(lambda: "E501" in b.codes(), "the member says that its disk is full")
        trouble = b.state()["trouble"]
        assert trouble["code"] == "E501"
        assert trouble["hint"]
        assert b.anchor()[0] >= before[0]
        free()
        assert mine.wait(60).status == "committed"
        one_round(a, b)
        assert b.anchor() == a.anchor()
        assert b.pid == pid
        assert b.state()["trouble"] is None


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_the_only_member_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with filled(tmp_path, monkeypatch, how) as (place, command, fill, free):
        run = new_run(place)
        with ended(a := run.organiser(command=command)):
            one_round(a)
            fill()
            for _ in range(200):  # a small disk has some room in its last blocks
                mine = a.swarm.contribute(samples=1, write=lambda out: out.fill_(7.0))
                if mine.wait(5).status == "open":
                    break
            assert mine.wait(1).status == "open"
            assert a.swarm.connected
            assert a.state()["trouble"]["code"] == "E501"
            shown = atoll(a.home, "status").out
            assert "E501" in shown
            free()
            assert mine.wait(60).counted
            one_round(a)
            assert a.state()["trouble"] is None
            before = a.anchor()
        with ended(a := run.organiser(command=command)):
            assert a.anchor() == before
            one_round(a)
