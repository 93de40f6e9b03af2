"""A run that bears a member that lies, with real nodes: rounds go on, and who signed two things is
banned with proof.

Nobody is accused but who lies, and the anchors of the honest stay alike.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from bad_input_kit import Member, atoll, ended, new_run, odd, one_round, soon

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.layout import make_layout

pytestmark = pytest.mark.slow
CHUNKS = 10


def accused(*members: Member) -> set[str]:
    """Whom their nodes have named for what it did or said."""
    return {peer for member in members for peer in {*member.named(), *member.state()["banned"]}}


def counted(members: list[Member], least: int) -> int:
    """The round of one contribution of each of them, of which at least so many count; all have the
    same anchor after it.
    """
    while True:
        tickets = [
            member.swarm.contribute(samples=1, write=lambda out, value=i + 1.0: out.fill_(value))
            for i, member in enumerate(members)
        ]
        outcomes = [ticket.wait(60.0) for ticket in tickets]
        if sum(outcome.counted for outcome in outcomes) >= least:
            newest = max(outcome.round for outcome in outcomes)
            break
    soon(lambda: all(member.anchor()[0] >= newest for member in members), "the anchors")
    assert len({member.anchor() for member in members}) == 1
    return newest


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


def test_a_hidden_plan_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The member that never saw the plan has the decided bytes in the end, and accuses nobody who
    handed them out.
    """
    run, lies = new_run(tmp_path, model="[quorum]\nlying = 1"), tmp_path / "lies"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(lies))
    honest = [run.organiser(), run.member("b"), run.member("c")]
    liar = run.member("d", command=odd("hider"))
    with ended(*honest, liar):
        one_round(*honest, liar)
        lies.touch()
        first = last = honest[0].anchor()[0]
        while not any(member.state()["banned"] for member in honest):  # once it has convened
            with suppress(LocalProtocolError):  # what it gave before is still undecided
                liar.swarm.contribute(samples=1, write=lambda out: out.fill_(4.0))
            last = counted(honest, 2)
            assert last < first + 40, "it has told no lie"
        for _ in range(3):
            assert counted(honest, 2) > last
        why = "it has proposed bytes as another result than they are"
        for member in honest:  # the one that has no bytes of the plan is shown the proof
            banned = soon(lambda m=member: m.state()["banned"], "a ban with proof")
            assert banned == {liar.swarm.peer: f"this member has banned this peer: “{why}”"}
        assert accused(*honest) == {liar.swarm.peer}


@pytest.mark.rota(7)
def test_who_adds_to_its_part_moves_no_model_and_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five members contribute 1 to 4, and the liar 4. Until it is proven to lie, too, no step of a
    model leaves what the honest contributed, in any of its values.
    """
    table = '[quorum]\nlying = 1\n[robust]\nrule = "trimmed_mean"\nf = 1'
    run, lies = new_run(tmp_path, model=table), tmp_path / "lies"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(lies))
    layout = make_layout([("w", (CHUNKS << 16,))])  # so that each member owns a part
    honest = [run.organiser(layout=layout)]
    honest += [run.member(name, layout=layout) for name in "bcd"]
    liar = run.member("e", command=odd("adder"), layout=layout)
    peer = liar.swarm.peer
    with ended(*honest, liar):
        one_round(*honest, liar)
        lies.touch()
        first, _ = honest[0].anchor()
        steps, known = dict[int, tuple[float, float]](), dict[int, np.ndarray]()
        while not all(
            peer in member.state()["banned"] and peer not in member.state()["members"]
            for member in honest
        ):
            with suppress(LocalProtocolError):  # what it gave before is still undecided
                liar.swarm.contribute(samples=1, write=lambda out: out.fill_(4.0))
            last = counted(honest, 3)
            for member in honest:
                at, data = member.anchor()
                values = known.setdefault(at, np.frombuffer(data, np.float32))
                assert (values == np.frombuffer(data, np.float32)).all()
                if (before := known.get(at - 1)) is not None:
                    step = np.abs(values - before)
                    steps[at] = float(step.min()), float(step.max())
            assert last < first + 60, "it is still there"
        assert steps
        assert all(low >= 1 - 1e-3 and high <= 4 + 1e-3 for low, high in steps.values()), steps
        assert np.abs(known[max(known)]).max() <= 4.001 * max(known)
        assert counted(honest, 3) > last
        assert accused(*honest) == {peer}
        for member in honest:
            assert "a sum that its inputs do not have" in member.state()["banned"][peer]
