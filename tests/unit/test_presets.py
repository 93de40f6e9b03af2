"""Outer values by name or by what a run is: which are chosen, what the manifest records, what
people are told.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import OuterSettings
from atoll.node.manifest import Manifest, decode_manifest, parse_manifest
from atoll.node.manifest.presets import expected_rounds, explain_outer
from atoll.optim import OuterStep, outer_preset
from atoll.optim.model.momentum import ContributionMomentum
from atoll.optim.outer.presets import PRESETS, choose


@pytest.mark.parametrize(
    ("run", "name", "lr", "momentum"),
    [
        ({"rounds": 49}, "short", 0.9, 0.6),
        ({"rounds": 50}, "published", 0.7, 0.9),
        ({"rounds": None}, "published", 0.7, 0.9),
        ({"rounds": None, "peers": 1}, "alone", 0.7, 0.8),
        ({"rounds": 30, "peers": 1}, "short", 0.9, 0.6),
        ({"rounds": 500, "overlap": "late"}, "published-overlap", 0.4, 0.9),
        ({"rounds": None, "overlap": "eager"}, "published-overlap", 0.4, 0.9),
        ({"rounds": 30, "overlap": "late", "sync_every": 10}, "short-late", 1.0, 0.4),
        ({"rounds": 30, "overlap": "late", "sync_every": 10, "delay": 6}, "short-late", 1.0, 0.4),
        ({"rounds": 30, "overlap": "late", "sync_every": 10, "delay": 3}, "short-delay", 0.9, 0.6),
        (
            {"rounds": 30, "overlap": "late", "delay": 3},
            "short-late",
            1.0,
            0.4,
        ),  # half of what, nobody knows
        ({"rounds": 30, "overlap": "eager", "sync_every": 10}, "short-eager", 0.9, 0.0),
        ({"rounds": 30, "overlap": "eager", "sync_every": 10, "delay": 3}, "short-delay", 0.9, 0.6),
    ],
)
def test_which_is_for_which_run(run: dict[str, Any], name: str, lr: float, momentum: float) -> None:
    assert choose(**run).name == name
    assert choose(**run).outer == OuterSettings("nesterov", lr, momentum)


def test_there_is_one_for_every_run_and_each_can_be_had() -> None:
    chosen = {
        choose(rounds=rounds, peers=peers, sync_every=sync_every, overlap=overlap, delay=delay).name
        for rounds, peers, sync_every, overlap, delay in itertools.product(
            (1, 49, 50, None),
            (1, 2, 500),
            (None, 1, 10, 500),
            ("none", "late", "eager"),
            (None, 0, 5),
        )
    }
    by_name = {"co2", "sparse", "short-sparse", "short-muloco", "worker-momentum"}
    assert chosen | by_name == {
        preset.name for preset in PRESETS
    }  # the last where members send running means
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    for preset in PRESETS:
        assert OuterStep(preset.outer).settings == preset.outer
    assert outer_preset(49) == OuterSettings("nesterov", 0.9, 0.6)
    assert outer_preset(None, overlap="late") == OuterSettings("nesterov", 0.4, 0.9)
    assert outer_preset(30, sync_every=10, overlap="late", delay=3) == OuterSettings(
        "nesterov", 0.9, 0.6
    )


def run(outer: str, train: str = "sync_every = 20\nrounds = 35", more: str = "") -> Manifest:
    """A manifest with these lines in its tables."""
    return parse_manifest(
        f'schema = 1\nname = "tide"\n[train]\n{train}\n[train.outer]\n{outer}\n{more}'
    )


def test_a_manifest_records_the_values_and_not_the_name() -> None:
    """So that its id stays when a later release knows better values."""
    by_hand = run('optimizer = "nesterov"\nlr = 0.9\nmomentum = 0.6')
    assert (
        run('preset = "auto"')
        == run('preset = "auto"\npeers = 8')
        == run('preset = "short"')
        == by_hand
    )
    assert run('preset = "auto"').run_id == by_hand.run_id
    assert decode_manifest(run('preset = "short"').encode()) == by_hand
    assert run('preset = "auto"\ngovernor = true').settings().outer == OuterSettings(
        "nesterov", 0.9, 0.6, governor=True
    )
    assert run(
        'preset = "auto"\npeers = 1', "sync_every = 20\nrounds = 500"
    ).settings().outer == OuterSettings("nesterov", 0.7, 0.8)
    late = 'overlap = "late"\ndelay = 3\nsync_every = 20\nrounds = '
    assert (
        run('preset = "auto"', f"{late}500").train.mixing == 0.5
    )  # 0.4 and 0.9 want it, 0.9 and 0.6 do not
    assert [
        run('preset = "auto"', train).train.mixing
        for train in (f"{late}30", f"{late}500\nmixing = 0.0")
    ] == [None, 0.0]
    assert run('preset = "auto"', 'overlap = "eager"\nrounds = 500').train.mixing is None
    assert run('preset = "co2"', 'overlap = "late"').settings().outer == OuterSettings(
        "co2", 1.0, 0.5
    )


def test_where_members_send_running_means_the_outer_step_has_no_momentum() -> None:
    """Two momenta of 0.9 on top of each other diverge: it is one of the two."""
    robust = "[robust]\nrule = 'trimmed_mean'\nf = 2\nmomentum = 0.9"
    for train in ("rounds = 35", "rounds = 500", 'overlap = "late"\nrounds = 500'):
        found = run('preset = "auto"', train, robust).settings()
        assert found.outer == OuterSettings("sgd", 4.0, 0.0)
        assert found.worker_momentum == 0.9
    assert run('preset = "auto"', "rounds = 500").settings().outer.momentum == 0.9
    assert run("momentum = 0.6", "rounds = 500", robust).settings().outer.momentum == 0.6
    for outer in ("", "momentum = 0.61", 'optimizer = "adam"', 'preset = "published"'):
        with pytest.raises(ConfigError) as caught:
            run(outer, "rounds = 500", robust)
        assert caught.value.key == "$.train.outer.momentum"
        assert caught.value.hint == '[train.outer] preset = "worker-momentum"'


def _shrinks(outer: OuterSettings, beta: float, share: float) -> bool:
    """Whether a run nears the optimum of a quadratic, of whose distance a round takes ``share``."""
    anchor, state = torch.ones(1), torch.zeros(1)
    step, worker = OuterStep(outer), ContributionMomentum(1, beta)
    distances = []
    for _ in range(400):
        contribution = share * anchor
        worker.take(contribution)
        worker.settle(counted=True)
        step.apply(anchor, contribution, state, anchor)
        distances.append(abs(float(anchor)))
    return max(distances[-50:]) < max(distances[:50])


def test_on_a_quadratic_two_momenta_of_0_9_diverge_and_one_does_not() -> None:
    """Whether a round takes a twentieth of the way to the optimum, or all of it."""
    published, preset = OuterSettings("nesterov", 0.7, 0.9), OuterSettings("sgd", 4.0, 0.0)
    for share in (0.05, 0.2, 0.5, 1.0):
        assert not _shrinks(published, 0.9, share)
        assert _shrinks(published, 0.0, share)
        assert _shrinks(preset, 0.9, share)
    for share in (0.05, 0.2, 0.5):
        assert _shrinks(OuterSettings("nesterov", 0.7, 0.6), 0.9, share)


def test_how_long_a_run_is() -> None:
    """The built-in recipe ends with its schedule; of one's own script nobody knows."""
    assert expected_rounds(run("", "sync_every = 20\nrounds = 35")) == 35
    assert expected_rounds(run("", "sync_every = 20", "[train.inner]\nsteps = 900")) == 45
    assert (
        run('preset = "auto"', "sync_every = 20", "[train.inner]\nsteps = 900").train.outer.lr
        == 0.9
    )
    assert expected_rounds(run("", "sync_every = 20", '[model]\nentry = "local:mine"')) is None
    assert expected_rounds(run("", "round_s = 20.0")) is None


