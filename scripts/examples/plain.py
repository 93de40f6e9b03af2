"""An ordinary PyTorch loop in a swarm: python plain.py INVITE, or alone without one."""

from __future__ import annotations

import sys
from zlib import crc32

import torch
from torch import nn

from atoll.collectives.swarm import RunSettings
from atoll.node import join
from atoll.optim import SoloSwarm, attach

swarm = join(sys.argv[1]) if sys.argv[1:] else SoloSwarm(RunSettings(sync_every=10, rounds=6))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
attachment = attach(model, optimizer, swarm, batch_size=32)

draw = torch.Generator().manual_seed(crc32(swarm.peer.encode()))  # other data for every peer
while not attachment.done:
    inputs = torch.randn(32, 8, generator=draw)
    loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    attachment.log(loss=loss)

with attachment.evaluate_anchor() as anchor, torch.no_grad():
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    held_out = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
print(
    f"round {anchor.round}, {attachment.stats['samples_counted']} samples counted, held-out loss {held_out:.3f}"
)
swarm.close()
