"""A pretrained model and its tokenizer, of files that were compared, ready to train."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....collectives.errors import ConfigError
from ....optim.model.factors import FACTOR
from ...manifest.tables import LoraTable, ModelTable
from .files import CONFIG, read_json
from .libraries import first_line, library
from .tokens import load_tokenizer

ROUTERS = ("gate", "router")  # layers of experts whose work is to choose
_EXPERTS = {"mixtral": ("w1", "w2", "w3")}
_USUAL_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Their layers as PEFT names them, by the kind of model, also where they are one tensor."""
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``model``: what is trained, a PEFT model where adapters are; ``notes``: what was put right in
    it, a sentence each.
    """

    model: nn.Module
    tokenizer: Any
    notes: tuple[str, ...] = ()


def load_model(
    folder: Path, table: ModelTable, lora: LoraTable | None, device: str = "cpu"
) -> LoadedModel:
    """The model of a run in train mode on ``device``. Adapters begin alike on all machines: B as
    zeros, A drawn by its name (`draw_factors`). ``lora``: None where all of it trains.

    Raises ConfigError E415 where the libraries cannot load or train it so.
    """
    model = load_base(folder, table, device, four_bits=table.method == "qlora")
    notes = mend_generation(model)
    name_source(model, table)
    if lora is not None:
        model = with_adapters(model, table, lora)
    if table.checkpointing:
        try:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(
                f"this model has no checkpointing of activations: {error}",
                key="$.model.checkpointing",
                code="E415",
                hint="checkpointing = false",
            ) from None
    model.train()
    return LoadedModel(model, load_tokenizer(folder), notes)


def load_base(folder: Path, table: ModelTable, device: str, *, four_bits: bool = False) -> Any:
    """The model of the files, without adapters, in eval mode."""
    transformers = library("transformers")
    given: dict[str, Any] = {"dtype": getattr(torch, auto_dtype(folder, table))}
    if table.attention != "auto":
        given["attn_implementation"] = table.attention
    if four_bits:
        library("bitsandbytes")
        given["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=given["dtype"],
        )
        given["device_map"] = {"": device}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder),
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                **given,
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"transformers cannot load the run's model: {first_line(error, 400)}",
            code="E415",
            why="attention, dtype or method may not suit this architecture or machine."
            if table.attention != "auto" or four_bits
            else "",
            hint="pip install -U 'atoll[models]' knows newer architectures.",
        ) from None
    return model if four_bits else model.to(device)


def auto_dtype(folder: Path, table: ModelTable) -> str:
    """The type of the weights in words of torch; "auto" is float32 where all of them train, since
    small steps are lost in shorter ones, else that of the files.
    """
    if table.dtype != "auto":
        return table.dtype
    if table.method == "full":
        return "float32"
    about = read_json(folder / CONFIG)
    said = about.get("dtype") or about.get("torch_dtype") or "float32"
    return said if said in _FLOATS else "float32"


def with_adapters(model: Any, table: ModelTable, lora: LoraTable) -> Any:
    """The model with LoRA adapters, of which only these train. Raises ConfigError E415 where no
    layer has the names of ``lora.targets``.
    """
    peft = library("peft")
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    if targets == "all-linear" and _has_experts(model):
        targets = _all_but_routers(model)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = peft.get_peft_model(model, config)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"PEFT cannot put adapters into this model: {first_line(error)}",
            key="$.lora.targets",
            code="E415",
            hint='targets = "all-linear", or names of its layers',
        ) from None
    settings = found.peft_config["default"]
    settings.base_model_name_or_path = table.hub or table.folder or table.gguf
    settings.revision = table.revision if table.hub is not None else None
    draw_factors(found, table.init)
    return found


def _has_experts(model: nn.Module) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def _all_but_routers(model: Any) -> list[str]:
    """All linear layers but the head and the routers, which "all-linear" of PEFT has, too."""
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and each is not head
    }
    experts = _EXPERTS.get(model.config.model_type, _USUAL_EXPERTS)
    return sorted((linear - {*ROUTERS}) | {*experts})


@torch.no_grad()
def draw_factors(model: nn.Module, init: str) -> None:
    """Draw each A of a model's adapters from ``init`` and its name, in float32 on the CPU: the same
    on every machine, type and device, which torch's own draw is not. The distribution is PEFT's.
    """
    for name, parameter in model.named_parameters():
        found = FACTOR.search(name)
        if found is None or found[1] or found[2] != "A" or parameter.device.type == "meta":
            continue
        seed = hashlib.sha256(f"{init}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:6], "big"))
        bound = 1 / math.sqrt(math.prod(parameter.shape[1:]))
        drawn = torch.rand(parameter.shape, generator=generator) * (2 * bound) - bound
        parameter.copy_(drawn.to(parameter.dtype))


def name_source(model: Any, table: ModelTable) -> None:
    """Put the model's public name where transformers keeps the path it was loaded from: it goes
    into exported folders.
    """
    name = table.hub or ""
    model.name_or_path = name
    model.config._name_or_path = name
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path


def mend_generation(model: Any) -> tuple[str, ...]:
    """Make the model's generation config one that can be saved: transformers refuses the others,
    and would do so at the end of training.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            settings.validate(strict=True)
    except (ValueError, UserWarning) as error:
        if not settings.do_sample and any(
            getattr(settings, key, None) not in (None, plain)
            for key, plain in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 50), ("min_p", None))
        ):
            settings.do_sample = True
            return ("generation_config.json has values for sampling and do_sample false: true now",)
        return (f"generation_config.json: {first_line(error, 200)}",)
    return ()


def count_parameters(folder: Path, table: ModelTable, lora: LoraTable | None) -> tuple[int, int]:
    """(all parameters of the model, those that travel), counted without any weights. Raises
    ConfigError E415 for an architecture that transformers does not know.
    """
    transformers = library("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"transformers does not know this model: {first_line(error)}",
            code="E415",
            hint="pip install -U 'atoll[models]'",
        ) from None
    model.tie_weights()
    whole = _count(model.parameters())
    if lora is None:
        return whole, whole
    adapted = with_adapters(model, table, lora)
    return whole, _count(each for each in adapted.parameters() if each.requires_grad)


def _count(parameters: Any) -> int:
    """Of distinct tensors."""
    distinct: dict[int, Tensor] = {id(each): each for each in parameters}
    return sum(each.numel() for each in distinct.values())
