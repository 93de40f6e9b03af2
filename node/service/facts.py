"""How a run stands at this node, for the code that acts on it, and for whoever shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from ...collectives.errors import StorageError
from ...collectives.identifiers import PeerId
from ...collectives.outcomes import Spent
from ...collectives.reach import Reach, reach

if TYPE_CHECKING:
    from .run import RunService


class PeerFacts(NamedTuple):
    """One member or known peer. ``live`` and ``round`` (the one that is open there) are None where
    this node cannot tell; ``path``: of its lane, "" where there is none.
    """

    peer: PeerId
    you: bool
    member: bool
    organiser: bool
    live: bool | None
    round: int | None
    path: str
    role: str
    addresses: tuple[str, ...]


def peers_of(run: RunService) -> list[PeerFacts]:
    """Members first, then who else is known; nobody before the session is there."""
    session, me, now = run.session, run.node.identity.peer, trio.current_time()
    if session is None or run.whole is None:
        return []
    lanes = run.node.links.lane_paths()
    records = {record.peer: record for record in session.membership.records()}
    config = run.whole.config_peers()
    # Nobody tells anything of itself before the run is founded.
    early = () if config else session.contacts
    listed: Sequence[PeerId] = list(
        dict.fromkeys([*config, *records, *early, *run.budgets.refusing()])
    )
    return [
        PeerFacts(
            peer=peer,
            you=peer == me,
            member=peer in config,
            organiser=peer == run.organiser,
            live=session.others.there(now, peer),
            round=records[peer].round or None if peer in records else None,
            path="self" if peer == me else lanes.get(peer, ""),
            role=run.roles.get(peer, "train"),
            addresses=tuple(records[peer].addresses) if peer in records else (),
        )
        for peer in listed
    ]


def quorum(run: RunService) -> Reach | None:
    """How many members of the open round are reachable, and how many a decision needs; of a run in
    fragments, of one that cannot be decided, if there is one. None where this node cannot tell:
    just after a start a member may or may not be there.
    """
    peers, sessions = peers_of(run), run.whole.sessions if run.whole is not None else []
    least = max(
        [session.machine.shape.least for session in sessions if session.machine is not None],
        default=0,
    )
    organiser = next((each.peer for each in peers if each.organiser), None)
    found = list[Reach | None]()
    for session in sessions:
        config = set(session.config_peers())
        live = {each.peer: each.live for each in peers if each.peer in config}
        there = None not in live.values() and bool(live)
        members = {peer: bool(alive) for peer, alive in live.items()}
        lying = session.settings.lying
        found.append(reach(members, organiser, least, lying) if there else None)
    return next(
        (each for each in found if each is not None and not each.quorum),
        found[0] if found else None,
    )


def over_of(run: RunService) -> str:
    """Why the run is finished here before its last round; "" where it is not."""
    return run.session.over if run.session is not None else ""


def finished(run: RunService) -> bool:
    """Whether all rounds that the manifest asks for are committed, as far as this node knows, or no
    more are made.
    """
    if over_of(run):
        return True
    rounds = run.terms.settings.rounds if run.terms else None
    return rounds is not None and run.whole is not None and run.whole.completed >= rounds


def spent(run: RunService) -> Spent | None:
    """What this site has spent of its privacy; None in a run without noise."""
    session = run.session
    if session is not None:
        with contextlib.suppress(StorageError):  # told as a trouble where the run needs it
            return session.spending.spent()
    return None


def sealed(run: RunService) -> dict[str, Any] | None:
    """Without whom open rounds are being recertified, and whose answers the organiser waits for;
    None where none is.
    """
    views = [
        view
        for session in (run.whole.sessions if run.whole else ())
        if (view := session.recertifying.view()) is not None
    ]
    if not views:
        return None
    return {
        name: sorted({peer for view in views for peer in getattr(view, name)})
        for name in ("removed", "awaited")
    }
