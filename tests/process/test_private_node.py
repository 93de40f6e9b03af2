"""Private nodes as real processes: they end with their script, however that ends, and leave nothing
behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from seeds import daily

from atoll.node.home.lifecycle import NodeFile, NodeLock, read_node_file
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

REFERENCE = Path(__file__).resolve().parent.parent / "reference_node.py"
BEFORE = f"""
import json, os, signal, sys, time
from atoll.collectives.errors import AtollError
from atoll.node import join
COMMAND = (sys.executable, {str(REFERENCE)!r})

def say(**what):
    print(json.dumps(what), flush=True)

def enter(**more):
    return join("atoll2:reference", progress=lambda *_: None, command=COMMAND, **more)
"""


class Script:
    """A script in a process of its own; each of its lines is a JSON object."""

    def __init__(self, text: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEFORE + text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin: IO[str] = self.process.stdin
        self._stdout: IO[str] = self.process.stdout

    def hear(self) -> Any:
        """Its next line."""
        line = self._stdout.readline()
        assert line, "the script ended early"
        return json.loads(line)

    def go_on(self) -> None:
        """Release a script that waits in ``input()``."""
        self._stdin.write("\n")
        self._stdin.flush()

    def end(self) -> int:
        """Wait for it."""
        code = self.process.wait(60)
        self._stdin.close()
        self._stdout.close()
        return code


@pytest.fixture
def script(atoll_home: Path) -> Iterator[Callable[[str], Script]]:
    started: list[Script] = []

    def start(text: str) -> Script:
        started.append(Script(text))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.end()


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody waits for yet counts as ended)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return Path(
            "/proc/self"
        ).exists()  # it ended between the two looks; without /proc it is there


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for something another process does."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def nothing_left(home: Path) -> None:
    """No socket, no word of a node, and the home is free."""
    paths = find_paths(home)
    until(lambda: not paths.control_socket.exists() and read_node_file(paths) is None)
    NodeLock.acquire(paths).release()


def test_it_ends_with_the_swarm(atoll_home: Path, script: Callable[[str], Script]) -> None:
    running = script("""
with enter() as swarm:
    say(node=swarm._entry.dial._node.pid, peer=swarm.peer)
    input()
say(closed=True)
input()
""")
    said = running.hear()
    assert said["peer"] == "reference"
    with NodeClient.connect(find_paths(atoll_home)) as client:  # tools see it too
        assert (client.node.pid, client.node.private, client.node.parent_pid) == (
            said["node"],
            True,
            running.process.pid,
        )
    running.go_on()
    assert running.hear() == {"closed": True}
    assert gone(said["node"])  # close() has waited for it
    running.go_on()
    assert running.end() == 0
    nothing_left(atoll_home)


@pytest.mark.parametrize(
    ("ending", "code"),
    daily(
        2,
        (
            ("", 0),
            ("os.kill(os.getpid(), 15)", -15),
            ("sys.exit(3)", 3),
            ("raise ValueError('on purpose')", 1),
            ("os._exit(4)", 4),
        ),
    ),
)
def test_it_ends_with_the_process(
    atoll_home: Path, script: Callable[[str], Script], ending: str, code: int
) -> None:
    running = script(f"""
sys.stderr = open(os.devnull, "w")
swarm = enter()
say(node=swarm._entry.dial._node.pid)
{ending}
""")
    node = running.hear()["node"]
    assert running.end() == code
    until(lambda: gone(node))
    nothing_left(atoll_home)


def test_kill_9_of_the_script_with_children_that_live_on(
    atoll_home: Path, script: Callable[[str], Script]
) -> None:
    running = script("""
import subprocess
swarm = enter()
worker = os.fork()          # like a data loader's worker
if worker == 0:
    sys.stdin.close()
    time.sleep(60)
    os._exit(0)
link = swarm._entry.dial._node._link
holder = subprocess.Popen(["sleep", "60"], pass_fds=[link.fileno()])   # as something forked behind Python's back
say(node=swarm._entry.dial._node.pid, children=[worker, holder.pid])
time.sleep(60)
""")
    said = running.hear()
    try:
        running.process.kill()
        running.process.wait()
        until(lambda: gone(said["node"]))
        assert not any(gone(child) for child in said["children"])
        nothing_left(atoll_home)
    finally:
        for child in said["children"]:
            os.kill(child, signal.SIGKILL)


def test_ctrl_c_is_the_scripts(atoll_home: Path, script: Callable[[str], Script]) -> None:
    running = script("""
swarm = enter()
try:
    say(node=swarm._entry.dial._node.pid)
    time.sleep(60)
except KeyboardInterrupt:
    from atoll.node.joining import NodeClient
    from atoll.node.home.paths import find_paths
    with NodeClient.connect(find_paths()) as client:
        say(interrupted=client.status()["pid"])
swarm.close()
""")
    node = running.hear()["node"]
    running.process.send_signal(signal.SIGINT)
    assert running.hear() == {"interrupted": node}
    assert running.end() == 0
    assert gone(node)
    nothing_left(atoll_home)


def test_kill_9_of_the_node(atoll_home: Path, script: Callable[[str], Script]) -> None:
    running = script("""
import torch
from atoll.collectives.layout import make_layout
def all_of(value):
    return lambda out: torch.full((3,), value, out=out)
def turn(value):
    return swarm.contribute(samples=1, write=all_of(value))
