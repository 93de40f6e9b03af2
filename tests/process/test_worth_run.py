"""Two real nodes and scripts whose averaging harms: the log holds what they find, both are told, and
both take the plain mean from the same entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import LISTEN, atoll, nothing_stays, start
from own_scripts_kit import plain, until

pytestmark = pytest.mark.slow

RUN = """
schema = 1
name = "tiny"
model = { entry = "local:x" }
evaluate = { share = 0.5 }
[train]
sync_every = 25
rounds = 12
start_with = 2
outer = { lr = 0.9, momentum = 0.9, governor = true }
"""
SCRIPT = """
import torch
from atoll.node import join
from atoll.optim import attach
torch.manual_seed(0)
held = torch.randn(64, 8)
model = torch.nn.Linear(8, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.014)
error = lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()
with join(RUN) as swarm:
    stream = torch.Generator().manual_seed(sum(swarm.peer.encode()))
    sync = attach(model, optimizer, swarm, batch_size=32, evaluate=lambda model: error(held))
    while not sync.done:
        optimizer.zero_grad()
        error(torch.randn(32, 8, generator=stream)).backward()
        optimizer.step()
    with sync.evaluate_anchor() as view:
        print("ended", view.digest, "%.6f" % error(held).item())
"""


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


def test_both_are_told_and_take_the_plain_mean_from_the_same_entry(tmp_path: Path) -> None:
    homes, recipe = (tmp_path / "one", tmp_path / "two"), tmp_path / "run.toml"
    recipe.write_text(RUN)
    for home in homes:
        atoll(home, "up", "--background", *LISTEN)
    try:
        invite = atoll(homes[0], "new", str(recipe))["invite"]
        for name, run in (("founds", ""), ("joins", repr(invite))):
            (tmp_path / f"{name}.py").write_text(SCRIPT.replace("join(RUN)", f"join({run})"))
        with plain(homes[0], "founds") as first, plain(homes[1], "joins") as second:
            scripts = (first, second)
            told = [until(process, "takes the plain mean from entry") for process in scripts]
            ended = [process.communicate(timeout=300)[0].split()[-3:] for process in scripts]
        found = [re.search(r"\(V21\): (.*) on held-out data; .* from entry (\d+)", t) for t in told]
        assert all(found)
        assert len({each[2] for each in found if each}) == 1
        assert len({digest for _, digest, _ in ended}) == 1
        assert all(float(loss) < 0.05 for _, _, loss in ended)
        for home in homes:
            with start(home, "events", "tiny", "--all", "--json") as process:
                lines = process.communicate(timeout=150)[0].splitlines()
            events = [json.loads(line) for line in lines]
            readings = [each["worth"] for each in events if each.get("worth")]
            assert readings
            assert {each["members"] for each in readings} == {2}
            verdicts = [each["code"] for each in events if each["event"] == "verdict.raised"]
            assert verdicts.count("V21") == 1
            last = [each for each in events if each["event"] == "round.committed"][-1]
            assert [str(last["plain_since"])] == list({each[2] for each in found if each})
    finally:
        for home in homes:
            atoll(home, "down", "--scripts")
