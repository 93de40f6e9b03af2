"""The picture of a run as lines of a terminal: as many as it has, none wider than it is.

What others said is escaped in the document already; a line is measured in cells, so that wide
characters break no column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from ...collectives.foreign import escaped, quoted
from ..home.output import bytes_text, count_text, span_text
from ..run.rate import rate_number, rate_words
from ..views.live import sparkline

LEAST_WIDTH, LEAST_HEIGHT = 12, 10
NAME, PATH, RTT, STATE = 17, 9, 7, 9  # columns of a member, before its strip of rounds
RATE, SHORT = 10, {"documents": "docs"}
LEAST_STRIP = 6  # rounds; for fewer than these, path and round trip are left out, then the state
LINES_AT_LEAST = 4
Paint = Callable[..., str]
"""``paint(text, fg=…, bold=…, dim=…)``: the text, coloured where that is wanted."""


def plain(text: str, **_: Any) -> str:
    """No colours."""
    return text


def frame(found: Mapping[str, Any], width: int, height: int, paint: Paint = plain) -> list[str]:
    """The lines; ``found``: a `document` with all its rounds."""
    width, height = max(LEAST_WIDTH, width), max(LEAST_HEIGHT, height)
    lines = _head(found, width, paint)
    wrong = _wrong(found, width, paint)
    room = height - len(lines) - len(wrong) - LINES_AT_LEAST - 3
    lines += ["", *_members(found, width, max(2, room), paint), *wrong, ""]
    left = height - len(lines) - 1
    rows: Sequence[Sequence[Any]] = found["lines"]["rows"]
    for at, _, text in rows[-left:] if left > 0 else ():
        when = time.strftime("%H:%M:%S", time.localtime(at))
        beside = width - len(when) - 1
        lines.append(f"{paint(when, dim=True)} {_cut(escaped(text, 400), beside)}")
    return lines[: height - 1]


def _head(found: Mapping[str, Any], width: int, paint: Paint) -> list[str]:
    run, quick = found["run"], found["quick"]
    name = _cut(f"{run['name'] or 'a run'}  {run['id'][:8]}", width // 2)
    state = _cut(found["state"], width - cell_len(name) - 2)
    gap = width - cell_len(name) - cell_len(state)
    good = state.startswith(("training", "finished", "as recorded"))
    head = paint(name, bold=True) + " " * gap + paint(state, fg="green" if good else "yellow")
    of = f"/{run['rounds']}" if run["rounds"] else ""
    parts = [f"round {quick['round']}{of}", f"{quick['reachable']} of {quick['members']} members"]
    if quick["period_s"]:
        parts.append(f"{span_text(quick['period_s'])} a round")
    if quick["training_share"] is not None:
        parts.append(f"training {quick['training_share']:.0%}")
    sent, ddp = quick["bytes_sent"], quick["ddp_bytes"]
    traffic = f"{bytes_text(sent)} sent, {bytes_text(quick['bytes_received'])} received"
    if quick["ddp_times"]:
        traffic += f"; DDP: {bytes_text(ddp)}, {quick['ddp_times']:.0f} times as much"
    more = [traffic]
    if quick["samples"]:
        more.insert(0, f"{count_text(quick['samples'])} samples")
    if found["rate"]:
        more.insert(0, rate_words(*found["rate"].values()))
    if quick.get("gain"):
        more.append(quick["gain"])
    more += [f"{label} {words}" for label, words in quick["figures"]]
    if quick["memory_bytes"]:
        more.append(f"memory {bytes_text(quick['memory_bytes'])}")
    lines = [head]
    if run["rounds"]:
        filled = min(width, width * quick["round"] // run["rounds"])
        lines.append(paint("━" * filled, fg="cyan") + paint("─" * (width - filled), dim=True))
    lines += [_cut("  ".join(parts), width), *_filled(more, width)]
    for losses in list(found["losses"].values())[:1]:
        values = [value for value in losses["losses"] if value is not None]
        if values:
            last = f"loss {values[-1]:6.4g} "
            shown = _thinned(values, max(1, width - len(last)))
            lines.append(_cut(last, width - 1) + paint(sparkline(shown), fg="magenta"))
    told = found["metrics"]
    if told.get("held_out") is not None and told.get("held_out_own") is not None:
        gains = f"averaging gains {told.get('averaging_gains') or 0.0:.1%}"
        held = f"held out {told['held_out']:.4g}, own {told['held_out_own']:.4g}: {gains}"
        lines.append(_cut(held, width))
    lines += _learned(found, width)
    lines += [
        _cut(
            "mean " + "  ".join(f"{key} {value:.4g}" for key, value in found["mean"].items()), width
        )
        for _ in found["mean"] and "1"
    ]
    return lines


def _learned(found: Mapping[str, Any], width: int) -> list[str]:
    """What a script found last of what the model has learned: its loss, and an answer."""
    lines = list[str]()
    if told := found["evaluation"]:
        loss = "no number" if told["held_out"] is None else f"{told['held_out']:.4g}"
        lines.append(f"held-out loss {loss} after round {told['round']}, {told['tokens']:,} tokens")
    if found["answers"]:
        _, round_, prompt, text = found["answers"][-1]
        lines.append(f"round {round_}, {quoted(prompt, 60)} → {quoted(text, 400)}")
    return [_cut(line, width) for line in lines]


def _members(found: Mapping[str, Any], width: int, room: int, paint: Paint) -> list[str]:
    """A line each, with its newest rounds; those that do not fit are counted."""
    wide = width >= NAME + PATH + RTT + STATE + LEAST_STRIP
    stated = width >= NAME // 2 + STATE + LEAST_STRIP
    unit = found["rate"]["unit"] if found["rate"] else ""
    rated = bool(unit) and width >= NAME + RATE + PATH + RTT + STATE + LEAST_STRIP
    named = min(NAME, width - LEAST_STRIP - (STATE if stated else 0))
    strip = width - named - (RATE if rated else 0)
    strip -= (PATH + RTT if wide else 0) + (STATE if stated else 0)
    head = f"{'MEMBER':{named}}"
    head += _fit(f"{SHORT.get(unit, unit).upper()}/S", RATE) if rated else ""
    head += f"{'PATH':{PATH}}{'RTT':{RTT}}" if wide else ""
    head += f"{'STATE':{STATE}}" if stated else ""
    head += "ROUNDS"
    lines = [paint(_cut(head, width), bold=True)]
    rows = [row for row in found["peers"] if row["member"]]
    gone = [row for row in found["peers"] if not row["member"] and row["rounds"]]
    rows += sorted(gone, key=lambda row: -(row["until"] or 0))
    for row in rows[: room if len(rows) <= room else room - 1]:
        colour = {"live": "green", "lost": "red", "banned": "red"}.get(row["state"])
        name = row["name"] if not row["you"] else f"{row['name']} *"
        path = "here" if row["you"] else row["path"] or "–"
        rtt = f"{row['rtt_ms']:.0f} ms" if row["rtt_ms"] is not None else "–"
        state = paint(_fit(row["state"], STATE), fg=colour) if colour else _fit(row["state"], STATE)
        rate = "–" if row["rate"] is None else rate_number(row["rate"])
        cells = _fit(name, named) + (_fit(rate, RATE) if rated else "")
        cells += _fit(path, PATH) + _fit(rtt, RTT) if wide else ""
        cells += state if stated else ""
        lines.append(cells + _strip(found["rounds"], row["number"], strip, paint))
    if len(rows) > room:
        lines.append(paint(_cut(f"and {len(rows) - room + 1} more", width), dim=True))
    return lines


def _strip(rounds: Mapping[str, Any], number: int, width: int, paint: Paint) -> str:
    """Of the newest rounds: ■ contributed, ▪ the slowest of it, · not, × lost."""
    cells = ""
    slowest = rounds["slowest"][-width:] if width else []
    for index, (who, lost) in enumerate(
        zip(rounds["who"][-width:], rounds["lost"][-width:], strict=True) if width else ()
    ):
        if int(lost, 16) >> number & 1:
            cells += paint("×", fg="red")
        elif not int(who, 16) >> number & 1:
            cells += paint("·", dim=True)
        elif slowest and slowest[index] == number:
            cells += paint("▪", fg="yellow")
        else:
            cells += paint("■", fg="cyan")
    return cells


def _wrong(found: Mapping[str, Any], width: int, paint: Paint) -> list[str]:
    """What is waited for and what is wrong."""
    lines = [paint(_cut(found["waits"], width), fg="yellow")] if found["waits"] else []
    for verdict in found["verdicts"][-3:]:
        lines.append(paint(_cut(f"{verdict['code']} {verdict['message']}", width), fg="red"))
        if verdict["hint"]:
            lines.append(_cut(f"     {verdict['hint']}", width))
    return lines


def _filled(parts: Sequence[str], width: int) -> list[str]:
    """Joined two spaces apart, on as many lines as that takes."""
    lines = [""]
    for part in parts:
        if lines[-1] and cell_len(lines[-1]) + 2 + cell_len(part) > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + part
    return [_cut(line, width) for line in lines if line]


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many of them, evenly, with the newest."""
    if len(values) <= most:
        return list(values)
    return [values[(index + 1) * len(values) // most - 1] for index in range(most)]


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _fit(text: str, width: int) -> str:
    return set_cell_size(_cut(text, width - 1), width)
