"""One run's failure at a node is coded, told and logged, and ends neither the node nor, in the
script, training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input_kit import LAYOUT, Member, ended, new_home, new_run, odd, one_round, soon
from seeds import RARE

from atoll.collectives.errors import LocalProtocolError
from atoll.node import join
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

pytestmark = [*RARE]


@pytest.mark.parametrize("where", ["defect", "job"])
def test_a_defect_ends_the_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run, defect = new_run(tmp_path), tmp_path / "defect"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(defect))
    a = run.organiser(command=odd(where))
    try:
        one_round(a)
        before, pid = a.anchor(), a.pid
        defect.touch()
        if where == "job":
            a.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
        soon(lambda: not _connected(a), "the script hears of it")
        assert "ZeroDivisionError" in a.swarm.trouble
        state = a.state()
        assert (state["phase"], state["trouble"]["code"]) == ("failed", "E142")
        assert "log has the traceback" in state["trouble"]["hint"]
        defect.unlink()
        soon(lambda: _connected(a), "the script enters the run again")
        assert a.state()["phase"] == "running"
        assert a.anchor()[0] >= before[0]
        one_round(a)
        assert a.pid == pid  # the same node all the time
        assert "ZeroDivisionError: a defect made for this test" in a.log()
        assert "Traceback" in a.log()
    finally:
        a.swarm.close()


def test_a_fetched_state_that_cannot_be_taken_over_ends_the_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, defect = new_run(tmp_path), tmp_path / "defect"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(defect))
    a = run.organiser()
    with ended(a):
        one_round(a)
        defect.touch()
        home = new_home(tmp_path / "b")
        swarm = join(
            run.invite(),
            home=home,
            private=True,
            command=odd("install"),
            progress=lambda stage, done, total: None,
        )
        with swarm:
            with pytest.raises(
                LocalProtocolError, match="ZeroDivisionError: a defect made for this test"
            ) as told:
                swarm.open(LAYOUT, lambda initial: initial.zero_())
            assert told.value.code == "E142"
            with NodeClient.connect(find_paths(home)) as client:
                pid, state = client.node.pid, client.status()["runs"][0]
                assert (state["phase"], state["trouble"]["code"]) == ("failed", "E142")
                defect.unlink()
                swarm.open(LAYOUT, lambda initial: initial.zero_()).release()
                assert client.status()["runs"][0]["phase"] == "running"
                assert client.node.pid == pid
        one_round(a)


def test_the_node_ends_with_an_error_when_its_data_plane_fails_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, defect = new_run(tmp_path), tmp_path / "defect"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(defect))
    a = run.organiser(command=odd("engine"))
    try:
        one_round(a)
        pid = a.pid
        defect.touch()
        ticket = a.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
        soon(lambda: not _connected(a), "the node is gone")
        defect.unlink()
        soon(lambda: _connected(a), "another node is there")
        assert a.pid != pid
        assert ticket.wait(30).status in ("committed", "lost")  # settled, counted or not
        one_round(a)
        assert "E142" in a.log()
    finally:
        a.swarm.close()


def _connected(member: Member) -> bool:
    member.swarm.take_in()
    return member.swarm.connected


def test_what_the_odd_node_does_is_not_in_a_plain_one(tmp_path: Path) -> None:
    a = new_run(tmp_path).organiser()
    with ended(a):
        one_round(a)
        assert a.state()["trouble"] is None
