"""The files and folders of one demo: a home for each peer, the run's manifest, logs. All under the
output folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ...collectives.errors import AtollError, ConfigError
from ..control.protocol import JoinRequest
from ..home.interpreter import PYTHON
from ..home.paths import find_paths
from ..home.refusals import storage_error
from ..joining.commands import NodeClient
from ..manifest import load_run
from ..run import diary
from ..run.events import RunEvent
from .processes import DemoProcess, Inbox

SYNC_EVERY = 20
STEPS, QUICK_STEPS = 700, 400  # 700: where three peers were seen to reach 0.9 of one machine's loss
PARAMETERS = 865_024

MANIFEST = """\
# Written by `atoll demo`.
schema = 1
name = "demo"
description = "three peers on one machine"

[model]
entry = "builtin:gpt"
config = {{ width = 128, layers = 4, heads = 4, context = 64 }}
init = "seed:{seed}"
parameters = {parameters}

[data]
source = "builtin:stdlib-text"
seed = {seed}

[train]
sync_every = {sync_every}
rounds = {rounds}

[train.inner]
lr = 2e-3
steps = {steps}
batch = 8

[train.outer]
lr = 0.9        # as the demo was tuned; without this table lr and momentum warm up
momentum = 0.6

[exchange]
codec = "int8_dither"
"""


@dataclass(frozen=True, slots=True)
class DemoStage:
    """Where a demo lives. Made by `prepare`."""

    folder: Path
    rounds: int
    steps: int
    seed: int

    @property
    def manifest(self) -> Path:
        return self.folder / "run.toml"

    def home(self, name: str) -> Path:
        """ATOLL_HOME of a peer."""
        return self.folder / "homes" / name.replace(" ", "-")

    def log(self, name: str, role: str) -> Path:
        return self.folder / "logs" / f"{name.replace(' ', '-')}-{role}.log"

    def environment(self, name: str) -> dict[str, str]:
        """What a peer's processes see besides the environment: a home of its own, one thread."""
        return {"ATOLL_HOME": str(self.home(name)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def node(self, name: str, inbox: Inbox) -> DemoProcess:
        """Start a peer's node, on a free port of this machine only. Like all processes of the demo
        it ends with the demo.
        """
        return self._start(
            name,
            "node",
            ["atoll.node", "--until-stdin-ends", "--listen", "/ip4/127.0.0.1/tcp/0"],
            inbox,
        )

    def status(self, name: str) -> dict[str, Any] | None:
        """What a peer's node says of itself; None while it does not answer."""
        try:
            with NodeClient.connect(find_paths(self.home(name))) as node:
                return node.status()
        except AtollError:
            return None

    def new(self, name: str, inbox: Inbox) -> DemoProcess:
        """Start `atoll new` beside the founder's node; it prints the run's id and an invite."""
        command = ["atoll.node.cli", "new", str(self.manifest), "--json"]
        return self._start(name, "new", command, inbox)

    def found(self, name: str, run_id: str) -> None:
        """Begin the run on the founder's node, as `atoll join RUN` does. Raises AtollError."""
        paths = find_paths(self.home(name))
        with NodeClient.connect(paths) as node:
            node.join(JoinRequest(manifest=load_run(paths, run_id).encode(), name=name))

    def page(self, name: str, run_id: str, inbox: Inbox) -> DemoProcess:
        """Start the page of the run as this peer sees it; it prints its address."""
        command = ["atoll.node.cli", "ui", run_id, "--no-browser", "--json"]
        return self._start(name, "page", command, inbox)

    def events(self, name: str, run_id: str) -> Iterator[RunEvent]:
        """What a peer's node kept of what happened in the run."""
        return diary.events(find_paths(self.home(name)).run_dir(run_id))

    def script(self, name: str, run: str, inbox: Inbox) -> DemoProcess:
        """Start a peer's training script; ``run``: an invite. It writes anchors to its folder."""
        self.anchors(name).mkdir(parents=True)
        arguments = [
            "--progress",
            "--until-stdin-ends",
            "--threads",
            "1",
            "--anchors",
            str(self.anchors(name)),
        ]
        return self._start(name, "script", ["atoll.node.recipes.train", run, *arguments], inbox)

    def anchors(self, name: str) -> Path:
        """Where a peer's script writes anchors."""
        return self.folder / "anchors" / name.replace(" ", "-")

    def anchor_bits(self, name: str, round_: int) -> str:
        """blake3 of a peer's anchor of a round, as its script saw it: equal only if every bit is.
        Empty when it is not there.
        """
        try:
            return blake3(
                (self.anchors(name) / f"round-{round_:04}.safetensors").read_bytes()
            ).hexdigest()
        except OSError:
            return ""

    def measure(self, what: str, argument: str, inbox: Inbox) -> DemoProcess:
        return self._start(
            what, "measure", ["atoll.node.demo.measure", str(self.manifest), what, argument], inbox
        )

    def _start(self, name: str, role: str, command: list[str], inbox: Inbox) -> DemoProcess:
        return DemoProcess(
            name,
            role,
            [*PYTHON, "-m", *command],
            self.environment(name),
            self.log(name, role),
            inbox,
        )

    def clear_homes(self) -> None:
        """Remove the peers' homes; the rest stays to be looked at."""
        shutil.rmtree(self.folder / "homes", ignore_errors=True)


def prepare(folder: Path, *, steps: int, seed: int) -> DemoStage:
    """Make the folder, end what an earlier demo may have left running in it, write the manifest.

    Raises StorageError, and ConfigError when the folder holds files that are not a demo's.
    """
    folder = folder.absolute()
    steps -= steps % SYNC_EVERY
    stage = DemoStage(folder, steps // SYNC_EVERY, steps, seed)
    try:
        if folder.is_dir() and any(folder.iterdir()) and not stage.manifest.exists():
            raise ConfigError(
                f"{folder} holds other files",
                key="--out",
                hint="Choose a new folder: atoll demo --out DIR",
                exit_code=2,
            )
        folder.mkdir(parents=True, exist_ok=True)
        _end_leftovers(stage)
        for name in ("homes", "logs", "anchors"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(mode=0o700)
        (folder / "events.jsonl").unlink(missing_ok=True)
        text = MANIFEST.format(
            seed=seed,
            parameters=PARAMETERS,
            sync_every=SYNC_EVERY,
            rounds=stage.rounds,
            steps=stage.rounds * SYNC_EVERY,
        )
        stage.manifest.write_text(text, encoding="utf-8")
    except OSError as error:
        raise storage_error(f"cannot use {folder}", error) from None
    return stage


def _end_leftovers(stage: DemoStage) -> None:
    """A demo that was killed could not end its nodes."""
    homes = stage.folder / "homes"
    for home in homes.iterdir() if homes.is_dir() else ():
        try:
            with NodeClient.connect(find_paths(home)) as node:
                node.down(now=True)
        except AtollError:
            continue
