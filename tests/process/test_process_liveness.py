"""The law of liveness (docs/internals/protocol.md) with real processes: members that live go on,
although others died for good with what they knew, or came back from a backup.

`tests/simulation/test_liveness.py` plays the same with other numbers of rounds, and with loss.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from bad_input_kit import soon
from seeds import RARE
from swarm_kit import Peer, Peers

from atoll.collectives.round.timing import Timing
from atoll.node.home.paths import bytes_in, find_paths
from atoll.node.joining import NodeClient

pytestmark = [*RARE]

PATIENCE_S = 180.0  # a bound for hangs, not a measurement
NUMEL = 1000
KEPT_RESULTS = Timing().keep_rounds
OLD = 15  # rounds that a backup is behind


def state(peer: Peer) -> dict[str, Any]:
    """A node's view of the run."""
    with NodeClient.connect(find_paths(peer.home)) as client:
        return client.status()["runs"][0]


def kill(*peers: Peer) -> None:
    """kill -9 of script and node, so that neither says a last word."""
    for peer in peers:
        peer.signal("both", signal.SIGKILL)
        peer.process.wait(10)


def played(swarm: Peers, who: list[Peer], rounds: int) -> int:
    """Contribute until so many more rounds counted exactly these, with equal digests at all of
    them; the number of the last. None of the rounds between may be told otherwise at one of them
    than at another.
    """
    expected = {peer.peer: swarm.all.index(peer) + 1 for peer in who}
    counted: list[int] = []
    until = time.monotonic() + PATIENCE_S
    while len(counted) < rounds:
        assert time.monotonic() < until, (counted, {p.name: state(p)["waiting"] for p in who})
        swarm.contribute(20 * len(counted), who=who)
        outcomes = [peer.expect("outcome", PATIENCE_S) for peer in who]
        told = [o for o in outcomes if o["status"] == "committed"]
        for one in told:
            same = [o for o in told if o["round"] == one["round"]]
            assert all(o["contributors"] == one["contributors"] for o in same), outcomes
        if len(told) == len(who) and all(o["contributors"] == expected for o in told):
            if len({o["anchor_round"] for o in told}) == 1:
                assert len({o["digest"] for o in told}) == 1, outcomes
            assert len({o["round"] for o in told}) == 1, outcomes
            counted.append(told[0]["round"])
    assert counted == sorted(set(counted))
    return counted[-1]


def incarnation(peer: Peer) -> int:
    """Which life of a member its journal is of."""
    [meta] = peer.home.rglob("meta.json")
    return json.loads(meta.read_text())["incarnation"]


def copied(peer: Peer, to: Path) -> Path:
    """A copy of a home as kill -9 at this moment would leave it."""
    peer.signal("both", signal.SIGSTOP)
    try:
        return shutil.copytree(peer.home, to, ignore=shutil.ignore_patterns("*.sock"))
    finally:
        peer.signal("both", signal.SIGCONT)


def restore(peer: Peer, backup: Path) -> None:
    """kill -9, the copy in place of the home, start."""
    kill(peer)
    shutil.rmtree(peer.home)
    shutil.copytree(backup, peer.home)
    peer.start()
    peer.expect("ready", PATIENCE_S)


def test_who_holds_the_newest_state_alone_and_one_that_lags_go_on(tmp_path: Path) -> None:
    """The founder of four is killed for good, which leaves a configuration of A, B and C. C is off
    for more rounds than results are kept, then A is killed for good, and C returns: the newest
    state is B's alone, no later entry certifies it, and the next entry needs C.
    """
    with Peers(tmp_path, 4, NUMEL, ready_s=PATIENCE_S) as swarm:
        founder, a, b, c = swarm.all
        swarm.settle()
        kill(founder)
        while founder.peer in state(b)["members"]:
            played(swarm, [a, b, c], 1)
        kill(c)
        behind = state(b)["round"]
        lives = [incarnation(b), incarnation(c)]
        newest = played(swarm, [a, b], 2 * KEPT_RESULTS + 1)
        assert newest > behind + 2 * KEPT_RESULTS
        kill(a)
        assert set(state(b)["members"]) == {a.peer, b.peer, c.peer}
        shutil.rmtree(founder.home)
        shutil.rmtree(a.home)
        c.start()
        c.expect("ready", PATIENCE_S)
        assert played(swarm, [b, c], 3) >= newest + 3
        assert [incarnation(b), incarnation(c)] == lives


