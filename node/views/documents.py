"""Documents of the node as text for people. A document may lack any field: nodes of other versions
are asked, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from ...collectives.foreign import escaped, quoted
from ...security.rule_names import RUNNING, parse_reducer
from ..client.starting import waits_text
from ..home.output import Terminal, bytes_text, short_peer, span_text
from ..run.events import RoundCommittedEvent
from ..run.gain import gain_words
from ..run.quorum import no_quorum, quorum_of
from ..run.rate import TrainingRate, rate_number, rate_words
from ..run.status import FIGURES, RunStatus, read_run_status
from .alone import entry_name, entry_text
from .reach_views import outcome, reach_text

Document = Mapping[str, Any]


def status_text(terminal: Terminal, status: Document) -> str:
    """One screen: the node, then one block a run."""
    peer = str(status.get("peer", ""))
    kind = (
        "private node of process " + str(status.get("parent_pid"))
        if status.get("private")
        else "node"
    )
    head = f"{kind}  {short_peer(peer) if peer else ''}"
    if "uptime_s" in status:
        head += f"  up {span_text(float(status['uptime_s']))}"
    lines = [terminal.style(head, sys.stdout, bold=True)]
    network: Document = status.get("network") or {}
    lines += [
        f"  {'listens' if i == 0 else '       '}  {address}"
        for i, address in enumerate(network.get("addresses") or ())
    ]
    if "connected" in network:
        count = len(network["connected"])
        lines.append(f"  network  connected to {count} peer{'' if count == 1 else 's'}")
    lines += [
        f"  entry    {entry_name(str(peer))}  {entry_text(str(state))}"
        for peer, state in (network.get("bootstrap") or {}).items()
        if state != "connected"
    ]
    if reach := network.get("reach"):
        lines.append(
            "  reach    "
            f"{reach_text(reach)}{'   (atoll netcheck)' if outcome(reach) == 'cut-off' else ''}"
        )
    runs: Sequence[Document] = status.get("runs") or ()
    for run in runs:
        lines += ["", *run_lines(terminal, read_run_status(run))]
    if not runs:
        lines += ["  no runs. Join one: atoll join INVITE"]
    for trouble in status.get("troubles") or ():
        lines += trouble_lines(terminal, trouble)
    return "\n".join(lines)


def run_lines(terminal: Terminal, run: RunStatus) -> list[str]:
    """A run in a few lines."""
    head = f"{run.name}  {run.run_id[:8]}  round {round_text(run)}"
    members = run.members or ()
    shown = ", ".join(short_peer(str(peer)) for peer in members)
    last = run.last_round
    weights = last.weights if last else {}
    metrics = sorted(metrics_of(run.metrics).items())
    rows = [
        ("state", run_state(run)),
        ("members", f"{len(members)}: {shown}" if members else ""),
        ("join", entry_words(run)),
        ("rule", rule_text(run.rule) if run.rule != "mean" else ""),
        ("lying", lying_text(run.lying, len(members)) if run.lying else ""),
        ("secure", secure_text(run.secure) if run.secure else ""),
        ("privacy", privacy_text(run.privacy) if run.privacy else ""),
        ("last", last_text(run, last) if last else ""),
        ("weights", "  ".join(f"{short_peer(peer)} {w:.3g}" for peer, w in weights.items())),
        ("rate", rates_of_members(run.rate) if run.rate else ""),
        ("worth", gain_words(run.gain) if run.gain else ""),
        ("part", _NO_PART if run.part == 0 else ""),
        ("script", "  ".join(f"{key} {value:.6g}" for key, value in metrics)),
        ("learned", run.evaluation.words() if run.evaluation else ""),
        *(("answers", each.words()) for each in run.answers),
        ("traffic", traffic_text(run)),
        *((figure.label, figure.text(run)) for figure in FIGURES),
        *(
            ("banned", f"{short_peer(peer)}: {escaped(why, 400)}")
            for peer, why in run.banned.items()
        ),
        *(("refused", refusal_text(peer, why)) for peer, why in run.refused.items()),
        ("next", finished_text(run) if run.finished else ""),
    ]
    return [
        terminal.style(head, sys.stdout, bold=True),
        *(f"  {label:7}  {words}" for label, words in rows if words),
        *verdict_lines(terminal, run),
        *waiting_lines(run),
        *trouble_lines(terminal, run.trouble),
    ]


def rates_of_members(rate: TrainingRate) -> str:
    """Of all, and of each: ``800 learned tokens a second, of 2 members: …jwEp 500, …aaVb 300``."""
    each = ", ".join(
        f"{short_peer(peer)} {rate_number(found)}" for peer, found in rate.members.items()
    )
    return f"{rate_words(rate.unit, rate.all, len(rate.members))}: {each}"


_NO_PART = "none: this node's link is too slow to add up for the others; it sends and receives only"


def last_text(run: RunStatus, last: RoundCommittedEvent) -> str:
    """The newest round with contributors. Behind masks nobody's samples are told: each contribution
    is an entry's 1, and their sum would be no number of samples.
    """
    where = f" of fragment {last.fragment}" if run.fragments else ""
    told = "" if run.secure else f", {sum(last.contributors.values())} samples"
    return f"round {last.round}{where}: {len(last.contributors)} contributed{told}"


def traffic_text(run: RunStatus) -> str:
    """Bytes of the run; "" where the node does not say."""
    if run.bytes_sent is None:
        return ""
    return f"{bytes_text(run.bytes_sent)} sent, {bytes_text(run.bytes_received or 0)} received"


def finished_text(run: RunStatus) -> str:
    """What there is to do with a run that has all its rounds."""
    given = run.run_id[:8]
    return (
        f"The model: atoll export {given} DIR    A run that goes on from it: atoll "
        "new --from DIR --name NAME"
    )


def refusal_text(peer: str, refusal: Sequence[Any]) -> str:
    """Who does not let this node in: a member's refusal is one, a stranger's is something that a
    stranger says.
    """
    code, reason, standing, address = [*map(str, refusal), "", "", "", ""][:4]
    sentence = f"{quoted(reason)} ({escaped(code, 16)})"
    if standing != "stranger":
        return f"by {short_peer(peer)}: {sentence}"
    where = f" at {escaped(address)}" if address else ""
    return f"no member of this run, a stranger{where}, {short_peer(peer)}, says {sentence}"


def entry_words(run: RunStatus) -> str:
    """What this node may do, where that is not everything, and what newcomers go through."""
    join, role = run.join, run.role
    sentences = [f"this node's invite is to {role}"] if role != "train" else []
    if join.get("probation"):
        mine = (
            ""
            if run.member or role != "train"
            else "; this node's work is compared, not counted yet"
        )
        sentences.append(f"newcomers are on probation for {join['probation']} rounds{mine}")
    if join.get("per_hour"):
        sentences.append(f"at most {join['per_hour']} become members in an hour")
    return "; ".join(sentences)


_OPTION_TEXT = {
    "k2": "n − f − 2 are kept",
    "n1": "scored by n − f − 1 neighbours",
    RUNNING: "clipped at the median distance in rounds before",
}


def rule_text(reducer: str) -> str:
    """A robust rule in words, by the name that plans have for it."""
    parsed = parse_reducer(reducer)
    if parsed is None:
        return reducer
    steps = "".join(
        f"{step.kind}{f' {step.number:g}' if step.number else ''}, " for step in parsed.before
    )
    options = "".join(f", {_OPTION_TEXT[option]}" for option in parsed.options)
    return (
        f"{steps}{parsed.rule}{options}, f = {parsed.f}: up to {parsed.f} of a round's "
        f"contributions may be hostile; it needs {parsed.least} of them"
    )


def lying_text(lying: int, members: int) -> str:
    """How many members may lie, and what that takes; ``members`` 0: not known yet."""
    least = 3 * lying + 1
    sentence = f"the log stays one though {lying} of its members lie{'s' if lying == 1 else ''}"
    if not members:
        return f"{sentence}; that takes {least} members, and rounds begin with the last of these"
    return (
        f"{sentence}: it takes {(members + lying) // 2 + 1} of {members}"
        if members >= least
        else f"rounds begin with {least} members; there are {members}"
    )


def secure_text(secure: Mapping[str, Any]) -> str:
    """What is masked, and what was unmasked last."""
    last = secure.get("last") or {}
    newest = f"; the last sum was of {len(last['members'])}" if last.get("members") else ""
    newest += f" in {len(last['buckets'])} buckets" if last.get("buckets") else ""
    newest += "".join(
        f", mean {name} {value:.6g}" for name, value in (last.get("metrics") or {}).items()
    )
    if last.get("metrics"):
        sites, counted = len(last["members"]), int(last.get("weight") or 0)
        newest += (
            f" over {counted:,} examples of {sites} sites"
            if counted > sites
            else f" over {sites} sites, each alike"
        )
    return f"contributions are masked: a sum needs {secure.get('threshold')} of them{newest}"


def privacy_text(privacy: Mapping[str, Any]) -> str:
    """What this site has spent of its privacy."""
    spent = (
        f"epsilon {privacy.get('epsilon', 0.0):.3g} of {privacy.get('stop_at_epsilon', 0.0):g} "
        f"spent here at delta {privacy.get('delta', 0.0):g}"
    )
    clip = f"; bound {privacy.get('clip', 0.0):.3g}" + (
        f", by quantile {privacy['quantile']:g}" if privacy.get("quantile") else ""
    )
    told = (
        f"{spent}, in {privacy.get('steps')} contributions; {privacy.get('left')} more may follow"
    )
    return told + clip


def waiting_lines(run: RunStatus) -> list[str]:
    """What is waited for, of whom, since when and what would end it, once no round was committed
    for long.
    """
    waiting = run.waiting
    if waiting is None or not waiting.get("quiet") or run.finished:
        return []
    of = ", ".join(short_peer(str(peer)) for peer in waiting.get("of") or ())
    open_s = float(waiting.get("round_open_s") or 0)
    return [
        f"  waiting  {waiting.get('state')}, no round for {open_s:.0f} s: {waiting.get('what')}"
        + (f", of {of}" if of else ""),
        f"           ends when {waiting.get('ends')}",
    ]


def verdict_lines(terminal: Terminal, run: RunStatus) -> list[str]:
    """What has been wrong for several rounds."""
    lines = list[str]()
    for each in run.verdicts:
        of = f"{short_peer(str(each['subject']))} " if each.get("subject") else ""
        code, text = escaped(each.get("code", ""), 16), escaped(each.get("said", ""), 2000)
        lines.append(f"  verdict  {code} {escaped(each.get('title', ''), 200)}: {of}{text}")
        lines.append(f"           atoll explain {code}")
    return [terminal.style(line, sys.stdout, fg="yellow") for line in lines]


def trouble_lines(terminal: Terminal, trouble: Any) -> list[str]:
    """What is wrong and what to type; nothing when nothing is."""
    if not isinstance(trouble, Mapping):
        return []
    lines = [
        (
            f"  trouble  {escaped(trouble.get('code', ''), 16)} "
            f"{escaped(trouble.get('message', ''), 2000)}"
        ),
        f"           {escaped(trouble.get('hint', ''), 2000)}",
    ]
    return [terminal.style(line, sys.stdout, fg="yellow") for line in lines if line.strip()]


def round_text(run: RunStatus) -> str:
    """``12/35``; of a model in fragments ``12+11+12/35``, one number each. A dash before the state
    is known.
    """
    held = "+".join(str(round_) if round_ >= 0 else "–" for round_ in run.fragments or [run.round])
    return f"{held}{f'/{run.rounds}' if run.rounds else ''}"


def run_state(run: RunStatus) -> str:
    """What the node does in a run, in words."""
    phase = run.phase or "unknown"
    if phase == "stored":
        return "stored; the node is not in it"
    if phase == "failed":
        return "failed; entering it again tries again"
    if phase != "running":
        stage, done, total = [*run.progress, "", 0, 0][:3]
        share = f" {100 * int(done) // int(total)}%" if total else ""
        return f"{stage}{share}" if stage else phase
    if run.finished:
        over = escaped(run.over, 400)
        return f"finished: {over}" if over else f"finished: all {run.rounds} rounds are committed"
    if run.starting is not None:
        state = waits_text(int(run.starting.get("there", 0)), int(run.starting.get("wanted", 0)))
        if lack := too_few(run):  # to begin without them is no help: no sum would come about
            return f"{state}; {lack}"
        return f"{state}; begin without: atoll begin {run.run_id[:8]}"
    if run.paused:
        state = f"{escaped(run.paused)}; the node serves the run"
    elif not run.script and run.preparing:
        state = "seeding"
    elif not run.script:
        state = "seeding; no script is training here" + _since(run)
    elif since := _since(run):
        state = "a script is attached, and has made no step" + since
    else:
        state = "training" if run.member else "training; not a member of the last round"
    if run.script and run.idle_s:
        state += f"; its script has made no step in the {span_text(run.idle_s)} since it attached"
    else:
        state += "".join(
            f"; process {escaped(pid, 16)} joined {span_text(seconds)} ago and has attached nothing"
            for pid, seconds in run.unattached.items()
        )
    if not run.script:
        state += "".join(
            f"; process {escaped(pid, 16)} {escaped(what, 200)}, for {span_text(seconds)}"
            for pid, (what, seconds) in run.preparing.items()
        )
    lack = no_quorum(run.quorum)
    if run.seal is not None:
        waits = run.seal.get("awaited") or ()
        sealed = f"recertifying without {len(run.seal.get('removed') or ())} members"
        lack = sealed + (
            f": waits for {', '.join(short_peer(str(peer)) for peer in waits)}" if waits else ""
        )
    return "; ".join(filter(None, (state, too_few(run), lack)))


def _since(run: RunStatus) -> str:
    """Since when this machine's script is missed, or stands still; "" where it does not."""
    for each in run.verdicts:
        if each.get("code") in ("V11", "V22") and isinstance(at := each.get("since"), int | float):
            with suppress(ValueError, OverflowError, OSError):  # of a node with an odd clock
                return f" since {datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"
    return ""


