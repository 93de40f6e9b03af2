"""A run with BTARD and real nodes: eight peers, two of which lie, are removed and banned with
evidence that anybody can check.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_input_kit import atoll
from swarm_kit import Peer, free_port

from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run.invite import make_invite
from atoll.security.key_file import load_or_create

pytestmark = pytest.mark.slow

SCRIPT, NUMEL, LIARS = Path(__file__).with_name("seeded_peer.py"), 3_000, 2
MANIFEST = """
schema = 1
name = "seeds"
kind = "seeded"
[model]
entry = "local:test"
[train]
sync_every = 1
[train.outer]
optimizer = "sgd"
lr = 1.0
[join]
policy = "allow"
allow = {allow}
[btard]
validators = 2
intervals = 4
"""


@contextmanager
def peers(folder: Path, count: int) -> Generator[list[Peer]]:
    """A run of so many, all in."""
    homes = [folder / f"p{index}" for index in range(count)]
    (homes[-1]).mkdir()
    (homes[-1] / "odd").write_text("aggregate")
    for home in homes:
        find_paths(home).ensure()
    people = [load_or_create(find_paths(home).identity_file) for home in homes]
    signed = sign_manifest(
        parse_manifest(MANIFEST.format(allow=json.dumps([each.peer for each in people]))), people[0]
    )
    save_run(find_paths(homes[0]), signed)
    port = free_port()
    invite = make_invite(
        signed.run_id,
        [f"/ip4/127.0.0.1/tcp/{port}/p2p/{people[0].peer}"],
        people[0],
        now_s=time.time(),
    )
    found = [Peer("p0", homes[0], signed.run_id, NUMEL, port, SCRIPT)]
    try:
        found[0].expect("ready")
        found += [
            Peer(home.name, home, invite.encode(), NUMEL, script=SCRIPT) for home in homes[1:]
        ]
        for peer in found[1:]:
            peer.expect("ready")
        yield found
    finally:
        for peer in found:
            peer.signal("both", signal.SIGKILL)
        for peer in found:
            peer.end()


def test_two_of_eight_lie_and_are_banned_with_evidence(tmp_path: Path) -> None:
    with peers(tmp_path, 8) as all_:
        honest, (vector, aggregate) = all_[:-LIARS], all_[-LIARS:]
        wanted, banned, rounds, away = (
            {vector.peer, aggregate.peer},
            dict[str, str](),
            0,
            list[float](),
        )
        while set(banned) < wanted or rounds < 3:
            for peer in all_:
                peer.say(do="steps", rounds=1, lie=peer is vector)
            told = [peer.expect("outcome") for peer in honest]
            assert len({(each["round"], each["digest"]) for each in told}) == 1  # bit-equal
            rounds += 1
            away.append(told[0]["away"])
            assert rounds < 150, banned
            with NodeClient.connect(find_paths(honest[0].home)) as client:
                banned = client.status()["runs"][0]["banned"]
        banned = {
            ban["peer"]: ban["reason"]
            for ban in json.loads(atoll(honest[0].home, "bans", "--json").out)["bans"]
            if ban["evidence"]
        }
        assert set(banned) == wanted
        assert banned[vector.peer].startswith("its vector is not what follows from its seed")
        assert banned[aggregate.peer].startswith("its aggregate is not that of the vectors")
        assert away[-1] < away[0]
    told = json.loads(
        atoll(honest[-1].home, "audit", honest[0].run, "--json").out
    )  # another member's evidence; nobody is left to ask
    assert told["proven"]
    assert {ban["peer"]: ban["proves"] for ban in told["bans"]} == banned
