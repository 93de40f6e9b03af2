"""What `[model]` says of the model that ships with atoll."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...collectives.errors import ConfigError
from ..home.strict_toml import convert
from .tables import ModelTable


class GptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[model] config`` of ``builtin:gpt``: a byte-level GPT, by default of 0.87 million."""

    width: Annotated[int, msgspec.Meta(ge=8, le=16_384)] = 128
    layers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    heads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    context: Annotated[int, msgspec.Meta(ge=8, le=65_536)] = 64

    @property
    def parameters(self) -> int:
        """Number of parameters of this model (`tests` compare it with the built one)."""
        w = self.width
        block = 12 * w * w + 9 * w  # qkv 3w², out w², mlp 8w² + 5w, two norms 4w
        return 256 * w + self.context * w + self.layers * block + 2 * w + 256 * w


def gpt_config(model: ModelTable, name: str = "manifest") -> GptConfig:
    """The checked configuration of a ``builtin:gpt``. Raises ConfigError."""
    try:
        config = convert(dict(model.config), GptConfig, name)
    except ConfigError as error:
        key = error.key.replace("$", "$.model.config", 1)
        raise ConfigError(
            error.message.replace(error.key, key),
            key=key,
            why=error.why,
            hint=error.hint.replace(error.key, key),
        ) from None
    if config.width % config.heads:
        fewer = range(min(config.heads, config.width), 0, -1)
        raise ConfigError(
            f"{name}: $.model.config.heads {config.heads} does not divide width {config.width}",
            key="$.model.config.heads",
            why="Every head takes an equal slice of the width.",
            hint=f"For example heads = {next(h for h in fewer if config.width % h == 0)}",
        )
    if model.parameters is not None and model.parameters != config.parameters:
        raise ConfigError(
            (
                f"{name}: $.model.parameters says {model.parameters:,}, the model has "
                f"{config.parameters:,}"
            ),
            key="$.model.parameters",
            why="The count does not fit the configuration.",
            hint=f"Write parameters = {config.parameters}, or leave it out.",
        )
    return config
