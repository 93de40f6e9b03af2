"""Bad input at the door: each a clear coded error and the right exit status, without a traceback,
and nothing is lost.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_input_kit import (
    LAYOUT,
    Member,
    Run,
    atoll,
    ended,
    new_home,
    new_run,
    odd,
    one_round,
    refused,
)

from atoll.collectives.errors import (
    AtollError,
    ModelMismatchError,
    NetworkError,
    NotAdmittedError,
    VersionMismatchError,
)
from atoll.collectives.layout import make_layout
from atoll.node import join
from atoll.node.home.paths import find_paths
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity

SCRIPT = """
import torch
from atoll.node import join
from atoll.optim import attach
model = torch.nn.Linear(4, 250)
with join() as swarm:
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1), swarm)
"""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Member]]:
    """A run with its organiser online, for those who are refused."""
    run = new_run(tmp_path_factory.mktemp("run"))
    with ended(a := run.organiser()):
        one_round(a)
        yield run, a
        one_round(a)  # whoever was refused left it unharmed


# ── files ──


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("codec", "codecs", "$.exchange.codecs"),
        ('method = "local_sgd"', 'method = "magic"', "$.train.method"),
        ("every = 4", 'every = "4"', "$.checkpoint.every"),
        ('codec = "int8"', 'codec = "zip"', "$.exchange.codec"),
    ],
)
def test_a_manifest_names_the_offending_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    text = 'schema = 1\nname = "x"\n[train]\nmethod = "local_sgd"\nsync_every = 1\n[exchange]\ncodec = "int8"\n[checkpoint]\nevery = 4\n'
    (tmp_path / "run.toml").write_text(text.replace(old, new))
    for command in ("new", "validate"):
        error = refused(tmp_path / "home", "E413", 78, command, str(tmp_path / "run.toml"))
        assert error["key"] == key
        assert key in error["message"]
    told = atoll(tmp_path / "home", "new", str(tmp_path / "run.toml"))
    assert (told.status, told.out) == (78, "")
    assert told.err.startswith("E413 ")
    assert key in told.err
    assert not list((tmp_path / "home").glob("state/runs/*"))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\x80\xff\x00", "E410"),
        (b"= =", "E410"),
        (b"", "E412"),
        (b'schema = 9\nname = "x"', "E413"),
    ],
)
def test_a_manifest_that_is_no_toml_or_of_another_atoll(
    tmp_path: Path, content: bytes, code: str
) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    refused(tmp_path / "home", code, 78, "new", str(tmp_path / "run.toml"))


@pytest.mark.slow
def test_a_key_file_that_others_may_read_or_nobody_can_use(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    assert atoll(home, "init").status == 0
    key = find_paths(home).identity_file
    good = key.read_bytes()
    key.chmod(0o640)
    for argv in (("id",), ("up",), ("up", "--background")):
        assert "chmod 600" in " ".join(refused(home, "E210", 77, *argv)["hints"])
    run = new_run(tmp_path)  # a script enters a run that its home knows
    find_paths(run.home).identity_file.chmod(0o640)
    with pytest.raises(AtollError) as told:
        run.organiser()
    assert (told.value.code, told.value.exit_code) == ("E210", 77)
    key.chmod(0o600)
    for garbage in (b"", b"garbage", good[:-7], b"\xff" * 5000):
        key.write_bytes(garbage)
        refused(home, "E210", 77, "up")
        assert key.read_bytes() == garbage  # never replaced by a new key
    key.unlink()
    key.mkdir()
    refused(home, "E210", 77, "up")
    key.rmdir()
    key.write_bytes(good)
    key.chmod(0o600)
    assert atoll(home, "id").status == 0


def test_a_key_file_that_may_not_be_read(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    assert atoll(home, "init").status == 0
    find_paths(home).identity_file.chmod(0)
    command = [sys.executable, "-m", "atoll.node.cli", "up", "--json"]
    if os.geteuid() == 0:  # root may read every file, unless it gives that up
        if shutil.which("setpriv") is None:
            pytest.skip("root may read every file, and setpriv is not here to give that up")
        command = [
            "setpriv",
            "--inh-caps=-all",
            "--bounding-set=-dac_override,-dac_read_search",
            *command,
        ]
    done = subprocess.run(
        command,
        env={**os.environ, "ATOLL_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 77, done
    assert json.loads(done.stdout)["error"]["code"] == "E210"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("which", ["node", "lane"])
def test_a_port_is_taken(tmp_path: Path, which: str) -> None:
    home = new_home(tmp_path / "home")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        listen = f'listen = ["/ip4/127.0.0.1/tcp/{port if which == "node" else 0}"]\nlane_port = {port if which == "lane" else 0}\n'
        find_paths(home).config_file.write_text("[node]\n" + listen)
        for argv in (("up",), ("up", "--background")):
            assert str(port) in refused(home, "E101", 73, *argv)["message"]
        with pytest.raises(AtollError) as told:
            Member(home, "anything")
        if which == "node" or told.value.code == "E101":  # a private node takes any lane port
            assert (told.value.code, told.value.exit_code) == ("E101", 73)
    assert atoll(home, "up", "--background").status == 0  # the port is free again
    assert atoll(home, "down").status == 0


# ── invites ──


@pytest.mark.slow
def test_an_invite_that_is_cut_changed_expired_or_none_at_all(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    good, home = run.invite(), tmp_path / "home"
    late = run.invite(now_s=time.time() - 10_000, life_s=3600)
    for invite, code in (
        (good[:-9], "E201"),
        (good[:60] + ("a" if good[60] != "a" else "b") + good[61:], ""),
        (late, "E201"),
        ("atoll2:", "E201"),
    ):
        told = atoll(home, "join", invite, "--yes", "--json")
        error = json.loads(told.out)["error"]
        assert told.status == error["exit"] == 77, told
        assert error["code"] == code or (not code and error["code"] in ("E201", "E202"))
        assert error["hints"]
    assert "expired" in refused(home, "E201", 77, "join", late, "--yes")["message"]
    refused(home, "E400", 78, "join", "no-such-run", "--yes")
    with pytest.raises(NotAdmittedError) as told_script:
        Member(new_home(tmp_path / "b"), late)
    assert told_script.value.exit_code == 77


@pytest.mark.slow
def test_an_invite_that_the_organiser_did_not_sign(
    swarm: tuple[Run, Member], tmp_path: Path
) -> None:
    run, _ = swarm
    forged = make_invite(
        run.signed.run_id, [run.address], Identity.generate(), now_s=time.time()
    ).encode()
    error = refused(new_home(tmp_path / "home"), "E201", 77, "join", forged, "--yes")
    assert "does not open run" in error["message"]
    assert "atoll invite new" in " ".join(error["hints"])


@pytest.mark.slow
def test_nobody_answers_at_the_addresses_of_the_invite(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    home = new_home(tmp_path / "home")
    error = refused(home, "E110", 69, "join", run.invite(), "--yes")
    assert "not a ban and your key is fine" in error["message"]
    assert error["retryable"]
    with ended(a := run.organiser()):  # the same home and invite, once somebody is there
        one_round(a)
        assert atoll(home, "join", run.invite(), "--dry-run").status == 0


# ── the wrong peer ──


@pytest.mark.slow
def test_another_model_than_the_runs(swarm: tuple[Run, Member], tmp_path: Path) -> None:
    run, a = swarm
    before = a.state()["entry"]
    with pytest.raises(ModelMismatchError) as told:
        run.member("other-model", layout=make_layout([("w", (10, 10)), ("extra", (3,))]))
    assert (told.value.code, told.value.exit_code) == ("E301", 76)
    assert re.search(r"\bw\b.*\[10, 10\].*\[1000\]", told.value.message)
    assert "extra" in told.value.message
    (tmp_path / "train.py").write_text(SCRIPT)
    told_cli = atoll(
        new_home(tmp_path / "home"),
        "join",
        run.invite(),
        "--yes",
        "--script",
        str(tmp_path / "train.py"),
    )
    assert told_cli.status == 76, told_cli
    assert "E301" in told_cli.err
    assert "weight" in told_cli.err
    assert (a.state()["phase"], a.state()["entry"]) == (
        "running",
        before,
    )  # no entry of the log ever let it in


@pytest.mark.slow
def test_a_run_is_founded_with_the_model_that_its_manifest_promises(tmp_path: Path) -> None:
    run = new_run(tmp_path, model="parameters = 1000")
    swarm = join(
        run.signed.run_id, home=run.home, private=True, progress=lambda stage, done, total: None
    )
    with swarm:
        with pytest.raises(
            ModelMismatchError,
            match=r"your model has 999 parameters, .* promises local:test with 1,000",
        ) as told:
            swarm.open(make_layout([("w", (999,))]), lambda initial: initial.zero_())
        assert "local:NAME" in told.value.hint
        swarm.open(LAYOUT, lambda initial: initial.zero_()).release()
        assert swarm.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(30).counted


@pytest.mark.slow
def test_a_script_that_fails_to_found_a_run_leaves_nothing_of_its_model(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    swarm = join(
        run.signed.run_id, home=run.home, private=True, progress=lambda stage, done, total: None
    )
    with swarm:
        with pytest.raises(ZeroDivisionError):
            swarm.open(make_layout([("w", (7,))]), lambda initial: initial.fill_(1 // 0))
        swarm.open(LAYOUT, lambda initial: initial.fill_(3.0)).release()
        assert swarm.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(30).counted


@pytest.mark.slow
def test_another_version_of_the_protocol(swarm: tuple[Run, Member]) -> None:
    run, a = swarm
    with pytest.raises(VersionMismatchError) as told:
        run.member("old", command=odd("version"))
    assert (told.value.code, told.value.exit_code) == ("E140", 76)
    assert "version 1" in told.value.message
    assert "pip install -U atoll" in told.value.hint
    assert a.state()["trouble"] is None


@pytest.mark.slow
def test_a_wrong_clock_is_named_and_not_the_members(swarm: tuple[Run, Member]) -> None:
    """It takes the others' announcements for old ones and so knows nobody: what is wrong is its
    clock.
    """
    run, _ = swarm
    with pytest.raises(NetworkError) as told:
        run.member("ahead", command=odd("clock"))
    assert (told.value.code, told.value.exit_code) == ("E120", 75), told.value.message
    assert "ahead of 1 of 1 peers" in told.value.message


@pytest.mark.slow
def test_a_codec_that_a_member_does_not_know(swarm: tuple[Run, Member]) -> None:
    """Its release is older than the run's codec: it is told so before it is anybody's member, and
    the others' rounds go on.
    """
    run, a = swarm
    one_round(a)
    before = a.state()["round"]
    with pytest.raises(VersionMismatchError) as told:
        run.member("older", command=odd("codec"))
    assert (told.value.code, told.value.exit_code) == ("E140", 76)
    assert "codec 'fp32' is not known" in told.value.message
    assert "pip install -U atoll" in told.value.hint
    assert one_round(a)[0].round == before + 1
    assert a.state()["trouble"] is None


@pytest.mark.slow
def test_a_script_without_atoll_join_ends_with_the_error_of_its_own(tmp_path: Path) -> None:
    """`python train.py`: where it happened in the user's file, then the page of the error, and its
    exit status.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "ATOLL_HOME": str(new_home(tmp_path / "home")),
        "ATOLL_RUN": "no-such-run",
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 78
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'train.py'}:"), lines
    assert [line.strip() for line in lines[-2:]] == [
        "See the runs: atoll ls",
        "More: atoll explain E400   [exit 78]",
    ]
    assert "Traceback" not in done.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "home" / "state" / "log").glob("*"))
    assert "Traceback" not in logs
