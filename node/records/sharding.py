"""Weights in several files, each of a size that file systems and the hub take, with an index: as
transformers writes and reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
LARGEST = 5_000_000_000  # bytes of a file, by default


def cut(tensors: Mapping[str, Tensor], most: int) -> dict[str, dict[str, Tensor]]:
    """Tensors by file, in their order, each file of at most ``most`` bytes; one tensor that is
    larger has its own. A single file where all fit is not named here: {}.
    """
    groups, size = [dict[str, Any]()], 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if groups[-1] and size + nbytes > most:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += nbytes
    if len(groups) == 1:
        return {}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def index_of(shards: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """The index of such files."""
    sizes = [t.numel() * t.element_size() for group in shards.values() for t in group.values()]
    names = {name: file for file, group in shards.items() for name in group}
    about = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(names.items()))}
    return (json.dumps(about, indent=2) + "\n").encode()


def remove_others(folder: Path, kept: set[str], single: str) -> None:
    """Delete weights of another cut, which would be read in place of these: ``single``, an index,
    shards. Raises OSError.
    """
    for path in [folder / single, folder / INDEX_FILE, *folder.glob(SHARDS)]:
        if path.name not in kept:
            path.unlink(missing_ok=True)


def remove_adapter(folder: Path) -> None:
    """Delete the adapter that a whole model replaces: transformers would put it over the model.
    Raises OSError.
    """
    for name in ADAPTER:
        (folder / name).unlink(missing_ok=True)
