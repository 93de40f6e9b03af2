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
from ..run.quorum import no_quorum, quorum_of
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
        lines += ["", *run_lines(terminal, run)]
    if not runs:
        lines += ["  no runs. Join one: atoll join INVITE"]
    for trouble in status.get("troubles") or ():
        lines += trouble_lines(terminal, trouble)
    return "\n".join(lines)


def run_lines(terminal: Terminal, run: Document) -> list[str]:
    """A run in a few lines."""
    lines = [
        terminal.style(
            f"{run.get('name', '')}  {str(run.get('run_id', ''))[:8]}  round {round_text(run)}",
            sys.stdout,
            bold=True,
        )
    ]
    lines.append(f"  state    {run_state(run)}")
    members: Sequence[Any] = run.get("members") or ()
    if members:
        lines.append(
            f"  members  {len(members)}: {', '.join(short_peer(str(peer)) for peer in members)}"
        )
    if entry := entry_words(run):
        lines.append(f"  join     {entry}")
    if (rule := str(run.get("rule") or "mean")) != "mean":
        lines.append(f"  rule     {rule_text(rule)}")
    if byzantine := int(run.get("lying") or 0):
        lines.append(f"  lying    {lying_text(byzantine, len(members))}")
    if secure := run.get("secure"):
        lines.append(f"  secure   {secure_text(secure)}")
    if privacy := run.get("privacy"):
        lines.append(f"  privacy  {privacy_text(privacy)}")
    if last := run.get("last_round"):
        contributors = last.get("contributors") or {}
        where = f" of fragment {last.get('fragment')}" if run.get("fragments") else ""
        lines.append(
            f"  last     round {last.get('round')}{where}: {len(contributors)} contributed, "
            f"{sum(contributors.values())} samples"
        )
        weights = last.get("weights") or {}
        if weights:
            lines.append(
                "  weights  "
                + "  ".join(f"{short_peer(peer)} {weight:.3g}" for peer, weight in weights.items())
            )
    if run.get("part") == 0:
        lines.append(
            "  part     none: this node's link is too slow to add up for the others; it "
            "sends and receives only"
        )
    metrics = metrics_of(run)
    if metrics:
        lines.append(
            "  script   "
            + "  ".join(f"{key} {value:.6g}" for key, value in sorted(metrics.items()))
        )
    if "bytes_sent" in run:
        lines.append(
            f"  traffic  {bytes_text(run['bytes_sent'])} sent, "
            f"{bytes_text(run.get('bytes_received', 0))} received"
        )
    if run.get("disk_bytes"):
        lines.append(f"  disk     {bytes_text(run['disk_bytes'])}")
    lines += [
        f"  banned   {short_peer(str(peer))}: {escaped(why, 400)}"
        for peer, why in (run.get("banned") or {}).items()
    ]
    lines += [
        f"  refused  {refusal_text(str(peer), why)}"
        for peer, why in (run.get("refused") or {}).items()
    ]
    if run.get("finished"):
        lines.append(f"  next     {finished_text(run)}")
    lines += verdict_lines(terminal, run)
    return lines + waiting_lines(run) + trouble_lines(terminal, run.get("trouble"))


def finished_text(run: Document) -> str:
    """What there is to do with a run that has all its rounds."""
    given = str(run.get("run_id", ""))[:8]
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


