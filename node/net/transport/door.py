"""Who may stay, of those who connect to us, where there is room for so many only. Sans-IO.

A connection costs whoever makes it nothing, and it may be idle for ever: so one machine could take
all places, and nobody else would get in. Where none is free the machine that has the most gives one
up to another that has fewer, its oldest first.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable


class Door:
    """``most``: places."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: dict[Hashable, str] = {}  # oldest first

    def enter(self, who: Hashable, host: str) -> Hashable | None:
        """``who`` has come from ``host``. Who must go: ``who``, somebody else, or nobody."""
        machine = machine_of(host)
        if len(self._inside) >= self._most:
            counts = Counter(self._inside.values())
            busiest, count = counts.most_common(1)[0]
            if counts[machine] + 1 >= count:
                return who
            shown_out = next(other for other, its in self._inside.items() if its == busiest)
            del self._inside[shown_out]
        else:
            shown_out = None
        self._inside[who] = machine
        return shown_out

    def leave(self, who: Hashable) -> None:
        """Its connection is gone. Idempotent."""
        self._inside.pop(who, None)


def machine_of(host: str) -> str:
    """What one machine has: an IPv4 address, or the 64 bits that a house gets of IPv6."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0].removeprefix("::ffff:"))
    except ValueError:
        return host
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))
