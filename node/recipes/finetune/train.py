"""Fine-tuning from a model and a file to a ``final`` record: reads, says what was read, trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from ....collectives.forced import make_folder
from ....collectives.script_swarm import Swarm
from ...home.output import span_text
from ...home.paths import find_paths
from ...joining import RunSwarm
from ...manifest import Manifest, adapters_of, load_run
from ..models.loading import load_model
from .loop import FineTuneSettings, FineTuning, Say
from .preparing import PreparedData, prepare_data
from .sharding import ONE_CARD, Cards


class MemberJob(msgspec.Struct, frozen=True):
    """What a process needs to know to train as a member, or as one card of it. ``run``: one that is
    stored in ``home``; ``folder``: where this machine has the run's model.
    """

    run: str
    home: str | None
    folder: str
    steps: int | None = None
    threads: int | None = None
    evaluate_every: int | None = None


def settings_of_run(manifest: Manifest, *, bf16: bool = False) -> FineTuneSettings:
    """What a manifest says of the loop."""
    return FineTuneSettings(
        manifest.data,
        manifest.train.inner,
        manifest.prompts,
        bf16=bf16,
        checkpointing=manifest.model.checkpointing,
        name=manifest.name,
    )


def finetune(
    model: Any,
    tokenizer: Any,
    settings: FineTuneSettings,
    data: str,
    swarm: Swarm | None = None,
    *,
    cards: Cards = ONE_CARD,
    folder: Path | None = None,
    steps: int | None = None,
    evaluate_every: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    say: Say = lambda record: None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train ``model`` on ``data`` (a file or folder of this machine, or FILE.py:NAME) until the run
    is done, ``steps`` own steps are made or ``stop()``; returns the ``final`` record.

    ``model``: a causal language model of transformers on its device, also inside PEFT; what
    requires a gradient is trained. ``swarm`` None: this machine alone. ``cards``: all of them call
    this alike; the first one's data, swarm and ``stop`` are meant, and it alone speaks.
    ``folder``: where the state is kept, from which the next call goes on. ``evaluate_every``:
    rounds. ``tell`` hears lines for a person: what was read, what a sample looks like, how long a
    pass takes.

    Raises ConfigError for data (with file and line) and for models that cannot be trained so.
    """
    if folder is not None:
        make_folder(folder)
    vocabulary = len(model.get_input_embeddings().weight)
    prepared = cards.read(
        lambda: prepare_data(
            data,
            tokenizer,
            settings.data,
            folder=folder,
            vocabulary=vocabulary,
            tell=lambda records: tell(f"{records:,} records read …"),
        )
    )
    _describe(prepared, settings, steps or _steps_of(swarm), say, tell)
    member = FineTuning(
        model, tokenizer, prepared, settings, swarm, cards=cards, folder=folder, say=say, tell=tell
    )
    rate = member.tokens_s()
    pass_s = prepared.training.tokens / rate
    tell(f"about {rate:,.0f} tokens a second here: a pass takes {span_text(pass_s)}")
    evaluated, stopped = member.round, False
    while not member.finished(steps) and not (stopped := cards.decide(stop())):
        member.step()
        member.after_step()
        if evaluate_every is not None and member.round >= evaluated + evaluate_every:
            evaluated = member.round
            member.evaluate_anchor()
    return member.finish(evaluate=not stopped)


def train_member(
    job: MemberJob,
    cards: Cards = ONE_CARD,
    data: str = "",
    swarm: RunSwarm | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
    say: Say = lambda record: None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Load a run's model and `finetune` it. Where there are several cards, all call this."""
    paths, gpu = find_paths(job.home), torch.cuda.is_available()
    manifest = load_run(paths, job.run).open()
    threads = job.threads or max(1, torch.get_num_threads() // cards.size)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    # shards go to their card one by one, as the host has room for what no card may hold
    device = "cuda" if gpu and cards.size == 1 else "cpu"
    found = cards.load(
        lambda: load_model(Path(job.folder), manifest.model, adapters_of(manifest), device)
    )
    for note in found.notes:
        tell(note)
    if swarm is not None:
        swarm.prepares("reads its data")
    return finetune(
        found.model,
        found.tokenizer,
        settings_of_run(manifest, bf16=gpu),
        data,
        swarm,
        cards=cards,
        folder=paths.run_dir(job.run),
        steps=job.steps,
        evaluate_every=job.evaluate_every,
        stop=stop,
        say=say,
        tell=tell,
    )


def _steps_of(swarm: Swarm | None) -> int | None:
    """Of the run; None where it has no end, or its rounds end otherwise."""
    if swarm is None or swarm.settings.rounds is None or swarm.settings.sync_every is None:
        return None
    return swarm.settings.lengths.before(swarm.settings.rounds)


def _describe(
    data: PreparedData,
    settings: FineTuneSettings,
    steps: int | None,
    say: Say,
    tell: Callable[[str], None],
) -> None:
    for line in data.lines(settings.inner.tokens_per_step, steps):
        tell(line)
    tell(f"the first sample, with what is learned between ⟦ and ⟧:\n{data.shown}")
    made, held_out = data.training, data.held_out
    say(
        {
            "event": "data",
            "documents": len(made),
            "tokens": made.tokens,
            "targets": made.targets,
            "held_out": held_out.targets,
            "cut": data.summary.cut,
            "left_out": sum(data.summary.left_out.values()),
        }
    )
