"""The outer step: what a committed mean does to the anchor. Pure, and with the same bits on every
machine.

Files, lowest first:

    presets   outer values that are known to work, and their sources
    rules     plain averaging and Nesterov's momentum
    more_rules  one class an optimizer more: Adam, Yogi, Adagrad, CO2 and others
    reported  what contributors say, as the step reads it
    readings  how a member says it: norms and losses, and what follows from them
    worth     what evaluations say of averaging
    standing  what stands against it, for people
    governor  a jump of the update's norm or of the loss: momentum restarts, the rate is halved for
              some rounds; the plain mean where averaging is not worth it
    mean_watch  the door of what watches the mean of a round
    governing   the governor, stretched means and clipped ones, at that door
    rows      where rules and the governor are found by name
    state     where state vectors lie, and momenta in bf16
    step      OuterStep: a rule over a whole round, statistics averaged

Names from here load torch; commands that read presets do without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .step import BLOCK_ELEMENTS, OuterStep

__all__ = ["BLOCK_ELEMENTS", "OuterStep"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(".step", __name__), name)
    globals()[name] = value
    return value
