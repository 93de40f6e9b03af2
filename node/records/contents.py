"""What goes into an exported folder: by the card that a script left of its model, by a folder that
PEFT wrote, or, with neither, the trained tensors alone under a name that nobody takes for a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...collectives.errors import ModelMismatchError, StorageError
from ...optim.model.adapter_names import saved_names
from ...optim.model.card import FILES, FOLDER, read_card
from ..home.refusals import storage_error
from ..manifest import Manifest, gpt_config

if TYPE_CHECKING:
    from torch import Tensor

    from ...optim.model.card import ModelCard

WEIGHTS_FILE = "model.safetensors"
PARTIAL_FILE = "partial.safetensors"  # not the whole model
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CONFIG_FILE = "config.json"
BUILTIN = "builtin:gpt"


class Contents(msgspec.Struct, kw_only=True):
    """What goes into the folder.

    ``tensors``: of ``file``, the weights; ``names``: the run's tensor that each is, as far as it is
    one. ``how`` loads them: Python, with {folder} and {file} in it. ``missing``: what belongs to
    the model and is not there, with the reason. ``notes``: what whoever hands them on should know.
    ``round``: None for that of the checkpoint.
    """

    file: str
    tensors: dict[str, Any]
    how: str
    files: dict[str, bytes] = {}
    names: dict[str, str] = {}
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    round: int | None = None
    library_class: str = ""  # of transformers
    tied: tuple[str, ...] = ()  # of ``tensors``: those that it takes from others as it loads them
    floats: tuple[str, ...] = ()  # floating types of the live model
    computed: str = ""  # that of the buffers that no file has


def contents_of(
    trained: Mapping[str, Tensor],
    manifest: Manifest,
    folder: Path,
    adapter: Path | None,
    dtype: str | None,
) -> Contents:
    """What is written of a run whose ``folder`` this is; ``trained``: its tensors, by name.
    ``dtype``: of all floating tensors, None for those that they were trained in. Raises
    StorageError, ModelMismatchError.
    """
    if adapter is not None:
        found = _of_adapter(trained, adapter)
    elif (read := read_card(folder / FOLDER)) is not None:
        found = _of_card(trained, manifest, folder / FOLDER, *read, dtype)
    else:
        found = _bare(trained, manifest)
    if dtype is not None:
        _convert(found, dtype)
    if found.file == WEIGHTS_FILE:
        found.how = _how(found)
        if "{file}" not in found.how:  # else all names of the one file are asked for
            for name in found.tied:
                del found.tensors[name]
                found.names.pop(name, None)
    return found


def _of_card(
    trained: Mapping[str, Tensor],
    manifest: Manifest,
    folder: Path,
    card: ModelCard,
    values: Mapping[str, Tensor],
    dtype: str | None,
) -> Contents:
    import torch

    tensors = dict[str, Any]()
    for each in card.saved:
        if each.of and each.of in trained:
            kind, value = getattr(torch, each.dtype), trained[each.of]
            if kind.is_floating_point:
                tensors[each.name] = value.to(getattr(torch, dtype) if dtype else kind)
            else:  # a count or a flag that is averaged
                tensors[each.name] = value.round().to(kind)
        elif (value := values.get(each.same or each.name)) is not None:
            tensors[each.name] = value
    names = {each.name: each.of for each in card.saved if each.of in trained}
    if card.missing:
        return Contents(
            file=PARTIAL_FILE, tensors=tensors, how=PARTLY, names=names, missing=card.missing
        )
    files = {name: _read(folder / FILES / name) for name in card.files}
    if config := _config(manifest, CONFIG_FILE in files):
        files[CONFIG_FILE] = config
    return Contents(
        file=ADAPTER_FILE if card.kind == "peft" else WEIGHTS_FILE,
        tensors=tensors,
        how=AS_ADAPTER if card.kind == "peft" else "",
        library_class=card.transformers_class,
        tied=tuple(each.name for each in card.saved if each.tied and each.name in tensors),
        floats=card.floats,
        computed=card.computed,
        files=files,
        names=names,
        notes=_notes(card, manifest),
        round=card.round if card.made else None,
    )


def _notes(card: ModelCard, manifest: Manifest) -> tuple[str, ...]:
    notes = list[str]()
    if card.wrapped and not card.transformers_class and card.kind == "module":
        notes.append("The script wraps its model (torch.compile, DDP); load before it does.")
    if not card.own:
        return tuple(notes)
    names = ", ".join(card.own[:4]) + (" ..." if len(card.own) > 4 else "")
    frozen = {each.name for each in card.saved if each.frozen} & set(card.own)
    what = "buffers and frozen parameters" if frozen else "buffers"
    notes.append(
        f"{len(card.own)} {what} do not travel and are this machine's own, of round {card.round}: "
        f"{names}"
    )
    if manifest.privacy is not None or manifest.secure is not None:
        notes.append(
            "They follow from this machine's data, and neither masks nor noise were put over them: "
            "think of it before you hand the folder on."
        )
    return tuple(notes)


def _bare(trained: Mapping[str, Tensor], manifest: Manifest) -> Contents:
    """Without a card; a built-in model is known without one."""
    if manifest.model.entry == BUILTIN:
        files = {CONFIG_FILE: _config(manifest, False) or b""}
        names = {name: name for name in trained}
        return Contents(file=WEIGHTS_FILE, tensors=dict(trained), how="", files=files, names=names)
    return Contents(
        file=PARTIAL_FILE,
        tensors=dict(trained),
        how=PARTLY,
        names={name: name for name in trained},
        missing=(
            "whatever was not trained: buffers, frozen parameters, names that share a tensor, the "
            "types of all (no script attached the model on this machine)",
        ),
    )


def _of_adapter(trained: Mapping[str, Tensor], adapter: Path) -> Contents:
    """The run's tensors in place of those of a saved adapter; what the run has frozen stays."""
    from safetensors import SafetensorError
    from safetensors.torch import load

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
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    found = saved_names({name: tuple(t.shape) for name, t in trained.items()}, shapes)
    if wrong := [name for name in trained if name not in found]:
        raise ModelMismatchError(
            f"the adapter in {adapter} is not of the run's model: {len(wrong)} tensors differ, "
            + ", ".join(wrong[:4]),
            hint=(
                "Give a folder that save_pretrained wrote of the model that is attached: "
                "attach(get_peft_model(...)), not of one inside it. Where the script ran on this "
                "machine, leave --adapter out: it knows what PEFT saves"
            ),
        )
    mine = {found[name]: tensor.to(saved[found[name]].dtype) for name, tensor in trained.items()}
    return Contents(
        file=ADAPTER_FILE,
        tensors=saved | mine,
        how=AS_ADAPTER,
        files={ADAPTER_CONFIG: config},
        names={saved_name: name for name, saved_name in found.items()},
    )


