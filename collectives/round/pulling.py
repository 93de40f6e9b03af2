"""Repairing loss on the data plane by pull: who is asked for what has not come."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from .. import messages as m
from ..group import Entry, Member, Plan
from ..identifiers import PeerId
from .patience import silent_s, stuck_s
from .ways import broken

if TYPE_CHECKING:
    from .machine import RoundMachine

MISSING_SPANS = 256  # of one contribution in one message; the rest is asked for next time
PULLS_ALL_BUT = (
    3.0  # where members may lie: results that others already have are late here after so many pulls
)
# a source that sent nothing for so many pulls is asked again; what is under way would only come
# twice
PATIENCE_PULLS = 7.5


def ask_again(
    machine: RoundMachine,
    now: float,
    plan: Plan,
    missing: dict[bytes, m.Spans],
    lacking: dict[PeerId, m.Spans],
    resumed: Collection[PeerId],
) -> None:
    """Ask contributors for ``missing`` parts (telling the convener) and owners for ``lacking``
    results; less than before is progress.

    Lanes lose nothing while they last, so only sources that have fallen silent are asked, and at
    once those with a new lane.
    """
    opened, senders = machine.open, machine.open.senders
    opened.lacking_owners = frozenset(lacking)
    left = sum(map(_count, missing.values())) + sum(map(_count, lacking.values()))
    if opened.lacking is None or left < opened.lacking:
        opened.lacking = left
        opened.progress_at = now
        opened.bulk_at = now
        machine.convening.bulk_progress(now)
    machine.convening.on_own_report(missing)
    opened.cut.update(resumed)
    for peer in resumed:
        for source in (peer.encode(), *(cid for cid, peers in senders.items() if peer in peers)):
            opened.waiting[plan.plan_id, source] = (0, float("-inf"))
    silent = {
        cid: spans
        for cid, spans in missing.items()
        if _is_silent(machine, now, plan, cid, _count(spans))
    }
    me = machine.me.peer
    if missing or (
        lacking
        and (plan.topology.kind != "butterfly" or any(part.owner == me for part in plan.parts))
    ):
        body = m.Missing(
            plan.plan_id, tuple((cid, silent.get(cid, ())[:MISSING_SPANS]) for cid in missing)
        )
        for peer in sorted(
            {opened.plan_sender or me}.union(*(senders.get(cid, ()) for cid in silent)) - {me}
        ):
            machine.tell(peer, body)
    for owner, spans in lacking.items():
        if owner != me and _is_silent(machine, now, plan, owner.encode(), _count(spans)):
            machine.tell(owner, m.Need(plan.plan_id, spans[: m.MAX_CHUNK_LIST]))


def tell_dispute(machine: RoundMachine, disputed: m.Disputed | None) -> None:
    """Tell all why a partial sum is not used, until another plan is in force; and once who was
    wrong, if that turns out.
    """
    opened = machine.open
    if (
        disputed is None
        or opened.plan is None
        or not (
            disputed.plan_id == opened.plan.plan_id or (disputed.wrong and disputed != opened.told)
        )
    ):
        return
    opened.told = disputed
    for member in machine.config:
        machine.tell(member.peer, disputed)


def on_missing(machine: RoundMachine, now: float, who: Member, body: m.Missing) -> None:
    """An owner, or a node on the way to one, lacks contributions: send again what goes to it from
    here.
    """
    machine.convening.on_missing(now, who, body)
    if machine.open.plan and body.plan_id == machine.open.plan.plan_id:
        for cid, spans in body.lacking:
            if spans and machine.me.peer in machine.open.senders.get(cid, ()):
                machine.actions.resend_parts(who.peer, body.plan_id, cid, spans)


def on_the_way(machine: RoundMachine, now: float, entry: Entry) -> bool:
    """Whether the plan under way still brings the bytes of an entry, so that fetching them from
    others would bring them twice.

    Who knows the decision has closed the round: it sends what was queued for a lane that lasts, and
    nothing again over a new one. Where members may lie, an entry is proposed only once all owners
    have signed their results. An owner whose results are late then is remembered.
    """
    opened, plan = machine.open, machine.open.plan
    if plan is None or (plan.contributors, plan.parts, plan.topology) != (
        entry.contributors,
        entry.parts,
        entry.topology,
    ):
        return False
    if opened.decided is not None and opened.lacking_owners and opened.lacking_owners <= opened.cut:
        return False
    if broken(machine, plan):
        return False
    patience = silent_s(machine, PULLS_ALL_BUT) if machine.lying else stuck_s(machine)
    if now - max(opened.bulk_at, opened.planned_at) <= patience:
        return True
    if machine.lying and plan.topology.kind == "butterfly":
        for owner in opened.lacking_owners - {machine.me.peer}:
            machine.blamed.strike(owner, machine.round)
    return False


def _count(spans: m.Spans) -> int:
    return sum(stop - first for first, stop in spans)


def _is_silent(machine: RoundMachine, now: float, plan: Plan, source: bytes, left: int) -> bool:
    """Whether a source's count of chunks outstanding has stood still for a while; True at most once
    in that while.
    """
    known = machine.open.waiting.get((plan.plan_id, source))
    if (
        known is not None
        and left >= known[0]
        and now - known[1] < silent_s(machine, PATIENCE_PULLS)
    ):
        return False
    machine.open.waiting[plan.plan_id, source] = (left, now)
    return known is not None and left >= known[0]
