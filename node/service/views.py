"""A run at this node as documents: for `atoll status`, `atoll peers` and whoever else asks.
JSON-able.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ...collectives.errors import StorageError
from ...collectives.identifiers import PeerId
from ...collectives.swarm import Spent
from ..run.events import RoundCommittedEvent, document
from ..run.gain import cost_of, gain_of
from ..run.quorum import quorum_of
from ..run.rate import TrainingRate, rate_of
from ..run.status import RunStatus
from ..session.documents import rounded
from ..session.pre_round import PreRoundView
from .chronicle import SEEKING
from .troubles import described, other_histories
from .waiting import document_of, explained

if TYPE_CHECKING:
    from ..session.session import Session
    from .run import RunService


def status_of(run: RunService) -> RunStatus:
    """One run, as this node knows it now."""
    session = run.whole
    config = session.config_peers() if session else []
    rounds = run.chronicle.rounds
    last = next((row for row in reversed(rounds) if isinstance(row, RoundCommittedEvent)), None)
    unsaved = next(
        (files.states.unsaved for files in run.files.values() if files.states.unsaved), None
    )
    trouble = (
        run.error or run.troubles.current or unsaved or other_histories(run.foreign, run.splits)
    )
    return RunStatus(
        run_id=run.run_id,
        name=run.manifest.name if run.manifest else "",
        organiser=run.organiser,
        phase="failed" if run.error else session.phase if session else "seeking",
        round=session.completed if session else -1,
        fragments=[part.completed for part in session.sessions]
        if session and len(session.sessions) > 1
        else [],
        entry=run.session.round if run.session else -1,
        rounds=run.manifest.train.rounds if run.manifest else None,
        finished=finished(run),
        over=over_of(run),
        left_s=_left_s(run),
        rule=run.manifest.robust.reducer if run.manifest else "mean",
        lying=run.manifest.quorum.lying if run.manifest else 0,
        secure=_secure(run),
        btard=_btard(run),
        privacy=msgspec.to_builtins(spent(run)),
        members=config,
        unreachable=_unreachable(run, config),
        member=run.node.identity.peer in config,
        drawn=_drawn(run),
        role=run.roles.get(run.node.identity.peer, "train"),
        join=_join(run),
        quorum=None if run.error else quorum(run),
        seal=sealed(run),
        waiting=waiting_of(run),
        starting=run.start.view(),
        verdicts=run.judge.view(),
        paused="" if finished(run) else run.pause.why,
        idle_s=run.idle.view(trio.current_time()),
        unattached=run.idle.unattached(trio.current_time()),
        preparing=run.idle.preparing(trio.current_time()),
        script=bool(session and session.script),
        progress=list(_progress(run)),
        metrics=dict(run.metrics),
        last_round=last,
        answers=run.chronicle.answers,
        evaluation=run.chronicle.evaluation,
        gain=_gain(run),
        rate=_rate(run, config),
        part=run.chronicle.part(run.node.identity.peer),
        last_operation=run.chronicle.operation,
        timings=run.timings.view(run.manifest.train.overlap if run.manifest else "none"),
        bytes_sent=run.traffic()[0],
        bytes_received=run.traffic()[1],
        disk_bytes=run.disk.used(trio.current_time()),
        banned={peer: run.banning.lists.why(peer) for peer in sorted(run.banning.lists.peers)},
        refused={peer: refusal.row() for peer, refusal in run.refusals.items()},
        trouble=described(trouble) if trouble else None,
        troubles=run.troubles.past(),
    )


def _progress(run: RunService) -> tuple[str, int, int]:
    """How far entering the run is. A founder whose script still loads its model misses no member:
    nobody can have a state before that script gives it.
    """
    progress, phase = run.chronicle.progress, run.whole.phase if run.whole is not None else ""
    if progress != SEEKING:
        return progress
    if phase == "fetching":
        return "waiting for the state", 0, 0
    if run.organiser == run.node.identity.peer and run.idle.processes:
        return "waiting for the model that this machine's script loads", 0, 0
    return progress


def _left_s(run: RunService) -> float | None:
    """Seconds until all rounds are committed, at the pace of the newest; None where no number of
    rounds is asked for, before there is a pace, and once no round was committed for long.
    """
    rounds, whole = run.manifest.train.rounds if run.manifest else None, run.whole
    period_s = run.chronicle.period_s
    if rounds is None or whole is None or period_s is None or finished(run):
        return None
    if any(session.waits.announced for session in whole.sessions):
        return None
    return round((rounds - whole.completed) * period_s, 1)


def _gain(run: RunService) -> dict[str, float | None] | None:
    """How much sooner the run is with this machine, and than this machine alone; None before it was
    in a round, and where members do not learn each other's samples.
    """
    manifest = run.manifest
    if manifest is None or manifest.secure is not None:
        return None
    settings, session = manifest.settings(), run.whole
    share = 1.0 if settings.overlap != "none" else run.timings.view()["training_share"]
    members = len(session.config_peers()) if session else 1
    rounds = [row.contributors for row in run.chronicle.rounds]
    cost = cost_of(settings, manifest.parameters, members)
    found = gain_of(rounds, run.node.identity.peer, share, cost)
    return None if found is None else rounded(found._asdict())


def _rate(run: RunService, members: Sequence[PeerId]) -> TrainingRate | None:
    """How much the run and each member train on in a second; None where members do not learn each
    other's samples.
    """
    if run.manifest is None or run.manifest.secure is not None:
        return None
    rows = [row for row in run.chronicle.rounds if row.contributors and not row.fragment]
    counted = [(row.at, row.contributors) for row in rows]
    return rate_of(counted, members, run.manifest.unit)


def over_of(run: RunService) -> str:
    """Why the run is finished here before its last round; "" where it is not."""
    return run.session.over if run.session is not None else ""


def finished(run: RunService) -> bool:
    """Whether all rounds that the manifest asks for are committed, as far as this node knows, or no
    more are made.
    """
    if over_of(run):
        return True
    rounds = run.manifest.train.rounds if run.manifest else None
    return rounds is not None and run.whole is not None and run.whole.completed >= rounds


def _unreachable(run: RunService, config: Sequence[PeerId]) -> list[PeerId]:
    """Members that this node takes to be gone."""
    session, now = run.session, trio.current_time()
    return (
        []
        if session is None
        else [peer for peer in config if session.others.there(now, peer) is False]
    )


def _drawn(run: RunService) -> list[PeerId]:
    """Who takes part in the open round, in a run that asks some of its members only; else nobody is
    named.
    """
    machine = run.session.machine if run.session else None
    return (
        []
        if machine is None or machine.shape.sample is None
        else [member.peer for member in machine.draw.members]
    )


def _join(run: RunService) -> dict[str, Any]:
    """What newcomers go through."""
    join = run.manifest.join if run.manifest else None
    return (
        {}
        if join is None
        else {"policy": join.policy, "probation": join.probation, "per_hour": join.per_hour}
    )


def _newcomer(run: RunService, peer: PeerId) -> dict[str, Any]:
    """Of a peer that is no member: in how many rounds its work was found to be in order here, of
    how many; nothing without probation.
    """
    probation = run.manifest.join.probation if run.manifest else 0
    if (
        not probation
        or run.session is None
        or peer in run.banning.lists.trusted
        or peer == run.organiser
    ):
        return {}
    return {"probation": {"good": run.session.admission.good.get(peer, 0), "of": probation}}


def _btard(run: RunService) -> dict[str, Any] | None:
    if run.session is None or run.session.settings.btard is None:
        return None
    return _before(run.session).document


def _before(session: Session) -> PreRoundView:
    before = session.pre_round
    return before.look(session.clock()) if before is not None else PreRoundView()


def _secure(run: RunService) -> dict[str, Any] | None:
    """How many contributions a sum needs with the present members, and whose were in the newest;
    None where they are not masked.
    """
    if run.session is None or run.session.settings.secure is None:
        return None
    last = run.chronicle.unmasked
    needed = _before(run.session).needed
    return {"threshold": needed, "last": document(last) if last else None}


def spent(run: RunService) -> Spent | None:
    """What this site has spent of its privacy; None in a run without noise."""
    session = run.session
    if session is not None:
        with contextlib.suppress(StorageError):  # told as a trouble where the run needs it
            return session.spending.spent()
    return None


def quorum(run: RunService) -> dict[str, Any] | None:
    """Of the open round; of a run in fragments, of one that cannot be decided, if there is one.
    None where this node cannot tell.
    """
    rows, sessions = run.peers(), run.whole.sessions if run.whole is not None else []
    configs = [set(session.config_peers()) for session in sessions]
    least = max(
        [session.machine.shape.least for session in sessions if session.machine is not None],
        default=0,
    )
    there = [
        quorum_of([{**row, "member": row["peer"] in config} for row in rows], least)
        for config in configs
    ]
    return next(
        (found for found in there if found is not None and not found["held"]),
        there[0] if there else None,
    )


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


def waiting_of(run: RunService) -> dict[str, Any] | None:
    """What is waited for; of a run in fragments, in the one whose log has stood still for longest.
    ``quiet``: for longer than rounds take.
    """
    if run.whole is None or run.error:
        return None
    now = trio.current_time()
    found = [(session.waits.look(now), session.waits) for session in run.whole.sessions]
    waiting, waits = max(found, key=lambda each: each[0].round_open_s)
    waiting = explained(waiting, run.troubles.current)
    return {**document_of(waiting, now), "quiet": waits.announced}


def peers_of(run: RunService) -> list[dict[str, Any]]:
    """One a member or known peer. ``live``, ``round`` (the one that is open there) and
    ``completed`` (rounds before it) are None where this node cannot tell.
    """
    session, me, now = run.session, run.node.identity.peer, trio.current_time()
    if session is None or run.whole is None:
        return []
    lanes = run.node.network.status()["lanes"]
    membership = session.membership
    records = {record.peer: record for record in membership.records()}
    config = run.whole.config_peers()
    # Nobody tells anything of itself before the run is founded.
    early = () if config else session.contacts
    listed: Sequence[PeerId] = list(
        dict.fromkeys([*config, *records, *early, *run.budgets.refusing()])
    )
    return [
        {
            "peer": peer,
            "you": peer == me,
            "member": peer in config,
            "former": peer not in config and run.chronicle.was_member(peer),
            "part": run.chronicle.part(peer),
            "organiser": peer == run.organiser,
            "live": session.others.there(now, peer),
            "other_history": peer in membership.foreign,
            "doubled": membership.doubled(peer),
            "path": "self" if peer == me else lanes.get(peer, ""),
            "round": (open_ := records[peer].round or None if peer in records else None),
            "completed": open_ - 1 if open_ is not None else None,
            "addresses": list(records[peer].addresses) if peer in records else [],
            "role": run.roles.get(peer, "train"),
            "trusted": peer in run.banning.lists.trusted,
            **(_newcomer(run, peer) if peer not in config else {}),
            **({"lying": session.settings.lying} if session.settings.lying else {}),
            **({"banned": why} if (why := run.banning.lists.why(peer)) is not None else {}),
            **({"over_budget": over} if (over := run.budgets.refused(peer)) else {}),
        }
        for peer in listed
    ]
