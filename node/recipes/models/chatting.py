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

from ....collectives.errors import ConfigError, StateError
from ....collectives.foreign import quoted
from ...home.last_resort import refused
from ...home.paths import Paths
from .bringing import base_folder
from .hub import download, look_up
from .libraries import first_line, library, reading
from .loading import mend_generation, read_whole, stops_of
from .tokens import load_tokenizer

_ADAPTER, _ORIGIN = "adapter_config.json", "atoll.json"
MERGED = "talk to what `atoll export RUN DIR --merge` writes on a machine that has the base"


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
        """The answer to ``text``, in pieces, of ``most`` tokens at most. Raises StateError where
        there is none; then nothing was said.
        """
        transformers = library("transformers")
        try:
            given = self._asked(text)
        except Exception as error:  # a template is a program, and raises what it likes
            raise StateError(
                f"the model's chat template refuses the conversation: {quoted(error, 200)}",
                hint="/new begins anew",
            ) from None
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
            raise _unanswered(failed[0])
        self._history.append({"role": "user", "content": text})
        self._history.append({"role": "assistant", "content": "".join(pieces)})

    def _asked(self, text: str) -> Any:
        if not self.templated:
            return self._tokenizer(text, return_tensors="pt")
        return self._tokenizer.apply_chat_template(
            [*self._history, {"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )

    def _pad(self) -> int | None:
        if self._tokenizer.pad_token_id is not None:
            return self._tokenizer.pad_token_id
        return self.stops[0] if self.stops else None


def _unanswered(error: BaseException) -> BaseException:
    """What a library raised in the midst of an answer, as a sentence of ours."""
    if not isinstance(error, IndexError | ValueError | RuntimeError | TypeError):
        return error
    return refused(error, "the model gives no answer") or StateError(
        f"the model gives no answer: {first_line(error, 200)}",
        why="A conversation and its answer that are longer than what the model was made for do "
        "that, among others.",
        hint="/new begins anew; or fewer --tokens",
    )


def open_folder(folder: Path, paths: Paths, device: str | None = None) -> Conversation:
    """The model of an exported folder. An adapter's base is that of the run it was exported of,
    where this machine has it, else what its config names. Raises ConfigError E415.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    adapter = (folder / _ADAPTER).exists()
    whole = _base_of(folder, paths) if adapter else folder
    with (
        reading(
            f"{folder} holds no language model that transformers loads",
            hint="A folder that `atoll export RUN DIR` wrote, or save_pretrained.",
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        model, _ = read_whole(whole)
        if adapter:
            model = library("peft").PeftModel.from_pretrained(model, str(folder))
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
    on_hub = look_up(name, revision, MERGED)
    files = [each for each in on_hub.files if _is_read(each)]
    return download(name, on_hub.commit, files, instead=MERGED)


def _is_read(name: str) -> bool:
    return "/" not in name and name.endswith((".json", ".safetensors", ".jinja", ".model", ".txt"))
