#!/usr/bin/env python3
"""What taking part in a run costs the fine-tuning recipe: its tokens a second in a run of one
member, with a node, rounds and checkpoints, beside those of a plain loop of torch, transformers and
peft on the very same batches.

Both are in this process and take turns, a round's steps each; who begins changes from block to
block, and the first block of every call is thrown away. The model is that of bench_finetune.py. A
block is written to FOLDER/blocks.jsonl once it is made: called again, it goes on behind that. Only
on a machine that has nothing else to do are the figures worth anything: `load` says how busy it was.
The last line of stdout is one JSON object.

ratio    recipe / plain, tokens a second, by block; `ratio_median` is what is wanted to be 0.95
equal    whether the losses of the first steps of both are the same to 1e-3

    scripts/bench/bench_recipe.py FOLDER                     seven blocks of ten steps
    scripts/bench/bench_recipe.py FOLDER --steps 2 --tokens 256 --length 256 --blocks 2    a trial
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _bench import FailedError, emit, progress
from bench_finetune import TypedHome, bring_base, readme_lines, write_texts
from torch import Tensor

from atoll.node.home.paths import find_paths
from atoll.node.joining import join
from atoll.node.manifest import adapters_of, load_run
from atoll.node.recipes.finetune.loop import FineTuning
from atoll.node.recipes.finetune.packing import IGNORED, PackedBatch
from atoll.node.recipes.finetune.preparing import prepare_data
from atoll.node.recipes.finetune.train import settings_of_run
from atoll.node.recipes.models.bringing import bring_model
from atoll.node.recipes.models.loading import load_model

SAME = 1e-3


class Watched(FineTuning):
    """The recipe, which keeps what its steps were made of."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.seen: list[list[PackedBatch]] = []
        super().__init__(*given, **named)

    def _backward(self, batches: list[PackedBatch], targets: int) -> Tensor:
        self.seen.append(batches)
        return super()._backward(batches, targets)


class PlainLoop:
    """As somebody would write it who has torch, transformers and peft."""

    def __init__(self, base: Path, table: Any) -> None:
        import peft
        import transformers

        # A folder of this machine: nothing is downloaded.
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(  # nosec B615
            base, dtype=getattr(torch, table.dtype), local_files_only=True
        )
        if table.method == "lora":
            settings = peft.LoraConfig(
                r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, settings)
        if table.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = model.train()
        self.trained = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-4, fused=True)

    def step(self, batches: list[PackedBatch]) -> float:
        """One step of the optimizer; its loss in nats a token."""
        learned = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            logits = self.model(**batch.inputs).logits
            summed = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(),
                batch.targets.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            (summed / learned).backward()
            total += float(summed.detach())
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / learned


def tokens_of(steps: list[list[PackedBatch]]) -> int:
    """Of the documents in them, learned or not; what fills rows is none."""
    return sum(int((batch.targets != IGNORED).sum()) for step in steps for batch in step)


def found_run(folder: Path, base: Path, options: argparse.Namespace) -> tuple[TypedHome, str]:
    """A run of its own for this call, of one member, without an end."""
    home = TypedHome(folder / "home")
    shutil.rmtree(home.home, ignore_errors=True)
    _, new, *_ = readme_lines()
    text = home.run(new.replace("ORG/NAME", str(base)).partition(" >")[0])
    values = {
        "method": json.dumps(options.method),
        "length": str(options.length),
        "sync_every": str(options.steps),
        "start_with": "1",
        "rounds": str(10 * options.blocks + 10),
        "steps": str((10 * options.blocks + 10) * options.steps),
        "tokens_per_step": str(options.tokens),
    }
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name} = \S+", f"{name} = {value}", text)
    text = text.replace("\n[data]", f"dtype = {json.dumps(options.dtype)}\n\n[data]", 1)
    (folder / "run.toml").write_text(text + "\n[checkpoint]\nevery = 1\n", encoding="utf-8")
    made = json.loads(home.run(f"atoll --json new {folder / 'run.toml'}"))
    return home, made["run_id"]


