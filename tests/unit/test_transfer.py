"""Whom a transfer asks."""

from __future__ import annotations

from random import Random

from contracts import log_of

from atoll.collectives import messages as m
from atoll.collectives.exchange import Exchange
from atoll.collectives.group import Entry
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import Layout
from atoll.collectives.round import Timing
from atoll.node.session.transfer import Transfer

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class Session:
    """What a transfer asks of its session: told in `asked`."""

    def __init__(self) -> None:
        self.exchange = Exchange(PeerId("me"), emit=lambda event: None)
        self.asked: list[PeerId] = []
        self.spans: list[m.Span] = []
        self.dead: set[PeerId] = set()
        self.gone: list[Entry] = []

    def tell(self, peer: PeerId, round_: int, body: m.Body) -> None:
        """Note it."""
        assert isinstance(body, m.Get)
        self.asked.append(peer)
        self.spans += body.chunks

    def unheard(self, peer: PeerId) -> bool:
        """As a test says."""
        return peer in self.dead

    def result_gone(self, entry: Entry) -> None:
        """Note it."""
        self.gone.append(entry)

    def result_arrived(self, entry: Entry, data: memoryview) -> None:
        """Never here."""
        raise AssertionError

    def state_arrived(self, round_: int, root: bytes, layout: Layout, data: memoryview) -> None:
        """Never here."""
        raise AssertionError

    def state_progress(self, have: int, total: int, sources: tuple[PeerId, ...]) -> None:
        """Of no interest."""

    def allocate_state(self, layout: Layout) -> memoryview:
        """Never here."""
        raise AssertionError

    def allocate(self, nbytes: int) -> memoryview:
        """Memory."""
        return memoryview(bytearray(nbytes))

    def wants_state(self, round_: int) -> bool:
        """No."""
        return False

    def offered_in_vain(self, peer: PeerId, round_: int) -> None:
        """Of no interest."""

    def entry_at(self, round_: int) -> None:
        """None."""


def test_those_who_live_are_asked_before_those_who_may_have_it() -> None:
    session, entry = Session(), log_of(2)[1].entry
    transfer = Transfer(session, A, Timing(), Random(0))
    session.dead = {A}
    now = 0.0
    transfer.fetch_result(now, entry, [A, B, C])
    for _ in range(5):
        transfer.tick(now := now + 1.0, [])
    assert set(session.asked) == {B, C}
    transfer.on_gone(now, B, entry.hash())
    session.asked.clear()
    for _ in range(3):
        transfer.tick(now := now + 1.0, [])
    assert session.asked == [C, C, C]
    assert not session.gone
    transfer.on_gone(now, C, entry.hash())  # the dead one never says that it has it no more
    assert session.gone == [entry]
    session.dead = {A, B, C}
    session.asked.clear()
    for _ in range(3):
        transfer.tick(now := now + 1.0, [])
    assert set(session.asked) == {A, B, C}


def test_a_window_is_asked_for_over_however_many_gaps() -> None:
    session, entry = Session(), log_of(2)[1].entry
    transfer = Transfer(session, A, Timing(), Random(0))
    transfer.fetch_result(0.0, entry, [A])
    item = transfer.fetching[entry.hash()]
    item.data, item.hashes = memoryview(bytearray(4)), [bytes(32)] * 1000
    transfer.on_blob(0.0, item.name, 500, [(chunk, chunk + 1) for chunk in range(0, 1000, 2)])
    assert session.spans == [(chunk, chunk + 1) for chunk in range(0, 128, 2)]
    for came in range(1, 9):  # as soon as there is room for a span
        session.spans.clear()
        missing = [(chunk, chunk + 1) for chunk in range(2 * came, 1000, 2)]
        transfer.on_blob(0.0, item.name, 500 + came, missing, A)
    assert session.spans == [(chunk, chunk + 1) for chunk in range(128, 144, 2)]


def test_who_is_no_source_is_not_heard_on_who_has_it() -> None:
    session, entry = Session(), log_of(2)[1].entry
    transfer = Transfer(session, A, Timing(), Random(0))
    transfer.fetch_result(0.0, entry, [A])
    session.dead = {A}  # for a moment
    transfer.on_gone(0.1, C, entry.hash())
    assert session.gone == []
    transfer.on_gone(0.1, A, entry.hash())
    assert session.gone == [entry]
