"""What a machine keeps to go on where it stopped: one safetensors file, written beside the old one
and put in its place, so that there is always one that is whole.

Tensors lie in it as they are; what is around them (numbers, texts, lists, dictionaries) as JSON in
its head. Nothing in it is code.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....collectives.errors import StateError
from ....collectives.forced import make_folder, sync_folder
from ...home.refusals import storage_error

VERSION = 1
HEAD = "atoll"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Keep a dictionary of tensors, numbers, texts, lists, tuples and dictionaries. Raises
    StorageError; the file that was there is then as it was.
    """
    tensors = dict[str, Tensor]()
    head = json.dumps({"version": VERSION, "state": _packed(state, tensors)})
    new = path.with_suffix(".new")
    try:
        make_folder(path.parent)
        new.touch(mode=0o600)  # it holds what the model has learned
        save_file(tensors, new, {HEAD: head})
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise storage_error(f"cannot keep the training state in {path.parent}", error) from None


def read_state(path: Path) -> dict[str, Any] | None:
    """What `write_state` kept; None where there is nothing. Raises StateError for a file that is
    damaged, or that another version wrote.
    """
    if not path.exists():
        return None
    hint = f"Begin without it: mv {path} {path}.old"
    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads((file.metadata() or {})[HEAD])
            if head["version"] != VERSION:
                raise StateError(
                    f"{path} was written by another version of atoll ({head['version']})", hint=hint
                )
            return cast("dict[str, Any]", _unpacked(head["state"], file))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} is damaged, so training cannot go on from it: {error!r}", hint=hint
        ) from None


def random_state() -> dict[str, Any]:
    """The states of torch's random numbers, on all devices in use, and of Python's."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": devices, "python": random.getstate()}


def restore_random(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers of `random_state`; those of devices where there are as many."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON that stands for ``value``, whose tensors are put into ``tensors``."""
    if isinstance(value, Tensor):
        found = value.detach().cpu().contiguous()
        if found.untyped_storage().nbytes() != found.numel() * found.element_size():
            found = found.clone()  # else the memory around it would be kept, too
        for name, other in tensors.items():  # tables that all states of an optimizer share
            if found.numel() and other.data_ptr() == found.data_ptr():
                return {"tensor": name}
        name = str(len(tensors))
        tensors[name] = found
        return {"tensor": name}
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {"items": [[_packed(key, tensors), _packed(each, tensors)] for key, each in pairs]}
    if isinstance(value, tuple):
        return {"tuple": [_packed(each, tensors) for each in cast("tuple[Any, ...]", value)]}
    if isinstance(value, list):
        return [_packed(each, tensors) for each in cast("list[Any]", value)]
    return value


def _unpacked(value: Any, file: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, file) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = cast("dict[str, Any]", value).items()
    if kind == "tensor":
        return file.get_tensor(inside)
    if kind == "tuple":
        return tuple(_unpacked(each, file) for each in inside)
    return {_unpacked(key, file): _unpacked(each, file) for key, each in inside}