def block_of(recipe: float, plain: float) -> dict[str, Any]:
    """What a pair of blocks came to: tokens a second of the recipe and of the plain loop."""
    return {
        "recipe": round(recipe, 2),
        "plain": round(plain, 2),
        "ratio": round(recipe / plain, 4),
        "load": round(os.getloadavg()[0], 1),
    }


def play_blocks(
    folder: Path,
    base: Path,
    options: argparse.Namespace,
    of: dict[str, Any],
    kept: list[dict[str, Any]],
) -> None:
    """Make the blocks that are missing; each is written as soon as it is made."""
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    texts = write_texts(folder, 0)
    home, run_id = found_run(folder, base, options)
    paths = find_paths(str(home.home))
    with join(run_id, home=str(home.home)) as swarm:
        manifest = load_run(paths, swarm.run_id).open()
        found = load_model(
            bring_model(paths, swarm.run_id, manifest.model, base),
            manifest.model,
            adapters_of(manifest),
        )
        data = prepare_data(str(texts["both"]), found.tokenizer, manifest.data)
        recipe = Watched(
            found.model,
            found.tokenizer,
            data,
            settings_of_run(manifest),
            swarm,
            folder=paths.run_dir(swarm.run_id),
        )
        plain = PlainLoop(base, manifest.model)

        def recipe_block() -> tuple[float, list[float]]:
            recipe.seen.clear()
            began_s = time.perf_counter()
            losses = list[float]()
            for _ in range(options.steps):
                losses.append(recipe.step())
                recipe.after_step()
            return time.perf_counter() - began_s, losses

        def plain_block() -> tuple[float, list[float]]:
            began_s = time.perf_counter()
            losses = [plain.step(batches) for batches in steps]
            return time.perf_counter() - began_s, losses

        took_s, losses = recipe_block()  # which also makes the batches of the next plain block
        steps = list(recipe.seen)
        plain_s, others = plain_block()
        progress(f"warming up: {took_s:.1f} s, plain {plain_s:.1f} s")
        equal = abs(losses[0] - others[0]) <= SAME * abs(others[0])
        while len(kept) < options.blocks:
            number, rounds = len(kept), recipe.round
            if number % 2:  # on the batches of the recipe's last block
                plain_s, _ = plain_block()
                plain_tokens = tokens_of(steps)
                took_s, _ = recipe_block()
                steps = list(recipe.seen)
            else:
                took_s, _ = recipe_block()
                steps = list(recipe.seen)
                plain_s, _ = plain_block()
                plain_tokens = tokens_of(steps)
            block = block_of(tokens_of(steps) / took_s, plain_tokens / plain_s)
            block |= {"rounds": recipe.round - rounds, "equal": equal, "of": of}
            kept.append(block)
            with (folder / "blocks.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(block) + "\n")
            progress(json.dumps(block))
        recipe.finish(evaluate=False)
        swarm.leave()


def options_given() -> argparse.Namespace:
    """The command line above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where all of it lies")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a block, which is a round")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Exit code: 0 measured, 1 the loops do not learn the same."""
    options = options_given()
    top = options.folder.absolute()
    top.mkdir(parents=True, exist_ok=True)
    file = top / "blocks.jsonl"
    kept = [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    settings = {name: value for name, value in vars(options).items() if name != "folder"}
    of = {name: value for name, value in settings.items() if name != "blocks"}
    if kept and kept[0]["of"] != of:
        raise FailedError(f"the blocks in {file} are of {kept[0]['of']}: give another folder")
    if len(kept) < options.blocks:
        play_blocks(top, bring_base(top), options, of, kept)
    kept = kept[: options.blocks]
    equal = all(block["equal"] for block in kept)
    emit(
        "recipe",
        settings,
        kept,
        ratio_median=statistics.median(block["ratio"] for block in kept),
        equal=equal,
    )
    if not equal:
        raise FailedError("the losses of the first steps differ: the loops are not the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
