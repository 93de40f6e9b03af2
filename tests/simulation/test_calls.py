"""Programs of collective calls that nobody thought of, in virtual time: scripts/fuzz_calls.py plays
thousands.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
import torch
from calls_kit import judge, played, simulated

from atoll.collectives.api import all_reduce, enter
from atoll.node.local import LocalSwarm

# Programs drop handles, and members die with theirs.
pytestmark = pytest.mark.filterwarnings("ignore:operation .* was never waited for:RuntimeWarning")


@pytest.fixture(autouse=True)
def _collected() -> Generator[None]:
    """What is dropped here is collected here, where its warning is expected."""
    yield
    gc.collect()


def test_who_only_looks_hears_that_the_deadline_has_passed() -> None:
    def script(member: Any) -> tuple[int, str]:
        enter(member)
        member.sleep(3.0)
        if member.index:
            member.sleep(20.0)
            return 0, ""
        handle = all_reduce(member, torch.ones(3), op_id="x", everyone=True, deadline_s=5.0)
        looks = 0
        while not handle.done():
            looks += 1
            member.sleep(0.5)
        return looks, handle.wait().reason

    assert LocalSwarm(2).run(script)[0] == (10, "the deadline passed: p1 did not call")


def test_what_is_wrong_is_noticed() -> None:
    noticed = Counter[str]()
    for seed in range(20, 26):
        program, seen = played(seed)
        assert judge(program, seen) == []
        for each in seen:
            if each.step.kind != "reduce" or each.status != "committed":
                continue
            before = each.result, each.untouched, each.contributors, each.status
            each.result = [each.result[0] + 1]
            noticed["value"] += bool(judge(program, seen))
            each.result, each.contributors = before[0], each.contributors[1:]
            noticed["contributors"] += bool(judge(program, seen))
            each.contributors, each.status, each.untouched = before[2], "open", False
            noticed["written"] += bool(judge(program, seen))
            each.result, each.untouched, each.contributors, each.status = before
            noticed["all"] += 1
    assert noticed["all"] > 20
    assert noticed["value"] == noticed["contributors"] == noticed["written"] == noticed["all"]


# 3868: of values whose weighted sum overflows, though their mean does not.
@pytest.mark.parametrize("seed", [*range(12), 3868])
def test_what_a_program_of_calls_is_told_is_right(seed: int) -> None:
    faults, _ = simulated(seed)
    assert faults == []


@pytest.mark.slow
@pytest.mark.rota(7)
def test_hundreds_of_programs() -> None:
    ended = Counter[str]()
    for seed in range(1000, 1200):
        faults, calls = simulated(seed)
        assert faults == []
        ended += calls
    assert all(ended[f"reduce {status}"] > 10 for status in ("committed", "open", "raised"))
