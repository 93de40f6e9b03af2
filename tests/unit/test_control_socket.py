"""The real client against the real server over a real socket, with the reference service: one
script, one run.
"""

from __future__ import annotations

import gc
import os
import pty
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from reference_node import INVITE, PEER, RUN, SETTINGS, Node, ReferenceService, digest

from atoll.collectives.errors import (
    AtollError,
    ConfigError,
    LocalProtocolError,
    ModelMismatchError,
    NetworkError,
    NotAdmittedError,
    RefusedBySystemError,
    StateError,
    SwarmClosedError,
    VersionMismatchError,
)
from atoll.collectives.layout import Layout, make_layout
from atoll.collectives.outcomes import Share
from atoll.collectives.script_swarm import Swarm
from atoll.node.cli.daemon import _interrupt
from atoll.node.client.link import Link
from atoll.node.client.reattach import Reattach
from atoll.node.control import protocol as p
from atoll.node.control.address import check_peer, peer_uid
from atoll.node.control.server import ControlServer
from atoll.node.home.failures import failure
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient, RunSwarm, join
from atoll.node.joining.joining import Lines

LAYOUT = make_layout([("w", (3, 4)), ("b", (4,))])
N = LAYOUT.numel


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    yield started
    started.stop()
    assert started.defects == []


@pytest.fixture
def swarm(node: Node, tmp_path: Path) -> Iterator[RunSwarm]:
    joined = join(INVITE, home=tmp_path, private=False, progress=lambda *_: None)
    yield joined
    joined.close()


def fill(value: float) -> Callable[[torch.Tensor], None]:
    """Writes 0, 1, 2, … + ``value``."""

    def write(out: torch.Tensor) -> None:
        out.copy_(torch.arange(N) + value)

    return write


def all_of(value: float) -> Callable[[torch.Tensor], None]:
    """Writes ``value`` everywhere."""

    def write(out: torch.Tensor) -> None:
        out.fill_(value)

    return write


def read(view: Any) -> torch.Tensor:
    out = torch.empty(N)
    view.copy_into(out)
    return out


def open_fds() -> int:
    return len(os.listdir("/dev/fd"))


# ── a run ──


def test_found_contribute_commit(node: Node, swarm: RunSwarm) -> None:
    assert isinstance(swarm, Swarm)
    assert (swarm.peer, swarm.run_id, swarm.settings) == (PEER, RUN, SETTINGS)
    with pytest.raises(LocalProtocolError, match="open"):
        swarm.anchor()

    base = swarm.open(LAYOUT, fill(1.0))
    assert (base.round, base.numel) == (0, N)
    assert torch.equal(read(base), torch.arange(N) + 1.0)
    assert base.digest == digest(torch.arange(N) + 1.0)

    pending = swarm.contribute(samples=8, write=all_of(0.25))
    outcome = pending.wait(60)
    assert (outcome.status, outcome.round, outcome.counted, outcome.contributors) == (
        "committed",
        1,
        True,
        (Share(PEER, 8),),
    )
    assert pending.done()
    assert pending.wait(0) == outcome

    new = swarm.anchor()  # a second view beside the base
    assert new.round == 1
    assert torch.equal(read(new), torch.arange(N) + 0.75)
    part = torch.empty(2)
    new.copy_into(part, 10)
    assert part.tolist() == [10.75, 11.75]
    assert torch.equal(read(base), torch.arange(N) + 1.0)
    with pytest.raises(LocalProtocolError, match="holds 2 anchors"):
        swarm.anchor()
    base.release()
    base.release()
    with pytest.raises(LocalProtocolError, match="released"):
        read(base)
    new.release()
    assert [member.peer for member in swarm.members()] == [PEER]


def test_open_waits_for_the_members_that_a_run_is_to_begin_with(node: Node, tmp_path: Path) -> None:
    said = list[str]()
    waits = threading.Event()

    def progress(stage: str, done: int, total: int) -> None:
        said.append(stage)
        waits.set()

    node.service.run.begun = False
    with join(INVITE, home=tmp_path, private=False, progress=progress) as swarm:
        said.clear()
        waits.clear()
        opened = threading.Thread(target=lambda: swarm.open(LAYOUT, fill(1.0)).release())
        opened.start()
        assert waits.wait(60)
        assert opened.is_alive()
        with NodeClient.connect(find_paths(tmp_path)) as client:
            assert client.ask(p.BeginRun, "").value == {"run_id": RUN, "begun": True, "missing": 1}
            assert client.ask(p.BeginRun, "").value["begun"] is False
        opened.join(60)
        assert not opened.is_alive()
    wait, begins = said
    assert wait.startswith("waiting for 1 more peer (1 of 2 are there); begin without: atoll begin")
    assert begins == "training begins"


