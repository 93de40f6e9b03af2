"""LocalSwarm: ordinary training scripts, n of them, in virtual time: same seed, same bits; killed,
frozen, late and parted peers.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from atoll.collectives.codecs.mixtures import mixture_of
from atoll.collectives.errors import LocalProtocolError, ModelMismatchError, SwarmClosedError
from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import Timing
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

LAYOUT = make_layout([("w", (5, 40))])
SETTINGS = RunSettings(
    sync_every=4, rounds=6, codec="fp32", outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
)
ENDLESS = msgspec.structs.replace(SETTINGS, rounds=None)


def train(swarm: LocalMember) -> dict[str, Any]:
    """A plain torch loop: every peer has other data of one linear problem."""
    torch.manual_seed(7)  # the same initial model and the same problem everywhere
    model, truth = nn.Linear(6, 2), torch.randn(6, 2)
    torch.manual_seed(100 + swarm.index)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attachment = attach(model, optimizer, swarm, clock=swarm.clock)
    losses: list[float] = []
    while not attachment.done and len(losses) < 400:
        x = torch.randn(8, 6)
        loss = nn.functional.mse_loss(model(x), x @ truth)
        optimizer.zero_grad()
        loss.backward()
        attachment.samples(8)
        optimizer.step()
        losses.append(loss.item())
    view = swarm.anchor()
    anchor = torch.zeros(view.numel)
    view.copy_into(anchor)
    return {
        "losses": losses,
        "round": view.round,
        "anchor": anchor,
        "contributors": attachment.describe()["last_contributors"],
        "now": swarm.clock(),
    }


def test_a_swarm_trains_a_model_and_all_end_with_the_same_anchor() -> None:
    swarm = LocalSwarm(3, settings=SETTINGS, latency_s=0.02)
    results = swarm.run(train, step_s=0.25)
    assert all(result["round"] == 6 for result in results)
    assert all(torch.equal(result["anchor"], results[0]["anchor"]) for result in results)
    assert any(len(result["contributors"]) == 3 for result in results)
    assert min(sum(result["losses"][-4:]) / 4 for result in results) < 0.7 * results[0]["losses"][0]
    assert swarm.now >= 6 * 4 * 0.25  # every round is one of steps


@pytest.mark.parametrize("kind", ["adam", "co2", "delayed_nesterov", "heloco", "nesterov"])
def test_an_outer_optimizer_with_more_state_reaches_those_who_come_late_or_back(kind: str) -> None:
    """Two vectors, numbers a tensor, or steps of a warm-up: the state is transferred, hashed and
    restored whole.
    """
    warmup = 7 if kind == "nesterov" else 0
    outer = OuterSettings(kind, 0.05, 0.5, governor=True, warmup=warmup)  # type: ignore[arg-type]
    settings = msgspec.structs.replace(SETTINGS, outer=outer, rounds=8)
    swarm = LocalSwarm(3, settings=settings).join_at(2, 4.0).crash_at(1, 6.0, back_after_s=0.5)
    results = swarm.run(train, step_s=0.25)
    assert [result["round"] for result in results] == [8, 8, 8]
    assert all(torch.equal(result["anchor"], results[0]["anchor"]) for result in results)
    assert sum(len(result["contributors"]) == 3 for result in results) >= 1


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_play() -> None:
    settings = RunSettings(sync_every=3, rounds=5, codec="int8", exact=False)

    def play(seed: int) -> tuple[list[Any], float, str]:
        swarm = LocalSwarm(4, settings=settings, seed=seed, latency_s=0.01, jitter_s=0.05).crash_at(
            2, 3.0, back_after_s=1.0
        )
        swarm.network.tap = lambda sender, receiver, channel, payload: swarm.world.note(
            f"{sender}>{receiver} {channel}".encode()
        )
        results = swarm.run(train, step_s=(0.1, 0.2, 0.3, 0.4))
        return (
            [(r["losses"], r["anchor"].tolist(), r["contributors"]) for r in results if r],
            swarm.now,
            swarm.world.trace(),
        )

    one, two, other = play(1), play(1), play(3)
    assert one == two
    assert other[2] != one[2]  # they may last as long: scripts end with a step


def steps(swarm: LocalMember, rounds: int = 6) -> list[Outcome]:
    """Contribute ones until the run is at ``rounds``, with one second of work each."""
    view = swarm.open(LAYOUT, lambda flat: flat.fill_(0.0).zero_())
    outcomes: list[Outcome] = []
    while view.round < rounds:
        swarm.sleep(1.0)
        pending = swarm.contribute(
            samples=10, write=lambda flat: flat.fill_(float(swarm.index + 1)).add_(0.0)
        )
        outcomes.append(pending.wait())
        view = swarm.anchor()
    return outcomes


def test_outcomes_name_who_was_counted_and_the_anchor_is_their_mean() -> None:
    anchors: dict[int, torch.Tensor] = {}

    def script(swarm: LocalMember) -> list[Outcome]:
        outcomes = steps(swarm, 5)
        view = swarm.anchor()
        anchors[swarm.index] = torch.zeros(view.numel)
        view.copy_into(anchors[swarm.index])
        return outcomes

    results = LocalSwarm(3, settings=ENDLESS).run(script)
    by_round = {outcome.round: outcome for outcomes in results for outcome in outcomes}
    expected = torch.zeros(LAYOUT.numel)
    for round_ in sorted(by_round):
        shares = by_round[round_].contributors
        values = [float(int(share.peer[1:]) + 1) for share in shares]
        expected -= torch.full_like(expected, sum(values) / len(values))
    assert sorted(by_round) == [1, 2, 3, 4, 5]  # an entry that only lets members in is no round
    assert torch.allclose(anchors[0], expected)
    assert all(torch.equal(anchors[0], anchor) for anchor in anchors.values())
    counted = [
        (outcome.round, share.peer)
        for outcome in by_round.values()
        for share in outcome.contributors
    ]
    mine = [
        (outcome.round, f"p{index}")
        for index, outcomes in enumerate(results)
        for outcome in outcomes
        if outcome.counted
    ]
    assert sorted(mine) == sorted(counted)


def test_a_killed_peer_is_left_out_and_the_others_go_on() -> None:
    swarm = LocalSwarm(4, settings=ENDLESS).crash_at(3, 8.3)
    results = swarm.run(lambda s: steps(s, 15))
    assert results[3] is None
    last = results[0][-1]
    assert {share.peer for share in last.contributors} == {"p0", "p1", "p2"}
    assert any("p3" in outcome.lost for outcome in results[0])


def test_a_peer_that_comes_back_contributes_again() -> None:
    swarm = LocalSwarm(3, settings=ENDLESS).crash_at(2, 6.0, back_after_s=4.0)
    results = swarm.run(lambda s: steps(s, 20))
    assert results[2] is not None
    assert results[2][-1].counted


def test_a_late_peer_joins_and_a_frozen_one_catches_up() -> None:
    swarm = LocalSwarm(3, settings=ENDLESS).join_at(2, 12.0).freeze_at(1, 5.0, 6.0)
    results = swarm.run(lambda s: steps(s, 25))
    assert results[2][0].round > 8
    assert {share.peer for share in results[0][-1].contributors} == {"p0", "p1", "p2"}


def test_a_minority_waits_and_says_open_until_the_network_heals() -> None:
    waits: list[Outcome] = []

    def script(swarm: LocalMember) -> int:
        swarm.open(LAYOUT, lambda flat: None)
        while swarm.clock() < 60.0:
            swarm.sleep(1.0)
            pending = swarm.contribute(samples=1, write=lambda flat: None)
            outcome = pending.wait(timeout_s=5.0)
            while outcome.status == "open":
                if swarm.index == 4:
                    waits.append(outcome)
                outcome = pending.wait(timeout_s=5.0)
        return outcome.round

    swarm = LocalSwarm(5, settings=ENDLESS).partition_at([[0, 1, 2, 3], [4]], 20.0, 15.0)
    rounds = swarm.run(script)
    assert waits
    assert waits[0].reason
    assert max(rounds) - min(rounds) <= 3
    assert min(rounds) > 20


def test_a_script_without_a_quorum_is_told_once_and_once_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = msgspec.structs.replace(SETTINGS, rounds=30, deadline_s=2.0)
    swarm = (
        LocalSwarm(3, settings=settings)
        .crash_at(1, 12.0, back_after_s=25.0)
        .crash_at(2, 12.0, back_after_s=25.0)
    )
    with caplog.at_level("WARNING", "atoll"):
        results = swarm.run(train, step_s=0.25)
    assert [
        record.getMessage() for record in caplog.records if "quorum" in record.getMessage()
    ] == [
        "no quorum: 1 of 3 members reachable; the open round waits for 2; training goes on here and is contributed later",
        "quorum is back: 3 of 3 members reachable",
    ]
    assert [result["round"] for result in results] == [30, 30, 30]


def test_a_script_that_cannot_be_decided_waits_for_the_floor_and_not_for_its_deadline() -> None:
    settings = msgspec.structs.replace(SETTINGS, rounds=30, deadline_s=60.0)
    swarm = (
        LocalSwarm(3, settings=settings)
        .crash_at(1, 12.0, back_after_s=50.0)
        .crash_at(2, 12.0, back_after_s=50.0)
    )
    alone, *others = swarm.run(train, step_s=0.25)
    assert [result["round"] for result in (alone, *others)] == [30, 30, 30]
    steps_s = 0.25 * len(alone["losses"])
    assert (
        steps_s > 12.0 + 50.0 - 5.0 - 2.0
    )  # it trained through all of the gap but one floor (and short rounds before and after)


def test_all_reduce_gives_the_same_mean_to_all_who_call() -> None:
    def script(swarm: LocalMember) -> tuple[Outcome, torch.Tensor]:
        steps(swarm, 8)
        flat = torch.arange(10.0) * (swarm.index + 1)
        return swarm.all_reduce(flat, weight=1, op_id="sum", deadline_s=30.0).wait(), flat

    results = LocalSwarm(3, settings=ENDLESS).run(script)
    done = [(outcome, flat) for outcome, flat in results if outcome.status == "committed"]
    assert len(done) >= 2
    names = [share.peer for share in done[0][0].contributors]
    expected = torch.arange(10.0) * (sum(int(name[1:]) + 1 for name in names) / len(names))
    assert all(torch.allclose(flat, expected) and torch.equal(flat, done[0][1]) for _, flat in done)


def test_an_operation_nobody_else_calls_ends_open_at_its_deadline_and_leaves_the_tensor() -> None:
    def script(swarm: LocalMember) -> str:
        steps(swarm, 6)
        if swarm.index:
            swarm.sleep(20.0)
            return ""
        flat = torch.ones(4)
        before = swarm.clock()
        swarm._place.network.partition({"p0": 0, "p1": 1, "p2": 1})  # type: ignore[dict-item]
        outcome = swarm.all_reduce(flat, weight=1, op_id="alone", deadline_s=3.0).wait()
        swarm._place.network.partition(None)
        assert torch.equal(flat, torch.ones(4))
        assert swarm.clock() - before == pytest.approx(3.0)
        return outcome.status

    assert LocalSwarm(3, settings=ENDLESS).run(script)[0] == "open"


def test_members_leave_and_swarms_close() -> None:
    def script(swarm: LocalMember) -> list[str]:
        steps(swarm, 8)
        names = [member.peer for member in swarm.members()]
        if swarm.index == 2:
            swarm.leave()
            assert "p2" not in [member.peer for member in swarm.members()]
            swarm.close()
            with pytest.raises(SwarmClosedError):
                swarm.anchor()
        else:
            steps(swarm, 14)
        return names

    results = LocalSwarm(3, settings=ENDLESS).run(script)
    assert sorted(results[0]) == ["p0", "p1", "p2"]


def test_another_model_is_refused_by_name() -> None:
    def script(swarm: LocalMember) -> str:
        layout = LAYOUT if swarm.index == 0 else make_layout([("v", (3,))])
        if swarm.index == 0:
            swarm.open(layout, lambda flat: None)
            swarm.sleep(10.0)
            return ""
        with pytest.raises(ModelMismatchError, match="only in your model"):
            swarm.open(layout, lambda flat: None)
        return "refused"

    assert LocalSwarm(2, settings=ENDLESS).run(script) == ["", "refused"]


def test_a_second_contribution_while_one_is_undecided_is_refused() -> None:
    def script(swarm: LocalMember) -> None:
        swarm.open(LAYOUT, lambda flat: None)
        pending = swarm.contribute(samples=1, write=lambda flat: None)
        with pytest.raises(LocalProtocolError, match="undecided"):
            swarm.contribute(samples=1, write=lambda flat: None)
        pending.wait()

    LocalSwarm(1, settings=ENDLESS).run(script)


def test_local_members_are_swarms() -> None:
    LocalSwarm(1).run(lambda swarm: None)
    assert issubclass(LocalMember, object)
    kinds: list[bool] = []
    LocalSwarm(1).run(lambda swarm: kinds.append(isinstance(swarm, Swarm)))
    assert kinds == [True]


MIXED = make_layout([("a.norm", (70,)), ("a.mlp", (30, 20)), ("b.norm", (9,)), ("b.mlp", (300,))])


def test_tensors_of_one_vector_have_their_own_codecs() -> None:
    settings = msgspec.structs.replace(
        ENDLESS, codec="int8", codecs={"*.norm": "fp32", "*.mlp": "int8"}
    )
    assert mixture_of(MIXED, "int8", settings.codecs) == "fp32:70+int8:600+fp32:9+int8"

    def script(swarm: LocalMember) -> tuple[int, torch.Tensor]:
        view = swarm.open(MIXED, lambda out: out.fill_(0.0))
        while view.round < 6:
            values = torch.randn(MIXED.numel, generator=torch.Generator().manual_seed(swarm.index))
            swarm.contribute(samples=1, write=lambda out, values=values: out.copy_(values)).wait(60)
            swarm.sleep(1.0)
            view = swarm.anchor()
        anchor = torch.empty(view.numel)
        view.copy_into(anchor)
        return view.round, anchor

    # one is late and takes the state, one was frozen and fetches results in chunks of several
    # codecs
    swarm = (
        LocalSwarm(4, settings=settings, chunk_elements=64).join_at(3, 4.0).freeze_at(2, 2.5, 3.0)
    )
    results = swarm.run(script)
    last = max(round_ for round_, _ in results)
    newest = [anchor for round_, anchor in results if round_ == last]
    assert all(torch.equal(anchor, newest[0]) for anchor in newest)
    assert all(torch.isfinite(anchor).all() for _, anchor in results)


@pytest.mark.parametrize(
    ("value", "codec", "why"),
    [
        (float("nan"), "int8", "b.norm holds NaN (element 3 of 9)"),
        (float("-inf"), "fp32", "b.norm holds infinity (element 3 of 9)"),
        (3.4e38, "bf16", "b.norm holds 3.4e+38, too much for bf16 (element 3 of 9)"),
    ],
)
def test_a_contribution_that_cannot_be_sent_is_refused_by_the_tensors_name(
    value: float, codec: str, why: str
) -> None:
    settings = msgspec.structs.replace(ENDLESS, codec="int8", codecs={"*.norm": codec})

    def script(swarm: LocalMember) -> list[Outcome]:
        swarm.open(MIXED, lambda out: out.fill_(0.0)).release()
        values = torch.ones(MIXED.numel)
        values[673] = value
        values[900] = value  # only the first is named
        bad = (
            [swarm.contribute(samples=1, write=lambda out: out.copy_(values)).wait(60)]
            if swarm.index == 1
            else []
        )
        return [*bad, swarm.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(60)]

    results = LocalSwarm(2, settings=settings, chunk_elements=64).run(script)
    refused, after = results[1]
    assert (refused.status, refused.counted, refused.reason) == (
        "lost",
        False,
        f"refused: {why}",
    )
    assert after.counted
    assert "p1" in [share.peer for share in after.contributors]


def test_an_idle_member_that_missed_a_change_of_the_configuration_hears_of_it() -> None:
    """Nobody trains, so nothing that is said later would show that it lags: it has to ask."""
    knowing = set[str]()

    def script(member: Swarm) -> float:
        assert isinstance(member, LocalMember)
        member.open(LAYOUT, lambda initial: None)
        while len(member._node().session.config_peers()) < 4:
            member.sleep(0.1)
        knowing.add(member.peer)
        told_at = member.clock()
        while len(knowing) < 4:
            member.sleep(0.1)
        return told_at

    swarm = LocalSwarm(
        4, settings=SETTINGS, timing=Timing(detect_s=8.0)
    )  # slower than the partition: nobody is evicted
    told = swarm.join_at(3, 5.0).partition_at([[0, 1, 3], [2]], 5.0, 4.0).run(script, limit_s=60.0)
    assert max(told[0], told[1], told[3]) < 9.0 <= told[2]
