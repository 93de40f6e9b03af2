"""The governor: when the update's norm or the loss jumps, momentum restarts and the rate is halved
for some rounds. Where members evaluate, and averaging is not worth it (`worth`), it takes the plain
mean from that round on.

A function of the log alone, so that all members act alike: it sees the norm of each committed mean
and what its contributors told of losses and evaluations, and keeps what it remembers in the state
vector beside the momentum, which is transferred, checked and stored with it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...collectives.telemetry import Event
from . import worth

WINDOW = 15  # values remembered
LEAST = 5  # before so many were seen nothing is a jump
# Three standard deviations, by the median absolute deviation of normal values.
DEVIATIONS = 3 * 1.4826
# Of the median that a jump exceeds it by at least: in a quiet run values hardly differ.
SHARES = {"norm": 0.5, "loss": 0.1}
CALM_ROUNDS = 8
# Of norms, then of losses: how many, and these, newest first; rounds left at half rate; how often
# it acted.
NUMBERS = 2 * (1 + WINDOW) + 2

Kind = Literal["norm", "loss"]


WATCHING = 1 + worth.NUMBERS
"""Numbers of a governor that goes by evaluations, after those: the log entry from which on the
plain mean is taken, 0 for none, and what `worth.judge` remembers.
"""


@dataclass(frozen=True, slots=True)
class Cured(Event):
    """From log entry ``entry`` on the outer step takes the plain mean, since averaging was not
    worth it: ``finding`` is what evaluations say, in words.
    """

    entry: int
    finding: str


@dataclass(frozen=True, slots=True)
class Governed(Event):
    """The outer step restarted its momentum and halves its rate: a round's ``value`` of ``what`` is
    far above the ``median`` of the last rounds.
    """

    what: Kind
    value: float
    median: float


def judge(numbers: Tensor, norm: float, loss: float | None = None) -> tuple[float, Governed | None]:
    """What to do in a round whose mean has this norm, and whose contributors told this loss:
    (factor of the rate, whether it jumped).

    ``numbers``: float32 (NUMBERS,), updated.
    """
    values = numbers.tolist()
    norms, losses, (calm, acted) = values[: 1 + WINDOW], values[1 + WINDOW : -2], values[-2:]
    seen: tuple[tuple[Kind, list[float], float | None], ...] = (
        ("norm", norms, norm),
        ("loss", losses, loss),
    )
    jumps = [
        event
        for what, window, value in seen
        if value is not None and (event := _see(what, window, value)) is not None
    ]
    if jumps:
        calm, acted = float(CALM_ROUNDS), acted + 1
    factor = 0.5 if calm else 1.0
    numbers.copy_(
        torch.tensor(
            [*norms, *losses, max(0.0, calm - 1), acted], dtype=torch.float32, device="cpu"
        )
    )
    return factor, jumps[0] if jumps else None


def watch(
    numbers: Tensor, found: worth.Worth | None, rounds: int, entry: int, *, plain: bool
) -> Cured | None:
    """What to do in log entry ``entry``, whose contributors found this before it.

    ``numbers``: float32 (WATCHING,), updated; the first is the entry from which on the plain mean
    is taken. ``plain``: the outer step is that already, and there is nothing to do.
    """
    since, *state = numbers.tolist()
    if found is None or since or plain:
        return None
    finding = worth.judge(state, found, rounds)
    if finding:
        since = float(entry)
    numbers.copy_(torch.tensor([since, *state], dtype=torch.float32, device="cpu"))
    return Cured(entry, worth.said(found, finding)) if finding else None


def _see(what: Kind, window: list[float], value: float) -> Governed | None:
    """Remember a value; whether it is a jump. What is usual does not follow a jump: then the median
    is remembered.
    """
    count, event = int(window[0]), None
    known = window[1 : 1 + count]
    if count >= LEAST:
        median = statistics.median(known)
        deviation = statistics.median(abs(each - median) for each in known)
        if value > median + max(DEVIATIONS * deviation, SHARES[what] * abs(median)):
            event, value = Governed(what, value, median), median
    window[:] = [min(count + 1, WINDOW), value, *window[1:WINDOW]]
    return event