def test_the_organiser_of_two_back_from_a_backup_goes_on(tmp_path: Path) -> None:
    """It is a quorum alone, and the other has told it what it forgot: it is a member in a new life,
    and nobody recertified.
    """
    with Peers(tmp_path, 2, NUMEL, ready_s=PATIENCE_S) as swarm:
        organiser, other = swarm.all
        swarm.settle()
        backup = copied(organiser, tmp_path / "backup")
        newest = played(swarm, swarm.all, OLD)
        lives = incarnation(organiser), incarnation(other)
        restore(organiser, backup)
        assert played(swarm, swarm.all, 3) >= newest + 3
        disk = find_paths(organiser.home).run_dir(organiser.run)
        assert 0 < state(organiser)["disk_bytes"] <= 2 * bytes_in(disk)
        assert (incarnation(organiser) > lives[0], incarnation(other)) == (True, lives[1])


def test_one_of_three_back_from_a_backup_goes_on_and_two_wait_for_the_third_and_say_so(
    tmp_path: Path,
) -> None:
    """While the third is away, it may have decided with the life that was lost what neither of the
    two knows. They say whom they wait for, and go on when it is back.
    """
    with Peers(tmp_path, 3, NUMEL, ready_s=PATIENCE_S) as swarm:
        organiser, peer, other = swarm.all
        swarm.settle()
        backup = copied(peer, tmp_path / "backup")
        newest = played(swarm, swarm.all, OLD)
        restore(peer, backup)
        newest, before = played(swarm, swarm.all, OLD), newest
        assert newest >= before + OLD

        kill(organiser)
        lives = [incarnation(one) for one in swarm.all]
        restore(peer, backup)
        for one in (peer, other):
            waiting = soon(
                lambda one=one: (w := state(one)["waiting"])["state"] == "no quorum" and w,
                f"{one.name} says that it waits for the third",
            )
            assert organiser.peer in waiting["of"], waiting
        assert state(other)["round"] == newest
        organiser.start()
        organiser.expect("ready", PATIENCE_S)
        assert played(swarm, swarm.all, 3) >= newest + 3
        renewed = [one for one, was in zip(swarm.all, lives, strict=True) if incarnation(one) > was]
        assert renewed == [peer]


def test_a_contribution_that_died_with_its_node_is_told_as_lost_and_of_no_round(
    tmp_path: Path,
) -> None:
    """The others' nodes are frozen while one hands over its contribution and its node dies, so
    nobody else has a byte of it. They go on without it; its script hears that it is lost, and not
    that it was committed in a round that others know to be of others.
    """
    with Peers(tmp_path, 4, NUMEL, ready_s=PATIENCE_S) as swarm:
        *others, loser = swarm.all
        swarm.settle()
        newest = played(swarm, swarm.all, 1)
        for peer in others:
            peer.signal("node", signal.SIGSTOP)
        swarm.contribute(7, wait_s=PATIENCE_S, who=[loser])
        loser.signal("node", signal.SIGKILL)
        told = loser.expect("outcome", PATIENCE_S)
        assert (told["status"], told["contributors"]) == ("open", {}), told
        for peer in others:
            peer.signal("node", signal.SIGCONT)

        loser.say(do="fate", wait_s=PATIENCE_S)
        without = played(swarm, others, 1)
        fate = loser.expect("fate", PATIENCE_S)
        assert without > newest
        assert fate == {
            "event": "fate",
            "status": "lost",
            "round": 0,
            "counted": False,
            "contributors": {},
            "reason": "it was lost with the node",
        }
        assert played(swarm, swarm.all, 2) > without
