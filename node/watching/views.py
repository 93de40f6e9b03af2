"""A run at this node as documents: for `atoll status`, `atoll peers` and whoever else asks.
JSON-able.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ...collectives.identifiers import PeerId
from ...collectives.swarm import RunSettings
from ...optim.planning import Choice, price
from ..run.events import RoundCommittedEvent, document
from ..run.gain import gain_of
from ..run.rate import TrainingRate, rate_of
from ..run.status import RunStatus
from ..service import facts
from ..service.facts import finished, over_of, sealed, spent
from ..service.troubles import described, other_histories
from ..session.documents import rounded
from ..session.pre_round import PreRoundView
from .chronicle import SEEKING
from .waiting import document_of, explained

if TYPE_CHECKING:
    from ..service.run import RunService
    from ..session.session import Session
    from .watcher import RunWatcher


def status_of(watch: RunWatcher) -> RunStatus:
    """One run, as this node knows it now."""
    run, manifest, chronicle = watch.run, watch.manifest, watch.chronicle
    session = run.whole
    config = session.config_peers() if session else []
    rounds = chronicle.rounds
    last = next((row for row in reversed(rounds) if isinstance(row, RoundCommittedEvent)), None)
    unsaved = next(
        (files.states.unsaved for files in run.files.values() if files.states.unsaved), None
    )
    trouble = (
        run.error or run.troubles.current or unsaved or other_histories(run.foreign, run.splits)
    )
    return RunStatus(
        run_id=run.run_id,
        name=run.name,
        organiser=run.organiser,
        phase="failed" if run.error else session.phase if session else "seeking",
        round=session.completed if session else -1,
        fragments=[part.completed for part in session.sessions]
        if session and len(session.sessions) > 1
        else [],
        entry=run.session.round if run.session else -1,
        rounds=manifest.train.rounds if manifest else None,
        finished=finished(run),
        over=over_of(run),
        left_s=_left_s(watch),
        rule=manifest.robust.reducer if manifest else "mean",
        lying=manifest.quorum.lying if manifest else 0,
        secure=_secure(watch),
        btard=_btard(run),
        privacy=msgspec.to_builtins(spent(run)),
        members=config,
        unreachable=_unreachable(run, config),
        member=run.node.identity.peer in config,
        drawn=_drawn(run),
        role=run.roles.get(run.node.identity.peer, "train"),
        join=_join(watch),
        quorum=None if run.error else _quorum(run),
        seal=sealed(run),
        waiting=waiting_of(watch),
        starting=run.start.view(),
        verdicts=watch.judge.view(),
        paused="" if finished(run) else run.pause.why,
        idle_s=watch.script.idle.view(trio.current_time()),
        unattached=watch.script.idle.unattached(trio.current_time()),
        preparing=watch.script.idle.preparing(trio.current_time()),
        script=bool(session and session.script),
        progress=list(_progress(watch)),
        metrics=dict(run.metrics),
        last_round=last,
        answers=chronicle.answers,
        evaluation=chronicle.evaluation,
        gain=_gain(watch),
        rate=_rate(watch, config),
        part=chronicle.part(run.node.identity.peer),
        last_operation=chronicle.operation,
        timings=watch.timings.view(manifest.train.overlap if manifest else "none"),
        bytes_sent=run.traffic()[0],
        bytes_received=run.traffic()[1],
        disk_bytes=watch.disk.used(trio.current_time()),
        banned={peer: run.banning.lists.why(peer) for peer in sorted(run.banning.lists.peers)},
        refused={peer: refusal.row() for peer, refusal in run.refusals.items()},
        trouble=described(trouble) if trouble else None,
        troubles=run.troubles.past(),
    )


def _progress(watch: RunWatcher) -> tuple[str, int, int]:
    """How far entering the run is. A founder whose script still loads its model misses no member:
    nobody can have a state before that script gives it.
    """
    run, progress = watch.run, watch.progress
    phase = run.whole.phase if run.whole is not None else ""
    if progress != SEEKING:
        return progress
    if phase == "fetching":
        return "waiting for the state", 0, 0
    if run.organiser == run.node.identity.peer and watch.script.idle.processes:
        return "waiting for the model that this machine's script loads", 0, 0
    return progress


def _left_s(watch: RunWatcher) -> float | None:
    """Seconds until all rounds are committed, at the pace of the newest; None where no number of
    rounds is asked for, before there is a pace, and once no round was committed for long.
    """
    run, manifest = watch.run, watch.manifest
    rounds, whole = manifest.train.rounds if manifest else None, run.whole
    period_s = watch.chronicle.period_s
    if rounds is None or whole is None or period_s is None or finished(run):
        return None
    if any(session.waits.announced for session in whole.sessions):
        return None
    return round((rounds - whole.completed) * period_s, 1)


def _gain(watch: RunWatcher) -> dict[str, float | None] | None:
    """How much sooner the run is with this machine, and than this machine alone; None before it was
    in a round, and where members do not learn each other's samples.
    """
    run, manifest = watch.run, watch.manifest
    if manifest is None or manifest.secure is not None:
        return None
    settings, session = manifest.settings(), run.whole
    share = 1.0 if settings.overlap != "none" else watch.timings.view()["training_share"]
    members = len(session.config_peers()) if session else 1
    rounds = [row.contributors for row in watch.chronicle.rounds]
    cost = cost_of(settings, manifest.parameters, members)
    found = gain_of(rounds, run.node.identity.peer, share, cost)
    return None if found is None else rounded(found._asdict())


def _rate(watch: RunWatcher, members: Sequence[PeerId]) -> TrainingRate | None:
    """How much the run and each member train on in a second; None where members do not learn each
    other's samples.
    """
    manifest = watch.manifest
    if manifest is None or manifest.secure is not None:
        return None
    rows = [row for row in watch.chronicle.rounds if row.contributors and not row.fragment]
    counted = [(row.at, row.contributors) for row in rows]
    return rate_of(counted, members, manifest.unit)


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


def _join(watch: RunWatcher) -> dict[str, Any]:
    """What newcomers go through."""
    join = watch.manifest.join if watch.manifest else None
    return (
        {}
        if join is None
        else {"policy": join.policy, "probation": join.probation, "per_hour": join.per_hour}
    )


def _newcomer(run: RunService, peer: PeerId) -> dict[str, Any]:
    """Of a peer that is no member: in how many rounds its work was found to be in order here, of
    how many; nothing without probation.
    """
    probation = run.terms.probation if run.terms else 0
    if (
        not probation
        or run.session is None
        or peer in run.banning.lists.trusted
        or peer == run.organiser
    ):
        return {}
    return {"probation": {"good": run.session.admission.good.get(peer, 0), "of": probation}}


def _btard(run: RunService) -> dict[str, Any] | None:
    return None if run.session is None else _before(run.session).document


def _before(session: Session) -> PreRoundView:
    before = session.pre_round
    return before.look(session.clock()) if before is not None else PreRoundView()


def _secure(watch: RunWatcher) -> dict[str, Any] | None:
    """How many contributions a sum needs with the present members, and whose were in the newest;
    None where they are not masked.
    """
    run = watch.run
    if run.session is None or watch.manifest is None or watch.manifest.secure is None:
        return None
    last = watch.chronicle.unmasked
    needed = _before(run.session).needed
    return {"threshold": needed, "last": document(last) if last else None}


def _quorum(run: RunService) -> dict[str, Any] | None:
    """Of the open round (`facts.quorum`)."""
    there = run.reach
    return None if there is None else {**msgspec.to_builtins(there), "held": there.quorum}


def waiting_of(watch: RunWatcher) -> dict[str, Any] | None:
    """What is waited for; of a run in fragments, in the one whose log has stood still for longest.
    ``quiet``: for longer than rounds take.
    """
    run = watch.run
    if run.whole is None or run.error:
        return None
    now = trio.current_time()
    found = [(session.waits.look(now), session.waits) for session in run.whole.sessions]
    waiting, waits = max(found, key=lambda each: each[0].round_open_s)
    waiting = explained(waiting, run.troubles.current, watch.script.idle.preparing(now))
    return {**document_of(waiting, now), "quiet": waits.announced}


def peers_of(watch: RunWatcher) -> list[dict[str, Any]]:
    """One a member or known peer. ``live``, ``round`` (the one that is open there) and
    ``completed`` (rounds before it) are None where this node cannot tell.
    """
    run, chronicle = watch.run, watch.chronicle
    session = run.session
    if session is None:
        return []
    return [
        {
            "peer": (peer := each.peer),
            "you": each.you,
            "member": each.member,
            "former": not each.member and chronicle.was_member(peer),
            "part": chronicle.part(peer),
            "organiser": each.organiser,
            "live": each.live,
            "other_history": peer in session.membership.foreign,
            "doubled": session.membership.doubled(peer),
            "path": each.path,
            "round": each.round,
            "completed": each.round - 1 if each.round is not None else None,
            "addresses": list(each.addresses),
            "role": each.role,
            "trusted": peer in run.banning.lists.trusted,
            **({} if each.member else _newcomer(run, peer)),
            **({"lying": session.settings.lying} if session.settings.lying else {}),
            **({"banned": why} if (why := run.banning.lists.why(peer)) is not None else {}),
            **({"over_budget": over} if (over := run.budgets.refused(peer)) else {}),
        }
        for each in facts.peers_of(run)
    ]


def cost_of(settings: RunSettings, parameters: int | None, members: int) -> float:
    """Times as many samples until the loss is that of one machine, by the planner's table; 1 where
    that says nothing of such a run.
    """
    if settings.method != "diloco" or settings.sync_every is None or not parameters:
        return 1.0
    choice = Choice(settings.sync_every, settings.codec, settings.overlap, settings.delay)
    return price(parameters, choice, members).samples
