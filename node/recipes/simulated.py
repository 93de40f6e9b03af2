"""What `atoll simulate` trains: a run's built-in model on the text that ships with Python, or the
task that a file of the user's own makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives.errors import ConfigError
from ...optim.federated.simulation import Task
from ..home.own_data import made_in_file
from ..manifest import Manifest
from ..manifest.gpt import gpt_config
from .data import BUILTIN, load_corpus
from .gpt import build

SECTIONS = 10  # of the text: they are what clients have more or less of, as classes are elsewhere
MOST_WINDOWS, TEST_WINDOWS = 20_000, 200


def load_task(manifest: Manifest, where: str | None) -> Task:
    """The task of a manifest; ``where``: FILE.py:NAME, a function without arguments that returns a
    `Task`. Raises ConfigError.
    """
    if where is not None:
        return _from_file(where)
    if manifest.model.entry != "builtin:gpt":
        raise ConfigError(
            f"the model of {manifest.name} is {manifest.model.entry}",
            key="task",
            why="It is made by each member's own script, not by the manifest.",
            hint="Say what is trained: --task FILE.py:NAME, a function that returns a Task "
            "(docs/federated-simulation.md; scripts/examples/hospital/task.py)",
        )
    context = gpt_config(manifest.model).context
    corpus = load_corpus(BUILTIN, context)
    x, y = _windows(corpus.training, context, MOST_WINDOWS)
    test_x, test_y = _windows(corpus.held_out, context, TEST_WINDOWS)
    kind = torch.arange(len(x)) * SECTIONS // len(x)
    return Task(lambda: build(manifest), x, y, test_x, test_y, kind)


def _windows(tokens: Tensor, context: int, most: int) -> tuple[Tensor, Tensor]:
    """Consecutive windows: inputs and the bytes that follow them, both int64 (n, context)."""
    count = min(most, len(tokens) // (context + 1))
    windows = tokens[: count * (context + 1)].view(count, context + 1).long()
    return windows[:, :-1], windows[:, 1:]


def _from_file(where: str) -> Task:
    task = made_in_file(
        where,
        "task",
        (
            "For example --task digits.py:task, a function that returns a Task "
            "(docs/federated-simulation.md)"
        ),
    )
    if not isinstance(task, Task):
        raise ConfigError(
            f"{where} returns a {type(task).__name__}",
            key="task",
            why="A Task is wanted.",
            hint="See docs/federated-simulation.md",
        )
    return task
