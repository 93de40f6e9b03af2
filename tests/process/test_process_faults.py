"""kill -9 and SIGSTOP of one of four real peers in the middle of an all-reduce of 25 million
parameters.

The survivors commit the mean over exactly the contributors they name, bit for bit what the codec
and the fixed order give, equal at all of them; the next round works; the victim comes back.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from blake3 import blake3
from seeds import trials
from swarm_kit import Peer, Peers

from atoll.collectives.outer_rules import OuterSettings
from atoll.optim.outer import OuterStep

pytestmark = pytest.mark.slow

NUMEL = 25_000_000
TRIALS, DAILY = 10, 3  # each of TARGETS at least once
TARGETS = ("node", "script", "both")


class Reference:
    """The anchor as it must be, computed here from the contributors that outcomes name."""

    def __init__(self, swarm: Peers) -> None:
        self.swarm = swarm
        self.anchor = torch.zeros(NUMEL)
        self.step = OuterStep(OuterSettings(kind="sgd", lr=1.0, momentum=0.0))
        self.rounds: dict[int, str] = {}

    def check(self, seed: int, outcomes: list[dict[str, Any]], victim: Peer | None = None) -> None:
        """Outcomes of one trial: committed, honest, agreed and bit-equal.

        A victim that was ready first may have had a round of its own, which none of these outcomes
        names: then that round and the named ones, together, must explain the anchor.
        """
        named: dict[int, dict[str, int]] = {}
        for outcome in outcomes:
            assert outcome["status"] == "committed", outcome
            assert outcome["contributors"] == named.setdefault(
                outcome["round"], outcome["contributors"]
            ), outcomes
        unknown = {r: c for r, c in named.items() if r not in self.rounds}
        histories = [unknown]
        if victim is not None and unknown:
            alone = {victim.peer: self.swarm.all.index(victim) + 1}
            histories += [
                {r: alone, **unknown} for r in range(max(self.rounds, default=0) + 1, min(unknown))
            ]
        for history in histories:
            anchor, rounds = self.after(seed, history)
            if all(o["digest"] == rounds.get(o["anchor_round"], o["digest"]) for o in outcomes):
                self.anchor, self.rounds = anchor, rounds
                return
        raise AssertionError(f"no honest mean: {json.dumps([outcomes, self.rounds], indent=1)}")

    def after(
        self, seed: int, history: dict[int, dict[str, int]]
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Anchor and digests of all rounds after these contributors' means."""
        anchor, rounds, momentum = self.anchor, dict(self.rounds), torch.zeros(NUMEL)
        for round_ in sorted(history):
            target = torch.empty(NUMEL)
            self.step.apply_range(
                anchor, self.swarm.mean(seed, history[round_]), momentum, target, 0, NUMEL
            )
            anchor = target
            rounds[round_] = blake3(memoryview(target.numpy()).cast("B")).hexdigest()
        return anchor, rounds


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """Four peers that know each other; their anchors start at zero."""
    with Peers(tmp_path_factory.mktemp("faults"), 4, NUMEL) as peers:
        yield peers


@pytest.fixture(scope="module")
def reference(swarm: Peers) -> Reference:
    """The reference, brought to where the swarm is."""
    return Reference(swarm)


def round_of_all(swarm: Peers, reference: Reference, seed: int) -> None:
    """Contribute until one round counts everybody, checking each."""
    for attempt in range(30):
        swarm.contribute(seed + 100_000 * attempt)
        outcomes = [peer.expect("outcome") for peer in swarm.all]
        committed = [o for o in outcomes if o["status"] == "committed"]
        reference.check(seed + 100_000 * attempt, committed)
        if len(committed) == len(swarm.all) and all(
            len(o["contributors"]) == len(swarm.all) for o in committed
        ):
            return
    raise AssertionError("no round counted everybody")


def revive(
    victim: Peer, what: str, number: signal.Signals, reference: Reference, seed: int
) -> None:
    """Bring the victim back as a whole peer. What it contributed when it was struck was counted
    honestly, or not at all.
    """
    if number == signal.SIGSTOP:
        victim.signal(what, signal.SIGCONT)
        outcome = victim.expect("outcome")
        reference.check(seed, [outcome] if outcome["counted"] else [])
    elif what == "node":
        outcome = victim.expect("outcome")
        assert outcome["status"] in ("open", "committed"), outcome
    else:
        victim.process.wait(30)
        with contextlib.suppress(queue.Empty):
            while victim.expect_any(0.1)["event"] != "end":
                pass
        victim.start()
        victim.expect("ready")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_survivors_commit_an_honest_mean(
    swarm: Peers, reference: Reference, number: signal.Signals
) -> None:
    round_of_all(swarm, reference, 7_000 * int(number))
    typical = time.monotonic()
    round_of_all(swarm, reference, 7_000 * int(number) + 50)
    typical = time.monotonic() - typical
    for trial in trials(TRIALS, DAILY):
        rng = random.Random(1_000_000 * int(number) + trial)
        seed = 1_000_000 * int(number) + 1_000 * (trial % 1000)
        victim, what = swarm.all[rng.randrange(1, 4)], TARGETS[trial % 3]
        survivors = [peer for peer in swarm.all if peer is not victim]
        swarm.contribute(seed)
        time.sleep(
            rng.uniform(0, 0.6 * typical)
        )  # a moment inside the reduction, not a synchronisation
        victim.signal(what, number)
        reference.check(seed, [peer.expect("outcome") for peer in survivors], victim)
        swarm.contribute(seed + 10, who=survivors)
        reference.check(seed + 10, [peer.expect("outcome") for peer in survivors])
        revive(victim, what, number, reference, seed)
        round_of_all(swarm, reference, seed + 20)


def test_all_nodes_die_at_once_and_the_run_goes_on(swarm: Peers) -> None:
    """The last test here: which round counts what was offered is in the log, not in these outcomes."""
    swarm.contribute(1)
    for peer in swarm.all:
        peer.signal("node", signal.SIGKILL)
    for peer in swarm.all:
        assert peer.expect("outcome")["status"] in ("open", "committed")
    swarm.settle()  # a script contributes again only when it has been told what became of the last
