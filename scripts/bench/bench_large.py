#!/usr/bin/env python3
"""Large pretrained models on one GPU, with random weights: two members, typed as the README says
it; one is killed and told the same line again. Meant for eight minutes of a GPU of 80 GB, on which
nobody has run it yet.

    scripts/bench/bench_large.py FOLDER                      1B in full, 8B by QLoRA
    scripts/bench/bench_large.py FOLDER --cases tiny:lora    tries the script, without a GPU too

case           the shape and the method
weights_s      how long the random weights took to be written
contributors   of each round, by the node of the first member
killed         processes of the second member that ended after the first round
back_s         from its line typed again to the round that counts it
equal          whether both exported the same file

What is made lies in FOLDER, which has to hold 20 GB for 8B. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _bench import ROOT, emit, progress
from bench_finetune import TypedHome, readme_lines, run_id_of, write_texts

sys.path.append(str(ROOT / "tests"))

from finetune_kit import tiny_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
}
STEPS = 2  # a round's
ROUNDS = {"full": 20, "lora": 60, "qlora": 60}
"""More than pass while a member that was killed loads its model again."""


def write_random(folder: Path, shape: str) -> float:
    """A Llama of this shape with the tokenizer of the tests; how long it took, in seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    began_s = time.monotonic()
    heads = SHAPES[shape]["hidden_size"] // 64
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=32_000,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return time.monotonic() - began_s


def settings_text(text: str, method: str) -> str:
    """The template's text for one case."""
    values = {
        "method": f'"{method}"',
        "length": "256",
        "sync_every": str(STEPS),
        "rounds": str(ROUNDS[method]),
        "steps": str(ROUNDS[method] * STEPS),
        "tokens_per_step": "1024\nwarmup = 1",
    }
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
    text = text.replace("\n[data]", 'dtype = "bfloat16"\n\n[data]', 1)
    return text + ('\n[adapters]\nbase = "shapes"\n' if method == "qlora" else "")


def play(top: Path, case: str) -> dict[str, Any]:
    """One case, in a folder of its own that must not be there yet."""
    shape, method = case.split(":")
    folder = top / case.replace(":", "-")
    folder.mkdir(parents=True)
    model = folder / shape
    weights_s = write_random(model, shape)
    progress(f"{case}: random weights in {weights_s:.0f} s")
    files = write_texts(folder, 0)
    _, new, first, second, export, _ = readme_lines()
    one, two = TypedHome(folder / "one"), TypedHome(folder / "two")
    settings = folder / "run.toml"
    text = one.run(new.replace("ORG/NAME", str(model)).partition(" >")[0])
    settings.write_text(settings_text(text, method), encoding="utf-8")
    more = " --yes --no-input"
    line = first.replace("run.toml", str(settings)).replace("chats.jsonl", str(files["one"]))
    one.start(line + more)
    invite = one.until(lambda: re.search(r"atoll2:[\w-]+", one.said()), "invite").group()
    line = second.replace("INVITE", invite).replace("mine.jsonl", str(files["two"]))
    joining = f"{line} --model {model}{more}"
    two.start(joining)
    one.until(lambda: one.rounds(), "first round")
    killed, before, began_s = two.kill(), len(one.rounds()), time.monotonic()
    two.start(joining)
    one.until(
        lambda: any(len(each["contributors"]) == 2 for each in one.rounds()[before:]),
        "round with the member that came back",
    )
    back_s = time.monotonic() - began_s
    for member in (one, two):
        member.end()
    outs = list[bytes]()
    for member in (one, two):
        out = folder / f"out-{member.home.name}"
        member.run(export.replace("RUN", run_id_of(member)).replace(" out", f" {out}"))
        outs.append(b"".join(each.read_bytes() for each in sorted(out.glob("*.safetensors"))))
    return {
        "case": case,
        "weights_s": round(weights_s, 1),
        "contributors": [len(each["contributors"]) for each in one.rounds()],
        "killed": killed,
        "back_s": round(back_s, 1),
        "equal": outs[0] == outs[1] != b"",
    }


def main() -> int:
    """Play the cases, and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where all of it lies")
    parser.add_argument("--cases", default="1B:full,8B:qlora", help="shape:method, …")
    options = parser.parse_args()
    if not torch.cuda.is_available() and "B:" in options.cases:
        parser.error("there is no GPU here; the script itself is tried by --cases tiny:lora")
    top = options.folder.absolute()
    top.mkdir(parents=True, exist_ok=True)
    runs = [play(top, case) for case in options.cases.split(",")]
    emit("large", {"cases": options.cases, "gpu": torch.cuda.is_available()}, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
