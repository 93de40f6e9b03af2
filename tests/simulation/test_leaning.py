"""Whose contributions lean, from what members of a run have signed and kept: who drifts is named
with figures, and what cannot be told is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from session_table import LAYOUT, Table
from simulation.test_recompute import give, verify
from simulation.test_splitting import TEXT, WITH_MEANS, places

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.cli.audit import _lean_lines
from atoll.node.home.output import Terminal, short_peer
from atoll.node.manifest import parse_manifest
from atoll.node.modes.leaning import leans
from atoll.node.records import recompute
from atoll.node.records.audit import AuditSource
from atoll.node.storage.contributions import ContributionFiles
from atoll.security.rules.leaning import LEAST_ROUNDS, chance

N, DRIFTS = 5, 3


def played(folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, drift: float) -> AuditSource:
    """Five members with one goal and noise; one of them adds a little of the same direction in
    every round. The running means point all ways.
    """
    monkeypatch.setattr(recompute, "verify", verify)
    outer = OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
    table = Table(N, RunSettings(sync_every=1, codec="fp32", outer=outer))
    for peer in table.peers:
        peer.storage.contributions = ContributionFiles(
            folder / peer.name, rounds, lambda error: pytest.fail(str(error))
        )
    table.all_in()
    chance_ = torch.Generator().manual_seed(5)
    goal, way = torch.randn(2, LAYOUT.numel, generator=chance_)
    for number in range(1, rounds + 1):
        for index, peer in enumerate(table.peers):
            vector = goal + torch.randn(LAYOUT.numel, generator=chance_)
            vector += drift * way * (index == DRIFTS)
            vector[6:] = 50.0 * index
            give(peer, f"{number}/{index}", vector)
        table.until(
            lambda number=number: all(
                len([e for e in peer.rounds() if e.contributors]) >= number for peer in table.peers
            )
        )
    table.world.run(until=table.world.now + 1)
    entries, place = list(table.peers[0].machine.journal.entries[:]), folder / "checkpoint"
    place.mkdir()
    (place / "atoll.json").write_text(json.dumps({"layout": msgspec.to_builtins(WITH_MEANS)}))
    manifest = parse_manifest(TEXT.replace("contributions = 4", f"contributions = {rounds}"))
    head = SimpleNamespace(run_id="run", open=lambda: manifest)
    return AuditSource(folder, head, {"main": lambda: iter(entries)}, (place,))  # type: ignore[arg-type]


def test_who_drifts_within_the_spread_is_named_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = played(tmp_path, monkeypatch, LEAST_ROUNDS, 1.5)
    found = leans(source, "main", LEAST_ROUNDS, places(tmp_path))
    assert (len(found.rounds), found.elements, found.f) == (LEAST_ROUNDS, 6, 1)
    assert found.chance == chance(N, 1)
    assert found.members[0].peer == f"p{DRIFTS}"
    assert [row.leans for row in found.members] == [("constancy",), (), (), (), ()]
    assert {row.rounds for row in found.members} == {LEAST_ROUNDS}
    screen = Terminal(environ={"COLUMNS": "100"})
    lines, first = _lean_lines(screen, [found]), found.members[0]
    assert (
        lines[0]
        == f"  leaning  {short_peer(first.peer)}: 40 rounds, 6 elements of each contribution, f = 1"
    )
    assert lines[2].split()[-5:] == [
        f"{first.constancy:.2f}",
        f"{first.against:.2f}",
        "40",
        "one",
        "way",
    ]
    assert "so does a member whose data are unlike all others'" in lines[-1]
    with pytest.raises(ConfigError) as caught:
        leans(source, "main", LEAST_ROUNDS, places(tmp_path)[1:])
    assert caught.value.key == "--from"
    assert "p0" in (caught.value.why or "")


@pytest.mark.slow
def test_where_nobody_drifts_nobody_is_named_and_few_rounds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = played(tmp_path, monkeypatch, LEAST_ROUNDS, 0.0)
    found = leans(source, "main", LEAST_ROUNDS, places(tmp_path))
    assert [row.leans for row in found.members] == [()] * N
    lines = _lean_lines(Terminal(environ={"COLUMNS": "100"}), [None, found])
    assert lines[0].startswith("  leaning  nobody: 40 rounds")
    assert len(lines) == 2 + N
    with pytest.raises(ConfigError) as caught:
        leans(source, "main", LEAST_ROUNDS - 1, places(tmp_path))
    assert (caught.value.key, "there are 39 rounds" in str(caught.value)) == ("--from", True)


def test_a_run_that_keeps_no_contributions_has_nothing_to_look_at(tmp_path: Path) -> None:
    manifest = parse_manifest('schema = 1\nname = "tide"\n')
    head = SimpleNamespace(run_id="run", open=lambda: manifest)
    source = AuditSource(tmp_path, head, {"main": lambda: iter(())}, ())  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        leans(source, "main", LEAST_ROUNDS, [])
    assert caught.value.key == "$.audit.keep_contributions"
