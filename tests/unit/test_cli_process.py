"""The command line as a process: what it loads, which bytes it writes, how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ATOLL = [sys.executable, "-m", "atoll.node.cli"]
HEAVY = ("torch", "trio", "libp2p", "numpy", "rich", "safetensors")
ASKING = """
import os, signal
from atoll.node.cli import meta, run
meta.explain_command.callback = lambda code: os.kill(os.getpid(), signal.SIGINT) or signal.pause()
raise SystemExit(run(["explain"]))
"""
COMPLETING = """
import sys
from atoll.node.cli import cli
try:
    cli(prog_name="atoll")
except SystemExit:
    print([m for m in ("torch", "trio", "libp2p", "numpy", "rich") if m in sys.modules])
"""
STUBBORN = """
import os, signal
signal.signal(signal.SIGINT, lambda *a: os.write(1, b"draining\\n"))  # print may not be called while it is being called
os.write(1, b"up\\n")
while True:
    signal.pause()
"""
UNTIL_STDIN_ENDS = """
import sys
print("up", flush=True)
sys.stdin.read()
print("end", flush=True)
"""
STARTER = """
import os, sys
from atoll.node.cli.child import ChildCommand
with ChildCommand([sys.executable, "-c", sys.argv[1]], dict(os.environ), None, to_stderr=False) as child:
    sys.exit(child.wait(90))
"""
FOR_EVER = """
import time
try:
    print("up", flush=True)
    while True:
        time.sleep(0.05)
finally:
    print("end", flush=True)
"""
INVITE = "atoll2:nonsense"


def environment(home: Path, **changes: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "CI", "COLUMNS", "PYTHONUNBUFFERED")
    }
    return {**kept, "ATOLL_HOME": str(home), "TERM": "xterm-256color", **changes}


def atoll(home: Path, *argv: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*ATOLL, *argv],
        capture_output=True,
        timeout=100,
        env=environment(home, **changes),
        stdin=subprocess.DEVNULL,
        check=False,
    )


def on_a_terminal(home: Path, *argv: str, **changes: str) -> bytes:
    """What a command writes to a terminal (stdout and stderr together)."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*ATOLL, *argv],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(home, **changes),
        close_fds=True,
    )
    os.close(slave)
    written = b""
    try:
        while data := os.read(master, 65_536):
            written += data
    except OSError:  # Linux says EIO at the end of a terminal
        pass
    finally:
        os.close(master)
        process.wait(60)
    return written


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("status",),
        ("status", "--json"),
        ("join", "--help"),
        ("version",),
        ("explain", "E110"),
        ("id",),
        ("ls",),
        ("config", "show"),
        ("completion", "zsh"),
        ("invite", "inspect", INVITE),
    ],
    ids=" ".join,
)
def test_what_light_commands_load(argv: tuple[str, ...], atoll_home: Path) -> None:
    code = f"import sys; from atoll.node.cli import run; run({argv!r}); print('LOADED', *(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(atoll_home),
        check=True,
    )
    assert done.stdout.rpartition("LOADED")[2].split() == []


def test_a_manifest_is_checked_and_signed_without_torch(atoll_home: Path, tmp_path: Path) -> None:
    """Whoever writes one tries again and again; torch would be most of the second that it takes."""
    path = tmp_path / "run.toml"
    path.write_text(
        'schema = 1\nname = "light"\n[model]\nentry = "local:mlp"\n'
        "[train]\nsync_every = 20\nrounds = 100\n"
    )
    heavy = [m for m in HEAVY if m != "rich"]
    code = (
        "import sys; from atoll.node.cli import run\n"
        f"print([run([*words]) for words in (('validate', {str(path)!r}), ('new', {str(path)!r}), ('ls',))])\n"
        f"print('LOADED', *(m for m in {heavy!r} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(atoll_home),
        check=True,
    )
    assert "[0, 0, 0]" in done.stdout
    assert done.stdout.rpartition("LOADED")[2].split() == []


def completed(atoll_home: Path, words: dict[str, str]) -> str:
    """What a shell gets that asks how these words go on."""
    command = [sys.executable, "-c", COMPLETING]
    env = environment(atoll_home, **words)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=env, check=True
    ).stdout


