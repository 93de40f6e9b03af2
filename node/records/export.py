"""Write the model of a run into a folder that anybody loads without atoll: model.safetensors,
config.json and what else belongs to it; or an adapter as PEFT saves it. atoll.json says where it
comes from.

The trained tensors are the anchor of the newest checkpoint in the run's folder
(`storage.checkpoint`). All else, buffers, frozen parameters, names that share a tensor, types,
configurations, is on the card that the script left there when it attached the model
(`optim.model.card`). Where that is missing, what there is gets a name that nobody takes for a
model: partial.safetensors (`contents`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...collectives.errors import StorageError
from ...collectives.layout import Layout
from ..home.paths import Paths, write_atomic
from ..home.refusals import storage_error
from ..manifest import SignedManifest
from .contents import (
    Contents,
    as_json,
    contents_of,
)

if TYPE_CHECKING:
    from ..storage.checkpoint import SavedCheckpoint

CHECKPOINT_FOLDER = "checkpoint"
STATE_FILE = "state.safetensors"
INFO_FILE = "atoll.json"
DTYPES = ("float32", "bfloat16", "float16")
_FILE_MODE = 0o644  # made to be handed on


class CheckpointInfo(msgspec.Struct, frozen=True):
    """What ``checkpoint/atoll.json`` must say; it may say more."""

    layout: Layout


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written. ``tensors``: in ``file``, the weights, of so many ``bytes``. ``load``: a
    line of Python that loads them. ``missing``: what belongs to the model and is not there, with
    the reason. ``notes``: what whoever hands it on should know.
    """

    round: int
    parameters: int
    tensors: tuple[str, ...]
    bytes: int
    files: tuple[str, ...]
    load: str
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def read_info(folder: Path) -> CheckpointInfo:
    """The description of the checkpoint in ``folder``. Raises StorageError (E303: damaged)."""
    file = folder / INFO_FILE
    try:
        info = msgspec.json.decode(file.read_bytes(), type=CheckpointInfo)
    except FileNotFoundError:
        raise StorageError(
            f"there is no checkpoint in {folder}",
            why=(
                "The node has not committed enough rounds of this run yet, or "
                "it never held its state."
            ),
            hint="atoll status shows the round.",
        ) from None
    except OSError as error:
        raise storage_error(f"cannot read {file}", error) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from None
    if reason := info.layout.check():
        raise damaged(file, reason)
    return info


def export_run(
    paths: Paths,
    signed: SignedManifest,
    folder: Path,
    *,
    force: bool = False,
    adapter: Path | None = None,
    dtype: str | None = None,
) -> Exported:
    """Write the newest checkpoint of a stored run into ``folder``, after checking it against its
    own digest. Of a run in fragments it is one model of the newest checkpoint of each, and the
    round that of the fragment that is behind. ``adapter``: a folder that PEFT's save_pretrained
    wrote of the model that members train, where no script ran here; another such is written, with
    the run's values. ``dtype``: one of `DTYPES`, for all floating tensors.

    Raises StorageError: no checkpoint, a damaged one (E303), files that are there already (without
    ``force``), a full disk. ModelMismatchError: ``adapter`` is of another model.
    """
    manifest = signed.open()
    sources = [
        folder / CHECKPOINT_FOLDER
        for folder in paths.state_dirs(signed.run_id, manifest.exchange.fragments)
    ]
    infos = [read_info(source) for source in sources]
    cut = [_verified(source, info) for source, info in zip(sources, infos, strict=True)]
    trained = {
        spec.name: saved.anchor[spec.offset : spec.offset + spec.numel].reshape(spec.shape)
        for saved, info in zip(cut, infos, strict=True)
        for spec in info.layout.tensors
        if spec.role != "sum"
    }
    contents = contents_of(trained, manifest, paths.run_dir(signed.run_id), adapter, dtype)
    rounds = min(saved.rounds for saved in cut) if contents.round is None else contents.round
    contents.files[INFO_FILE] = as_json(_origin(signed, cut, rounds, contents))
    if not force:
        _refuse_to_replace(folder, (contents.file, *contents.files))
    size = _write(folder, contents)
    return Exported(
        round=rounds,
        parameters=sum(info.layout.model_numel for info in infos),
        tensors=tuple(contents.tensors),
        bytes=size,
        files=(contents.file, *contents.files),
        load=contents.how.format(folder=repr(str(folder)), file=repr(str(folder / contents.file))),
        missing=contents.missing,
        notes=contents.notes,
    )


def _origin(
    signed: SignedManifest, cut: list[SavedCheckpoint], rounds: int, contents: Contents
) -> dict[str, Any]:
    manifest = signed.open()
    origin = {
        "run_id": signed.run_id,
        "name": manifest.name,
        "organiser": signed.organiser,
        "round": rounds,
        "missing": contents.missing,
        "notes": contents.notes,
        "manifest": msgspec.to_builtins(manifest),
    }
    if len(cut) > 1:
        origin["fragments"] = [
            {"round": saved.rounds, "state_root": saved.root.hex()} for saved in cut
        ]
    else:
        origin["state_root"] = cut[0].root.hex()
    return origin


def _refuse_to_replace(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (folder / name).exists():
            raise StorageError(
                f"{folder / name} exists",
                why="It is not replaced unasked.",
                hint="Add --force, or give another folder.",
                exit_code=73,
            )


def _write(folder: Path, contents: Contents) -> int:
    """Write it all; the bytes of the weights. Raises StorageError."""
    from ...optim.model.tensor_file import write_tensors

    names = {name: of for name, of in contents.names.items() if name != of}
    about = {"format": "pt"} | ({"names": json.dumps(names)} if names else {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size = write_tensors(folder / contents.file, contents.tensors, about, _FILE_MODE)
        for name, data in contents.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / name, data, _FILE_MODE)
    except OSError as error:
        raise storage_error(f"cannot write into {folder}", error) from None
    return size


def verified_checkpoint(source: Path) -> SavedCheckpoint | None:
    """The checkpoint in a folder, its bytes checked against its own root; None where there is none.
    Raises StorageError E303.
    """
    return _verified(source, read_info(source)) if (source / INFO_FILE).exists() else None


def _verified(source: Path, info: CheckpointInfo) -> SavedCheckpoint:
    """The checkpoint, its bytes checked against the Merkle root that it was saved under."""
    from ...collectives.digest import chunk_hash, merkle_root
    from ..session.replica import state_chunk_bytes
    from ..storage.checkpoint import load

    saved = load(source, info.layout.numel)
    if saved is None:
        raise damaged(source / STATE_FILE, "it is missing")
    state = memoryview(
        b"".join(tensor.contiguous().numpy().tobytes() for tensor in (saved.anchor, saved.momentum))
    )
    step = state_chunk_bytes(info.layout.numel)
    if (
        merkle_root(
            [chunk_hash(state[start : start + step]) for start in range(0, len(state), step)]
        )
        != saved.root
    ):
        raise damaged(source / STATE_FILE, "its digest is wrong")
    return saved


def damaged(file: Path, reason: str) -> StorageError:
    """The coded error for a file that was something else once."""
    return StorageError(
        f"{file} is damaged: {reason}",
        code="E303",
        why="The disk, or something else than atoll, changed it.",
        hint=f"Move {file.parent} away and join again.",
    )
