"""Metrics of a training script as floats: what cannot be one is left out with a warning, and never
ends the script that has computed it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Complex, Real
from typing import Any, cast

logger = logging.getLogger("atoll")

MAX_NAME = 64
"""Characters of a metric's name that are kept."""
MOST_REFUSED = 256
"""Names that a warning is remembered for."""


def number_of(value: Any) -> float:
    """``value`` as a float, NaN and infinity included: a number, or an array or tensor of one real
    element, which is waited for where it is on a device. Raises TypeError, with the reason, for
    anything else.
    """
    if isinstance(value, float | int):
        try:
            return float(value)
        except OverflowError:
            raise TypeError("is larger than any float") from None
    dtype = getattr(value, "dtype", None)
    imaginary = getattr(dtype, "is_complex", False) or getattr(dtype, "kind", "") == "c"
    if imaginary or (isinstance(value, Complex) and not isinstance(value, Real)):
        raise TypeError("is complex: log its real part, or its absolute value")
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("is a text")
    array: Any = value
    shape = getattr(array, "shape", None)
    try:
        if shape is not None:
            return float((array.detach() if hasattr(array, "detach") else array).reshape(()))
        return float(array)
    except Exception:  # whatever a script's own types raise here
        many = f" of shape {tuple(cast('tuple[int, ...]', shape))}" if _is_shape(shape) else ""
        raise TypeError(f"is no number{many}") from None


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and bool(cast("tuple[int, ...]", shape))


class Warned:
    """What was refused of metrics, said once for each name. ``call``: who was given them, such as
    ``report``.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._names = set[str]()

    def refuse(self, name: object, value: object, reason: object) -> None:
        """Say it, unless it was said of this name."""
        key = repr(name)[:MAX_NAME]
        if key in self._names or len(self._names) >= MOST_REFUSED:
            return
        self._names.add(key)
        logger.warning(
            "%s leaves %s out: its value, of type %s, %s. float(…) makes a number of it where "
            "there is one; training goes on",
            self._call,
            key,
            type(value).__name__,
            reason,
        )

    def taken(self, metrics: object) -> dict[str, float]:
        """The numbers among ``metrics``, by name; the rest is refused. Never raises."""
        if not isinstance(metrics, Mapping):
            self.refuse("metrics", metrics, "is no mapping of names to numbers")
            return {}
        numbers = dict[str, float]()
        for name, value in cast("Mapping[object, object]", metrics).items():
            if not isinstance(name, str) or not _can_be_sent(name):
                self.refuse(name, value, "has a name that is no text")
                continue
            try:
                numbers[name[:MAX_NAME]] = number_of(value)
            except TypeError as error:
                self.refuse(name, value, error)
        return numbers


def _can_be_sent(name: str) -> bool:
    """Not half of a pair of surrogates."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False
