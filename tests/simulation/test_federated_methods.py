"""A federated round is what its method defines: three hospitals of 960, 640 and 20 patients, the
smallest five times as slow a machine, held against the papers' formulas in numpy.
"""

from __future__ import annotations

from random import Random

import federated_numpy as numpy_says
import numpy as np
import pytest
import torch
from federated_numpy import D
from hospitals_kit import (
    BATCH,
    COUNTS,
    HELD_OUT,
    LR,
    METHODS,
    ROUNDS,
    START,
    Hospital,
    apart,
    manifest,
    ring_step,
    sites,
    train,
)

from atoll.collectives.swarm import RunSettings, SecureSettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest import parse_manifest
from atoll.node.modes.secure.vectors import RingLayout
from atoll.node.simulation.local_member import LocalMember

SPEEDS = (0.01, 0.01, 0.05)


def settings(federated: str, more: str = "", rounds: int = ROUNDS) -> RunSettings:
    return parse_manifest(manifest(federated, more, rounds), "run.toml").settings()


def play(run: RunSettings, speeds: tuple[float, ...] = SPEEDS) -> list[Hospital]:
    """Three sites train to the end of the run."""
    seen = dict[int, Hospital]()

    def script(member: LocalMember) -> None:
        seen[member.index] = train(member, member.index, member.clock)

    LocalSwarm(3, settings=run).run(script, step_s=speeds, limit_s=1e6)
    return [seen[site] for site in range(3)]


@pytest.mark.parametrize("weights", ["examples", "equal"])
@pytest.mark.parametrize("method", METHODS)
def test_each_rounds_anchor_is_that_of_the_papers_formulas(method: str, weights: str) -> None:
    seen = play(settings(f'{method}\nwork = {{ epochs = 1 }}\nweights = "{weights}"'))
    wanted = METHODS[method](sites(seen, equal=weights == "equal"))
    for hospital, count in zip(seen, COUNTS, strict=True):
        assert len(hospital.outcomes) == ROUNDS
        steps = [len(each) for each in hospital.indices[:ROUNDS]]
        assert steps == [-(-count // BATCH)] * ROUNDS  # one epoch, at whatever speed
        for outcome, counts in zip(hospital.outcomes, hospital.shares, strict=True):
            assert outcome.counted
            assert counts == {
                f"p{site}": COUNTS[site] if weights == "examples" else 1 for site in range(3)
            }
        for found, right in zip(hospital.anchors, wanted, strict=True):
            assert apart(found, right) < 1e-5


def test_the_model_serves_the_large_sites_as_fedavg_says() -> None:
    seen = play(settings('method = "fedavg"\nwork = { epochs = 1 }'))
    wanted = numpy_says.fedavg(sites(seen), START, ROUNDS, LR)
    for held_out in HELD_OUT[:2]:
        found = numpy_says.log_loss(seen[0].anchors[-1], held_out)
        assert found <= 1.02 * numpy_says.log_loss(wanted[-1], held_out)


@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        ("{ steps = 7 }", [7, 7, 7]),
        ("{ samples = 100 }", [4, 4, 5]),  # of 20 patients a batch is 20
        pytest.param("{ epochs = 2 }", [60, 40, 2], marks=pytest.mark.slow),
    ],
)
def test_a_sites_work_is_its_own_whatever_others_have_done(work: str, wanted: list[int]) -> None:
    seen = play(settings(f"work = {work}", rounds=3), speeds=(1.0, 3.0, 8.0))
    for hospital, steps in zip(seen, wanted, strict=True):
        assert [len(each) for each in hospital.indices[:3]] == [steps] * 3


@pytest.mark.parametrize(("heaviest", "step"), [(1000, ring_step(1000)), (1_000_000, 4 / 2**32)])
def test_masked_rounds_are_within_the_rings_steps(heaviest: int, step: float) -> None:
    """Each of three vectors is rounded to a step of the ring, up or down by chance: of one of 32
    bits, and of 64 where these would be too coarse.
    """
    run = settings("work = { epochs = 1 }", f"[secure]\nmax_weight = {heaviest}\nreach = 4.0")
    seen = play(run)
    wanted = numpy_says.fedavg(sites(seen), START, ROUNDS, LR)
    for hospital in seen:
        for t, (found, right) in enumerate(zip(hospital.anchors, wanted, strict=True)):
            # what a round was off by, the next begins at: errors add up, and SGD does not stretch
            assert np.abs(found - right).max() <= (t + 1) * step + 1e-6


@pytest.mark.slow
def test_a_private_site_is_clipped_first_and_weighted_then() -> None:
    """With next to no noise a round is Σ wᵢ clip(Δᵢ) / normaliser, wᵢ = min(n, most) / most."""
    clip, most, normaliser = 0.05, 800, 1.5
    run = settings(
        "work = { epochs = 1 }",
        f"[secure]\n[privacy]\nnoise = 0.1\nclip = {clip}\ndelta = 1e-5\nstop_at_epsilon = 1e6\n"
        f"most_examples = {most}\nnormaliser = {normaliser}",
    )
    seen = play(run)
    start = START
    for t in range(ROUNDS):
        moved = np.zeros(D + 1)
        for site in sites(seen):
            delta = site.local(start, t, LR, numpy_says.plain) - start
            shorter = min(1.0, clip / float(np.linalg.norm(delta)))
            moved += min(site.n, most) / most * shorter * delta
        found = seen[0].anchors[t] - start
        deviation = 0.1 * clip * np.sqrt(3 / 2) / normaliser  # of three, one may tell its noise
        assert np.abs(found - moved / normaliser).max() < 6 * deviation
        start = seen[0].anchors[t]


def test_the_mean_of_a_masked_metric_is_weighted_by_examples() -> None:
    """Not one over sites of 20 and 960 patients alike."""
    terms = SecureSettings(max_weight=1000, metrics=("accuracy",))
    vectors, told = RingLayout(terms, None, 2, 3, 3), (0.9, 0.6, 0.1)
    total = np.zeros(5, np.uint32)
    for count, accuracy in zip(COUNTS, told, strict=True):
        words = vectors.words(torch.zeros(2), count, Random(count), {"accuracy": accuracy})
        assert not isinstance(words, str)
        total += words
    found = vectors.summed(total)
    assert found.weight == sum(COUNTS)
    wanted = np.average(told, weights=COUNTS)
    assert found.metrics["accuracy"] == pytest.approx(wanted, abs=1e-4)
