"""What other users of the machine learn of a page, and take from it: the real command serves a
recorded run.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cli_kit import ATOLL
from look_kit import made_up, page, write

pytest.importorskip("starlette", reason="the page needs the extra ui")
from atoll.node.look import connections

BROWSER = """
import json, os, stat, sys, urllib.parse, urllib.request
from pathlib import Path
path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(sys.argv[1]).path))
told = Path(sys.argv[2])
command = Path("/proc/self/cmdline").read_bytes().decode() if Path("/proc").exists() else ""
seen = {"argv": sys.argv, "command": command, "file": str(path), "text": path.read_text(),
        "mode": path.stat().st_mode, "folder": path.parent.stat().st_mode}
told.with_suffix(".part").write_text(json.dumps(seen))
told.with_suffix(".part").rename(told)
"""
HALVES = {
    "half a request": b"GET /api/run HTTP/1.1\r\nHost: ",
    "half a body": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nx",
    "nothing": b"",
}


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a page that is served, with the token."""
    recorded = write(tmp_path / "events.jsonl", made_up(12))
    with page("replay", str(recorded), "--ui", home=tmp_path / "home") as found:
        yield found


def place_and_token(address: str) -> tuple[str, int, str]:
    found = re.fullmatch(r"http://([\d.]+):(\d+)/#(.+)", address)
    assert found, address
    return found[1], int(found[2]), found[3]


@contextmanager
def asking(address: str) -> Generator[http.client.HTTPConnection]:
    """A request of the owner's, whose answer is still to come."""
    host, port, token = place_and_token(address)
    connection = http.client.HTTPConnection(host, port, timeout=60)
    with closing(connection):
        connection.request("GET", "/api/run", headers={"X-Atoll-Token": token})
        yield connection


def answered(connection: http.client.HTTPConnection) -> Any:
    """The document of an answer that gives one."""
    with connection.getresponse() as answer:
        assert answer.status == 200
        return json.load(answer)


def held(address: str, stack: ExitStack, count: int, sent: bytes) -> list[socket.socket]:
    """Connections of somebody else, left where they are."""
    host, port, _ = place_and_token(address)
    made = [
        stack.enter_context(socket.create_connection((host, port), timeout=30))
        for _ in range(count)
    ]
    for sock in made:
        with suppress(ConnectionError):  # it has made room already
            sock.sendall(sent)
    return made


def dropped(sock: socket.socket) -> bool:
    """Whether the page ended it; waits for it."""
    try:
        while sock.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("kind", HALVES)
def test_the_owner_is_answered_whatever_others_leave_half_sent(address: str, kind: str) -> None:
    with ExitStack() as stack:
        crowd = held(address, stack, connections.MOST + 6, HALVES[kind])
        with asking(address) as owner:
            assert answered(owner)["quick"]["round"] == 12
        assert all(map(dropped, crowd[:7]))  # the oldest made room for the others and the owner


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_half_sent_request_is_dropped_in_time(address: str) -> None:
    with ExitStack() as stack:
        began = time.monotonic()
        (sock,) = held(address, stack, 1, HALVES["half a request"])
        assert dropped(sock)
        assert time.monotonic() - began > connections.UNASKED_S / 2


def test_the_owners_request_that_waits_outlives_a_crowd(address: str) -> None:
    """Also one that asks for much and reads nothing of it."""
    host, port, token = place_and_token(address)
    greedy = f"GET /uplot.js HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode() * 200
    with ExitStack() as stack, asking(address) as owner:
        changes = answered(owner)["changes"]
        owner.request("GET", f"/api/run?changes={changes}", headers={"X-Atoll-Token": token})
        held(address, stack, connections.MOST + 6, greedy)
        held(address, stack, connections.MOST + 6, HALVES["half a request"])
        assert answered(owner)["changes"] == changes


def test_the_token_is_on_no_command_line(tmp_path: Path) -> None:
    """A browser is given a file that only the user can read, and that is gone once the page is there."""
    recorded = write(tmp_path / "events.jsonl", made_up(3))
    program, told = tmp_path / "browser.py", tmp_path / "told.json"
    program.write_text(BROWSER)
    command = " ".join(map(shlex.quote, [sys.executable, str(program), "%s", str(told)]))
    environment = {
        **os.environ,
        "ATOLL_HOME": str(tmp_path / "home"),
        "BROWSER": command,
        "DISPLAY": ":0",
    }
    with subprocess.Popen(
        [*ATOLL, "replay", str(recorded), "--ui"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            _, _, token = place_and_token(address)
            while not told.exists():
                assert process.poll() is None
                time.sleep(0.05)
            seen: dict[str, Any] = json.loads(told.read_text())
            assert token not in json.dumps([seen["argv"], seen["command"]])
            assert f'url={address}"' in seen["text"]
            assert Path(seen["file"]).exists()
            with asking(address) as owner:
                answered(owner)
            assert not Path(seen["file"]).exists()
            assert (stat.S_IMODE(seen["mode"]), stat.S_IMODE(seen["folder"])) == (0o600, 0o700)
        finally:
            process.terminate()
            process.wait(60)
