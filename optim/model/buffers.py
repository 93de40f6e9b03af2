"""How each buffer of a model takes part in a run, by the manifest and by what kind of buffer it is.

    mean    in the run's vector, averaged: running statistics, and what the manifest declares
    same    equal at all members; compared, and not sent (`script.buffer_watch`)
    own     one member's own: counters, queues, vectors of a power iteration
    None    nobody has decided: compared until it changes, and named when it does

Names and kinds of modules decide, never values: the layout must be the same at all members before
the model has seen a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from torch import Tensor, nn

from ...collectives.errors import ConfigError
from ...collectives.layout import BufferClass, Role, pattern_of

STATISTICS: Mapping[str, Role] = {"running_mean": "mean", "running_var": "variance"}
POWER_ITERATION = ("_u", "_v")  # of spectral_norm: estimates, that each forward improves


@dataclass(frozen=True, slots=True)
class ModelBuffer:
    """One buffer. ``name``: without what wrappers put into it, if the model's own names are;
    ``declared``: the manifest names its class; ``persistent``: ``state_dict()`` has it.
    """

    name: str
    tensor: Tensor
    kind: BufferClass | None
    role: Role
    declared: bool
    persistent: bool


def model_buffers(
    modules: Iterable[tuple[str, nn.Module]], patterns: Mapping[str, BufferClass]
) -> list[ModelBuffer]:
    """All buffers of these modules, in their order; one that is held in two places has both names.
    ``modules``: with the names that stand before those of their tensors, such as "encoder.norm.".
    ``patterns``: shell patterns of names; of several that match, the longest decides, then the last
    in the alphabet.
    """
    found = list[ModelBuffer]()
    for prefix, module in modules:
        for key, tensor in module._buffers.items():
            if tensor is None:
                continue
            name = f"{prefix}{key}".lstrip(".")
            declared = _declared(name, patterns)
            found.append(
                ModelBuffer(
                    name,
                    tensor,
                    declared or _usual(module, key, tensor),
                    STATISTICS.get(key, "mean"),
                    declared is not None,
                    key not in module._non_persistent_buffers_set,
                )
            )
    return found


def check_patterns(buffers: list[ModelBuffer], patterns: Mapping[str, BufferClass]) -> None:
    """Raise ConfigError for a pattern that no buffer matches: it would do nothing, in silence."""
    for pattern, kind in patterns.items():
        if not any(fnmatchcase(each.name, pattern) for each in buffers):
            names = [each.name for each in buffers]
            some = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
            raise ConfigError(
                f"the run's manifest declares buffers {pattern!r} as {kind!r}, and the model has "
                "none of that name",
                key="$.model.buffers",
                why=f"Its buffers are: {some}." if names else "It has no buffers.",
                hint="Make the model that the run is for, or a run with other patterns.",
            )


def _declared(name: str, patterns: Mapping[str, BufferClass]) -> BufferClass | None:
    pattern = pattern_of(name, patterns)
    return None if pattern is None else patterns[pattern]


def _usual(module: nn.Module, key: str, tensor: Tensor) -> BufferClass | None:
    """The class of a buffer that the manifest does not name."""
    if key in STATISTICS and tensor.is_floating_point():
        # FrozenBatchNorm keeps constants under these names.
        return None if "Frozen" in type(module).__name__ else "mean"
    if key == "num_batches_tracked":
        return "own"
    if key.endswith(POWER_ITERATION) and _has_spectral_norm(module, key):
        return "own"
    if key.endswith("_ptr") or f"{key}_ptr" in module._buffers or key == "queue":
        return "own"  # a queue of a member's own samples, and where it is
    return None


def _has_spectral_norm(module: nn.Module, key: str) -> bool:
    """As a parametrization, or as the hook of earlier releases, which renames the weight."""
    if type(module).__name__ == "_SpectralNorm":
        return True
    return f"{key[:-2]}_orig" in cast("Mapping[str, object]", module._parameters)
