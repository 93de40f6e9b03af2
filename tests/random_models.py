"""Pretrained models without a download: two layers of random weights for each architecture, and a
small tokenizer with a chat template, in a folder as the hub has them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 320
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "llama_tied": ("LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 16}),
    "qwen2": ("Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, "head_dim": 8, **_EXPERTS}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {**_GROUPED, "head_dim": 8}),
    "phi": ("PhiConfig", _SMALL),
    "phi3": ("Phi3Config", _GROUPED),
    "olmo2": ("Olmo2Config", _GROUPED),
    "granite": ("GraniteConfig", _GROUPED),
    "smollm3": ("SmolLM3Config", _GROUPED),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    ),
    "gpt_neox": ("GPTNeoXConfig", _SMALL),
    "falcon": ("FalconConfig", {**_SMALL, "new_decoder_architecture": False}),
}


def write_tokenizer(folder: Path, *, words: str = "", template: str | None = TEMPLATE) -> Any:
    """A byte-level tokenizer of `VOCABULARY` tokens at most; other ``words``, other merges."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    raw = ByteLevelBPETokenizer()
    text = words or "the swarm trains a model together and the model answers the swarm "
    raw.train_from_iterator(
        [text * 40],
        vocab_size=VOCABULARY - 4,
        min_frequency=2,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw._tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def write_model(
    folder: Path, architecture: str = "llama", seed: int = 7, hidden: int | None = None, **save: Any
) -> Path:
    """Weights, configurations and tokenizer of a random model."""
    import transformers

    name, settings = ARCHITECTURES[architecture]
    if hidden is not None:
        settings = settings | {"n_embd" if "n_embd" in settings else "hidden_size": hidden}
    config = getattr(transformers, name)(**settings)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, **save)
    write_tokenizer(folder)
    return folder
