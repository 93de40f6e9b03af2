"""EDiT's pseudo-gradient penalty: a member leaves its own outliers out, a mean that is too long is
clipped.
"""

import math
import random
import statistics

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.layout import Layout, TensorSpec
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest import parse_manifest
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach
from atoll.optim.outer import OuterStep
from atoll.optim.rounds.outliers import IN_A_ROW, LEAST, NormWatch


def test_statistics_are_plain_ones_for_fifty_rounds_and_move_afterwards() -> None:
    watch, rng = NormWatch(3.0), random.Random(0)
    norms = [10 + rng.gauss(0, 0.1) for _ in range(50)]
    assert not any(watch.is_outlier(norm, 8) for norm in norms)
    assert watch.mean == pytest.approx(statistics.fmean(norms))
    assert watch.variance == pytest.approx(statistics.pvariance(norms))
    mean, variance = watch.mean, watch.variance
    assert not watch.is_outlier(11.0, 8)
    assert watch.mean == pytest.approx(mean + 0.02 * (11 - mean))
    assert watch.variance == pytest.approx(0.98 * (variance + 0.02 * (11 - mean) ** 2))


def test_an_outlier_is_far_above_and_is_not_remembered() -> None:
    watch = NormWatch(3.0)
    assert not any(watch.is_outlier(norm, 8) for norm in (1.0, 90.0, 1.0, 1.0, 1.0)[:LEAST])
    quiet = NormWatch(3.0)
    for _ in range(LEAST):
        assert not quiet.is_outlier(2.0, 8)
    assert not quiet.is_outlier(0.1, 8)  # small ones never are
    quiet = NormWatch(3.0, mean=2.0, count=9)
    assert not quiet.is_outlier(2.59, 8)  # a deviation is at least a tenth
    before = quiet.mean
    assert quiet.is_outlier(2.8, 8)
    assert quiet.mean == before


def test_after_some_in_a_row_that_is_what_is_usual() -> None:
    watch = NormWatch(3.0, mean=1.0, count=9)
    assert [watch.is_outlier(5.0, 8) for _ in range(IN_A_ROW + 2)] == [True] * 3 + [False] * 2
    assert (watch.mean, watch.count) == (5.0, 2)
    watch = NormWatch(3.0, mean=1.0, count=9)
    for norm in (5.0, 5.0, 1.0, 5.0, 5.0, 5.0):  # not in a row
        assert watch.is_outlier(norm, 8) == (norm > 1)


def test_turns_that_were_cut_short_are_not_looked_at() -> None:
    watch = NormWatch(3.0, mean=1.0, count=9, samples=80)
    assert not watch.is_outlier(9.0, 39)
    assert (watch.mean, watch.count, watch.samples) == (1.0, 9, 80)
    assert watch.is_outlier(9.0, 40)


def test_a_mean_that_is_too_long_is_scaled_down() -> None:
    specs = (TensorSpec("a", (2,), 0), TensorSpec("b", (1,), 2), TensorSpec("m", (1,), 3, "mean"))
    step = OuterStep(OuterSettings("sgd", 1.0, clip_norm=5.0), Layout(specs, 4))
    assert step.whole
    assert step.state_numel(4) == 4  # it remembers nothing
    anchor, out, state = torch.zeros(4), torch.empty(4), torch.zeros(4)
    step.apply(anchor, torch.tensor([6.0, 0.0, 8.0, 100.0]), state, out)
    assert out.tolist() == [-3.0, 0.0, -4.0, -100.0]  # statistics are averaged, not clipped
    step.apply(anchor, torch.tensor([3.0, 0.0, 4.0, 0.0]), state, out)
    assert out.tolist() == [-3.0, 0.0, -4.0, 0.0]


def test_the_governor_sees_what_is_clipped() -> None:
    step = OuterStep(OuterSettings("sgd", 1.0, governor=True, clip_norm=1.5))
    state, anchor, out = torch.zeros(step.state_numel(1)), torch.zeros(1), torch.empty(1)
    for _ in range(6):
        step.apply(anchor, torch.ones(1), state, out)
    assert out.item() == -1.0
    step.apply(anchor, torch.full((1,), 6.0), state, out)
    assert out.item() == -0.75  # half the rate


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_no_length_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="clip_norm"):
        OuterStep(OuterSettings("nesterov", 0.7, clip_norm=value))


def test_a_member_leaves_a_bad_round_out_and_the_others_go_on() -> None:
    bad_round, outcomes = 7, dict[int, list[Outcome]]()

    def script(swarm: Swarm) -> torch.Tensor:
        assert isinstance(swarm, LocalMember)
        torch.manual_seed(swarm.index)
        net = nn.Linear(20, 20)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        mine = outcomes.setdefault(swarm.index, [])
        sync = attach(net, optimizer, swarm, batch_size=8, clock=swarm.clock, on_round=mine.append)
        while not sync.done:
            inputs = torch.randn(8, 20)
            if swarm.index == 2 and sync.round == bad_round:
                inputs *= 4  # a bad batch: sixteen times the gradient
            (net(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.sleep(0.1)
        with sync.evaluate_anchor():
            return torch.cat([p.detach().flatten() for p in net.parameters()])

    settings = RunSettings(sync_every=4, rounds=12, codec="fp32", outliers=3.0)
    members = LocalSwarm(3, settings=settings).run(script)
    assert all(torch.equal(each, members[0]) for each in members)
    counted = {
        outcome.round: [share.samples for share in outcome.contributors]
        for outcome in outcomes[0]
        if outcome.status == "committed"
    }
    assert [sum(counted[round_]) for round_ in range(3, bad_round + 1)] == [96] * 5
    # nothing of the 32 samples with the bad batch: one step from the anchor, asked for by the others
    assert sum(counted[bad_round + 1]) == 64 + 8


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        (
            "train = { outliers = 3.0, method = 'gradient_averaging', outer = { optimizer = 'sgd', lr = 0.1 } }",
            "$.train.outliers",
        ),
        ("train = { outliers = 3.0 }\nkind = 'federated'", "$.train.outliers"),
        (
            "train = { outliers = 3.0 }\nexchange = { arrivals = { quorum = 2 } }",
            "$.exchange.arrivals",
        ),
        ("train = { outliers = 0.0 }", "$.train.outliers"),
        ("train = { outer = { clip_norm = 0.0 } }", "$.train.outer.clip_norm"),
    ],
)
def test_what_outliers_do_not_go_with(tables: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(f'schema = 1\nname = "x"\n{tables}')
    assert caught.value.key == key


def test_a_manifest_says_both() -> None:
    settings = parse_manifest(
        'schema = 1\nname = "x"\ntrain = { outliers = 3.0, outer = { clip_norm = 10.0 } }'
    ).settings()
    assert (settings.outliers, settings.outer.clip_norm) == (3.0, 10.0)
