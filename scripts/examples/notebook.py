"""Cells of a notebook (# %%): look at the run between rounds, and train on. Paste an invite into
the first cell, or stay alone.
"""

# %% join
from __future__ import annotations

from zlib import crc32

import torch
from torch import nn

from atoll.collectives.swarm import RunSettings
from atoll.node import join
from atoll.optim import SoloSwarm, attach

INVITE = ""
swarm = join(INVITE) if INVITE else SoloSwarm(RunSettings(sync_every=10))

# %% a model, as always
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
attachment = attach(model, optimizer, swarm, batch_size=32)
draw = torch.Generator().manual_seed(crc32(swarm.peer.encode()))


# %% train for a while; run this cell as often as you like
def train(steps: int) -> None:
    """So many steps."""
    for _ in range(steps):
        inputs = torch.randn(32, 8, generator=draw)
        loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        attachment.log(loss=loss)


train(25)

# %% what came of it
attachment.sync()  # also in the middle of a round
{key: attachment.stats[key] for key in ("round", "steps", "peers", "metrics/loss")}

# %% the run's model, not this machine's opinion between two rounds
with attachment.evaluate_anchor() as anchor, torch.no_grad():
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    held_out = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
print(
    f"round {anchor.round}, {attachment.stats['samples_counted']} samples counted, held-out loss {held_out:.3f}"
)

# %% leave; the node goes on where there is one
attachment.detach()
swarm.close()
