"""How a session begins: with a genesis that it signs, or with what the last life left on disk."""

from __future__ import annotations

from collections.abc import Callable

from ...collectives.digest import merkle_root
from ...collectives.errors import ModelMismatchError
from ...collectives.group import Certified, Entry, Member, Vote
from ...collectives.layout import Layout, check_base, differences
from ...collectives.round import Log, genesis_payload
from .ports import Storage
from .replica import ModelReplica
from .serving import matches


def make_genesis(
    *,
    run: str,
    log: str,
    me: Member,
    replica: ModelReplica,
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


def replay(storage: Storage, replica: ModelReplica, entries: Log) -> bool:
    """Bring a restored replica to the end of the log by kept results; False when one is missing or
    damaged.
    """
    for certified in entries.since(replica.generation + 1):
        entry = certified.entry
        data = storage.results.kept(entry) if entry.contributors else None
        if entry.contributors and (data is None or not matches(entry, data)):
            return False
        replica.apply(entry, data)
        replica.publish(entry.round)
    return True


def check_model(mine: Layout, theirs: Layout) -> None:
    """Raise ModelMismatchError, naming the tensors, unless a script's model is the run's."""
    check_base(mine, theirs)
    if mine != theirs:
        lines = differences(mine, theirs)
        raise ModelMismatchError(
            (
                f"your model is not this run's model: {len(lines)} tensors, or settings of layers, "
                f"differ (it has {len(theirs.tensors)} tensors).\n  "
            )
            + "\n  ".join(lines[:8]),
            hint="use the model the run was founded with, frozen parts and attach(include=...) "
            "alike, or found another run: atoll new RUN.toml",
        )
