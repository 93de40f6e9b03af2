"""How a model is saved by its own means: the names and tensors of ``state_dict()``, or of a PEFT
model those that PEFT saves, and the files that lie beside them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from ...collectives.errors import ConfigError
from ..model.card import Saved
from ..model.flat import FlatVector, clean_name, memory_of, unwrap
from ..model.tensor_file import can_be_written

MAX_FILES = 256 << 20  # bytes of configurations and tokenizer
LIBRARY = "base_model.model."  # what transformers puts before the names of adapters that it holds


@dataclasses.dataclass(frozen=True)
class Described:
    """A model as it is saved.

    ``kept``: values that are not in the run's vector, buffers above all; ``frozen``: those of
    frozen parameters. ``missing``: what a file cannot hold, with the reason. ``lost``: trained
    tensors that no saved one has the values of. ``made``: some saved tensors are computed from
    trained ones.
    """

    kind: Literal["module", "transformers", "peft"]
    saved: tuple[Saved, ...]
    kept: dict[str, Tensor]
    frozen: dict[str, Tensor]
    files: dict[str, bytes]
    missing: tuple[str, ...]
    lost: tuple[str, ...]
    made: bool
    library_class: str = ""
    floats: tuple[str, ...] = ()
    computed: str = ""
    wrapped: bool = False


class ModelSaver:
    """Describes one attached model. ``flat``: the vector of the whole model.

    Raises ConfigError for a PEFT model that trains what PEFT would not save.
    """

    def __init__(self, model: nn.Module, flat: FlatVector, tokenizer: Any = None) -> None:
        self._model, self._flat = model, flat
        self._tokenizer = {} if tokenizer is None else saved_files(tokenizer)
        self._adapter = _PeftAdapter.of(unwrap(model), flat)

    def describe(self) -> Described:
        """The model as it would be saved now. Raises ConfigError where PEFT would lose what is
        trained, and what the model's own ``state_dict`` raises.
        """
        inner, adapter = unwrap(self._model), self._adapter
        state: Mapping[str, Any] = inner.state_dict() if adapter is None else adapter.state(inner)
        found = _sort(inner, self._flat, state, adapter is not None)
        if adapter is not None:
            found = dataclasses.replace(found, lost=tuple(filter(adapter.computes, found.lost)))
            adapter.check(found)
            return dataclasses.replace(
                found, kind="peft", files={**self._tokenizer, **adapter.files(inner)}
            )
        made_of = _class_of(inner)
        library = made_of.__module__.startswith("transformers.models.")
        return dataclasses.replace(
            found,
            saved=_with_ties(inner, found.saved) if library else found.saved,
            kind="transformers" if library else "module",
            library_class=made_of.__name__ if library else "",
            floats=_floats(chain(inner.parameters(), inner.buffers())),
            computed=_computed(inner),
            wrapped=inner is not self._model,
            files={**self._tokenizer, **_configurations(inner, _main_dtype(state))},
        )


def _with_ties(inner: nn.Module, saved: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """Marks the names that ``save_pretrained`` leaves out, since another name has their tensor."""
    said: Any = getattr(inner, "all_tied_weights_keys", None)
    if said is None:  # of an earlier transformers, which says which may be tied
        said = getattr(inner, "_tied_weights_keys", None)
    names = {name for name in said or () if isinstance(name, str)}
    sources = {each.of for each in saved if each.of and each.name not in names}
    sources |= {each.name for each in saved if not each.of and each.name not in names}
    return tuple(
        msgspec.structs.replace(each, tied=True)
        if each.name in names and (each.of or each.same) in sources
        else each
        for each in saved
    )


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class that a module was made of: fully_shard puts one of its own before it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # whoever has called it has loaded it
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return type(module)
    return next(
        each
        for each in cast("tuple[type[nn.Module], ...]", type(module).__mro__)
        if not issubclass(each, fsdp.FSDPModule)
    )


def _floats(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    found = {str(each.dtype).removeprefix("torch.") for each in tensors if each.is_floating_point()}
    return tuple(sorted(found))


def _computed(inner: nn.Module) -> str:
    """The one floating type of the buffers that ``state_dict()`` leaves out; "" for none."""
    found = _floats(
        buffer
        for module in inner.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    )
    return found[0] if len(found) == 1 else ""


def _sort(inner: nn.Module, flat: FlatVector, state: Mapping[str, Any], adapter: bool) -> Described:
    """Whose values each saved tensor has: of one that is trained, of a frozen one, of a buffer, or
    of none, since it is computed.
    """
    specs = [
        (spec.name, tensor)
        for spec, tensor in zip(flat.layout.tensors, flat.tensors, strict=True)
        if spec.role != "sum"
    ]
    trained = {key: name for name, tensor in specs if (key := memory_of(tensor)) is not None}
    by_name = dict(specs)
    named = {clean_name(n): p for n, p in inner.named_parameters(remove_duplicate=False)}
    # shards say nothing of their memory: a tied one is the same object
    owners = {id(p): name for name, p in named.items() if name in by_name}
    still = {name: p for name, p in named.items() if id(p) not in owners and name not in by_name}
    frozen_keys = {memory_of(p) for p in still.values()} - {None}
    buffers = {clean_name(n): b for n, b in inner.named_buffers(remove_duplicate=False)}
    buffer_keys = {memory_of(b) for b in buffers.values()} - {None}
    saved, missing = list[Saved](), list[str]()
    kept, frozen = dict[str, Tensor](), dict[str, Tensor]()
    first = dict[object, str]()  # name of each memory that is kept
    made = False
    for key, value in state.items():
        name = clean_name(key)
        if not isinstance(value, Tensor):
            missing.append(f"{name} ({type(value).__name__}: no tensor)")
            continue
        memory, kind = memory_of(value), str(value.dtype).removeprefix("torch.")
        of = trained.get(memory, "") if memory is not None else ""
        if not of and memory is None:
            of = name if name in by_name else owners.get(id(named.get(name)), "")
        if of:
            saved.append(Saved(name, kind, of=of))
            continue
        if not can_be_written(value):
            missing.append(f"{name} ({kind} on {value.device.type}: no file can hold it)")
            continue
        is_frozen = memory in frozen_keys or (memory is None and name in still)
        made |= not (is_frozen or memory in buffer_keys or (memory is None and name in buffers))
        if memory is not None and (same := first.setdefault(memory, name)) != name:
            saved.append(Saved(name, kind, same=same))
            continue
        (frozen if is_frozen and not adapter else kept)[name] = value.detach()
        saved.append(Saved(name, kind, frozen=is_frozen))
    there = {each.of for each in saved}
    lost = tuple(name for name, _ in specs if name not in there)
    return Described("module", tuple(saved), kept, frozen, {}, tuple(missing), lost, made)


# ---- PEFT


class _PeftAdapter:
    """The adapter of a PEFT model that is trained, and how PEFT is asked for it."""

    def __init__(
        self, name: str, embeddings: bool, prefix: str, statistics: frozenset[str]
    ) -> None:
        self.name, self._embeddings, self._prefix = name, embeddings, prefix
        self._statistics = statistics

    @classmethod
    def of(cls, inner: nn.Module, flat: FlatVector) -> _PeftAdapter | None:
        """The one of several that has most of what is trained; None where ``inner`` is no model
        with adapters that PEFT can save.
        """
        peft: Any = sys.modules.get("peft")  # whoever has such a model has loaded it
        if peft is None or not isinstance(getattr(inner, "peft_config", None), dict):
            return None
        configs = cast("dict[str, Any]", inner.peft_config)
        whole = isinstance(inner, peft.PeftModel)
        if not configs or not (whole or getattr(inner, "_hf_peft_config_loaded", False)):
            return None
        counts = dict[str, int]()
        for name in configs:
            state = _ask_peft(inner, name, "auto")
            counts[name] = len(_sort(inner, flat, state, True).lost)
        best = min(counts, key=lambda name: counts[name])
        # asking "auto" again would ask the model hub again
        more = len(_ask_peft(inner, best, "auto")) > len(_ask_peft(inner, best, False))
        specs = flat.layout.tensors
        statistics = frozenset(spec.name for spec in specs if spec.role in ("mean", "variance"))
        return cls(best, more, "" if whole else LIBRARY, statistics)

    def state(self, inner: nn.Module) -> dict[str, Any]:
        """What PEFT saves, under its names."""
        found = _ask_peft(inner, self.name, self._embeddings)
        return {self._prefix + name: value for name, value in found.items()}

    def computes(self, name: str) -> bool:
        """Whether this tensor is used: statistics of a layer whose copy PEFT trains are not."""
        return not (name in self._statistics and ".original_module." in name)

    def check(self, found: Described) -> None:
        """Raise ConfigError for trained tensors that PEFT neither saves nor computes from."""
        lost = [
            name
            for name in found.lost
            if not (found.made and ("prompt_encoder" in name or f".{self.name}" in name))
        ]
        if lost:
            raise ConfigError(
                f"PEFT does not save {len(lost)} of the tensors that are trained: {some(lost)}",
                key="model",
                why=(
                    f"Adapter {self.name!r} is what is exported, and what PEFT leaves out of it "
                    "would be lost."
                ),
                hint=(
                    "Name their layers in modules_to_save of the PEFT config: it saves running "
                    "statistics then, too. Where these stay as they are, since the layers are in "
                    'eval mode, the manifest keeps them out: [model] buffers = { "*.running_*" = '
                    '"own" }'
                    if all(name in self._statistics for name in lost)
                    else "Name their modules in modules_to_save of the PEFT config, or freeze them "
                    "(requires_grad_(False)) before attach(); train one adapter at a time"
                ),
            )

    def files(self, inner: nn.Module) -> dict[str, bytes]:
        """adapter_config.json, as PEFT writes it; its sets sorted."""
        config = cast("Any", inner).peft_config[self.name]
        document = {
            key: sorted(value, key=str) if isinstance(value, set | frozenset) else value
            for key, value in config.to_dict().items()
        }
        document["inference_mode"] = True
        base = cast("Any", inner).get_base_model() if hasattr(inner, "get_base_model") else inner
        if not document.get("base_model_name_or_path"):
            document["base_model_name_or_path"] = getattr(base, "name_or_path", None) or None
        if document.get("task_type") is None:
            document["auto_mapping"] = {
                "base_model_class": _class_of(base).__name__,
                "parent_library": _class_of(base).__module__,
            }
        return {"adapter_config.json": as_json(document), **_generation(base)}


def _ask_peft(inner: nn.Module, adapter: str, embeddings: Any) -> dict[str, Tensor]:
    peft: Any = sys.modules["peft"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dict(
                peft.get_peft_model_state_dict(
                    inner, adapter_name=adapter, save_embedding_layers=embeddings
                )
            )
        except Exception as error:
            raise ConfigError(
                f"PEFT cannot save adapter {adapter!r}: {type(error).__name__}: {error}",
                key="model",
                why="What it cannot save could not be exported after training, either.",
                hint="Look whether model.save_pretrained(DIR) works before attach().",
            ) from error


# ---- files


def _configurations(inner: nn.Module, dtype: str) -> dict[str, bytes]:
    """config.json and generation_config.json of a model that has them."""
    files = dict[str, bytes]()
    config = getattr(inner, "config", None)
    if callable(getattr(config, "to_json_string", None)):  # transformers, diffusers
        document = cast("dict[str, Any]", json.loads(cast("Any", config).to_json_string()))
        document["architectures"] = [_class_of(inner).__name__]
        document.pop("torch_dtype", None)
        document["dtype"] = dtype
        for key in ("_name_or_path", "_model_name_or_path"):
            if os.path.isabs(str(document.get(key) or "")):
                del document[key]  # a path of this machine
        files["config.json"] = as_json(document)
    elif (plain := _plain(config)) is not None:
        files["config.json"] = plain
    return files | _generation(inner)


def _generation(inner: Any) -> dict[str, bytes]:
    """generation_config.json of a model that has one: where its answers end."""
    generation = getattr(inner, "generation_config", None)
    if not callable(getattr(generation, "to_json_string", None)):
        return {}
    text = cast("Any", generation).to_json_string()
    return {"generation_config.json": as_json(json.loads(text))}


def _plain(config: Any) -> bytes | None:
    """A configuration of plain values as JSON; None for any other."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping):
        return None
    try:
        return as_json(dict(cast("Mapping[str, Any]", config)))
    except (TypeError, ValueError):
        return None


def _main_dtype(state: Mapping[str, Any]) -> str:
    """The floating type of most values."""
    counts = dict[torch.dtype, int]()
    for value in state.values():
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    most = max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
    return str(most).removeprefix("torch.")


def saved_files(tokenizer: Any) -> dict[str, bytes]:
    """What ``tokenizer.save_pretrained`` writes, by relative name. Raises ConfigError."""
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ConfigError(
            f"{type(tokenizer).__name__} has no save_pretrained()",
            key="tokenizer",
            hint="Give a tokenizer or processor of transformers, or leave it out.",
        )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        if (size := sum(path.stat().st_size for path in paths)) > MAX_FILES:
            raise ConfigError(f"the tokenizer's files have {size} bytes", key="tokenizer")
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def as_json(value: Any) -> bytes:
    """A file of JSON as people read it. Raises TypeError, ValueError."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def some(names: list[str] | tuple[str, ...]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
