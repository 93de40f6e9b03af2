"""Services of the system: the files of systemd and launchd, and how they are put there."""

from __future__ import annotations

import json
import os
import plistlib
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.collectives.errors import ConfigError
from atoll.node.cli import cli
from atoll.node.home.units import NEVER_AGAIN, Service, launchd, systemd

PROGRAM = [sys.executable, "-P", "-m", "atoll.node.cli"]
NODE = Service("atoll-node", "atoll node", [*PROGRAM, "up"], {}, None, 30.0, ready=True)
RUN = Service(
    "atoll-run-abcdefgh",
    'atoll training of "50 %"',
    [*PROGRAM, "join", "abc", "--script", '/tmp/a b$HOME/100%"\\.py'],
    {"ATOLL_HOME": '/tmp/a home/100%$x"\\'},
    Path("/tmp"),
    60.0,
    after="atoll-node",
)


def test_the_unit_of_a_node() -> None:
    lines = systemd(NODE).splitlines()
    assert lines[0].startswith("# Written by: atoll service install")
    for line in (
        "Type=notify",
        f"ExecStart={' '.join(PROGRAM)} up",
        "Restart=on-failure",
        "TimeoutStopSec=45",
        "NoNewPrivileges=true",
        "WorkingDirectory=-~",  # a fresh home has no folder of ours yet
        "KillMode=mixed",
        "WantedBy=default.target",
    ):
        assert line in lines
    assert not any(line.startswith(("User=", "Requires=")) for line in lines)
    assert {2, 78} < set(NEVER_AGAIN)


def test_the_unit_of_a_training_needs_the_nodes_and_quotes_its_words() -> None:
    lines = systemd(RUN, user="ada").splitlines()
    assert "Wants=atoll-node.service" in lines
    assert "After=atoll-node.service" in lines
    assert "WorkingDirectory=/tmp" in lines
    assert "User=ada" in lines
    assert "WantedBy=multi-user.target" in lines
    assert 'Description=atoll training of "50 %%"' in lines
    assert 'Environment="ATOLL_HOME=/tmp/a home/100%%$x\\"\\\\"' in lines
    start = next(line for line in lines if line.startswith("ExecStart="))
    assert start.endswith(' join abc --script "/tmp/a b$$HOME/100%%\\"\\\\.py"')


def test_a_line_that_would_be_two_is_refused() -> None:
    for folder in ("/srv/odd\\", "/srv/\udcff"):  # joined to the next line; no text
        with pytest.raises(ConfigError, match="one line"):
            systemd(RUN._replace(folder=Path(folder)))
    for odd in ("a\nExecStartPost=/bin/sh", "a\x00", "a\r", "a\udcff"):
        with pytest.raises(ConfigError, match="one line"):
            systemd(RUN._replace(description=odd))
        with pytest.raises(ConfigError, match="one line"):
            systemd(RUN._replace(command=[*PROGRAM, odd]))
        with pytest.raises(ConfigError, match="one line"):
            systemd(RUN, user=odd)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_them(tmp_path: Path) -> None:
    files = [tmp_path / f"{NODE.name}.service", tmp_path / f"{RUN.name}.service"]
    for file, text in zip(files, (systemd(NODE), systemd(RUN, user="root")), strict=True):
        file.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *files], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    files[0].write_text(systemd(NODE).replace("Restart=", "Restrt="))
    done = subprocess.run(
        ["systemd-analyze", "verify", files[0]], capture_output=True, text=True, timeout=60
    )
    assert "Restrt" in done.stderr  # it does look


def test_the_property_list_of_launchd() -> None:
    found = plistlib.loads(launchd(RUN, Path("/tmp/x.log"), user="ada"))
    assert found["Label"] == "atoll.atoll-run-abcdefgh"
    assert found["WorkingDirectory"] == "/tmp"
    assert found["ProgramArguments"] == list(RUN.command)
    assert found["EnvironmentVariables"] == RUN.environment
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert (found["ExitTimeOut"], found["UserName"]) == (75, "ada")


