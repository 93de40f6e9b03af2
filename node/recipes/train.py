"""The recipe attached to a run, as a process of its own: ``python -m atoll.node.recipes.train``.
`atoll join` starts it, the demo too.

With ``--progress`` it prints one JSON object a line: ``joined`` (peer), ``progress`` (stage, done,
total), ``state`` (round), ``step`` (step, loss), ``round`` (status, round, counted, contributors,
bytes…), ``evaluation`` (round, held_out), ``final`` (round, anchor_digest, held_out…), ``error``.
SIGINT or SIGTERM, or the end of stdin with ``--until-stdin-ends``, makes it leave after its step.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...collectives.errors import AtollError, ConfigError
from ...collectives.outcomes import Outcome
from ...collectives.script_swarm import Swarm
from ...optim import Attachment, attach
from ..home.ending import interrupt_when_stdin_ends
from ..home.last_resort import refused
from ..home.output import Terminal, show_error
from ..home.own_data import data_of
from ..home.paths import find_paths
from ..manifest import Manifest, gpt_config, load_run
from .data import BUILTIN, Corpus, load_corpus, peer_generator
from .gpt import GPT, build
from .loop import evaluate, evaluate_briefly, make_optimizer, schedule_position, train_step

STEP_EVERY = 5  # steps between two ``step`` lines
# below, more threads gain little; on a busy machine they wait for each other and lose a lot
SMALL_PARAMETERS = 10_000_000
KEEP_EVERY = 5  # rounds between two anchors in the folder --anchors

Say = Callable[[dict[str, Any]], None]
"""Takes one progress record; its kind is under "event"."""


def load_data(manifest: Manifest, path: str | None, home: str | None = None) -> Corpus:
    """The text to train on: ``path``; or, where the manifest wants one's own, what this machine's
    settings name (`site_data`), else the built-in one.

    Raises ConfigError when one's own is asked for and there is none."""
    if path is None and manifest.data.source == "local":
        path = data_of(find_paths(home)) or None
    if path is None and manifest.data.source == "local":
        raise ConfigError(
            "this run trains on every member's own text",
            key="$.data.source",
            why='Its manifest says data.source = "local".',
            hint=(
                "Give yours: --data FILE_OR_FOLDER, or FILE.py:NAME, a function "
                "that returns a Dataset"
            ),
        )
    return load_corpus(path or BUILTIN, gpt_config(manifest.model).context)


class TrainingMember:
    """One member training the recipe: model, optimizer, data, attachment, on any Swarm."""

    def __init__(
        self,
        swarm: Swarm,
        manifest: Manifest,
        corpus: Corpus,
        say: Say = lambda record: None,
        anchors: Path | None = None,
    ) -> None:
        self.swarm, self.manifest, self.corpus, self.say, self.anchors = (
            swarm,
            manifest,
            corpus,
            say,
            anchors,
        )
        self.inner = manifest.train.inner
        self.model: GPT = build(manifest)
        self.optimizer = make_optimizer(self.model, self.inner)
        self.attachment: Attachment = attach(
            self.model,
            self.optimizer,
            swarm,
            on_round=self._round,
            evaluate=lambda model: evaluate_briefly(model, corpus.held_out),
        )
        self.attachment.schedule_ends.follows = True  # `validate` says where it does not end
        self.generator = peer_generator(manifest.data.seed, swarm.peer)
        self.steps = 0
        self._since_round = 0  # steps since the anchor last moved
        self._entered_at = self.attachment.round
        say({"event": "state", "round": self.attachment.round})

    @property
    def position(self) -> int:
        """Where in the learning-rate schedule this member is (`schedule_position`)."""
        return schedule_position(
            self.attachment, self.swarm.settings, self.inner, self.steps, self._since_round
        )

    def finished(self, steps: int | None) -> bool:
        """Whether to end: the run is done, ``steps`` own steps are made, or (without a number of
        rounds) the schedule is over.
        """
        if self.attachment.done or (steps is not None and self.steps >= steps):
            return True
        return (
            self.swarm.settings.rounds is None
            and self.inner.steps is not None
            and self.position >= self.inner.steps
        )

    def train(
        self,
        *,
        steps: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        evaluate_every: int | None = None,
    ) -> None:
        """Train until `finished` or ``stop()``; evaluates the anchor every ``evaluate_every``
        rounds if that is given.
        """
        evaluated = kept = self.attachment.round
        if kept == 0:
            self.keep_anchor()
        self.model.train()
        while not self.finished(steps) and not stop():
            before = self.attachment.round
            self.attachment.samples(self.inner.batch)
            loss = train_step(
                self.model,
                self.optimizer,
                self.corpus.training,
                self.inner,
                self.generator,
                self.position,
                self.steps,
            )
            self.steps += 1
            self._since_round = self._since_round + 1 if self.attachment.round == before else 0
            self.attachment.log(loss=loss)
            if self.steps % STEP_EVERY == 0:
                self.say(
                    {
                        "event": "step",
                        "step": self.steps,
                        "position": self.position,
                        "loss": round(loss, 5),
                    }
                )
            if evaluate_every is not None and self.attachment.round >= evaluated + evaluate_every:
                evaluated = self.attachment.round
                self.evaluate_anchor()
            if self.attachment.round >= kept + KEEP_EVERY:
                kept = self.attachment.round
                self.keep_anchor()

    def keep_anchor(self) -> None:
        """Write the newest anchor to the folder ``anchors``, if one was given; it costs
        milliseconds, unlike an evaluation.
        """
        if self.anchors is not None:
            with self.attachment.evaluate_anchor() as view:
                save_file(
                    self.model.state_dict(), self.anchors / f"round-{view.round:04}.safetensors"
                )

    def evaluate_anchor(self) -> tuple[int, str, float]:
        """(round, digest, held-out loss in nats a byte) of the newest anchor; also said as
        ``evaluation``.
        """
        with self.attachment.evaluate_anchor() as view:
            found = (view.round, view.digest, evaluate(self.model, self.corpus.held_out))
        self.say({"event": "evaluation", "round": found[0], "held_out": round(found[2], 5)})
        return found

    def finish(self) -> dict[str, Any]:
        """Evaluate (and keep) the anchor, take the hooks off, and return (and say) the ``final``
        record.
        """
        self.keep_anchor()
        round_, digest, loss = self.evaluate_anchor()
        stats, told = self.attachment.stats, self.attachment.describe()
        self.attachment.detach()
        record = {
            "event": "final",
            "peer": self.swarm.peer,
            "round": round_,
            "anchor_digest": digest,
            "held_out": round(loss, 5),
            "steps": self.steps,
            "rounds": round_ - self._entered_at,
            **{
                key: stats[key]
                for key in (
                    "counted",
                    "samples_counted",
                    "bytes_sent",
                    "bytes_received",
                    "waiting_s",
                )
                if key in stats
            },
            "privacy": told["privacy"],
        }
        self.say(record)
        return record

    def _round(self, outcome: Outcome) -> None:
        self.say({"event": "round", **asdict(outcome)})


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="atoll.node.recipes.train",
        description="Train a run's built-in model as one of its members.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        default="",
        help="invite, or a run that the node is in (default: ATOLL_RUN, else ATOLL_INVITE)",
    )
    parser.add_argument("--home", default=None, help="folder of the node (default: ATOLL_HOME)")
    parser.add_argument(
        "--data",
        default=None,
        help="text file or folder to train on, or FILE.py:NAME, a function that returns a Dataset",
    )
    parser.add_argument("--steps", type=int, default=None, help="own inner steps at most")
    parser.add_argument(
        "--threads",
        type=int,
        default=None,
        help=(
            "threads of torch; default: 1 for models below 10M parameters, else what torch chooses"
        ),
    )
    parser.add_argument(
        "--evaluate-every",
        type=int,
        default=None,
        metavar="ROUNDS",
        help="evaluate the anchor every so many rounds",
    )
    parser.add_argument(
        "--anchors",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"write the anchor there every {KEEP_EVERY} rounds and at the end",
    )
    parser.add_argument("--progress", action="store_true", help="print JSON lines")
    parser.add_argument(
        "--until-stdin-ends",
        action="store_true",
        help="leave when stdin ends, so as not to outlive whoever started this",
    )
    return parser.parse_args(argv)


