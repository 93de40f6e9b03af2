"""Callers of collectives that do what nobody thought of, among three real nodes whose scripts are
threads of this test.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bad_input_kit import three_members
from seeds import RARE

from atoll.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    check_state,
    reduce_scatter,
)
from atoll.collectives.errors import AtollError, LocalProtocolError, SwarmClosedError
from atoll.collectives.outcomes import Outcome
from atoll.node.joining import RunSwarm

pytestmark = [*RARE]

PATIENCE_S = 60.0  # a bound for hangs
NUMEL = 5000


@pytest.fixture(scope="module")
def swarms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunSwarm]]:
    """Three members that all see each other."""
    with three_members(tmp_path_factory.mktemp("odd")) as swarms:
        yield swarms


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What these return or raise (an AtollError) when they are called at the same time."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except AtollError as error:
            found[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), found
    return found


def test_default_dtype_device_and_inference_mode_of_a_script_change_nothing(
    swarms: list[RunSwarm],
) -> None:
    ones = [torch.full((NUMEL,), float(index + 1)) for index in range(3)]
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        for codec in ("", "fp32", "bf16", "int4"):
            flats = [flat.clone() for flat in ones]

            def reduce(
                index: int, codec: str = codec, flats: list[torch.Tensor] = flats
            ) -> Outcome:
                with torch.inference_mode(index == 1 and codec != "fp32"):
                    return all_reduce(
                        swarms[index], flats[index], op_id=f"default {codec}", op="sum", codec=codec
                    ).wait()

            outcomes = together(*(lambda index=index: reduce(index) for index in range(3)))
            assert [len(outcome.contributors) for outcome in outcomes] == [3] * 3
            assert all(torch.equal(flat, flats[0]) for flat in flats)
            assert all(torch.allclose(flat, torch.full_like(flat, 6.0)) for flat in flats)
        gathered = together(
            *(lambda i=i: all_gather(swarms[i], ones[i], op_id="gather").wait() for i in range(3))
        )
        assert all(
            torch.equal(found.tensors[swarms[i].peer], ones[i])
            for found in gathered
            for i in range(3)
        )
        shares = together(
            *(
                lambda i=i: reduce_scatter(
                    swarms[i], ones[i], op_id="scatter", op="max", codec="fp32"
                ).wait()
                for i in range(3)
            )
        )
        assert sorted(
            (found.start, found.values.numel(), found.values.max().item()) for found in shares
        ) == [
            (0, 1667, 3.0),
            (1667, 1667, 3.0),
            (3334, 1666, 3.0),
        ]
        assert all(
            outcome.counted
            for outcome in together(*(lambda s=s: barrier(s, op_id="bar").wait() for s in swarms))
        )
        assert all(
            check.agreed
            for check in together(
                *(lambda s=s: check_state(s, {"x": ones[0]}, op_id="state").wait() for s in swarms)
            )
        )

        def contribute(swarm: RunSwarm) -> Outcome:
            return swarm.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(PATIENCE_S)

        assert [
            outcome.status for outcome in together(*(lambda s=s: contribute(s) for s in swarms))
        ] == ["committed"] * 3
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_odd_names_serve_and_controls_and_what_is_no_text_are_refused(
    swarms: list[RunSwarm],
) -> None:
    for op_id in ("../../x", "a b", "op/1/fp32", "%s{}", "💥" * 64):
        outcomes = together(
            *(lambda s=s, o=op_id: all_reduce(s, torch.ones(3), op_id=o).wait() for s in swarms)
        )
        assert [len(outcome.contributors) for outcome in outcomes] == [3] * 3
    for wrong in ("\ud800", "", "x" * 65, b"bytes", 7, None):
        words = "op_id is of 1 to 64" if isinstance(wrong, str) else "op_id is a str, not"
        with pytest.raises(LocalProtocolError, match=words):
            all_reduce(swarms[0], torch.ones(3), op_id=wrong)  # type: ignore[arg-type]
    for wrong in ("\0", "a b\nc", "\u202e"):  # what a terminal would obey
        with pytest.raises(LocalProtocolError):
            all_reduce(swarms[0], torch.ones(3), op_id=wrong).wait()
    for root in (None, 7):
        with pytest.raises(LocalProtocolError, match="root"):
            broadcast(swarms[0], torch.ones(3), root=root, op_id="root")  # type: ignore[arg-type]
    for tensors in ({1: torch.ones(3)}, {}, [torch.ones(3)], {"x": None}):
        with pytest.raises(LocalProtocolError, match="takes"):
            check_state(swarms[0], tensors, op_id="names")  # type: ignore[arg-type]


def test_several_threads_call_and_wait(swarms: list[RunSwarm]) -> None:
    again = uuid.uuid4().hex[:6]  # where the test is run once more
    for turn in range(5):
        flats = [torch.ones(NUMEL) for _ in swarms]
        handles = [
            all_reduce(s, flat, op_id=f"handle {turn} {again}", op="sum")
            for s, flat in zip(swarms, flats, strict=True)
        ]
        outcomes = together(*(handle.wait for handle in handles for _ in range(4)))
        assert [getattr(outcome, "status", outcome) for outcome in outcomes] == ["committed"] * 12
        assert [flat.unique().tolist() for flat in flats] == [[3.0]] * 3
    same = together(
        *[
            lambda s=s: all_reduce(s, torch.ones(3), op_id=f"same {again}").wait()
            for s in swarms
            for _ in range(4)
        ]
    )
    for first in range(0, 12, 4):
        kinds = sorted(type(found).__name__ for found in same[first : first + 4])
        assert kinds == ["LocalProtocolError"] * 3 + ["Outcome"]
    many = together(
        *[
            lambda s=s, n=n: all_reduce(
                s, torch.ones(NUMEL), op_id=f"many {n} {again}", everyone=True
            ).wait()
            for n in range(8)
            for s in swarms
        ]
    )
    assert [len(outcome.contributors) for outcome in many] == [3] * 24


def test_a_caller_that_goes_away_and_one_that_has_gone(swarms: list[RunSwarm]) -> None:
    """The last test: the third member closes under way."""
    dropped = all_reduce(swarms[2], torch.ones(3), op_id="dropped", op="sum")
    with pytest.warns(RuntimeWarning, match="operation 'dropped' was never waited for"):
        del dropped
    outcomes = together(
        *(
            lambda s=s: all_reduce(s, torch.ones(3), op_id="dropped", op="sum").wait()
            for s in swarms[:2]
        )
    )
    assert [len(outcome.contributors) for outcome in outcomes] == [3, 3]
    flats = [torch.full((NUMEL,), 2.0**index) for index in range(3)]
    handles = [
        all_reduce(s, flat, op_id="closing", op="sum")
        for s, flat in zip(swarms, flats, strict=True)
    ]
    swarms[2].close()
    outcomes = together(*(handle.wait for handle in handles))
    assert (outcomes[2].status, flats[2].unique().tolist()) == ("open", [4.0])
    for outcome, flat in zip(outcomes[:2], flats[:2], strict=True):
        assert outcome.status == "committed"
        assert flat.unique().tolist() == [
            sum(2.0 ** [s.peer for s in swarms].index(share.peer) for share in outcome.contributors)
        ]
    for call in (
        lambda: all_reduce(swarms[2], torch.ones(3), op_id="late"),
        lambda: barrier(swarms[2], op_id="late"),
        lambda: swarms[2].contribute(samples=1, write=lambda out: None),
    ):
        with pytest.raises(SwarmClosedError):
            call()
    handles[2].cancel()
    assert handles[2].done()