@pytest.mark.parametrize(
    ("outer", "train", "key"),
    [
        ('preset = "atuo"', "", "$.train.outer.preset"),
        ("preset = 3", "", "$.train.outer.preset"),
        ("preset = []", "", "$.train.outer.preset"),
        ("preset = {}", "", "$.train.outer.preset"),
        ('preset = "auto"\nlr = 0.5', "", "$.train.outer.lr"),
        ('preset = "auto"\nmomentum = 0.5', "", "$.train.outer.momentum"),
        ('preset = "auto"\npeers = 0', "", "$.train.outer.peers"),
        ('preset = "auto"\npeers = "four"', "", "$.train.outer.peers"),
        ("peers = 4", "", "$.train.outer.peers"),
        ('preset = "auto"', 'method = "local_sgd"', "$.train.outer.preset"),
    ],
)
def test_a_preset_that_means_nothing_is_refused_by_key(outer: str, train: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(outer, train)
    assert caught.value.key == key


def test_people_are_told_where_values_come_from_and_what_would_be_taken() -> None:
    assert explain_outer(run('preset = "auto"')) == (
        'preset "short", which is for 35 rounds, H = 20, overlap none, 4 peers. '
        + choose(rounds=35).source
    )
    published = explain_outer(run("lr = 0.7\nmomentum = 0.9"))
    assert published.startswith('preset "published". many rounds: as published (DiLoCo')
    assert (
        'For 35 rounds, H = 20, overlap none, 4 peers there is the preset "short": lr 0.9, momentum 0.6.'
        in published
    )
    own = explain_outer(run("lr = 0.3", "round_s = 60.0"), peers=1)
    assert own.startswith(
        'no preset. For a run without end, rounds by time or samples, overlap none, 1 peer there is the preset "alone"'
    )
    assert (
        explain_outer(run("", 'method = "local_sgd"'))
        == "plain averaging: there is nothing to choose"
    )
