"""Runs of sites that may spend no more of their privacy come to an end, with the reason, and their
scripts as well.
"""

from __future__ import annotations

import torch
from torch import nn

from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round_settings import WorkSettings
from atoll.collectives.swarm import PrivacySettings, RunSettings, SecureSettings, SiteSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.security.privacy.budget import most_rounds

TERMS = PrivacySettings(noise=3.0, clip=1.0, delta=1e-5, stop_at_epsilon=4.0)
ALLOWED = most_rounds(TERMS)


def settings(rounds: int) -> RunSettings:
    return RunSettings(
        sync_every=None,
        rounds=rounds,
        codec="bits",
        reducer="copy",
        outer=OuterSettings(kind="sgd", lr=1.0),
        secure=SecureSettings(),
        privacy=TERMS,
        site=SiteSettings(work=WorkSettings(steps=3, weights="equal")),
    )


def play(swarm: LocalSwarm, over: dict[int, str] | None = None) -> dict[int, tuple[int, int, str]]:
    """By site: rounds in its model, inner steps, why nothing more is contributed. ``over``: why its
    node says that the run is finished before its last round.
    """
    seen = dict[int, tuple[int, int, str]]()
    over = {} if over is None else over

    def script(member: LocalMember) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = attach(model, optimizer, member, clock=member.clock)
        steps = 0
        while not attachment.done:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            steps += 1
            assert steps < 3 * (ALLOWED + 5), "it trains for ever"
        seen[member.index] = (attachment.round, steps, attachment._over)
        member.sleep(20.0)  # its node goes on a little, as one does that leaves in order
        over[member.index] = member._node().session.over

    swarm.run(script, step_s=0.5, limit_s=10_000)
    return seen


def said_in_the_log(swarm: LocalSwarm) -> list[PeerId]:
    """Which sites have said of themselves, as an entry decided, that they may spend no more."""
    entries = swarm.peers[0].storages[0].journal().entries
    return [word.peer for certified in entries for word in certified.entry.spent]


def test_a_run_whose_sites_may_spend_no_more_is_finished() -> None:
    """All its rounds but one, as where a contribution was lost to a kill."""
    swarm = LocalSwarm(3, settings=settings(ALLOWED + 1))
    for round_, steps, why in play(swarm).values():
        assert round_ == ALLOWED
        assert steps == 3 * ALLOWED  # and trains no further
        assert "one more round would pass 4" in why
    assert len(said_in_the_log(swarm)) in (1, 2, 3)  # one is enough: two cannot hide in a sum


def test_a_run_that_uses_up_its_budget_with_the_last_round_has_all_its_rounds() -> None:
    over = dict[int, str]()
    seen = play(LocalSwarm(3, settings=settings(ALLOWED)), over)
    assert {round_ for round_, _, _ in seen.values()} == {ALLOWED}
    assert over == {0: "", 1: "", 2: ""}


def test_who_is_left_below_the_threshold_is_told_that_the_run_is_over() -> None:
    """One of three has spent all but two already, in an earlier life: a sum needs all three."""
    swarm = LocalSwarm(3, settings=settings(ALLOWED + 1))
    for _ in range(ALLOWED - 2):
        swarm.peers[1].storages[0].spent.spend_noisy(-1)
    seen = play(swarm)
    assert {round_ for round_, _, _ in seen.values()} == {2}
    assert "this site has spent epsilon" in seen[1][2]
    for site in (0, 2):
        assert "1 of 3 sites have spent the epsilon that they may" in seen[site][2]
        assert seen[site][1] == 9  # of a round more, which was refused
    assert said_in_the_log(swarm) == [swarm.peers[1].name]
