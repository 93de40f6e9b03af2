"""The loop attached to a run, as a process of its own: ``python -m atoll.node.recipes.finetune``.
`atoll join` starts it.

Records with ``--progress`` and signals are those of `recipes.train`; also ``data`` (documents,
tokens, targets, held_out) and ``sample`` (round, prompt, text). Without it lines for a person.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ....collectives.errors import ConfigError
from ....collectives.foreign import shown
from ...home.own_data import data_of
from ...home.paths import find_paths, user_path
from ...look.machine import MachineReadings, find_nvml
from ...manifest import load_run
from ..models.bringing import bring_model
from ..train import end_with_status
from .launching import cards_of, devices_for
from .loop import Say
from .reporting import keep_energy, keep_evaluations, show_records
from .train import MemberJob, train_member


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="atoll.node.recipes.finetune",
        description="Fine-tune a run's language model as one of its members.",
    )
    parser.add_argument("run", nargs="?", default="", help="invite, or a run that the node is in")
    parser.add_argument("--home", default=None, help="folder of the node (default: ATOLL_HOME)")
    parser.add_argument("--model", default=None, help="where this machine has the run's model")
    parser.add_argument("--data", default=None, help="file or folder of records, or FILE.py:NAME")
    parser.add_argument("--steps", type=int, default=None, help="own inner steps at most")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch")
    parser.add_argument(
        "--devices", type=int, default=None, help="GPUs, or processes without one (default: all)"
    )
    parser.add_argument("--evaluate-every", type=int, default=None, metavar="ROUNDS")
    parser.add_argument("--progress", action="store_true", help="print JSON lines")
    parser.add_argument("--until-stdin-ends", action="store_true", help="leave when stdin ends")
    return parser.parse_args(argv)


def run(options: argparse.Namespace, say: Say, stop: threading.Event) -> dict[str, Any]:
    """Join, train, leave. Returns the ``final`` record."""
    from ...joining import join

    def progress(stage: str, done: int, total: int) -> None:
        say({"event": "progress", "stage": stage, "done": done, "total": total})

    def tell(line: str) -> None:
        if not options.progress:
            print(shown(line), flush=True)

    paths = find_paths(options.home)
    with join(options.run, home=options.home, progress=progress) as swarm:
        say({"event": "joined", "peer": swarm.peer, "run": swarm.run_id})
        manifest = load_run(paths, swarm.run_id).open()
        data = options.data or data_of(paths)
        if not data:
            raise ConfigError(
                "this run trains on records of this machine",
                key="$.data.source",
                why=f'Its manifest says data.source = "{manifest.data.source}".',
                hint="--data FILE, or atoll config set data.path /path/chats.jsonl",
            )
        swarm.prepares("loads the run's model")
        devices = devices_for(options.devices, manifest, tell)
        given = user_path(options.model) if options.model else None
        folder = bring_model(paths, swarm.run_id, manifest.model, given, tell)
        job = MemberJob(
            swarm.run_id,
            options.home,
            str(folder),
            options.steps,
            options.threads,
            options.evaluate_every,
        )
        kept = paths.run_dir(swarm.run_id)
        say = show_records(keep_evaluations(say, kept), swarm)
        if devices > 1:
            tell(f"{devices} devices of this machine train as one member, a process each")
        with cards_of(devices, job, say) as cards:
            final = train_member(
                job,
                cards,
                data,
                swarm,
                stop=stop.is_set,
                say=keep_energy(say, kept, MachineReadings(nvml=find_nvml())),
                tell=tell,
            )
        swarm.leave()
        return final


if __name__ == "__main__":
    sys.exit(end_with_status(run, _options(sys.argv[1:])))
