"""Gossip methods: each against its recursion written out, what keeps peers together, and the
speed that the theorems promise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.optim.lab.gossip import (
    ContinuousMomentum,
    Exchange,
    NoLoCo,
    Spread,
    TwoLevel,
    dadao,
    gossip_rates,
    spread_of,
)

RING = [(i, (i + 1) % 16) for i in range(16)]
BARBELL = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5), (3, 5)]


def random_graph(nodes: int, chance: float, rng: np.random.Generator) -> list[tuple[int, int]]:
    """A path through all nodes, and each other edge with this chance."""
    return [(j, i) for i in range(nodes) for j in range(i) if j == i - 1 or rng.random() < chance]


def pair(
    one: Callable[[Exchange], None], other: Callable[[Exchange], None], *given: Tensor
) -> None:
    """Both peers' steps with one exchange: ``given``, what each of them gives."""
    mean = torch.stack(given).mean(0)
    for step in (one, other):
        step(lambda tensor: tensor.copy_(mean))


# ---- NoLoCo


def test_noloco_is_its_recursion() -> None:
    weights = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])]
    peers = [NoLoCo(w, alpha=0.25, beta=0.5, gamma=0.75) for w in weights]
    slow, momentum = torch.stack(weights), torch.zeros(2, 2)
    for step in range(3):
        progress = torch.tensor([[0.5, step], [-1.0, 2.0]])
        live = [w + p for w, p in zip(slow, progress, strict=True)]
        given = [torch.stack([p, w]) for w, p in zip(slow, progress, strict=True)]
        pair(
            lambda e, live=live: peers[0].step(live[0], e),
            lambda e, live=live: peers[1].step(live[1], e),
            *given,
        )
        momentum = 0.25 * momentum + 0.5 * progress.mean(0) + 0.75 * (slow.mean(0) - slow)
        slow = slow + momentum
        for peer, own, expected in zip(peers, live, slow, strict=True):
            assert torch.equal(peer.slow, expected)
            assert torch.equal(own, expected)


def test_noloco_alone_is_momentum_on_its_own_progress() -> None:
    peer, live = NoLoCo(torch.zeros(1)), torch.ones(1)
    peer.step(live, lambda tensor: None)
    assert live.item() == pytest.approx(0.7)
    peer.step(live, lambda tensor: None)
    assert live.item() == pytest.approx(0.7 + 0.35)


def test_noloco_keeps_half_precision_parameters_as_they_are() -> None:
    live = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    peer = NoLoCo(live)
    peer.step(live.add_(1), lambda tensor: None)
    assert (live.dtype, peer.slow.dtype, peer.slow.tolist()) == (
        torch.bfloat16,
        torch.float32,
        pytest.approx([1.7, 2.7]),
    )


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 0.5), (0.5, 1.6), (-0.1, 0.5)])
def test_noloco_refuses_what_would_not_stay_together(alpha: float, gamma: float) -> None:
    with pytest.raises(ValueError, match="alpha < gamma"):
        NoLoCo(torch.zeros(1), alpha=alpha, gamma=gamma)


def test_noloco_pairs_stay_together_while_each_walks_at_random() -> None:
    """Sixteen peers whose progress is noise: their spread stops growing, as it would without the
    pull, and their mean is moved by the mean of all progress only."""
    rng = torch.Generator().manual_seed(1)
    peers = [NoLoCo(torch.zeros(64)) for _ in range(16)]
    apart = list[float]()
    for _ in range(60):
        order = torch.randperm(16, generator=rng).tolist()
        live = [peer.slow + torch.randn(64, generator=rng) for peer in peers]
        for i, j in zip(order[::2], order[1::2], strict=True):
            given = [torch.stack([live[k] - peers[k].slow, peers[k].slow]) for k in (i, j)]
            pair(
                lambda e, i=i, live=live: peers[i].step(live[i], e),
                lambda e, j=j, live=live: peers[j].step(live[j], e),
                *given,
            )
        apart.append(torch.stack([peer.slow for peer in peers]).std(0).mean().item())
    early, late = sum(apart[10:30]) / 20, sum(apart[40:]) / 20
    assert 0.5 < early < 2
    assert late < 1.2 * early


# ---- two levels


