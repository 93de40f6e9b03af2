"""Methods by their settings, through attach, real codecs and LocalSwarm: golden trajectories, equal
anchors, faults, who waits.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.collectives.telemetry import subscribe
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm, attach
from atoll.optim.outer.governor import Governed

H, ROUNDS = 4, 10
BASE = RunSettings(
    sync_every=H,
    rounds=ROUNDS,
    codec="fp32",
    exact=False,  # else all of so small a model would be fp32
    outer=OuterSettings("nesterov", 0.7, 0.5),
)
METHODS: dict[str, dict[str, Any]] = {
    "late": {"overlap": "late"},
    "late, adopted after two steps": {"overlap": "late", "delay": 2},
    "eager": {"overlap": "eager"},
    "co2": {"overlap": "late", "outer": OuterSettings(kind="co2", lr=0.9, momentum=0.3)},
    "delayed Nesterov": {"outer": OuterSettings("delayed_nesterov", 0.7, 0.5, every=2)},
    "heloco": {"overlap": "late", "outer": OuterSettings("heloco", 0.7, 0.5)},
    "streaming": {"fragments": 3},
    "streaming, delayed and mixed": {"fragments": 3, "overlap": "late", "delay": 1, "mixing": 0.5},
    "int4 with feedback": {"codec": "int4", "feedback": True},
    "eager, int4 with feedback": {"codec": "int4", "feedback": True, "overlap": "eager"},
    "2 bits": {"codec": "stat2"},
    "2 bits both ways": {"codec": "stat2_both"},
    "sparse": {
        "codec": "sparse256",
        "feedback_kept": 0.95,
        "outer": OuterSettings(kind="sgd", lr=1.0),
    },
    "streaming, sparse, late": {
        "codec": "sparse256",
        "fragments": 2,
        "overlap": "late",
        "outer": OuterSettings(kind="sgd", lr=1.0),
    },
    "post-local": {"method": "local_sgd", "local_after": 3},
}


def settings_of(method: str) -> RunSettings:
    return msgspec.structs.replace(BASE, **METHODS[method])


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def train(swarm: LocalMember) -> dict[str, Any]:
    """Every peer has other data of one problem."""
    model, teacher = net(), nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))
    torch.manual_seed(1000 * swarm.index + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    attachment = attach(model, optimizer, swarm, clock=swarm.clock)
    steps = 0
    while not attachment.done and steps < 400:
        x = torch.randn(16, 6)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        attachment.samples(16)
        optimizer.step()
        steps += 1
    held_out = torch.randn(256, 6, generator=torch.Generator().manual_seed(3))
    with attachment.evaluate_anchor() as view, torch.no_grad():
        anchor = torch.empty(view.numel)
        view.copy_into(anchor)
        loss = float(nn.functional.mse_loss(model(held_out), teacher(held_out)))
    return {
        "round": view.round,
        "anchor": anchor,
        "loss": loss,
        "steps": steps,
        "stats": attachment.stats,
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_and_all_have_one_anchor_whatever_happens(method: str) -> None:
    """One member is killed and comes back, another starts late; there is still one anchor a round
    and it has learned.
    """
    swarm = (
        LocalSwarm(3, settings=settings_of(method), latency_s=0.02, seed=3)
        .join_at(2, 1.5)
        .crash_at(1, 4.0, back_after_s=1.0)
    )
    results = swarm.run(train, step_s=0.25)
    assert [result["round"] for result in results] == [ROUNDS] * 3
    assert all(torch.equal(result["anchor"], results[0]["anchor"]) for result in results)
    assert results[0]["loss"] < 0.7 * untrained_loss()


def untrained_loss() -> float:
    model, teacher = net(), nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))
    held_out = torch.randn(256, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(held_out), teacher(held_out)))


def waited(method: dict[str, Any]) -> tuple[float, float]:
    """(seconds waited, virtual seconds in all) of the first member, where messages take 0.4 s: a
    round takes some two seconds to decide.
    """
    swarm = LocalSwarm(2, settings=msgspec.structs.replace(BASE, **method), latency_s=0.4)
    results = swarm.run(train, step_s=1.5)
    return results[0]["stats"]["waiting_s"], swarm.now


def test_with_overlap_training_does_not_wait_where_the_exchange_fits_into_a_round() -> None:
    plain, plain_s = waited({})
    late, late_s = waited({"overlap": "late"})
    assert plain > 5.0
    assert late < 0.2 * plain
    assert late_s < plain_s


def constant(gradients: np.ndarray, seen: list[list[np.ndarray]]) -> Any:
    """A script whose gradients are given, (peers, steps, numel): contributions then do not depend
    on parameters.
    """

    def script(swarm: LocalMember) -> None:
        model = nn.Linear(gradients.shape[2], 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        attachment = attach(model, optimizer, swarm, clock=swarm.clock)
        for step in range(gradients.shape[1]):
            if attachment.done:
                break
            model.weight.grad = torch.from_numpy(gradients[swarm.index, step]).view(1, -1).clone()
            optimizer.step()
            if step % H == H - 1:
                seen[swarm.index].append(model.weight.detach().numpy().ravel().copy())
        while not attachment.done:
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()

    return script


def together(
    settings: RunSettings, peers: int, rounds: int
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """What each round contributes (rounds, peers, numel), and live parameters after each boundary,
    once all peers are members.
    """
    rng = np.random.default_rng(5)
    gradients = rng.standard_normal((peers, rounds * H, 5)).astype(np.float32)
    seen: list[list[np.ndarray]] = [[] for _ in range(peers)]
    swarm = LocalSwarm(peers, settings=settings, latency_s=0.001)
    script = constant(gradients, seen)

    def after_all_are_there(member: LocalMember) -> None:
        member.open(make_layout([("weight", (1, 5))]), lambda initial: None).release()
        while len(member.members()) < peers:
            member.sleep(0.1)
        script(member)

    swarm.run(after_all_are_there, step_s=0.25)
    return gradients.reshape(peers, rounds, H, 5).sum(2).transpose(1, 0, 2), seen


def test_eager_is_the_papers_update_with_anchors_of_ones_own() -> None:
    """g = Δ/k + (mean - Δ/k) of the round before, then Nesterov on each worker's own anchor (arXiv
    2502.12996), in numpy.
    """
    peers, rounds = 2, 6
    settings = msgspec.structs.replace(BASE, overlap="eager", rounds=rounds)
    deltas, seen = together(settings, peers, rounds)
    lr, mu = 0.7, 0.5
    for peer in range(peers):
        anchor, momentum, others = np.zeros(5), np.zeros(5), np.zeros(5)
        for r in range(rounds - 1):
            g = deltas[r, peer] / peers + others
            momentum = mu * momentum + g
            anchor = anchor - lr * (g + mu * momentum)
            others = deltas[r].mean(0) - deltas[r, peer] / peers
            assert np.allclose(seen[peer][r], anchor, atol=2e-5)


def test_late_members_train_on_from_their_own_values_and_get_the_others_a_round_later() -> None:
    peers, rounds = 2, 6
    settings = msgspec.structs.replace(
        BASE, overlap="late", rounds=rounds, outer=OuterSettings(kind="sgd", lr=0.5)
    )
    deltas, seen = together(settings, peers, rounds)
    for peer in range(peers):
        for r in range(rounds - 1):
            anchor = -0.5 * deltas[:r].mean(1).sum(0) if r else np.zeros(5)
            assert np.allclose(seen[peer][r], anchor - deltas[r, peer], atol=2e-5)


@pytest.mark.parametrize("peers", [2, 4])
def test_a_stretched_step_is_as_long_in_a_swarm_of_two_as_in_one_of_four(peers: int) -> None:
    """Each contributes 2 along an axis of its own: the mean is 2/√k long, the outer step lr · 2."""
    settings = msgspec.structs.replace(
        BASE, rounds=1, outer=OuterSettings(kind="sgd", lr=0.5, stretch=True)
    )

    def script(member: LocalMember) -> np.ndarray:
        member.open(make_layout([("weight", (4,))]), lambda initial: None).release()
        while len(member.members()) < peers:
            member.sleep(0.1)
        axis = torch.eye(4)[member.index]
        assert (
            member.contribute(
                samples=member.index + 1 if peers == 2 else 3, write=lambda out: out.copy_(2 * axis)
            )
            .wait(60)
            .counted
        )
        anchor = torch.empty(4)
        member.anchor().copy_into(anchor)
        return anchor.numpy()

    anchors = LocalSwarm(peers, settings=settings, latency_s=0.001).run(script)
    assert all(np.array_equal(anchor, anchors[0]) for anchor in anchors)
    if peers == 4:
        assert np.allclose(anchors[0], -0.5 * np.ones(4))  # norm 0.5 · 2
    else:  # weights 1 and 2: the mean is 2 · (1, 2) / 3, shorter than 2 by √5 / 3
        assert np.allclose(anchors[0], [-1 / np.sqrt(5), -2 / np.sqrt(5), 0, 0])


def test_a_jump_of_the_loss_is_seen_by_all_members_in_one_round() -> None:
    """All log the loss of their inner steps; in round 7 it doubles for most of them."""
    seen: list[object] = []
    off = subscribe(seen.append)
    settings = msgspec.structs.replace(
        BASE, sync_every=2, rounds=9, outer=OuterSettings("nesterov", 1.0, 0.5, governor=True)
    )

    def script(member: LocalMember) -> np.ndarray:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        member.open(make_layout([("weight", (1, 4))]), lambda initial: None).release()
        while len(member.members()) < 3:
            member.sleep(0.1)
        attachment = attach(model, optimizer, member, clock=member.clock)
        while not attachment.done:
            attachment.log(loss=2.0 if attachment.round == 6 and member.index else 1.0)
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        anchor = torch.empty(4)
        member.anchor().copy_into(anchor)
        return anchor.numpy()

    anchors = LocalSwarm(3, settings=settings, latency_s=0.001).run(script, step_s=0.25)
    off()
    assert [event for event in seen if isinstance(event, Governed)] == [
        Governed("loss", value=2.0, median=1.0)
    ] * 3
    assert all(np.array_equal(anchor, anchors[0]) for anchor in anchors)


def test_the_position_is_what_all_have_contributed_whoever_comes_or_goes() -> None:
    """Members of unequal batches, one starts late and one is killed: a schedule by it has one rate
    a round, and a newcomer starts where the run is.
    """
    decided: dict[int, int] = {}

    def script(member: LocalMember) -> tuple[int, dict[int, int], list[int]]:
        def on_round(outcome: Outcome) -> None:
            if outcome.contributors:
                decided[outcome.round] = sum(share.samples for share in outcome.contributors)

        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        attachment = attach(model, optimizer, member, on_round=on_round, clock=member.clock)
        first, anchors, own = attachment.position, dict[int, int](), list[int]()
        while not attachment.done:
            model(torch.ones(1, 6)).sum().backward()
            attachment.samples(8 * (member.index + 1))
            optimizer.step()
            view = member.anchor()
            anchors[view.round] = view.samples
            view.release()
            own.append(attachment.position)
        return first, anchors, own

    settings = msgspec.structs.replace(BASE, rounds=12)
    results = (
        LocalSwarm(3, settings=settings, latency_s=0.02)
        .join_at(2, 8.0)
        .crash_at(1, 12.0, back_after_s=1.0)
        .run(script, step_s=0.25)
    )
    assert sorted(decided) == list(range(1, 13))
    total = [sum(decided[r] for r in range(1, upto + 1)) for upto in range(13)]
    assert len(set(decided.values())) > 2  # rounds of one, two and three members
    for first, anchors, own in results:
        assert anchors == {round_: total[round_] for round_ in anchors}
        assert own[-1] >= total[12]  # more where its last contribution was not counted
        assert first in total
    assert results[0][0] == 0
    assert results[2][0] > 0
    assert min(own[-1] for _, _, own in results) == total[12]


def test_one_member_with_sgd_of_one_follows_its_inner_optimizer_alone_through_the_real_exchange() -> (
    None
):
    """a − (a − b) is not b in floating point, but nearly: within 3e-7 of the norm after 20 steps
    and 5 rounds.
    """
    settings = msgspec.structs.replace(
        BASE, rounds=5, outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
    )

    def script(member: LocalMember | None) -> Tensor:
        data = torch.randn(5 * H, 16, 6, generator=torch.Generator().manual_seed(5))
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        attachment = (
            attach(model, optimizer, member, clock=member.clock) if member is not None else None
        )
        for x in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
        assert attachment is None or attachment.done
        return torch.cat([value.detach().reshape(-1) for value in model.parameters()])

    (member,) = LocalSwarm(1, settings=settings, latency_s=0.001).run(script, step_s=0.25)
    alone = script(None)
    assert 0 < torch.linalg.norm(member - alone) <= 3e-7 * torch.linalg.norm(alone)


@pytest.mark.parametrize("peers", [2, 4])
def test_members_that_do_the_same_equal_one_bit_for_bit_through_the_real_exchange(
    peers: int,
) -> None:
    """Sums of two or four equal float32 numbers are exact, and so is their mean."""
    settings = msgspec.structs.replace(BASE, rounds=5)

    def script(swarm: Any) -> np.ndarray:
        torch.manual_seed(5)
        data = torch.randn(5 * H, 16, 6)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        member = swarm if isinstance(swarm, LocalMember) else None
        attachment = attach(
            model, optimizer, swarm, clock=member.clock if member else time.monotonic
        )
        while member is not None and len(member.members()) < peers:
            member.sleep(0.1)
        for x in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x[:, :2]).backward()
            attachment.samples(16)
            optimizer.step()
        assert attachment.done
        return torch.cat([value.detach().reshape(-1) for value in model.parameters()]).numpy()

    one = script(SoloSwarm(settings))
    assert all(
        np.array_equal(each, one)
        for each in LocalSwarm(peers, settings=settings, latency_s=0.001).run(script, step_s=0.25)
    )
