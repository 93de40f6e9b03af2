#!/usr/bin/env python3
"""What atoll's hooks take of a training step, measured inside of one process.

A GPT of about 10 million parameters in 150 tensors makes steps between two rounds. Every hook that
`attach` registers (of optimizers, modules and tensors) is timed from its first line to its last, so
that the result is no difference of two noisy figures. Forward, backward and step are timed as one.

share      seconds in hooks over seconds of the step, median; share_max: the largest
hooks      calls of hooks a step; hook_us: microseconds in all of them, median
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from _bench import emit, progress
from torch import Tensor, nn

from atoll.collectives.swarm import RunSettings
from atoll.optim import SoloSwarm, attach

REGISTRARS = {
    Tensor: ("register_hook", "register_post_accumulate_grad_hook"),
    nn.Module: (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ),
    torch.optim.Optimizer: ("register_step_pre_hook", "register_step_post_hook"),
}


class Clock:
    """Seconds in hooks and how many calls; hooks inside of hooks count once."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._depth = 0.0, 0, 0

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, whose seconds and calls are added to these."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self._depth += 1
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return call


@contextmanager
def timing(clock: Clock) -> Generator[None]:
    """Hooks that are registered in the block are timed for ever after."""
    kept = {
        (kind, name): getattr(kind, name) for kind, names in REGISTRARS.items() for name in names
    }

    def registrar(original: Callable[..., Any]) -> Callable[..., Any]:
        def register(self: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(self, clock.timed(hook), *args, **kwargs)

        return register

    try:
        for (kind, name), original in kept.items():
            setattr(kind, name, registrar(original))
        yield
    finally:
        for (kind, name), original in kept.items():
            setattr(kind, name, original)


class Gpt(nn.Module):
    """Bytes in, logits out; 150 tensors with 12 layers."""

    def __init__(self, width: int, layers: int, window: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(window, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, window) integers to (batch, window, 256)."""
        window = text.shape[1]
        inputs = self.bytes(text) + self.places.weight[:window]
        mask = nn.Transformer.generate_square_subsequent_mask(window, inputs.device)
        return self.head(self.layers(inputs, mask, is_causal=True))


def main() -> None:
    """Make the steps and print what hooks took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048, help="a step")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Gpt(given.width, given.layers, given.window).to(given.device)
    tensors = list(model.parameters())
    optimizer = torch.optim.AdamW(tensors, lr=1e-4)
    clock = Clock()
    with timing(clock):
        attach(model, optimizer, SoloSwarm(RunSettings(sync_every=1_000_000)), batch_size=8)
    runs = list[dict[str, float]]()
    for step in range(given.steps + 3):
        text = torch.randint(256, (given.tokens // given.window, given.window), device=given.device)
        clock.seconds, clock.calls = 0.0, 0
        began = time.perf_counter()
        logits = model(text[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if given.device != "cpu":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        if step >= 3:  # the first ones make what later ones use
            runs.append({"step_s": took, "hooks_s": clock.seconds, "hooks": clock.calls})
        progress(f"step {step}: {took:.3f} s, {clock.seconds * 1e3:.3f} ms in {clock.calls} hooks")
    shares = [run["hooks_s"] / run["step_s"] for run in runs]
    emit(
        "bench_hooks",
        vars(given),
        runs,
        numel=sum(tensor.numel() for tensor in tensors),
        tensors=len(tensors),
        share=round(statistics.median(shares), 6),
        share_max=round(max(shares), 6),
        hooks=round(statistics.median(run["hooks"] for run in runs)),
        hook_us=round(statistics.median(run["hooks_s"] for run in runs) * 1e6, 1),
    )


if __name__ == "__main__":
    main()
