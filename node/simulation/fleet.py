"""Machines and links as people write them: ``8 x 4090@100Mbit, 4 x A100@1Gbit/2Gbit+30ms``. Pure.

A row is ``[COUNT x] MACHINE@UP[/DOWN][+RTT] [in PLACE]``. MACHINE is a GPU of `TFLOPS`, or what a
step takes: ``250ms``, ``1.5s``. UP and DOWN are what the link carries to and from all others
together, RTT the round trip between this machine and the middle of the network, 25 ms where it is
left out. PLACE is for plans of two and three levels: the label of a site, or of a host in one
(``lab``, ``lab/box-1``), or how many of them the machines of the row are dealt to, one after
another: ``1000 x 250ms@1Gbit in 25 sites of 8 hosts``. A machine without a place is a site of its
own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from ...collectives.errors import ConfigError
from ...collectives.group import MAX_STAR
from ..home.bandwidth import bytes_per_s

TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A10": 125.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "5090": 209.5,
    "4090": 165.2,
    "4080": 97.5,
    "4070": 58.3,
    "3090": 71.0,
    "3080": 59.5,
    "3070": 40.6,
    "3060": 25.5,
}
"""Dense products of bfloat16 (float16 where there is none), sums in float32: the data sheets."""
UTILISATION = 0.35
"""The share of it that training of a transformer reaches: 0.3 to 0.5 in published runs."""
RTT_S = 0.025
ROW = re.compile(
    r"(?:(?P<count>\d{1,9})\s*[x*×]\s*)?(?P<machine>[^@]+)@(?P<up>[^/+]+(?:/s)?)"
    r"(?:/(?P<down>[^+]+))?(?:\+(?P<rtt>[\d.]+)\s*(?P<unit>ms|s))?",
    re.IGNORECASE,
)
PLACE = re.compile(r"(?P<site>[A-Za-z0-9._-]{1,40})(?:/(?P<host>[A-Za-z0-9._-]{1,20}))?")
PLACES = re.compile(
    r"(?P<sites>[1-9]\d{0,3})\s+sites?(?:\s+of\s+(?P<hosts>[1-9]\d{0,3})\s+hosts?)?", re.IGNORECASE
)
STEP = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>ms|s)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FleetPeer:
    """One machine. ``step_s``: seconds of an inner step; ``up``, ``down``: bytes/s; ``latency_s``:
    one way, to the middle of the network; ``site``: the label of its place, or "".
    """

    name: str
    step_s: float
    up: int
    down: int
    latency_s: float
    site: str = ""


def parse_fleet(
    text: str, *, step_s: float | None, flops: float | None, most: int = MAX_STAR
) -> list[FleetPeer]:
    """The machines that ``text`` names, in its order.

    Args:
        step_s: what an inner step takes on the first GPU that is named; the others' follow from
            their peak rates. None: from ``flops``.
        flops: of one inner step; None: not known.
        most: how many members the run may have (`collectives.bounds`).

    Raises ConfigError for a text that is no fleet, and for a GPU of which neither is known.
    """
    rows: list[tuple[int, str, re.Match[str], str]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        described, *places = re.split(r"\s+in\s+", part, maxsplit=1)
        found = ROW.fullmatch(described.replace("/s", ""))
        if found is None:
            raise _wrong(f"{part!r} describes no machines")
        rows.append(
            (int(found["count"] or 1), found["machine"].strip(), found, places[0] if places else "")
        )
    total = sum(count for count, _, _, _ in rows)
    if not 1 <= total <= most:
        raise _wrong(f"{total} machines; at least 1, at most {most} can be simulated")
    steps = _Steps(step_s, flops)
    seen, fleet, sites = Counter[str](), list[FleetPeer](), 0
    for count, machine, found, place in rows:
        up, down = _rate(found["up"]), _rate(found["down"] or found["up"])
        rtt_s = RTT_S if found["rtt"] is None else _seconds(found["rtt"], found["unit"], least=0)
        one_s = steps.of(machine)
        label = re.sub(r"[^a-z0-9]+", "", machine.lower())
        labels = _labels(place, count, sites)
        sites += len({each.partition("/")[0] for each in labels}) if PLACES.fullmatch(place) else 0
        for site in labels:
            seen[label] += 1
            fleet.append(FleetPeer(f"{label}-{seen[label]}", one_s, up, down, rtt_s / 2, site))
    return fleet


def _labels(place: str, count: int, before: int) -> list[str]:
    """Where each machine of a row stands. ``before``: so many sites have numbers already."""
    if not place:
        return [""] * count
    if (dealt := PLACES.fullmatch(place)) is None:
        if PLACE.fullmatch(place) is None:
            raise _wrong(f"{place!r} is no place: lab, lab/box-1, 8 sites, or 8 sites of 4 hosts")
        return [place] * count
    sites, hosts = int(dealt["sites"]), int(dealt["hosts"] or 0)
    if sites * max(1, hosts) > count:
        raise _wrong(f"{place!r}, and {count} machines: fewer than places")
    if not hosts:
        return [f"site-{before + at * sites // count + 1}" for at in range(count)]
    every = [at * sites * hosts // count for at in range(count)]
    return [f"site-{before + at // hosts + 1}/host-{at % hosts + 1}" for at in every]


class _Steps:
    """What a step takes on each machine."""

    def __init__(self, step_s: float | None, flops: float | None) -> None:
        self._work: float | None = None  # teraflops' worth, at peak
        self._step_s = step_s
        if step_s is None and flops is not None:
            self._work = flops / 1e12 / UTILISATION

    def of(self, machine: str) -> float:
        if (given := STEP.fullmatch(machine)) is not None:
            return _seconds(given["number"], given["unit"])
        name = re.sub(r"^(nvidia|geforce|rtx|\s|-)+", "", machine.strip(), flags=re.IGNORECASE)
        peak = TFLOPS.get(name.upper())
        if peak is None:
            raise _wrong(f"{machine!r} is no machine that is known, and no time of a step")
        if self._work is None:
            if self._step_s is None:
                raise ConfigError(
                    f"how long does a step take on {machine}?",
                    key="step-ms",
                    why="The manifest leaves the model, or its batch, to each member's script.",
                    hint="Time a few steps without atoll; then --step-ms 250, or 250ms@100Mbit "
                    "in place of the GPU's name",
                )
            self._work = self._step_s * peak
        return self._work / peak


def _rate(text: str) -> int:
    try:
        return bytes_per_s(text, "peers")
    except ConfigError as error:
        raise _wrong(error.message) from None


def _seconds(number: str, unit: str, least: float = 1e-9) -> float:
    try:
        seconds = float(number) / (1000 if unit.lower() == "ms" else 1)
    except ValueError:
        raise _wrong(f"{number}{unit} is no time") from None
    if not least <= seconds < 86_400 or not math.isfinite(seconds):
        raise _wrong(f"{number}{unit} is no time between 0 and a day")
    return seconds


def _wrong(what: str) -> ConfigError:
    return ConfigError(
        what,
        key="peers",
        hint='For example --peers "8 x 4090@100Mbit, 2 x 250ms@20Mbit/100Mbit+40ms in lab"; GPUs: '
        + ", ".join(TFLOPS),
    )
