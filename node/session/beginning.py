"""How a session begins: with a genesis that it signs, or with what the last life left on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ...collectives.codec import chunk_elements
from ...collectives.codecs.mixtures import mixture_of
from ...collectives.digest import merkle_root
from ...collectives.errors import LocalProtocolError, ModelMismatchError
from ...collectives.group import Certified, Entry, Member, Vote
from ...collectives.layout import Layout, differences
from ...collectives.round import Log, genesis_payload
from ...collectives.round.log import RECENT
from . import events as ev
from .ports import Replica, Storage

if TYPE_CHECKING:
    from .session import Session


def make_genesis(
    *,
    run: str,
    log: str,
    me: Member,
    replica: Replica,
    chunk_elements: int,
    codec: str,
    reducer: str,
    sign: Callable[[bytes], bytes],
) -> Certified:
    """The first entry of a run: binds its model (``base`` is the layout's digest), its initial
    state and its first member.
    """
    layout, root = replica.layout, merkle_root(replica.hashes())
    entry = Entry(
        log,
        0,
        layout.digest(),
        root,
        (),
        (),
        (),
        layout.numel,
        chunk_elements,
        codec,
        reducer,
        (me,),
    )
    return Certified(entry, (Vote(me, 0, sign(genesis_payload(run, entry.hash()))),))


def found(session: Session, now: float, layout: Layout, initial: Tensor) -> None:
    """Found the run with these parameters (float32, (numel,)): see `Session.found`."""
    storage = session.ports.storage
    if session.machine is not None or session.me != session.organiser or storage.journal().entries:
        raise LocalProtocolError("only the organiser founds a run, and only one that has no state")
    settings, journal, replica = (
        session.settings,
        storage.journal(),
        storage.replica(layout, restore=False),
    )
    replica.initialise(initial)
    replica.publish(0)
    certified = make_genesis(
        run=session.run,
        log=session.log,
        me=Member(session.me, journal.incarnation),
        replica=replica,
        chunk_elements=session.chunk_elements or chunk_elements(settings.codec, layout.numel),
        codec=mixture_of(layout, settings.codec, settings.codecs),
        reducer=settings.reducer,
        sign=session.ports.sign,
    )
    storage.found(
        replica, certified
    )  # before anybody hears of the run: nobody else could restore it
    session.replica = replica
    session.make_machine(now, certified).root = certified.entry.base_state
    session.opened(now)
    session.ports.emit(ev.StateReady(0))


def restore(session: Session, now: float) -> None:
    """The journal, the checkpoint and the results since; where something of it is missing, the
    state is sought among the others.

    Raises StorageError where storage says that nobody else can have it.
    """
    storage = session.ports.storage
    journal, layout = storage.journal(), storage.layout()
    if not journal.entries:
        return None
    newest = journal.entries.since(max(0, len(journal.entries) - RECENT))
    admitted = tuple(each for certified in newest for each in certified.entry.admitted)
    if admitted:  # a power cut may have taken what was written of them beside the journal
        session.ports.emit(ev.LetIn(admitted))
    replica = storage.replica(layout, restore=True) if layout is not None else None
    if replica is None or not 0 <= replica.generation < len(
        journal.entries
    ):  # or killed between a fetched state and its entries
        session.make_machine(now, journal.entries[0])
        return session.transfer.seek_state()
    if not replay(storage, replica, journal.entries, session.serving.matches):
        storage.lacks_results()
        session.make_machine(now, journal.entries[0])
        return session.installing.replay(now, replica)
    session.replica = replica
    session.make_machine(now, journal.entries[0])
    replica.publish(session.round)
    session.applying.hash_state(session.round + 1)
    session.opened(now)
    session.operations.restore(now)
    return session.ports.emit(ev.StateReady(session.completed))


def replay(
    storage: Storage, replica: Replica, entries: Log, matches: Callable[[Entry, memoryview], bool]
) -> bool:
    """Bring a restored replica to the end of the log by kept results; False when one is missing or
    damaged.
    """
    for certified in entries.since(replica.generation + 1):
        entry = certified.entry
        data = storage.kept(entry) if entry.contributors else None
        if entry.contributors and (data is None or not matches(entry, data)):
            return False
        replica.apply(entry, data)
        replica.publish(entry.round)
    return True


def check_model(mine: Layout, theirs: Layout) -> None:
    """Raise ModelMismatchError, naming the tensors, unless a script's model is the run's."""
    if mine != theirs:
        lines = differences(mine, theirs)
        raise ModelMismatchError(
            f"your model is not this run's model: {len(lines)} tensors differ (it has {len(theirs.tensors)}).\n  "
            + "\n  ".join(lines[:8]),
            hint="use the model the run was founded with, or found another run: atoll new RUN.toml",
        )
