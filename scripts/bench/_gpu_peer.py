#!/usr/bin/env python3
"""One peer of `bench_gpu.py`: a script with its node, and a byte-level GPT on a device. Arguments:
home, run, a number that is not used.

Commands and answers are JSON lines; each command is answered with an event of its name when it is
done.

    {"do": "make", "device": "cuda", "layers": 12, "width": 768, "heads": 12, "context": 512,
     "batch": 16, "lr": 3e-4, "threads": 1}        →  numel
    {"do": "plain", "steps": 10}                   steps of a model that is not attached  →  seconds
    {"do": "attach", "every": 20}                  the model joins the run  →  seconds; rounds
        have so many steps
    {"do": "train", "rounds": 4, "log": true}      so many rounds  →  a "round" after each, then
        "train"
    {"do": "evaluate"}                             →  round, digest and held-out loss of the anchor
    {"do": "end"}
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import torch

from atoll.collectives.outcomes import Outcome
from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths
from atoll.node.manifest.gpt import GptConfig
from atoll.node.recipes.data import BUILTIN, batch, load_corpus
from atoll.node.recipes.gpt import GPT
from atoll.optim import Attachment, attach

HELD_OUT = 4  # batches of held-out text


def say(event: str, **fields: Any) -> None:
    """One answer."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Trainer:
    """The model, its optimizer and its text; matrix products in bfloat16, parameters in float32."""

    def __init__(self, told: dict[str, Any]) -> None:
        shape = {key: told[key] for key in ("layers", "width", "heads", "context")}
        self.device, self.batch, self.every = torch.device(told["device"]), told["batch"], 0
        torch.set_num_threads(told["threads"])
        torch.manual_seed(1)  # the same model at each peer
        with self.device:
            self.model = GPT(GptConfig(**shape))
        self.optimizer: Any = torch.optim.AdamW(
            self.model.parameters(), lr=told["lr"], fused=self.device.type == "cuda"
        )
        self.corpus = load_corpus(BUILTIN, told["context"])
        self.generator = torch.Generator().manual_seed(os.getpid())
        self.steps = 0

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def loss_of(self, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Nats a byte of a random batch of this text."""
        inputs, targets = batch(text, self.model.config.context, self.batch, generator)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(inputs.to(self.device))
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.to(self.device).flatten()
        )

    def step(self) -> tuple[torch.Tensor, float]:
        """An inner step: its loss, and how long `optimizer.step` took, where that ends a round."""
        loss = self.loss_of(self.corpus.training, self.generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.steps += 1
        ends = self.every > 0 and self.steps % self.every == 0
        if ends:
            self.wait()
        began = time.monotonic()
        self.optimizer.step()
        if ends:
            self.wait()
        pause_s = time.monotonic() - began
        self.optimizer.zero_grad()
        return loss.detach(), pause_s

    @torch.no_grad()
    def held_out(self) -> float:
        """Nats a byte, the same batches in each peer."""
        generator = torch.Generator().manual_seed(9)
        losses = [self.loss_of(self.corpus.held_out, generator) for _ in range(HELD_OUT)]
        return float(torch.stack(losses).mean())


def train(trainer: Trainer, attachment: Attachment, seen: list[Outcome], rounds: int) -> None:
    """Steps until so many rounds are over, and word of each."""
    tokens = trainer.batch * trainer.model.config.context * trainer.every
    for _ in range(rounds):
        trainer.wait()
        began, losses = time.monotonic(), list[torch.Tensor]()
        seen.clear()
        pause_s = 0.0
        for _ in range(trainer.every):
            loss, pause_s = trainer.step()
            losses.append(loss)
        trainer.wait()
        whole_s = time.monotonic() - began
        outcome = seen[-1] if seen else None
        say(
            "round",
            round=attachment.round,
            status=outcome.status if outcome else "none",
            contributors=len(outcome.contributors) if outcome else 0,
            decided_s=outcome.elapsed_s if outcome else None,
            waited_s=attachment.stats["last_wait_s"],
            pause_s=pause_s,
            whole_s=whole_s,
            tokens_s=tokens / (whole_s - pause_s),
            loss=float(torch.stack(losses).mean()),
            bytes_sent=outcome.bytes_sent if outcome else 0,
        )


def memory(trainer: Trainer) -> dict[str, int]:
    """The most that was needed: of the device by torch in this process, of the host by it."""
    on_gpu = trainer.device.type == "cuda"
    return {
        "gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "script_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Do as told."""
    home, run = sys.argv[1], sys.argv[2]
    swarm = join(run, home=home, private=True)
    node = read_node_file(find_paths(home))
    say("ready", peer=swarm.peer, pid=os.getpid(), node_pid=node.pid if node else 0)
    trainer: Trainer | None = None
    attachment: Attachment | None = None
    seen: list[Outcome] = []
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "make":
            trainer = Trainer(told)
            say("make", numel=sum(each.numel() for each in trainer.model.parameters()))
        elif told["do"] == "plain" and trainer is not None:
            trainer.step()
            trainer.wait()
            began = time.monotonic()
            for _ in range(told["steps"]):
                trainer.step()
            trainer.wait()
            say("plain", seconds=time.monotonic() - began)
        elif told["do"] == "attach" and trainer is not None:
            began = time.monotonic()
            attachment = attach(
                trainer.model,
                trainer.optimizer,
                swarm,
                batch_size=trainer.batch,
                on_round=seen.append,
            )
            trainer.every, trainer.steps = told["every"], 0
            say("attach", seconds=time.monotonic() - began)
        elif told["do"] == "train" and trainer is not None and attachment is not None:
            train(trainer, attachment, seen, told["rounds"])
            say("train", **memory(trainer))
        elif told["do"] == "evaluate" and trainer is not None and attachment is not None:
            with attachment.evaluate_anchor() as view:
                number, digest = view.round, view.digest
                say("evaluate", round=number, digest=digest, loss=trainer.held_out())
        elif told["do"] == "end":
            break
    swarm.close()


if __name__ == "__main__":
    main()