PARTLY = (
    "import safetensors.torch; "
    "model.load_state_dict(safetensors.torch.load_file({file}), strict=False)"
)
AS_ADAPTER = "import peft; model = peft.PeftModel.from_pretrained(model, {folder})"


def _how(found: Contents) -> str:
    """How the whole model is loaded, so that its outputs are those that it had in training, in the
    types that it had. A model of one type had all of its buffers in it, too, those included that no
    file has: ``Module.to`` makes it so again.
    """
    floats = set(found.floats) or {
        str(tensor.dtype).removeprefix("torch.")
        for tensor in found.tensors.values()
        if tensor.is_floating_point()
    }
    one = floats.pop() if len(floats) == 1 else ""
    plain = floats <= {"float32"} and one in ("", "float32")
    if found.library_class:
        load = f"transformers.{found.library_class}.from_pretrained({{folder}})"
        if one and not plain:
            return f"import torch, transformers; model = {load}.to(torch.{one})"
        if floats:  # of several types; from_pretrained makes one of them
            computed = f".to(torch.{found.computed})" * (found.computed not in ("", "float32"))
            return (
                f"import torch, transformers, safetensors.torch; model = {load}{computed}; "
                "model.load_state_dict(safetensors.torch.load_file({file}), assign=True); "
                "model.tie_weights()"
            )
        return f"import transformers; model = {load}"
    load = "safetensors.torch.load_file({file})"
    if plain:
        return f"import safetensors.torch; model.load_state_dict({load})"
    if one:
        return f"import torch, safetensors.torch; model.to(torch.{one}).load_state_dict({load})"
    return f"import safetensors.torch; model.load_state_dict({load}, assign=True)"


def _convert(found: Contents, dtype: str) -> None:
    """All floating tensors to one type, as ``Module.to`` does it, and what config.json says."""
    import torch

    kind, found.floats = getattr(torch, dtype), (dtype,)
    for name, tensor in found.tensors.items():
        if tensor.is_floating_point():
            found.tensors[name] = tensor.to(kind)
    if CONFIG_FILE in found.files:
        document = json.loads(found.files[CONFIG_FILE])
        for key in ("dtype", "torch_dtype"):
            if key in document:
                document[key] = dtype
        found.files[CONFIG_FILE] = as_json(document)


def _config(manifest: Manifest, own: bool) -> bytes | None:
    """config.json by the manifest; None where the script's own is the model's, or there is none."""
    if manifest.model.entry == BUILTIN:
        return as_json(
            {
                "model_type": "atoll-gpt",
                "vocab_size": 256,
                "tokenizer": "bytes",
                "dtype": "float32",
                **msgspec.to_builtins(gpt_config(manifest.model)),
            }
        )
    return as_json(manifest.model.config) if manifest.model.config and not own else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from None


def as_json(value: Any) -> bytes:
    """A file of JSON as people read it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
