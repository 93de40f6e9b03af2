"""Which files make a pretrained model, which are refused, and their digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ....collectives.errors import ConfigError
from ....collectives.foreign import escaped
from ...home.refusals import storage_error

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
BESIDE = frozenset(
    {
        CONFIG,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
    }
)
"""Files beside the weights that are read, where they are there."""
_RUN = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")  # formats that may hold code
MAX_JSON = 64 << 20
_CHUNK = 1 << 20


def choose(names: Collection[str], where: str) -> tuple[list[str], bool]:
    """Those of ``names`` that are read beside the weights, and whether these are in shards. Raises
    ConfigError E415 where the weights are no safetensors, or those of an adapter.
    """
    there = {name for name in names if "/" not in name}
    if "adapter_config.json" in there:
        raise ConfigError(
            f"{where} holds an adapter",
            code="E415",
            why="A run starts from a whole model; transformers would put the adapter over it.",
            hint="Name the adapter's base, or merge it in first: merge_and_unload() of peft; of a "
            "run of atoll: atoll export RUN DIR --merge",
        )
    if CONFIG not in there:
        raise ConfigError(
            f"{where} has no {CONFIG}",
            code="E415",
            why="It says which model the weights are of.",
            hint="A folder that save_pretrained wrote, a model of the hub, or a GGUF file.",
        )
    shards = INDEX in there
    if not shards and WEIGHTS not in there:
        others = sorted(name for name in there if name.endswith(_RUN))
        raise ConfigError(
            f"{where} has its weights in {', '.join(others[:3])}"
            if others
            else f"{where} has no {WEIGHTS}",
            code="E415",
            why="Reading such a file may run code that is in it; only safetensors and GGUF are "
            "read."
            if others
            else "Only safetensors and GGUF are read.",
            hint="Another revision or copy of the model, with safetensors.",
        )
    return sorted(BESIDE & there) + ([INDEX] if shards else []), shards


def weights_of(folder: Path, shards: bool) -> list[str]:
    """The files of weights, by the index in ``folder`` where there are several."""
    if not shards:
        return [WEIGHTS]
    found: Any = read_json(folder / INDEX).get("weight_map")
    names = sorted(set(found.values())) if isinstance(found, dict) else []
    if not names or not all(
        isinstance(name, str) and name.endswith(".safetensors") and "/" not in name
        for name in names
    ):
        raise ConfigError(
            f"{folder / INDEX} names no safetensors of its folder",
            code="E415",
            hint="Another revision or copy of the model.",
        )
    return names


def refuse_code(folder: Path, where: str) -> None:
    """Raise ConfigError E415 where a configuration names Python of the model's own."""
    for name in (CONFIG, "tokenizer_config.json"):
        if (folder / name).exists() and read_json(folder / name).get("auto_map"):
            raise ConfigError(
                f"{where} brings Python of its own ({name}: auto_map)",
                code="E415",
                why="Code from the network is never run here.",
                hint="A model that transformers itself knows, or a script of your own: "
                'entry = "local:NAME"',
            )


def refuse_quantised(folder: Path, where: str) -> None:
    """Raise ConfigError E415 where the weights are packed: nothing can be added to them, merged or
    exported again.
    """
    found = read_json(folder / CONFIG).get("quantization_config")
    if found:
        kind = found.get("quant_method", "") if isinstance(found, dict) else ""
        raise ConfigError(
            f"the weights of {where} are quantised" + f" ({escaped(kind, 40)})" * bool(kind),
            code="E415",
            why="What is learned is added to the weights themselves, and exported with them.",
            hint='The model in 16 bits; method = "qlora" holds it in four while it trains.',
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises ConfigError E415, StorageError."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ConfigError(f"{path} is larger than {MAX_JSON >> 20} MiB", code="E415")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}", code="E415") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object", code="E415")
    return found


def sha256_of(path: Path) -> str:
    """Of a file's bytes, 64 hexadecimal digits. Raises StorageError."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                found.update(data)
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from None
    return found.hexdigest()


def link_all(source: Mapping[str, Path], folder: Path) -> None:
    """Make ``folder`` hold links to these files, and nothing else. Raises StorageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, path in source.items():
            (folder / name).symlink_to(path.absolute())
    except OSError as error:
        raise storage_error(f"cannot write into {folder}", error) from None
