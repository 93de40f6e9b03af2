"""The state of a run on disk: `state.safetensors` (anchor and momentum, float32 (numel,)) and
`atoll.json` (what they mean).

Two generations: the one before is `before.safetensors`. A checkpoint is written, forced, renamed,
and its name forced; at every instant at least one whole generation is on the medium. Until an entry
follows the newest, no certificate names that one's root, and a member that lags could not believe
it: then the one before it is what can be proved.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ...collectives.errors import StorageError
from ...collectives.layout import Layout
from .medium import (
    PIECE_BYTES,
    REAL,
    Medium,
    contents_of,
    make_folder,
    storage_error,
    write_atomically,
)

NEWEST, BEFORE = "state.safetensors", "before.safetensors"
MAX_HEAD_BYTES = 1 << 20


class SavedCheckpoint(NamedTuple):
    """A checkpoint: the state after log entry ``entry``, which holds ``rounds`` rounds; ``root`` is
    its Merkle root.
    """

    entry: int
    rounds: int
    root: bytes
    anchor: Tensor
    momentum: Tensor


def save(
    folder: Path,
    layout: Layout,
    saved: SavedCheckpoint,
    *,
    run_id: str,
    entry_hash: bytes,
    medium: Medium = REAL,
    keep_newest: bool = True,
) -> None:
    """Write a checkpoint beside the last one, which stays: a kill, a full disk or a power cut
    leaves one of the two. Raises StorageError.

    Without ``keep_newest`` the last one is of no use, and the one before stays instead.

    It is on the medium when this returns. Large files are forced in pieces, so that a vote never
    waits for all of one.
    """
    counts = {"entry": saved.entry, "round": saved.rounds}
    meta = {
        **{name: str(count) for name, count in counts.items()},
        "root": saved.root.hex(),
        "hash": entry_hash.hex(),
        "run_id": run_id,
    }
    path, temporary = folder / NEWEST, folder / (NEWEST + ".new")
    try:
        make_folder(folder, medium)
        _write(medium, temporary, {"anchor": saved.anchor, "momentum": saved.momentum}, meta)
        if keep_newest and medium.exists(path):
            medium.replace(path, folder / BEFORE)
        medium.replace(temporary, path)
        medium.sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            medium.remove(temporary)
        raise storage_error(path, error) from error
    document = {"schema": 1, **meta, **counts, "layout": msgspec.to_builtins(layout)}
    write_atomically(folder / "atoll.json", json.dumps(document).encode(), medium=medium)


def _write(medium: Medium, path: Path, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    """Float32 vectors as safetensors, from where they lie: the library's own way copies them first.
    Raises OSError.
    """
    header: dict[str, object] = {"__metadata__": meta}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": [tensor.numel()],
            "data_offsets": [end, end := end + 4 * tensor.numel()],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    medium.remove(path)  # of a write that was cut short, and perhaps longer
    file = medium.open(path)
    try:
        at = 0
        for data in (
            memoryview(len(head).to_bytes(8, "little") + head),
            *(tensor.numpy().data.cast("B") for tensor in tensors.values()),
        ):
            for first in range(0, len(data), PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                medium.write(file, piece, at)
                at += len(piece)
                if len(piece) == PIECE_BYTES:
                    medium.sync(file)
        medium.sync(file)
    finally:
        medium.close(file)


def load(
    folder: Path,
    numel: int,
    state_numel: int | None = None,
    *,
    alone: bool = False,
    medium: Medium = REAL,
    name: str = "",
) -> SavedCheckpoint | None:
    """The last checkpoint, or that in the file ``name``; None when there is none. Its root is not
    checked.

    Raises StorageError E303 when it cannot be read (``alone``: see `damaged`).
    """
    path = folder / (name or NEWEST)
    if not medium.exists(path):
        return None
    try:
        meta, tensors = _read(medium, path)
        anchor, momentum = tensors["anchor"], tensors["momentum"]
        saved = SavedCheckpoint(
            int(meta["entry"]), int(meta["round"]), bytes.fromhex(meta["root"]), anchor, momentum
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, str(error), alone=alone) from error
    sizes = ((anchor, numel), (momentum, momentum.numel() if state_numel is None else state_numel))
    if any(t.shape != (size,) for t, size in sizes):
        raise damaged(path, "its tensors do not fit the run's model", alone=alone)
    return saved


def entry_of(folder: Path, name: str, medium: Medium = REAL) -> int | None:
    """The log entry of a checkpoint, by its header; None if none can be read."""
    try:
        file = medium.open(folder / name) if medium.exists(folder / name) else -1
        if file < 0:
            return None
        try:
            return int(_header(medium, file)[1]["__metadata__"]["entry"])
        finally:
            medium.close(file)
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _header(medium: Medium, file: int) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and what is said of them. Raises OSError, ValueError."""
    length, total = int.from_bytes(medium.read(file, 8, 0), "little"), medium.size(file)
    if not 0 < length <= min(MAX_HEAD_BYTES, total - 8):
        raise ValueError("its header is cut short")
    return 8 + length, json.loads(medium.read(file, length, 8))


