"""Federated rounds of real nodes, held against the papers' formulas in numpy: hospitals of 960, 640
and 20 patients, the smallest five times as slow a machine, on the batches that each has taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import federated_numpy as numpy_says
import numpy as np
import pytest
from federated_numpy import Array, D
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
)
from seeds import RARE
from swarm_kit import Peers

from atoll.collectives.codec_names import FACTS
from atoll.node.manifest.manifest import MOST_MASKED_STEPS

pytestmark = [*RARE]

PEER = Path(__file__).parent / "hospital_peer.py"
STEPS = [-(-count // BATCH) for count in COUNTS]
STEP_S = (0.005, 0.005, 0.025)
TOGETHER = "start_with = 3"


def nodes(folder: Path, text: str) -> tuple[list[Hospital], list[str]]:
    """Three sites with a node each train to the run's end: what they did, and their ids."""
    with Peers(folder, 3, 0, PEER, manifest=text) as swarm:
        for site, peer in enumerate(swarm.all):
            peer.say(do="train", step_s=STEP_S[site], out=str(folder / f"{site}.seen"))
        for peer in swarm.all:
            peer.expect("trained")
        ids = [peer.peer for peer in swarm.all]
    return [Hospital.load(folder / f"{site}.seen") for site in range(3)], ids


def as_defined(seen: list[Hospital], ids: list[str], weights: list[int]) -> None:
    """Each round is of all, each by its weight, after its own work."""
    for hospital, steps in zip(seen, STEPS, strict=True):
        assert len(hospital.outcomes) == ROUNDS
        assert [len(each) for each in hospital.indices[:ROUNDS]] == [steps] * ROUNDS
        assert hospital.shares == [dict(zip(ids, weights, strict=True))] * ROUNDS
        assert all(outcome.counted for outcome in hospital.outcomes)


@pytest.mark.parametrize("method", METHODS)
def test_each_rounds_anchor_is_that_of_the_papers_formulas(method: str, tmp_path: Path) -> None:
    text = manifest(f"{method}\nwork = {{ epochs = 1 }}", train=TOGETHER)
    seen, ids = nodes(tmp_path, text)
    as_defined(seen, ids, list(COUNTS))
    wanted = METHODS[method](sites(seen))
    worst = max(
        apart(found, right)
        for hospital in seen
        for found, right in zip(hospital.anchors, wanted, strict=True)
    )
    print(f"{method!r}: at most {worst:.3g} apart")
    assert worst < 1e-5
    if method == 'method = "fedavg"':
        for held_out in HELD_OUT[:2]:
            found = numpy_says.log_loss(seen[0].anchors[-1], held_out)
            assert found <= 1.02 * numpy_says.log_loss(wanted[-1], held_out)


def adam(means: list[Array]) -> Array:
    m, v = np.zeros(D + 1), np.zeros(D + 1)
    for mean in means:
        m, v = 0.9 * m + 0.1 * mean, 0.99 * v + 0.01 * mean**2
    return 0.05 * m / (np.sqrt(v) + 1e-3)


MASKED: dict[str, Callable[[list[Array]], Array]] = {
    'method = "fedavg"': lambda means: means[-1],
    'method = "fedavgm"\nmomentum = 0.5': lambda means: sum(
        (0.5**age * mean for age, mean in enumerate(reversed(means))), np.zeros(D + 1)
    ),
    'method = "fedadam"\nlr = 0.05': adam,
    'method = "fedprox"\nmu = 0.1': lambda means: means[-1],
}
"""How far a round moves the model, by the mean changes of all rounds so far."""