def test_a_script_may_begin_at_once(node: Node, tmp_path: Path) -> None:
    node.service.run.begun = False
    with join(INVITE, home=tmp_path, private=False, begin=True) as swarm:
        swarm.open(LAYOUT, fill(1.0)).release()
    assert node.service.run.begun


def test_enter_in_the_terminal_of_a_script_begins(node: Node, tmp_path: Path) -> None:
    node.service.run.begun = False
    code = (
        "import os, sys\n"
        "os.login_tty(int(sys.argv[3]))  # the terminal is this process's own\n"
        "from atoll.node import join\n"
        "from atoll.collectives.layout import make_layout\n"
        "swarm = join(sys.argv[1], home=sys.argv[2], private=False)\n"
        "swarm.open(make_layout([('w', (3, 4)), ('b', (4,))]), lambda flat: flat.fill_(1.0)).release()\n"
        "print('opened', flush=True)\n"
    )
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", code, INVITE, str(tmp_path), str(end)]
    with (
        os.fdopen(terminal, "r+b", buffering=0) as screen,
        subprocess.Popen(command, pass_fds=[end]) as script,
    ):
        os.close(end)
        seen = b""
        while b"Enter begins without" not in seen:
            seen += screen.read(4096)
        screen.write(b"\n")
        while b"opened" not in seen:
            seen += screen.read(4096)
        assert script.wait(60) == 0
    assert b"training begins" in seen


def test_many_rounds_under_a_lease(node: Node, swarm: RunSwarm) -> None:
    base = swarm.open(LAYOUT, fill(0.0))
    for round_ in range(1, 12):
        assert swarm.contribute(samples=1, write=all_of(1.0)).wait(60).round == round_
    assert torch.equal(read(base), torch.arange(N) + 0.0)
    newest = swarm.anchor()
    assert torch.equal(read(newest), torch.arange(N) - 11.0)