def together(peers: list[TwoLevel], live: list[Tensor], groups: list[list[int]]) -> None:
    """One step of all: the means are taken in the order in which they are asked for."""
    merges = (peers[0].steps + 1) % peers[0].every == 0
    changes = [peer.slow - own for peer, own in zip(peers, live, strict=True)]
    means = {i: torch.stack([changes[j] for j in group]).mean(0) for group in groups for i in group}
    given = dict[int, Tensor]()
    if merges:  # what each will give is found by a step of a copy
        for i, peer in enumerate(copy.deepcopy(peers)):
            peer.step(
                live[i].clone(),
                lambda t, i=i: t.copy_(means[i]),
                lambda t, i=i: given.update({i: t.clone()}),
            )
    mean = torch.stack([*given.values()]).mean(0) if given else torch.zeros(0)
    for i, peer in enumerate(peers):
        peer.step(live[i], lambda t, i=i: t.copy_(means[i]), lambda t: t.copy_(mean))


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_two_levels_are_their_recursion(alpha: float) -> None:
    groups, rng = [[0, 1], [2, 3, 4]], np.random.default_rng(4)
    start = rng.standard_normal(6)
    peers = [
        TwoLevel(
            torch.tensor(start, dtype=torch.float32),
            lr=0.8,
            momentum=0.5,
            every=3,
            common_lr=0.9,
            common_momentum=0.4,
            alpha=alpha,
        )
        for _ in range(5)
    ]
    slow, m = [start.copy(), start.copy()], [np.zeros(6), np.zeros(6)]
    merged, common, of_all = [start.copy(), start.copy()], start.copy(), np.zeros(6)
    for step in range(1, 10):
        moved = rng.standard_normal((5, 6))
        live = [torch.tensor(slow[int(i > 1)] - moved[i], dtype=torch.float32) for i in range(5)]
        together(peers, live, groups)
        for number, group in enumerate(groups):
            g = moved[group].mean(0)
            m[number] = 0.5 * m[number] + g
            slow[number] = slow[number] - 0.8 * (g + 0.5 * m[number])
        if step % 3 == 0:
            change = (2 * (merged[0] - slow[0]) + 3 * (merged[1] - slow[1])) / 5
            of_all = 0.4 * of_all + change
            common = common - 0.9 * (change + 0.4 * of_all)
            slow = [(1 - alpha) * own + alpha * common for own in slow]
            merged = [own.copy() for own in slow]
        for i, peer in enumerate(peers):
            assert np.allclose(peer.slow.numpy(), slow[int(i > 1)], atol=1e-5)
            assert np.allclose(peer.common.numpy(), common, atol=1e-5)
            assert torch.equal(live[i], peer.slow)
            assert torch.equal(peer.slow, peers[groups[int(i > 1)][0]].slow)
            assert torch.equal(peer.common, peers[0].common)


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"alpha": 0.0}, {"alpha": 1.5}, {"lr": 0.0}, {"momentum": 1.0}]
)
def test_two_levels_that_would_not_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("momentum", "momenta")):
        TwoLevel(torch.zeros(1), **wrong)  # type: ignore[arg-type]


# ---- graphs


def test_spread_of_a_ring_and_of_a_complete_graph() -> None:
    ring = spread_of(RING, np.full(16, 0.5))
    assert ring.chi1 == pytest.approx(1 / (1 - math.cos(2 * math.pi / 16)))
    assert ring.chi2 == pytest.approx(15 / 16)
    everybody = [(i, j) for i in range(16) for j in range(i)]
    complete = spread_of(everybody, np.full(120, 1 / 15))
    assert (complete.chi1, complete.chi2) == (pytest.approx(15 / 16), pytest.approx(15 / 16))


def test_graphs_that_cannot_be_are_refused() -> None:
    for edges, rates, why in (
        ([(0, 1), (2, 3)], [1, 1], "not connected"),
        ([(0, 1), (1, 2)], [1, 0], "not connected"),
        ([(0, 0)], [1], "two different nodes"),
        ([], [], "two different nodes"),
        ([(0, 1)], [1, 1], "one rate"),
        ([(0, 1)], [-1], "one rate"),
    ):
        with pytest.raises(ValueError, match=why):
            spread_of(edges, rates)


def test_rates_are_the_best_of_a_search() -> None:
    """Two triangles and a bridge: by symmetry three different rates, all of them tried."""

    def product(rates: np.ndarray) -> float:
        spread = spread_of(BARBELL, rates)
        return math.sqrt(spread.chi1 * spread.chi2)

    searched = min(
        product(np.array([a, b, b, 1 - 2 * a - 4 * b, b, a, b]))
        for a in np.arange(0.01, 0.25, 0.01)
        for b in np.arange(0.01, 0.25, 0.01)
        if 2 * a + 4 * b < 0.99
    )
    found = gossip_rates(BARBELL)
    assert found.sum() == pytest.approx(1)
    assert product(found) < 1.001 * searched
    assert product(found) < 0.78 * product(np.full(7, 1 / 7))


