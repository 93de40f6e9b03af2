"""A witness of a sum that states nothing holds a round up once: what it contributes is left out."""

from __future__ import annotations

import pytest
from kits.rounds.liars import LyingProcess
from kits.rounds.swarm import Options, SimSwarm

QUIET = Options(
    peers=(4, 4), faults=(), lying=1, lies=(), fragments=1, plan="butterfly", codec="fp32"
)


def played(seed: int) -> float:
    """Virtual seconds of ten rounds of a vector of one chunk, whose owner has the other
    contributors for witnesses.
    """
    swarm = SimSwarm(seed, QUIET)
    assert swarm.layout.numel == 1
    result = swarm.run()
    assert result.problem == ""
    return result.virtual_s


@pytest.mark.parametrize("seed", [11, 16])
def test_a_witness_that_states_nothing_holds_up_no_round_for_long(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_s = played(seed)
    monkeypatch.setattr(LyingProcess, "_states", lambda *_: [])
    assert played(seed) < honest_s + 6.0  # 15 s more, where it is drawn again and again
