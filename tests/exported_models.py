"""Models to export and load again, as a script of somebody who has no atoll would define them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """An embedding that is the head, too; a dataclass as configuration, as in nanoGPT."""

    @dataclass
    class Config:
        vocabulary: int = 16
        width: int = 8

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embed(ids))))


class Normalised(nn.Module):
    """Convolutions with BatchNorm and a constant as a buffer; the trunk frozen or not."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.pixel_mean: Tensor
        self.register_buffer("pixel_mean", torch.tensor([7.0]))
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        if frozen:
            for part in (self.conv, self.bn):
                part.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.bn(self.conv(images - self.pixel_mean))).mean((2, 3)))


class WeightNormed(nn.Module):
    """Parametrizations: weight norm, and spectral norm with its vectors as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Codebook(nn.Module):
    """A buffer that is learnt in forward, and a tensor that a file holds in two types."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3).to(torch.bfloat16)
        self.norm = nn.LayerNorm(6)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.1)
        return self.body(self.norm(x - self.centre).to(torch.bfloat16)).float()


class Teacher(nn.Module):
    """Frozen parameters that follow the trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.trunk = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        x = self.trunk(x)
        return torch.cat([self.student(x), self.teacher(x)], 1)


def quantised() -> nn.Module:
    """A model with the observers of quantisation-aware training, which learn ranges in forward."""
    from torch.ao.quantization import (
        FakeQuantize,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
    )

    one = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=127)
    by_channel = FakeQuantize(
        MovingAveragePerChannelMinMaxObserver, quant_min=0, quant_max=127, ch_axis=1
    )
    return nn.Sequential(nn.Linear(6, 8), one, nn.ReLU(), nn.Linear(8, 3), by_channel)


def library(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    """A random transformers model."""

    def build() -> nn.Module:
        import transformers

        common = {
            "vocab_size": 16,
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if kind == "GPT2":
            common = {
                "vocab_size": 16,
                "n_embd": 8,
                "n_layer": 1,
                "n_head": 2,
                "n_positions": 16,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        config = getattr(transformers, f"{kind}Config")(**common, **settings)
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


def with_wide_norms(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """In bfloat16 but for the norms."""

    def mixed() -> nn.Module:
        model = build().to(torch.bfloat16)
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                part.float()
        return model

    return mixed


def without_embedding(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Frozen, as a trunk is: and with it a head that is the same tensor."""

    def frozen() -> nn.Module:
        model: Any = build()
        model.get_input_embeddings().requires_grad_(False)
        return model

    return frozen


IDS, IMAGES, ROWS = torch.arange(1, 16)[None], torch.randn(2, 1, 6, 6), torch.randn(4, 6)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}


class Positions(nn.Module):
    """HHousen/TransformerSum#67, huggingface/transformers#30709: positions as a buffer of integers,
    sines that are not saved, and a model in bfloat16 whose buffer is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.position_ids: Tensor
        self.sines: Tensor
        self.scale: Tensor
        self.register_buffer("position_ids", torch.arange(32)[None])
        self.register_buffer("sines", torch.arange(32.0).sin()[:, None], persistent=False)
        self.to(torch.bfloat16)
        self.register_buffer("scale", torch.tensor(1 / 3))

    def forward(self, ids: Tensor) -> Tensor:
        at = self.position_ids[0, : ids.shape[-1]]
        return self.head(self.embed(ids) + self.sines[at]) * self.scale


def kept_wide() -> nn.Module:
    """huggingface/transformers#46167: a model in bfloat16 with biases that stay in float32."""
    model = Tied().to(torch.bfloat16)
    model.body.bias.data = model.body.bias.data.float() + 1e-4
    model.body.forward = lambda x: (
        nn.functional.linear(x, model.body.weight)
        + model.body.bias.to(  # type: ignore[method-assign]
            x.dtype
        )
    )
    return model


def frozen_half() -> nn.Module:
    """deepspeedai/DeepSpeed#5489: frozen parameters of a model in bfloat16."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied": (Tied, IDS),
    "tied_bf16": (lambda: Tied().to(torch.bfloat16), IDS),
    "batch_norm": (Normalised, IMAGES),
    "frozen_trunk": (lambda: Normalised(frozen=True), IMAGES),
    "weight_norm": (WeightNormed, ROWS),
    "codebook_mixed": (Codebook, ROWS),
    "quantised": (quantised, ROWS),
    "half": (lambda: nn.Linear(6, 3).to(torch.float16), ROWS.to(torch.float16)),
    "gpt2": (library("GPT2"), IDS),
    "gpt2_frozen": (without_embedding(library("GPT2")), IDS),
    "llama_tied": (library("Llama", tie_word_embeddings=True), IDS),
    "llama_bf16": (lambda: library("Llama")().to(torch.bfloat16), IDS),
    "experts": (library("Qwen3Moe", **EXPERTS), IDS),
    "experts_aligned": (library("Mixtral", num_local_experts=8, num_experts_per_tok=1), IDS),
    "gpt2_mixed": (with_wide_norms(library("GPT2")), IDS),
    "teacher": (Teacher, ROWS),
    "positions": (Positions, IDS),
    "kept_wide": (kept_wide, IDS),
    "frozen_half": (frozen_half, ROWS.to(torch.bfloat16)),
}


def output(model: nn.Module, x: Tensor) -> Tensor:
    """Logits."""
    found: Any = model(x)
    return getattr(found, "logits", found)


def main() -> None:
    """For each CASE=LINE: build the case anew, run the line, and write its outputs to the file."""
    from safetensors.torch import load_file, save_file

    sys.modules["atoll"] = None  # type: ignore[assignment]
    probes, results = load_file(sys.argv[1]), dict[str, Tensor]()
    for argument in sys.argv[3:]:
        case, line = argument.split("=", 1)
        torch.manual_seed(99)
        names: dict[str, Any] = {"model": CASES[case][0]()}
        run = compile(line, case, "single")
        RUN(run, names)
        model = names["model"].eval()
        with torch.no_grad():
            results[case] = output(model, probes[case].clone()).float().contiguous()
    save_file(results, sys.argv[2])


RUN: Any = __builtins__["exec"] if isinstance(__builtins__, dict) else __builtins__.exec

if __name__ == "__main__":
    main()