# ---- A²CiD²


def test_continuous_momentum_is_its_equations() -> None:
    spread = Spread(chi1=4.0, chi2=1.0)  # eta 1/4, alpha 1
    x = torch.tensor([1.0])
    peer = ContinuousMomentum(x, spread)
    peer.exchange(lambda tensor: tensor.copy_(torch.tensor([3.0])), 1.0)
    assert (x.item(), peer.shadow.item()) == (3.0, 5.0)  # the other held 5; 1 + 1 (5 - 1)
    peer.moved(torch.tensor([-1.0]), 3.0)
    e = math.exp(-2 * 0.25 * 2)
    assert x.item() == pytest.approx(4 - e - 1)
    assert peer.shadow.item() == pytest.approx(4 + e - 1)
    with pytest.raises(ValueError, match="went back"):
        peer.mix(2.0)


def exchanges_until(apart: float, seed: int, accelerated: bool) -> int:
    """How many exchanges a ring of 16 needs until it is so much less apart than at first."""
    rng = np.random.default_rng(seed)
    spread = spread_of(RING, np.full(16, 0.5))
    x = torch.from_numpy(rng.standard_normal((16, 8)))
    first, now, count = x.std(0).norm().item(), 0.0, 0
    peers = [ContinuousMomentum(row, spread) for row in x]
    mean = x.mean(0)
    while x.std(0).norm().item() > apart * first:
        now, count = now + rng.exponential(1 / 8), count + 1
        i, j = RING[rng.integers(16)]
        if not accelerated:
            x[[i, j]] = (x[i] + x[j]) / 2
            continue
        for k in (i, j):
            peers[k].mix(now)
        pair(
            lambda e, i=i, now=now: peers[i].exchange(e, now),
            lambda e, j=j, now=now: peers[j].exchange(e, now),
            x[i].clone(),
            x[j].clone(),
        )
    shadows = torch.stack([peer.shadow for peer in peers])
    assert not accelerated or torch.allclose((x.mean(0) + shadows.mean(0)) / 2, mean)
    return count


def test_continuous_momentum_needs_fewer_exchanges_on_a_ring() -> None:
    plain = [exchanges_until(0.01, seed, False) for seed in range(3)]
    accelerated = [exchanges_until(0.01, seed, True) for seed in range(3)]
    assert sum(plain) > 2 * sum(accelerated)
    assert all(a < p for a, p in zip(accelerated, plain, strict=True))


# ---- DADAO


@pytest.mark.parametrize("graph", ["ring", "grid", "random"])
def test_dadao_comes_to_the_minimum_of_the_sum(graph: str) -> None:
    rng = np.random.default_rng(3)
    graphs = {
        "ring": [(i, (i + 1) % 9) for i in range(9)],
        "grid": [(i, i + 1) for i in range(9) if i % 3 < 2] + [(i, i + 3) for i in range(6)],
        "random": random_graph(9, 0.2, rng),
    }
    edges = graphs[graph]
    hessians, targets = rng.uniform(1, 2, (9, 3)), rng.standard_normal((9, 3))
    best = (hessians * targets).sum(0) / hessians.sum(0)
    start = np.zeros((9, 3))
    scale = np.linalg.norm(start - best)
    shares = gossip_rates(edges, steps=200)
    found = dadao(
        lambda i, x: hessians[i] * (x - targets[i]),
        start,
        edges,
        shares,
        mu=1.0,
        smooth=2.0,
        rng=rng,
        events=30_000,
        until=lambda x: float(np.linalg.norm(x - best)) <= 1e-6 * scale,
    )
    assert np.linalg.norm(found.weights - best) <= 1e-6 * scale
    assert found.gradients == pytest.approx(9 * found.time, rel=0.1)
    # the theorem's number of exchanges, with the constant that all graphs have (bench_gossip.py)
    spread = spread_of(edges, shares)
    theorem = math.sqrt(spread.chi1 * spread.chi2) * math.sqrt(2.0) * math.log(1e6)
    assert 15 < found.exchanges / theorem < 25
    assert start.sum() == 0


def test_dadao_refuses_what_it_cannot_solve() -> None:
    run = {"rng": np.random.default_rng(0), "events": 1, "shares": [1.0]}
    with pytest.raises(ValueError, match="0 < mu"):
        dadao(lambda i, x: x, np.zeros((2, 1)), [(0, 1)], mu=2, smooth=1, **run)
    with pytest.raises(ValueError, match="nodes 0 to 2"):
        dadao(lambda i, x: x, np.zeros((3, 1)), [(0, 1)], mu=1, smooth=1, **run)
