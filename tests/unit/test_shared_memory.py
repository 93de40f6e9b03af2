"""Shared memory: both kinds, leases, and a full disk that is an error and not a signal."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from atoll.collectives.errors import LocalProtocolError, OutOfDateError, StorageError
from atoll.node.control import shared_memory
from atoll.node.control.descriptors import received
from atoll.node.control.shared_memory import (
    MAX_LEASES,
    SLOTS,
    AnchorSlot,
    AnchorSlots,
    ReadOnlyFloats,
    SharedBuffer,
    WritableFloats,
    alive,
    memfd_works,
)

MEMFD = memfd_works()
KINDS = [pytest.param(True, marks=pytest.mark.skipif(not MEMFD, reason="no memfd here")), False]


@pytest.mark.parametrize("memfd", KINDS)
def test_both_sides_see_the_same_floats(tmp_path: Path, memfd: bool) -> None:
    buffer = SharedBuffer(4 * 1000, folder=tmp_path, use_memfd=memfd)
    script = WritableFloats(os.dup(buffer.fd), 1000)
    reader = ReadOnlyFloats(os.dup(buffer.reader_fd), 1000)
    assert buffer.tensor().eq(0).all()

    script.tensor().copy_(torch.arange(1000.0))
    assert torch.equal(buffer.tensor(), torch.arange(1000.0))

    part = torch.zeros(3, 5)
    reader.copy_into(part, 980)
    assert torch.equal(part, torch.arange(980.0, 995.0).view(3, 5))
    reader.copy_into(torch.empty(0), 1000)

    buffer.tensor()[999] = -7.0
    buffer.close()
    buffer.close()
    last = torch.zeros(1)
    reader.copy_into(last, 999)  # outlives the node's side
    assert last.item() == -7.0
    assert list(tmp_path.iterdir()) == []  # nothing that a crash would leave behind


@pytest.mark.parametrize("memfd", KINDS)
def test_a_reader_cannot_write(tmp_path: Path, memfd: bool) -> None:
    buffer = SharedBuffer(4096, folder=tmp_path, use_memfd=memfd)
    with pytest.raises(PermissionError):
        mmap.mmap(buffer.reader_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.write(buffer.reader_fd, b"x")
    assert (
        ReadOnlyFloats(os.dup(buffer.reader_fd), 1024).digest() == blake3(bytes(4096)).hexdigest()
    )
    assert not os.get_inheritable(buffer.fd)
    assert not os.get_inheritable(buffer.reader_fd)
    buffer.close()


@pytest.mark.skipif(not MEMFD, reason="no memfd here")
def test_a_script_cannot_cut_the_memory_under_the_node() -> None:
    buffer = SharedBuffer(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    buffer.close()


def test_what_does_not_fit_is_refused() -> None:
    buffer = SharedBuffer(40)
    reader = ReadOnlyFloats(os.dup(buffer.reader_fd), 10)
    for destination, start in [
        (torch.zeros(11), 0),
        (torch.zeros(1), 10),
        (torch.zeros(1), -1),
        (torch.zeros(2, dtype=torch.float64), 0),
        (torch.zeros(4, 2).t(), 0),
    ]:
        with pytest.raises(LocalProtocolError):
            reader.copy_into(destination, start)
    with pytest.raises(StorageError, match="has 40 bytes, 44 are needed"):
        ReadOnlyFloats(os.dup(buffer.reader_fd), 11)
    with pytest.raises(LocalProtocolError):
        SharedBuffer(0)
    buffer.close()


def test_wrong_number_of_descriptors_closes_them() -> None:
    read, write = os.pipe()
    with pytest.raises(LocalProtocolError, match="2 descriptors"):
        received([read, write], 3)
    for fd in (read, write):
        with pytest.raises(OSError):
            os.fstat(fd)


@pytest.mark.parametrize("memfd", KINDS)
def test_no_room_is_a_storage_error(tmp_path: Path, memfd: bool) -> None:
    program = f"""
