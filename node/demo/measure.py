"""Held-out losses, measured beside the swarm: of the anchors it wrote, and of one machine that
trains alone.

``python -m atoll.node.demo.measure run.toml anchors DIR`` and ``… run.toml alone STEPS`` print JSON
lines, until done or until stdin ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from ...collectives.identifiers import PeerId
from ..home.ending import interrupt_when_stdin_ends

STEP_EVERY = 10
EVALUATE_EVERY = 100  # steps of one machine alone: as often as peers write anchors


def _say(**record: object) -> None:
    print(json.dumps(record), flush=True)


def anchors(manifest_path: Path, folder: Path) -> None:
    """Evaluate every anchor that a peer wrote."""
    from safetensors.torch import load_file

    from ..manifest import gpt_config, load_manifest
    from ..recipes.data import load_corpus
    from ..recipes.gpt import build
    from ..recipes.loop import evaluate

    manifest = load_manifest(manifest_path)
    corpus = load_corpus(manifest.data.source, gpt_config(manifest.model).context)
    model = build(manifest)
    for file in sorted(folder.glob("round-*.safetensors")):
        model.load_state_dict(load_file(file))
        _say(
            event="anchor",
            round=int(file.stem.removeprefix("round-")),
            held_out=evaluate(model, corpus.held_out),
        )


def alone(manifest_path: Path, steps: int) -> None:
    """Train ``steps`` inner steps from the manifest's start with its recipe and no swarm."""
    from ..manifest import gpt_config, load_manifest
    from ..recipes.data import load_corpus, peer_generator
    from ..recipes.gpt import build
    from ..recipes.loop import evaluate, make_optimizer, train

    manifest = load_manifest(manifest_path)
    corpus = load_corpus(manifest.data.source, gpt_config(manifest.model).context)
    model = build(manifest)

    def on_step(step: int, loss: float) -> bool:
        if step % STEP_EVERY == 0:
            _say(event="step", step=step, loss=loss)
        if step % EVALUATE_EVERY == 0 or step == steps:
            _say(event="alone", step=step, held_out=evaluate(model, corpus.held_out))
        return True

    _say(event="alone", step=0, held_out=evaluate(model, corpus.held_out))
    # Its schedule ends with its steps, as the swarm's does.
    inner = msgspec.structs.replace(manifest.train.inner, steps=steps)
    generator = peer_generator(manifest.data.seed, PeerId("alone"))
    train(
        model,
        make_optimizer(model, inner),
        corpus.training,
        inner,
        generator,
        stop=steps,
        on_step=on_step,
    )


def main() -> None:
    """The command line above."""
    import torch

    interrupt_when_stdin_ends()
    torch.set_num_threads(1)
    manifest, what, argument = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if what == "anchors":
        anchors(manifest, Path(argument))
    else:
        alone(manifest, int(argument))


if __name__ == "__main__":
    main()