def test_completion_of_words(atoll_home: Path) -> None:
    words = {"_ATOLL_COMPLETE": "bash_complete", "COMP_WORDS": "atoll in", "COMP_CWORD": "1"}
    assert completed(atoll_home, words).split() == ["plain,init", "plain,invite", "[]"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_runs_offers_plain_names_only(atoll_home: Path, shell: str) -> None:
    given = {"tide": "tide", "two": "same", "three": "same", "hostile": "x; rm -rf $HOME\n", "": ""}
    ids = [letter * 26 for letter in "abcde"]
    for run_id, name in zip(ids, given.values(), strict=True):
        folder = atoll_home / "state" / "runs" / run_id
        folder.mkdir(parents=True)
        manifest = msgspec.msgpack.encode({"schema": 1, "name": name})
        data = msgspec.msgpack.encode([manifest, "p", bytes(64)]) if name else b"damaged"
        (folder / "manifest").write_bytes(data)

    def offered(begun: str) -> list[str]:
        words = {
            "_ATOLL_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": f"atoll export {begun}",
            "COMP_CWORD": begun if shell == "fish" else "2",
        }
        lines = completed(atoll_home, words).splitlines()[
            :-1
        ]  # the last is which heavy modules were loaded
        if shell == "zsh":
            return lines[1::3]
        separator = "," if shell == "bash" else "\t"
        return [line.removeprefix("plain,").split(separator)[0] for line in lines]

    assert offered("ti") == ["tide"]
    assert sorted(offered("")) == sorted(["tide", *ids[1:]])
    assert offered("bbb") == [ids[1]]


def test_streams_and_exit_status(atoll_home: Path) -> None:
    done = atoll(atoll_home, "status")
    assert (done.returncode, done.stdout) == (3, b"no node is running\n")
    assert b"atoll up" in done.stderr
    for argv, status in (
        (("nonsense",), 2),
        (("peers",), 3),
        (("join", INVITE), 77),
        (("validate", "/nonexistent.toml"), 78),
        (("validate", "/nonexistent.toml", "-v"), 78),
    ):
        done = atoll(atoll_home, *argv)
        assert (done.returncode, done.stdout) == (status, b"")
        assert done.stderr.startswith(b"E")
        assert b"Traceback" not in done.stderr
        assert f"[exit {status}]".encode() in done.stderr
        done = atoll(atoll_home, *argv, "--json")
        assert (done.returncode, done.stderr) == (status, b"")
        assert json.loads(done.stdout)["error"]["exit"] == status


def test_traceback_with_vv(atoll_home: Path) -> None:
    assert b"Traceback" in atoll(atoll_home, "join", INVITE, "-vv").stderr


@pytest.mark.parametrize(
    "changes", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}], ids=str
)
def test_no_escape_bytes_where_none_are_wanted(changes: dict[str, str], atoll_home: Path) -> None:
    for argv in (("explain", "E110"), ("join", INVITE), ("ls",)):
        assert b"\x1b" not in on_a_terminal(atoll_home, *argv, **changes)
        done = atoll(atoll_home, *argv)  # and none into a pipe
        assert b"\x1b" not in done.stdout + done.stderr


def test_colour_on_a_terminal_or_by_force(atoll_home: Path) -> None:
    assert b"\x1b[1m" in on_a_terminal(atoll_home, "explain", "E110")
    assert b"\x1b[31m" in on_a_terminal(atoll_home, "join", INVITE)
    assert b"\x1b[31m" in atoll(atoll_home, "join", INVITE, FORCE_COLOR="1").stderr
    assert b"\x1b" not in atoll(atoll_home, "join", INVITE, "--json", FORCE_COLOR="1").stdout


def test_width(atoll_home: Path) -> None:
    done = atoll(atoll_home, "join", INVITE, COLUMNS="44")
    assert max(map(len, done.stderr.decode().splitlines())) <= 44


def test_a_reader_that_goes_away(atoll_home: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*ATOLL, "explain"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=100,
        env=environment(atoll_home),
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_stdout_that_takes_nothing_or_is_closed(atoll_home: Path) -> None:
    for argv, status in (
        (("ls", "--json"), 73),
        (("ls",), 73),
        (("explain", "nonsense", "--json"), 2),
    ):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*ATOLL, *argv],
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=100,
                env=environment(atoll_home),
                check=False,
            )
        assert done.returncode == status
        assert done.stderr.startswith(b"E")
        assert b"Traceback" not in done.stderr
        assert b"E000" not in done.stderr
    closed = " ".join(["exec", *ATOLL, "explain", ">&-"])
    done = subprocess.run(
        ["sh", "-c", closed],
        stderr=subprocess.PIPE,
        timeout=100,
        env=environment(atoll_home),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_asking(atoll_home: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKING],
        capture_output=True,
        timeout=100,
        env=environment(atoll_home),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"\nstopped\n")


def test_first_ctrl_c_drains_the_child_and_the_second_kills_it(atoll_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(atoll_home),
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stdout.read() == ""


def test_a_closed_terminal_asks_the_child_to_end_however_often_it_is_told(atoll_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(atoll_home),
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGHUP
        assert process.stdout.read() == ""


def test_nohup_is_respected(atoll_home: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + STARTER
    process = subprocess.Popen(
        [sys.executable, "-c", ignoring, STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(atoll_home),
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_script_of_ones_own_ends_with_whoever_started_it(
    number: signal.Signals, atoll_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FOR_EVER)
    starter = STARTER.replace('"-c", sys.argv[1]', '"-m", "atoll.node.cli.run_script", sys.argv[1]')
    command = [sys.executable, "-c", starter, str(tmp_path / "mine.py")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(atoll_home)
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert (
            process.stdout.read() == "end\n"
        )  # up to the end of the last process that could write
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)


def test_the_child_sees_the_end_of_whoever_started_it(atoll_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, UNTIL_STDIN_ENDS],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(atoll_home),
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
        process.kill()
        process.wait()
        assert process.stdout.read() == "end\n"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("import helper; print(sys.argv[1:], __name__, helper.x)", 0, "['--a', '1'] __main__ 7"),
        (
            "from atoll.collectives.errors import ModelMismatchError as E; raise E('2 of 3 tensors differ')",
            76,
            "E301 2 of 3 tensors differ",
        ),
        ("sys.exit(5)", 5, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise RuntimeError('mine')", 1, "Traceback"),
    ],
)
def test_a_script_of_ones_own(
    body: str, status: int, words: str, atoll_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("x = 7")
    (tmp_path / "mine.py").write_text(f"import sys\n{body}\n")
    command = [
        sys.executable,
        "-m",
        "atoll.node.cli.run_script",
        str(tmp_path / "mine.py"),
        "--a",
        "1",
    ]
    read, write = os.pipe()  # it ends with its stdin
    done = subprocess.run(
        command,
        stdin=read,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(atoll_home),
        check=False,
    )
    os.close(read)
    os.close(write)
    assert done.returncode == status
    assert words in done.stdout + done.stderr
    assert ("Traceback" in done.stderr) == (words == "Traceback")
