"""``./atoll.toml`` can name code: it counts only where it was named, or trusted with these
contents.
"""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
from terminal_kit import ATOLL, Person

from atoll.node import site_data
from atoll.node.home.config import load_config
from atoll.node.home.interpreter import PYTHON
from atoll.node.home.local_settings import MAX_BYTES, local_settings, trust
from atoll.node.home.own_data import factory_of
from atoll.node.home.paths import find_paths

SITE = "from pathlib import Path\nPath('ran').touch()\n\ndef make():\n    return [1, 2]\n"
RUN = 'schema = 1\nname = "notes"\n[model]\nconfig = { context = 16 }\n[data]\nsource = "local"\n[train]\nsync_every = 5\n'


@pytest.fixture
def folder(atoll_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.py").write_text(SITE)
    (tmp_path / "atoll.toml").write_text(
        '[node]\nport = 4170\nbootstrap = ["/x"]\n[data]\nfactory = "site.py:make"\n'
    )
    return tmp_path


def test_the_file_of_a_folder_sets_nothing_by_being_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_config(find_paths())
    assert (loaded.config.node.port, loaded.config.node.bootstrap) == (4150, ())
    assert "node.port" not in loaded.origins
    assert "atoll config trust" in loaded.unused
    assert "\n" not in loaded.unused
    assert factory_of(find_paths()) == ""
    assert capsys.readouterr().err == f"atoll: {loaded.unused}\n"
    with pytest.raises(Exception, match="settings name no data"):
        site_data()
    assert not (folder / "ran").exists()


def test_it_counts_where_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config(find_paths(), named="atoll.toml")
    assert (loaded.config.node.port, loaded.unused) == (4170, "")
    monkeypatch.setenv("ATOLL_CONFIG", str(folder / "atoll.toml"))
    monkeypatch.chdir("/")
    assert factory_of(find_paths()) == str(folder / "site.py:make")  # relative to the file
    assert site_data() == [1, 2]
    monkeypatch.setenv("ATOLL_CONFIG", str(folder / "none.toml"))
    with pytest.raises(Exception, match="there is no file"):
        load_config(find_paths())


def test_it_counts_once_trusted_until_it_changes(folder: Path, atoll_home: Path) -> None:
    paths = find_paths()
    found = local_settings(paths)
    assert found is not None
    assert not found.trusted
    trust(paths, found)
    assert load_config(paths).config.node.port == 4170
    assert stat.S_IMODE(os.stat(atoll_home / "trusted.json").st_mode) == 0o600
    (folder / "atoll.toml").write_text("[node]\nport = 4171\n")
    assert load_config(paths).config.node.port == 4150
    (folder / "atoll.toml").write_text(found.text)
    assert load_config(paths).config.node.port == 4170
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "atoll.toml").write_text(found.text)
    os.chdir(elsewhere)  # the same contents in another folder name another site.py
    assert load_config(paths).config.node.port == 4150
    os.chdir(folder)
    (atoll_home / "trusted.json").write_bytes(b"\xff{")
    assert load_config(paths).config.node.port == 4150


@pytest.mark.parametrize("data", [b"\xff\xfe", b"#" * (MAX_BYTES + 1)])
def test_a_file_that_holds_no_settings_stops_nobody(folder: Path, data: bytes) -> None:
    (folder / "atoll.toml").write_bytes(data)
    assert load_config(find_paths()).config.node.port == 4150
    with pytest.raises(Exception, match="not a text file"):
        load_config(find_paths(), named="atoll.toml")


def test_a_person_is_asked_once_and_shown_path_and_entries(folder: Path, atoll_home: Path) -> None:
    named = {"ATOLL_HOME": str(atoll_home)}
    for answer in ("n\n", "y\n"):
        with Person([*ATOLL, "join", "nothing"], named, folder) as person:
            person.wait_for("[y/N]")
            assert f"'{folder}/atoll.toml' would set" in person.seen
            assert "data.factory = 'site.py:make'" in person.seen
            assert f"runs the code in '{folder}/site.py'" in person.seen
            person.type(answer)
            assert person.end() == 78  # there is no such run
            assert ("is not used" in person.seen) is (answer == "n\n")
    for argv in (["join", "nothing"], ["join", "nothing", "--yes"]):
        with Person([*ATOLL, *argv], named, folder) as person:
            assert person.end() == 78
            assert "[y/N]" not in person.seen
    (folder / "atoll.toml").write_text("[node]\nport = 4199\n")
    with Person([*ATOLL, "join", "nothing", "--yes"], named, folder) as person:
        assert person.end() == 78  # --yes answers what the command says it does, not this
        assert "is not used" in person.seen
    with Person([*ATOLL, "join", "nothing"], named, folder) as person:
        person.wait_for("node.port = 4199")
    assert not (folder / "ran").exists()


def test_joining_with_yes_runs_no_code_that_the_folder_names(
    folder: Path, atoll_home: Path
) -> None:
    named = {"ATOLL_HOME": str(atoll_home)}
    (folder / "run.toml").write_text(RUN)
    with Person([*ATOLL, "new", "run.toml"], named, folder) as person:
        assert person.end() == 0
    with Person([*ATOLL, "join", "notes", "--yes"], named, folder) as person:
        assert person.end() == 78  # there are no data: those that the folder names are not taken
        assert "is not used" in person.seen
        assert "E400 this run trains on every member's own text" in person.seen
    with Person([*ATOLL, "join", "notes", "--config", "atoll.toml"], named, folder) as person:
        person.wait_for("[y/N]")
        assert f"own, '{folder}/site.py:make' may be run" in " ".join(person.seen.split())
        person.type("n\n")
        assert person.end() == 1
    assert not (folder / "ran").exists()
    assert not (atoll_home / "run" / "node.json").exists()


def test_nothing_is_imported_from_the_current_folder(folder: Path, atoll_home: Path) -> None:
    for name in ("trio", "msgspec", "torch"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()\n")
    (folder / "train.py").write_text("import beside\nprint('trains')\n")
    (folder / "beside.py").touch()
    command = [
        *PYTHON,
        "-m",
        "atoll.node.cli",
    ]  # as the console script does: it is no module of here
    named = {"ATOLL_HOME": str(atoll_home)}
    with Person([*command, "up", "--listen", "/ip4/127.0.0.1/tcp/0"], named, folder) as person:
        person.wait_for("[y/N]")
        person.type("n\n")
        person.wait_for("is up; Ctrl-C drains")
        person.process.send_signal(signal.SIGINT)
        assert person.end() == 0
    assert not (folder / "ran").exists()
    script = [*PYTHON, "-m", "atoll.node.cli.run_script", "train.py"]
    with Person(script, named, folder) as person:  # what lies beside one's own script is one's own
        person.wait_for("trains")
