"""Real peers for fault tests: each a script process and its private node process, killed and frozen
by pid, on loopback or on hosts of a laboratory (`netns.lab`)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from process.fault_peer import PERIOD, contribution

from atoll.collectives.codecs.codec import get_codec
from atoll.collectives.reduce import MEAN
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run.invite import make_invite
from atoll.security.key_file import load_or_create

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netns.lab import Host

PEER_SCRIPT = Path(__file__).parent / "process" / "fault_peer.py"
MANIFEST = """
schema = 1
name = "faults"
[model]
entry = "local:test"
[train]
sync_every = 1
method = "local_sgd"
[exchange]
codec = "int8"
exact = false
[checkpoint]
every = 4
"""


HANG_S = 240.0
"""So long a peer says nothing when something hangs: each wait ends with what it waits for."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Peer:
    """One peer: its script process, and through it its node."""

    def __init__(
        self,
        name: str,
        home: Path,
        run: str,
        numel: int,
        port: int = 0,
        script: Path = PEER_SCRIPT,
        host: Host | None = None,
        site: str = "",
        everywhere: bool = False,
    ) -> None:
        self.script, self.host, self.site, self.everywhere = script, host, site, everywhere
        self.name, self.home, self.run, self.numel, self.port = name, home, run, numel, port
        self.peer, self.node_pid = "", 0
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.start()

    def start(self) -> None:
        """Start the script (again)."""
        address = self.host.address if self.host else "127.0.0.1"
        address = "0.0.0.0" if self.everywhere else address
        environment = {
            **os.environ,
            "ATOLL_NODE__LISTEN": f"/ip4/{address}/tcp/{self.port}",
            "OMP_NUM_THREADS": "1",
            "ATOLL_NODE__SITE": self.site,
        }
        command = [sys.executable, str(self.script), str(self.home), self.run, str(self.numel)]
        if self.host:
            command = self.host.command(command)
        self._close()
        with open(self.home.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self._answers = queue.Queue()
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout, self._answers), daemon=True
        )
        self._reader.start()

    def _close(self) -> None:
        if hasattr(self, "process"):
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            self._reader.join(10)

    @staticmethod
    def _read(lines: IO[str], answers: queue.Queue[dict[str, Any]]) -> None:
        with contextlib.suppress(ValueError):
            for line in lines:
                answers.put(json.loads(line))
        lines.close()
        answers.put({"event": "end"})

    def expect(self, event: str, timeout_s: float = HANG_S) -> dict[str, Any]:
        """The next answer, which must be this one ("frozen" before an "outcome" need not be taken)."""
        try:
            answer = self._answers.get(timeout=timeout_s)
            if (answer["event"], event) == ("frozen", "outcome"):
                answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(
                f"{self.name} did not say {event!r} within {timeout_s:g} s; its logs:\n{self.log()}"
            ) from None
        assert answer["event"] == event, (self.name, answer, self.log())
        self.peer, self.node_pid = (
            answer.get("peer", self.peer),
            answer.get("node_pid", self.node_pid),
        )
        return answer

    def expect_any(self, timeout_s: float) -> dict[str, Any]:
        """The next answer, whatever it is. Raises queue.Empty."""
        return self._answers.get(timeout=timeout_s)

    def say(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def signal(self, what: str, number: signal.Signals) -> None:
        """Signal the "node" (the present one: a script starts another when it is killed), the
        "script" or "both".
        """
        node = read_node_file(find_paths(self.home))
        self.node_pid = node.pid if node else self.node_pid
        for pid in {
            "node": [self.node_pid],
            "script": [self.process.pid],
            "both": [self.process.pid, self.node_pid],
        }[what]:
            if pid:  # 0, of a node that has not begun, would be this process and all of its group
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def log(self) -> str:
        """The end of the script's stderr and of its node's log."""
        texts = [self.home.with_suffix(".log"), *self.home.rglob("private-node.log")]
        return "\n".join(path.read_text()[-3000:] for path in texts if path.exists())

    def end(self) -> None:
        """End for good, politely, then not."""
        self.signal("both", signal.SIGCONT)
        with contextlib.suppress(OSError, ValueError):
            self.say(do="end")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.signal("both", signal.SIGKILL)
            self.process.wait(10)
        self._close()


class Peers:
    """A swarm of real peers; a context manager. With ``hosts``, one a peer, each has a network of
    its own; ``everywhere``: they listen at all of its interfaces. ``sites``: their labels. ``ready_s``: how long a peer may take to start."""

    def __init__(
        self,
        folder: Path,
        count: int,
        numel: int,
        script: Path = PEER_SCRIPT,
        *,
        hosts: Sequence[Host] = (),
        everywhere: bool = False,
        manifest: str = MANIFEST,
        sites: Sequence[str] = (),
        ready_s: float = HANG_S,
    ) -> None:
        self.numel = numel
        on: list[Host | None] = [*hosts] or [None] * count
        at = [*sites] or [""] * count
        home, port = folder / "p0", free_port()
        paths = find_paths(home)
        paths.ensure()
        identity = load_or_create(paths.identity_file)
        signed = sign_manifest(parse_manifest(manifest), identity)
        save_run(paths, signed)
        address = f"/ip4/{on[0].address if on[0] else '127.0.0.1'}/tcp/{port}/p2p/{identity.peer}"
        self.invite = make_invite(signed.run_id, [address], identity, now_s=time.time()).encode()
        self.all = [Peer("p0", home, signed.run_id, numel, port, script, on[0], at[0], everywhere)]
        try:
            self.all[0].expect("ready", ready_s)
            for index in range(1, count):
                self.all.append(
                    Peer(
                        f"p{index}",
                        folder / f"p{index}",
                        self.invite,
                        numel,
                        script=script,
                        host=on[index],
                        site=at[index],
                        everywhere=everywhere,
                    )
                )
            for peer in self.all[1:]:
                peer.expect("ready", ready_s)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """End all."""
        for peer in self.all:
            peer.end()

    def contribute(
        self, seed: int, wait_s: float = 30.0, who: list[Peer] | None = None, *, frozen: bool = True
    ) -> None:
        """All (or some) contribute; with ``frozen`` returns when every contribution is: a script
        that may be struck before cannot say so.
        """
        for peer in who or self.all:
            index = self.all.index(peer)
            peer.say(do="contribute", seed=seed + index, weight=index + 1, wait_s=wait_s)
        for peer in (who or self.all) if frozen else ():
            peer.expect("frozen")

    def settle(self, tries: int = 40) -> None:
        """Contribute until one round counts everybody."""
        for attempt in range(tries):
            self.contribute(1000 * attempt)
            outcomes = [peer.expect("outcome") for peer in self.all]
            if all(
                o["status"] == "committed" and len(o["contributors"]) == len(self.all)
                for o in outcomes
            ):
                return
        raise AssertionError(f"no common round in {tries} tries")

    def mean(self, seed: int, contributors: dict[str, int], codec: str = "int8") -> torch.Tensor:
        """What the mean over exactly these contributors must decode to, bit for bit: codec (a
        round's by default), order and arithmetic by the public functions.
        """
        return unfold(self.folded_mean(seed, contributors, codec), self.numel)

    def folded_mean(
        self, seed: int, contributors: dict[str, int], codec: str = "int8"
    ) -> torch.Tensor:
        """What `unfold` makes the mean: contributions repeat themselves after `PERIOD` elements, a
        whole number of the codec's blocks.
        """
        members = sorted((p for p in self.all if p.peer in contributors), key=lambda p: p.peer)
        weights = [contributors[p.peer] for p in members]
        pieces: list[torch.Tensor] = []
        for length in filter(None, (PERIOD * (self.numel >= PERIOD), self.numel % PERIOD)):
            vectors = [torch.empty(min(PERIOD, self.numel)) for _ in members]
            for peer, vector in zip(members, vectors, strict=True):
                contribution(seed + self.all.index(peer), len(vector), vector)
            pieces.append(_mean([vector[:length] for vector in vectors], weights, codec))
        return torch.cat(pieces)


def unfold(folded: torch.Tensor, numel: int) -> torch.Tensor:
    """The vector of this length whose one period, if it has one, and rest are given."""
    out, whole = torch.empty(numel), numel - numel % PERIOD
    if whole:
        out[:whole].view(-1, PERIOD).copy_(folded[:PERIOD].expand(whole // PERIOD, PERIOD))
    out[whole:] = folded[len(folded) - (numel - whole) :]
    return out


def _mean(vectors: Sequence[torch.Tensor], weights: Sequence[int], name: str) -> torch.Tensor:
    """What the weighted mean of these vectors becomes in this codec."""
    codec, factors, n = get_codec(name), MEAN.factors(weights), len(vectors[0])
    wires = [codec.wire(memoryview(bytearray(codec.wire_bytes(n))), n) for _ in vectors]
    for vector, wire in zip(vectors, wires, strict=True):
        assert codec.encode(vector, wire)
    mean = codec.wire(memoryview(bytearray(codec.wire_bytes(n))), n)
    assert codec.weighted_mean(wires, factors.multipliers, factors.divisor, mean)
    out = torch.empty(n)
    codec.decode(mean, out)
    return out
