"""BTARD: gradients are averaged among peers of whom fewer than half lie, and liars are found,
proven and removed. State machines without I/O.

Gorbunov, Borzunov, Diskin and Ryabinin, ICML 2022, arXiv 2106.11257;
docs/internals/protocol/btard.md has the messages, the rules, and where this differs. Every gradient
follows from a public seed, so anybody can compute anybody's.

settings   what a run's peers have in common
messages   what is said: bounded, signed for one attempt
wire       frames as bytes
draw       commitments; the common draw, and what follows from it: directions, seeds, validators
residuals  the numbers of a part: fixed point, residuals, roundings
history    radius and Delta max from earlier steps
table      what is held of an attempt, by slot
evidence   signed messages that prove a fault to anybody
waiting    what is lacking: asked for, then testified to be missing
trail      local steps: states committed to on the way, one interval shown
cases      what is open in an attempt after the checks
finished   a step that is over, as validators need it
stages     what an attempt waits for
questions  what others lack: given, handed on, or proven to be withheld
judging    what is open after the checks, and who is guilty
attempt    one attempt at a step: the algorithm
peer       one peer over all its steps: removals, attempts, who is behind
"""

from __future__ import annotations

from .evidence import verify_evidence, verify_removals
from .messages import Bundle, Fault
from .peer import BtardPeer, GradientTask, PeerDriver
from .settings import AttemptSettings

__all__ = [
    "Bundle",
    "Fault",
    "PeerDriver",
    "BtardPeer",
    "AttemptSettings",
    "GradientTask",
    "verify_evidence",
    "verify_removals",
]
