"""Lightning in a swarm: python lightning.py INVITE, or alone without one. Needs atoll[lightning]."""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: the file has the library's name

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from atoll.collectives.swarm import RunSettings
from atoll.node import join
from atoll.optim import AtollLightningCallback, SoloSwarm


class Net(LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean square error."""
        inputs, targets = batch
        return (self.layers(inputs) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


swarm = join(sys.argv[1]) if sys.argv[1:] else SoloSwarm(RunSettings(sync_every=10, rounds=6))
torch.manual_seed(0)
module = Net()
inputs = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
data = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=32)

callback = AtollLightningCallback(swarm, shard=True)  # all members have the same data
trainer = Trainer(
    max_epochs=10,
    accelerator="auto",
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, data)

assert callback.attachment is not None
stats = callback.attachment.stats
print(
    f"round {stats['round']}, {stats['samples_counted']} samples counted, loss {stats['metrics/loss']:.3f}"
)
swarm.close()
