"""A byte-level GPT: pre-norm blocks, learned positions, causal attention. The defaults make 865,024
parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...collectives.errors import ModelMismatchError
from ..manifest import Manifest
from ..manifest.gpt import GptConfig, gpt_config

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input: (batch, time, width)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → (batch, time, width)."""
        batch, time, width = x.shape
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .view(batch, time, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        # (batch, heads, time, width / heads).
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (batch, time ≤ context) → logits float32 (batch, time, 256)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte, a scalar. Both arguments int64 (batch, time)."""
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


def build(manifest: Manifest) -> GPT:
    """The manifest's model with its initial parameters, the same on every machine with this torch.

    Leaves the global random state as it was. Raises ConfigError, and ModelMismatchError when the
    count is not the manifest's.
    """
    config = gpt_config(manifest.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(manifest.model.init.removeprefix("seed:")))
        model = GPT(config)
    count = sum(p.numel() for p in model.parameters())
    if manifest.model.parameters not in (None, count):
        raise ModelMismatchError(
            (
                f"the model has {count:,} parameters, the run's manifest says "
                f"{manifest.model.parameters:,}"
            ),
            hint="atoll validate RUN.toml",
        )
    return model
