"""Disks that lost more than they had confirmed, at all members: the page's way back, as written."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from bad_input_kit import Member, atoll, ended, new_run, one_round, soon

from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

pytestmark = pytest.mark.slow
BACK = "atoll new --from DIR --name NAME"


def state(home: Path) -> dict[str, Any]:
    """The run's part of a node's status."""
    with NodeClient.connect(find_paths(home)) as client:
        found: dict[str, Any] = client.status()["runs"][0]
        return found


def test_where_nobody_has_results_the_page_leads_on_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    """Power goes at all while a result is younger than each checkpoint, and the disks drop it; one
    member's checkpoint is older than the others'.
    """
    run = new_run(tmp_path, every=3)
    members = [run.organiser(), run.member("b"), run.member("c")]
    homes = [member.home for member in members]
    folders = [member.paths.state_dirs(run.signed.run_id, 1)[0] for member in members]
    with ended():
        for _ in range(2):
            one_round(*members)
        os.kill(members[2].pid, signal.SIGKILL)
        members[2].swarm.close()
        while one_round(*members[:2])[0].round % 3 != 2:
            pass
        for member in members[:2]:
            os.kill(member.pid, signal.SIGKILL)
            member.swarm.close()
    for folder in folders:
        shutil.rmtree(folder / "results")
    try:
        for home in homes:
            assert atoll(home, "up", "--background").status == 0
        for home in homes:
            soon(
                lambda home=home: (
                    state(home)["waiting"]["state"] == "lacking state"
                    and "every member" in state(home)["waiting"]["what"]
                ),
                "it says that nobody has a state",
            )
            (trouble,) = (each for each in state(home)["troubles"] if each["code"] == "E303")
            assert BACK in trouble["hint"], trouble
        assert BACK in atoll(homes[0], "explain", "E303").out
        rounds = dict[Path, int]()
        for index, home in enumerate(homes):
            told = atoll(home, "export", "bad", str(tmp_path / f"export{index}"), "--json")
            assert told.status == 0, told
            rounds[home] = json.loads(told.out)["round"]
        newest = max(homes, key=lambda home: rounds[home])
        assert rounds[newest] > rounds[homes[2]]
        exported = tmp_path / f"export{homes.index(newest)}"
        told = atoll(newest, "new", "--from", str(exported), "--name", "onward")
        assert told.status == 0, told
        assert atoll(newest, "down").status == 0
        onward = Member(newest, "onward")
        with ended(onward):
            one_round(onward)
    finally:
        for home in homes:
            atoll(home, "down")
