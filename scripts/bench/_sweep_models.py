"""Many byte-level GPTs of one size as one batched model, for `sweep_outer.py`: each weight has a
leading dimension of models, so a matrix product is one `bmm` and a GPU is full even with models of
a million parameters; on CUDA one step of all is one graph. Plain torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

BYTES, BLOCK, EVERY_TENTH = 256, 4096, 10
BETAS, DECAY, CLIP = (0.9, 0.99), 0.1, 1.0


@dataclass(frozen=True)
class Size:
    """A model, the batch of a member, the inner rate before tuning, and the text."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    lr: float
    text: int = 500_000  # bytes
    windows: int = 256  # held out
    embedding: float = 1.0  # standard deviation; torch's own is 1
    warmup: int = 20  # steps in which the inner rate grows

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name; matrices as (in, out). The blocks' matrices, which Muon trains, are last."""
        w, found = self.width, dict[str, tuple[int, ...]]()
        found |= {"tokens": (BYTES, w), "positions": (self.context, w), "head": (w, BYTES)}
        for norm in ["last", *(f"{n}.{at}" for n in range(self.layers) for at in ("mix", "feed"))]:
            found |= {f"{norm}.scale": (w,), f"{norm}.shift": (w,)}
        for n in range(self.layers):
            found |= {f"{n}.up.bias": (4 * w,), f"{n}.down.bias": (w,)}
        for n in range(self.layers):
            found |= {f"{n}.qkv": (w, 3 * w), f"{n}.mixed": (w, w)}
            found |= {f"{n}.up": (w, 4 * w), f"{n}.down": (4 * w, w)}
        return found

    @property
    def adam(self) -> int:
        """Values in front of the blocks' matrices."""
        return sum(math.prod(s) for n, s in self.shapes.items() if not is_matrix(n))

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def tokens(self) -> int:
        """Of a member's step."""
        return self.batch * self.context


SIZES = {
    "42k": Size(32, 2, 2, 32, 4, 8e-3, windows=512, embedding=0.18, warmup=1),
    "tiny": Size(32, 2, 2, 32, 4, 4e-3, windows=32),
    "1m": Size(128, 5, 4, 64, 8, 2e-3),
    "10m": Size(384, 6, 6, 128, 8, 1e-3),
    "50m": Size(640, 10, 10, 256, 8, 6e-4, 8_000_000, 128, 0.04),
    "135m": Size(960, 12, 15, 256, 8, 4e-4, 8_000_000, 128, 0.03),
}


def is_matrix(name: str) -> bool:
    """Whether Muon trains it: the blocks' matrices."""
    return name.rpartition(".")[2] in ("qkv", "mixed", "up", "down")