import resource
from pathlib import Path
from atoll.collectives.errors import StorageError
from atoll.node.control.shared_memory import AnchorSlots, SharedBuffer
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
where = dict(folder=Path({str(tmp_path)!r}), use_memfd={memfd})
SharedBuffer(1 << 20, **where).close()
for make, size in ((SharedBuffer, (1 << 20) + 1), (AnchorSlots, 1 << 20)):
    try:
        make(size, **where)
    except StorageError as error:
        print(error.code, "not enough room" in error.why)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["E501 True", "E501 True"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory by size alone: memfd")
def test_a_mapping_that_the_system_refuses_is_a_storage_error() -> None:
    nbytes = 1 << 60  # more than a process can address; the memory itself takes nothing
    with pytest.raises(StorageError, match="Cannot allocate memory"):
        SharedBuffer(nbytes, use_memfd=True)
    fd = os.memfd_create("atoll-test")
    os.ftruncate(fd, nbytes)
    with pytest.raises(StorageError, match="Cannot allocate memory"):
        WritableFloats(fd, nbytes // 4)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_missing_folder_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        SharedBuffer(4, folder=tmp_path / "none", use_memfd=False)


@pytest.mark.parametrize("memfd", KINDS)
def test_a_leased_slot_is_never_written(tmp_path: Path, memfd: bool) -> None:
    slots = AnchorSlots(4, folder=tmp_path, use_memfd=memfd)
    with pytest.raises(OutOfDateError):
        slots.lease()
    held: list[tuple[int, int]] = []  # slot, round
    for round_ in range(40):
        slot = slots.next_slot()
        assert slot == slots.next_slot()
        assert slot not in [leased for leased, _ in held]
        slots.tensor(slot).fill_(round_)
        slots.publish(slot, round_, f"{round_:02x}")
        for leased, of in held:
            assert slots.tensor(leased).eq(of).all()
        if round_ % 7 == 3 and held:
            slots.release(held.pop(0)[0])
        elif len(held) < MAX_LEASES and round_ % 3 == 0:
            lease = slots.lease()
            assert (lease.round, lease.digest) == (round_, f"{round_:02x}")
            held.append((lease.slot, lease.round))
    slots.close()


def test_leases_are_bounded_and_slots_in_use_refused() -> None:
    slots = AnchorSlots(1)
    slots.publish(0, 1, "aa")
    assert slots.lease() == slots.lease()  # the base, and the same generation again
    assert slots.leased == [0, 0]
    with pytest.raises(LocalProtocolError, match="holds 2 anchors"):
        slots.lease()
    with pytest.raises(LocalProtocolError, match="in use"):
        slots.publish(0, 2, "bb")
    slots.release(0)
    slots.publish(slots.next_slot(), 2, "bb")
    with pytest.raises(LocalProtocolError):
        slots.publish(0, 3, "cc")  # one lease is left
    slots.release(0)
    slots.release(0)
    slots.release(3)
    assert slots.leased == []
    assert slots.next_slot() == 0
    slots.close()


def test_what_was_leased_when_the_script_went_is_never_written_again() -> None:
    slots = AnchorSlots(2)
    slots.tensor(0).fill_(1.0)
    slots.publish(0, 1, "aa")
    slots.lease()
    slots.tensor(1).fill_(2.0)
    slots.publish(1, 2, "bb")
    slots.lease()  # the current one
    views = [ReadOnlyFloats(os.dup(fd), 2) for fd in slots.reader_fds()]

    slots.abandon()
    assert slots.leased == []
    slot = slots.next_slot()
    assert slot == 0
    slots.tensor(slot).fill_(3.0)
    slots.publish(slot, 3, "cc")
    slots.renew()
    assert slots.tensor(0).eq(3.0).all()

    slots.lease()
    slots.abandon()
    slots.renew()  # the current one is copied
    assert slots.tensor(0).eq(3.0).all()
    fd = SharedBuffer(4).fd  # forgotten by its owner: closed with it
    with pytest.raises(OSError):
        os.fstat(fd)
    for slot in range(1, SLOTS):
        slots.tensor(slot).fill_(9.0)
    seen = torch.zeros(2)
    for view, value in zip(views, (1.0, 2.0), strict=False):
        view.copy_into(seen)
        assert seen.eq(value).all()
    slots.close()


@pytest.mark.skipif(not MEMFD, reason="no memfd here")
@pytest.mark.parametrize("beside", [False, True])
def test_slots_that_nobody_needs_give_their_memory_back(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One generation holds something, or two where the script is at an older one."""
    monkeypatch.setattr(shared_memory, "BESIDE_BYTES", 1 if beside else 1 << 40)
    slots = AnchorSlots(1 << 18)

    def publish(round_: int) -> int:
        slot = slots.next_slot()
        slots.tensor(slot).fill_(float(round_))
        slots.publish(slot, round_, "")
        return slot

    def held() -> list[int]:
        with slots._changed:
            slots._changed.wait_for(lambda: not slots._clearing)
        return [slot for slot in range(SLOTS) if os.fstat(slots.reader_fds()[slot]).st_blocks]

    for round_ in (1, 2, 3):
        slot = publish(round_)
        assert held() == [slot]
    leased = slots.lease()
    for round_ in (4, 5):
        slot = publish(round_)  # a script that is slow
        assert held() == sorted([leased.slot, slot])
    assert slots.tensor(leased.slot).eq(3.0).all()
    newer = slots.lease()
    slots.release(leased.slot)
    assert held() == [newer.slot]
    slot = publish(6)
    assert held() == sorted([newer.slot, slot])
    assert slots.tensor(newer.slot).eq(5.0).all()
    assert slots.tensor(slot).eq(6.0).all()
    slots.lease()
    slots.abandon()  # the script may read on, in memory that is not the node's any more
    assert held() == [slot]
    for round_ in (7, 8):  # a script that dies at the current one
        died = slots.lease()
        view = ReadOnlyFloats(os.dup(slots.reader_fds()[died.slot]), 1 << 18)
        slots.abandon()
        assert held() == [died.slot]
        slot = publish(round_)
        assert held() == [slot]
        seen = torch.empty(1 << 18)
        view.copy_into(seen)
        assert seen.eq(float(round_ - 1)).all()
    slots.close()


@pytest.mark.skipif(not MEMFD, reason="no memfd here")
def test_a_script_is_let_go_of_though_there_is_no_room_for_other_memory() -> None:
    """Else its session would never end, and no other script could attach."""
    slots = AnchorSlots(1 << 12)
    for round_ in (1, 2, 3):
        slot = slots.next_slot()
        slots.tensor(slot).fill_(float(round_))
        slots.publish(slot, round_, "")
        if round_ < 3:
            slots.lease()
    views = [ReadOnlyFloats(os.dup(fd), 1 << 12) for fd in slots.reader_fds()]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        slots.abandon()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert slots.leased == []
    for round_ in (4, 5):  # what the script may still read is not written over
        slot = slots.next_slot()
        slots.tensor(slot).fill_(float(round_))
        slots.publish(slot, round_, "")
    seen = torch.empty(1 << 12)
    values = set[float]()
    for view in views:
        view.copy_into(seen)
        values.add(float(seen.mean()))
    assert {1.0, 2.0} <= values
    slots.close()


@pytest.mark.skipif(not MEMFD, reason="no memfd here")
def test_a_generation_that_is_not_published_yet_is_not_cleared() -> None:
    """The outer step runs in a worker while the script gives its anchor back: what the worker
    writes is neither current nor leased. A second state may be written before the first is
    published (one that was fetched)."""
    slots = AnchorSlots(1 << 12)
    slots.publish(slots.next_slot(), 1, "")
    old = slots.lease()
    slots.publish(slots.next_slot(), 2, "")
    new = slots.lease()

    first = slots.next_slot()
    slots.tensor(first).fill_(3.0)
    slots.release(old.slot)
    assert slots.tensor(first).eq(3.0).all()
    second = slots.next_slot()
    assert second == old.slot  # the lowest: another one than before
    slots.tensor(second).copy_(slots.tensor(first))
    slots.publish(first, 3, "")
    slots.release(new.slot)
    assert slots.tensor(second).eq(3.0).all()
    slots.publish(second, 4, "")
    assert slots.tensor(second).eq(3.0).all()
    assert slots.tensor(first).eq(0.0).all()
    slots.close()


@pytest.mark.skipif(not MEMFD, reason="no memfd here")
def test_readers_never_see_a_slot_being_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker writes generations as fast as it can, a script leases, reads and releases them: each
    lease holds one value, which is its round."""
    monkeypatch.setattr(shared_memory, "BESIDE_BYTES", 1)
    slots, stop = AnchorSlots(1 << 15), threading.Event()
    slots.tensor(slots.next_slot()).fill_(1.0)
    slots.publish(0, 1, "")
    views = [ReadOnlyFloats(os.dup(fd), 1 << 15) for fd in slots.reader_fds()]
    torn = list[float]()

    def script() -> None:
        seen = torch.empty(1 << 15)
        rng, held = random.Random(5), list[AnchorSlot]()
        while not stop.is_set():
            if len(held) < MAX_LEASES and rng.random() < 0.6:
                held.append(slots.lease())
            for lease in held:
                views[lease.slot].copy_into(seen)
                if not seen.eq(float(lease.round)).all():
                    torn.append(lease.round)
            if held and rng.random() < 0.6:
                slots.release(held.pop(rng.randrange(len(held))).slot)

    thread = threading.Thread(target=script)
    thread.start()
    for round_ in range(2, 300):
        slot = slots.next_slot()
        slots.tensor(slot).fill_(float(round_))
        slots.publish(slot, round_, "")
    stop.set()
    thread.join()
    assert torn == []
    slots.close()


def test_what_was_lent_is_held_by_every_view_of_it() -> None:
    """So a node knows whether its engine, or a worker, can still read a contribution."""
    buffer = SharedBuffer(4 * 1000)
    floats = WritableFloats(os.dup(buffer.fd), 1000)
    for memory in (buffer, floats):
        tensor, held = memory.lend(100, 300)
        tensor.fill_(2.0)
        for view in (
            tensor[5:],
            tensor.detach(),
            tensor.split(64)[3],
            tensor.numpy().data.cast("B")[8:],
        ):
            del tensor
            assert held() is not None
            assert alive([held]) == [held]
            tensor = view
        del tensor, view
        assert held() is None
        assert alive([held]) == []
        assert buffer.tensor()[100:300].eq(2.0).all()
    buffer.close()
