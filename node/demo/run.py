"""`run_demo`: stage, director, verdict, and what is printed at the end."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from ...collectives.errors import ConfigError
from ..home.ending import end_signals
from ..home.paths import find_paths, write_atomic
from ..look.opening import Leading
from .board import Board
from .director import Cast, Director
from .figure import draw
from .options import DemoOptions
from .processes import DemoProcess
from .recording import record
from .stage import PARAMETERS, QUICK_STEPS, STEPS, SYNC_EVERY, DemoStage, prepare
from .verdict import DemoResult, judge
from .view import LiveScreen, PlainScreen, Screen


def run(options: DemoOptions) -> int:
    """Run the demo; exit status 0 when every check held, 1 otherwise. Leaves no process behind,
    Ctrl-C included.
    """
    if options.keep_events and not (folder := Path(options.keep_events).absolute().parent).is_dir():
        raise ConfigError(f"there is no folder {folder}", key="--keep-events", exit_code=2)
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    stage = prepare(Path(options.out), steps=steps, seed=options.seed)
    names = [f"peer {number}" for number in range(1, options.peers + 2)]
    board = Board(names, rounds_total=stage.rounds, sync_every=SYNC_EVERY, params=PARAMETERS)
    screen: Screen = (
        LiveScreen(colour=options.colour) if options.live else PlainScreen(quiet=options.quiet)
    )
    cast = Cast()
    started = time.monotonic()
    leading = Leading(find_paths(stage.home(names[0])).cache_dir)
    director = Director(
        stage,
        board,
        screen,
        cast,
        seed=options.seed,
        kill=not options.no_kill,
        late=names[-1],
        browse=leading.show if options.browser else bool,
    )
    try:
        with _terminated_like_interrupted():
            with screen:
                screen.say(
                    f"{options.peers} peers, a node and a script each; {stage.rounds} rounds of "
                    f"{SYNC_EVERY} steps; files in {stage.folder}"
                )
                _play(stage, board, screen, cast, director, options)
            verdict = _finish(stage, board, options, time.monotonic() - started)
            if options.json:
                print(json.dumps({"schema": 1, **verdict.as_json()}), flush=True)
            elif not options.quiet or not verdict.ok:
                print(verdict.text(), flush=True)
            if options.live and cast.page is not None:
                _until_interrupted(cast.page)
    finally:
        cast.end()
        leading.remove()
    stage.clear_homes()
    return 0 if verdict.ok else 1


def _play(
    stage: DemoStage,
    board: Board,
    screen: Screen,
    cast: Cast,
    director: Director,
    options: DemoOptions,
) -> None:
    """All that happens before the verdict."""
    director.begin(page=options.ui)
    director.train()
    _counted_bytes(stage, board)
    board.phase = "ending the nodes"
    screen.show(board, director.now_s)
    cast.end_nodes()  # the baseline has the machine for itself
    if options.keep_events:
        record(stage, board, director.run_id, Path(options.keep_events))
        screen.say(f"kept what happened; see it again: atoll replay {options.keep_events}")
    director.measure(alone=not options.no_baseline)
    board.phase = "drawing the picture"
    screen.show(board, director.now_s)


def _until_interrupted(page: DemoProcess) -> None:
    print("The page stays until Ctrl-C.", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        page.process.wait()


def _counted_bytes(stage: DemoStage, board: Board) -> None:
    """What each surviving node says it sent, control messages and state for the joiner included;
    scripts only know of rounds.
    """
    for name, row in board.rows.items():
        status = stage.status(name) if row.state != "killed" else None
        for entry in (status or {}).get("runs", ()):
            row.bytes_sent = max(row.bytes_sent, int(entry.get("bytes_sent", 0)))


def _finish(stage: DemoStage, board: Board, options: DemoOptions, seconds: float) -> DemoResult:
    """Judge, draw, and write the result."""
    files = [*draw(board, stage.folder), stage.folder / "result.json"]
    verdict = judge(
        board,
        seconds=seconds,
        solo=not options.no_baseline,
        kill=not options.no_kill,
        late=list(board.rows)[-1],
        files=tuple(map(str, files)),
        extra={
            "name": "demo",
            "machine": machine(),
            "settings": {**asdict(options), "steps": stage.steps, "rounds": stage.rounds},
        },
    )
    write_atomic(
        stage.folder / "result.json",
        (json.dumps(verdict.as_json(), indent=1) + "\n").encode(),
        0o644,
    )
    return verdict


def machine() -> dict[str, Any]:
    """What the demo ran on."""
    return {
        "cores": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


@contextmanager
def _terminated_like_interrupted() -> Generator[None]:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does: with its processes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in end_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