@functools.cache
def corpus(size: int) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes (uint8): Python's help topics, then the standard library's files
    without repeated paragraphs; every tenth block of 4 KiB is held out.
    """
    texts: list[str] = []
    with contextlib.suppress(ImportError):  # some distributions leave it out
        texts += import_module("pydoc_data.topics").topics.values()
    top = Path(sysconfig.get_path("stdlib"))
    files = sorted(top.rglob("*.py"), key=lambda file: (len(file.relative_to(top).parts), file))
    total = sum(map(len, texts))
    for file in files:
        if total >= size or {"site-packages", "dist-packages"} & set(file.parts):
            continue
        texts.append(file.read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
    parts = dict.fromkeys(part for text in texts for part in text.split("\n\n") if part.strip())
    data = torch.frombuffer(bytearray("\n\n".join(parts).encode()[:size]), dtype=torch.uint8)
    blocks = torch.arange(len(data)) // BLOCK % EVERY_TENTH
    return data[blocks != EVERY_TENTH - 1], data[blocks == EVERY_TENTH - 1]


def initial(size: Size, seed: int) -> Tensor:
    """One model's parameters, as torch's own layers begin: float32 (numel,)."""
    generator, parts = torch.Generator().manual_seed(seed), list[Tensor]()
    for name, shape in size.shapes.items():
        if name in ("tokens", "positions"):
            part = torch.randn(shape, generator=generator) * size.embedding
        elif "scale" in name or "shift" in name:
            part = torch.full(shape, float("scale" in name))
        else:
            inputs = size.width * (4 if ".down" in name else 1)
            part = (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(inputs)
        parts.append(part.flatten())
    return torch.cat(parts)


def views(flat: Tensor, size: Size) -> dict[str, Tensor]:
    """Each parameter of all models, (models, …), as a view of (models, values)."""
    found, start = dict[str, Tensor](), 0
    for name, shape in size.shapes.items():
        end = start + math.prod(shape)
        found[name] = flat[:, start:end].view(len(flat), *shape)
        start = end
    return found


def forward(w: dict[str, Tensor], windows: Tensor, size: Size) -> Tensor:
    """Mean loss of each model, float32 (models,). windows: int64 (models, batch, context + 1)."""
    models, batch, width = len(windows), windows.shape[1], size.width
    inputs, targets = windows[..., :-1], windows[..., 1:]
    letters = torch.arange(BYTES, device=inputs.device)
    hot = (inputs.reshape(models, -1, 1) == letters).to(w["tokens"].dtype)
    x = torch.bmm(hot, w["tokens"]).view(models, batch, size.context, width)
    x = (x + w["positions"][:, None]).view(models, -1, width)

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = w[f"{name}.scale"][:, None], w[f"{name}.shift"][:, None]
        return torch.addcmul(shift, F.layer_norm(x, (width,)), scale)

    for n in range(size.layers):
        qkv = torch.bmm(norm(x, f"{n}.mix"), w[f"{n}.qkv"])
        split = qkv.view(models * batch, size.context, 3, size.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + torch.bmm(mixed.reshape(models, -1, width), w[f"{n}.mixed"])
        up = torch.baddbmm(w[f"{n}.up.bias"][:, None], norm(x, f"{n}.feed"), w[f"{n}.up"])
        x = x + torch.baddbmm(w[f"{n}.down.bias"][:, None], F.gelu(up), w[f"{n}.down"])
    logits = torch.bmm(norm(x, "last"), w["head"]).float().flatten(0, 1)
    losses = F.cross_entropy(logits, targets.reshape(-1), reduction="none")
    return losses.view(models, -1).mean(1)


def orthogonal(update: Tensor) -> Tensor:
    """Muon's Newton-Schulz iteration on each matrix of (models, in, out)."""
    tall = update.shape[1] > update.shape[2]
    x = update.mT if tall else update
    x = (x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        x = 3.4445 * x + torch.bmm(-4.7750 * gram + 2.0315 * torch.bmm(gram, gram), x)
    return (x.mT if tall else x).float()


class Models:
    """Rows of (arms × seeds) × members, and one step of all of them.

    ``sync``: steps on the mean gradient of each instance, those that have some first; ``owners``:
    which stream of batches each row reads; ``rates``: peak rate of AdamW of each row; ``muon``:
    of Muon, which there is none of where they are 0; ``half``: products are in bfloat16.
    """

    def __init__(
        self,
        size: Size,
        k: int,
        steps: int,
        *,
        sync: list[int],
        owners: list[int],
        rates: list[float],
        muon: list[float],
        text: Tensor,
        starts: Tensor,
        device: str,
        half: bool = False,
    ) -> None:
        self.size, self.k, self.device = size, k, device
        rows, self.padded = len(owners), -(-size.numel // 256) * 256
        self.master = torch.zeros(rows, self.padded, device=device)
        self.gradient = torch.zeros_like(self.master)
        cuda = device.startswith("cuda")
        self.working = self.master.bfloat16() if half else self.master
        self.weights = {
            name: view.detach().requires_grad_() for name, view in views(self.working, size).items()
        }
        self.gradients, self.values = views(self.gradient, size), views(self.master, size)
        self.text, self.starts = text.to(device), starts.to(device)  # (streams, steps, batch)
        self.window = torch.arange(size.context + 1, device=device)
        self.owners = torch.tensor(owners, device=device)
        self.synced = sum(n > 0 for n in sync)
        self.sync = torch.tensor(sync[: self.synced], device=device).view(-1, 1, 1)
        shares = [
            min(1.0, (t + 1) / size.warmup) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * t / steps))
            for t in range(steps)
        ]
        self.shares = torch.tensor(shares, device=device)
        self.now = torch.zeros(1, dtype=torch.int64, device=device)
        self.muon = torch.tensor(muon, device=device).view(-1, 1, 1) if any(muon) else None
        self.rates = [(rate, torch.tensor(rate, device=device)) for rate in sorted(set(rates))]
        self.buffer = (
            torch.zeros(rows, self.padded - size.adam, device=device) if any(muon) else None
        )
        self.adam = torch.optim.AdamW(
            [{"params": self._rows(rates, rate), "lr": now} for rate, now in self.rates],
            betas=BETAS,
            weight_decay=DECAY,
            fused=cuda,
            foreach=None if cuda else False,
            capturable=cuda,
        )

    def _rows(self, rates: list[float], rate: float) -> list[Tensor]:
        end, found = self.size.adam if self.buffer is not None else self.padded, list[Tensor]()
        for row, own in enumerate(rates):
            if own == rate:
                found.append(self.master[row, :end])
                found[-1].grad = self.gradient[row, :end]
        return found

    def start(self, values: Tensor, which: Tensor) -> None:
        """Begin at step 0 with fresh optimizers and the weights ``values[which]`` (values: (seeds,
        numel); which: (rows,)); in place, since a graph holds on to the memory.
        """
        self.master.zero_()
        for row, index in enumerate(which.tolist()):
            self.master[row, : self.size.numel].copy_(values[index])
        self.refresh()
        states = [t for state in self.adam.state.values() for t in state.values()]
        for tensor in (*states, self.now, *([] if self.buffer is None else [self.buffer])):
            tensor.zero_()

    def refresh(self) -> None:
        """Bring the weights in use up to date with the float32 ones."""
        if self.working is not self.master:
            self.working.copy_(self.master)

    def step(self) -> None:
        """One inner step of all models. Nothing here depends on a value that the host must know."""
        starts = self.starts.index_select(1, self.now)[:, 0]
        windows = self.text[starts[..., None] + self.window].long()[self.owners]
        loss = forward(self.weights, windows, self.size).sum()
        found = torch.autograd.grad(loss, list(self.weights.values()))
        with torch.no_grad():
            for gradient, new in zip(self.gradients.values(), found, strict=True):
                gradient.copy_(new)
            del found
            self._average()
            norm = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)
            self.gradient.mul_((CLIP / (norm + 1e-6)).clamp_(max=1.0))
            share = self.shares.index_select(0, self.now)[0]
            for rate, now in self.rates:
                now.copy_(share * rate)
            self.adam.step()
            if self.muon is not None:
                self._muon(self.muon * share)
            self.refresh()
            self.now.add_(1)

    def _average(self) -> None:
        """Give members that are in their synchronous steps the mean of their gradients."""
        if self.synced:
            part = self.gradient[: self.synced * self.k].view(self.synced, self.k, -1)
            part.lerp_(part.mean(1, keepdim=True), (self.now < self.sync).float())

    def _muon(self, rate: Tensor) -> None:
        """Muon with Nesterov momentum 0.95, scaled to the size of AdamW's updates (arXiv
        2502.16982).
        """
        assert self.buffer is not None
        gradient = self.gradient[:, self.size.adam :]
        self.buffer.lerp_(gradient, 0.05)
        gradient.lerp_(self.buffer, 0.95)
        for name, value in self.values.items():
            if is_matrix(name):
                scale = 0.2 * math.sqrt(max(value.shape[1:]))
                value.mul_(1 - rate * DECAY).sub_(orthogonal(self.gradients[name]) * rate * scale)

    @torch.no_grad()
    def evaluate(self, rows: list[int], held_out: Tensor) -> list[float]:
        """Held-out loss of these rows. held_out: int64 (windows, context + 1)."""
        chosen = torch.tensor(rows, device=self.device)
        w = {name: weight[chosen] for name, weight in self.weights.items()}
        parts = held_out.split(32)
        return torch.stack(
            [forward(w, part.expand(len(rows), -1, -1), self.size) * len(part) for part in parts]
        ).sum(0).div(len(held_out)).tolist()  # fmt: skip


def prepare(models: Models, graph: str) -> tuple[Callable[[], None], str]:
    """How to make one step: a captured graph on CUDA, else, or where capturing fails, `step`.

    Leaves weights and optimizers changed: call `start` afterwards.
    """
    if graph == "off" or not models.device.startswith("cuda"):
        return models.step, "eager"
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                models.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            models.step()
        return captured.replay, "graph"
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if graph == "on":
            raise
        say(f"no graph: {error}")
        torch.cuda.synchronize()
        return models.step, "eager"


def seconds(step: Callable[[], None], models: Models) -> float:
    """How long a step takes: the second of two is timed, and the device waited for."""
    wait = torch.cuda.synchronize if models.device.startswith("cuda") else (lambda: None)
    models.now.zero_()
    step()
    wait()
    began = time.monotonic()
    step()
    wait()
    return time.monotonic() - began


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)
