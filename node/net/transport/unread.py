"""Bytes that came over our connections and that nobody has read yet: so many of all together.
Sans-IO.

Windows bound a stream, but who connects may have many streams, and many connections. Where too much
is there, the machine that has more than its share loses the connection that has more than its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

MOST_BYTES = 64 << 20


class UnreadShare:
    """Of all connections. ``measure(connection)``: bytes that are unread there now."""

    def __init__(self, measure: Callable[[Any], int]) -> None:
        self._measure = measure
        # By connection: its machine, and how much it had when something came last.
        self._held: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
        self._total = 0  # never too small

    def exceeds(self, connection: Any, machine: str) -> bool:
        """Something has come from ``machine``. Whether the connection must end for it."""
        nbytes = self._measure(connection)
        self._total += max(0, nbytes - self._held.get(connection, (machine, 0))[1])
        self._held[connection] = machine, nbytes
        if self._total <= MOST_BYTES:
            return False
        for other, (its_machine, _) in list(self._held.items()):
            self._held[other] = its_machine, self._measure(other)
        held = [row for row in self._held.values() if row[1]]
        self._total = sum(its for _, its in held)
        if self._total <= MOST_BYTES:
            return False
        connections, of_machine = Counter(name for name, _ in held), Counter[str]()
        for name, its in held:
            of_machine[name] += its
        return (
            of_machine[machine] * len(of_machine) >= self._total
            and nbytes * connections[machine] >= of_machine[machine]
        )
