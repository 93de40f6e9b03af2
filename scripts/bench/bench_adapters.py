#!/usr/bin/env python
"""LoRA adapters of a two-layer GPT-2 (transformers, PEFT), trained by four peers: held-out loss
beside one machine with the same samples, and how far the mean of factors is from that of products.
One JSON object on the last line.

    pip install 'peft>=0.17' 'transformers>=5'
    scripts/bench/bench_adapters.py --seeds 1

The base learns the text that ships with Python and is frozen; the adapters learn the same text in
capitals. Every mode runs atoll's public classes in a LocalSwarm, over int8. What `atoll export
--adapter` writes of the last anchor is loaded by PEFT in a process that has no atoll, and its
logits are compared.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _bench import emit, progress
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.collectives.digest import chunk_hash, merkle_root
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import AdapterSettings, RunSettings
from atoll.node.home.paths import find_paths
from atoll.node.local import LocalSwarm
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.recipes.data import batch, split, unique_paragraphs
from atoll.node.records.export import export_run
from atoll.node.storage.checkpoint import SavedCheckpoint, save
from atoll.optim import attach
from atoll.optim.modes.adapters import product_bias
from atoll.security.identity import Identity

PEERS, BATCH, CONTEXT, LR = 4, 4, 32, 1e-2
MODES = ("plain", "alternate", "ffa")
ALONE = """
import sys
sys.path += sys.argv[4:]
try:
    import atoll.optim
    sys.exit("atoll is here")
except ImportError:
    pass
from transformers import GPT2LMHeadModel
from peft import PeftModel
from safetensors.torch import load_file, save_file
model = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(sys.argv[1]), sys.argv[2]).eval()
file = sys.argv[3]
save_file({"logits": model(load_file(file)["inputs"]).logits.detach()}, file + ".out")
"""


def loss_of(model: nn.Module, streams: list[torch.Generator], text: Tensor) -> Tensor:
    """Mean loss on a batch of each stream."""
    parts = [batch(text, CONTEXT, BATCH, stream) for stream in streams]
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    logits = model(inputs).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Task:
    """A base that has learnt the text, an adapter of it, and the text in capitals."""

    def __init__(self, seed: int, base_steps: int) -> None:
        transformers: Any = importlib.import_module("transformers")
        self.peft: Any = importlib.import_module("peft")
        self.seed = seed
        topics = importlib.import_module("pydoc_data.topics").topics
        parts = split(unique_paragraphs(list(topics.values())).encode())
        text = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
        upper = [torch.where((part >= 97) & (part <= 122), part - 32, part) for part in text]
        self.training, self.held_out = upper
        torch.manual_seed(seed)
        config = transformers.GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=64,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.base: Any = transformers.GPT2LMHeadModel(config)
        optimizer, stream = (
            torch.optim.AdamW(self.base.parameters(), lr=3e-3),
            torch.Generator().manual_seed(seed),
        )
        for _ in range(base_steps):
            optimizer.zero_grad()
            loss_of(self.base, [stream] * PEERS, text[0]).backward()
            optimizer.step()

    def model(self) -> Any:
        """The base with a fresh adapter, the same at every call."""
        config = self.peft.LoraConfig(
            r=8,
            lora_alpha=16,
            lora_dropout=0.0,
            target_modules=["c_attn", "c_proj", "c_fc"],
            fan_in_fan_out=True,
        )
        torch.manual_seed(self.seed)
        return self.peft.get_peft_model(copy.deepcopy(self.base), config)

    def streams(self) -> list[torch.Generator]:
        """Each peer's own samples, the same in every arm."""
        return [torch.Generator().manual_seed(1000 * self.seed + peer) for peer in range(PEERS)]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Held-out loss in nats a byte."""
        count = (len(self.held_out) - 1) // CONTEXT
        inputs = self.held_out[: count * CONTEXT].view(count, CONTEXT).long()
        targets = self.held_out[1 : count * CONTEXT + 1].long()
        logits = model(inputs).logits
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), targets))


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of an adapter's tensors."""
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def rate(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """The cosine's."""
    for group in optimizer.param_groups:
        group["lr"] = LR * max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))


def one_machine(task: Task, steps: int, frozen: str) -> float:
    """The samples of all peers in one batch."""
    model, streams = task.model(), task.streams()
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        rate(optimizer, step, steps)
        optimizer.zero_grad()
        loss_of(model, streams, task.training).backward()
        optimizer.step()
    return task.evaluate(model)


