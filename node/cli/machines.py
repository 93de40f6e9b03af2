"""Machines as people name them, ``8 x 4090@100Mbit/64GB``, and what each of them has: memory, disk,
link, and how fast it calculates; and this machine.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ...collectives.errors import ConfigError
from ..home.bandwidth import bytes_per_s
from .needs import FreeHere, gpu_name, this_machine

MOST_MACHINES = 4096
_GIB = 1 << 30
_SIZES = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MANY = re.compile(r"\A\s*(?:([0-9]{1,6})\s*[x×*]\s*)?(\S.*?)\s*\Z")
_MEMORY = re.compile(r"\A([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([MGT])i?B\Z", re.IGNORECASE)
_SIDE = 768  # of the matrices that are multiplied to try a processor
_REACHED = 1.4  # training reaches about half of what such a product does, and USED of this
EXAMPLE = "8 x 4090@100Mbit/64GB"
FORM = "[COUNT x] CARD[@UP[:DOWN]][/MEMORY[/DISK]]"

CARDS: dict[str, tuple[float, float]] = {
    "3050": (8, 18),
    "2080ti": (11, 54),
    "3060": (12, 26),
    "3060ti": (8, 32),
    "3070": (8, 41),
    "3080": (10, 60),
    "3090": (24, 71),
    "4060": (8, 30),
    "4060ti": (8, 44),
    "4060ti-16": (16, 44),
    "4070": (12, 58),
    "4070ti": (12, 80),
    "4080": (16, 97),
    "4090": (24, 165),
    "5060ti-16": (16, 47),
    "5070": (12, 62),
    "5070ti": (16, 88),
    "5080": (16, 113),
    "5090": (32, 210),
    "7900xtx": (24, 122),
    "t4": (16, 65),
    "v100": (16, 112),
    "l4": (24, 121),
    "a10": (24, 125),
    "a40": (48, 150),
    "a6000": (48, 155),
    "6000ada": (48, 182),
    "l40s": (48, 362),
    "a100": (40, 312),
    "a100-80": (80, 312),
    "h100": (80, 989),
    "h200": (141, 989),
    "b200": (180, 2250),
    "mi300x": (192, 1307),
}
"""GiB, and 10^12 operations a second: makers' figures of dense 16-bit products, float32 sums."""


@dataclass(frozen=True, slots=True)
class NamedMachine:
    """``name``: as given. ``free``: bytes; None: not known, or no GPU. ``up``, ``down``: bytes/s,
    None: not known. ``flops``: operations a second that its maker says, or that were measured;
    None: not known. ``gpu``: whether it trains on one.
    """

    name: str
    free: FreeHere
    up: float | None
    down: float | None
    flops: float | None
    gpu: bool


def machines_of(texts: Sequence[str]) -> list[NamedMachine]:
    """One for each machine, named ``4090``, or ``4090-1`` and so on where there are several alike.
    Raises ConfigError that names all that is wrong.
    """
    kinds, wrong = list[tuple[int, NamedMachine]](), list[str]()
    for text in texts:
        try:
            kinds.append(_kind(text))
        except ConfigError as error:
            wrong.append(error.message)
    if wrong:
        raise ConfigError(
            "\n".join(wrong),
            key="machine",
            why=f"A machine is {FORM}. Known cards are cpu, {', '.join(CARDS)}; of another say its "
            "memory, such as 20GB.",
            hint=f"For example {EXAMPLE!r}",
        )
    if (total := sum(count for count, _ in kinds)) > MOST_MACHINES:
        raise ConfigError(
            f"{total:,} machines", key="machine", hint=f"At most {MOST_MACHINES:,} of them."
        )
    names = [machine.name for _, machine in kinds]
    found, numbers = list[NamedMachine](), dict[str, int]()
    for count, machine in kinds:
        for _ in range(count):
            number = numbers[machine.name] = numbers.get(machine.name, 0) + 1
            one = count == 1 and names.count(machine.name) == 1
            name = machine.name if one else f"{machine.name}-{number}"
            found.append(_named(machine, name))
    return found


def _named(machine: NamedMachine, name: str) -> NamedMachine:
    return NamedMachine(name, machine.free, machine.up, machine.down, machine.flops, machine.gpu)


def _kind(text: str) -> tuple[int, NamedMachine]:
    found = _MANY.match(text)
    count = int(found[1] or 1) if found else 0
    if found is None or count < 1:
        raise ConfigError(f"{text!r} is no machine: {FORM}")
    # a unit's own slash separates nothing
    card, *sizes = [part.strip() for part in re.sub(r"bit/s|B/s", _without, found[2]).split("/")]
    card, at, link = card.partition("@")
    if len(sizes) > 2 or (at and not link.strip()):
        raise ConfigError(f"{text!r} is no machine: {FORM}")
    host, disk = ([_size(size, text) for size in sizes] + [None, None])[:2]
    up, _, down = link.partition(":")
    rates = [float(bytes_per_s(rate, "machine")) if rate.strip() else None for rate in (up, down)]
    gpu, flops = _card(card.strip(), text)
    free = FreeHere(host, gpu, disk)
    return count, NamedMachine(
        card.strip(), free, rates[0], rates[1] or rates[0], flops, gpu is not None
    )


def _without(unit: re.Match[str]) -> str:
    return unit[0][:-2]


def _card(name: str, text: str) -> tuple[int | None, float | None]:
    """Bytes of its memory, None where it is none; operations a second."""
    plain = re.sub(
        r"\A(nvidia|geforce|rtx|gtx|radeon|rx|amd)+", "", re.sub(r"[\s_]", "", name.lower())
    )
    if plain == "cpu":
        return None, None
    if plain in CARDS:
        memory, tera = CARDS[plain]
        return round(memory * _GIB), tera * 1e12
    if _MEMORY.match(name):
        return _size(name, text), None
    raise ConfigError(f"{text!r}: the card {name!r} is not known")


def _size(size: str, text: str) -> int:
    found = _MEMORY.match(size)
    if found is None or not float(found[1]):
        raise ConfigError(f"{text!r}: {size!r} is no size, such as 64GB")
    return round(float(found[1]) * _SIZES[found[2].upper()])


def this_one(folder: Path, up: float | None, down: float | None) -> NamedMachine:
    """This machine; how fast its processor calculates is tried for an instant, a GPU's is of
    CARDS. ``folder``: where runs lie.
    """
    free = this_machine(folder)
    if free.gpu is not None:
        return NamedMachine("this machine", free, up, down, _flops_of(gpu_name()), True)
    return NamedMachine("this machine", free, up, down, _processor(), False)


def _flops_of(name: str) -> float | None:
    """Of a card by what the driver calls it, such as ``NVIDIA GeForce RTX 4090``."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    plain = [*words, *("".join(pair) for pair in pairwise(words))]
    fitting = [card for card in CARDS if card in plain]
    return CARDS[max(fitting, key=len)][1] * 1e12 if fitting else None


def _processor() -> float | None:
    """Operations a second, put so that `fitting.USED` of them are reached in training."""
    try:
        import torch
    except ImportError:
        return None
    one = torch.ones(_SIDE, _SIDE)
    torch.mm(one, one)
    took_s = math.inf
    for _ in range(3):
        began_s = time.perf_counter()
        torch.mm(one, one)
        took_s = min(took_s, time.perf_counter() - began_s)
    return _REACHED * 2 * _SIDE**3 / took_s
