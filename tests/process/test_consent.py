"""Before the owner says yes a machine is nobody's member: real nodes on loopback, and a person at a
terminal.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from terminal_kit import ATOLL, Person
from tiny_run import TINY

from atoll.collectives.errors import NotAdmittedError
from atoll.node.composing.preview import at_addresses
from atoll.node.control.protocol import JoinRequest
from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient
from atoll.node.manifest import load_run
from atoll.node.run.invite import make_invite, parse_invite
from atoll.security.identity import Identity
from atoll.security.key_file import load

pytestmark = pytest.mark.slow

RUN = TINY.replace(
    "[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }",
    '[model]\nentry = "local:x"',
)
SCRIPT = """
import sys, torch
from atoll.node import join
from atoll.optim import attach
model = torch.nn.Linear(4, 1)
with join() as swarm:
    attachment = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), swarm, batch_size=1)
    print("attached", swarm.peer, flush=True)
    if "--stay" in sys.argv:
        sys.stdin.read()
"""
LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")


def atoll(home: Path, *argv: str) -> dict[str, Any]:
    environment = {**os.environ, "ATOLL_HOME": str(home), "CI": "1"}
    done = subprocess.run(
        [*ATOLL, *argv, "--json"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Organiser:
    """A node whose run is under way, with its organiser as the only member."""

    def __init__(self, folder: Path, *bootstrap: str) -> None:
        self.home = folder / "organiser"
        options = [part for address in bootstrap for part in ("--bootstrap", address)]
        atoll(self.home, "up", "--background", *LISTEN, *options)
        (folder / "run.toml").write_text(RUN)
        (folder / "train.py").write_text(SCRIPT)
        self.made = atoll(self.home, "new", str(folder / "run.toml"), *options)
        self.run_id: str = self.made["run_id"]
        with NodeClient.connect(find_paths(self.home)) as node:
            signed = load_run(find_paths(self.home), self.run_id)
            node.join(JoinRequest(manifest=signed.encode()))
        self._script = subprocess.Popen(
            [sys.executable, folder / "train.py", "--stay"],
            env={**os.environ, "ATOLL_HOME": str(self.home), "ATOLL_RUN": self.run_id},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._script.stdout is not None
        assert self._script.stdout.readline().startswith("attached ")

    def down(self) -> None:
        self._script.communicate("")
        atoll(self.home, "down", "--now")

    def knows(self) -> dict[str, Any]:
        """What it has heard of others in this run: announcements, members, and files."""
        with NodeClient.connect(find_paths(self.home)) as node:
            status, peers = node.status(), node.peers(self.run_id)
        folder = find_paths(self.home).run_dir(self.run_id)
        return {
            "announced": status["network"]["runs"][self.run_id],
            "members": len(status["runs"][0]["members"]),
            "peers": [row["peer"] for row in peers],
            "files": sorted(path.name for path in folder.iterdir()),
            "lanes": status["network"]["lanes"],
        }


@pytest.fixture
def organiser(tmp_path: Path) -> Iterator[Organiser]:
    made = Organiser(tmp_path)
    try:
        yield made
    finally:
        made.down()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A home whose settings name a bootstrap node, and that node's port."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.setblocking(False)
        home = tmp_path / "new"
        home.mkdir(mode=0o700)
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}/p2p/{Identity.generate().peer}"
        (home / "config.toml").write_text(f'[node]\nbootstrap = ["{address}"]\n')
        yield home, other


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_with_the_question_open_and_after_no_nobody_has_heard_of_this_machine(
    organiser: Organiser, elsewhere: tuple[Path, socket.socket], tmp_path: Path
) -> None:
    home, other = elsewhere
    before = organiser.knows()
    assert (before["announced"], before["members"]) == ([], 1)
    named = {"ATOLL_HOME": str(home), "ATOLL_INVITE": organiser.made["invite"]}
    with Person([*ATOLL, "join", "--script", "train.py"], named, tmp_path) as person:
        person.wait_for("[y/N]")
        assert f"tiny  {organiser.run_id}  by " in person.seen
        assert organiser.knows() == before
        assert files(home) == ["config.toml"]
        person.type("n\n")
        assert person.end() == 1
    assert organiser.knows() == before
    assert files(home) == ["config.toml"]
    with Person([*ATOLL, "join", "--dry-run"], named, tmp_path) as person:
        assert person.end() == 0
        assert f"tiny  {organiser.run_id}  by " in person.seen
    assert organiser.knows() == before
    assert files(home) == ["config.toml"]
    with pytest.raises(BlockingIOError):  # its bootstrap node was not even dialled
        other.accept()
    with Person([*ATOLL, "join", "--script", "train.py"], named, tmp_path) as person:
        person.wait_for("[y/N]")
        person.type("y\n")
        assert person.end() == 0
    assert "identity.key" in files(home)


def test_who_may_look_is_whoever_could_enter(organiser: Organiser) -> None:
    invite = parse_invite(organiser.made["invite"], now_s=time.time())
    before = organiser.knows()
    seen = at_addresses(invite, None)
    assert seen.signed == load_run(find_paths(organiser.home), organiser.run_id)
    mine, other = Identity.generate(), Identity.generate()
    for_me = atoll(organiser.home, "invite", "new", "--for", mine.peer, "--uses", "1")["invite"]
    for _ in range(2):  # a look uses nothing up
        assert at_addresses(parse_invite(for_me, now_s=time.time()), mine).signed == seen.signed
    with pytest.raises(NotAdmittedError, match="only"):
        at_addresses(parse_invite(for_me, now_s=time.time()), other)
    key = load(find_paths(organiser.home).identity_file)
    mine_to_give = make_invite(invite.run_id, invite.bootstrap, other, now_s=time.time())
    refused = at_addresses(mine_to_give, None)  # by who is not its organiser
    assert (refused.signed, refused.refusal and refused.refusal.code) == (None, "E201")
    unknown = make_invite("a" * 26, invite.bootstrap, key, now_s=time.time())
    nobody = at_addresses(unknown, None)
    assert (nobody.signed, nobody.refusal, nobody.answered) == (None, None, True)
    atoll(organiser.home, "invite", "revoke", organiser.made["invite"])
    refused = at_addresses(invite, None)
    assert "revoked" in str(refused.refusal)
    assert organiser.knows() == {**before, "files": organiser.knows()["files"]}


def test_a_founded_run_is_shown_before_its_organiser_joins(tmp_path: Path) -> None:
    """The invite is printed by then, so somebody may follow it."""
    home = tmp_path / "organiser"
    atoll(home, "up", "--background", *LISTEN)
    try:
        (tmp_path / "run.toml").write_text(RUN)
        made = atoll(home, "new", str(tmp_path / "run.toml"))
        invite = parse_invite(made["invite"], now_s=time.time())
        seen = at_addresses(invite, None)
        assert seen.signed == load_run(find_paths(home), made["run_id"])
        key = load(find_paths(home).identity_file)
        unknown = make_invite("a" * 26, invite.bootstrap, key, now_s=time.time())
        assert at_addresses(unknown, None).signed is None
        other = make_invite(invite.run_id, invite.bootstrap, Identity.generate(), now_s=time.time())
        refused = at_addresses(other, None)
        assert (refused.signed, refused.refusal and refused.refusal.code) == (None, "E201")
        atoll(home, "invite", "revoke", made["invite"])
        assert "revoked" in str(at_addresses(invite, None).refusal)
        with NodeClient.connect(find_paths(home)) as node:
            assert node.status()["runs"] == []  # nothing of it was begun
    finally:
        atoll(home, "down", "--now")


def test_strangers_are_asked_only_after_another_question(tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    up = atoll(boot, "up", "--background", *LISTEN)
    try:
        organiser = Organiser(tmp_path, up["addresses"][0])
        try:
            before = organiser.knows()
            home = tmp_path / "new"
            named = {"ATOLL_HOME": str(home), "ATOLL_INVITE": organiser.made["invite"]}
            for answer in ("n", "y"):
                with Person([*ATOLL, "join", "--script", "train.py"], named, tmp_path) as person:
                    person.wait_for("Look for other members? [y/N]")
                    assert "this peer is not in the run" in person.seen
                    person.type(f"{answer}\n")
                    if answer == "y":
                        person.wait_for("Join? [y/N]")
                        assert f"tiny  {organiser.run_id}  by " in person.seen
                        assert organiser.knows() == before
                        person.type("n\n")
                    assert person.end() == 1
                assert organiser.knows() == before
                assert not home.exists()
        finally:
            organiser.down()
    finally:
        atoll(boot, "down", "--now")
