"""The answers of an exported model, piece by piece: a folder that `atoll export` wrote, or any that
from_pretrained loads.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ....collectives.errors import ConfigError
from ...home.paths import Paths
from .bringing import base_folder
from .hub import download, look_up
from .libraries import first_line, library
from .loading import mend_generation
from .tokens import load_tokenizer

_ADAPTER, _ORIGIN = "adapter_config.json", "atoll.json"
_MARK = "\u2063answer\u2063"  # stands for an answer where the template is looked at


class Conversation:
    """A model with its tokenizer, and what was said so far.

    Without a chat template (a base model) it goes on from the text itself.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        self.templated = bool(tokenizer.chat_template)
        self._history: list[dict[str, str]] = []
        self.stops = stops_of(model, tokenizer)

    def forget(self) -> None:
        """Begin anew."""
        self._history.clear()

    def answer(self, text: str, most: int) -> Iterator[str]:
        """The answer to ``text``, in pieces, of ``most`` tokens at most."""
        transformers = library("transformers")
        self._history.append({"role": "user", "content": text})
        if self.templated:
            given = self._tokenizer.apply_chat_template(
                self._history, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:
            given = self._tokenizer(text, return_tensors="pt")
        given = {key: each.to(self._model.device) for key, each in dict(given).items()}
        given.pop("token_type_ids", None)
        streamer = transformers.TextIteratorStreamer(
            self._tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        failed = list[BaseException]()

        def generate() -> None:
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._model.generate(
                        **given,
                        streamer=streamer,
                        max_new_tokens=most,
                        eos_token_id=self.stops or None,
                        pad_token_id=self._pad(),
                    )
            except BaseException as error:  # said by whoever reads the pieces
                failed.append(error)
                streamer.end()

        thread = threading.Thread(target=generate, name="atoll-chat", daemon=True)
        thread.start()
        pieces = list[str]()
        for piece in streamer:
            if piece:
                pieces.append(piece)
                yield piece
        thread.join()
        if failed:
            raise failed[0]
        self._history.append({"role": "assistant", "content": "".join(pieces)})

    def _pad(self) -> int | None:
        if self._tokenizer.pad_token_id is not None:
            return self._tokenizer.pad_token_id
        return self.stops[0] if self.stops else None


def stops_of(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: those of the generation config, the tokenizer's, and the first
    that the template puts behind an assistant's answer.
    """
    found = list[int]()
    given = getattr(model.generation_config, "eos_token_id", None)
    found += given if isinstance(given, list) else [given] if given is not None else []
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        told = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        text = str(tokenizer.apply_chat_template(told, tokenize=False))
        behind = text.rpartition(_MARK)[2]
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
        if ids and ids[0] in tokenizer.all_special_ids:
            found.append(ids[0])
    return list(dict.fromkeys(found))


def open_folder(folder: Path, paths: Paths, device: str | None = None) -> Conversation:
    """The model of an exported folder. An adapter's base is that of the run it was exported of,
    where this machine has it, else what its config names. Raises ConfigError E415.
    """
    transformers = library("transformers")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    adapter = (folder / _ADAPTER).exists()
    whole = _base_of(folder, paths) if adapter else folder
    given: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(whole), use_safetensors=True, **given
            )
            if adapter:
                model = library("peft").PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{folder} holds no language model that transformers loads: {first_line(error)}",
            code="E415",
            hint="A folder that `atoll export RUN DIR` wrote, or save_pretrained.",
        ) from None
    mend_generation(model)
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    return Conversation(model.to(device), load_tokenizer(folder if has_tokenizer else whole))


def _base_of(folder: Path, paths: Paths) -> Path:
    try:
        run_id = str(json.loads((folder / _ORIGIN).read_bytes())["run_id"])
        if "/" not in run_id and (found := base_folder(paths, run_id)) is not None:
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        about = json.loads((folder / _ADAPTER).read_bytes())
        name, revision = str(about["base_model_name_or_path"]), about.get("revision") or "main"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / _ADAPTER} names no base: {error}", code="E415") from None
    if Path(name).is_dir():
        return Path(name)
    on_hub = look_up(name, revision)
    return download(name, on_hub.commit, [each for each in on_hub.files if _is_read(each)])


def _is_read(name: str) -> bool:
    return "/" not in name and name.endswith((".json", ".safetensors", ".jinja", ".model", ".txt"))
