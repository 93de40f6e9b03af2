"""A bound that follows a quantile of the contributions' norms, in masked rounds: where it goes, who
knows it, and what its noise is.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from msgspec import structs
from secure_kit import SECURE, TERMS
from session_table import LAYOUT, Peer, Table

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import PrivacySettings
from atoll.node.modes.secure.bound import bound_at, rule
from atoll.node.modes.secure.vectors import HALF, RingLayout, length_of
from atoll.node.session.mode_events import Unmasked

NORMS = (1.0, 2.0, 3.0, 4.0, 5.0)
PRIVATE = PrivacySettings(
    noise=0.1, clip=0.25, delta=1e-5, stop_at_epsilon=1e6, quantile=0.5, clip_rate=1.0
)


def contribute(peer: Peer, norm: float, name: str) -> None:
    """A vector of this norm."""
    peer.contribute(name, norm / math.sqrt(LAYOUT.numel))


def bounds(peer: Peer) -> dict[int, float]:
    """By entry: what the sum of that one made of the bound."""
    return {
        event.round: event.bound
        for event in peer.heard
        if isinstance(event, Unmasked) and event.bound is not None
    }


def test_the_bound_goes_to_the_quantile_and_is_the_same_everywhere() -> None:
    """Of five sites' norms the third is the median. One site dies on the way and learns the bound
    from the log when it is back.
    """
    table = Table(5, structs.replace(SECURE, privacy=PRIVATE))
    peers = table.all_in()
    for round_ in range(16):
        if round_ == 9:
            peers[4].kill()
            peers[4].start().attach()
            table.until(lambda: peers[4].session.completed == 9 and peers[4].inside)
        for peer, norm in zip(peers, NORMS, strict=True):
            contribute(peer, norm, f"{peer.name}/{round_}"[-16:])
        table.until(
            lambda round_=round_: all(peer.session.completed == round_ + 1 for peer in peers)
        )
    told = [bounds(peer) for peer in peers]
    together: dict[int, set[float]] = {}
    for each in told:
        for entry, bound in each.items():
            together.setdefault(entry, set()).add(bound)
    assert all(len(found) == 1 for found in together.values())
    way = [next(iter(together[entry])) for entry in sorted(together)]
    assert len(way) == 16
    assert way[0] == pytest.approx(PRIVATE.clip * math.exp(0.5), rel=0.2)  # nobody was within it
    assert all(2.3 < bound < 3.9 for bound in way[9:])
    assert sum(way[9:]) / len(way[9:]) == pytest.approx(3.0, rel=0.15)
    for peer in peers:
        assert bound_at(peer.session, PRIVATE, peer.machine.round) == way[-1]
    table.end()


def test_both_noises_together_are_what_is_accounted() -> None:
    """Measured: the vectors' deviation is z_Δ of the bound, the count's as said, and 1/z² = 1/z_Δ²
    + 1/(2 σ_b)².
    """
    numel, members, threshold, bound = 4000, 5, 4, 0.7
    privacy = structs.replace(PRIVATE, noise=2.0, count_noise=1.5)
    vectors = RingLayout(TERMS, privacy, numel, members, threshold, bound)
    assert vectors.multiplier**-2 + (2 * 1.5) ** -2 == pytest.approx(2.0**-2, rel=1e-12)
    rows = [vectors.words(torch.zeros(numel), 1, random.Random(seed)) for seed in range(60)]
    noisy = np.stack([row for row in rows if not isinstance(row, str)]).view(np.int32)
    assert noisy.shape == (60, length_of(TERMS, privacy, numel))
    honest = threshold - privacy.colluding
    deviation = float(noisy[:, :numel].std()) * vectors.ring.step * math.sqrt(honest)
    assert deviation == pytest.approx(vectors.multiplier * bound, rel=0.02)
    counts = noisy[:, numel] - HALF  # all were within
    assert float(np.sqrt((counts.astype(float) ** 2).mean())) / (2 * HALF) * math.sqrt(
        honest
    ) == pytest.approx(1.5, rel=0.35)
    fixed = RingLayout(
        TERMS, structs.replace(privacy, quantile=None), numel, members, threshold, bound
    )
    assert (fixed.multiplier, fixed.count_noise, length_of(TERMS, fixed.privacy, numel)) == (
        2.0,
        None,
        numel + 1,
    )


def test_a_sum_says_how_many_were_within() -> None:
    quiet = structs.replace(PRIVATE, noise=0.1, count_noise=0.06)
    vectors = RingLayout(TERMS, quiet, 3, 4, 4, 2.0)
    rows = [
        vectors.words(torch.full((3,), value), 1, random.Random(seed))
        for seed, value in enumerate((0.1, 0.5, 1.0, 9.0))
    ]
    total = np.sum([row for row in rows if not isinstance(row, str)], axis=0, dtype=np.uint32)
    found = vectors.summed(total)
    assert found.within == pytest.approx(1.0, abs=0.35)  # three of four, each half up or down
    assert found.weight == 4


def test_a_null_moves_the_count_by_half_a_unit_at_most() -> None:
    """A site whose vector holds NaN gives nothing but noise: between it and either answer of one
    that is finite lies what the count is accounted by.
    """
    quiet = structs.replace(PRIVATE, noise=0.1, count_noise=0.06)
    vectors = RingLayout(TERMS, quiet, 3, 4, 4, 2.0)

    def answer(value: float) -> float:
        words = vectors.words(torch.full((3,), value), 1, random.Random(7))
        assert not isinstance(words, str)
        return int(words[3:4].view("<i4")[0]) / (2 * HALF)

    within, beyond, null = answer(0.1), answer(9.0), answer(math.nan)  # by one noise
    assert (within - null, null - beyond) == (0.5, 0.5)


def test_a_count_that_costs_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves nothing"):
        rule(structs.replace(PRIVATE, noise=2.0, count_noise=1.0), 1.0)
    assert rule(structs.replace(PRIVATE, quantile=None), 1.0) is None
