"""Write the anchor of a run as safetensors that anybody loads without atoll: model.safetensors,
config.json, atoll.json. Or as an adapter that PEFT loads: adapter_model.safetensors,
adapter_config.json, atoll.json.

Source is the checkpoint in the run's folder (`storage.checkpoint`): the state and, in
``atoll.json``, the layout.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...collectives.errors import ModelMismatchError, StorageError
from ...collectives.layout import Layout
from ..client.beginning import START_FILE
from ..home.paths import Paths, storage_error, write_atomic
from ..manifest import Manifest, SignedManifest, gpt_config

if TYPE_CHECKING:
    from torch import Tensor

    from ..storage.checkpoint import SavedCheckpoint

CHECKPOINT_FOLDER = "checkpoint"
STATE_FILE = "state.safetensors"
INFO_FILE = "atoll.json"
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# PEFT names live tensors with the adapter's name and saved ones without
_LIVE = re.compile(r"(\.lora_[A-Za-z_]+)\.[^.]+|\.modules_to_save\.[^.]+")
_FILE_MODE = 0o644  # made to be handed on


class CheckpointInfo(msgspec.Struct, frozen=True):
    """What ``checkpoint/atoll.json`` must say; it may say more."""

    layout: Layout


class Exported(msgspec.Struct, frozen=True):
    """What was written. ``bytes``: of the weights."""

    round: int
    parameters: int
    tensors: tuple[str, ...]
    bytes: int
    files: tuple[str, ...]


def read_info(folder: Path) -> CheckpointInfo:
    """The description of the checkpoint in ``folder``. Raises StorageError (E303 when it is
    damaged).
    """
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
        raise _damaged(file, str(error)) from None
    if reason := info.layout.check():
        raise _damaged(file, reason)
    return info


def export_run(
    paths: Paths,
    signed: SignedManifest,
    folder: Path,
    *,
    force: bool = False,
    adapter: Path | None = None,
) -> Exported:
    """Write the newest checkpoint of a stored run into ``folder``, after checking it against its
    own digest. Of a run in fragments it is one model of the newest checkpoint of each, and the
    round that of the fragment that is behind. ``adapter``: a folder that PEFT's save_pretrained
    wrote of the model that members train; another such is written, with the run's values.

    Raises StorageError: no checkpoint, a damaged one (E303), files that are there already (without
    ``force``), a full disk. ModelMismatchError: ``adapter`` is of another model.
    """
    manifest = signed.open()
    sources = [
        folder / CHECKPOINT_FOLDER
        for folder in paths.state_dirs(signed.run_id, manifest.exchange.fragments)
    ]
    infos = [read_info(source) for source in sources]
    weights_file = folder / (WEIGHTS_FILE if adapter is None else ADAPTER_FILE)
    if not force and weights_file.exists():
        raise StorageError(
            f"{weights_file} exists",
            why="It is not replaced unasked.",
            hint="Add --force, or give another folder.",
            exit_code=73,
        )
    cut = [_verified(source, info) for source, info in zip(sources, infos, strict=True)]
    tensors = {
        spec.name: saved.anchor[spec.offset : spec.offset + spec.numel].reshape(spec.shape)
        for saved, info in zip(cut, infos, strict=True)
        for spec in info.layout.tensors
        if spec.role != "sum"
    }
    rounds = min(saved.rounds for saved in cut)
    contents = (
        _model_files(tensors, manifest) if adapter is None else _adapter_files(tensors, adapter)
    )
    origin = {
        "run_id": signed.run_id,
        "name": manifest.name,
        "organiser": signed.organiser,
        "round": rounds,
        "state_root": cut[0].root.hex(),
        "manifest": msgspec.to_builtins(manifest),
    }
    if len(cut) > 1:
        origin["fragments"] = [
            {"round": saved.rounds, "state_root": saved.root.hex()} for saved in cut
        ]
        del origin["state_root"]
    contents[INFO_FILE] = _json(origin)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(f"cannot make {folder}", error) from None
    for name, data in contents.items():
        write_atomic(folder / name, data, _FILE_MODE)
    return Exported(
        rounds,
        sum(info.layout.model_numel for info in infos),
        tuple(tensors),
        len(contents[weights_file.name]),
        tuple(contents),
    )


def _model_files(tensors: dict[str, Tensor], manifest: Manifest) -> dict[str, bytes]:
    from safetensors.torch import save

    return {
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: _json(_model_config(manifest)),
    }


def _adapter_files(tensors: dict[str, Tensor], adapter: Path) -> dict[str, bytes]:
    """The run's tensors in place of those of a saved adapter; what the run has frozen stays."""
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    try:
        config = (adapter / ADAPTER_CONFIG).read_bytes()
        saved = load((adapter / ADAPTER_FILE).read_bytes())
    except OSError as error:
        raise storage_error(f"cannot read the adapter in {adapter}", error) from None
    except SafetensorError as error:
        raise StorageError(
            f"{adapter / ADAPTER_FILE} is damaged: {error}",
            hint="Write it again: peft_model.save_pretrained(DIR)",
        ) from None
    mine = {_LIVE.sub(r"\1", name): tensor for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    if wrong := [name for name, tensor in mine.items() if shapes.get(name) != tensor.shape]:
        raise ModelMismatchError(
            f"the adapter in {adapter} is not of the run's model: {len(wrong)} tensors differ, "
            + ", ".join(wrong[:4]),
            hint=(
                "Give a folder that save_pretrained wrote of the model that is attached: "
                "attach(get_peft_model(...)), not of one inside it"
            ),
        )
    return {ADAPTER_FILE: save(saved | mine, metadata={"format": "pt"}), ADAPTER_CONFIG: config}


def keep_start(source: Path, folder: Path) -> None:
    """Keep the exported model in ``source`` in a run's folder: whoever founds the run here begins
    with it. Raises StorageError.
    """
    from safetensors import SafetensorError, deserialize

    path = source / WEIGHTS_FILE
    try:
        data = path.read_bytes()
        deserialize(data)
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from None
    except SafetensorError as error:
        raise _damaged(path, str(error)) from None
    write_atomic(folder / START_FILE, data)


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
        raise _damaged(source / STATE_FILE, "it is missing")
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
        raise _damaged(source / STATE_FILE, "its digest is wrong")
    return saved


def _model_config(manifest: Manifest) -> dict[str, Any]:
    if manifest.model.entry != "builtin:gpt":
        return {"model_type": manifest.model.entry, **manifest.model.config}
    return {
        "model_type": "atoll-gpt",
        "vocab_size": 256,
        "tokenizer": "bytes",
        "torch_dtype": "float32",
        **msgspec.to_builtins(gpt_config(manifest.model)),
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _damaged(file: Path, reason: str) -> StorageError:
    return StorageError(
        f"{file} is damaged: {reason}",
        code="E303",
        why="The disk, or something else than atoll, changed it.",
        hint=f"Move {file.parent} away and join again.",
    )
