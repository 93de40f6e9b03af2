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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...collectives.errors import StorageError
from ...collectives.layout import Layout
from ..home.paths import Paths, write_atomic
from ..home.refusals import storage_error
from ..manifest import SignedManifest
from .contents import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    Contents,
    as_json,
    contents_of,
)
from .model_card import CARD_FILE, card_of, energy_in, evaluation_in, worked_in
from .sharding import ADAPTER, INDEX_FILE, LARGEST, cut, index_of, remove_adapter, remove_others

if TYPE_CHECKING:
    from ..storage.checkpoint import SavedCheckpoint

CHECKPOINT_FOLDER = "checkpoint"
INFO_FILE, LAYOUT_FILE = "atoll.json", "layout"
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
        try:  # written once, when the state came: a power cut that takes this one leaves it
            kept = (folder.parent / LAYOUT_FILE).read_bytes()
            info = CheckpointInfo(msgspec.msgpack.decode(kept, type=Layout))
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
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
    largest: int = LARGEST,
    credited: Sequence[str] = (),
) -> Exported:
    """Write the newest whole checkpoint of a stored run into ``folder``, checked against its own
    digest. Of a run in fragments it is one model of the newest checkpoint of each, and the
    round that of the fragment that is behind. ``adapter``: a folder that PEFT's save_pretrained
    wrote of the model that members train, where no script ran here; another such is written, with
    the run's values. ``dtype``: one of `DTYPES`, for all floating tensors. ``largest``: bytes of a
    file of weights, above which a model of transformers is written in several. ``credited``: names
    of members who agreed to stand on the card.

    Raises StorageError: no checkpoint, a damaged one (E303), files that are there already (without
    ``force``), a full disk. ModelMismatchError: ``adapter`` is of another model.
    """
    manifest = signed.open()
    sources = [
        folder / CHECKPOINT_FOLDER
        for folder in paths.state_dirs(signed.run_id, manifest.exchange.fragments)
    ]
    infos = [read_info(source) for source in sources]
    sources_cut = [_verified(source, info) for source, info in zip(sources, infos, strict=True)]
    trained = {
        spec.name: saved.anchor[spec.offset : spec.offset + spec.numel].reshape(spec.shape)
        for saved, info in zip(sources_cut, infos, strict=True)
        for spec in info.layout.tensors
        if spec.role != "sum"
    }
    contents = contents_of(trained, manifest, paths.run_dir(signed.run_id), adapter, dtype)
    rounds = contents.round
    if rounds is None:
        rounds = min(saved.rounds for saved in sources_cut)
    contents.files[INFO_FILE] = as_json(_origin(signed, sources_cut, rounds, contents))
    how = contents.how.format(folder=repr(str(folder)), file=repr(str(folder / contents.file)))
    if CARD_FILE not in contents.files and not contents.missing:
        contents.files[CARD_FILE] = card_of(
            signed,
            rounds,
            worked=worked_in(paths, signed),
            evaluation=evaluation_in(paths.run_dir(signed.run_id)),
            energy=energy_in(paths.run_dir(signed.run_id)),
            credited=credited,
            how=contents.how.format(folder='"."', file=f'"{contents.file}"'),
        )
    shards = _shards(contents, largest)
    weights = (*shards, INDEX_FILE) if shards else (contents.file,)
    if contents.file == ADAPTER_FILE:
        _refuse_beside(folder)
    if not force:
        others = ADAPTER if contents.file == WEIGHTS_FILE else ()
        _refuse_to_replace(folder, (*weights, *contents.files, *others))
    size = _write(folder, contents, shards)
    return Exported(
        round=rounds,
        parameters=sum(info.layout.model_numel for info in infos),
        tensors=tuple(contents.tensors),
        bytes=size,
        files=(*weights, *contents.files),
        load=how,
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


def _refuse_beside(folder: Path) -> None:
    """Raise StorageError where an adapter would come to lie beside a whole model."""
    for name in (WEIGHTS_FILE, INDEX_FILE):
        if (folder / name).exists():
            raise StorageError(
                f"{folder} holds a whole model ({name})",
                why="transformers puts an adapter that lies beside a model over it.",
                hint="Give another folder.",
                exit_code=73,
            )


def _shards(contents: Contents, largest: int) -> dict[str, dict[str, Any]]:
    """The files of a model that transformers loads by its index; {} for one file."""
    alone = contents.file != WEIGHTS_FILE or not contents.library_class
    if alone or "{file}" in contents.how:  # several types: whoever loads it reads the one file
        return {}
    return cut(contents.tensors, largest)


def _write(folder: Path, contents: Contents, shards: dict[str, dict[str, Any]]) -> int:
    """Write it all; the bytes of the weights. Raises StorageError."""
    from ...optim.model.tensor_file import write_tensors

    names = {name: of for name, of in contents.names.items() if name != of}
    about = {"format": "pt"} | ({"names": json.dumps(names)} if names else {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = shards or {contents.file: contents.tensors}
        size = sum(
            write_tensors(folder / name, tensors, about, _FILE_MODE)
            for name, tensors in files.items()
        )
        if shards:
            write_atomic(folder / INDEX_FILE, index_of(shards), _FILE_MODE)
        if contents.file == WEIGHTS_FILE:
            remove_others(folder, {*files, *([INDEX_FILE] if shards else [])}, WEIGHTS_FILE)
            remove_adapter(folder)
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
    """The newest checkpoint that is whole: its bytes are checked against the Merkle root that it
    was saved under. Raises StorageError E303 about the newest where none is.
    """
    from ..storage.checkpoint import BEFORE, NEWEST

    try:
        return _whole(source, info, NEWEST)
    except StorageError as newest:
        try:
            return _whole(source, info, BEFORE)
        except StorageError:
            raise newest from None


def _whole(source: Path, info: CheckpointInfo, name: str) -> SavedCheckpoint:
    from ...collectives.digest import chunk_hash, merkle_root
    from ..session.replica import state_chunk_bytes
    from ..storage.checkpoint import load

    saved = load(source, info.layout.numel, name=name)
    if saved is None:
        raise damaged(source / name, "it is missing")
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
        raise damaged(source / name, "its digest is wrong")
    return saved


def damaged(file: Path, reason: str) -> StorageError:
    """The coded error for a file that was something else once."""
    return StorageError(
        f"{file} is damaged: {reason}",
        code="E303",
        why="The disk, or something else than atoll, changed it.",
        hint=f"Move {file.parent} away and join again.",
    )