def test_the_late_outcome(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    node.service.run.hold = True
    pending = swarm.contribute(samples=1, write=fill(0.0))
    early = pending.wait(0.01)
    assert (early.status, early.round, early.counted, early.reason) == (
        "open",
        1,
        False,
        "not decided yet",
    )
    assert not pending.done()
    with pytest.raises(LocalProtocolError, match="undecided"):
        swarm.contribute(samples=1, write=lambda out: pytest.fail("written while frozen"))
    node.service.run.hold = False
    assert pending.wait().counted
    swarm.contribute(samples=1, write=fill(0.0))


def test_nothing_is_frozen_when_write_fails(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()

    def interrupted(out: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swarm.contribute(samples=1, write=interrupted)
    assert swarm.contribute(samples=1, write=fill(0.0)).wait(60).counted
    with pytest.raises(LocalProtocolError):
        swarm.contribute(samples=0, write=fill(0.0))


def test_all_reduce(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0))
    flat = torch.arange(6.0).view(2, 3)
    pending = swarm.all_reduce(flat, weight=2, op_id="mean", deadline_s=5)
    outcome = pending.wait(60)
    assert (outcome.status, outcome.contributors) == ("committed", (Share(PEER, 2),))
    assert torch.equal(flat, torch.arange(6.0).view(2, 3))
    assert pending.wait() is outcome
    late = swarm.all_reduce(flat, weight=1, op_id="late", deadline_s=0)
    assert late.wait(60).status == "open"
    with pytest.raises(LocalProtocolError, match="called already"):
        swarm.all_reduce(torch.ones(1), weight=1, op_id="mean", deadline_s=5)
    for bad in (torch.ones(2, dtype=torch.complex64), torch.ones(2, 3).t(), torch.empty(0)):
        with pytest.raises(LocalProtocolError):
            swarm.all_reduce(bad, weight=1, op_id="bad", deadline_s=1)
    swarm.members()  # the node has handled the closing
    assert node.service.run.session is not None
    assert node.service.run.session.reductions == {}


@pytest.mark.filterwarnings("ignore:operation 'dropped:RuntimeWarning")
@pytest.mark.parametrize("decided", [True, False])
def test_operations_whose_handles_are_dropped_leave_nothing_behind(
    node: Node, swarm: RunSwarm, decided: bool
) -> None:
    swarm.open(LAYOUT, fill(0.0))
    node.service.run.hold = not decided
    for number in range(20):
        handle = swarm.all_reduce(torch.ones(5), op_id=f"dropped {number}")
        if number % 2:
            assert handle.wait(0.0 if not decided else 60).status == (
                "committed" if decided else "open"
            )
        del handle
    node.service.run.hold = False
    flat, held = torch.ones(5), swarm.all_reduce(torch.ones(5), op_id="held")
    assert swarm.all_reduce(flat, op_id="last", op="sum").wait(60).counted
    swarm.members()  # the node has handled the closing
    assert node.service.run.session is not None
    assert node.service.run.session.reductions.keys() == {"held"}
    assert held.wait(60).counted


def decide(node: Node, op_id: str) -> None:
    """Have the node decide an operation that it has held."""
    session = node.service.run.session
    assert session is not None
    node.do(lambda: session.reduce_start(op_id))


def test_a_call_of_an_id_that_is_open_is_refused_and_ends_no_other_call(
    node: Node, swarm: RunSwarm
) -> None:
    swarm.open(LAYOUT, fill(0.0))
    node.service.run.hold = True
    first = swarm.all_reduce(torch.ones(5), op_id="same", op="sum")
    swarm.members()  # the node has handled the start
    node.service.run.hold = False
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="already"):
            swarm.all_reduce(torch.ones(5), op_id="same", op="sum")
    # A call closes what was let go before it.
    assert swarm.all_reduce(torch.ones(5), op_id="other").wait(60).counted
    decide(node, "same")
    assert first.wait(60).counted
    with pytest.raises(LocalProtocolError, match="called already"):
        swarm.all_reduce(torch.ones(5), op_id="same", op="sum")


def test_report_leave_and_reopen(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    swarm.report({"step": 3, "loss": 2.5, "x" * 100: 1.0})
    swarm.report({"loss": 2.0})
    swarm.report({f"m{n}": n for n in range(100)})
    session = node.service.run.session
    assert session is not None
    swarm.leave()
    assert session.left
    assert session.metrics["step"] == 3.0
    assert session.metrics["loss"] == 2.0
    assert (
        len(session.metrics) == 3 + 63
    )  # the first report went out at once; of the rest 64 names were kept, one of them known
    swarm.open(LAYOUT, fill(5.0)).release()  # open again: the newest anchor
    with pytest.raises(LocalProtocolError, match="another model"):
        swarm.open(make_layout([("w", (2,))]), fill(0.0))
    swarm.close()
    swarm.close()
    node.until(lambda: node.service.run.session is None)
    for call in (swarm.anchor, swarm.members, lambda: swarm.contribute(samples=1, write=fill(0.0))):
        with pytest.raises(SwarmClosedError):
            call()


def test_another_model_is_refused_by_name(node: Node, tmp_path: Path, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    swarm.close()
    node.until(lambda: node.service.run.session is None)
    with join("reference", home=tmp_path, private=False) as other:
        with pytest.raises(ModelMismatchError) as refused:
            other.open(make_layout([("w", (3, 5)), ("b", (4,))]), fill(0.0))
        assert "w  yours [3, 5]  run [3, 4]" in refused.value.why
        with pytest.raises(LocalProtocolError, match="starts at 3, expected 0"):
            other.open(Layout((LAYOUT.tensors[0].__class__("w", (1,), 3),), 1), fill(0.0))
        other.open(LAYOUT, lambda out: pytest.fail("the run is founded")).release()


def test_progress_and_a_script_that_gives_up(node: Node, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    node.service.blocked = trio.Event()
    swarm = join(RUN, home=tmp_path, private=False, progress=lambda *stage: stages.append(stage))
    failed: list[BaseException] = []

    def script() -> None:
        try:
            swarm.open(LAYOUT, fill(0.0))
        except AtollError as error:
            failed.append(error)

    thread = threading.Thread(target=script)
    thread.start()
    node.until(lambda: node.service.opening == 1)
    while not stages:
        time.sleep(0.001)
    assert stages == [("fetching state", 40, 100)]
    swarm.close()
    thread.join(10)
    assert [type(error) for error in failed] == [SwarmClosedError]
    node.until(lambda: node.service.opening == 0)


def test_a_waiting_script_that_dies_is_noticed(node: Node) -> None:
    node.service.blocked = trio.Event()
    link = Link.connect(node.paths.control_socket)
    link.submit(lambda id_: p.Open(id_, RUN, LAYOUT))
    node.until(lambda: node.service.opening == 1)
    link.close()
    node.until(lambda: node.service.opening == 0)
    assert node.service.run.session is None


def test_several_threads(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    failures: list[BaseException] = []

    def chatter() -> None:
        try:
            for n in range(50):
                assert swarm.members()[0].peer == PEER
                swarm.report({"n": n})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=chatter) for _ in range(4)]
    for thread in threads:
        thread.start()
    rounds = [swarm.contribute(samples=1, write=fill(0.0)).wait(60).round for _ in range(20)]
    for thread in threads:
        thread.join(30)
    assert rounds == list(range(1, 21))
    assert failures == []


def test_no_descriptor_is_lost(node: Node, tmp_path: Path) -> None:
    def session() -> None:
        with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
            swarm.open(LAYOUT, fill(0.0))
            swarm.contribute(samples=1, write=fill(0.0)).wait(60)
            swarm.all_reduce(torch.ones(3), weight=1, op_id="op", deadline_s=1).wait(60)
        node.until(lambda: node.service.run.session is None)
        node.until(lambda: not node.server._connections)

    session()
    gc.collect()
    before = open_fds()
    for _ in range(3):
        session()
    gc.collect()
    assert open_fds() == before


# ── the node goes and comes back ──


def test_the_node_is_lost_and_comes_back(tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir()
    node = Node(tmp_path, lambda: ReferenceService(home))
    with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
        base = swarm.open(LAYOUT, fill(0.0))
        assert swarm.contribute(samples=1, write=all_of(1.0)).wait(60).counted
        node.service.run.hold = True
        lost = swarm.contribute(samples=3, write=all_of(2.0))
        assert lost.wait(0.01).status == "open"
        node.stop()

        waited = lost.wait(60)
        assert waited.status == "open"
        assert "the node ended" in waited.reason
        assert not lost.done()
        assert torch.equal(read(base), torch.arange(N) + 0.0)
        for call in (
            swarm.anchor,
            lambda: swarm.open(LAYOUT, fill(0.0)),
            lambda: swarm.contribute(samples=1, write=fill(0.0)),
        ):
            with pytest.raises(SwarmClosedError) as closed:
                call()
            assert closed.value.code == "E160"
        assert not swarm.connected
        assert [member.peer for member in swarm.members()] == []
        swarm.report({"loss": 1.0})
        swarm.leave()

        node = Node(tmp_path, lambda: ReferenceService(home))
        while not swarm.connected:
            time.sleep(0.01)
        assert swarm.reattached == 1
        assert swarm.trouble == ""
        outcome = lost.wait(60)
        assert (outcome.status, outcome.counted, outcome.round) == ("lost", False, 0)
        new = swarm.anchor()
        assert new.round == 1
        assert torch.equal(read(new), torch.arange(N) - 1.0)
        assert torch.equal(read(base), torch.arange(N) + 0.0)  # still the old node's memory
        base.release()
        assert swarm.contribute(samples=1, write=all_of(1.0)).wait(60).round == 2
    node.stop()


def test_an_operation_of_a_lost_node_ends_none_of_the_next(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
        swarm.open(LAYOUT, fill(0.0)).release()
        node.service.run.hold = True
        lost = swarm.all_reduce(torch.ones(5), op_id="same")
        node.stop()
        with pytest.raises(SwarmClosedError):
            swarm.all_reduce(torch.ones(5), op_id="same")
        node = Node(tmp_path)
        while not swarm.connected:
            time.sleep(0.01)
        node.service.run.hold = True
        again = swarm.all_reduce(torch.ones(5), op_id="same")
        assert lost.wait(60).status == "open"
        swarm.members()  # the node has handled the start, and the end of the other if there was one
        node.service.run.hold = False
        decide(node, "same")
        assert again.wait(60).counted
    node.stop()


def test_what_was_counted_while_the_node_was_away(tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir()
    node = Node(tmp_path, lambda: ReferenceService(home))
    with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
        swarm.open(LAYOUT, fill(0.0)).release()
        (home / "mute").touch()
        pending = swarm.contribute(samples=3, write=all_of(2.0))
        node.until(lambda: len(node.service.run.log) == 1)
        node.stop()
        (home / "mute").unlink()
        assert pending.wait(0).status == "open"
        node = Node(tmp_path, lambda: ReferenceService(home))
        while not pending.done():
            time.sleep(0.01)
        outcome = pending.wait()
        assert (outcome.status, outcome.counted, outcome.round) == ("committed", True, 1)
    node.stop()


def test_a_run_that_lost_everything_is_founded_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
        base = swarm.open(LAYOUT, fill(7.0))
        node.stop()
        node = Node(tmp_path)
        with pytest.raises(SwarmClosedError):
            swarm.anchor()
        while not swarm.connected:
            time.sleep(0.01)
        new = swarm.anchor()
        assert new.round == 0
        assert torch.equal(read(new), read(base))
    node.stop()


def test_a_frozen_node_is_taken_for_lost(
    node: Node, swarm: RunSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.client.swarm.ANSWER_S", 0.2)
    base = swarm.open(LAYOUT, fill(3.0))
    thaw = threading.Event()
    assert node._token is not None
    node._token.run_sync_soon(thaw.wait)
    pending = swarm.contribute(samples=1, write=all_of(1.0))  # does not wait for the node
    assert pending.wait(0.05).status == "open"
    with pytest.raises(SwarmClosedError, match=r"did not answer within 0\.2 s"):
        swarm.anchor()
    assert torch.equal(read(base), torch.arange(N) + 3.0)
    thaw.set()
    while not pending.done():
        time.sleep(0.01)
    assert pending.wait().counted  # the node had it after all
    assert swarm.reattached == 1
    assert torch.equal(
        read(base), torch.arange(N) + 3.0
    )  # what was leased over the old connection is not written
    base.release()
    monkeypatch.undo()
    for _ in range(4):
        assert swarm.contribute(samples=1, write=all_of(1.0)).wait(60).counted
    assert torch.equal(read(swarm.anchor()), torch.arange(N) - 2.0)


def test_close_while_the_node_is_sought(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    node.stop()
    with pytest.raises(SwarmClosedError):
        swarm.anchor()
    seeking = swarm._reattach
    assert seeking is not None
    assert seeking.running
    swarm.close()
    assert not seeking.running


def test_a_loss_seen_while_the_swarm_closes_leaves_no_thread(
    node: Node, swarm: RunSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, go, made = threading.Event(), threading.Event(), list[Reattach]()

    def slowly(
        attempt: Callable[[Callable[[], bool]], None], failed: Callable[[AtollError], None]
    ) -> Reattach:
        seen.set()
        assert go.wait(60)
        made.append(Reattach(attempt, failed))
        return made[-1]

    monkeypatch.setattr("atoll.node.client.swarm.Reattach", slowly)
    swarm.open(LAYOUT, fill(0.0)).release()
    node.stop()
    other = threading.Thread(target=swarm.take_in)
    other.start()
    assert seen.wait(60)
    closing = threading.Thread(target=swarm.close)
    closing.start()
    closing.join(0.3)  # it waits for the other; without the lock it would be over
    go.set()
    other.join(60)
    closing.join(60)
    assert [seeking.running for seeking in made] == [False]


def test_the_node_says_why_it_ends(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    node.service.run.hold = True
    pending = swarm.contribute(samples=1, write=fill(0.0))
    with NodeClient.connect(node.paths) as client:
        client.down()
    assert pending.wait(60).reason.endswith("the node shuts down: asked to")


def test_a_forked_child_holds_nothing(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                swarm.anchor()
                said = "no error"
            except SwarmClosedError as error:
                said = error.message
            os.write(
                write_end,
                f"{said}|{swarm._at.link._socket.fileno() if swarm._at else None}".encode(),
            )
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    assert said == f"this swarm belongs to process {os.getpid()}, not to its forked child {pid}|-1"
    assert (
        swarm.contribute(samples=1, write=fill(0.0)).wait(60).counted
    )  # the parent's connection is unharmed


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = Lines(lambda: now[0])
    for at, stage, done, total in [
        (0.0, "finding", 0, 0),
        (9.0, "finding", 0, 0),
        (9.1, "state", 0, 9),
        (9.2, "state", 3, 9),
        (11.5, "state", 4, 9),
        (11.6, "ready", 1, 1),
    ]:
        now[0] = at
        lines(stage, done, total)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "atoll: finding",
        "atoll: state 0%",
        "atoll: state 44%",
        "atoll: ready 100%",
    ]


def test_the_other_end_must_be_ours() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_uid(ours) in (os.geteuid(), None)
        check_peer(ours)

    class Foreign:
        def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
            return (
                struct.pack("3i", 1, os.geteuid() + 1, 1)
                if sys.platform == "linux"
                else struct.pack("=II", 0, os.geteuid() + 1)
            )

    with pytest.raises(NotAdmittedError, match="belongs to user"):
        check_peer(Foreign())


# ── commands ──


def test_commands(node: Node) -> None:
    with NodeClient.connect(node.paths) as client:
        assert (client.node.pid, client.node.private) == (os.getpid(), False)
        assert client.status() == {"schema": 1, "pid": os.getpid(), "round": 0, "frozen": False}
        assert client.runs() == [{"run": RUN}]
        assert client.peers() == [{"peer": PEER}]
        assert client.find_run("reference").run_id == RUN
        with pytest.raises(ConfigError) as unknown:
            client.peers("nothing")
        assert unknown.value.key == "run"
        with pytest.raises(NotAdmittedError) as wrong:
            client.join(p.JoinRequest(invite="atoll2:wrong"))
        assert wrong.value.hint == "Ask for another."
        with pytest.raises(ConfigError, match="not both"):
            client.join(p.JoinRequest())
        client.leave("reference")
        with pytest.raises(LocalProtocolError, match="Document of"):
            client.peers("much")
        assert client.runs() == [{"run": RUN}]  # the connection lives on
        events = client.events()
        assert [next(events) for _ in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_no_node(tmp_path: Path) -> None:
    with pytest.raises(NetworkError) as nobody:
        NodeClient.connect(find_paths(tmp_path))
    assert (nobody.value.code, nobody.value.exit_code) == ("E003", 3)
    with pytest.raises(NetworkError):
        join(INVITE, home=tmp_path, private=False)


def test_a_defect_of_the_node_is_told_and_survived(node: Node) -> None:
    with NodeClient.connect(node.paths) as client:
        with pytest.raises(LocalProtocolError, match="ZeroDivisionError") as defect:
            client.peers("defect")
        assert defect.value.code == "E142"
        assert client.runs() == [{"run": RUN}]
    assert [type(error) for error in node.defects] == [ZeroDivisionError]
    node.defects.clear()


def test_what_the_system_refuses_a_request_is_no_defect(node: Node) -> None:
    with NodeClient.connect(node.paths) as client:
        with pytest.raises(RefusedBySystemError, match="could not do Peers: Too many") as refused:
            client.peers("refused")
        assert (refused.value.code, bool(refused.value.hint)) == ("E502", True)
        assert client.runs() == [{"run": RUN}]


def test_a_long_path_finds_its_way(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    node = Node(deep)
    assert len(str(deep / "run" / "control.sock")) > 108
    assert node.paths.control_socket.parent.parent != deep
    assert stat.S_IMODE(node.paths.control_socket.parent.stat().st_mode) == 0o700
    with NodeClient.connect(node.paths) as client:
        assert client.runs() == [{"run": RUN}]
    node.paths.control_socket.parent.chmod(0o777)
    with pytest.raises(NotAdmittedError, match="not a private folder"):
        NodeClient.connect(node.paths)
    node.stop()
    node.paths.control_socket.parent.rmdir()  # empty: the socket file is gone


def test_the_socket_is_private_and_goes_with_the_node(tmp_path: Path) -> None:
    node = Node(tmp_path)
    path = node.paths.control_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    node.stop()
    assert not path.exists()


def test_stale_and_living_sockets(tmp_path: Path) -> None:
    paths = find_paths(tmp_path)
    paths.ensure()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(paths.control_socket))  # as a killed node leaves it
    node = Node(tmp_path)
    with pytest.raises(StateError) as taken:
        trio.run(ControlServer(ReferenceService(), paths.control_socket).run)
    assert taken.value.code == "E102"
    with NodeClient.connect(paths) as client:
        assert client.runs() == [{"run": RUN}]
    node.stop()
    paths.control_socket.write_text("a file")
    with pytest.raises(StateError, match="not a socket"):
        trio.run(ControlServer(ReferenceService(), paths.control_socket).run)


# ── clients that misbehave ──


def talk(node: Node, data: bytes) -> list[p.Answer]:
    """Say ``data`` and listen until the node closes the connection."""
    frames, answers = p.answer_frames(), []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(node.paths.control_socket))
        try:
            sock.sendall(data)
            while got := sock.recv(65536):
                answers += frames.feed(got)
        except (BrokenPipeError, ConnectionResetError):
            pass
    return answers


HELLO = p.frame(p.Hello(1, (1,), 5))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "E141"),
        (struct.pack(">I", p.MAX_FRAME_BYTES + 1) + b"x" * 100, "E141"),
        (HELLO + struct.pack(">I", 0xFFFFFFFF), "E141"),
        (HELLO + struct.pack(">I", 3) + b"\xc1\xc1\xc1", "E141"),
        (p.frame(p.Status(1)), "E142"),
        (p.frame(p.Hello(1, (7, 8), 5)), "E140"),
        (os.urandom(100_000), "E141"),
    ],
)
def test_garbage_ends_only_its_own_connection(
    node: Node, swarm: RunSwarm, data: bytes, code: str
) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    answers = talk(node, data)
    if answers:  # a reset may eat them
        last = answers[-1]
        assert isinstance(last, p.Failure)
        assert (last.id, last.code) == (0, code)
    assert swarm.contribute(samples=1, write=fill(0.0)).wait(60).counted


def test_out_of_place_requests_are_refused_one_by_one(node: Node) -> None:
    link = Link.connect(node.paths.control_socket)
    for make in (
        p.Lease,
        p.Found,
        p.Members,
        p.Depart,
        lambda id_: p.Contribute(id_, b"c" * 16, 1),
        lambda id_: p.Hello(id_, (1,), 1),
    ):
        with pytest.raises(LocalProtocolError):
            link.ask(make, timeout_s=60)
    link.post(p.Release(2), may_drop=False)
    link.post(p.Report({"x": 1.0}), may_drop=False)
    assert link.ask(p.Runs, timeout_s=60).value == {"runs": [{"run": RUN}]}
    opened = link.submit(lambda id_: p.Open(id_, RUN, LAYOUT))
    link.finish(opened, timeout_s=60)
    with pytest.raises(LocalProtocolError, match="already"):
        link.ask(lambda id_: p.Open(id_, RUN, LAYOUT), timeout_s=60)
    with pytest.raises(ConfigError, match="another script"):
        Link.ask(
            other := Link.connect(node.paths.control_socket),
            lambda id_: p.Open(id_, RUN, LAYOUT),
            timeout_s=60,
        )
    other.close()
    link.close()


def test_a_scripts_process_is_the_one_that_the_kernel_names(node: Node) -> None:
    """What `atoll down --scripts` interrupts: in a container a script's own number is that of
    another process here.
    """
    frames, answers = p.answer_frames(), list[p.Answer]()
    said = p.frame(p.Hello(1, (p.VERSION,), 1)) + p.frame(p.Open(2, RUN, LAYOUT))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(node.paths.control_socket))
        sock.sendall(said)
        while len(answers) < 2:
            answers += frames.feed(sock.recv(65536))
        assert node.service.script_pid == (os.getpid() if sys.platform == "linux" else 1)
    for pid in (-1, 1 << 31):
        (answer,) = talk(node, p.frame(p.Hello(1, (p.VERSION,), pid)))
        assert isinstance(answer, p.Failure)


def test_a_process_that_has_a_scripts_number_by_now_is_not_interrupted() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as another:
        _interrupt(another.pid, set[int])  # the script has ended since the node named it
        another.communicate(b"go on\n", timeout=60)
    assert another.returncode == 0
    with subprocess.Popen(["sleep", "60"]) as script:
        _interrupt(script.pid, lambda: {script.pid})
        assert script.wait(60) == -signal.SIGINT
    _interrupt(script.pid, lambda: {script.pid})  # gone
    behind = 'trap "" INT; exec sleep 60'
    with subprocess.Popen(["sh", "-c", behind]) as deaf:
        while Path(f"/proc/{deaf.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
        _interrupt(deaf.pid, lambda: {deaf.pid})
        assert deaf.wait(60) == -signal.SIGTERM


def test_versions_that_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "old.sock"
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:  # a node of another version
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as sock:
                sock.recv(65536)
                sock.sendall(
                    p.frame(
                        failure(
                            0,
                            VersionMismatchError(
                                "the node speaks control protocol 9", hint="Restart the node"
                            ),
                        )
                    )
                )

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(VersionMismatchError) as refused:
            Link.connect(path)
        thread.join()
    assert (refused.value.code, refused.value.hint) == ("E140", "Restart the node")


def test_a_node_of_the_first_version_is_asked_nothing_that_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "old.sock"
    tmp_path.chmod(0o700)
    asked = list[p.Request]()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            frames = p.request_frames()
            with listener.accept()[0] as sock:
                while data := sock.recv(65536):
                    for request in frames.feed(data):
                        asked.append(request)
                        if isinstance(request, p.Hello):
                            assert 1 in request.versions  # what such a node looks for
                            sock.sendall(p.frame(p.Welcome(request.id, 1, os.getpid(), PEER)))
                        else:
                            assert isinstance(request, p.Down)
                            sock.sendall(p.frame(p.Done(request.id)))
                            return

        thread = threading.Thread(target=answer)
        thread.start()
        with NodeClient(Link.connect(path)) as client:
            with pytest.raises(VersionMismatchError, match="earlier version of atoll") as refused:
                client.ask(p.Pause, RUN)
            client.down()  # what its hint says can be done
        thread.join()
    assert refused.value.hint == "Restart the node: atoll down, then atoll up"
    assert [type(request) for request in asked] == [p.Hello, p.Down]


def test_a_script_of_the_first_version_goes_on_with_a_new_node(node: Node) -> None:
    for versions, spoken in (
        ((1,), 1),
        ((1, 2), 2),
        ((2, 3), 3),
        ((3, 4), 4),
        ((5, 99), 5),
        ((6, 7), 6),
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(node.paths.control_socket))
            sock.sendall(p.frame(p.Hello(1, versions, os.getpid())))
            (welcome,) = p.answer_frames().feed(sock.recv(65536))
        assert isinstance(welcome, p.Welcome)
        assert welcome.version == spoken


def test_a_client_that_does_not_read_is_dropped(node: Node, swarm: RunSwarm) -> None:
    swarm.open(LAYOUT, fill(0.0)).release()
    deaf = socket.socket(socket.AF_UNIX)
    deaf.connect(str(node.paths.control_socket))
    deaf.settimeout(20)
    deaf.sendall(HELLO)
    node.until(lambda: len(node.server._connections) == 2)
    asked = 0

    def ask_for_ever() -> None:
        nonlocal asked
        while True:
            asked += deaf.send(p.frame(p.Status(1)))

    with deaf, pytest.raises((BrokenPipeError, ConnectionResetError)):
        ask_for_ever()
    assert asked > 10_000
    assert swarm.contribute(samples=1, write=fill(0.0)).wait(60).counted


def test_a_silent_crowd_does_not_lock_the_node_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.control.connection.HELLO_S", 0.2)
    crowd = []
    for _ in range(64):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(node.paths.control_socket))
        crowd.append(sock)
    with NodeClient.connect(
        node.paths
    ) as client:  # waits in the backlog until the silent ones were closed
        assert client.runs() == [{"run": RUN}]
    for sock in crowd:
        sock.close()


def test_a_script_that_joins_is_expected_to_attach_until_it_does_or_is_gone(
    node: Node, tmp_path: Path
) -> None:
    expected = node.service.expected
    with NodeClient.connect(node.paths) as client:  # a command attaches nothing
        client.find_run("reference")
        assert expected == []
    with join("reference", home=tmp_path, private=False) as swarm:
        assert expected == [os.getpid()]
        swarm.open(LAYOUT, lambda initial: None).release()
        assert expected == []
    swarm = join("reference", home=tmp_path, private=False)
    assert expected == [os.getpid()]
    swarm.close()
    node.until(lambda: not expected)


def test_a_script_says_what_it_prepares_and_shows_what_the_model_has_learned(
    node: Node, tmp_path: Path
) -> None:
    shown = node.service.run.shown
    with join("reference", home=tmp_path, private=False) as swarm:
        swarm.show_answer(0, "too", "early")
        swarm.prepares("loads the run's model")
        node.until(lambda: node.service.prepared == ["loads the run's model"])
        swarm.open(LAYOUT, lambda initial: None).release()
        swarm.prepares("nothing any more")
        swarm.show_answer(3, "What is it?", "x" * 5000)
        swarm.show_evaluation(3, 50_000, 1.25)
        node.until(lambda: len(shown) == 2)
        assert shown == [
            p.ShowAnswer(3, "What is it?", "x" * 4096),
            p.ShowEvaluation(3, 50_000, 1.25),
        ]
    assert node.service.prepared == ["loads the run's model"]
    assert node.defects == []


def test_a_node_of_an_earlier_version_is_not_told_what_it_does_not_know(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p, "VERSION", 5)  # the node's, which shares this process
    with join("reference", home=tmp_path, private=False) as swarm:
        swarm.prepares("loads the run's model")
        swarm.open(LAYOUT, lambda initial: None).release()
        swarm.show_evaluation(3, 50_000, 1.25)
        swarm.report({"loss": 1.0})
        node.until(lambda: "loss" in node.service.run.session.metrics)
    assert (node.service.prepared, node.service.run.shown) == ([], [])


def test_a_script_says_goodbye_with_the_exception_that_ends_it(node: Node, tmp_path: Path) -> None:
    """Nothing at all where it is cut off."""
    heard = node.service.run.farewells
    swarm = join(INVITE, home=tmp_path, private=False, progress=lambda *_: None)
    swarm.open(LAYOUT, fill(0.0)).release()
    swarm.close()
    node.until(lambda: len(heard) == 1)

    def fails() -> None:
        with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
            swarm.open(LAYOUT, fill(0.0)).release()
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fails()
    node.until(lambda: len(heard) == 2)
    swarm = join(INVITE, home=tmp_path, private=False, progress=lambda *_: None)
    swarm.open(LAYOUT, fill(0.0)).release()
    assert swarm._at is not None
    swarm._at.link.close("cut off")
    node.until(lambda: len(heard) == 3)
    swarm.close()
    assert heard == ["", "KeyError: 'mine'", None]
