"""A script whose node is killed while it enters a run, or opens it, waits for the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cli_kit import LISTEN, atoll, nothing_stays
from own_scripts_kit import PACED, RUN, plain, until

pytestmark = pytest.mark.slow

# Between join and attach it waits for a file.
OPENING = PACED.replace(
    "    attachment = attach(",
    """    import os, time
    print('joined', file=sys.stderr, flush=True)
    while not os.path.exists(__file__ + '.go'):
        time.sleep(0.05)
    attachment = attach(""",
)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


def up(home: Path) -> int:
    """The process of a new node."""
    return int(atoll(home, "up", "--background", *LISTEN)["pid"])


@pytest.mark.parametrize("inside", ["join", "open"])
def test_a_node_is_killed_while_its_script_enters(tmp_path: Path, inside: str) -> None:
    first, second, recipe = tmp_path / "a", tmp_path / "b", tmp_path / "run.toml"
    recipe.write_text(RUN)
    other, node = up(first), up(second)
    invite, go = atoll(first, "new", str(recipe))["invite"], tmp_path / "opening.py.go"
    (tmp_path / "good.py").write_text(PACED)
    (tmp_path / "opening.py").write_text(OPENING.replace("join()", f'join("{invite}")'))
    try:
        with plain(first, "good") as trains:
            until(trains, "round 1: ")
            if inside == "join":
                os.kill(other, signal.SIGSTOP)  # nobody gives the second node the manifest
            with plain(second, "opening") as script:
                until(script, "asking members" if inside == "join" else "joined")
                if inside == "open":
                    os.kill(other, signal.SIGSTOP)  # nor the state
                    go.touch()
                    until(script, "atoll: ")
                os.kill(node, signal.SIGKILL)
                until(script, "waiting for another node")
                up(second)
                os.kill(other, signal.SIGCONT)
                go.touch()
                until(script, "round ")
                script.send_signal(signal.SIGINT)
                script.communicate(timeout=100)
            trains.send_signal(signal.SIGINT)
            trains.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGCONT)
        for home in (first, second):
            atoll(home, "down", "--scripts")
