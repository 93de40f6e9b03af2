"""The memory of a contribution goes back to the system once nobody can read it any more, and no
reader ever sees the zeros that come in its place.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_node import INVITE, Node
from torch import Tensor

from atoll.collectives.layout import make_layout
from atoll.node.client.link import PendingAnswer
from atoll.node.client.reclaiming import AGAIN_S, LEAST_BYTES, Reclaiming
from atoll.node.control import protocol as p
from atoll.node.control import shared_memory
from atoll.node.control.shared_memory import SharedBuffer, WritableFloats, memfd_works
from atoll.node.joining import RunSwarm, join

pytestmark = pytest.mark.skipif(not memfd_works(), reason="no memory here that can be given back")

N = LEAST_BYTES  # floats: four times the least
LAYOUT = make_layout([("w", (N,))])


def held(fd: int) -> int:
    """Bytes that memory behind a descriptor takes."""
    return os.fstat(fd).st_blocks * 512


def filled(value: float) -> Callable[[Tensor], None]:
    """Writes ``value`` everywhere."""

    def write(out: Tensor) -> None:
        out.fill_(value)

    return write


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    yield started
    started.stop()
    assert started.defects == []


@pytest.fixture
def swarm(node: Node, tmp_path: Path) -> Iterator[RunSwarm]:
    joined = join(INVITE, home=tmp_path, private=False, progress=lambda *_: None)
    joined.open(LAYOUT, filled(7.0)).release()
    yield joined
    joined.close()


def memory(node: Node) -> int:
    session = node.service.run.session
    assert session is not None
    return held(session.contribution.fd)


def until(swarm: RunSwarm, condition: Callable[[], bool]) -> None:
    """Do what a training loop does after each step, until it holds."""
    patience = time.monotonic() + 60
    while not condition():
        assert swarm.closing == 0
        assert time.monotonic() < patience


def looks(swarm: RunSwarm, count: int) -> None:
    """So many answers of the node to whether it reads."""
    at = swarm._at
    assert at is not None
    for _ in range(count):
        for loan in at.reclaiming._loans.values():
            loan.not_before_s = 0.0
        until(swarm, lambda: any(each.asked for each in at.reclaiming._loans.values()))
        until(swarm, lambda: not any(each.asked for each in at.reclaiming._loans.values()))


def test_a_decided_contribution_gives_its_memory_back(node: Node, swarm: RunSwarm) -> None:
    for value in (1.0, 2.0):
        swarm.contribute(samples=1, write=filled(value)).wait(60)
        until(swarm, lambda: memory(node) == 0)
    view, seen = swarm.anchor(), torch.empty(N)
    view.copy_into(seen)
    view.release()
    assert seen.eq(4.0).all()  # 7 - 1 - 2: the second was written to memory that was taken anew


def test_a_script_that_holds_the_tensor_reads_what_it_wrote(node: Node, swarm: RunSwarm) -> None:
    """Error feedback does, after the outcome."""
    kept = list[Tensor]()

    def write(out: Tensor) -> None:
        out.fill_(3.0)
        kept.append(out[N // 2 :])  # a view is enough

    swarm.contribute(samples=1, write=write).wait(60)
    for _ in range(100):
        assert swarm.closing == 0
    assert swarm._at is not None
    assert swarm._at.reclaiming._loans[0].asked is None  # the node was not even asked
    assert kept[0].eq(3.0).all()
    assert memory(node) == 4 * N
    kept.clear()
    until(swarm, lambda: memory(node) == 0)


def test_nothing_is_returned_before_the_outcome_or_while_the_node_reads(
    node: Node, swarm: RunSwarm
) -> None:
    node.do(lambda: setattr(node.service.run, "hold", True))
    node.do(lambda: setattr(node.service.run, "reads", True))
    pending = swarm.contribute(samples=1, write=filled(3.0))
    for _ in range(100):
        assert not pending.done()
    assert swarm._at is not None
    assert swarm._at.reclaiming._loans[0].asked is None
    node.do(lambda: setattr(node.service.run, "hold", False))
    pending.wait(60)
    looks(swarm, 3)
    assert memory(node) == 4 * N
    node.do(lambda: setattr(node.service.run, "reads", False))
    until(swarm, lambda: memory(node) == 0)


def test_a_lost_node_and_its_next_life(node: Node, tmp_path: Path) -> None:
    """The script keeps the mapping of a dead node, and asks it nothing."""
    with join(INVITE, home=tmp_path, private=False, progress=lambda *_: None) as swarm:
        swarm.open(LAYOUT, filled(7.0)).release()
        kept = list[Tensor]()
        swarm.contribute(samples=1, write=kept.append).wait(60)
        kept[0].fill_(5.0)
        node.stop()
        swarm.take_in()
        assert not swarm.connected
        swarm.take_in()
        assert kept[0].eq(5.0).all()


class Answers:
    """A link whose node answers when the test says so."""

    def __init__(self) -> None:
        self.asked = list[p.Request]()
        self.calls = list[PendingAnswer[p.Unread]]()

    def submit(self, make: Callable[[int], p.Ask[p.Unread]]) -> PendingAnswer[p.Unread]:
        self.asked.append(make(len(self.asked)))
        self.calls.append(PendingAnswer(p.Unread))
        return self.calls[-1]

    def answer(self, unread: bool) -> None:
        self.calls[-1].answer = p.Unread(1, unread)


def test_fragments_are_returned_alone_and_a_new_loan_wins_over_an_old_answer() -> None:
    """Fragments end inside pages: the page they share stays."""
    page = mmap.PAGESIZE // 4
    cut = 5 * LEAST_BYTES // 4 + page // 2
    buffer = SharedBuffer(4 * 2 * cut)
    floats, link = WritableFloats(os.dup(buffer.fd), 2 * cut), Answers()
    reclaiming, now = Reclaiming(floats, [(0, cut), (cut, 2 * cut)]), 0.0
    step: Any = reclaiming.step
    for fragment in (0, 1):
        reclaiming.lend(fragment).fill_(fragment + 1.0)

    step(now, link, {0: True, 1: False}.__getitem__)
    assert link.asked == [p.Reclaim(0, 0)]
    reclaiming.lend(0).fill_(4.0)  # the next contribution, while the node thinks
    link.answer(True)
    step(now, link, lambda _: False)
    assert floats.tensor()[:cut].eq(4.0).all()

    step(now, link, {0: True, 1: False}.__getitem__)
    link.answer(False)
    step(now, link, {0: True, 1: False}.__getitem__)
    step(now + AGAIN_S / 2, link, {0: True, 1: False}.__getitem__)
    assert len(link.calls) == 2  # it reads: asked later
    step(now + AGAIN_S, link, {0: True, 1: False}.__getitem__)
    link.answer(True)
    step(now + AGAIN_S, link, lambda _: False)
    reclaiming.wait()
    assert floats.tensor()[cut:].eq(2.0).all()
    assert held(buffer.fd) == 4 * cut + 2 * page  # the other half of the shared page stays, too
    step(now + AGAIN_S, link, lambda _: True)
    link.answer(True)
    step(now + AGAIN_S, link, lambda _: True)
    reclaiming.wait()
    assert held(buffer.fd) <= mmap.PAGESIZE
    buffer.close()


def test_memory_is_returned_in_pieces_until_somebody_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "PIECE_BYTES", 1 << 18)
    buffer = SharedBuffer(LEAST_BYTES)
    floats = WritableFloats(os.dup(buffer.fd), LEAST_BYTES // 4)
    floats.tensor().fill_(1.0)
    asked = iter([True, True, False])
    floats.clear(0, LEAST_BYTES // 4, lambda: next(asked))
    assert held(buffer.fd) == LEAST_BYTES // 2
    assert floats.tensor()[LEAST_BYTES // 8 :].eq(1.0).all()
    buffer.close()


def test_a_loan_in_the_middle_of_a_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script contributes again while pages of its last contribution are on their way, wherever
    the thread is: what it writes stays, and a neighbour's contribution does too."""
    monkeypatch.setattr(shared_memory, "PIECE_BYTES", mmap.PAGESIZE)
    cut, rng = LEAST_BYTES // 4, random.Random(28)
    buffer = SharedBuffer(4 * 2 * cut)
    floats, link = WritableFloats(os.dup(buffer.fd), 2 * cut), Answers()
    reclaiming = Reclaiming(floats, [(0, cut), (cut, 2 * cut)])
    step: Any = reclaiming.step
    reclaiming.lend(1).fill_(-1.0)
    stopped = 0
    for value in range(1, 101):
        reclaiming.lend(0).fill_(float(value))
        step(0.0, link, {0: True, 1: False}.__getitem__)
        link.answer(True)
        step(0.0, link, {0: True, 1: False}.__getitem__)
        pages = rng.randrange(cut * 4 // mmap.PAGESIZE)
        while held(buffer.fd) > 4 * 2 * cut - pages * mmap.PAGESIZE:
            assert pages  # the thread is at work: this ends
        vector = reclaiming.lend(0)
        stopped += held(buffer.fd) > 4 * cut
        vector.fill_(-float(value))
        del vector
        reclaiming.wait()
        assert floats.tensor()[:cut].eq(-float(value)).all()
        assert floats.tensor()[cut:].eq(-1.0).all()
        assert held(buffer.fd) == 4 * 2 * cut
    assert stopped  # at least once it was in the middle
    buffer.close()


def test_a_small_fragment_is_kept() -> None:
    buffer = SharedBuffer(LEAST_BYTES // 2)
    floats, link = WritableFloats(os.dup(buffer.fd), LEAST_BYTES // 8), Answers()
    reclaiming = Reclaiming(floats, [(0, LEAST_BYTES // 8)])
    reclaiming.lend(0).fill_(1.0)
    step: Any = reclaiming.step
    step(0.0, link, lambda _: True)
    assert link.calls == []
    buffer.close()
