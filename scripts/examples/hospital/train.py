"""The script that all sites of a run run: atoll join INVITE --script train.py --data site.py:make.
By itself it takes a run or an invite as its argument, or from ATOLL_RUN or ATOLL_INVITE; without any
of them it trains alone, which it says.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, random_split

from atoll.collectives.swarm import RunSettings
from atoll.node import join, site_data
from atoll.optim import SoloSwarm, attach
from atoll.optim.script.tuning import fine_tuned_model

given = sys.argv[1:] or [os.environ.get(name, "") for name in ("ATOLL_RUN", "ATOLL_INVITE")]
alone = not any(given)
if alone:
    print(
        "ALONE: no run or invite is given, so nobody else's data are in this model. "
        "With others: python train.py INVITE, or ATOLL_INVITE=INVITE python train.py",
        file=sys.stderr,
    )
    swarm = SoloSwarm(RunSettings(sync_every=10, rounds=8))
else:
    swarm = join(next(filter(None, given)))

torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
held, own_data = random_split(
    site_data(), [0.2, 0.8]
)  # a fifth of the site's samples trains nothing
loader = DataLoader(own_data, batch_size=20, shuffle=True)
# what this site counts in a run by examples
attachment = attach(model, optimizer, swarm, examples=len(own_data))

while not attachment.done:
    for inputs, classes in loader:
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        attachment.samples(len(inputs))
        optimizer.step()
        optimizer.zero_grad()
        if attachment.done:
            break

with attachment.evaluate_anchor() as anchor, torch.no_grad():
    held_out = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    loss = nn.functional.cross_entropy(model(held_out), (held_out.sum(1) > 0).long())
print(
    f"round {anchor.round}, {attachment.stats['samples_counted']} samples counted, held-out loss {loss:.3f}"
)
if privacy := attachment.describe()["privacy"]:  # None in a run without [privacy]
    print(
        f"epsilon {privacy['epsilon']:.3f} spent here at delta {privacy['delta']:g}, in {privacy['steps']} contributions"
    )


def right(model: nn.Module) -> float:
    """Share of the site's held samples whose class the model names."""
    inputs, classes = next(iter(DataLoader(held, batch_size=len(held))))
    return float((model(inputs).argmax(1) == classes).float().mean())


with attachment.evaluate_anchor(), torch.no_grad():
    shared = right(model)
own = fine_tuned_model(
    attachment,
    model,
    lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    loader,
    20,
    0.1,
)
whose = "the model trained ALONE here" if alone else "the run's model"
print(
    f"accuracy at this site: {shared:.3f} with {whose}, {right(own):.3f} with one of its own, tuned from it"
)
swarm.report(
    {"accuracy_here": shared, "accuracy_own": right(own)}
)  # to this machine's node: atoll status
swarm.close()
