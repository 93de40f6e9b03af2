"""`atoll leave` while a script trains: the run stays left until somebody joins, and the script
hears it once, in plain words.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bad_input_kit import Run, new_run, soon

from atoll.collectives.errors import SwarmClosedError
from atoll.node import join
from atoll.node.control.protocol import JoinRequest
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

pytestmark = pytest.mark.slow


def _node(run: Run) -> subprocess.Popen[str]:
    """The organiser's daemon, listening."""
    command = [
        sys.executable,
        "-m",
        "atoll.node",
        "--home",
        str(run.home),
        "--json",
        "--until-stdin-ends",
    ]
    node = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert node.stdout is not None
    assert node.stdout.readline().startswith("{")
    return node


def _end(node: subprocess.Popen[str]) -> int:
    """Close its stdin, as the system does when whoever started it is gone."""
    node.communicate(timeout=60)
    return node.returncode


def test_left_until_somebody_joins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = new_run(tmp_path)
    node, run_id = _node(run), run.signed.run_id
    words = f"this node has left run bad; `atoll join {run_id[:8]}` brings it back"
    try:
        with join(
            run_id, home=run.home, private=False, progress=lambda stage, done, total: None
        ) as swarm:
            model = torch.nn.Linear(10, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            attachment = swarm.attach(model, optimizer)

            def step() -> int:
                """One step; rounds counted so far."""
                model(torch.ones(1, 10)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                return attachment.stats["counted"]

            soon(lambda: step() >= 2, "rounds are counted")
            with NodeClient.connect(find_paths(run.home)) as client:
                client.leave(run_id)
                soon(lambda: step() >= 2 and not swarm.connected, "the script hears of it")
                assert client.runs() == []
            counted = step()
            with pytest.raises(
                SwarmClosedError
            ) as told:  # what the thread that looks for the run meets, again and again
                swarm._try_again(lambda: False)
            assert (told.value.message, told.value.code) == (words, "E162")
            with pytest.raises(SwarmClosedError, match="has left run bad") as closed:
                swarm.anchor()
            assert closed.value.code == "E162"
            with pytest.raises(SwarmClosedError, match="has left run bad"):
                join("bad", home=run.home, private=False)
            assert _end(node) == 0
            node = _node(run)  # it stays left over a restart
            with pytest.raises(SwarmClosedError, match="has left run bad"):
                swarm._try_again(lambda: False)
            with NodeClient.connect(find_paths(run.home)) as client:
                assert client.runs() == []
                assert step() == counted
                client.join(JoinRequest(manifest=run.signed.encode()))
                assert [entry["run_id"] for entry in client.runs()] == [run_id]
            soon(lambda: step() >= counted + 2, "the script is back in the run")
            attachment.detach()
    finally:
        _end(node)
    alone = [
        record.message for record in caplog.records if "training alone until" in record.message
    ]
    assert alone == [f"training alone until the node is back in the run: {words}"]
    assert "is not open" not in caplog.text