@pytest.fixture
def told(tmp_path: Path, atoll_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a supervisor that is none writes what it was told."""
    if sys.platform == "darwin":
        pytest.skip("a mac has launchctl")
    told, folder = tmp_path / "told", tmp_path / "bin"
    folder.mkdir()
    program = folder / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {told}\n'
        'case "$*" in *is-active*) echo active;; *fails*) echo no >&2; exit 1;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return told


def call(*argv: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(argv), standalone_mode=False)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return int(done.return_value or 0), done.stdout


def test_install_status_and_remove(told: Path, tmp_path: Path) -> None:
    file = tmp_path / "config" / "systemd" / "user" / "atoll-node.service"
    assert call("service", "status")[0] == 3
    status, out = call("service", "install", "--json")
    assert (status, json.loads(out)["file"]) == (0, str(file))
    assert file.stat().st_mode & 0o777 == 0o644
    text = file.read_text()
    assert f"Environment=ATOLL_HOME={os.environ['ATOLL_HOME']}\n" in text
    assert told.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now atoll-node.service",
    ]
    status, out = call("service", "status", "--json")
    assert (status, json.loads(out)["services"]) == (0, {"atoll-node": "active"})
    assert call("service", "remove")[0] == 0
    assert not file.exists()
    assert told.read_text().splitlines()[-2:] == [
        "--user disable --now atoll-node.service",
        "--user daemon-reload",
    ]
    with pytest.raises(Exception, match="no such service"):
        call("service", "remove")


def test_a_runs_training_is_a_service_beside_the_nodes(told: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('schema = 1\nname = "tide"\n[model]\nentry = "local:x"\n')
    (tmp_path / "train.py").write_text("")
    run_id = json.loads(call("new", "run.toml", "--json")[1])["run_id"]
    name = f"atoll-run-{run_id[:8]}"
    _, out = call("service", "install", "--join", "tide", "--script", "train.py", "--print")
    assert f"join {run_id} --yes --script {tmp_path / 'train.py'}\n" in out
    assert f"WorkingDirectory={tmp_path}\n" in out
    _, out = call("service", "install", "--join", "tide", "--data", "train.py", "--print")
    assert f" --yes --data {tmp_path / 'train.py'}\n" in out
    assert "WorkingDirectory=-~\n" in out
    assert not told.exists()
    call("service", "install")
    call("service", "install", "--join", "tide", "--script", "train.py")
    folder = tmp_path / "config" / "systemd" / "user"
    assert {file.stem for file in folder.iterdir()} == {"atoll-node", name}
    told.unlink()
    call("service", "remove")  # the training before the node that it needs
    stopped = [line for line in told.read_text().splitlines() if "disable" in line]
    assert [line.split()[-1] for line in stopped] == [f"{name}.service", "atoll-node.service"]
    call("service", "install", "--join", "tide")
    call("rm", "tide", "--yes")
    _, out = call("service", "remove", "--join", run_id, "--json")
    assert json.loads(out)["removed"] == [name]


def test_a_service_of_the_machine_is_its_users(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under sudo HOME is root's: settings, runs and folders are those of who typed it."""
    home = tmp_path / "ada"
    (home / ".config" / "atoll").mkdir(parents=True)
    (home / ".config" / "atoll" / "config.toml").write_text("[node]\ndrain_s = 5\n")
    record = pwd.struct_passwd(("ada", "x", 4711, 4711, "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwnam", {"ada": record}.__getitem__)
    monkeypatch.setenv("SUDO_USER", "ada")
    monkeypatch.setenv("XDG_STATE_HOME", "/root/somewhere")
    monkeypatch.delenv("ATOLL_HOME")
    _, out = call("service", "install", "--system", "--print")
    lines = out.splitlines()
    assert "User=ada" in lines
    assert "TimeoutStopSec=20" in lines
    assert not any(line.startswith("Environment=") for line in lines)
    assert not told.exists()
    with pytest.raises(ConfigError, match="no user 'bob'"):
        call("service", "install", "--system", "--user", "bob", "--print")


def test_the_folders_that_a_users_shell_names_are_the_services(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/large/state")
    _, out = call("service", "install", "--drain", "12", "--print")
    assert "Environment=XDG_STATE_HOME=/large/state\n" in out
    assert " up --drain 12\n" in out
    assert "TimeoutStopSec=27\n" in out


def test_without_a_supervisor_it_says_so(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Exception, match="there is no systemctl"):
        call("service", "install")
