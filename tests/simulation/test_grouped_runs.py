"""FedCompass in runs of the real session: who makes how many steps, who is in which round, and what
the anchor becomes of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from arriving_kit import Seen
from torch import Tensor, nn

from atoll.collectives.arrivals import ArrivalSettings, Fading, Groups
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.collectives.modes.arrivals.compass import Compass, Decision
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

D, LEAST, LR = 5, 10, 0.02
SPEEDS = (0.1, 0.17, 0.23, 0.41, 0.53)  # seconds a step
N = len(SPEEDS)
B = torch.randn(N, D, generator=torch.Generator().manual_seed(5)) * 3
FADING = Fading(0.8, "polynomial", 0.5)
GROUPS = Groups(LEAST, 5 * LEAST, LEAST)
Round = dict[int, int]
"""Who is in it, each with its inner steps."""


def settings(rounds: int, **more: object) -> RunSettings:
    outer, arrivals = (
        OuterSettings(kind="sgd", lr=1.0, momentum=0.0),
        ArrivalSettings(fading=FADING, groups=GROUPS),
    )
    return RunSettings(
        sync_every=LEAST,
        rounds=rounds,
        codec="fp32",
        outer=outer,
        reducer="sum",
        arrivals=arrivals,
        **more,
    )  # type: ignore[arg-type]


def play(
    swarm: LocalSwarm,
    patience: int = N,
    stall: tuple[int, int, float] = (-1, 0, 0.0),
    speeds: Sequence[float] = SPEEDS,
) -> dict[int, Seen]:
    """Every site trains on (w - b_i)²/2 to the end of the run, from when all are members.
    ``stall``: which one stops at which step for how long.
    """
    seen = dict[int, Seen]()

    def script(member: LocalMember) -> None:
        found, model = (
            seen.setdefault(member.index, Seen()),
            nn.ParameterDict({"w": nn.Parameter(torch.zeros(D))}),
        )
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=LR), 0
        member.open(make_layout([("w", (D,))]), lambda flat: flat.zero_()).release()
        while len(member.members()) < patience:
            member.sleep(0.05)

        def met(outcome: Outcome) -> None:
            found.outcomes.append(outcome)
            found.at.append(steps)

        attachment = attach(
            model, optimizer, member, clock=member.clock, on_round=met, strict=stall[0] >= 0
        )
        while not attachment.done:
            if (member.index, steps) == stall[:2]:
                member.sleep(stall[2])
            optimizer.zero_grad()
            ((model["w"] - B[member.index]) ** 2 / 2).sum().backward()
            optimizer.step()
            steps += 1
        with attachment.evaluate_anchor() as view:
            found.anchor, found.round = model["w"].detach().clone(), view.round
        found.dropped, found.steps = attachment.stats["samples_dropped"], attachment.stats["steps"]
        found.waited_s, found.unsent = (
            attachment.stats["waiting_s"],
            attachment.stats["samples_unsent"],
        )
        found.opened = attachment.stats["open"]

    swarm.run(script, step_s=speeds)
    return seen


def rounds_of(seen: dict[int, Seen]) -> list[Round]:
    """The rounds from the first on; all that saw one must say the same."""
    given = dict[int, Round]()
    for found in seen.values():
        for outcome in filter(lambda each: each.contributors, found.outcomes):
            who = {int(share.peer[1:]): share.samples for share in outcome.contributors}
            assert given.setdefault(outcome.round, who) == who
    assert sorted(given) == list(range(1, len(given) + 1))
    return [given[round_] for round_ in sorted(given)]


def simulated(rounds: int) -> list[Round]:
    """Those that the scheduler makes when arrivals drive it, as in `atoll simulate`."""
    compass = Compass[int](GROUPS.least, GROUPS.most, GROUPS.slack, first=GROUPS.first)
    due, made = list[tuple[float, PeerId, int]](), list[Round]()

    def do(decisions: list[Decision[int]], now: float) -> None:
        for decision in decisions:
            made.extend(
                [{int(part.peer[1:]): part.work for part in decision.parts}]
                if decision.parts
                else []
            )
            for peer, steps in decision.orders:
                heapq.heappush(due, (now + steps * SPEEDS[int(peer[1:])], peer, steps))

    for site in range(N):
        do(compass.join(PeerId(f"p{site}"), 0.0), 0.0)
    while len(made) < rounds:
        now, peer, steps = heapq.heappop(due)
        if compass.due is not None and compass.due < now:
            do(compass.tick(now), now)
        do(compass.arrived(peer, steps, now), now)
    return made


def after(anchor: Tensor, site: int, steps: int) -> Tensor:
    """The parameters."""
    live = anchor.clone()
    for _ in range(steps):
        live -= LR * (live - B[site])
    return live


Odd = Mapping[tuple[int, int], Callable[[list[Tensor]], Tensor]]
"""Contributions that are no plain turn, by round and site: parameters, as if the turn had ended
with them, from the anchors before.
"""


def by_hand(rounds: Sequence[Round], members: int, odd: Odd | None = None) -> Tensor:
    """The last anchor: each is x - sum of alpha s(u) / N (x_u - y), y the parameters of a turn that
    began at x_u, u rounds ago.
    """
    anchors, bases = [torch.zeros(D)], dict.fromkeys(range(members), 0)
    for number, who in enumerate(rounds, 1):
        total = torch.zeros(D)
        for site, steps in who.items():
            base, stale = anchors[bases[site]], number - 1 - bases[site]
            came = (
                odd[number, site](anchors)
                if odd and (number, site) in odd
                else after(base, site, steps)
            )
            total += 0.8 * (1 + stale) ** -0.5 / members * (base - came)
            bases[site] = number
        anchors.append(anchors[-1] - total)
    return anchors[-1]


def groups_of(rounds: Sequence[Round]) -> list[set[int]]:
    return [set(each) for each in rounds]


@pytest.mark.parametrize("coordinator", [False, True])
def test_groups_arrive_together_as_in_the_simulation_and_count_as_computed_by_hand(
    coordinator: bool,
) -> None:
    seen = play(LocalSwarm(N, settings=settings(12, coordinator=coordinator), latency_s=0.005))
    rounds, same = rounds_of(seen), simulated(12)
    assert groups_of(rounds) == groups_of(same)
    assert rounds[:5] == [
        {site: LEAST} for site in range(N)
    ]  # the first turns, by which speeds are measured
    assert rounds[5:7] == same[5:7] == [{0: 50, 1: 25, 2: 16}, {0: 50}]
    assert all(
        abs(mine[site] - there[site]) <= 2
        for mine, there in zip(rounds, same, strict=True)
        for site in mine
    )  # deciding takes time, too
    assert torch.allclose(seen[0].anchor, by_hand(rounds, N), atol=1e-5)
    for found in seen.values():
        assert found.round == 12
        assert torch.equal(found.anchor, seen[0].anchor)
        assert all(outcome.counted for outcome in found.outcomes[:-1])
        assert found.waited_s < 0.1 * 23


def test_who_is_late_trains_on_and_two_late_contributions_are_one_sum() -> None:
    """Site 1 stops in its second turn, of 13 steps. Its group is made without it when it has been
    waited for (3). What it offers then is too late for round 4, too, by which it has made one step
    more from anchor 3, and both are in round 5. It goes on from there, with what it made from
    anchor 4."""
    speeds = (0.1, 0.23)
    seen = play(
        LocalSwarm(2, settings=settings(6), latency_s=0.1), 2, stall=(1, 15, 8.0), speeds=speeds
    )
    rounds, late = rounds_of(seen), seen[1]
    assert rounds == [{0: 10}, {1: 10}, {0: 50}, {0: 50}, {0: 50, 1: 14}, {0: 50, 1: 43}]
    told = [(outcome.round, outcome.status, outcome.counted) for outcome in late.outcomes]
    assert told[1:] == [
        (4, "open", False),
        (4, "committed", False),
        (5, "open", False),
        (5, "committed", True),
        (6, "committed", True),
    ]
    assert late.opened == 0  # to go on is no deadline that was missed
    assert late.at[2] - late.at[1] == 1
    since = late.at[4] - late.at[3]
    assert since > 0
    odd: Odd = {
        (5, 1): lambda anchors: after(anchors[2], 1, 13) + after(anchors[3], 1, 1) - anchors[3],
        (6, 1): lambda anchors: after(
            anchors[5] + after(anchors[4], 1, since) - anchors[4], 1, 43 - since
        ),
    }
    assert torch.allclose(seen[0].anchor, by_hand(rounds, 2, odd), atol=1e-5)
    assert torch.equal(seen[0].anchor, late.anchor)
    assert sum(each.get(1, 0) for each in rounds) == late.steps  # nothing was lost


@pytest.mark.parametrize("when_s", [9.7, 12.0])
def test_a_coordinator_that_is_killed_costs_no_contribution(when_s: float) -> None:
    """Node and script of the organiser's, which is also the fastest; it comes back, and into the
    others' group.
    """
    swarm = LocalSwarm(N, settings=settings(14, coordinator=True), latency_s=0.005).crash_at(
        0, when_s, back_after_s=6.0
    )
    seen = play(swarm, patience=4)
    rounds = rounds_of(seen)
    assert len(rounds) == 14
    assert {found.round for found in seen.values()} == {14}
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())
    for site in range(1, N):  # what is in no round was trained when the run ended
        assert all(outcome.counted for outcome in seen[site].outcomes if outcome.round < 14)
        assert (
            sum(each.get(site, 0) for each in rounds) + seen[site].dropped + seen[site].unsent
            == seen[site].steps
        )
    away = [number for number, who in enumerate(rounds[5:], 6) if 0 not in who]
    assert away
    assert any(len(who) >= 4 and 0 in who for who in rounds[9:])
