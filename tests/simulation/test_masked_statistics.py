"""What layers learn beside their parameters, under masks and under noise: summed right, kept at its
site, or refused by name. The table is in docs/buffers.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hospitals_kit import manifest
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver
from torch.nn.utils.parametrizations import spectral_norm

from atoll.collectives.errors import ConfigError
from atoll.collectives.outcomes import Outcome
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest import parse_manifest
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm, attach

ROUNDS, STEPS, SITES = 2, 3, 3
PRIVATE = "[secure]\n[privacy]\nnoise = 0.5\nclip = 1.0\ndelta = 1e-5\nstop_at_epsilon = 1e4\n"
RUNNING = '[secure]\nreaches = { "*running_var" = 1e5, "*running_mean" = 1000.0 }\n'


class Observed(nn.Module):
    """A model with an observer, or a fake quantiser, between its layers."""

    def __init__(self, obs: nn.Module) -> None:
        super().__init__()
        self.first, self.obs, self.last = nn.Linear(3, 4), obs, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.obs(self.first(x)))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    return nn.Sequential(
        nn.Linear(3, 8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(8, 1)
    )


def spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1))


@dataclass
class Played:
    """By site: outcomes; what lay in its model as each round was offered; the anchor's statistics
    afterwards; what it has of its own at the end.
    """

    outcomes: list[list[Outcome]] = field(default_factory=lambda: [[] for _ in range(SITES)])
    offered: list[list[dict[str, Tensor]]] = field(
        default_factory=lambda: [[] for _ in range(SITES)]
    )
    anchors: list[dict[str, Tensor]] = field(default_factory=lambda: [{} for _ in range(SITES)])
    own: list[dict[str, Tensor]] = field(default_factory=lambda: [{} for _ in range(SITES)])


def play(
    make: Callable[[], nn.Module],
    more: str,
    buffers: str = "",
    *,
    seen: bool = False,
    steps: int = 60,
) -> Played:
    """Three sites whose inputs have a deviation of 100. ``seen``: models have met a batch before."""
    text = manifest('work = { steps = 3 }\nweights = "equal"', more, ROUNDS)
    text = text.replace("[model]", f"[model]\nbuffers = {buffers}") if buffers else text
    found = Played()

    def script(member: LocalMember) -> None:
        torch.manual_seed(0)
        model, chance = make(), torch.Generator().manual_seed(member.index)
        if seen:
            model(torch.randn(10, 3, generator=chance))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        outcomes = found.outcomes[member.index]
        attachment = attach(
            model, optimizer, member, examples=30, clock=member.clock, on_round=outcomes.append
        )
        for made in range(1, steps + 1):
            if attachment.done:
                break
            optimizer.zero_grad()
            model(torch.randn(10, 3, generator=chance) * 100).tanh().mean().backward()
            if made % STEPS == 0:
                statistics = {k: v.clone() for k, v in model.named_buffers()}
                found.offered[member.index].append(statistics)
            attachment.samples(10)
            optimizer.step()
        found.own[member.index] = {k: v.clone() for k, v in model.named_buffers()}
        with attachment.evaluate_anchor():
            found.anchors[member.index] = {k: v.clone() for k, v in model.named_buffers()}
        member.sleep(60.0)

    swarm = LocalSwarm(SITES, settings=parse_manifest(text, "run.toml").settings())
    swarm.run(script, step_s=1.0, limit_s=4000)
    return found


@pytest.mark.parametrize(("make", "at"), [(batch_norm, "1."), (instance_norm, "2.")])
def test_running_statistics_are_averaged_behind_masks_with_a_reach_of_their_own(
    make: Callable[[], nn.Module], at: str
) -> None:
    found = play(make, RUNNING)
    for outcomes in found.outcomes:
        assert [outcome.status for outcome in outcomes] == ["committed"] * ROUNDS
    for name, reach in (("running_mean", 1000.0), ("running_var", 1e5)):
        mean = torch.stack([site[ROUNDS - 1][at + name] for site in found.offered]).mean(0)
        for anchor in found.anchors:
            assert (anchor[at + name] - mean).abs().max() <= ROUNDS * reach / 2**24 + 1e-3
    assert float(found.anchors[0][at + "running_var"].max()) > 100


def test_a_statistic_beyond_the_reach_is_named_with_the_line_that_has_room_for_it() -> None:
    """And who is refused is not waited for: each site goes on, though all of an attempt are."""
    found = play(batch_norm, "[secure]\n", steps=2 * STEPS)
    for outcomes in found.outcomes:
        assert [outcome.status for outcome in outcomes] == ["lost", "lost"]
        for outcome in outcomes:
            assert "in 1.running_var, whose reach is 16" in outcome.reason
            assert '[secure] reaches = { "1.running_var" = 10000.0 }' in outcome.reason


@pytest.mark.parametrize("make", [batch_norm, instance_norm])
def test_running_statistics_are_refused_under_noise_or_stay_at_their_site(
    make: Callable[[], nn.Module],
) -> None:
    with pytest.raises(ConfigError, match="1 layer keeps running statistics"):
        play(make, PRIVATE)
    found = play(make, PRIVATE, '{ "*running_*" = "own" }')
    for outcomes in found.outcomes:
        assert [outcome.status for outcome in outcomes] == ["committed"] * ROUNDS
    variances = [own[name] for own in found.own for name in own if name.endswith("running_var")]
    assert len({tuple(variance.tolist()) for variance in variances}) == SITES


@pytest.mark.parametrize(("more", "kind"), [("[secure]\n", "mean"), (PRIVATE, "own")])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (MinMaxObserver, ("obs.min_val", "obs.max_val")),
        (FakeQuantize, ("obs.scale", "obs.activation_post_process.min_val")),
    ],
)
def test_observers_nobody_declared_are_named_with_a_class_that_the_run_can_have(
    make: Callable[[], nn.Module],
    names: tuple[str, ...],
    more: str,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "atoll"):
        found = play(lambda: Observed(make()), more)
    told = [each.getMessage() for each in caplog.records if "learnt here" in each.getMessage()]
    assert len(told) == SITES
    for name in names:
        assert all(f'"{name}" = "{kind}"' in each for each in told)
    for outcomes in found.outcomes:
        assert [outcome.status for outcome in outcomes] == ["committed"] * ROUNDS


def test_observers_are_averaged_behind_masks_once_they_have_seen_a_batch() -> None:
    declared = '{ "obs.min_val" = "mean", "obs.max_val" = "mean" }'
    reaches = '[secure]\nreaches = { "obs.*" = 1e4 }\n'
    model = Observed(MinMaxObserver())
    run = RunSettings(sync_every=1, buffers={"obs.m*_val": "mean"})
    with pytest.raises(ConfigError, match="holds NaN or infinity") as refused:
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SoloSwarm(run))
    assert "call the model on one, once" in refused.value.hint
    with pytest.raises(ConfigError, match="layer keeps running statistics") as refused:
        play(lambda: Observed(MinMaxObserver()), PRIVATE, declared, seen=True)
    assert '"obs.max_val" = "own", "obs.min_val" = "own"' in refused.value.hint
    found = play(lambda: Observed(MinMaxObserver()), reaches, declared, seen=True)
    for name in ("obs.min_val", "obs.max_val"):
        mean = torch.stack([site[ROUNDS - 1][name] for site in found.offered]).mean()
        for anchor in found.anchors:
            assert float((anchor[name] - mean).abs()) <= ROUNDS * 1e4 / 2**24 + 1e-3


@pytest.mark.parametrize("more", ["[secure]\n", PRIVATE])
def test_vectors_of_spectral_norm_stay_at_their_site(more: str) -> None:
    found = play(spectral, more)
    for outcomes in found.outcomes:
        assert [outcome.status for outcome in outcomes] == ["committed"] * ROUNDS


def test_a_pattern_that_decides_for_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="decides by it for none of the model's"):
        play(spectral, RUNNING)


@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_site_whose_update_is_not_finite_is_in_the_private_sum_with_nothing(
    poisoned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Who is in a sum all see, and no noise is over it: a site that stayed away because of its data
    would tell of them.
    """
    text = manifest('work = { steps = 3 }\nweights = "equal"', PRIVATE, ROUNDS)
    outcomes: list[list[Outcome]] = [[] for _ in range(SITES)]

    def script(member: LocalMember) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        heard = outcomes[member.index]
        attachment = attach(
            model, optimizer, member, examples=30, clock=member.clock, on_round=heard.append
        )
        while not attachment.done:
            optimizer.zero_grad()
            x = torch.ones(10, 3) * (float("nan") if member.index == poisoned else 1.0)
            model(x).mean().backward()
            attachment.samples(10)
            optimizer.step()
        with attachment.evaluate_anchor():
            assert all(bool(each.isfinite().all()) for each in model.parameters())
        member.sleep(60.0)

    swarm = LocalSwarm(SITES, settings=parse_manifest(text, "run.toml").settings())
    swarm.run(script, step_s=1.0, limit_s=4000)
    for heard in outcomes:
        assert [(each.status, len(each.contributors)) for each in heard] == [
            ("committed", SITES)
        ] * ROUNDS
    told = [each.getMessage() for each in caplog.records if "but noise" in each.getMessage()]
    assert [each.startswith("work of 30 samples") for each in told] == [True] * ROUNDS
    assert [peer.storages[0].spent.noisy() for peer in swarm.peers] == [ROUNDS] * SITES
