# What scripts import of atoll.collectives, for type checkers: the package loads a name when it is used.

from .api import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    check_state,
    enter,
    gather_objects,
    modular_sum,
    reduce_scatter,
    repair_state,
)
from .averaging import average
from .series import numbered

__all__ = [
    "all_gather",
    "all_reduce",
    "average",
    "barrier",
    "broadcast",
    "check_state",
    "enter",
    "gather_objects",
    "modular_sum",
    "numbered",
    "reduce_scatter",
    "repair_state",
]
