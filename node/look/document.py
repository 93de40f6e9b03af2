"""The picture of a run as plain values, for the page and for `--json`: who and what by numbers,
rounds in columns from some round on, so that a reader that has the rest is sent what is new.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ...collectives.foreign import escaped
from ..home.names import name_of
from ..run.events import RunTroubleEvent, VerdictRaisedEvent
from ..run.quorum import no_quorum
from ..run.status import RunStatus
from ..views.documents import path_text, run_state, too_few
from ..views.reach_views import reach_text
from .view import Curve, PeerPicture, RoundPicture, RunPicture, Trouble

SCHEMA = 1


def document(
    view: RunPicture, now: float, *, rounds: int = 0, lines: int = 0, losses: int = 0
) -> dict[str, Any]:
    """All of it; of rounds, lines and losses those after the first so many that there ever were.

    Not finite numbers are left out, as JSON has none. Words of others are escaped.
    """
    about, rate = view.about, view.rate()
    return {
        "schema": SCHEMA,
        "changes": view.changes,
        "now": now,
        "began": view.began,
        "run": {
            "id": escaped(about.run_id),
            "name": escaped(about.name),
            "kind": about.kind,
            "rounds": about.rounds,
            "sync_every": about.sync_every,
            "codec": escaped(about.codec),
            "overlap": about.overlap,
            "parameters": about.parameters,
            "unit": about.unit,
            "hidden": [
                what
                for what in ("samples", "timings", "losses")
                if not getattr(about.allowed, what)
            ],
        },
        "state": state_words(view),
        "reach": reach_words(view),
        "waits": waits_words(view),
        "script": view.script,
        "quick": figures(view, now),
        "mean": {escaped(name, 64): finite(value) for name, value in view.mean.items()},
        "metrics": {escaped(name, 64): finite(value) for name, value in view.metrics.items()},
        "peers": [
            {**peer_row(view, peer), "rate": rate.members.get(peer.peer) if rate else None}
            for peer in view.peers
        ],
        "rate": None
        if rate is None
        else {"unit": rate.unit, "all": rate.all, "members": len(rate.members)},
        "evaluation": evaluation_row(view),
        "answers": [
            [each.at, each.round, escaped(each.prompt, 400), escaped(each.text, 4096)]
            for each in view.answers
        ],
        "rounds": columns(view, rounds),
        "losses": curves(view, losses),
        "held_out": _curve(view.held_out, losses),
        "verdicts": [verdict_row(each) for each in verdicts(view)],
        "lines": _lines(view, lines),
        "skipped": view.skipped,
    }


def figures(view: RunPicture, now: float) -> dict[str, Any]:
    """`RunPicture.quick`, without what may not be shown."""
    found = view.quick(now)
    if not view.about.allowed.samples:
        found["samples"], found["gain"] = None, ""
    return found


def evaluation_row(view: RunPicture) -> dict[str, Any] | None:
    """The newest loss on held-out data that a script has shown."""
    found = view.evaluation
    if found is None:
        return None
    return {
        "round": found.round,
        "tokens": found.tokens,
        "held_out": finite(found.held_out),
    }


def peer_row(view: RunPicture, peer: PeerPicture) -> dict[str, Any]:
    """One peer."""
    allowed, link = view.about.allowed, peer.link
    you = peer.you or peer.peer == view.me
    why = (view.node.get("network") or {}).get("lanes_why") or {}
    return {
        "number": peer.number,
        "id": escaped(peer.peer),
        "name": name_of(peer.peer),
        "you": you,
        "member": peer.member,
        "state": peer_state(peer),
        "path": "" if you else escaped(path_kind(link)),
        "path_text": "" if you or "path" not in link else escaped(path_text(link)),
        "why": escaped(why.get(peer.peer, ""), 400) if isinstance(why, Mapping) else "",
        "rtt_ms": _number(link.get("rtt_ms")),
        "up_bytes_per_s": _number(link.get("up_bytes_per_s")),
        "down_bytes_per_s": _number(link.get("down_bytes_per_s")),
        "since": peer.since,
        "until": peer.until,
        "rounds": peer.rounds,
        "round": peer.round,
        "samples": peer.samples if allowed.samples else None,
        "lost": peer.lost,
        "slowest": peer.slowest if allowed.timings else None,
        "sent": peer.sent,
        "received": peer.received,
        "loss": finite(peer.loss) if allowed.losses or you else None,
    }


def peer_state(peer: PeerPicture) -> str:
    """In a word or two."""
    link = peer.link
    if link.get("banned"):
        return "banned"
    if link.get("doubled"):
        return "doubled"
    if not peer.member:
        return (
            "gone"
            if peer.rounds or peer.until
            else str(link.get("role") or "newcomer").replace("train", "newcomer")
        )
    return "lost" if link.get("live") is False else "live" if link.get("live") else "member"


def path_kind(link: Mapping[str, Any]) -> str:
    """``direct``, ``lan``, ``punched``, ``relay`` or ``none``; "" where nobody has said."""
    if "path" not in link:
        return ""
    text = f"{link.get('path') or ''} {link.get('link') or ''}"
    found = (kind for kind in ("relay", "punched", "lan", "direct") if kind in text.split(" ")[0])
    return (
        next(found, "") or str(link.get("link") or "") or ("direct" if link.get("path") else "none")
    )


def columns(view: RunPicture, after: int) -> dict[str, Any]:
    """The rounds after the first ``after``, a list for each field; ``first``: how many came before.
    Contributors and lost are bits, in hexadecimal.
    """
    allowed = view.about.allowed
    first = max(after, view.taken - len(view.rounds))
    rows = list(islice(view.rounds, len(view.rounds) - (view.taken - first), None))
    found: dict[str, Any] = {
        "first": first,
        "round": [row.round for row in rows],
        "fragment": [row.fragment for row in rows],
        "at": [row.at for row in rows],
        "period_s": [_short(row.period_s) for row in rows],
        "elapsed_s": [_short(row.elapsed_s) for row in rows],
        "waited_s": [_short(row.waited_s) for row in rows],
        "who": [f"{row.who:x}" for row in rows],
        "lost": [f"{row.lost:x}" for row in rows],
        "members": [row.members for row in rows],
        "counted": [row.counted for row in rows],
        "sent": [row.sent for row in rows],
        "samples": [row.samples for row in rows] if allowed.samples else [],
    }
    slow: Sequence[RoundPicture] = rows if allowed.timings else ()
    return {
        **found,
        "slowest": [row.slowest for row in slow],
        "phase": [escaped(row.phase, 32) for row in slow],
        "behind_s": [_short(row.behind_s) for row in slow],
    }


def curves(view: RunPicture, after: int) -> dict[str, Any]:
    """By peer's number: the losses after the first ``after`` of each, by round."""
    found = dict[str, Any]()
    for number, curve in view.curves.items():
        you = view.peers[number].peer == view.me or len(view.curves) == 1
        if view.about.allowed.losses or you:
            found[str(number)] = _curve(curve, after)
    return found


