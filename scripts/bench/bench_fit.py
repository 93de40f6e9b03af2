#!/usr/bin/env python3
"""What `atoll fit` says of the memory that fine-tuning takes, beside what it took: each setting is
a process of its own (`atoll.node.recipes.finetune.measuring`, as of `fit --measure`) that makes a
model of random weights and two steps of the recipe, on the CPU. No time is measured, so other work
on the machine changes nothing.

What was measured is kept in --results and not measured again, so that the script can be stopped;
--only and --list choose settings, --length takes rows of another length than theirs (a busy machine
gets through short ones). What was said is computed anew.

measured          the most resident memory while it trained, over that after the imports, MiB
formula           what `fit` says where it knows the shape of a model only, without its libraries
counted           what it says where a step was counted on the meta device (with --count)
formula_off       formula / measured - 1; counted_off the same
imports           of the process before there was a model, MiB; `fit` says PROGRAMS for it
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _bench import FailedError, emit, progress

from atoll.node.recipes.models.shapes import shape_of
from atoll.node.recipes.models.sizing import StepSettings, step_bytes

MIB = 1 << 20
LIMIT_S = 3600.0
_LLAMA = {"model_type": "llama", "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "135M": {  # SmolLM2-135M
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
    },
    "300M": {
        **_LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32_768,
        "max_position_embeddings": 8192,
    },
    "1B": {  # Llama 3.2 1B
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
    },
}


def _setting(shape: str, method: str, dtype: str, **more: Any) -> tuple[str, StepSettings]:
    given = {"length": 512, "accumulated": 1, **more}
    return shape, StepSettings(method=method, dtype=dtype, **given)  # type: ignore[arg-type]


SETTINGS: dict[str, tuple[str, StepSettings]] = {
    "135M-lora-f32": _setting("135M", "lora", "float32"),
    "135M-lora-f32-ckpt-acc": _setting(
        "135M", "lora", "float32", checkpointing=True, accumulated=2
    ),
    "135M-lora-bf16": _setting("135M", "lora", "bfloat16"),
    "135M-lora-bf16-ckpt-2rows": _setting(
        "135M", "lora", "bfloat16", checkpointing=True, micro_batch=2
    ),
    "135M-full-f32-ckpt": _setting("135M", "full", "float32", checkpointing=True),
    "135M-full-f32-acc": _setting("135M", "full", "float32", accumulated=2),
    "135M-full-bf16-ckpt-acc": _setting(
        "135M", "full", "bfloat16", checkpointing=True, accumulated=2
    ),
    "135M-full-bf16-backward": _setting(
        "135M", "full", "bfloat16", checkpointing=True, in_backward=True, micro_batch=2
    ),
    "300M-lora-bf16": _setting("300M", "lora", "bfloat16", length=128),
    "300M-lora-f32-ckpt": _setting("300M", "lora", "float32", checkpointing=True, length=128),
    "300M-full-bf16-ckpt-acc": _setting(
        "300M", "full", "bfloat16", checkpointing=True, accumulated=2, length=128
    ),
    "300M-full-f32": _setting("300M", "full", "float32", length=128),
    "1B-lora-bf16-ckpt": _setting("1B", "lora", "bfloat16", checkpointing=True, length=64),
}


def _with_length(name: str, length: int | None) -> str:
    """The name of this setting with rows of another length, which is a setting from now on."""
    if length is None:
        return name
    shape, settings = SETTINGS[name]
    SETTINGS[f"{name}@{length}"] = shape, dataclasses.replace(settings, length=length)
    return f"{name}@{length}"


def measure(name: str) -> dict[str, Any]:
    """Bytes of a process that trains so. Raises FailedError."""
    shape, settings = SETTINGS[name]
    given = json.dumps({"shape": SHAPES[shape], **dataclasses.asdict(settings)})
    # glibc would keep what was freed
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "atoll.node.recipes.finetune.measuring", given],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise FailedError(f"{name}: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(name: str, found: dict[str, Any], *, count: bool) -> dict[str, Any]:
    """What is printed of a setting."""
    key, settings = SETTINGS[name]
    measured = found["peak"] - found["imports"]
    shape = shape_of(SHAPES[key])
    assert shape is not None
    said = step_bytes(shape, settings)
    made = {
        "name": name,
        "measured": round(measured / MIB),
        "formula": round(said.peak / MIB),
        "formula_off": round(said.peak / measured - 1, 3),
        "imports": round(found["imports"] / MIB),
    }
    if count:
        from atoll.node.recipes.models.counting import config_of, counted_bytes

        counted = counted_bytes(config_of(SHAPES[key]), shape, settings).peak
        made |= {
            "counted": round(counted / MIB),
            "counted_off": round(counted / measured - 1, 3),
        }
    return made


def main() -> int:
    """Exit code: 0 measured, 1 not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("fit.jsonl"), help="what was measured")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--list", action="store_true", help="name the settings")
    parser.add_argument("--count", action="store_true", help="count steps on the meta device, too")
    parser.add_argument("--length", type=int, help="tokens of a row, in place of the settings' own")
    options = parser.parse_args()
    if options.list:
        print("\n".join(SETTINGS))
        return 0
    kept = dict[str, dict[str, Any]]()
    if options.results.exists():
        for line in options.results.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            kept[found.pop("name")] = found
    rows, failed = list[dict[str, Any]](), False
    for name in [_with_length(name, options.length) for name in options.only]:
        if name not in kept:
            try:
                kept[name] = measure(name)
            except (FailedError, subprocess.TimeoutExpired) as error:
                progress(f"cannot measure: {error}")
                failed = True
                continue
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, **kept[name]}) + "\n")
        rows.append(row(name, kept[name], count=options.count))
        progress(" ".join(f"{key}={value}" for key, value in rows[-1].items()))
    worst = max((abs(each["formula_off"]) for each in rows), default=0.0)
    emit("fit", {"only": options.only}, [], rows=rows, worst_formula_off=worst)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