swarm = enter()
base = swarm.open(make_layout([("w", (3,))]), all_of(0.0))
first = turn(1.0).wait()
home = os.environ["ATOLL_HOME"]
open(home + "/hold", "w").close()
undecided = turn(5.0)
old = swarm._entry.dial._node.pid
until = time.monotonic() + 90
while not undecided.call.done and time.monotonic() < until:
    undecided.wait(0.05)
os.kill(old, signal.SIGKILL)
os.unlink(home + "/hold")
lost = undecided.wait(60)
steps = 0
while not undecided.done() and time.monotonic() < until:
    steps += 1              # training goes on
    time.sleep(0.01)
fate = undecided.wait(0)
again = turn(2.0).wait(60)
view = swarm.anchor()
out, start = torch.empty(3), torch.empty(3)
view.copy_into(out)
base.copy_into(start)
say(
    first=first.round, lost=[lost.status, lost.counted], steps=steps > 0, fate=[fate.status, fate.counted],
    again=[again.round, again.counted], anchor=out.tolist(), base=start.tolist(), reattached=swarm.reattached,
    nodes=[old, swarm._entry.dial._node.pid],
)
swarm.close()
""")
    said = running.hear()
    assert running.end() == 0
    nodes = said.pop("nodes")
    assert said == {
        "first": 1,
        "lost": ["open", False],
        "steps": True,
        "fate": ["lost", False],
        "again": [2, True],
        "anchor": [-3.0] * 3,
        "base": [0.0] * 3,
        "reattached": 1,
    }
    assert nodes[0] != nodes[1]
    assert all(gone(node) for node in nodes)
    nothing_left(atoll_home)


@pytest.mark.slow
def test_a_private_node_takes_over_from_a_daemon(
    atoll_home: Path, script: Callable[[str], Script]
) -> None:
    daemon = subprocess.Popen([sys.executable, str(REFERENCE)])
    try:
        until(lambda: read_node_file(find_paths(atoll_home)) is not None)
        running = script("""
from atoll.collectives.layout import make_layout
from atoll.node.joining import find
find.DAEMON_GRACE_S = 0.5
swarm = enter()
swarm.open(make_layout([("w", (3,))]), lambda out: None).release()
say(private=swarm._entry.dial._node and swarm._entry.dial._node.pid)
input()
while not swarm.reattached:
    swarm.take_in()
    time.sleep(0.01)
say(private=swarm._entry.dial._node.pid, round=swarm.anchor().round)
swarm.close()
""")
        assert running.hear() == {"private": None}
        daemon.kill()
        daemon.wait()
        running.go_on()
        said = running.hear()
        assert said["round"] == 0
        assert running.end() == 0
        assert gone(said["private"])
        nothing_left(atoll_home)
    finally:
        daemon.kill()
        daemon.wait()


def test_one_node_a_home(atoll_home: Path, script: Callable[[str], Script]) -> None:
    first = script("swarm = enter()\nsay(node=swarm._entry.dial._node.pid)\ninput()")
    node = first.hear()["node"]
    text = """
try:
    enter(private=PRIVATE)
except AtollError as error:
    say(code=error.code, exit_code=error.exit_code, message=error.message)
"""
    for private in ("None", "True"):
        said = script(text.replace("PRIVATE", private)).hear()
        assert (said["code"], said["exit_code"]) == ("E102", 73)
        assert (
            f"(process {node}) belongs to another script, process {first.process.pid}"
            in said["message"]
        )
    first.go_on()
    assert first.end() == 0
    nothing_left(atoll_home)


def test_it_cannot_start(atoll_home: Path, script: Callable[[str], Script]) -> None:
    said = script("""
strange = "import os, sys; os.write(int(sys.argv[-1]), bytes([104, 105, 10]))"
for COMMAND in [(sys.executable, "-c", "raise SystemExit('no libp2p here')"), ("/nonexistent/node",), (sys.executable, "-c", strange)]:
    try:
        enter()
    except AtollError as error:
        say(code=error.code, message=error.message, why=error.why)
""")
    ended, missing, strange = said.hear(), said.hear(), said.hear()
    assert {ended["code"], missing["code"], strange["code"]} == {"E161"}
    assert ended["message"] == "the private node ended while starting"
    assert ended["why"] == "Its last words: no libp2p here"
    assert missing["message"] == "cannot start a node: /nonexistent/node: No such file or directory"
    assert "something strange" in strange["message"]
    assert said.end() == 0
    nothing_left(atoll_home)


def test_a_stale_word_of_a_node_is_not_believed(
    atoll_home: Path, script: Callable[[str], Script]
) -> None:
    paths = find_paths(atoll_home)
    lock = NodeLock.acquire(paths)
    lock.publish(NodeFile(pid=1, socket=str(paths.control_socket)))
    os.close(lock._fd)  # as kill -9 does: the file stays, the lock goes
    running = script("swarm = enter()\nsay(peer=swarm.peer)\nswarm.close()")
    assert running.hear() == {"peer": "reference"}
    assert running.end() == 0
    nothing_left(atoll_home)


def test_the_client_is_light() -> None:
    program = """
import sys
from atoll.node import join
from atoll.node.joining import NodeClient
from atoll.node.joining import RunSwarm
import atoll.node.client.swarm, atoll.node.control.shared_memory, atoll.node.home.private_node
print(sorted(name for name in ("torch", "numpy", "trio", "libp2p") if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
