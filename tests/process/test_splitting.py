"""A run of real nodes is split by what its members contributed, and each cluster's run begins where
the run was, with its members only.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from bad_input_kit import NUMEL, PATIENCE_S, Member, atoll, ended, new_run, soon
from safetensors.torch import load_file

from atoll.collectives.errors import ModelMismatchError
from atoll.collectives.layout import make_layout
from atoll.node.manifest import load_run, parse_manifest

pytestmark = pytest.mark.slow

WAYS = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(3))


def turn(members: list[Member], number: int) -> bool:
    """The first two contribute in one direction, the others in another; whether one round counted
    all.
    """
    tickets = list[object]()
    for index, member in enumerate(members):
        noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * number + index))
        tickets.append(
            member.swarm.contribute(
                samples=1, write=lambda out, value=WAYS[index // 2] + 0.3 * noise: out.copy_(value)
            )
        )
    outcomes = [ticket.wait(PATIENCE_S) for ticket in tickets]  # type: ignore[attr-defined]
    return all(
        outcome.counted and len(outcome.contributors) == len(members) for outcome in outcomes
    )


def test_two_groups_become_two_runs_that_go_on_from_the_model(tmp_path: Path) -> None:
    run = new_run(tmp_path, model="[audit]\nkeep_contributions = 6")
    members = [run.organiser(), *(run.member(name) for name in "bcd")]
    organiser, b, c, d = members
    out = tmp_path / "out"
    with ended(*members):
        numbers = count()
        soon(lambda: turn(members, next(numbers)), "all are members")
        soon(lambda: turn(members, next(numbers)), "a second round")
        copies = [
            part
            for member in members[1:]
            for part in ("--from", str(member.folder / "contributions"))
        ]

        def shown() -> str:
            """The clusters of all; one more round where a contribution was decided before it was
            kept, or without somebody.
            """
            told = atoll(organiser.home, "split", "bad", *copies)
            if told.status == 0 and "in no cluster" not in told.out:
                return told.out
            turn(members, next(numbers))
            return ""

        table = soon(shown, "two rounds are kept by all")
        assert "both halves say the same" in table
        assert "mean cosine of two updates: 0.9" in table
        told = atoll(organiser.home, "split", "bad", *copies, "--out", str(out), "--json")
        assert told.status == 0, told
        found, anchor = json.loads(told.out), organiser.anchor()[1]
        groups = {
            frozenset(member.swarm.peer for member in pair) for pair in ((organiser, b), (c, d))
        }
        assert {frozenset(group) for group in found["clusters"]} == groups
        assert (found["stable"], found["unseen"]) == (True, [])
        lists = [parse_manifest(Path(file).read_text()).join.allow for file in found["manifests"]]
        assert [sorted(group) for group in found["clusters"]] == [
            sorted(allowed) for allowed in lists
        ]
    (weights,) = load_file(out / "model" / "partial.safetensors").values()
    assert weights.numpy().tobytes() == anchor
    number = next(number for number, allowed in enumerate(lists) if c.swarm.peer in allowed)
    file, name = found["manifests"][number], found["runs"][number]
    told = atoll(c.home, "new", file, "--from", str(out / "model"))
    assert told.status == 0, told
    begun = load_run(c.paths, name).run_id
    with pytest.raises(
        ModelMismatchError,
        match=r"the model to start from is not the script's: 1 tensors differ, v",
    ):
        Member(c.home, begun, layout=make_layout([("v", (NUMEL,))]))
    again = Member(c.home, begun)  # its script would begin with zeros
    with ended(again):
        assert again.anchor() == (0, anchor)
