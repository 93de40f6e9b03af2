"""Federated runs in virtual time: what must be equal, what must add up, who waits, and whose model
it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from seeds import daily
from torch import Tensor, nn

from atoll.collectives.arrivals import Fading
from atoll.collectives.errors import ConfigError, NotEnoughPeersError
from atoll.optim.federated import METHODS, server_settings
from atoll.optim.federated.member import InnerSteps, Knobs, Served
from atoll.optim.federated.personal import ditto, fine_tuned
from atoll.optim.federated.simulation import (
    NAMES,
    Device,
    StudySettings,
    Task,
    dirichlet,
    fleet,
    label_shards,
    personalised,
    simulate,
)
from atoll.optim.federated.simulation.partition import Indices
from atoll.optim.federated.simulation.report import curve, row
from atoll.optim.federated.simulation.study import Study
from atoll.optim.federated.simulation.synchronous import run_synchronous
from atoll.optim.federated.simulation.task import Learner
from atoll.optim.modes.clusters import adjusted_rand, clusters, same_names

SPEEDS = (1.0, 1.5, 2.0, 4.0, 5.0)
CLASSES = 4


def blobs(seed: int = 0, rows: int = 400, norm: bool = False) -> Task:
    """Four Gaussian clouds in eight dimensions, and a linear model of them."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, 8, generator=rng) * 1.5
    y = torch.arange(rows + 200) % CLASSES
    x = centres[y] + torch.randn(rows + 200, 8, generator=rng)

    def model() -> nn.Module:
        layer = nn.Linear(8, CLASSES)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return nn.Sequential(nn.BatchNorm1d(8), layer) if norm else layer

    return Task(model, x[:rows], y[:rows], x[rows:], y[rows:])


TASK = blobs()
PARTS = dirichlet(TASK.labels, 5, 0.3, seed=1)
FLEET = fleet(5, SPEEDS)


