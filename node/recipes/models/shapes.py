"""The shape of a language model, of what config.json says: how many parameters it has, and how
many its adapters have, without a library and without its files. Those of some public models are
known by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ....collectives.errors import AtollError
from ...manifest.tables import ModelTable, ShapeTable
from .files import CONFIG, read_json

_TIED = ("gpt2", "gemma", "falcon", "smollm3", "bloom", "opt", "gpt_bigcode", "cohere", "phi3small")
"""Kinds of models whose head is the embedding, where their files do not say."""
_UNGATED = (
    "gpt2",
    "gpt_neox",
    "falcon",
    "phi",
    "bloom",
    "opt",
    "gptj",
    "gpt_bigcode",
    "starcoder2",
)
"""Kinds whose layers have two matrices behind attention, in place of three."""


def shape_of(config: Mapping[str, Any]) -> ShapeTable | None:
    """What config.json says, or None where it lacks what a decoder of text has."""
    about: Any = config.get("text_config", config)
    if not isinstance(about, Mapping):
        return None
    kind = str(about.get("model_type", config.get("model_type", "")))

    def first(*names: str) -> int:
        for name in names:
            value = about.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return 0

    hidden, heads = (
        first("hidden_size", "n_embd", "d_model"),
        first("num_attention_heads", "n_head"),
    )
    layers, vocabulary = first("num_hidden_layers", "n_layer"), first("vocab_size")
    if not (hidden and heads and layers and vocabulary):
        return None
    groups = first("num_key_value_heads", "num_kv_heads") or (
        1 if about.get("multi_query") else heads
    )
    experts = first("num_local_experts", "num_experts", "n_routed_experts")
    inner = first("moe_intermediate_size") if experts else 0
    inner = inner or first("intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
    tied = about.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    try:
        return msgspec.convert(
            {
                "layers": layers,
                "hidden": hidden,
                "inner": inner,
                "heads": heads,
                "groups": groups,
                "width": first("head_dim") or max(1, hidden // heads),
                "vocabulary": vocabulary,
                "tied": kind.startswith(_TIED) if tied is None else bool(tied),
                "gated": kind not in _UNGATED,
                "experts": experts,
                "active": first("num_experts_per_tok", "num_selected_experts") or 1,
            },
            ShapeTable,
        )
    except msgspec.ValidationError:
        return None


def matrices(shape: ShapeTable) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one layer, all experts' included, without routers
    and head.
    """
    hidden, inner = shape.hidden, shape.inner
    query, key = shape.heads * shape.width, shape.groups * shape.width
    attention = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    behind = [(hidden, inner)] * (2 if shape.gated else 1) + [(inner, hidden)]
    return attention + behind * max(1, shape.experts)


def linear_parameters(shape: ShapeTable) -> int:
    """Of all linear layers but head and routers."""
    return shape.layers * sum(one * other for one, other in matrices(shape))


def other_parameters(shape: ShapeTable) -> int:
    """Of embedding, head, norms and routers."""
    embedding = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layer = shape.hidden * (2 + shape.experts)
    return embedding + shape.layers * layer + shape.hidden


def whole_parameters(shape: ShapeTable) -> int:
    """Of the model; biases and norms inside of attention are left out, less than 0.2 %.

    >>> whole_parameters(KNOWN["SmolLM2-135M"])
    134515008
    """
    return linear_parameters(shape) + other_parameters(shape)


def adapter_parameters(shape: ShapeTable, rank: int) -> int:
    """Of LoRA adapters on all linear layers but head and routers.

    >>> adapter_parameters(KNOWN["SmolLM2-135M"], 16)
    4884480
    """
    return shape.layers * rank * sum(one + other for one, other in matrices(shape))


def active_parameters(shape: ShapeTable) -> int:
    """That take part in the calculation of one token: of experts only those that are chosen, of
    the embedding only the head.
    """
    query, key = shape.heads * shape.width, shape.groups * shape.width
    behind = (3 if shape.gated else 2) * shape.hidden * shape.inner
    chosen = min(shape.active, shape.experts) if shape.experts else 1
    layer = 2 * shape.hidden * (query + key) + chosen * behind
    return shape.layers * layer + shape.vocabulary * shape.hidden


