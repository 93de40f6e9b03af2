"""What `[model]` says of the model that ships with atoll."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...collectives.errors import ConfigError
from ..home.strict_toml import find_faults, together
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
    if faults := gpt_faults(model, name):
        raise together(faults)
    return msgspec.convert(model.config, GptConfig)


def gpt_faults(model: ModelTable, name: str) -> list[ConfigError]:
    """All that is wrong with ``[model] config`` of a ``builtin:gpt``."""
    if faults := list(find_faults(dict(model.config), GptConfig, name)):
        return [_within(fault) for fault in faults]
    config = msgspec.convert(model.config, GptConfig)
    if config.width % config.heads:
        fewer = range(min(config.heads, config.width), 0, -1)
        heads = next(heads for heads in fewer if config.width % heads == 0)
        faults.append(
            ConfigError(
                f"{name}: $.model.config.heads {config.heads} does not divide width {config.width}",
                key="$.model.config.heads",
                code="E413",
                why="Every head takes an equal slice of the width.",
                hint=f"heads = {heads} (for example)",
            )
        )
    if model.parameters is not None and model.parameters != config.parameters:
        faults.append(
            ConfigError(
                f"{name}: $.model.parameters says {model.parameters:,}, the model has "
                f"{config.parameters:,}",
                key="$.model.parameters",
                code="E413",
                why="The count does not fit the configuration.",
                hint=f"parameters = {config.parameters}, or leave it out.",
            )
        )
    return faults


def _within(error: ConfigError) -> ConfigError:
    """An error of the configuration alone, as one of the manifest."""
    key = error.key.replace("$", "$.model.config", 1)
    return ConfigError(
        error.message.replace(error.key, key),
        key=key,
        code=error.code,
        why=error.why,
        hint=error.hint.replace(error.key, key),
    )
