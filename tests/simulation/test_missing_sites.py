"""A site that is away is named soon, with what the round needs; the round goes on without it, or
says that it cannot.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from atoll.collectives.errors import SwarmClosedError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round_settings import WorkSettings
from atoll.collectives.swarm import RunSettings, SecureSettings, SiteSettings
from atoll.node.local import LocalSwarm
from atoll.node.session import events as ev
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

KILLED_AT, SOON_S = 30.0, 15.0


def settings(*, masked: bool, rounds: int = 3) -> RunSettings:
    return RunSettings(
        sync_every=None,
        rounds=rounds,
        codec="bits" if masked else "fp32",
        reducer="copy" if masked else "mean",
        secure=SecureSettings() if masked else None,
        site=SiteSettings(work=WorkSettings(steps=20, weights="equal")),
    )


def play(
    count: int, run: RunSettings, limit_s: float, step_s: float = 1.0
) -> tuple[list[tuple[float, PeerId, ev.Waiting]], dict[int, int]]:
    """The last site's node is killed for good. What the others' nodes say they wait for, with
    seconds since the kill; rounds in the model of those who came to the end."""
    swarm, told, ended = LocalSwarm(count, settings=run), [], dict[int, int]()
    swarm.crash_at(count - 1, KILLED_AT)

    def heard(peer: PeerId, event: object) -> None:
        if isinstance(event, ev.StillWaiting) and swarm.world.now > KILLED_AT:
            told.append((swarm.world.now - KILLED_AT, peer, event.waiting))

    def script(member: LocalMember) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = attach(model, optimizer, member, clock=member.clock)
        while not attachment.done:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        ended[member.index] = attachment.round

    swarm.listener = heard
    with suppress(SwarmClosedError):  # it does not end
        swarm.run(script, step_s=step_s, limit_s=limit_s)
    return told, ended


@pytest.mark.parametrize("masked", [False, True])
def test_a_killed_site_is_named_and_the_round_goes_on(masked: bool) -> None:
    told, ended = play(4, settings(masked=masked), 300.0)
    gone = sorted(ended) == [0, 1, 2] and set(ended.values()) == {3}
    assert gone, ended
    soon = [(peer, waiting) for at, peer, waiting in told if at <= SOON_S and waiting.of]
    victims = {waiting.of for _, waiting in soon if "is not heard" in waiting.what}
    assert len(victims) == 1  # all name the same one, and it alone
    assert all("goes on without" in w.ends for _, w in soon if "is not heard" in w.what)


def test_one_of_three_in_masked_rounds_is_named_with_what_a_sum_needs() -> None:
    told, ended = play(3, settings(masked=True), 120.0)
    assert ended == {}
    soon = [waiting for at, _, waiting in told if at <= SOON_S and "is not heard" in waiting.what]
    assert len({waiting.of for waiting in soon}) == 1
    assert soon
    assert all("a sum needs 3 of 3 sites" in waiting.ends for waiting in soon)
