"""A peer of several ranks: torchrun --nproc-per-node 2 fsdp2.py INVITE, or without one. Peers of
any number of ranks train together.

Rank 0 alone joins; every rank attaches, and contributes its slices of the parameters.
"""

from __future__ import annotations

import sys
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from atoll.collectives.swarm import RunSettings
from atoll.node import join
from atoll.optim import SoloSwarm, attach

dist.init_process_group()  # torchrun says who is who
rank = dist.get_rank()
device = (
    torch.device("cuda", rank % torch.cuda.device_count())
    if torch.cuda.is_available()
    else torch.device("cpu")
)
swarm = None
if rank == 0:
    swarm = join(sys.argv[1]) if sys.argv[1:] else SoloSwarm(RunSettings(sync_every=10, rounds=6))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
attachment = attach(model, optimizer, swarm)

draw = torch.Generator().manual_seed(
    crc32(attachment.swarm.peer.encode()) + rank
)  # other data for every rank of every peer
while not attachment.done:
    inputs = torch.randn(32, 8, generator=draw).to(device)
    loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    attachment.samples(len(inputs))  # of this rank; the job is weighted by the sum
    optimizer.step()
    optimizer.zero_grad()
    attachment.log(loss=loss)

with attachment.evaluate_anchor() as anchor, torch.no_grad():
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1)).to(device)
    held_out = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
if rank == 0:
    print(
        f"round {anchor.round}, {attachment.stats['samples_counted']} samples counted, held-out loss {held_out:.3f}"
    )
if swarm is not None:
    swarm.close()
dist.barrier()  # whoever goes first takes the connections of the others with it
dist.destroy_process_group()
