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
from .libraries import first_line, library, reading
from .tokens import load_tokenizer

ROUTERS = ("gate", "router")  # layers of experts whose work is to choose
_EXPERTS = {"mixtral": ("w1", "w2", "w3")}
_USUAL_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Their layers as PEFT names them, by the kind of model, also where they are one tensor."""
_FLOATS = ("float32", "bfloat16", "float16")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MARK = "\u2063answer\u2063"  # stands for an answer where the template is looked at


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
    model, unread = load_base(folder, table, device, four_bits=table.method == "qlora")
    tokenizer = load_tokenizer(folder)
    notes = (*unread, *mend_generation(model), *add_stops(model, tokenizer))
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
    return LoadedModel(model, tokenizer, notes)


def load_base(
    folder: Path, table: ModelTable, device: str, *, four_bits: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """The model of the files, without adapters, in eval mode; and what of them was not read."""
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
    odd = table.attention != "auto" or four_bits
    with (
        reading(
            "transformers cannot load the run's model",
            why="attention, dtype or method may not suit this architecture or machine." * odd,
            hint="pip install -U 'atoll[models]' knows newer architectures.",
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        model, notes = read_whole(folder, **given)
    return model if four_bits else model.to(device), notes


def read_whole(folder: Path, **given: Any) -> tuple[Any, tuple[str, ...]]:
    """The causal language model in a folder, by transformers; and what of its files was not read, a
    sentence each. Raises ConfigError E415 where the files lack some of its weights, and what
    transformers raises.
    """
    transformers, notes = library("transformers"), list[str]()
    if alone := _tokens_alone(folder):
        given |= alone
        notes.append("generation_config.json cannot be read, so only its token ids are kept")
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder),
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        **given,
    )
    if missing := sorted(about["missing_keys"]):
        raise ConfigError(
            f"the files of the model lack {len(missing)} of its weights: {', '.join(missing[:3])}",
            code="E415",
            why="transformers would draw them at random, on each machine others.",
            hint="Another copy of the model; config.json may be of another one than the weights.",
        )
    if unread := sorted(about["unexpected_keys"]):
        notes.append(
            f"{len(unread)} weights of the files are not of this model, neither trained nor "
            f"exported: {', '.join(unread[:3])}"
        )
    return model, tuple(notes)


def _tokens_alone(folder: Path) -> dict[str, Any]:
    """Where transformers refuses to read the generation config, one with its token ids, as an
    argument of from_pretrained: for want of it nobody could load the model.
    """
    kind = library("transformers").GenerationConfig
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.from_pretrained(str(folder), local_files_only=True)
    except OSError:  # there is none, or it is no JSON: the model's configuration is taken
        return {}
    except Exception:
        found = read_json(folder / "generation_config.json")
        return {"generation_config": kind(**{key: found.get(key) for key in _TOKEN_IDS})}
    return {}


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
    """Draw each A of a model's adapters, and each B of those on embeddings, from ``init`` and its
    name, in float32 on the CPU: the same on every machine, type and device, which torch's own draw
    is not. The distributions are PEFT's; the other factor begins as zeros.
    """
    for name, parameter in model.named_parameters():
        found = FACTOR.search(name)
        drawn_one = found is not None and found[2] == ("B" if found[1] else "A")
        if not drawn_one or parameter.device.type == "meta":
            continue
        seed = hashlib.sha256(f"{init}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:6], "big"))
        if found is not None and found[1]:
            drawn = torch.randn(parameter.shape, generator=generator)
        else:
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
            said = "generation_config.json has values for sampling and do_sample false: true now"
            return (said, *mend_generation(model))
        kept = {key: getattr(settings, key, None) for key in _TOKEN_IDS}
        model.generation_config = type(settings)(**kept)
        return (
            "generation_config.json could not be saved, so only its token ids are kept: "
            f"{first_line(error, 200)}",
        )
    return ()


def add_stops(model: Any, tokenizer: Any) -> tuple[str, ...]:
    """Add the tokens that end an answer to those that the model's generation config lists: programs
    that serve the exported folder read them there. A base model whose tokenizer has a template
    often lacks that of the template's turn.
    """
    settings, stops = getattr(model, "generation_config", None), stops_of(model, tokenizer)
    if settings is None:
        return ()
    given = settings.eos_token_id
    listed = given if isinstance(given, list) else [given] if given is not None else []
    if not (new := [each for each in stops if each not in listed]):
        return ()
    settings.eos_token_id = [*listed, *new] if len([*listed, *new]) > 1 else new[0]
    names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(new)))
    return (f"answers end with {names} too, which generation_config.json did not say",)


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
        try:
            text = str(tokenizer.apply_chat_template(told, tokenize=False))
        except Exception:  # a template is a program, and raises what it likes
            text = ""
        behind = text.rpartition(_MARK)[2]
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
        if ids and ids[0] in tokenizer.all_special_ids:
            found.append(ids[0])
    return list(dict.fromkeys(found))


def check_length(model: Any, length: int) -> str:
    """Raise ConfigError where samples of so many tokens have more positions than the model has an
    embedding for. A sentence where they have more than it was trained on, else "".
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or length <= most:
        return ""
    words = model.get_input_embeddings()
    learned = any(
        isinstance(each, nn.Embedding)
        and each is not words
        and most <= each.num_embeddings <= most + 2
        for each in model.modules()
    )
    if learned:
        raise ConfigError(
            f"samples have up to {length:,} tokens, and the model has {most:,} positions",
            key="$.data.length",
            why="It has learned an embedding for each of these, and has none for others.",
            hint=f"length = {most}",
        )
    return (
        f"samples have up to {length:,} tokens, and the model knows {most:,} positions: what it "
        f"says beyond them has to be learned; [data] length = {most} cuts there"
    )


def count_parameters(
    folder: Path, table: ModelTable, lora: LoraTable | None, length: int = 1
) -> tuple[int, int]:
    """(all parameters of the model, those that travel), counted without any weights. ``length``: of
    its samples. Raises ConfigError, E415 for an architecture that transformers does not know.
    """
    transformers = library("transformers")
    with (
        reading("transformers does not know this model", hint="pip install -U 'atoll[models]'"),
        torch.device("meta"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    check_length(model, length)
    whole = _count(model.parameters())
    if lora is None:
        return whole, whole
    adapted = with_adapters(model, table, lora)
    return whole, _count(each for each in adapted.parameters() if each.requires_grad)


def _count(parameters: Any) -> int:
    """Of distinct tensors."""
    distinct: dict[int, Tensor] = {id(each): each for each in parameters}
    return sum(each.numel() for each in distinct.values())
