"""`swarm.buffer` among three real nodes: what lies in it is read by the node as it is, and stays
what it was for others, whatever the script does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bad_input_kit import three_members
from seeds import RARE
from torch import Tensor

from atoll.collectives.api import Handle
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.outcomes import Outcome
from atoll.node.joining import RunSwarm

pytestmark = [
    *RARE,
    pytest.mark.skipif(sys.platform != "linux", reason="buffers are ordinary tensors elsewhere"),
]

NUMEL = 1_000_003


@pytest.fixture(scope="module")
def swarms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunSwarm]]:
    """Three members that all see each other."""
    with three_members(tmp_path_factory.mktemp("buffer")) as swarms:
        yield swarms


def shared(tensor: Tensor) -> bool:
    """Whether its memory is a memory file of the node."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:atoll" in line
    return False


def call(
    swarms: list[RunSwarm], flats: list[Tensor], op_id: str, codec: str = "fp32"
) -> list[Handle[Outcome]]:
    """All of them call a sum."""
    return [
        s.all_reduce(flat, op_id=op_id, op="sum", codec=codec, deadline_s=60, everyone=True)
        for s, flat in zip(swarms, flats, strict=True)
    ]


def counted(swarms: list[RunSwarm], outcome: Outcome) -> list[int]:
    """Whose values a committed result holds."""
    assert outcome.status == "committed", outcome
    peers = [s.peer for s in swarms]
    return sorted(peers.index(share.peer) for share in outcome.contributors)


@pytest.mark.parametrize("codec", ["fp32", "int8", "bf16", "stat2", "sparse64"])
def test_the_same_bits_as_of_an_ordinary_tensor(swarms: list[RunSwarm], codec: str) -> None:
    values = [
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(index)) for index in range(3)
    ]
    plain = [flat.clone() for flat in values]
    for handle in call(swarms, plain, f"plain {codec}", codec):
        assert counted(swarms, handle.wait(60)) == [0, 1, 2]
    flats = [swarms[0].buffer(NUMEL), swarms[1].buffer(NUMEL), torch.empty(NUMEL)]
    for turn in range(2):  # the second time without making anything
        for flat, given in zip(flats, values, strict=True):
            flat.copy_(given)
        for handle in call(swarms, flats, f"buffer {codec} {turn}", codec):
            assert counted(swarms, handle.wait(60)) == [0, 1, 2]
        assert [shared(flat) for flat in flats] == [True, True, False]
        assert all(torch.equal(flat, plain[0]) for flat in flats)


def test_in_use_until_it_is_over(swarms: list[RunSwarm]) -> None:
    flats = [s.buffer(NUMEL).fill_(2.0**index) for index, s in enumerate(swarms)]
    [first] = call(swarms[:1], flats[:1], "in use")
    with pytest.raises(LocalProtocolError, match="under way"):
        swarms[0].all_reduce(flats[0], op_id="another", op="sum")
    for handle in (first, *call(swarms[1:], flats[1:], "in use")):
        assert counted(swarms, handle.wait(60)) == [0, 1, 2]
    assert [flat.unique().tolist() for flat in flats] == [[7.0]] * 3


def test_an_open_operation_leaves_it_free(swarms: list[RunSwarm]) -> None:
    flat = swarms[0].buffer(NUMEL).fill_(3)
    outcome = (
        swarms[0]
        .all_reduce(flat, op_id="alone", op="sum", codec="fp32", everyone=True, deadline_s=0.3)
        .wait(60)
    )
    assert (outcome.status, flat.unique().tolist(), shared(flat)) == ("open", [3.0], False)
    flats = [flat.fill_(8), torch.ones(NUMEL), torch.ones(NUMEL)]
    for handle in call(swarms, flats, "after it"):
        assert counted(swarms, handle.wait(60)) == [0, 1, 2]
    assert ([f.unique().tolist() for f in flats], shared(flat)) == ([[10.0]] * 3, True)


def test_nan_is_refused(swarms: list[RunSwarm]) -> None:
    flats = [s.buffer(NUMEL).fill_(1) for s in swarms]
    flats[1][NUMEL - 1] = float("nan")
    outcomes = [handle.wait(60) for handle in call(swarms, flats, "nan")]
    assert (outcomes[1].status, counted(swarms, outcomes[0]), counted(swarms, outcomes[2])) == (
        "open",
        [0, 2],
        [0, 2],
    )
    assert [flats[index].unique().tolist() for index in (0, 2)] == [[2.0]] * 2


def test_who_gives_up_may_write_at_once(swarms: list[RunSwarm]) -> None:
    """A contribution that a plan named stays what it was, or is not counted: at whatever moment its
    caller gives up.
    """
    flats = [s.buffer(NUMEL) for s in swarms]
    given_up = 0
    for turn in range(12):
        for index, flat in enumerate(flats):
            flat.fill_(2.0**index)
        handles = call(swarms, flats, f"given up {turn}")
        until = time.monotonic() + 0.004 * turn  # another phase each time
        while time.monotonic() < until:
            handles[0].done()
        handles[0].cancel()
        outcome = handles[0].wait(60)
        given_up += outcome.status == "open"
        flats[0].fill_(1e6)
        for index in (1, 2):
            members = counted(swarms, handles[index].wait(60))
            assert {1, 2} <= set(members)
            assert flats[index].unique().tolist() == [sum(2.0**member for member in members)]
    assert given_up