def _known(text: str) -> dict[str, ShapeTable]:
    found = dict[str, ShapeTable]()
    for line in text.strip().splitlines():
        name, *numbers, tied = line.split()
        layers, hidden, inner, heads, groups, width, vocabulary = map(int, numbers)
        found[name] = ShapeTable(
            layers, hidden, inner, heads, groups, width, vocabulary, tied == "tied"
        )
    return found


KNOWN = _known(
    """
    SmolLM2-135M       30   576   1536   9   3   64   49152 tied
    SmolLM2-360M       32   960   2560  15   5   64   49152 tied
    Qwen2.5-0.5B       24   896   4864  14   2   64  151936 tied
    Qwen3-0.6B         28  1024   3072  16   8  128  151936 tied
    TinyLlama-1.1B     22  2048   5632  32   4   64   32000 apart
    Llama-3.2-1B       16  2048   8192  32   8   64  128256 tied
    Qwen2.5-1.5B       28  1536   8960  12   2  128  151936 tied
    SmolLM2-1.7B       24  2048   8192  32  32   64   49152 tied
    Qwen3-1.7B         28  2048   6144  16   8  128  151936 tied
    SmolLM3-3B         36  2048  11008  16   4  128  128256 tied
    Qwen2.5-3B         36  2048  11008  16   2  128  151936 tied
    Llama-3.2-3B       28  3072   8192  24   8  128  128256 tied
    Qwen3-4B           36  2560   9728  32   8  128  151936 tied
    Mistral-7B         32  4096  14336  32   8  128   32768 apart
    Qwen2.5-7B         28  3584  18944  28   4  128  152064 apart
    Llama-3.1-8B       32  4096  14336  32   8  128  128256 apart
    Qwen3-8B           36  4096  12288  32   8  128  151936 apart
    Qwen3-14B          40  5120  17408  40   8  128  151936 apart
    Qwen3-32B          64  5120  25600  64   8  128  151936 apart
    Llama-3.1-70B      80  8192  28672  64   8  128  128256 apart
    """
)
"""Of public models, by the name that theirs begins with on the hub; as their files say."""


def known_shape(name: str) -> ShapeTable | None:
    """Of a model of the hub by its name, ORG/NAME or NAME, whatever it is tuned for."""
    last = name.rpartition("/")[2].lower().replace("_", "-")
    last = last.removeprefix("meta-").removesuffix(".gguf")
    fitting = [
        known for known in KNOWN if last == known.lower() or last.startswith(known.lower() + "-")
    ]
    return KNOWN[max(fitting, key=len)] if fitting else None


def config_values(shape: ShapeTable) -> dict[str, Any]:
    """What config.json would say of a Llama of this shape: of as many parameters, and the same
    memory.
    """
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.width,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 1 << 17,
    }


def look_for_config(model: ModelTable, near: Path) -> dict[str, Any] | None:
    """What config.json says of a pretrained model that nobody has looked at yet: of its folder, or
    of the copy in the hub's cache; of a GGUF file what its head says. None where there is none on
    this machine. ``near``: the folder that paths start from.
    """
    if model.gguf is not None:
        from .gguf import config_in  # which loads libraries

        return config_in(near / Path(model.gguf).expanduser())
    if model.folder is not None:
        files = [near / Path(model.folder).expanduser() / CONFIG]
    elif model.hub is not None:
        default = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
        cache = Path(os.environ.get("HF_HUB_CACHE", default)).expanduser()
        folder = cache / f"models--{model.hub.replace('/', '--')}" / "snapshots"
        files = sorted(folder.glob(f"*/{CONFIG}"))
    else:
        return None
    for file in files:
        try:
            found = read_json(file)
        except AtollError:
            continue
        if shape_of(found) is not None:
            return found
    return None


def look_for_shape(model: ModelTable, near: Path) -> ShapeTable | None:
    """The shape of a pretrained model: as its founder found it, as its files here say, else as its
    name says.
    """
    if model.base is not None:
        return model.base.shape
    config = look_for_config(model, near)
    if config is not None:
        return shape_of(config)
    return known_shape(model.hub or model.gguf or model.folder or "")
