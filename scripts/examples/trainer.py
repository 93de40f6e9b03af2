"""transformers' Trainer in a swarm: python trainer.py INVITE, or alone without one. Needs
atoll[trainer].
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from atoll.collectives.swarm import RunSettings
from atoll.node import join
from atoll.optim import AtollCallback, SoloSwarm, steps_left

swarm = join(sys.argv[1]) if sys.argv[1:] else SoloSwarm(RunSettings(sync_every=5, rounds=4))

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=16,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
)
starts = torch.randint(0, 16, (512, 1), generator=torch.Generator().manual_seed(0))
tokens = (starts + torch.arange(16)) % 16  # counting from anywhere
data = [{"input_ids": row, "labels": row} for row in tokens]

callback = AtollCallback(swarm, shard=True)  # all members have the same data, and share them out
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=steps_left(swarm),  # the learning rate falls to 0 with the run's last round
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()

assert callback.attachment is not None
stats = callback.attachment.stats
print(
    f"round {stats['round']}, {stats['samples_counted']} samples counted, loss {stats['metrics/loss']:.3f}"
)
swarm.close()
