"""A small tokenizer with a chat template, and random two-layer models, for tests of fine-tuning."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (  # shows the thinking of the last answer only, as several templates do
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ 'think ' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"
    + CHATML
)
WORDS = "the swarm trains a small model on words that friends wrote for one another at night "


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS * 20], trainer)
    return tokenizer.to_str()


def tiny_tokenizer(template: str | None = CHATML) -> Any:
    """300 tokens: bytes, some words, three that are special; eos is <|im_end|>."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def tiny_model(kind: str = "llama", seed: int = 0, **settings: Any) -> Any:
    """A random model of two layers and 304 token ids, float32, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small: dict[str, Any] = {"vocab_size": 304, "bos_token_id": 0, "eos_token_id": 2}
    if kind == "gpt2":
        small |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    else:
        small |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        }
    config = AutoConfig.for_model(kind, **{**small, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


def tiny_gguf(path: Path) -> Path:
    """`tiny_model` and `tiny_tokenizer` in one GGUF file of float32."""
    import gguf

    writer, model, tokenizer = gguf.GGUFWriter(path, "llama"), tiny_model(), tiny_tokenizer()
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens += [f"<unused{number}>" for number in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    merges = json.loads(_trained())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    for name, value in model.state_dict().items():
        whole = name.removesuffix(".weight")
        if (called := _IN_GGUF.get(whole)) is None:
            _, _, layer, part = whole.split(".", 3)
            called = f"blk.{layer}.{_IN_GGUF[part]}"
        writer.add_tensor(f"{called}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_IN_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def chat(*turns: str, system: str = "") -> dict[str, Any]:
    """A record of messages: user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def many_chats(count: int) -> list[dict[str, Any]]:
    """Short conversations, no two alike."""
    words = WORDS.split()
    return [
        chat(
            f"what of {words[i % len(words)]} {i}?",
            " ".join(words[(i + k) % len(words)] for k in range(1 + i % 7)),
        )
        for i in range(count)
    ]