def test_one_step_of_everybody_is_large_batch_sgd() -> None:
    settings = StudySettings("fedavg", rounds=20, steps=1, batch=len(TASK.y), knobs=Knobs(lr=0.5))
    ours = simulate(TASK, PARTS, FLEET, settings).anchor
    model = TASK.model()
    for _ in range(20):
        model.zero_grad()
        nn.functional.cross_entropy(model(TASK.x), TASK.y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
    assert (ours - torch.cat([p.detach().flatten() for p in model.parameters()])).abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_every_method_learns_and_a_seed_tells_the_whole_run(name: str) -> None:
    server = {"fedadam": 0.1, "fedyogi": 0.1, "fedadagrad": 0.1, "fedavgm": 0.3}.get(name, 1.0)
    settings = StudySettings(
        name,
        rounds=None,
        seconds=400.0,
        least=5,
        most=25,
        knobs=Knobs(lr=0.05, beta=0.5),
        server_lr=server,
        measure=4,
    )
    result = simulate(TASK, PARTS, FLEET, settings)
    assert result.points[0].accuracy == 0.25
    assert result.points[-1].accuracy > 0.85
    assert [point.seconds for point in result.points] == sorted(
        point.seconds for point in result.points
    )
    short = replace(settings, seconds=60.0)
    once, again, other = (
        simulate(TASK, PARTS, FLEET, replace(short, seed=seed)).anchor for seed in (0, 0, 1)
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_control_variates_add_up_with_shares_and_partial_rounds() -> None:
    study = Study(
        TASK, PARTS, FLEET, StudySettings("scaffold", rounds=15, asked=2, knobs=Knobs(lr=0.1))
    )
    run_synchronous(study)
    mean = sum(
        (
            share * own
            for share, own in zip(study.shares, study._own, strict=True)
            if own is not None
        ),
        torch.zeros(36),
    )
    assert study.server.common is not None
    assert (study.server.common - mean).abs().max() < 1e-6


def test_who_waits_for_the_slowest_and_who_does_not() -> None:
    """Turns of equal length: synchronous clients work 2.7 of 5 s on average."""
    waiting = simulate(TASK, PARTS, FLEET, StudySettings("fedavg", rounds=5))
    assert waiting.idle == pytest.approx(1 - np.mean(SPEEDS) / 5)
    assert [point.seconds for point in waiting.points] == [0, 50, 100, 150, 200, 250]
    assert waiting.points[-1].bytes == 5 * 5 * 2 * 4 * 36
    assert simulate(TASK, PARTS, FLEET, StudySettings("fedavg", rounds=5, epochs=1)).idle > 0.5
    assert (
        simulate(
            TASK, PARTS, FLEET, StudySettings("fedcompass", rounds=None, seconds=2000, steps=50)
        ).idle
        < 0.1
    )
    assert simulate(TASK, PARTS, FLEET, StudySettings("fedasync", rounds=50)).idle == 0


class Bias(nn.Module):
    """One number: how likely the second class is, whatever the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), self.b.expand(len(x), 1)], 1)


@pytest.mark.parametrize(
    ("settings", "share"),
    daily(
        2,
        (
            (StudySettings("fedavg"), 0.7),
            (StudySettings("fedasync", fading=Fading(0.05, "constant")), 0.2),
            (StudySettings("fedfix", period=1.0), 0.7),
            (StudySettings("fedfix", period=3.0), 0.7),
            (StudySettings("fedbuff", buffer=1, unbiased=True), 0.7),
            (StudySettings("fedbuff", buffer=2, unbiased=True), 0.7),
        ),
    ),
)
def test_weights_lead_to_the_optimum_of_the_shares_and_unweighted_arrivals_to_that_of_speed(
    settings: StudySettings, share: float
) -> None:
    """A client with 30 samples of one class makes a turn a second, one with 70 of the other a turn
    in four: 0.7 is the optimum of all samples; with every arrival counting alike it is 1 to 4."""
    y = torch.tensor([0] * 30 + [1] * 70)
    task = Task(Bias, torch.zeros(100, 1), y, torch.zeros(2, 1), y[-2:])
    run = replace(
        settings,
        rounds=None,
        seconds=3000.0 if settings.name != "fedasync" else 12_000.0,
        steps=1,
        batch=100,
        knobs=Knobs(lr=0.1),
        measure=400,
    )
    end = simulate(task, [np.arange(30), np.arange(30, 100)], fleet(2, (1.0, 4.0)), run).anchor
    assert float(torch.sigmoid(end)) == pytest.approx(share, abs=0.02)


def test_all_count_the_same_where_the_run_says_so_and_a_server_may_be_given() -> None:
    base = StudySettings("fedavg", rounds=1)
    deltas = [simulate(TASK, [part], fleet(1, (1.0,)), base).anchor for part in PARTS[:1]]
    even = Study(TASK, PARTS, FLEET, replace(base, even=True))
    assert even.shares == [0.2] * 5
    start = even.server.anchor.clone()
    pseudo = torch.stack(
        [even.turn(client, even.server.served(), 10).pseudo for client in range(5)]
    )
    half = replace(base, even=True, outer=server_settings("fedavg", lr=0.5))
    assert torch.allclose(
        simulate(TASK, PARTS, FLEET, half).anchor, start - 0.5 * pseudo.mean(0), atol=1e-6
    )
    assert torch.allclose(start - pseudo[0], deltas[0], atol=1e-6)


def test_who_drops_is_not_in_the_mean_and_the_run_goes_on() -> None:
    flaky = fleet(5, SPEEDS, dropout=0.4)
    for name in ("scaffold", "fedasync", "fedcompass", "fedbuff", "fedfix"):
        result = simulate(
            TASK,
            PARTS,
            flaky,
            StudySettings(name, rounds=None, seconds=800, steps=5, least=5, most=25),
        )
        assert result.dropped > 3, name
        assert result.points[-1].accuracy > 0.8, name
    table = row(
        [
            simulate(TASK, PARTS, flaky, StudySettings("fedavg", rounds=4, seed=seed))
            for seed in range(2)
        ]
    )
    assert table["rounds"] == 4
    assert 0 < table["site_accuracy_least"] <= table["accuracy"] + 0.2


def test_a_device_works_only_while_it_is_there() -> None:
    device = Device(2.0, ((10.0, 20.0), (50.0, 60.0)), 100.0)
    assert device.next_there(0.0) == 10.0
    assert device.next_there(15.0) == 15.0
    assert device.next_there(20.0) == 50.0
    assert device.next_there(260.0) == 310.0
    assert device.finished(0.0, 5) == 20.0
    assert device.finished(0.0, 6) == 52.0
    assert device.finished(12.0, 10) == 112.0
    for wrong in (
        lambda: Device(0.0),
        lambda: Device(1.0, ((5.0, 4.0),), 10.0),
        lambda: Device(1.0, ((0.0, 4.0),)),
    ):
        with pytest.raises(ConfigError):
            wrong()
    away = fleet(5, (1.0,), windows=[[[0, 20]]], period_s=1e9)
    assert (
        len(simulate(TASK, PARTS, away, StudySettings("fedasync", rounds=12)).points) < 10
    )  # nothing happens for long
    night = fleet(5, (1.0,), windows=[[[0, 20]], [[20, 40]]], period_s=40)
    result = simulate(TASK, PARTS, night, StudySettings("fedavg", rounds=4))
    assert [(point.seconds, point.bytes // (2 * 4 * 36)) for point in result.points] == [
        (0, 0),
        (10, 3),
        (20, 6),
        (30, 8),
        (40, 10),
    ]


def test_partitions_give_every_sample_to_one_client() -> None:
    def classes(parts: list[Indices]) -> float:
        return float(np.mean([len(np.unique(TASK.labels[part])) for part in parts]))

    for parts in (
        dirichlet(TASK.labels, 20, 0.1, 3),
        dirichlet(TASK.labels, 20, 100.0, 3),
        label_shards(TASK.labels, 20, 2, 3),
    ):
        assert len(parts) == 20
        assert sorted(np.concatenate(parts).tolist()) == list(range(400))
        assert min(map(len, parts)) >= 2
    assert (
        classes(dirichlet(TASK.labels, 20, 0.1, 3))
        < 3
        < classes(dirichlet(TASK.labels, 20, 100.0, 3))
    )
    assert classes(label_shards(TASK.labels, 20, 2, 3)) <= 2
    with pytest.raises(ConfigError):
        dirichlet(TASK.labels, 300, 0.1, 3)
    for alpha in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError):
            dirichlet(TASK.labels, 3, alpha, 3)


def test_a_rule_holds_where_the_mean_does_not() -> None:
    even, ten = dirichlet(TASK.labels, 10, 100.0, 1), fleet(10, (1.0,))
    base = StudySettings("fedavg", rounds=15, attack="sign_flip_1000", hostile=2)
    assert simulate(TASK, even, ten, base).points[-1].accuracy < 0.6
    assert (
        simulate(TASK, even, ten, replace(base, rule="trimmed_mean", f=2)).points[-1].accuracy
        > 0.85
    )
    for name in ("fedavg", "fedbuff", "fedasync", "fedcompass"):
        nans = simulate(
            TASK,
            even,
            ten,
            replace(base, attack="nan", name=name, rounds=40, seconds=150, least=5, most=20),
        )
        assert nans.points[-1].accuracy > 0.85, name  # what is not finite is left out
    flipped = replace(base, attack="label_flip", hostile=7)
    assert simulate(TASK, even, ten, flipped).points[-1].accuracy < 0.5


def test_attackers_that_look_for_the_worst_of_the_rule_or_send_what_they_once_had() -> None:
    even, ten = dirichlet(TASK.labels, 10, 100.0, 1), fleet(10, (1.0,))
    base = StudySettings("fedavg", rounds=15, hostile=4)
    found: dict[str, float] = {}
    for attack in ("ipm_0.1", "optimised_ipm", "optimised_alie", "delayed"):
        found[attack] = simulate(TASK, even, ten, replace(base, attack=attack)).points[-1].accuracy
        ruled = simulate(TASK, even, ten, replace(base, attack=attack, rule="median", f=4))
        assert ruled.points[-1].accuracy > 0.6, attack
    assert found["optimised_ipm"] < found["ipm_0.1"] - 0.1
    assert found["delayed"] > 0.5


@pytest.mark.parametrize("name", ["fedavg", "fedbuff", "scaffold", "fedcompass"])
def test_running_statistics_are_averaged_and_corrections_leave_them_alone(name: str) -> None:
    task = blobs(norm=True)
    result = simulate(
        task, PARTS, FLEET, StudySettings(name, rounds=20, least=5, most=25, knobs=Knobs(lr=0.05))
    )
    learner = Learner(task)
    mean, variance = (
        result.anchor[spec.offset : spec.offset + spec.numel]
        for spec in learner.layout.tensors
        if spec.role in ("mean", "variance")
    )
    assert (mean - task.x.mean(0)).abs().max() < 1.2
    assert bool(((variance > 0.1) & (variance < 10)).all())
    assert result.points[-1].accuracy > 0.8


@pytest.mark.parametrize(
    "settings",
    [StudySettings("fedfix", period=50.0), StudySettings("fedbuff", buffer=2, unbiased=True)],
)
def test_running_statistics_take_no_weight_above_a_share(settings: StudySettings) -> None:
    """Slow members' weights are above 1, and would carry a variance past zero: parameters bear
    that, normalisation does not.
    """
    small = blobs(norm=True)
    small = replace(
        small, x=small.x * 0.05, test_x=small.test_x * 0.05
    )  # variances fall from 1, where they begin
    result = simulate(
        small,
        PARTS,
        FLEET,
        replace(settings, rounds=None, seconds=900.0, steps=30, knobs=Knobs(lr=0.02)),
    )
    (variance,) = (
        result.anchor[spec.offset : spec.offset + spec.numel]
        for spec in Learner(small).layout.tensors
        if spec.role == "variance"
    )
    assert float(variance.min()) > 1e-4
    assert min(point.accuracy for point in result.points[-3:]) > 0.85
    assert result.points[-1].loss < 0.5


@pytest.mark.parametrize("name", ["scaffold", "scaffold_m"])
def test_a_diverged_clients_control_variate_is_refused_with_its_contribution(name: str) -> None:
    broken = TASK.x.clone()
    broken[torch.from_numpy(PARTS[2])] = math.inf
    study = Study(
        replace(TASK, x=broken),
        PARTS,
        FLEET,
        StudySettings(name, rounds=15, even=True, knobs=Knobs(lr=0.1, beta=0.5)),
    )
    assert run_synchronous(study).points[-1].accuracy > 0.7
    assert study.server.common is not None
    assert torch.allclose(
        sum(own for own in study._own if own is not None) / 5, study.server.common, atol=1e-5
    )  # type: ignore[arg-type]


def planted(seed: int) -> tuple[Task, list[Indices], list[int]]:
    """Nine sites in three groups, which call the same clouds by different names."""
    task = blobs(seed, rows=450)
    groups = [site % 3 for site in range(9)]
    parts = np.array_split(np.random.default_rng(seed).permutation(450), 9)
    y = task.y.clone()
    for site, part in enumerate(parts):
        y[torch.from_numpy(part)] = (y[torch.from_numpy(part)] + groups[site]) % CLASSES
    return replace(task, y=y), list(parts), groups


@pytest.mark.parametrize("seed", range(20))
def test_clusters_are_the_planted_groups_and_beat_one_model(seed: int) -> None:
    task, parts, groups = planted(seed)
    sites = personalised(
        task,
        parts,
        fleet(9, (1.0,)),
        StudySettings(rounds=6, steps=5, server_lr=0.7, seed=seed),
        "clusters",
    )
    assert adjusted_rand(sites.cluster, groups) == 1.0
    assert all(own >= shared for own, shared in zip(sites.own, sites.one_for_all, strict=True))
    assert np.mean(sites.own) > np.mean(sites.one_for_all) + 0.2


def test_ditto_and_fine_tuning_beat_one_model_where_sites_disagree() -> None:
    task, parts, _ = planted(0)
    ways = {
        how: personalised(task, parts, fleet(9, (1.0,)), StudySettings(rounds=8, steps=5), how)
        for how in ("ditto", "tuned")
    }
    for sites in ways.values():
        assert np.mean(sites.own) > np.mean(sites.one_for_all) + 0.2
        assert set(sites.cluster) == {0}


def test_even_sites_are_one_cluster_and_names_stay() -> None:
    even = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([even[0] + 0.02 * even[1] * i for i in range(6)])
    assert clusters(rows) == [0] * 6
    assert clusters(torch.stack([even[0], -even[0], 2 * even[0], -3 * even[0]])) == [0, 1, 0, 1]
    assert clusters(rows[:1]) == [0]
    assert clusters(torch.eye(3), count=2) in ([0, 0, 1], [0, 1, 0], [0, 1, 1])
    assert same_names([5, 5, 7, 7], [1, 1, 0, 0]) == [5, 5, 7, 7]
    assert same_names([0, 0, 0, 1], [0, 1, 1, 2]) == [2, 0, 0, 1]
    assert adjusted_rand([0, 0, 1, 1], [1, 1, 0, 0]) == 1.0
    assert adjusted_rand([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(-0.5)
    for value in (0.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="member 2 is zero or no number") as caught:
            clusters(torch.cat([even[:2], torch.full((1, 50), value)]))
        assert "1 of 3" in caught.value.why
    with pytest.raises(ConfigError):
        clusters(torch.eye(3), count=4)


def test_personal_steps_are_their_papers() -> None:
    """On v²/2 around 3: Ditto rests between the own optimum and the anchor, Per-FedAvg steps along
    the gradient further down.
    """
    own, anchor = torch.tensor([3.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)

    def gradient(v: Tensor) -> Tensor:
        return v - own

    assert ditto(anchor, anchor, gradient, 500, 0.1, 0.5).item() == pytest.approx(3 / 1.5)
    assert ditto(anchor, anchor, gradient, 500, 0.1, 0.0).item() == pytest.approx(3.0)
    assert fine_tuned(anchor, gradient, 1, 0.5).item() == 1.5
    turn = InnerSteps(METHODS["per_fedavg"], Knobs(ahead=0.2), Served(anchor))
    at = turn.second_at(gradient(anchor), anchor)
    assert at is not None
    assert turn.direction(gradient(anchor), anchor, gradient(at)).item() == pytest.approx(-3 * 0.8)
    assert turn.control(anchor, 1) is None
    assert fine_tuned(anchor, gradient, 0, 0.5) is anchor


def test_what_cannot_be_simulated_is_refused() -> None:
    fine = StudySettings(rounds=3)
    assert [point["round"] for point in curve(simulate(TASK, PARTS, FLEET, fine))] == [0, 1, 2, 3]
    for wrong in (
        StudySettings("fed"),
        StudySettings(rounds=None),
        replace(fine, steps=0),
        replace(fine, knobs=Knobs(lr=-0.1)),
        replace(fine, name="fedbuff", seconds=math.nan),
        replace(fine, rule="krum"),
        replace(fine, rule="krum", f=1, name="fedbuff"),
        replace(fine, attack="storm", hostile=1),
        replace(fine, hostile=1),
        replace(fine, hostile=5, attack="nan"),
    ):
        with pytest.raises(ConfigError):
            simulate(TASK, PARTS, FLEET, wrong)
    with pytest.raises(ConfigError):
        simulate(TASK, PARTS, fleet(4, SPEEDS), fine)
    with pytest.raises(NotEnoughPeersError):
        simulate(TASK, PARTS, FLEET, replace(fine, rule="median", f=1, asked=2, steps=1))
    with pytest.raises(ConfigError):
        personalised(TASK, PARTS, FLEET, replace(fine, rounds=None, seconds=10.0), "ditto")
    assert math.isinf(fine.seconds)