def entry_words(run: Document) -> str:
    """What this node may do, where that is not everything, and what newcomers go through."""
    join, role = run.get("join") or {}, str(run.get("role") or "train")
    sentences = [f"this node's invite is to {role}"] if role != "train" else []
    if join.get("probation"):
        mine = (
            ""
            if run.get("member", True) or role != "train"
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
    return (
        f"{spent}, in {privacy.get('steps')} contributions; {privacy.get('left')} "
        f"more are allowed{clip}"
    )


def waiting_lines(run: Document) -> list[str]:
    """What is waited for, of whom, since when and what would end it, once no round was committed
    for long.
    """
    waiting = run.get("waiting")
    if not isinstance(waiting, Mapping) or not waiting.get("quiet") or run.get("finished"):
        return []
    of = ", ".join(short_peer(str(peer)) for peer in waiting.get("of") or ())
    open_s = float(waiting.get("round_open_s") or 0)
    return [
        f"  waiting  {waiting.get('state')}, no round for {open_s:.0f} s: {waiting.get('what')}"
        + (f", of {of}" if of else ""),
        f"           ends when {waiting.get('ends')}",
    ]


def verdict_lines(terminal: Terminal, run: Document) -> list[str]:
    """What has been wrong for several rounds."""
    lines = list[str]()
    for each in run.get("verdicts") or ():
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


def round_text(run: Document) -> str:
    """``12/35``; of a model in fragments ``12+11+12/35``, one number each. A dash before the state
    is known.
    """
    rounds = [int(round_) for round_ in run.get("fragments") or [run.get("round", -1)]]
    held = "+".join(str(round_) if round_ >= 0 else "–" for round_ in rounds)
    return f"{held}{'/' + str(run['rounds']) if run.get('rounds') else ''}"


def run_state(run: Document) -> str:
    """What the node does in a run, in words."""
    phase = str(run.get("phase") or run.get("state") or "unknown")
    if phase == "stored":
        return "stored; the node is not in it"
    if phase == "failed":
        return "failed; entering it again tries again"
    if phase != "running":
        stage, done, total = [*(run.get("progress") or ()), "", 0, 0][:3]
        share = f" {100 * int(done) // int(total)}%" if total else ""
        return f"{stage}{share}" if stage else phase
    if run.get("finished"):
        return f"finished: all {run.get('rounds')} rounds are committed"
    if isinstance(starting := run.get("starting"), Mapping):
        state = waits_text(int(starting.get("there", 0)), int(starting.get("wanted", 0)))
        return f"{state}; begin without: atoll begin {str(run.get('run_id', ''))[:8]}"
    if run.get("paused"):
        state = f"{escaped(run['paused'])}; the node serves the run"
    elif not run.get("script"):
        state = "seeding; no script is training here" + _since(run)
    else:
        state = (
            "training" if run.get("member", True) else "training; not a member of the last round"
        )
    if run.get("script") and (idle_s := run.get("idle_s")):
        state += (
            "; its script has contributed nothing in the "
            f"{span_text(float(idle_s))} since it attached"
        )
    elif unattached := run.get("unattached"):
        state += "".join(
            f"; process {int(pid)} joined {span_text(float(seconds))} ago and has attached nothing"
            for pid, seconds in unattached.items()
        )
    lack = no_quorum(run.get("quorum"))
    seal = run.get("seal")
    if isinstance(seal, Mapping):
        waits = seal.get("awaited") or ()
        sealed = f"recertifying without {len(seal.get('removed') or ())} members"
        lack = sealed + (
            f": waits for {', '.join(short_peer(str(peer)) for peer in waits)}" if waits else ""
        )
    return "; ".join(filter(None, (state, too_few(run), lack)))


def _since(run: Document) -> str:
    """Since when this machine's script is missed; "" where it is not."""
    for each in run.get("verdicts") or ():
        if each.get("code") == "V11" and isinstance(at := each.get("since"), int | float):
            with suppress(ValueError, OverflowError, OSError):  # of a node with an odd clock
                return f" since {datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"
    return ""


def too_few(run: Document) -> str:
    """How many sites a masked sum waits for that are no members yet; "" where there are enough, or
    nobody can tell.
    """
    members = len(run.get("members") or ())
    more = int((run.get("secure") or {}).get("threshold", 0)) - members
    if not members or more < 1:
        return ""
    return f"no sum yet: {'one more site' if more == 1 else f'{more} more sites'} must join"


def members_text(run: Document) -> str:
    """Number of members, or nothing when the document does not say."""
    members = run.get("members")
    return "" if members is None else str(len(members))


def metrics_of(run: Document) -> dict[str, float]:
    """What the script reported: step, loss and whatever else."""
    metrics = run.get("metrics") or {}
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
            str(run.get("run_id", ""))[:8],
            str(run.get("name", "")),
            round_text(run),
            members_text(run) or "–",
            bytes_text(run["disk_bytes"]) if "disk_bytes" in run else "–",
            run_state(run),
        )
        for run in runs
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
