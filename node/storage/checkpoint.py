"""The state of a run on disk: `state.safetensors` (anchor and momentum, float32 (numel,)) and `atoll.json` (what they mean).

`before.safetensors` is the checkpoint before it: until an entry follows the newest, no certificate names that one's root, and a
member that lags could not believe it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...collectives.errors import StorageError
from ...collectives.layout import Layout
from .journal import storage_error, write_atomically

STATE, BEFORE = "state.safetensors", "before.safetensors"


class Saved(NamedTuple):
    """A checkpoint: the state after log entry ``entry``, which holds ``rounds`` rounds; ``root`` is its Merkle root."""

    entry: int
    rounds: int
    root: bytes
    anchor: Tensor
    momentum: Tensor


def save(folder: Path, layout: Layout, saved: Saved, *, run_id: str, entry_hash: bytes) -> None:
    """Write a checkpoint; the last one becomes the one before it. A kill or a full disk leaves the last one. Raises StorageError."""
    counts = {"entry": saved.entry, "round": saved.rounds}
    meta = {
        **{name: str(count) for name, count in counts.items()},
        "root": saved.root.hex(),
        "hash": entry_hash.hex(),
        "run_id": run_id,
    }
    path, temporary = folder / STATE, folder / f"{STATE}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(temporary, {"anchor": saved.anchor, "momentum": saved.momentum}, meta)
        if (last := entry_of(path)) is not None and last < saved.entry:
            _keep_before(path, folder / BEFORE)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error
    document = {"schema": 1, **meta, **counts, "layout": msgspec.to_builtins(layout)}
    write_atomically(folder / "atoll.json", json.dumps(document).encode())


def _write(path: Path, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    """Float32 vectors as safetensors, from where they lie: the library's own way copies them first. Raises OSError."""
    header: dict[str, object] = {"__metadata__": meta}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": [tensor.numel()],
            "data_offsets": [at, at := at + 4 * tensor.numel()],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(tensor.numpy().data.cast("B"))


def _keep_before(path: Path, before: Path) -> None:
    """Give the file a second name: `path` is there all the time."""
    second = before.with_suffix(".new")
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:  # a file system without links: it has one checkpoint for the blink of an eye
        os.replace(path, before)
    else:
        os.replace(second, before)


def entry_of(path: Path) -> int | None:
    """The log entry whose state a file holds; None where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            return int(file.metadata()["entry"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def load(
    folder: Path,
    numel: int,
    state_numel: int | None = None,
    *,
    alone: bool = False,
    name: str = STATE,
) -> Saved | None:
    """The last checkpoint, or None when there is none; ``name``: of which file.

    Raises StorageError E303 when it cannot be read (``alone``: see `damaged`).
    """
    path = folder / name
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            meta = file.metadata()
            anchor, momentum = file.get_tensor("anchor"), file.get_tensor("momentum")
        saved = Saved(
            int(meta["entry"]), int(meta["round"]), bytes.fromhex(meta["root"]), anchor, momentum
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, str(error), alone=alone) from error
    sizes = ((anchor, numel), (momentum, momentum.numel() if state_numel is None else state_numel))
    if any(t.dtype != torch.float32 or t.shape != (size,) for t, size in sizes):
        raise damaged(path, "its tensors do not fit the run's model", alone=alone)
    return saved


def damaged(path: Path, why: str, *, alone: bool = False) -> StorageError:
    """The coded error for local state that cannot be used; ``alone``: no other member is known from whom to fetch it."""
    return StorageError(
        f"{path} is damaged: {why}",
        code="E303",
        why="the file was changed or the disk returned other bytes"
        + (
            "; no other member is known that has the state, so nothing here was touched"
            if alone
            else ""
        ),
        hint=(
            f"restore it from a backup and try again; or, if others do have the run's state, move {path.parent} away and join again"
            if alone
            else "the state is fetched again from the other members; check the disk"
        ),
        exit_code=74,
    )


def saved_layout(folder: Path) -> Layout | None:
    """The layout that the checkpoint was written with, if it can be read."""
    try:
        return msgspec.convert(json.loads((folder / "atoll.json").read_bytes())["layout"], Layout)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # ValueError: also what msgspec and json raise
        return None
