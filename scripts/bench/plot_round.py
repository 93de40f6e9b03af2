#!/usr/bin/env python3
"""A Gantt chart of reductions: when each peer was ready, gave its part, sent its result and voted,
as one node saw it.

    python scripts/bench/plot_round.py --record 3 --save events.jsonl     the next three of a running node
        (of --home, or the usual one)
    python scripts/bench/plot_round.py events.jsonl -o round.png          what was recorded

Reads JSON lines with the ``reduction.timed`` events of a node (others are skipped). The slowest
peer of each is marked. Needs matplotlib: pip install 'atoll[plot]'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from atoll.collectives.errors import AtollError
from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient

EVENT = "reduction.timed"
COLOURS = {"wait": "#c9ced6", "part": "#1f6fb4", "result": "#27764a", "vote": "#d08a1d"}
LABELS = {
    "wait": "not ready yet",
    "part": "gives its part",
    "result": "sends its result",
    "vote": "votes",
}
SLOWEST = "#b3261e"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events", nargs="?", help="file of JSON lines; - is standard input")
    parser.add_argument(
        "--record",
        type=int,
        metavar="N",
        help="wait for the next N reductions of a running node instead",
    )
    parser.add_argument("--home", help="with --record: the node's home")
    parser.add_argument("--save", type=Path, help="with --record: write the events here, too")
    parser.add_argument("--last", type=int, default=6, help="draw the last so many (default 6)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("round.png"),
        help="the picture (default round.png)",
    )
    found = parser.parse_args(argv)
    if (found.events is None) == (found.record is None):
        parser.error("give a file of events, or --record N")
    if found.record is not None and found.record < 1:
        parser.error(f"--record {found.record}: at least 1")
    return found


def read(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The reductions among JSON lines; what is no JSON is refused."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                event = json.loads(line)
            except ValueError as error:
                raise SystemExit(f"line {number} is not JSON: {error}") from None
            if isinstance(event, dict) and event.get("event") == EVENT:
                yield event


def record(home: str | None, count: int, save: Path | None) -> list[dict[str, Any]]:
    """The next ``count`` reductions of a running node."""
    found = list[dict[str, Any]]()
    with (
        NodeClient.connect(find_paths(home)) as client,
        save.open("w", encoding="utf-8") if save else nullcontext() as file,
    ):
        for event in client.events():
            if event.get("event") == EVENT:
                found.append(event)
                print(describe(event), flush=True)
                if file is not None:
                    print(
                        json.dumps(event), file=file, flush=True
                    )  # what was seen is kept, whatever ends this
                if len(found) == count:
                    break
    return found


def name(event: dict[str, Any]) -> str:
    """What a reduction is called."""
    return (
        f"operation {event['op_id']}"
        if event["op_id"]
        else f"round {event['round']}"
        if event["log"].startswith("main/")
        else "operation"
    )


def describe(event: dict[str, Any]) -> str:
    """One line on where its time went."""
    slowest = event["slowest"]
    last = (
        f"; slowest: {slowest['peer'][-8:]} ({slowest['phase']}, {slowest['behind_s']:.3f} s behind)"
        if slowest
        else ""
    )
    again = f"; ballot {event['ballot']}, revision {event['revision']}, asked again {event['asked_again']} times"
    moved = sum(lane["sent"] + lane["received"] for lane in event["lanes"].values()) / 1e6
    return (
        f"{name(event)}: planned {event['planned_s']:.3f} s, reduced {event['reduced_s']:.3f} s, decided {event['decided_s']:.3f} s, "
        f"{moved:.1f} MB{again if event['ballot'] or event['revision'] or event['asked_again'] else ''}{last}"
    )


def bars(event: dict[str, Any], peer: str) -> list[tuple[str, float, float]]:
    """(phase, from, to) in seconds, for one peer. A phase begins where what it waits for was
    complete here.
    """
    phases, found = event["phases"], list[tuple[str, float, float]]()
    if peer in phases["ready"]:
        found.append(("wait", 0.0, phases["ready"][peer]))
    starts = {
        "part": event["planned_s"],
        "result": phases["part"].get(peer, event["planned_s"]),
        "vote": event["reduced_s"],
    }
    for phase, start in starts.items():
        if peer in phases[phase]:
            end = (
                min(phases[phase][peer], event["elapsed_s"])
                if phase == "vote"
                else phases[phase][peer]
            )
            found.append((phase, min(start, end), end))
    return found


def draw(events: list[dict[str, Any]], output: Path) -> None:
    """Write the picture: one panel a reduction, one row a peer."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise SystemExit("matplotlib is not installed: pip install 'atoll[plot]'") from None
    rows = [
        sorted(
            {peer for seen in event["phases"].values() for peer in seen}
            | set(event["contributors"])
        )
        for event in events
    ]
    figure = Figure(
        figsize=(10, 1.2 + sum(0.9 + 0.32 * len(peers) for peers in rows)), layout="constrained"
    )
    panels = figure.subplots(
        len(events), squeeze=False, height_ratios=[2 + len(peers) for peers in rows]
    )
    for axes, event, peers in zip(panels[:, 0], events, rows, strict=True):
        for row, peer in enumerate(peers):
            for phase, start, end in bars(event, peer):
                axes.barh(
                    row,
                    max(end - start, 0.002 * event["elapsed_s"]),
                    left=start,
                    height=0.62,
                    color=COLOURS[phase],
                )
        for moment in ("planned_s", "reduced_s", "decided_s"):
            axes.axvline(event[moment], color="black", linewidth=0.8, linestyle=":")
            axes.annotate(
                moment[:-2],
                (event[moment], 1),
                xycoords=("data", "axes fraction"),
                fontsize=7,
                va="bottom",
                ha="center",
            )
        labels = axes.set_yticks(
            range(len(peers)),
            [f"{peer[-8:]}{' (this node)' if peer == event['peer'] else ''}" for peer in peers],
        )
        for tick, peer in zip(labels, peers, strict=True):
            if event["slowest"] and event["slowest"]["peer"] == peer:
                tick.label1.set_color(SLOWEST)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02 * event["elapsed_s"])
        axes.set_title(describe(event), fontsize=8, loc="left", pad=14)
    panels[-1, 0].set_xlabel("seconds after the first contribution was offered")
    figure.legend(
        handles=[Patch(color=COLOURS[phase], label=label) for phase, label in LABELS.items()],
        loc="outside lower center",
        ncols=4,
    )
    figure.savefig(output, dpi=130)


def main(argv: list[str] | None = None) -> None:
    """Record or read, then draw."""
    options = arguments(argv)
    try:
        if options.record is not None:
            events = record(options.home, options.record, options.save)
        elif options.events == "-":
            events = list(read(sys.stdin))
        else:
            events = list(read(Path(options.events).read_text(encoding="utf-8").splitlines()))
    except (OSError, AtollError) as error:
        raise SystemExit(str(error)) from None
    if not events:
        raise SystemExit(f"no {EVENT} event in there")
    draw(events[-options.last :], options.output)
    print(options.output)


if __name__ == "__main__":
    main()
