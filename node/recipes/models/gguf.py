"""One GGUF file made a folder of safetensors, once: a model that was loaded from GGUF cannot be
saved, and reading one takes long.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import struct
import tempfile
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ....collectives.errors import ConfigError
from ...home.refusals import storage_error
from .files import CONFIG
from .libraries import first_line, library

_KEPT = "gguf"  # below the cache
_UNREADABLE = (ValueError, LookupError, RuntimeError, ImportError, struct.error)
"""What transformers raises for a file of another architecture, or one that is cut."""


def config_in(file: Path) -> dict[str, Any] | None:
    """What config.json of its model would say, by the head of a GGUF file; None where it is not
    there, or nobody here can read it.
    """
    if not file.is_file():
        return None
    try:
        transformers = library("transformers")
        library("gguf")
        found = transformers.AutoConfig.from_pretrained(
            str(file.parent), gguf_file=file.name, trust_remote_code=False, local_files_only=True
        )
    except (ConfigError, OSError, *_UNREADABLE):
        return None
    values: dict[str, Any] = found.to_dict()
    return values


def converted(file: Path, digest: str, cache: Path) -> Path:
    """The folder with the dequantised float32 weights, the tokenizer and the configurations of a
    GGUF file whose sha256 is ``digest``; made in ``cache`` where it is not there.

    Raises ConfigError E415 where transformers cannot read it, StorageError.
    """
    folder = cache / _KEPT / digest
    if (folder / CONFIG).exists():
        return folder
    library("transformers")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
    except OSError as error:
        raise storage_error(f"cannot write into {cache}", error) from None
    try:
        with _reading(file) as (transformers, given):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(file.parent), trust_remote_code=False, **given
            )
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            for holder in (model.config, model.generation_config):
                if hasattr(holder, "_model_name_or_path"):
                    del holder._model_name_or_path
            model.save_pretrained(made)
            transformers.AutoTokenizer.from_pretrained(str(file.parent), **given).save_pretrained(
                made
            )
        os.replace(made, folder)
    except OSError as error:
        if (folder / CONFIG).exists():  # another process was faster
            return folder
        raise storage_error(f"cannot convert {file}", error) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def without_weights(file: Path, digest: str, cache: Path, into: Path) -> Path:
    """The folder that a GGUF file was `converted` into, where it was; else ``into``, with its
    configuration and its tokenizer. Raises ConfigError E415, StorageError.
    """
    folder = cache / _KEPT / digest
    if (folder / CONFIG).exists():
        return folder
    try:
        with _reading(file) as (transformers, given):
            folder = str(file.parent)
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, **given
            )
            config.save_pretrained(into)
            transformers.AutoTokenizer.from_pretrained(folder, **given).save_pretrained(into)
    except OSError as error:
        raise storage_error(f"cannot read {file}", error) from None
    return into


@contextlib.contextmanager
def _reading(file: Path) -> Generator[tuple[Any, dict[str, Any]]]:
    """transformers, and what its from_pretrained is told of the file. Raises ConfigError E415 where
    it cannot read that.
    """
    transformers = library("transformers")
    library("gguf")
    try:
        # it draws a bar of every tensor and has no setting that asks it not to
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield transformers, {"gguf_file": file.name, "local_files_only": True}
    except _UNREADABLE as error:
        raise ConfigError(
            f"transformers cannot read {file}: {first_line(error)}",
            key="$.model.gguf",
            code="E415",
            why="It reads whole GGUF files of the architectures that it knows.",
            hint="Fetch the file again, or give the same model as safetensors: hub or folder",
        ) from None
