"""A home grows by its log's entries alone, by as much as docs/internals/protocol/joining.md
says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from house import ROOT

from atoll.node.storage.journal import FileJournal

sys.path.append(str(ROOT / "scripts" / "bench"))
from bench_home import EVERY, KEPT_ROUNDS, NUMEL, play

ROUNDS = (100, 300)
RESULT_BYTES = 4 * NUMEL + 512  # its bytes and its trailer
RESULTS = 2 * EVERY + KEPT_ROUNDS + 4  # since the older checkpoint, and buffers that are warm
CHECKPOINTS_BYTES = 2 * (2 * 4 * NUMEL + 4096)  # two generations of anchor, momentum, headers


@pytest.mark.parametrize("members", [1, 3, 7])
def test_a_home_grows_by_its_entries_and_its_votes_go_at_the_next_start(
    tmp_path: Path, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With n members 220 + 320 n bytes a round, and less than twice that until the next start.
    What lies beside the journal has a bound that does not depend on the rounds.
    """
    monkeypatch.setattr(FileJournal, "WASTE", 4096)  # else the first MiB of votes stays
    for name in ("fsync", "fdatasync"):  # bytes are counted; no power is cut
        monkeypatch.setattr(os, name, lambda fd: None)
    bound = 220 + 320 * members
    few, many = (play(tmp_path / f"{rounds}", rounds, members) for rounds in ROUNDS)
    for found in (few, many):
        assert found["bytes_a_round"] <= bound
        assert found["bytes_a_round_before_start"] <= 2 * bound
        assert found["beside_journal_bytes"] <= RESULTS * RESULT_BYTES + CHECKPOINTS_BYTES
    assert many["beside_journal_bytes"] <= few["beside_journal_bytes"] + RESULT_BYTES
    grown = many["home_bytes"] - few["home_bytes"]
    assert grown <= (ROUNDS[1] - ROUNDS[0]) * bound + RESULT_BYTES