@pytest.mark.parametrize("method", MASKED)
def test_masked_rounds_are_within_the_rings_steps(method: str, tmp_path: Path) -> None:
    """The sum of three vectors, each rounded up or down by chance, is a step off the mean at most.
    What that makes of the outer step, and what earlier rounds' did, is computed.
    """
    text = manifest(
        f"{method}\nwork = {{ epochs = 1 }}",
        "[secure]\nmax_weight = 1000\nreach = 4.0",
        ROUNDS,
        TOGETHER,
    )
    seen, _ = nodes(tmp_path, text)
    for hospital, steps in zip(seen, STEPS, strict=True):
        assert [len(each) for each in hospital.indices[:ROUNDS]] == [steps] * ROUNDS
        assert np.array_equal(hospital.anchors, seen[0].anchors)
    mu, step, worst = 0.1 if "fedprox" in method else 0.0, ring_step(1000), 0.0
    at, means, replayed, moved = START, list[Array](), sites(seen), MASKED[method]
    for t, found in enumerate(seen[0].anchors):

        def pulled(g: Array, y: Array, start: Array = at) -> Array:
            return g + mu * (y - start)

        ends = [site.local(at, t, LR, pulled) for site in replayed]
        means.append(numpy_says.averaged(ends, replayed) - at)
        right = moved(means)
        room = sum(
            np.abs(moved([*means[:s], means[s] + step, *means[s + 1 :]]) - right)
            for s in range(t + 1)
        )
        room = 1.01 * room + 2.0**-23 * (1 + np.abs(found))  # and float32's
        worst = max(worst, float((np.abs(found - at - right) / room).max()))
        at = found
    print(f"{method!r}: at most {worst:.3g} of what the ring's steps leave")
    assert worst <= 1


def test_masked_fednova_is_within_the_rings_steps(tmp_path: Path) -> None:
    """Changes over steps, and their mean number, each a step of their own off at most: x moves by
    τ times the mean direction, so by both errors at once.
    """
    text = manifest(
        'method = "fednova"\nwork = { epochs = 1 }',
        "[secure]\nmax_weight = 1000\nreach = 4.0",
        ROUNDS,
        TOGETHER,
    )
    seen, _ = nodes(tmp_path, text)
    for hospital, steps in zip(seen, STEPS, strict=True):
        assert [len(each) for each in hospital.indices[:ROUNDS]] == [steps] * ROUNDS
        assert np.array_equal(hospital.anchors, seen[0].anchors)
    step, longer = ring_step(1000), ring_step(1000, MOST_MASKED_STEPS)
    at, worst, replayed = START, 0.0, sites(seen)
    share = np.array(COUNTS) / sum(COUNTS)
    for t, found in enumerate(seen[0].anchors):
        ends = [site.local(at, t, LR, numpy_says.plain) for site in replayed]
        directions = np.array([(end - at) / made for end, made in zip(ends, STEPS, strict=True)])
        mean, many = share @ directions, float(share @ np.array(STEPS))
        room = many * step + longer * (np.abs(mean) + step)
        room = 1.01 * room + 2.0**-23 * (1 + np.abs(found))  # and float32's
        worst = max(worst, float((np.abs(found - at - many * mean) / room).max()))
        at = found
    print(f"fednova, masked: at most {worst:.3g} of what the ring's steps leave")
    assert worst <= 1


def test_int8_rounds_are_within_the_codecs_told_error(tmp_path: Path) -> None:
    text = manifest(
        "work = { epochs = 1 }", '[exchange]\ncodec = "int8"\nexact = false', train=TOGETHER
    )
    seen, ids = nodes(tmp_path, text)
    as_defined(seen, ids, list(COUNTS))
    at, replayed, errors = START, sites(seen), list[float]()
    for t, found in enumerate(seen[0].anchors):
        changes = [site.local(at, t, LR, numpy_says.plain) - at for site in replayed]
        right = numpy_says.averaged(changes, replayed)
        longest = max(float(np.linalg.norm(change)) for change in changes)
        errors.append(float(np.linalg.norm(found - at - right)) / longest)
        at = found
    print(f"int8: {[f'{error:.2g}' for error in errors]}, told {FACTS['int8'].round_error}")
    assert float(np.sqrt(np.mean(np.square(errors)))) <= FACTS["int8"].round_error
