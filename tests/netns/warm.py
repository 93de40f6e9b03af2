"""Node processes on hosts of a laboratory, forked from one that has imported everything: a dozen of them start in the time of two.

with Warm() as warm:
    node = warm.start(lab.hosts[0], folder / "a", "--port", "4001")
    warm.up(node)                                  # its peer id and its addresses, once it listens
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from netns.lab import Host, enter
from netns.nat import Inner


class Warm:
    """The process from which nodes are forked. They end with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "netns.warm"], cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._up: dict[int, dict[str, Any]] = {}
        self._unread = ""

    def start(self, place: Host | Inner, home: Path, *options: str, **environ: str) -> int:
        """Start ``python -m atoll.node --home HOME OPTIONS`` there; its pid."""
        assert self._process.stdin is not None
        order = {"namespace": place.namespace, "argv": ["--home", str(home), "--json", *options], "environ": environ}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        while "forked" not in (said := self._hear()):
            self._up[said["pid"]] = said
        return int(said["forked"])

    def up(self, pid: int) -> dict[str, Any]:
        """What a node said when it listened: ``peer``, ``addresses``. Raises AssertionError when one ended."""
        while pid not in self._up:
            said = self._hear()
            self._up[said["pid"]] = said
        return self._up[pid]

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while not self._unread.strip():
            self._unread = self._process.stdout.readline() or "{}"
        # Many write to one pipe, and a document and the end of its line may be two writes: two documents may share a line.
        said, end = json.JSONDecoder().raw_decode(self._unread.lstrip())
        self._unread = self._unread.lstrip()[end:]
        assert "pid" in said or "forked" in said, said  # else the warm process ended, or a node could not listen
        return said

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()


def main() -> None:
    """Fork a node for every line of stdin; when it ends, kill them."""
    import atoll.node.service.process  # noqa: F401  # pyright: ignore[reportUnusedImport]  # what takes long

    pids: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _live(order)
        pids.append(pid)
        print(json.dumps({"forked": pid}), flush=True)
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _live(order: dict[str, Any]) -> None:
    """The life of a node; never returns."""
    from atoll.node.__main__ import main as node

    status = 1
    try:
        random.seed()
        os.environ.update(order["environ"])
        enter(order["namespace"])
        status = node(order["argv"])
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
