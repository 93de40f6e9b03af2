"""A peer that refuses with words which a terminal would obey: a real node, the real command on a
pseudo terminal, and what arrives there.

Whoever the invite names gives a verdict, in its own words; a stranger who says the same only says
so.
"""

from __future__ import annotations

import os
import pty
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from bad_input_kit import PATIENCE_S, Run, new_home, new_run
from hostile_words import HOSTILE, harmful

from atoll.node.home.paths import find_paths
from atoll.node.net.greeting import RefusedError
from atoll.node.net.network import PeerNetwork
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity

pytestmark = pytest.mark.slow

EVIL = "".join(
    HOSTILE[what]
    for what in ("screen cleared", "title set", "clipboard written", "line forged", "C1 control")
)


def _evil(*_: object) -> Any:
    raise RefusedError("E205", EVIL)


@contextmanager
def peers(run_id: str, *, stranger: bool) -> Iterator[str]:
    """A peer that the invite is to name, at the address that is yielded: a hostile one, or an
    honest one that has met a hostile stranger.
    """
    ready, found, errors = threading.Event(), list[str](), list[BaseException]()
    stop = trio.Event()
    token: list[Any] = []

    async def main() -> None:
        token.append(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            known: Sequence[str] = ()
            for hostile in (False, True) if stranger else (True,):
                network = PeerNetwork(
                    Identity.generate(),
                    listen=("/ip4/127.0.0.1/tcp/0",),
                    bootstrap=known,
                    rng=random.Random(1),
                )
                if hostile:
                    network._streams._check = _evil  # type: ignore[method-assign]
                await nursery.start(network.run)
                if hostile:
                    network.announce_run(run_id)  # type: ignore[arg-type]
                found.extend(network.addresses())
                known = network.addresses()[:1]
            ready.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    def serve() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        assert not errors, errors
        yield found[0]
    finally:
        token[0].run_sync_soon(stop.set)
        thread.join(PATIENCE_S)


def on_a_terminal(home: Path, *argv: str) -> tuple[int, str]:
    """Exit status of a command on a pseudo terminal, and every byte that came there."""
    screen, its_end = pty.openpty()
    environment = {**os.environ, "ATOLL_HOME": str(home), "TERM": "xterm-256color"}
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll.node.cli", *argv],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=its_end,
        stderr=its_end,
    )
    os.close(its_end)
    said = bytearray()
    try:
        while piece := os.read(screen, 65_536):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(screen)
    return process.wait(PATIENCE_S), said.decode()


def logs(home: Path) -> str:
    return "".join(path.read_text() for path in find_paths(home).log_dir.glob("*.log"))


def told(run: Run, home: Path, address: str) -> tuple[int, str]:
    """Try to join by an invite that names ``address``; nothing harmful may come to the terminal or
    into the log.
    """
    invite = make_invite(run.signed.run_id, [address], run.identity, now_s=time.time()).encode()
    status, said = on_a_terminal(home, "join", invite, "--yes")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said).replace("\r\n", "\n")
    assert harmful(plain) == set(), plain
    assert harmful(logs(home)) == set()
    assert "\n2026-01-01" not in plain + logs(home)
    return status, " ".join(plain.split())


def test_whom_the_invite_names_is_quoted(tmp_path: Path) -> None:
    run, home = new_run(tmp_path), new_home(tmp_path / "home")
    with peers(run.signed.run_id, stranger=False) as address:
        status, said = told(run, home, address)
    assert status == 77, said
    assert "E205" in said
    assert r"refuses: “\x1b[2J\x1b[H you are banned" in said
    assert r"\x1b]52;c;" in said


def test_a_strangers_verdict_is_none(tmp_path: Path) -> None:
    run, home = new_run(tmp_path), new_home(tmp_path / "home")
    with peers(run.signed.run_id, stranger=True) as address:
        status, said = told(run, home, address)
    assert status == 69, said  # nobody answered who could have let us in
    assert not said.startswith("E205")
    assert "E113" in said
    assert re.search(
        r"a stranger at 127\.0\.0\.1 \(….{8}\) says “\\x1b\[2J\\x1b\[H you are banned", said
    ), said
