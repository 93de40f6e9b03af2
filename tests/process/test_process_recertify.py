"""A quorum is lost for ever, with real processes: two of three peers die and their disks are gone.
The founder recertifies without them, by the command line, and goes on certified; one of them, back
from a copy of its disk, is refused."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from bad_input_kit import atoll, refused, soon
from swarm_kit import Peer, Peers

from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

pytestmark = pytest.mark.slow


def test_the_founder_goes_on_without_the_lost_and_a_copy_of_one_is_refused(tmp_path: Path) -> None:
    with Peers(tmp_path, 3, 20_000) as swarm:
        swarm.settle()
        founder, gone, copied = swarm.all
        run = founder.run

        def state(peer: Peer = founder) -> dict[str, Any]:
            with NodeClient.connect(find_paths(peer.home)) as client:
                return client.status()["runs"][0]

        assert refused(founder.home, "E306", 78, "recertify", run, "--without", gone.peer, "--yes")[
            "message"
        ].endswith("is alive")
        assert (
            refused(copied.home, "E306", 78, "recertify", "--without", gone.peer, "--yes")["why"]
            == f"its organiser is {founder.peer}"
        )
        for peer in (gone, copied):
            peer.signal("both", signal.SIGKILL)
            peer.process.wait(10)
        shutil.copytree(
            copied.home,
            tmp_path / "copy",
            ignore=lambda _, names: [name for name in names if name.endswith(".sock")],
        )
        for peer in (gone, copied):
            shutil.rmtree(peer.home)
        soon(
            lambda: not (state()["quorum"] or {"held": True})["held"],
            "the founder misses the others",
        )

        told = atoll(
            founder.home, "recertify", run, "--without", gone.peer, "--without", copied.peer[-8:]
        )
        assert told.status == 2  # nobody can be asked, and nobody said yes
        told = atoll(
            founder.home,
            "recertify",
            run,
            "--without",
            gone.peer,
            "--without",
            copied.peer[-8:],
            "--yes",
        )
        assert told.status == 0, told
        assert "two certified histories" in told.err
        before = state()["round"]
        rounds = []
        while len(rounds) < 3:
            swarm.contribute(5000 + 20 * len(rounds), who=[founder])
            outcome = founder.expect("outcome")
            assert outcome["status"] == "committed"
            if outcome["counted"]:
                assert outcome["contributors"] == {founder.peer: 1}
                rounds.append(outcome["round"])
        assert rounds[-1] == before + 3
        assert state()["members"] == [founder.peer]
        assert state()["seal"] is None

        shutil.copytree(tmp_path / "copy", copied.home)
        copied.start()
        copied.expect("ready")  # from its own disk: it has not heard yet
        soon(
            lambda: (state(copied)["trouble"] or {}).get("code") == "E307",
            "the copy is told that it was removed",
        )
        assert state(copied)["phase"] == "failed"
        assert state()["members"] == [founder.peer]
        copied.process.kill()  # its script would try again for ever


def test_a_founder_in_a_new_life_goes_on_with_the_one_who_is_left(tmp_path: Path) -> None:
    """Its home was an old copy, and its node had noted that in the journal before it was killed: it
    is back in a new life, with its state; it alone cannot be let in again: one of three is left.
    The survivor seals the round, and both go on."""
    with Peers(tmp_path, 3, 20_000) as swarm:
        swarm.settle()
        founder, left, gone = swarm.all
        for peer in (founder, gone):
            peer.signal("both", signal.SIGKILL)
            peer.process.wait(10)
        shutil.rmtree(gone.home)
        [meta] = founder.home.rglob("meta.json")
        before = json.loads(meta.read_text())
        meta.write_text(json.dumps({**before, "incarnation": before["incarnation"] + 1}))
        founder.start()
        founder.expect("ready")
        assert json.loads(meta.read_text())["incarnation"] == before["incarnation"] + 1

        def state(peer: Peer) -> dict[str, Any]:
            with NodeClient.connect(find_paths(peer.home)) as client:
                return client.status()["runs"][0]

        began = state(founder)["round"]
        assert began >= 0
        soon(
            lambda: not (state(founder)["quorum"] or {"held": True})["held"],
            "the founder misses the others",
        )
        told = atoll(founder.home, "recertify", "--without", gone.peer, "--yes", "--json")
        assert told.status == 0, told
        assert set(json.loads(told.out)["removed"]) == {founder.peer, gone.peer}
        both = {founder.peer: 1, left.peer: 2}
        soon(lambda: state(founder)["seal"] is None, "the founder has recertified")
        soon(lambda: state(left)["seal"] is None, "the survivor has the founder's entry")
        outcomes: list[dict[str, Any]] = []
        while (
            not outcomes or outcomes[0]["contributors"] != both
        ):  # each may have been left out of one
            swarm.contribute(5000 + 20 * len(outcomes), who=[founder, left])
            outcomes = [peer.expect("outcome") for peer in (founder, left)]
            assert {outcome["status"] for outcome in outcomes} == {"committed"}
        assert outcomes[0]["round"] == outcomes[1]["round"] > began
        assert set(state(left)["members"]) == set(both)
        assert state(left)["seal"] is None
