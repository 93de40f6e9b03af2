"""attach() over the real client: an ordinary training loop that keeps its step when the node is
killed under it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
from reference_node import INVITE, Node, ReferenceService

from atoll.collectives.outcomes import Spent
from atoll.node import join


def test_training_goes_on_when_the_node_dies_and_reenters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    home = tmp_path / "state"
    home.mkdir()
    node = Node(tmp_path, lambda: ReferenceService(home))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.randn(64, 3)
    target = data @ torch.randn(3, 2)

    def step() -> float:
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
        sync = swarm.attach(model, optimizer)
        losses = [step() for _ in range(20)]  # sync_every is 5
        assert sync.round == 4
        assert len(node.service.run.log) == 4
        node.stop()
        losses += [step() for _ in range(12)]
        assert sync.round == 4
        node = Node(tmp_path, lambda: ReferenceService(home))
        while not swarm.connected:
            time.sleep(0.01)
        losses += [step() for _ in range(10)]
        assert sync.round > 4
        assert len(node.service.run.log) == sync.round
        anchor = node.do(node.service.run.anchor)
        losses += [step() for _ in range(3)]
        sync.detach()
    assert losses[-1] < losses[0] * 0.5
    assert losses == sorted(losses, reverse=True)  # not one step of the time alone was lost
    assert torch.isfinite(anchor).all()
    assert "training alone until the node is back in the run: the node ended" in caplog.text
    node.stop()


def test_what_is_spent_of_privacy_is_among_a_scripts_numbers(tmp_path: Path) -> None:
    """As the node says it, at once for a script that comes back, and again at each round; None
    where the run has no noise.
    """
    home = tmp_path / "state"
    home.mkdir()
    node = Node(tmp_path, lambda: ReferenceService(home))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
        sync = swarm.attach(model, optimizer)
        assert sync.describe()["privacy"] is None
        node.service.run.spent = Spent(0.5, None, 1.25, 1e-5, 8.0, 3, 40)
        for _ in range(5):  # sync_every
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        told = {
            "clip": 0.5,
            "quantile": None,
            "epsilon": 1.25,
            "delta": 1e-5,
            "stop_at_epsilon": 8.0,
            "steps": 3,
            "left": 40,
        }
        assert sync.describe()["privacy"] == told
        sync.detach()
        assert (
            swarm.attach(model, torch.optim.SGD(model.parameters(), lr=0.05)).describe()["privacy"]
            == told
        )
    node.stop()
