"""Outer values by name or by what a run is: which are chosen, what the manifest records, what
people are told.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import PLAIN_MEAN, OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.cli.runs import EXAMPLE
from atoll.node.cli.templates import TEMPLATES
from atoll.node.local import LocalSwarm
from atoll.node.manifest import Manifest, decode_manifest, parse_manifest
from atoll.node.manifest.form import as_toml
from atoll.node.manifest.presets import averaging_text, explain_outer
from atoll.node.manifest.tables import OuterTable
from atoll.optim import OuterStep, SoloSwarm, outer_preset
from atoll.optim.model.momentum import ContributionMomentum
from atoll.optim.outer.presets import PRESETS, choose

COLD = OuterSettings("nesterov", 0.9, 0.6, warmup=40, hold=40)


@pytest.mark.parametrize(
    ("train", "more"),
    [
        ("sync_every = 20\nrounds = 10", ""),
        ("sync_every = 10\nrounds = 500", ""),
        ("sync_every = 20", ""),
        ("sync_every = 20", '[exchange]\ncodec = "int8_dither"'),
        ("sync_every = 70", ""),  # of 700 inner steps
        ("sync_every = 100\nrounds = 5", ""),
        ("sync_every = 49\nrounds = 9", ""),  # 441 steps
        ("rounds = 35", '[exchange]\ncodec = "fp32"\nplan = "ring"'),  # of 100 steps each
        ("", '[model]\nentry = "local:x"\n[train.inner]\nschedule = "constant"'),  # is not read
    ],
)
def test_a_run_that_chooses_nothing_and_was_measured_warms_up(train: str, more: str) -> None:
    found = run("governor = true\nclip_norm = 9.0", train, more)
    assert found.settings().outer == msgspec.structs.replace(COLD, governor=True, clip_norm=9.0)
    assert run("", train, more).settings().outer == COLD
    assert run("", train, more).settings().growth == 20
    assert run("", train, more) == run('preset = "cold"', train, more)


@pytest.mark.parametrize(
    ("train", "more"),
    [
        ("sync_every = 20\nrounds = 9", ""),
        ("sync_every = 70\nrounds = 4", ""),  # 280 steps
        ("sync_every = 9\nrounds = 500", ""),
        ("sync_every = 101\nrounds = 500", ""),
        ("round_s = 60.0\nrounds = 500", ""),
        ('overlap = "late"\nrounds = 500', ""),
        ('overlap = "eager"\nrounds = 500', ""),
        ("sync_every = 20\nlocal_after = 100", ""),
        ("sync_every = 20\nshare = 0.9", '[model]\nentry = "local:x"'),
        ("sync_every = 20", '[train.inner]\nschedule = "constant"'),
        ("sync_every = 20", '[train.inner]\noptimizer = "sgd"'),
        ("sync_every = 20", '[exchange]\ncodec = "int4"'),
        ("sync_every = 20", "[exchange]\nfeedback = true"),
        ("sync_every = 20", "[exchange]\nerror = 0.05"),
        ("sync_every = 20", '[exchange]\ncodecs = { "*" = "int4" }'),
        ("sync_every = 20", '[model]\nentry = "local:x"\n[exchange]\nfragments = 3'),
        ("sync_every = 20", '[model]\nentry = "local:x"\n[adapters]\nmode = "ffa"'),
        ("sync_every = 20", "[exchange.arrivals]\nquorum = 2"),
        ("sync_every = 20", "[robust]\nrule = 'median'\nf = 1"),
    ],
)
def test_a_run_that_chooses_nothing_and_was_not_measured_takes_the_plain_mean(
    train: str, more: str
) -> None:
    found = run("", train, more)
    assert found.settings().outer == PLAIN_MEAN == OuterSettings("sgd", 1.0, 0.0)
    assert found.train.mixing is None
    assert found.train.growth == 0
    stretched = 'preset = "auto"\nstretch = true'
    assert run(stretched, "sync_every = 20").settings().outer.kind == "sgd"


def test_a_script_without_a_manifest_means_the_same() -> None:
    assert RunSettings().outer == outer_preset("auto") == PLAIN_MEAN
    assert SoloSwarm().settings.effective_outer == PLAIN_MEAN
    assert LocalSwarm(2).settings.effective_outer == PLAIN_MEAN


@pytest.mark.parametrize("name", ["example", *TEMPLATES])
def test_the_example_and_all_templates_leave_the_choice_to_auto(name: str) -> None:
    """And get to the byte what they would get if they wrote it."""
    text = EXAMPLE if name == "example" else TEMPLATES[name]
    assert "\n[train.outer]" not in text
    found = parse_manifest(text)
    if found.kind == "federated":  # whose method is the outer step
        assert found.train.outer == OuterTable()
        return
    assert found.settings().outer == (COLD if name == "example" else PLAIN_MEAN)
    assert found.encode() == parse_manifest(f'{text}\n[train.outer]\npreset = "auto"\n').encode()


def test_each_preset_can_be_had_by_name() -> None:
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    for preset in PRESETS:
        assert OuterStep(preset.outer).settings == preset.outer == outer_preset(preset.name)
        robust = "[robust]\nrule = 'trimmed_mean'\nf = 2\nmomentum = 0.9"
        found = run(f'preset = "{preset.name}"', more=robust if "worker" in preset.name else "")
        assert found.settings().outer == (preset.growing or preset.outer)
    assert outer_preset("short") == OuterSettings("nesterov", 0.9, 0.6)
    assert outer_preset("published") == OuterSettings("nesterov", 0.7, 0.9)
    with pytest.raises(ConfigError, match="'shrot' is no preset"):
        outer_preset("shrot")


def run(outer: str, train: str = "sync_every = 20\nrounds = 35", more: str = "") -> Manifest:
    """A manifest with these lines in its tables."""
    return parse_manifest(
        f'schema = 1\nname = "tide"\n[train]\n{train}\n[train.outer]\n{outer}\n{more}'
    )


def test_a_manifest_records_the_values_and_not_the_name() -> None:
    """So that its id stays when a later release knows better values."""
    by_hand = run('optimizer = "nesterov"\nlr = 0.9\nmomentum = 0.6')
    assert run('preset = "short"') == by_hand
    assert run('preset = "short"').run_id == by_hand.run_id
    assert decode_manifest(run('preset = "short"').encode()) == by_hand
    text = "sync_every = 20\nrounds = 114\ngrowth = 20"  # as many steps as 35 rounds of 20
    cold = run("lr = 0.9\nmomentum = 0.6\nwarmup = 40\nhold = 40", text)
    assert cold == run("") == run('preset = "auto"') == run('preset = "auto"\npeers = 8')
    assert cold == run("peers = 8") == decode_manifest(run("").encode())
    assert run('preset = "plain-mean"') == run('optimizer = "sgd"\nlr = 1.0')
    late = 'overlap = "late"\ndelay = 3\nsync_every = 20\nrounds = 500'
    overlapping = 'preset = "published-overlap"'
    assert run(overlapping, late).train.mixing == 0.5  # which 0.4 and 0.9 want
    assert run(overlapping, f"{late}\nmixing = 0.0").train.mixing == 0.0
    assert run(overlapping, 'overlap = "eager"\nrounds = 500').train.mixing is None
    assert run('preset = "co2"', 'overlap = "late"').settings().outer == OuterSettings(
        "co2", 1.0, 0.5
    )


@pytest.mark.parametrize(
    ("outer", "missing"),
    [
        ("lr = 0.9", "momentum"),
        ("momentum = 0.9", "lr"),
        ('optimizer = "sgd"', "lr"),
        ('optimizer = "nesterov"\nlr = 0.9', "momentum"),
        ('optimizer = "adam"\nmomentum = 0.9', "lr"),
    ],
)
def test_half_a_choice_is_refused_with_what_is_missing(outer: str, missing: str) -> None:
    """Else the other half would be of another choice: 0.9 as lr, with the published momentum."""
    with pytest.raises(ConfigError, match=rf"and not \$\.train\.outer\.{missing}\n") as caught:
        run(outer)
    assert (caught.value.key, caught.value.code) == (f"$.train.outer.{missing}", "E414")


def test_a_whole_choice_is_taken_as_it_is() -> None:
    assert run("lr = 0.7\nmomentum = 0.9").settings().outer == OuterSettings("nesterov", 0.7, 0.9)
    for optimizer in ("sgd", "adagrad"):  # which have no momentum
        found = run(f'optimizer = "{optimizer}"\nlr = 0.5')
        assert found.settings().outer == OuterSettings(optimizer, 0.5, 0.0)
        with pytest.raises(ConfigError, match=f'{optimizer}" has no such setting') as caught:
            run(f'optimizer = "{optimizer}"\nlr = 0.5\nmomentum = 0.9')
        assert caught.value.key == "$.train.outer.momentum"
        assert parse_manifest(as_toml(found)) == found


def test_bytes_from_outside_keep_what_they_say() -> None:
    """A run that an earlier release made without outer values has the defaults of then."""
    plain = {"schema": 1, "name": "tide", "train": {"sync_every": 100}}
    earlier = decode_manifest(msgspec.msgpack.encode(plain))
    assert earlier.settings().outer == OuterSettings("nesterov", 0.7, 0.9)
    assert parse_manifest(as_toml(earlier)) == earlier
    sgd = plain | {"train": {"sync_every": 100, "outer": {"optimizer": "sgd"}}}
    assert decode_manifest(msgspec.msgpack.encode(sgd)).settings().outer == OuterSettings(
        "sgd", 0.7
    )


def test_where_members_send_running_means_the_outer_step_has_no_momentum() -> None:
    """Two momenta of 0.9 on top of each other diverge: it is one of the two."""
    robust = "[robust]\nrule = 'trimmed_mean'\nf = 2\nmomentum = 0.9"
    for outer, train in itertools.product(
        ("", 'preset = "auto"'), ("rounds = 35", 'overlap = "late"\nrounds = 500')
    ):
        found = run(outer, train, robust).settings()
        assert found.outer == OuterSettings("sgd", 2.0, 0.0)
        assert found.worker_momentum == 0.9
    mild, strong = "lr = 0.7\nmomentum = 0.6", "lr = 0.7\nmomentum = 0.61"
    assert run(mild, "rounds = 500", robust).settings().outer.momentum == 0.6
    for outer in (strong, f'optimizer = "adam"\n{strong}', 'preset = "published"'):
        with pytest.raises(ConfigError) as caught:
            run(outer, "rounds = 500", robust)
        assert caught.value.key == "$.train.outer.momentum"
        assert caught.value.hint.startswith("Leave [train.outer] out")


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
    published, preset = OuterSettings("nesterov", 0.7, 0.9), OuterSettings("sgd", 2.0, 0.0)
    for share in (0.05, 0.2, 0.5, 1.0):
        assert not _shrinks(published, 0.9, share)
        assert _shrinks(published, 0.0, share)
        assert _shrinks(preset, 0.9, share)
    for share in (0.05, 0.2, 0.5):
        assert _shrinks(OuterSettings("nesterov", 0.7, 0.6), 0.9, share)


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
        ("peers = 4\nlr = 0.7\nmomentum = 0.9", "", "$.train.outer.lr"),
        ('preset = "auto"', 'method = "local_sgd"', "$.train.outer.preset"),
        ("", 'method = "gradient_averaging"', "$.train.outer.lr"),
        ('preset = "auto"', 'method = "gradient_averaging"', "$.train.outer.preset"),
    ],
)
def test_a_preset_that_means_nothing_is_refused_by_key(outer: str, train: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(outer, train)
    assert caught.value.key == key


def test_people_are_told_where_values_come_from_and_what_would_be_taken() -> None:
    late = 'overlap = "late"\nrounds = 35'
    plain, cold = choose().source, choose(measured=True).source
    assert (
        explain_outer(run("", late))
        == f'preset "plain-mean", which "auto" takes for this run: {plain}'
    )
    assert explain_outer(run("")) == f'preset "cold", which "auto" takes for this run: {cold}'
    assert explain_outer(run("lr = 0.3\nmomentum = 0.1", late)).endswith(
        f'"auto" takes "plain-mean" for this run, sgd with lr 1: {plain}'
    )
    advice = (
        '"auto" takes "cold" for this run, nesterov with lr 0.9 and momentum 0.6 after 40 rounds '
        f"of the plain mean and 40 of warm-up, and rounds that are short at first: {cold}"
    )
    assert explain_outer(run('preset = "short"')).startswith('preset "short": ')
    published = explain_outer(run("lr = 0.7\nmomentum = 0.9"))
    assert published.startswith('preset "published": many rounds: as published (DiLoCo')
    assert published.endswith(f". {advice}")
    assert explain_outer(run("lr = 0.3\nmomentum = 0.1")) == f"no preset. {advice}"
    members = explain_outer(run("", more="[robust]\nrule = 'median'\nf = 1\nmomentum = 0.9"))
    assert members.startswith('preset "worker-momentum", which "auto" takes for this run: ')
    assert (
        explain_outer(run("", 'method = "local_sgd"'))
        == "plain averaging: there is nothing to choose"
    )


def test_what_a_verdict_on_averaging_says_of_a_federated_run_is_the_methods_and_its_noise() -> None:
    text = TEMPLATES["federated-hospital"]
    method = "fedavg, lr 1, a round once every site that takes part has done one epoch"
    noise = "; the noise of [privacy] is about 1.9 in every value of the mean of 4 sites"
    assert averaging_text(parse_manifest(text)).startswith(method + noise)
    head, _, rest = text.partition("\n[privacy]")
    plain = head.replace("# max_weight", "max_weight") + rest[rest.index("[join]") :]
    assert averaging_text(parse_manifest(plain)) == method  # the template says what it needs
    assert averaging_text(parse_manifest(EXAMPLE)).startswith("outer ")
