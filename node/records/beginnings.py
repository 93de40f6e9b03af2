"""A run that goes on from a model: what `atoll new --from` takes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ...collectives.errors import ConfigError, StateError
from ...optim.model.card import START_FILE
from ..home.paths import Paths, write_atomic
from ..home.refusals import storage_error
from ..manifest import Manifest, SignedManifest, decode_manifest
from .contents import ADAPTER_FILE, PARTIAL_FILE, WEIGHTS_FILE
from .export import CHECKPOINT_FOLDER, INFO_FILE, damaged
from .sharding import INDEX_FILE


def exported_manifest(source: Path) -> Manifest:
    """The settings of the run that was exported into ``source``. Raises ConfigError."""
    path = source / INFO_FILE
    try:
        plain = json.loads(path.read_bytes())["manifest"]
        manifest = msgspec.convert(plain, Manifest)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} does not say a run's settings: {error}",
            why="Without RUN.toml they are taken from there.",
            hint="atoll new RUN.toml --from DIR",
        ) from None
    return decode_manifest(manifest.encode())


def renamed(manifest: Manifest, name: str) -> Manifest:
    """The same settings under another name. Raises ConfigError for a name that is none."""
    try:
        return decode_manifest(msgspec.structs.replace(manifest, name=name).encode())
    except ConfigError as error:
        raise ConfigError(
            f"{name!r} cannot be a run's name",
            key="--name",
            why=error.message,
            hint="1 to 64 letters, digits, dots, dashes, underscores",
        ) from None


def check_unbegun(paths: Paths, signed: SignedManifest, start: bytes) -> None:
    """Raise StateError where the run has begun, from something else than ``start``: the same
    settings are the same run, which begins once.
    """
    run, folder = signed.run_id, paths.run_dir(signed.run_id)
    begun = [paths.founded_file(run), paths.founded_file(run, 0)]
    begun += [
        state / CHECKPOINT_FOLDER
        for state in paths.state_dirs(run, signed.open().exchange.fragments)
    ]
    if not any(path.exists() for path in begun):
        return
    kept = folder / START_FILE
    if kept.exists() and kept.read_bytes() == start:
        return
    raise StateError(
        f"these are the settings of {signed.open().name} ({run[:8]}), which has begun",
        why="The same settings are the same run, and a run begins once.",
        hint="Give it another name: add --name NAME, or change it in the file.",
        exit_code=73,
    )


def weights_in(source: Path) -> bytes:
    """The tensors of an exported folder, or one that PEFT wrote. Raises StorageError."""
    from safetensors import SafetensorError, deserialize

    if not (source / WEIGHTS_FILE).exists() and (source / INDEX_FILE).exists():
        return _joined(source)
    names = (WEIGHTS_FILE, ADAPTER_FILE, PARTIAL_FILE)
    path = next((source / name for name in names if (source / name).exists()), source / names[0])
    try:
        data = path.read_bytes()
        deserialize(data)
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from None
    except SafetensorError as error:
        raise damaged(path, str(error)) from None
    return data


def _joined(source: Path) -> bytes:
    """Of a folder whose weights are in several files, as one."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save

    tensors, about = dict[str, Any](), dict[str, str]()
    try:
        for name in sorted(
            set(json.loads((source / INDEX_FILE).read_bytes())["weight_map"].values())
        ):
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no file of the folder")
            with safe_open(source / name, framework="pt") as file:  # type: ignore[no-untyped-call]
                about |= file.metadata() or {}
                tensors |= {each: file.get_tensor(each) for each in list(file.keys())}
    except OSError as error:
        raise storage_error(f"cannot read {source}", error) from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(source / INDEX_FILE, str(error)) from None
    return save(tensors, about)


def keep_start(start: bytes, folder: Path) -> None:
    """Keep tensors to start from in a run's folder: whoever founds the run here begins with them.
    Raises StorageError.
    """
    write_atomic(folder / START_FILE, start)
