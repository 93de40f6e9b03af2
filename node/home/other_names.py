"""What other tools call the settings of a run that trains a language model: of axolotl, unsloth,
LLaMA-Factory, torchtune, TRL and transformers. Who writes one of their names is told ours.
"""

from __future__ import annotations

from collections.abc import Collection

_SAME = {
    "[model] hub": "base_model model_name model_name_or_path model_id pretrained model_path",
    "[model] method": "adapter finetuning_type peft_type",
    "[model] dtype": "torch_dtype bf16 fp16",
    "[model] attention": "attn_implementation flash_attention flash_attn",
    "[model] checkpointing": "gradient_checkpointing use_gradient_checkpointing",
    "[lora] rank": "r lora_r lora_rank",
    "[lora] alpha": "lora_alpha",
    "[lora] dropout": "lora_dropout",
    "[lora] targets": "target_modules lora_target_modules lora_target lora_target_linear",
    "[data] length": "sequence_len max_seq_length max_seq_len max_length cutoff_len block_size "
    "model_max_length seq_len",
    "[data] packing": "sample_packing packed",
    "[data] held_out": "val_set_size val_size test_size validation_split eval_split",
    "[train] rounds": "max_rounds num_rounds",
    "[train] sync_every": "local_steps inner_steps",
    "[train.inner] lr": "learning_rate",
    "[train.inner] warmup": "warmup_steps num_warmup_steps",
    "[train.inner] schedule": "lr_scheduler lr_scheduler_type",
    "[train.inner] optimizer": "optim",
    "[train.inner] clip": "max_grad_norm gradient_clipping",
    "[train.inner] beta1": "adam_beta1",
    "[train.inner] beta2": "adam_beta2",
    "[train.inner] micro_batch": "micro_batch_size per_device_train_batch_size batch_size",
}
_OTHERWISE = {
    "load_in_4bit": 'method = "qlora" holds the base in four bits',
    "load_in_8bit": 'method = "qlora" holds the base in four bits',
    "train_on_inputs": 'here [data] loss = "all"',
    "completion_only_loss": 'here [data] loss = "completion"',
    "assistant_only_loss": 'here [data] loss = "completion"',
    "gradient_accumulation_steps": "[train.inner] tokens_per_step is accumulated in micro-batches",
    "num_epochs": "a run lasts [train] rounds, of sync_every steps each",
    "num_train_epochs": "a run lasts [train] rounds, of sync_every steps each",
    "epochs": "a run lasts [train] rounds, of sync_every steps each",
    "warmup_ratio": "here [train.inner] warmup, in steps",
    "chat_template": "that of the model's folder is taken",
    "template": "that of the model's folder is taken",
    "special_tokens": "those of the model's tokenizer are taken",
    "trust_remote_code": "no Python of a model's own is run",
    "output_dir": "atoll export RUN DIR writes the model",
    "dataset_name": "each machine gives its own: atoll join RUN --data FILE",
    "train_file": "each machine gives its own: atoll join RUN --data FILE",
    "hub_token": "the hub's client has its own login: hf auth login",  # nosec B105
    "hf_token": "the hub's client has its own login: hf auth login",  # nosec B105
    "datasets": "each machine gives its own: atoll join RUN --data FILE",
}
_OURS = {other: ours for ours, others in _SAME.items() for other in others.split()}


def our_hint(key: str, known: Collection[str]) -> str:
    """What to write in place of another tool's ``key``, in a table that has the ``known`` keys; "":
    it is none.
    """
    if ours := _OURS.get(key.lower()):
        name = ours.rpartition(" ")[2]
        return f"Did you mean `{name}`?" if name in known else f"Here it is {ours}"
    words = _OTHERWISE.get(key.lower(), "")
    return words[:1].upper() + words[1:]
