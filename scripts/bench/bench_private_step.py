#!/usr/bin/env python
"""A step with privacy of single examples, by ghost clipping (opacus) and noise, beside a plain one.

    scripts/bench/bench_private_step.py --tokens 64 --examples 64 --steps 9

The model has about a million parameters: with --tokens 0 a perceptron of two hidden layers, else a
net of five residual layers over so many tokens an example. Plain and private steps alternate; each
is forward, backward, what privacy asks for, and the optimizer. Noise costs the same whatever the
batch is. The last line of stdout is one JSON object; exit status 1 where the ratio of the medians is
above --most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _bench import emit, progress
from torch import Tensor, nn

from atoll.optim.modes.privacy.examples import PrivateExamples
from atoll.optim.modes.privacy.ghost import can_clip

CLASSES, INPUTS, WIDE, WORDS = 10, 512, 152, 512


class OverTokens(nn.Module):
    """An embedding, five residual layers, the mean over the tokens."""

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, wide), nn.Linear(wide, CLASSES)
        self.up = nn.ModuleList(nn.Linear(wide, 4 * wide) for _ in range(5))
        self.down = nn.ModuleList(nn.Linear(4 * wide, wide) for _ in range(5))
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        found = self.embed(x)
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            found = found + down(up(norm(found)).relu())
        return self.out(found.mean(1))


def main() -> int:
    """The whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--most", type=float, default=3.0)
    given = parser.parse_args()
    if not can_clip():
        parser.error("opacus is not installed: pip install opacus")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    count, y = given.examples, torch.randint(0, CLASSES, (given.examples,))
    if given.tokens:
        model: nn.Module = OverTokens()
        x = torch.randint(0, WORDS, (count, given.tokens))
    else:
        model = nn.Sequential(
            nn.Linear(INPUTS, 1024), nn.ReLU(), nn.Linear(1024, 448), nn.ReLU(), nn.Linear(448, 10)
        )
        x = torch.randn(count, INPUTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    with tempfile.TemporaryDirectory() as folder:
        private = PrivateExamples(
            10 * count, rate=0.1, noise=1.0, bound=1.0, delta=1e-5, kept=Path(folder) / "spent.json"
        )

        def plain_step() -> None:
            optimizer.zero_grad()
            losses(x, y).mean().backward()
            optimizer.step()

        def private_step() -> None:
            private.step_batch(model, [x, y], losses)
            optimizer.step()

        def timed(step: Callable[[], None]) -> tuple[float, float]:
            began, cpu = time.perf_counter(), time.process_time()
            step()
            return time.perf_counter() - began, time.process_time() - cpu

        rows = list[tuple[float, float, float, float]]()
        for made in range(given.steps + 1):
            rows.append((*timed(plain_step), *timed(private_step)))
            progress(f"step {made}: plain {rows[-1][0]:.3f} s, private {rows[-1][2]:.3f} s")
        private.close()
    columns = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
    plain, plain_cpu, whole, whole_cpu = columns
    emit(
        "private step",
        {"tokens": given.tokens, "examples": count, "steps": given.steps, "most": given.most},
        rows[1:],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        plain_s=plain,
        private_s=whole,
        ratio=whole / plain,
        ratio_cpu=whole_cpu / plain_cpu,
    )
    return int(whole / plain > given.most)


if __name__ == "__main__":
    sys.exit(main())
