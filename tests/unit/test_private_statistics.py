"""Running statistics in a run with noise: refused at attach, by layer, with the ways out."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import PrivacySettings, RunSettings, SecureSettings
from atoll.optim import SoloSwarm, attach

PRIVATE = RunSettings(
    sync_every=1,
    secure=SecureSettings(),
    privacy=PrivacySettings(noise=1.0, clip=1.0, delta=1e-5, stop_at_epsilon=8.0),
)


def attached(model: nn.Module, settings: RunSettings = PRIVATE) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, SoloSwarm(settings)).detach()


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True), nn.SyncBatchNorm(4)],
)
def test_layers_with_statistics_are_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(
        ConfigError, match=r"1 layer keeps running statistics, and the run has .privacy.: “1”"
    ) as refused:
        attached(nn.Sequential(nn.Linear(3, 4), layer))
    for way in ("GroupNorm", "LayerNorm", "track_running_stats=False", '"own"'):
        assert way in refused.value.hint


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    ],
)
def test_layers_without_are_not(layer: nn.Module) -> None:
    attached(nn.Sequential(nn.Linear(3, 4), layer))


def test_the_ways_out_are_ways_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    attached(model, msgspec.structs.replace(PRIVATE, buffers={"*running_*": "own"}))
    attached(model, RunSettings(sync_every=1))  # without noise they are averaged
