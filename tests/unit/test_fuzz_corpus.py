"""All that a fuzzer found worth keeping is read again: refused, or read, and nothing else. Defects
that it found are among it.
"""

from __future__ import annotations

import pytest
from fuzz_targets import CORPUS, TARGETS, corpus


@pytest.mark.parametrize("target", TARGETS)
def test_kept_bytes_are_read_or_refused(target: str) -> None:
    for data in corpus(target):
        TARGETS[target](data)


def test_every_file_is_of_a_target() -> None:
    assert {file.stem for file in CORPUS.glob("*.txt")} <= TARGETS.keys()