def swarm(task: Task, mode: Any, steps: int, every: int, outer: OuterSettings) -> dict[str, Any]:
    """Four peers."""
    settings = RunSettings(
        sync_every=every,
        rounds=steps // every,
        codec="int8",
        outer=outer,
        deadline_s=60.0,
        adapters=AdapterSettings(mode),
    )
    # by round and peer: samples, and factors as they were last before it
    ends: list[dict[int, tuple[float, dict[str, Tensor]]]] = [{} for _ in range(steps // every)]

    def script(member: Any) -> Any:
        model, stream = task.model(), task.streams()[member.index]
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        attachment = attach(model, None, member, clock=member.clock)
        while len(member.members()) < PEERS:
            member.sleep(0.1)
        for step in range(steps):
            rate(optimizer, step, steps)
            optimizer.zero_grad()
            loss_of(model, [stream], task.training).backward()
            optimizer.step()
            if not attachment.done:
                end = ends[attachment.round]
                count, _ = end.get(member.index, (0.0, {}))
                end[member.index] = (count + BATCH, factors(model))
            attachment.samples(BATCH)
            attachment.step()
        with attachment.evaluate_anchor() as view:
            loss = task.evaluate(model) if member.index == 0 else None
            layout, values = attachment._flat.layout, torch.empty(view.numel)
            view.copy_into(values)
        sent = attachment.stats["bytes_sent"]
        return model, loss, layout, values, sent, attachment.stats["counted"]

    found = LocalSwarm(PEERS, settings=settings, seed=task.seed).run(script, step_s=0.1)
    model, loss, layout, values, _, _ = found[0]
    assert all(torch.equal(each[3], values) for each in found), "anchors differ"
    biases = [product_bias(list(end.values())) for end in ends]
    return {
        "loss": loss,
        "bias": [round(bias, 8) for bias in biases],
        "bias_max": max(biases),
        "bias_last": biases[-1],
        "travels": layout.numel,
        "bytes_sent_a_peer_and_round": sum(each[4] for each in found) / PEERS / (steps // every),
        "counted": [each[5] for each in found],
        "exported_logits_differ": exported(task, model, layout, values, settings),
    }


def exported(task: Task, model: Any, layout: Any, anchor: Tensor, settings: RunSettings) -> float:
    """The largest difference between logits of the anchor here, and of what PEFT loads elsewhere."""
    rounds = settings.rounds or 0
    with tempfile.TemporaryDirectory() as name:
        home, out = Path(name), Path(name) / "out"
        paths = find_paths(home)
        paths.ensure()
        signed = sign_manifest(
            parse_manifest(
                'schema = 1\nname = "lora"\nmodel.entry = "local:lora"\ntrain.sync_every = 1\n'
            ),
            Identity.generate(),
        )
        momentum = torch.zeros_like(anchor)
        state = anchor.numpy().tobytes() + momentum.numpy().tobytes()
        root = merkle_root([chunk_hash(state)])  # shorter than one chunk
        save(
            save_run(paths, signed) / "checkpoint",
            layout,
            SavedCheckpoint(rounds, rounds, root, anchor, momentum),
            run_id=signed.run_id,
            entry_hash=bytes(32),
        )
        task.model().save_pretrained(home / "begun")
        export_run(paths, signed, out, adapter=home / "begun")
        task.base.save_pretrained(home / "base")
        live = dict(model.named_parameters())
        for spec in layout.tensors:
            values = anchor[spec.offset : spec.offset + spec.numel].view(spec.shape)
            live[spec.name].data.copy_(values)
        inputs = task.held_out[: 8 * CONTEXT].view(8, CONTEXT).long()
        file = str(home / "inputs")
        save_file({"inputs": inputs}, file)
        # -S: no .pth file makes atoll importable
        places = [place for place in sys.path if place.endswith("site-packages")]
        command = [sys.executable, "-I", "-S", "-c", ALONE, str(home / "base"), str(out), file]
        subprocess.run([*command, *places], check=True, cwd=home)
        with torch.no_grad():
            here = model.eval()(inputs).logits
        return float((load_file(file + ".out")["logits"] - here).abs().max())


def main() -> None:
    """Every mode on every seed, beside one machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    parser.add_argument("--steps", type=int, default=200, help="inner steps")
    parser.add_argument("--sync-every", type=int, default=10, help="inner steps a round")
    parser.add_argument("--base-steps", type=int, default=300, help="of the base, before")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        task = Task(seed, given.base_steps)
        before = task.evaluate(task.model())
        alone = {frozen: one_machine(task, given.steps, frozen) for frozen in ("", "lora_A")}
        progress(f"seed {seed}: untrained {before:.4f}, one machine {alone}")
        arms = [(mode, OuterSettings("sgd", 1.0, 0.0)) for mode in MODES]
        arms += [(mode, OuterSettings("nesterov", 0.9, 0.6)) for mode in ("plain", "ffa")]
        for mode, outer in arms:
            started = time.process_time()
            row = swarm(task, mode, given.steps, given.sync_every, outer)
            reference = alone["lora_A" if mode == "ffa" else ""]
            row |= {
                "mode": mode,
                "outer": outer.kind,
                "seed": seed,
                "untrained": before,
                "one_machine": reference,
                "ratio": row["loss"] / reference,
                "ratio_to_both_factors": row["loss"] / alone[""],
                "cpu_s": round(time.process_time() - started, 1),
            }
            rows.append(row)
            progress(
                f"{mode:9} {outer.kind:8} loss {row['loss']:.4f}, {row['ratio']:.4f} of one machine; "
                f"bias at most {row['bias_max']:.2e}, last {row['bias_last']:.2e}; "
                f"{row['travels']} values; exported logits differ by {row['exported_logits_differ']:g}"
            )
    emit("bench_adapters", vars(given), rows)


if __name__ == "__main__":
    main()