def too_few(run: RunStatus) -> str:
    """How many sites a masked sum waits for: that are no members yet, or by name that were in the
    last one and are not heard; "" where there are enough, the run is finished, or nobody can tell.
    """
    members, secure = run.members or (), run.secure or {}
    needed = int(secure.get("threshold", 0))
    more = needed - len(members)
    if not members or more < 1 or run.finished:
        return ""
    before = (secure.get("last") or {}).get("members") or ()
    if away := [short_peer(str(peer)) for peer in before if peer not in members]:
        return (
            f"no sum without {', '.join(away)}: a sum needs {needed} sites, and "
            f"{len(members)} are here; the round goes on when "
            f"{'it is' if more == 1 else 'they are'} back"
        )
    return f"no sum yet: {'one more site' if more == 1 else f'{more} more sites'} must join"


def metrics_of(metrics: Any) -> dict[str, float]:
    """Those of a script's metrics that are numbers: step, loss and whatever else."""
    return (
        {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        if isinstance(metrics, Mapping)
        else {}
    )


def runs_table(terminal: Terminal, runs: Sequence[Document]) -> str:
    """``atoll ls``."""
    if not runs:
        return "no runs"
    rows = [
        (
            run.run_id[:8],
            run.name,
            round_text(run),
            "–" if run.members is None else str(len(run.members)),
            "–" if run.disk_bytes is None else bytes_text(run.disk_bytes),
            run_state(run),
        )
        for run in map(read_run_status, runs)
    ]
    return terminal.table(("RUN", "NAME", "ROUND", "MEMBERS", "DISK", "STATE"), rows)


def path_text(peer: Document) -> str:
    """How bulk data goes to a peer, and, where that differs, how messages do."""
    lane, link = str(peer.get("path") or ""), str(peer.get("link") or "")
    if not lane:
        return f"{link}, no lane" if link else "no lane"
    return f"{lane}, messages {link}" if link in ("relay", "punched") and link not in lane else lane


def rates_text(peer: Document) -> str:
    """What went to a peer and came from it, on the mean of the last minute."""
    rates = peer.get("up_bytes_per_s"), peer.get("down_bytes_per_s")
    return (
        "–"
        if None in rates
        else " / ".join(f"{max(0.0, float(rate or 0)) / 1e6:.1f}" for rate in rates)
    )


def _state(peer: Document) -> str:
    if peer.get("banned") or peer.get("other_history"):
        return "banned" if peer.get("banned") else "other history"
    if peer.get("doubled"):
        return "doubled"
    return {True: "live", False: "lost"}.get(peer.get("live", True), "–")


def _completed(peer: Document) -> Any:
    """Rounds in a peer's state; an older node knows its open entry only."""
    return peer.get("completed", peer.get("round"))


def _member(peer: Document) -> str:
    role, trial = str(peer.get("role") or "train"), peer.get("probation")
    if peer.get("member", True):
        return (
            "yes, contributes nothing"
            if role == "aggregate"
            else "yes, adds up no part"
            if peer.get("part") == 0
            else "yes"
        )
    if role == "observe":
        return "no, observes"
    if peer.get("former"):
        return "no more"
    if peer.get("live", True) is False:
        return "no more" if peer.get("round") else "no"
    return (
        f"on probation, {trial.get('good')} of {trial.get('of')} rounds"
        if isinstance(trial, Mapping)
        else "not yet"
    )


def _over_budget(peer: Document) -> str:
    """What a peer sent or asked beyond its budget; "" for nothing."""
    over = peer.get("over_budget") or {}
    if not isinstance(over, Mapping) or not over:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(over.items()))
    return (
        f"{short_peer(str(peer.get('peer', '')))} went beyond its budget, and was refused: {kinds}"
    )


def peers_table(terminal: Terminal, peers: Sequence[Document]) -> str:
    """``atoll peers``."""
    if not peers:
        return "no peers"
    rows = [
        (
            short_peer(str(peer.get("peer", ""))) + (" (you)" if peer.get("you") else ""),
            "–" if peer.get("you") else path_text(peer),
            f"{peer['rtt_ms']:.0f} ms" if peer.get("rtt_ms") is not None else "–",
            rates_text(peer),
            "–" if _completed(peer) is None else str(_completed(peer)),
            _state(peer),
            _member(peer),
        )
        for peer in peers
    ]
    table = terminal.table(
        ("PEER", "PATH", "RTT", "UP/DOWN MB/s", "ROUND", "STATE", "MEMBER"), rows
    )
    over = [line for peer in peers if (line := _over_budget(peer))]
    table = "\n".join([table, *over])
    lack = no_quorum(quorum_of(peers))
    return f"{table}\n{terminal.style(lack, sys.stdout, fg='yellow')}" if lack else table