def print_records(on: bool) -> Say:
    """Prints each record as a line of JSON; where not ``on``, nothing."""

    def say(record: dict[str, Any]) -> None:
        if on:
            print(json.dumps({**record, "at": round(time.time(), 3)}), flush=True)

    return say


def stop_event(until_stdin_ends: bool) -> threading.Event:
    """An event that signals, or the end of stdin, set. A second signal ends the process at once."""
    stop = threading.Event()

    def ask(signum: int, frame: object) -> None:
        stop.set()
        signal.signal(signum, signal.SIG_DFL)

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    if until_stdin_ends:
        interrupt_when_stdin_ends()
    return stop


def error_record(error: AtollError) -> dict[str, Any]:
    """The ``error`` record."""
    return {
        "event": "error",
        "code": error.code,
        "message": error.message,
        "why": error.why,
        "hint": error.hint,
        "exit": error.exit_code,
    }


def run(options: argparse.Namespace, say: Say, stop: threading.Event) -> dict[str, Any]:
    """Join, train, leave. Returns the ``final`` record."""
    from ..joining import join

    def progress(stage: str, done: int, total: int) -> None:
        say({"event": "progress", "stage": stage, "done": done, "total": total})

    with join(options.run, home=options.home, progress=progress) as swarm:
        say({"event": "joined", "peer": swarm.peer, "run": swarm.run_id})
        manifest = load_run(find_paths(options.home), swarm.run_id).open()
        if options.threads is not None or gpt_config(manifest.model).parameters < SMALL_PARAMETERS:
            torch.set_num_threads(options.threads or 1)
        member = TrainingMember(
            swarm, manifest, load_data(manifest, options.data, options.home), say, options.anchors
        )
        member.train(steps=options.steps, stop=stop.is_set, evaluate_every=options.evaluate_every)
        final = member.finish()
        swarm.leave()
        return final


def end_with_status(
    run: Callable[[argparse.Namespace, Say, threading.Event], Any], options: argparse.Namespace
) -> int:
    """Run a recipe as a process. Its exit status: 0 done, 130 stopped, that of the error otherwise
    (told as a record, and on stderr without a traceback).
    """
    say, stop = print_records(options.progress), stop_event(options.until_stdin_ends)
    try:
        run(options, say, stop)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        told = error if isinstance(error, AtollError) else refused(error, "training has ended")
        if told is None:
            raise
        say(error_record(told))
        show_error(Terminal(), told)
        return told.exit_code
    return 130 if stop.is_set() else 0


if __name__ == "__main__":
    sys.exit(end_with_status(run, _options(sys.argv[1:])))
