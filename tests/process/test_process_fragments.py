"""Three real peers and a model in two fragments: rounds of both at once, a kill -9, all nodes back
from disk at a cut, a late joiner, export.

What each fragment's anchor must be is computed here with numpy, bit for bit, from the contributors
that outcomes name.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from process.fragment_peer import LAYOUT, values
from safetensors.numpy import load_file
from seeds import RARE
from swarm_kit import MANIFEST, Peer, Peers

from atoll.collectives.cutting import cut
from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient
from atoll.node.manifest import list_runs
from atoll.node.records.export import export_run

pytestmark = [*RARE]

SCRIPT = Path(__file__).parent / "fragment_peer.py"
NUMELS = [part.numel for part in cut(LAYOUT, 2)]
CUT = (
    MANIFEST.replace('codec = "int8"', 'codec = "fp32"\nfragments = 2')
    .replace("every = 4", "every = 1")
    .replace("sync_every = 1", "sync_every = 2")
)
BOTH = [0, 1]


class Reference:
    """The anchors as they must be."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.anchors = [np.zeros(numel, dtype=np.float32) for numel in NUMELS]
        self.history: list[list[dict[str, int]]] = [[], []]  # the contributors of each round

    @property
    def rounds(self) -> list[int]:
        """Rounds of each fragment."""
        return [len(rounds) for rounds in self.history]

    def play(
        self,
        seed: int,
        fragments: list[int],
        who: list[Peer] | None = None,
        victim: Peer | None = None,
    ) -> bool:
        """All (or some) contribute to these fragments at once, and what they are told is added.
        Whether everybody was counted everywhere.
        """
        who = who or self.peers.all
        for peer in who:
            self.say(peer, seed, fragments)
        return self.take(seed, who, victim)

    def say(self, peer: Peer, seed: int, fragments: list[int]) -> None:
        """Have one contribute."""
        index = self.peers.all.index(peer)
        peer.say(do="contribute", fragments=fragments, seed=seed + index, weight=index + 1)

    def take(self, seed: int, who: list[Peer], victim: Peer | None = None) -> bool:
        """Add the rounds that these are told of. One that nobody names can only be of what a victim
        gave before it died.
        """
        told: list[tuple[str, dict[str, Any]]] = [
            (peer.peer, peer.expect("outcome", 90)["outcomes"]) for peer in who
        ]
        full = True
        for number in sorted(told[0][1]):
            fragment, named = int(number), dict[int, dict[str, int]]()
            for peer, outcome in ((peer, outcomes[number]) for peer, outcomes in told):
                assert outcome["status"] == "committed", outcome
                if outcome["round"] <= len(
                    self.history[fragment]
                ):  # it was away: that round counts what its last life gave, or nothing of it
                    assert not outcome["counted"]
                    assert outcome["contributors"] == self.history[fragment][outcome["round"] - 1]
                    full = False
                else:
                    assert outcome["contributors"] == named.setdefault(
                        outcome["round"], outcome["contributors"]
                    )
                    assert outcome["counted"] == (peer in outcome["contributors"])
            alone = {victim.peer: self.peers.all.index(victim) + 1} if victim else {}
            for round_ in range(len(self.history[fragment]) + 1, max(named, default=0) + 1):
                self._add(fragment, seed, named.get(round_, alone))
            full = (
                full
                and len(named) == 1
                and all(len(contributors) == len(self.peers.all) for contributors in named.values())
            )
        return full

    def _add(self, fragment: int, seed: int, contributors: dict[str, int]) -> None:
        numel, common = NUMELS[fragment], math.gcd(*contributors.values())
        total = np.zeros(numel, dtype=np.float32)
        for index, peer in sorted(enumerate(self.peers.all), key=lambda pair: pair[1].peer):
            if peer.peer in contributors:
                assert contributors[peer.peer] == index + 1
                total += values(seed + index, fragment, numel) * np.float32((index + 1) // common)
        self.anchors[fragment] = self.anchors[fragment] - total / np.float32(
            sum(contributors.values()) // common
        )
        self.history[fragment].append(contributors)

    def check(self) -> None:
        """Everybody holds exactly this."""
        digests = [blake3(anchor.tobytes()).hexdigest() for anchor in self.anchors]
        whole = blake3(np.concatenate(self.anchors).tobytes()).hexdigest()
        for peer in self.peers.all:
            peer.say(do="anchor")
            found = peer.expect("anchor")
            assert (found["rounds"], found["digests"]) == (self.rounds, digests), peer.name
            assert (found["round"], found["digest"]) == (min(self.rounds), whole)

    def all_counted(self, seed: int) -> None:
        """Contribute until one round of each fragment counts everybody."""
        for attempt in range(40):
            if self.play(seed + 1000 * attempt, BOTH):
                return self.check()
        raise AssertionError("no round counted everybody")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Three peers whose anchors start at zero."""
    with Peers(tmp_path_factory.mktemp("fragments"), 3, 0, script=SCRIPT, manifest=CUT) as peers:
        yield Reference(peers)


def test_rounds_of_both_fragments_are_under_way_at_once(reference: Reference) -> None:
    reference.all_counted(10_000_000)
    first, *others = reference.peers.all
    reference.say(first, 100, BOTH)
    assert first.expect("frozen")["undecided"] == 2  # nobody else has given anything
    for peer in others:
        reference.say(peer, 100, BOTH)
    for peer in others:
        peer.expect("frozen")
    reference.take(100, reference.peers.all)
    reference.check()


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1])
def test_a_killed_peer_comes_back_to_both(reference: Reference, after_s: float) -> None:
    seed = int(20_000_000 + 1e8 * after_s)
    *survivors, victim = reference.peers.all
    for peer in reference.peers.all:
        reference.say(peer, seed, BOTH)
    time.sleep(after_s)  # a moment inside the rounds, not a synchronisation
    victim.signal("both", signal.SIGKILL)
    reference.take(seed, survivors, victim)
    reference.play(seed + 10, [1, 0], survivors)
    victim.process.wait(30)
    victim.start()
    victim.expect("ready", 90)
    reference.all_counted(seed + 20)


def test_all_nodes_come_back_from_disk_at_a_cut(reference: Reference) -> None:
    reference.play(31, [1])
    reference.play(32, [1])
    if reference.rounds[0] == reference.rounds[1]:  # the tests before may have lost one of them
        reference.play(33, [1])
    reference.check()
    assert reference.rounds[0] != reference.rounds[1]
    for peer in reference.peers.all:
        peer.signal("both", signal.SIGKILL)
    for peer in reference.peers.all:
        peer.process.wait(30)
        peer.start()
    for peer in reference.peers.all:
        peer.expect("ready", 90)
    reference.check()
    reference.all_counted(40_000_000)


def test_a_late_joiner_gets_both_and_the_model_can_be_taken_away(
    reference: Reference, tmp_path: Path
) -> None:
    peers = reference.peers
    home = peers.all[0].home
    peers.all.append(Peer("p3", home.with_name("p3"), peers.invite, 0, script=SCRIPT))
    peers.all[-1].expect("ready", 90)
    reference.check()
    reference.all_counted(50_000_000)
    with NodeClient.connect(find_paths(home)) as client:
        (run,) = client.status()["runs"]
    assert (run["fragments"], run["round"], run["last_round"]["fragment"] in BOTH) == (
        reference.rounds,
        min(reference.rounds),
        True,
    )
    (signed,) = list_runs(find_paths(home)).values()
    for _ in range(200):  # the checkpoint is written beside the rounds
        export_run(find_paths(home), signed, tmp_path, force=True)
        found = load_file(tmp_path / "partial.safetensors")
        flat = np.concatenate([found[spec.name] for spec in LAYOUT.tensors])
        if np.array_equal(flat, np.concatenate(reference.anchors)):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the exported model is not the anchor")
    assert [
        part["round"] for part in json.loads((tmp_path / "atoll.json").read_text())["fragments"]
    ] == reference.rounds
