"""Real peers that train on shards of one data set: one is killed, or all are, node and script; five
rounds on every bit is what it would have been."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

from process.resume_peer import BATCH, SIZE
from seeds import RARE
from swarm_kit import MANIFEST, Peer, free_port

from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run.invite import make_invite
from atoll.security.key_file import load_or_create

pytestmark = [*RARE]

H, KILLED_AFTER, STEPS = (
    3,
    2 * 3 + 1,
    8 * 3,
)  # in the middle of the third round; more than five rounds on
RECIPE = MANIFEST.replace("sync_every = 1", f"sync_every = {H}").replace(
    'codec = "int8"', 'codec = "int8"\ndeadline_s = 100.0'
)
SCRIPT = Path(__file__).parent / "resume_peer.py"


class Play:
    """Two peers with the keys and the run of ``origin``, in lockstep: nobody begins a step before
    all have ended the one before.
    """

    def __init__(self, origin: Path, folder: Path, run: str, invite: str, port: int) -> None:
        shutil.copytree(origin, folder)
        self.peers = [Peer("p0", folder / "p0", run, 0, port, SCRIPT)]
        self.peers[0].expect("ready")
        self.peers.append(Peer("p1", folder / "p1", invite, 0, script=SCRIPT))
        self.peers[1].expect("ready")
        self.steps: list[list[dict[str, Any]]] = []

    def together(self) -> None:
        """Wait until they see each other: the others of a round wait for nobody whom they do not."""
        for peer in self.peers:
            members = 0
            while members < len(self.peers):
                peer.say(do="live")
                members = peer.expect("live")["members"]

    def step(self) -> None:
        for peer in self.peers:
            peer.say(do="step")
        self.steps.append([peer.expect("stepped", 150.0) for peer in self.peers])

    def kill(self, peers: list[Peer]) -> None:
        for peer in peers:
            peer.signal("both", signal.SIGKILL)
            peer.process.wait()
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.expect("ready")

    def end(self) -> None:
        for peer in self.peers:
            peer.end()


def facts(play: Play) -> list[list[tuple[int, str, list[int]]]]:
    """Of each step of each peer: round and hash of the anchor it started from, and what it read."""
    return [
        [(each["round"], each["digest"], each["samples"]) for each in step] for step in play.steps
    ]


def test_one_or_all_are_killed_and_every_later_anchor_has_the_same_bits(tmp_path: Path) -> None:
    port, origin = free_port(), tmp_path / "origin"
    for name in ("p0", "p1"):
        paths = find_paths(origin / name)
        paths.ensure()
        load_or_create(paths.identity_file)
    identity = load_or_create(find_paths(origin / "p0").identity_file)
    signed = sign_manifest(parse_manifest(RECIPE), identity)
    save_run(find_paths(origin / "p0"), signed)
    invite = make_invite(
        signed.run_id,
        [f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}"],
        identity,
        now_s=time.time(),
    ).encode()
    found = list[list[list[tuple[int, str, list[int]]]]]()
    for killed in ([], [0], [1], [0, 1]):
        play = Play(origin, tmp_path / f"killed {killed}", signed.run_id, invite, port)
        try:
            for step in range(STEPS):
                if step == KILLED_AFTER and killed:
                    play.kill([play.peers[index] for index in killed])
                if step in (0, KILLED_AFTER):
                    play.together()
                play.step()
        finally:
            play.end()
        found.append(facts(play))
    plain = found[0]
    assert [each[0][0] for each in plain][-1] == STEPS // H
    assert all(one[:2] == other[:2] for one, other in plain)  # the members' anchors are the same
    assert all(each == plain for each in found)
    read = [sample for step in plain for _, _, samples in step for sample in samples]
    assert len(read) == 2 * STEPS * BATCH
    assert sorted(set(read)) == list(range(SIZE))
