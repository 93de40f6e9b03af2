"""simulate --sites: sites of a size and a speed of one's own, and when they are dead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ...collectives.errors import ConfigError
from ..home.durations import seconds_in

if TYPE_CHECKING:
    from ..manifest import Manifest

ROW = re.compile(r"(?:(?P<count>\d{1,5})\s*x\s*)?(?P<examples>\d[\d,_]{0,12})(?:@(?P<step>\S+))?")
HINT = '--sites "960@1s, 640@1s, 20@5s": examples @ time of a step; 3 x 200@2s for three alike'
MOST = 10_000


def parse_sites(text: str) -> tuple[list[int], list[float]]:
    """Examples and seconds a step of each site. Raises ConfigError for what is no site."""
    sizes, speeds = list[int](), list[float]()
    for part in filter(None, (each.strip() for each in re.split(r",(?!\d{3}\b)", text))):
        match = ROW.fullmatch(part)
        step_s = seconds_in(match["step"] or "1", bare="s") if match is not None else None
        if match is None or not step_s:
            raise ConfigError(f"{part!r} is no site", key="sites", hint=HINT)
        count, examples = int(match["count"] or 1), int(re.sub("[,_]", "", match["examples"]))
        if not (examples and count and len(sizes) + count <= MOST):
            raise ConfigError(
                f"{part!r}: {count} sites of {examples} examples", key="sites", hint=HINT
            )
        sizes += [examples] * count
        speeds += [step_s] * count
    if not sizes:
        raise ConfigError("no sites are given", key="sites", hint=HINT)
    return sizes, speeds


def killed_sites(
    manifest: Manifest, text: str | None, sites: int, until_s: float | None, seed: int
) -> list[tuple[tuple[float, float], ...]]:
    """When each site is dead, [from, to) in seconds: by the lines of ``--churn``, or drawn. Raises
    ConfigError.
    """
    from ..simulation.churn import draw, parse_script

    found: list[list[tuple[float, float]]] = [[] for _ in range(sites)]
    if text is None:
        return [()] * sites
    if manifest.work is None:
        raise ConfigError(
            "--churn goes with --peers, and with a federated run that says its work",
            key="churn",
            hint="[federated] work = { epochs = 1 }",
        )
    if "=" in text:
        mishaps = draw(text, sites, until_s or 30 * 86_400.0, Random(f"{seed}/churn"))
    else:
        try:
            script = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{text} cannot be read: {error}", key="churn") from None
        mishaps = parse_script(script, [f"site-{number}" for number in range(sites)])
    for mishap in mishaps:
        if mishap.deed != "kill":
            raise ConfigError(
                f"{mishap.deed} of a site",
                key="churn",
                why="Sites of a federated run are killed, and may come back.",
                hint="at 300 kill 2 back 60",
            )
        found[mishap.who].append((mishap.at_s, mishap.at_s + (mishap.for_s or float("inf"))))
    return [_merged(sorted(each)) for each in found]


def _merged(spans: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Where one begins before another ends they are one."""
    out = list[tuple[float, float]]()
    for start, stop in spans:
        if out and start <= out[-1][1]:
            start, stop = out[-1][0], max(stop, out.pop()[1])
        out.append((start, stop))
    return tuple(out)


def round_lines(name: str, results: Sequence[Any]) -> list[str]:
    """What is said of the rounds of a run with `work`: who was missing, and why it ended early."""
    lines = list[str]()
    for seed, result in enumerate(results):
        run = name if len(results) == 1 else f"{name}, seed {seed}"
        left_out: dict[int, int] = {}
        for played in result.rounds:
            for client in played.missing:
                left_out[client] = left_out.get(client, 0) + 1
        if left_out:
            said = ", ".join(
                f"site-{client} in {count}" for client, count in sorted(left_out.items())
            )
            lines.append(f"{run}: not in all of {len(result.rounds)} rounds: {said}")
        if result.stalled:
            lines.append(f"{run}: no further round after {len(result.rounds)}: {result.stalled}")
    return lines


def round_rows(results: Sequence[Any]) -> list[dict[str, Any]]:
    """The same as a document, by seed: each round's end, and steps and weight of each site."""
    return [
        {
            "stalled": result.stalled,
            "rounds": [
                {
                    "seconds": round(played.seconds, 3),
                    "steps": {f"site-{client}": n for client, n in played.steps.items()},
                    "weights": {f"site-{client}": n for client, n in played.weights.items()},
                    "missing": [f"site-{client}" for client in played.missing],
                }
                for played in result.rounds
            ],
        }
        for result in results
    ]
