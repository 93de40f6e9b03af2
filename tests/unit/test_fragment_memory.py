"""The memory of a run in fragments, as node and script see it: one buffer for the whole
contribution, anchor slots for each fragment.
"""

from __future__ import annotations

import os

import pytest
import torch
from blake3 import blake3

from atoll.collectives.errors import LocalProtocolError
from atoll.node.client.memory import RunMemory, SlotView, WholeView
from atoll.node.control.shared_memory import AnchorSlots, SharedBuffer

NUMELS = (5, 1, 4)


def test_one_anchor_of_several() -> None:
    contribution, anchors = SharedBuffer(4 * sum(NUMELS)), [AnchorSlots(numel) for numel in NUMELS]
    for number, slots in enumerate(anchors):
        slot = slots.next_slot()
        slots.tensor(slot).copy_(torch.arange(slots.numel) + 10.0 * number)
        slots.publish(slot, 7 - number, "")
    fds = [
        os.dup(fd)
        for fd in (contribution.fd, *(fd for slots in anchors for fd in slots.reader_fds()))
    ]
    memory = RunMemory(fds, NUMELS)
    assert memory.bounds == [(0, 5), (5, 6), (6, 10)]
    memory.contribution.tensor()[slice(*memory.bounds[2])] = 3.0
    assert contribution.tensor().tolist() == [0.0] * 6 + [3.0] * 4

    released = list[int]()
    views = [
        SlotView(memory, slots.lease(), lambda number=number: released.append(number), number)
        for number, slots in enumerate(anchors)
    ]
    whole, expected = WholeView(views), torch.tensor([0.0, 1, 2, 3, 4, 10, 20, 21, 22, 23])
    assert (whole.round, whole.numel, whole.digest) == (
        5,
        10,
        blake3(expected.numpy().tobytes()).hexdigest(),
    )
    for start in range(10):
        for stop in range(start, 11):
            out = torch.full((stop - start,), -1.0)
            whole.copy_into(out, start)
            assert out.tolist() == expected[start:stop].tolist()
    for start, count in ((-1, 2), (8, 3)):
        with pytest.raises(LocalProtocolError, match="of an anchor of 10"):
            whole.copy_into(torch.empty(count), start)
    whole.release()
    whole.release()
    assert released == [0, 1, 2]
    with pytest.raises(LocalProtocolError, match="released"):
        whole.copy_into(torch.empty(1))


def test_a_wrong_number_of_descriptors_is_refused() -> None:
    one, other = os.pipe()
    with pytest.raises(LocalProtocolError, match="2 descriptors"):
        RunMemory([one, other], NUMELS)
