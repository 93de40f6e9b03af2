"""Clusters of data, and the router between experts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError
from atoll.optim.lab.experts import Clusters, Mixture, find_clusters


def cost(x: Tensor, of: Tensor, count: int) -> float:
    """The sum of squared distances to the means of the clusters."""
    return sum(
        float((x[of == k] - x[of == k].mean(0)).square().sum())
        for k in range(count)
        if (of == k).any()
    )


@pytest.mark.parametrize("seed", range(20))
def test_clusters_of_few_samples_are_hardly_worse_than_the_best(seed: int) -> None:
    """Lloyd's steps end in a minimum that may be a local one."""
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
    best = min(cost(x, torch.tensor(of), 2) for of in product((0, 1), repeat=8))
    clusters = find_clusters(x, 2, seed=seed, tries=20)
    assert cost(x, clusters.of(x), 2) <= 1.02 * best
    assert torch.equal(clusters.centres, find_clusters(x, 2, seed=seed, tries=20).centres)


def test_planted_clusters_are_found() -> None:
    rng = torch.Generator().manual_seed(0)
    planted = torch.randint(5, (10_000,), generator=rng)
    x = torch.eye(5)[planted] * 10 + torch.randn(10_000, 5, generator=rng)
    of = find_clusters(x, 5, seed=0).of(x)
    pairs = torch.unique(planted * 5 + of)
    assert len(pairs) == 5  # one name each


@pytest.mark.parametrize(
    ("x", "count"),
    [
        (torch.ones(3, 2), 2),
        (torch.ones(3, 2), 4),
        (torch.ones(3, 2), 0),
        (torch.full((3, 2), torch.nan), 1),
        (torch.ones(3), 1),
    ],
)
def test_what_cannot_be_clustered_is_refused(x: Tensor, count: int) -> None:
    with pytest.raises(ConfigError):
        find_clusters(x, count)


def test_clusters_are_written_and_read(tmp_path: Path) -> None:
    clusters = find_clusters(torch.randn(50, 3, generator=torch.Generator().manual_seed(1)), 4)
    clusters.save(tmp_path / "clusters.npy")
    assert torch.equal(Clusters.load(tmp_path / "clusters.npy").centres, clusters.centres)


@pytest.mark.parametrize("kind", ["empty", "text", "double", "flat", "objects"])
def test_other_files_are_no_clusters(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other.npy"
    if kind in ("empty", "text"):
        path.write_bytes(b"" if kind == "empty" else b"clusters")
    else:
        arrays = {"double": np.ones((2, 2)), "flat": np.ones(2, np.float32)}
        np.save(path, arrays.get(kind, np.array([object()])), allow_pickle=True)
    with pytest.raises(ConfigError, match="clusters"):
        Clusters.load(path)


class Times(nn.Module):
    """An expert that multiplies, and remembers which rows it was asked for."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))
        self.asked: list[Tensor] = []

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.asked.append(x.detach())
        return self.by * x + t


class Routed(nn.Module):
    """Fixed logits of three experts."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.logits


@pytest.mark.parametrize("top", [1, 2, 3, None])
def test_the_mixture_is_the_weighted_sum_of_those_that_run(top: int | None) -> None:
    rng = torch.Generator().manual_seed(0)
    x, t = torch.randn(6, 4, generator=rng), torch.rand(6, 1, generator=rng)
    logits = torch.randn(6, 3, generator=rng)
    experts = [Times(1.0), Times(2.0), Times(3.0)]
    found = Mixture(experts, Routed(logits), top=top)(x, t)
    weights = logits.softmax(1)
    least = weights.sort(1, descending=True).values[:, (top or 3) - 1]
    weights = torch.where(weights >= least[:, None], weights, 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    wanted = sum(weights[:, k, None] * ((k + 1) * x + t) for k in range(3))
    assert torch.allclose(found, wanted, atol=1e-6)  # pyright: ignore[reportArgumentType]
    assert sum(len(rows) for each in experts for rows in each.asked) == 6 * (top or 3)
    found.sum().backward()  # a router and experts may be trained further, together
    for k, each in enumerate(experts):
        assert each.by.grad is None or torch.allclose(
            each.by.grad, (weights[:, k, None] * x).sum(), atol=1e-5
        )


def test_classes_are_mixed_as_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    experts = [nn.Linear(1, 4), nn.Linear(1, 4)]

    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return logits

    x = torch.tensor([[0.5], [-1.0]])
    found = Mixture(experts, Router(), answer="logits")(x).exp()
    weights = logits.softmax(1)
    wanted = sum(weights[:, k, None] * experts[k](x).softmax(1) for k in range(2))
    assert torch.allclose(found, wanted)  # pyright: ignore[reportArgumentType]
    assert torch.allclose(found.sum(1), torch.ones(2))


@pytest.mark.parametrize("top", [0, 3])
def test_more_experts_than_there_are_cannot_answer(top: int) -> None:
    with pytest.raises(ValueError, match=f"top {top} of 2 experts"):
        Mixture([nn.Identity(), nn.Identity()], nn.Identity(), top=top)
