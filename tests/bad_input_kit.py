"""For tests of bad input: commands with their exit status, real nodes whose script is the test
itself, and what must never be seen: a traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from swarm_kit import free_port

from atoll.collectives.layout import Layout, make_layout
from atoll.collectives.outcomes import Outcome
from atoll.node import join
from atoll.node.home.paths import Paths, find_paths
from atoll.node.joining import NodeClient, RunSwarm
from atoll.node.manifest import SignedManifest, parse_manifest, save_run, sign_manifest
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity
from atoll.security.key_file import load_or_create

ODD_NODE = Path(__file__).parent / "process" / "odd_node.py"
PATIENCE_S = 150.0  # a hang only: a busy machine takes its time
NUMEL = 1000
LAYOUT = make_layout([("w", (NUMEL,))])
MANIFEST = """
schema = 1
name = "bad"
[model]
entry = "local:test"
{model}
[train]
sync_every = 1
method = "local_sgd"
[exchange]
codec = "fp32"
[checkpoint]
every = {every}
"""


@dataclass
class Told:
    """What a command left behind."""

    status: int
    out: str
    err: str


def atoll(home: Path, *argv: str, **environment: str) -> Told:
    """Run a command to its end; no traceback may be in what it says."""
    command = [sys.executable, "-m", "atoll.node.cli", *argv]
    found = subprocess.run(
        command,
        env={**os.environ, "ATOLL_HOME": str(home), "CI": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in found.stdout + found.stderr, found.stdout + found.stderr
    return Told(found.returncode, found.stdout, found.stderr)


def refused(home: Path, code: str, status: int, *argv: str, **environment: str) -> dict[str, Any]:
    """A command that must fail with this code and status: told to people on stderr, and as one JSON
    object; the latter's "error".
    """
    told = atoll(home, *argv, "--json", **environment)
    assert told.status == status, told
    error: dict[str, Any] = json.loads(told.out)["error"]
    assert (error["code"], error["exit"]) == (code, status), told
    assert error["message"]
    return error


def soon(condition: Callable[[], Any], what: str) -> Any:
    """Wait until something holds; its value."""
    until = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)
    return value


class Member:
    """A private node, started by and attached to this test as its script."""

    def __init__(
        self, home: Path, run: str, *, command: Sequence[str] = (), layout: Layout = LAYOUT
    ) -> None:
        self.home, self.run, self.layout = home, run, layout
        self.swarm: RunSwarm = join(
            run, home=home, private=True, command=command, progress=lambda stage, done, total: None
        )
        try:
            self.swarm.open(layout, lambda initial: initial.zero_()).release()
        except BaseException:
            self.swarm.close()
            raise

    @property
    def paths(self) -> Paths:
        """Its files."""
        return find_paths(self.home)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.paths.run_dir(self.swarm.run_id)

    @property
    def pid(self) -> int:
        """Its node's process."""
        pid = self.swarm._entry.dial._node.pid
        assert pid is not None
        return pid

    def status(self) -> dict[str, Any]:
        """The node's status document."""
        with NodeClient.connect(self.paths) as client:
            return client.status()

    def state(self) -> dict[str, Any]:
        """The run's part of it."""
        return self.status()["runs"][0]

    def codes(self) -> set[str]:
        """Codes of all troubles the run has had in this life of the node."""
        return {trouble["code"] for trouble in self.state()["troubles"]}

    def anchor(self) -> tuple[int, bytes]:
        """Round and bytes of the newest anchor."""
        view = self.swarm.anchor()
        try:
            copy = torch.empty(self.layout.numel)
            view.copy_into(copy)
            return view.round, copy.numpy().tobytes()
        finally:
            view.release()

    def log(self) -> str:
        """All that its node wrote."""
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.paths.log_dir.glob("*.log"))
        )

    def named(self) -> dict[str, set[str]]:
        """Whom its node has told of that broke a rule, and why: of the run's events, which are not
        in what `log` reads.
        """
        found = dict[str, set[str]]()
        for line in (self.folder / "events.jsonl").read_text().splitlines(keepends=True):
            if line.endswith("\n") and '"peer.misbehaved"' in line:
                event = json.loads(line)
                found.setdefault(event["peer"], set()).add(event["reason"])
        return found

    def end(self) -> None:
        """End script and node; there is no traceback in the log."""
        self.swarm.close()
        assert "Traceback" not in self.log(), self.log()


def one_round(*members: Member) -> list[Outcome]:
    """Contribute until one round counts all of them."""
    until = time.monotonic() + PATIENCE_S
    while True:
        tickets = [
            m.swarm.contribute(samples=1, write=lambda out, value=i + 1.0: out.fill_(value))
            for i, m in enumerate(members)
        ]
        outcomes = [ticket.wait(PATIENCE_S) for ticket in tickets]
        if all(
            outcome.counted and len(outcome.contributors) == len(members) for outcome in outcomes
        ):
            assert len({outcome.round for outcome in outcomes}) == 1
            return outcomes
        assert time.monotonic() < until, outcomes


@contextmanager
def three_members(folder: Path) -> Iterator[list[RunSwarm]]:
    """Three members of a new run that all see each other; none of their nodes may have written a
    traceback.
    """
    run = new_run(folder)
    members = list[Member]()
    try:
        members += [run.organiser()]
        members += [run.member("b"), run.member("c")]
        one_round(*members)
        yield [member.swarm for member in members]
        assert [member.log().count("Traceback") for member in members] == [0, 0, 0]
    finally:
        for member in members:
            member.swarm.close()


@dataclass
class Run:
    """A run whose organiser has not started yet."""

    folder: Path
    signed: SignedManifest
    identity: Identity
    address: str

    @property
    def home(self) -> Path:
        """The organiser's."""
        return self.folder / "organiser"

    def invite(self, **options: Any) -> str:
        """An invite by the organiser."""
        return make_invite(
            self.signed.run_id,
            [self.address],
            self.identity,
            **{"now_s": time.time(), **options},
        ).encode()

    def organiser(self, **options: Any) -> Member:
        """Start the organiser."""
        return Member(self.home, self.signed.run_id, **options)

    def member(self, name: str, **options: Any) -> Member:
        """Start another member."""
        site = {"name": name} if self.signed.open().names_sites else {}
        return Member(new_home(self.folder / name), self.invite(**site), **options)


def new_home(home: Path, port: int = 0) -> Path:
    """A home whose node listens on loopback only."""
    paths = find_paths(home)
    paths.ensure()
    paths.config_file.write_text(f'[node]\nlisten = ["/ip4/127.0.0.1/tcp/{port}"]\n')
    return home


def new_run(folder: Path, *, every: int = 1, model: str = "", manifest: str = MANIFEST) -> Run:
    """Make a run and its organiser's home below ``folder``. ``model``: more lines of the manifest's
    table [model].
    """
    port = free_port()
    paths = find_paths(new_home(folder / "organiser", port))
    identity = load_or_create(paths.identity_file)
    signed = sign_manifest(parse_manifest(manifest.format(every=every, model=model)), identity)
    save_run(paths, signed)
    return Run(folder, signed, identity, f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}")


@contextmanager
def ended(*members: Member) -> Iterator[None]:
    """End them in any case; without another failure also look for tracebacks."""
    try:
        yield
    except BaseException:
        for member in members:
            member.swarm.close()
        raise
    for member in members:
        member.end()


def odd(what: str) -> list[str]:
    """The command of a node with something odd about it."""
    return [sys.executable, str(ODD_NODE), what]