def _curve(curve: Curve, after: int) -> dict[str, Any]:
    first = max(after, curve.taken - len(curve.rounds))
    skip = len(curve.rounds) - (curve.taken - first)
    return {
        "first": first,
        "rounds": list(islice(curve.rounds, skip, None)),
        "losses": [finite(loss) for loss in islice(curve.losses, skip, None)],
    }


def _lines(view: RunPicture, after: int) -> dict[str, Any]:
    first = max(after, view.lines_taken - len(view.lines))
    rows = islice(view.lines, len(view.lines) - (view.lines_taken - first), None)
    return {
        "first": first,
        "rows": [[at, escaped(kind, 64), escaped(text, 2000)] for at, kind, text in rows],
    }


def verdicts(view: RunPicture) -> list[Trouble]:
    """What is wrong now, the newest last: while the node answers, by its word."""
    if view.status is None:
        return list(view.verdicts.values())
    found: list[Trouble] = [
        each for each in view.verdicts.values() if isinstance(each, VerdictRaisedEvent)
    ]
    for trouble in (view.status.trouble, *(view.node.get("troubles") or ())):
        if isinstance(trouble, Mapping):
            found.append(
                RunTroubleEvent(
                    at=view.at or 0.0,
                    code=str(trouble.get("code") or ""),
                    message=str(trouble.get("message") or ""),
                    hint=str(trouble.get("hint") or ""),
                    why=str(trouble.get("why") or ""),
                )
            )
    return found


def verdict_row(event: Trouble) -> dict[str, Any]:
    """One of them."""
    if isinstance(event, VerdictRaisedEvent):
        message = f"{name_of(event.subject)}: {event.said}" if event.subject else event.said
        hint, why = "", ""
    else:
        message, hint, why = event.message, event.hint, event.why
    return {
        "at": event.at,
        "code": escaped(event.code, 16),
        "message": escaped(message, 2000),
        "hint": escaped(hint or f"atoll explain {event.code}", 2000),
        "why": escaped(why, 2000),
    }


def state_words(view: RunPicture) -> str:
    """What the run does here."""
    if view.status is not None:
        return escaped(run_state(view.status), 400)
    newest = view.rounds[-1].round if view.rounds else 0
    if view.about.rounds is not None and newest >= view.about.rounds:
        return f"finished: all {view.about.rounds} rounds are committed"
    return escaped(view.unanswered, 400) or "as recorded"


def reach_words(view: RunPicture) -> str:
    """How this node is reached; "" where no node has said."""
    reach = (view.node.get("network") or {}).get("reach")
    return escaped(reach_text(reach)) if isinstance(reach, Mapping) and reach else ""


def waits_words(view: RunPicture) -> str:
    """What is waited for, once no round came for long, and what is lacking; "" for nothing."""
    status = view.status or RunStatus()
    lack = no_quorum(status.quorum) or too_few(status)
    waiting = view.waiting
    if not waiting or waiting.get("state") == "finished":
        return escaped(lack, 400)
    of = waiting.get("of")
    names = ", ".join(name_of(str(peer)) for peer in of) if isinstance(of, Sequence) else ""
    sentence = f"{waiting.get('state')}: waits for {waiting.get('what')}"
    sentence += (f", of {names}" if names else "") + f"; ends when {waiting.get('ends')}"
    return escaped("; ".join(filter(None, (sentence, lack))), 600)


def finite(value: float | None) -> float | None:
    """``value`` as JSON can have it."""
    return value if value is not None and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def _number(value: Any) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return finite(float(value)) if is_one else None
