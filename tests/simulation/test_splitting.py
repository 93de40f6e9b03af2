"""A run's members are told apart by what they have signed and kept: the planted groups come out,
and what is no ground for clusters is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from session_table import LAYOUT, Table
from simulation.test_recompute import give, verify

from atoll.collectives.errors import ConfigError, SecurityError
from atoll.collectives.layout import Layout, TensorSpec
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.manifest import parse_manifest
from atoll.node.manifest.form import as_toml
from atoll.node.modes import splitting as s
from atoll.node.records import recompute
from atoll.node.records.audit import AuditSource
from atoll.node.storage.contributions import DATA, ContributionFiles
from atoll.security.identity import Identity

TEXT = 'schema = 1\nname = "tide"\n[model]\nentry = "local:test"\n[audit]\nkeep_contributions = 4\n'
WITH_MEANS = Layout(
    (TensorSpec("w", (6,), 0), TensorSpec("running_mean", (2,), 6, "mean")), LAYOUT.numel
)


def group_of(index: int, number: int) -> int:
    return index % 2


def played(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str = "int8",
    groups: Callable[[int, int], int] = group_of,
    rounds: int = 3,
) -> AuditSource:
    """Five members, each with the direction of its group and some noise, and numbers in the running
    means that point all ways.
    """
    monkeypatch.setattr(recompute, "verify", verify)
    table = Table(
        5,
        RunSettings(
            sync_every=1, codec=codec, outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
        ),
    )
    ways = torch.randn(3, LAYOUT.numel, generator=torch.Generator().manual_seed(7))
    for peer in table.peers:
        peer.storage.contributions = ContributionFiles(
            folder / peer.name, 4, lambda error: pytest.fail(str(error))
        )
    table.all_in()
    for number in range(1, rounds + 1):
        for index, peer in enumerate(table.peers):
            rng = torch.Generator().manual_seed(100 * number + index)
            vector = (1 + index) * ways[groups(index, number)] + 0.2 * torch.randn(
                LAYOUT.numel, generator=rng
            )
            vector *= groups(index, number) < 2
            vector[6:] = 50 * torch.randn(2, generator=rng)
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
    head = SimpleNamespace(run_id="run", open=lambda: parse_manifest(TEXT))
    return AuditSource(folder, head, {"main": lambda: iter(entries)}, (place,))  # type: ignore[arg-type]


def places(folder: Path) -> list[Path]:
    return [folder / f"p{index}" for index in range(5)]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_planted_groups_are_the_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    found = s.split(played(tmp_path, monkeypatch, codec), places(tmp_path))
    assert found.clusters == (("p0", "p2", "p4"), ("p1", "p3"))
    assert (found.stable, found.agree, found.unseen, len(found.rounds)) == (True, 1.0, (), 2)
    assert found.within is not None
    assert found.between is not None
    assert found.within > 0.9 > 0.5 > found.between


def test_members_that_are_alike_are_one_cluster_and_a_number_may_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = played(tmp_path, monkeypatch, groups=lambda index, number: 0)
    found = s.split(source, places(tmp_path), rounds=3)
    assert found.clusters == (("p0", "p1", "p2", "p3", "p4"),)
    assert (found.stable, found.between, len(found.rounds)) == (True, None, 3)
    assert len(s.split(source, places(tmp_path), count=2).clusters) == 2


def test_who_trained_nothing_is_named_and_in_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = s.split(
        played(
            tmp_path,
            monkeypatch,
            groups=lambda index, number: 2 if index == 2 and number == 3 else index % 2,
        ),
        places(tmp_path),
    )
    assert (found.clusters, found.unseen, found.stable) == (
        (("p0", "p4"), ("p1", "p3")),
        ("p2",),
        True,
    )


def test_groups_that_change_from_round_to_round_are_not_stable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = s.split(
        played(
            tmp_path, monkeypatch, groups=lambda index, number: (index + number * (index == 4)) % 2
        ),
        places(tmp_path),
    )
    assert not found.stable
    assert found.agree < 1


def test_rounds_that_are_not_all_here_are_passed_over_and_two_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = played(tmp_path, monkeypatch)
    newest = max(int(path.name) for path in (tmp_path / "p1" / "contributions").iterdir())
    for file in (tmp_path / "p1" / "contributions" / f"{newest:08}").glob(f"*{DATA}"):
        file.unlink()  # copied while the run went on
    assert s.split(source, places(tmp_path)).rounds == (newest - 2, newest - 1)
    with pytest.raises(ConfigError, match="0 rounds of which all contributions are here") as caught:
        s.split(source, places(tmp_path)[:1])
    assert "those of p1, p2, p3, p4 are missing" in caught.value.why
    (file,) = (tmp_path / "p2" / "contributions" / f"{newest - 1:08}").glob(f"*{DATA}")
    file.write_bytes(bytes([1]) + file.read_bytes()[1:])
    with pytest.raises(SecurityError, match="is not what p2 has signed"):
        s.split(source, places(tmp_path))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            TEXT.replace("keep_contributions = 4", "keep_contributions = 0"),
            "$.audit.keep_contributions",
        ),
        (
            'kind = "federated"\n' + TEXT.split("[audit]")[0] + "[secure]\nthreshold = 3\n",
            "$.secure",
        ),
        (TEXT + "[exchange]\nfragments = 2\n", "$.exchange.fragments"),
    ],
)
def test_runs_whose_members_cannot_be_told_apart_are_refused(text: str, key: str) -> None:
    with pytest.raises(ConfigError, match="tide cannot be split") as caught:
        s.check_split(parse_manifest(text))
    assert caught.value.key == key
    assert caught.value.why
    assert caught.value.hint


def test_each_clusters_manifest_lets_in_its_members_only_and_is_else_the_parents() -> None:
    who = [Identity(bytes([index]) * 32).peer for index in range(5)]
    parent = parse_manifest(
        TEXT.replace("tide", "t" * 64)
        + '[robust]\nrule = "median"\nf = 1\n[train.outer]\nlr = 0.5\nmomentum = 0.6\n'
    )
    made = s.manifests(parent, s.Split((tuple(who[:3]), tuple(who[3:])), (), 1.0, 0.9, 0.1, (4, 5)))
    assert [each.join.allow for each in made] == [tuple(who[:3]), tuple(who[3:])]
    assert [each.name for each in made] == ["t" * 58 + "-1", "t" * 58 + "-2"]
    for each in made:
        assert parse_manifest(as_toml(each)) == each
        assert each.join.policy == "allow"
        assert (
            msgspec.structs.replace(each, name=parent.name, description="", join=parent.join)
            == parent
        )
    assert parent.least == 3  # members: a smaller cluster is told so
