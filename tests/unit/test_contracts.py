"""Every implementation of a seam keeps the contract of the seam (tests/contracts.py)."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from pathlib import Path

import contracts as c
import pytest
from reference_node import INVITE, Node

from atoll.collectives.engine import EngineThread
from atoll.collectives.errors import AtollError, StorageError
from atoll.collectives.exchange import CommandFailed, Exchange, ExchangeEvent, ResultComplete
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outcomes import Share
from atoll.collectives.round import Journal, MemoryJournal
from atoll.collectives.script_swarm import Swarm
from atoll.node.joining import join
from atoll.node.local import LocalSwarm
from atoll.node.session.memory_storage import MemoryStorage
from atoll.node.session.ports import Storage
from atoll.node.session.replica import PlainSlots
from atoll.node.simulation.local_member import LocalMember
from atoll.node.storage import RunFiles
from atoll.node.storage.journal import FileJournal
from atoll.optim import SoloSwarm

WAIT_S = 20.0


# ── Swarm ──


def solo(clause: Callable[[c.SwarmCase], None], folder: Path) -> None:
    """A swarm without a node."""
    clause(c.SwarmCase(SoloSwarm(c.SETTINGS), hold=None))


def local(count: int, subject: int) -> Callable[[Callable[[c.SwarmCase], None], Path], None]:
    """A member in virtual time. The other members attach, and contribute nothing."""

    def play(clause: Callable[[c.SwarmCase], None], folder: Path) -> None:
        ended = list[str]()

        def script(member: Swarm) -> None:
            assert isinstance(member, LocalMember)
            if member.index == subject:
                try:
                    clause(
                        c.SwarmCase(member, hold=lambda _: None, alone=count == 1)
                    )  # nothing is decided before somebody waits
                finally:
                    ended.append(member.peer)
            else:
                member.open(c.LAYOUT, c.copy(c.START))
                while not ended:
                    member.sleep(0.5)

        LocalSwarm(count, settings=c.SETTINGS).run(script)
        assert ended == [f"p{subject}"]

    return play


def over_the_control_socket(clause: Callable[[c.SwarmCase], None], folder: Path) -> None:
    """The client, at a node in another thread."""
    node = Node(folder)

    def hold(on: bool) -> None:
        node.service.run.hold = on

    swarm = join(INVITE, home=folder, private=False, progress=lambda *_: None)
    try:
        clause(c.SwarmCase(swarm, hold))
    finally:
        swarm.close()
        node.stop()
    assert node.defects == []


SWARMS = {
    "solo": solo,
    "local": local(1, 0),
    "local-organiser": local(2, 0),
    "local-joiner": local(2, 1),
    "client": over_the_control_socket,
}


@pytest.mark.parametrize("clause", c.SWARM, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("play", SWARMS.values(), ids=SWARMS)
def test_swarm(
    play: Callable[[Callable[[c.SwarmCase], None], Path], None],
    clause: Callable[[c.SwarmCase], None],
    tmp_path: Path,
) -> None:
    play(clause, tmp_path)


def test_a_late_caller_of_an_operation_is_given_what_the_others_reduced() -> None:
    flats = [c.START.clone(), c.DELTA.clone()]
    kept = dict[int, list[int]]()

    def script(member: Swarm) -> None:
        assert isinstance(member, LocalMember)
        member.open(c.LAYOUT, c.copy(c.START))
        c.contributed(member, c.DELTA)
        while len(member.members()) < 2 or (member.index == 1 and 0 not in kept):
            member.sleep(0.5)
        outcome = member.all_reduce(
            flats[member.index], weight=1, op_id="mean", deadline_s=60.0
        ).wait()
        assert (outcome.status, outcome.contributors) == ("committed", (Share(PeerId("p0"), 1),))
        assert outcome.counted == (member.index == 0)
        kept[member.index] = c.bits(flats[member.index])
        while len(kept) < 2:
            member.sleep(0.5)

    LocalSwarm(2, settings=c.SETTINGS).run(script)
    assert kept == {0: c.bits(c.START), 1: c.bits(c.START)}


# ── Journal ──


def in_memory(clause: Callable[[c.JournalCase], None], folder: Path) -> None:
    """What a simulated crash leaves."""
    lives = list[MemoryJournal]()

    def again() -> Journal:
        journal = lives[-1] if lives else MemoryJournal()
        journal.restarted = bool(lives)
        lives.append(journal)
        return journal

    clause(c.JournalCase(again))


def on_disk(*, killed: bool) -> Callable[[Callable[[c.JournalCase], None], Path], None]:
    """Each life ends with a kill, or in order."""

    def play(clause: Callable[[c.JournalCase], None], folder: Path) -> None:
        lives = list[FileJournal]()

        def again() -> Journal:
            if lives and not killed:
                lives.pop().close()
            lives.append(FileJournal(folder / "journal"))
            assert not lives[-1].damaged
            return lives[-1]

        try:
            clause(c.JournalCase(again))
        finally:
            for journal in lives:
                journal.close(clean=False)

    return play


JOURNALS = {"memory": in_memory, "killed": on_disk(killed=True), "closed": on_disk(killed=False)}


@pytest.mark.parametrize("clause", c.JOURNAL, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("play", JOURNALS.values(), ids=JOURNALS)
def test_journal(
    play: Callable[[Callable[[c.JournalCase], None], Path], None],
    clause: Callable[[c.JournalCase], None],
    tmp_path: Path,
) -> None:
    play(clause, tmp_path)


# ── Storage ──


def memory_storage(clause: Callable[[c.StorageCase], None], folder: Path) -> None:
    """What a simulated crash leaves."""
    lives = list[MemoryStorage]()

    def again() -> Storage:
        storage = lives[-1] if lives else MemoryStorage(c.SETTINGS.outer)
        if lives:
            storage.restart()
        lives.append(storage)
        return storage

    clause(c.StorageCase(again))


def run_files(*, killed: bool) -> Callable[[Callable[[c.StorageCase], None], Path], None]:
    """Each life ends with a kill, or in order."""

    def play(clause: Callable[[c.StorageCase], None], folder: Path) -> None:
        lives, troubles = list[RunFiles](), list[StorageError]()

        def again() -> Storage:
            if lives and not killed:
                lives.pop().close()
            files = RunFiles(
                folder,
                run_id="run",
                outer=c.SETTINGS.outer,
                slots=PlainSlots,
                trouble=troubles.append,
                me="p1",
                organiser="p0",
            )
            lives.append(files)
            return files

        try:
            clause(c.StorageCase(again))
        finally:
            for files in lives:
                files.close()
        told = clause is c.storage_reset_begins_a_new_incarnation_with_an_empty_log
        assert {error.code for error in troubles} == ({"E303"} if told else set())

    return play


STORAGES = {
    "memory": memory_storage,
    "killed": run_files(killed=True),
    "closed": run_files(killed=False),
}


@pytest.mark.parametrize("clause", c.STORAGE, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("play", STORAGES.values(), ids=STORAGES)
def test_storage(
    play: Callable[[Callable[[c.StorageCase], None], Path], None],
    clause: Callable[[c.StorageCase], None],
    tmp_path: Path,
) -> None:
    play(clause, tmp_path)


# ── DataPlane ──

ME = PeerId("me")


def direct(clause: Callable[[c.PlaneCase], None]) -> None:
    """The exchange itself: refusals are raised, events are there when a command returns."""
    events = deque[ExchangeEvent]()

    def refusal(command: Callable[[], None]) -> Exception | None:
        try:
            command()
        except AtollError as error:
            return error
        return None

    exchange = Exchange(ME, emit=events.append)
    clause(c.PlaneCase(ME, exchange, exchange, events.popleft, refusal))
    assert not events


def through_the_engine(clause: Callable[[c.PlaneCase], None]) -> None:
    """The exchange in the engine's thread: refusals and all else come as events."""
    events = queue.SimpleQueue[ExchangeEvent]()

    def refusal(command: Callable[[], None]) -> Exception | None:
        command()
        event = events.get(timeout=WAIT_S)
        return event.error if isinstance(event, CommandFailed) else None

    with EngineThread(ME, emit=events.put) as engine:
        exchange = engine.exchange
        clause(c.PlaneCase(ME, exchange, exchange, lambda: events.get(timeout=WAIT_S), refusal))
        assert engine.sync(WAIT_S)
    assert events.empty()


PLANES = {"exchange": direct, "engine": through_the_engine}


@pytest.mark.parametrize("clause", c.DATA_PLANE, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("play", PLANES.values(), ids=PLANES)
def test_data_plane(
    play: Callable[[Callable[[c.PlaneCase], None]], None], clause: Callable[[c.PlaneCase], None]
) -> None:
    play(clause)


def test_exchange_and_engine_give_the_same_bytes() -> None:
    results = list[tuple[tuple[bytes, ...], bytes]]()

    def clause(case: c.PlaneCase) -> None:
        plane, flat = c.plane_opened(case, "int8")
        plane.freeze("run", 1, c.CID, flat)
        plane.execute(c.plan_of(case.me, "int8"), [case.me])
        results.extend(
            (event.digests, bytes(event.data))
            for event in c.events(case)
            if isinstance(event, ResultComplete)
        )

    for play in PLANES.values():
        play(clause)
    assert len(results) == 2
    assert results[0] == results[1]
