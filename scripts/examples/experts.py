"""Experts on clusters of the data, and a router between them (flow matching of points, or classes).

python experts.py                  finds the clusters, trains everything here, and shows the mixture
python experts.py 0 INVITE         trains expert 0 in its island, with whoever else is there
python experts.py classes          the same three for a classification
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node import join
from atoll.optim import SoloSwarm, attach
from atoll.optim.lab.experts import Clusters, Mixture, find_clusters

ISLANDS, FILE = 2, Path("clusters.npy")
words = sys.argv[1:]
CLASSES = "classes" in words
words = [word for word in words if word != "classes"]

torch.manual_seed(0)
rng = torch.Generator().manual_seed(0)
side = torch.randint(2, (4000, 1), generator=rng) * 2 - 1
points = torch.randn(4000, 2, generator=rng) * torch.tensor([0.2, 1.0]) + 3 * side
labels = (points[:, 1] > 3 * side[:, 0]).long() ^ (
    side[:, 0] > 0
).long()  # each cluster its own rule


class Net(nn.Module):
    """Of where a point is, and at which time of the flow."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, outputs))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat([x, t], 1))


def train(model: nn.Module, x: Tensor, y: Tensor, what: str, swarm: Swarm) -> nn.Module:
    """An ordinary loop: what makes an expert is its data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attachment = attach(model, optimizer, swarm, batch_size=64)
    while not attachment.done:
        rows = torch.randint(len(x), (64,), generator=rng)
        noise = torch.randn(64, 2, generator=rng)
        t = torch.ones(64, 1) if CLASSES else torch.rand(64, 1, generator=rng)
        answer = model((1 - t) * noise + t * x[rows], t)
        if what == "velocity":
            loss = functional.mse_loss(answer, x[rows] - noise)
        else:
            loss = functional.cross_entropy(answer, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        attachment.log(loss=loss)
    return model.eval()


def alone() -> Swarm:
    return SoloSwarm(RunSettings(sync_every=20, rounds=40))


if not FILE.exists():  # found once; every island gets the same file
    find_clusters(points, ISLANDS).save(FILE)
island = Clusters.load(FILE).of(points)
what = "classes" if CLASSES else "velocity"

if words:
    number = int(words[0])
    here = island == number
    expert, swarm = Net(2), join(words[1])
    train(expert, points[here], labels[here], what, swarm)
    swarm.close()  # `atoll export` writes the island's model
    sys.exit()

experts = [
    train(Net(2), points[island == number], labels[island == number], what, alone())
    for number in range(ISLANDS)
]
router = train(Net(ISLANDS), points, island, "island", alone())
mixture = Mixture(experts, router, top=1, answer="logits" if CLASSES else "values")
with torch.no_grad():
    if CLASSES:
        right = mixture(points, torch.ones(len(points), 1)).argmax(1) == labels
        print(f"{right.float().mean():.3f} of the points are classified right")
    else:
        x = torch.randn(1000, 2, generator=rng)
        for step in range(50):
            x = x + mixture(x, torch.full((1000, 1), step / 50)) / 50
        near = (x[:, :1].abs() - 3).abs().mean()
        print(f"drawn points are {near:.2f} from the middle of their cluster, across")
