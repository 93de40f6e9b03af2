"""What `atoll plan` says of a whole run is what the run's own settings make of it, and what nodes
play: rounds that begin short among them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.collectives.growth import RoundLengths, growing
from atoll.node.cli import run
from atoll.node.manifest import parse_manifest
from atoll.node.simulation.fleet import FleetPeer
from atoll.node.simulation.fleet_run import FleetRun
from atoll.optim.planning import Choice, Conditions, PeerConditions, estimate, plan, run_cost

MBIT = 1e6 / 8
TEXT = """
schema = 1
name = "planned"
[train]
sync_every = 20
rounds = 12
[model]
entry = "local:planned"
parameters = 1000000
"""


def conditions(count: int = 3, **more: Any) -> Conditions:
    peers = [PeerConditions(f"p{i}", 100 * MBIT, 100 * MBIT, 0.5) for i in range(count)]
    return Conditions(1_000_000, tuple(peers), 0.05, **more)


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def pasted(settings: dict[str, dict[str, Any]]) -> str:
    """The manifest with the tables that a plan prints."""
    model = TEXT[TEXT.index("[model]") :]
    tables = [
        f"[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        for name, table in settings.items()
    ]
    return "\n".join(['schema = 1\nname = "planned"', *tables, model])


def test_a_run_costs_what_each_of_its_rounds_costs() -> None:
    given, choice, lengths = conditions(), Choice(6), RoundLengths(6, growth=2)
    assert growing(6, 2) == (1, 1, 1, 1, 2, 3, 3)
    found = run_cost(given, choice, lengths, 9)
    each = [estimate(given, Choice(steps)) for steps in (1, 1, 1, 1, 2, 3, 3, 6, 6)]
    assert (found.rounds, found.steps) == (9, 24)
    assert found.seconds == pytest.approx(sum(one.period_s for one in each))
    assert found.share == pytest.approx(24 * 0.5 / found.seconds)
    assert found.nbytes == 9 * each[0].nbytes
    assert run_cost(given, choice, RoundLengths(6), 4).seconds == pytest.approx(
        4 * each[-1].period_s
    )


def test_a_plan_counts_short_rounds_where_the_run_has_them() -> None:
    """They cost time, so plain rounds of a length that was not measured cost less of it."""
    cold, usual = plan(conditions(steps=1000, cold=True)), plan(conditions(steps=1000))
    assert cold.begins is not None
    assert cold.run is not None
    assert cold.run.rounds == RoundLengths(cold.choice.sync_every, 20).rounds_for(
        round(1000 / cold.choice.sync_every)
    )
    assert usual.begins is None
    assert usual.run is not None
    # The plain mean with late results was sooner as long as nothing was known to be better.
    assert (cold.choice.overlap, usual.choice.overlap) == ("none", "late")
    assert plan(conditions(cold=True)).run is None


@pytest.mark.slow
def test_a_plan_is_what_nodes_play_with_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT, encoding="utf-8")
    links = ["--peers", "3", "--up", "100Mbit/s", "--rtt-ms", "50"]
    found = said(["plan", str(path), "--step-ms", "500", *links], capsys)
    own = parse_manifest(TEXT).settings()
    assert own.rounds == found["present"]["run"]["rounds"] == RoundLengths(20, 20).rounds_for(12)
    assert own.lengths.before(own.rounds) == found["present"]["run"]["steps"] == 240
    settings = parse_manifest(pasted(found["settings"])).settings()
    said_run, begins = found["predicted"]["run"], found["predicted"]["begins"]
    assert settings.rounds == said_run["rounds"]
    assert (settings.sync_every, settings.growth) == (10, 20)
    assert settings.lengths.short_rounds == begins["rounds"]
    assert settings.lengths.before(begins["rounds"]) == begins["steps"]
    assert settings.lengths.before(settings.rounds) == said_run["steps"]
    assert abs(said_run["steps"] - 240) < settings.sync_every

    machines = [FleetPeer(f"p{i}", 0.5, 12_500_000, 12_500_000, 0.0125) for i in range(3)]
    played = FleetRun(settings, machines, 1_000_000, batch=1).play()
    assert played.rounds == said_run["rounds"]
    assert {machine.steps for machine in played.machines} == {said_run["steps"]}
    assert played.seconds == pytest.approx(said_run["seconds"], rel=0.05)
    assert played.share == pytest.approx(said_run["training_share"], abs=0.05)
    # What is sent beside rounds: states of 8 bytes a parameter to each newcomer, from two others.
    states = 2 * 8 * 1_000_000 * (len(machines) - 1)
    assert 0 <= played.bytes - len(machines) * said_run["bytes_up"] <= states