def _read(medium: Medium, path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What `_write` wrote. Raises OSError, ValueError, KeyError, TypeError."""
    file = medium.open(path)
    try:
        begin, header = _header(medium, file)
        total = medium.size(file)
        meta, tensors = header.pop("__metadata__"), dict[str, Tensor]()
        for name, about in header.items():
            first, stop = about["data_offsets"]
            if about["dtype"] != "F32" or (stop - first) % 4 or not 0 <= first <= stop <= total:
                raise ValueError("its header names no float32 vectors")
            tensor = torch.empty((stop - first) // 4, dtype=torch.float32)
            data, at = tensor.numpy().data.cast("B"), begin + first
            for piece in range(0, len(data), PIECE_BYTES):
                part = data[piece : piece + PIECE_BYTES]
                part[:] = medium.read(file, len(part), at + piece)  # ValueError where it is shorter
            tensors[name] = tensor
        return meta, tensors
    finally:
        medium.close(file)


ELSE = (
    "If nobody has it whole, a new run goes on from the newest checkpoint of any member: "
    "atoll export RUN DIR there, then atoll new --from DIR --name NAME."
)
FETCHED = f"The state is fetched from the other members, if one has it. {ELSE}"


class AheadError(StorageError):
    """A whole checkpoint is of an entry that the journal has not: power went before that was on the
    medium. ``alone``: see `damaged`.
    """

    def __init__(self, path: Path, entry: int, *, alone: bool) -> None:
        super().__init__(
            f"{path} is of entry {entry}, which the journal does not reach",
            code="E303",
            why=(
                "Power went before the journal was on the medium. No other member is known that "
                "has the state, so nothing here was touched."
            )
            if alone
            else "Power went before the journal was on the medium.",
            hint=(
                f"Restore {path.parent.parent} from a backup and try again; or, if others do have "
                f"the run's state, move it away and join again. {ELSE}"
            )
            if alone
            else FETCHED,
            exit_code=74,
        )


def damaged(path: Path, why: str, *, alone: bool = False) -> StorageError:
    """The coded error for local state that cannot be used; ``alone``: no other member is known from
    whom to fetch it.
    """
    return StorageError(
        f"{path} is damaged: {why}",
        code="E303",
        why="the file was changed, the disk returned other bytes, or lost what it had confirmed"
        + (
            "; no other member is known that has the state, so nothing here was touched"
            if alone
            else ""
        ),
        hint=(
            (
                "Restore it from a backup and try again; or, if others do have the run's state, "
                f"move {path.parent} away and join again. {ELSE}"
            )
            if alone
            else f"{FETCHED} Check the disk."
        ),
        exit_code=74,
    )


def saved_layout(folder: Path, medium: Medium = REAL) -> Layout | None:
    """The layout that the checkpoint was written with, if it can be read."""
    try:
        document = json.loads(contents_of(folder / "atoll.json", medium))
        return msgspec.convert(document["layout"], Layout)
    except (OSError, ValueError, KeyError, TypeError):  # ValueError: msgspec and json raise it, too
        return None
