"""A run that bears a member that lies, with real nodes: rounds go on, and who signed two things is banned with proof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_input_kit import atoll, ended, new_run, odd, one_round, soon

pytestmark = pytest.mark.slow


def test_one_of_four_real_nodes_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, lies = new_run(tmp_path, model="[quorum]\nlying = 1"), tmp_path / "lies"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(lies))
    a = run.organiser()
    assert a.state()["quorum"] == {"reachable": 1, "members": 1, "needed": 4, "held": False}
    honest = [a, run.member("b"), run.member("c")]
    liar = run.member("d", command=odd("liar"))
    with ended(*honest, liar):
        one_round(*honest, liar)
        assert (a.state()["lying"], a.state()["quorum"]) == (
            1,
            {"reachable": 4, "members": 4, "needed": 3, "held": True},
        )
        lies.touch()
        liar.swarm.contribute(samples=1, write=lambda out: out.fill_(4.0))
        before = one_round(*honest)[0].round
        for member in honest:
            banned = soon(lambda m=member: m.state()["banned"], "a ban with proof")
            assert banned == {
                liar.swarm.peer: "this member has banned this peer: “it has echoed two values of one ballot”"
            }
        assert one_round(*honest)[0].round > before
        assert len({member.anchor() for member in honest}) == 1
        told = json.loads(atoll(a.home, "audit", a.swarm.run_id, "--json").out)
        assert told["proven"]
        assert [(ban["peer"], ban["proves"]) for ban in told["bans"]] == [
            (liar.swarm.peer, "it has echoed two values of one ballot")
        ]
        assert set(told["logs"][0]["contributors"]) >= {member.swarm.peer for member in honest}
