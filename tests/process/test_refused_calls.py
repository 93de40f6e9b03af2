"""A system that refuses one call of a node with one errno: of all cases that
scripts/check_refusals.py plays, five of each phase a day.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from refusals_kit import PHASES, Playing, cases
from refusing_kit import missing
from seeds import trials

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
DAILY = 5


@pytest.mark.parametrize("phase", PHASES)
def test_a_node_says_what_is_refused_and_goes_on(tmp_path: Path, phase: str) -> None:
    every = list(cases(phase))
    with Playing(phase, tmp_path) as playing:
        for number in trials(len(every), DAILY):
            found = playing.play(*every[number % len(every)])
            assert not found.faults, found


@pytest.mark.parametrize(
    ("phase", "call", "error"),
    [
        ("start", "connect", errno.EPERM),  # 120 s: the word that it is up never came
        ("stop", "create", errno.ENOSPC),  # ended after 35 s: no vote can be written meanwhile
        ("stop", "open", errno.ENOSPC),  # `down` asked first who trains
        ("stop", "unlink", errno.EIO),  # "the node failed", for want of taking its socket away
    ],
)
def test_what_went_wrong_once_does_not_again(
    tmp_path: Path, phase: str, call: str, error: int
) -> None:
    with Playing(phase, tmp_path) as playing:
        assert not playing.play(call, error).faults
