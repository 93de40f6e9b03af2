"""Two peers behind routers dial each other at once, each from the port that the other knows: when
to dial whom. Without I/O.

A router lets in what comes from where its host has sent something; so the first of two dials is
lost at the other's router, and the second goes through the hole that the first has made. Most
routers are silent about what they drop; the kernel repeats a SYN after a second. Some answer with a
RST: then a dial is tried again after 30 ms and a random part of a round trip, since two that repeat
at equal times stay out of step for ever.

Where one router gives every destination another port, nobody can say which one the partner gets. By
the birthday paradox both can guess: that side dials from GUESSES ports, the other dials as many
ports at random from its one. Of 64,512 ports one of theirs is one of ours in 98 % of all cases. It
costs hundreds of sockets and of mappings in the routers, so only who was told to does it.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Sequence

from ..transport.addresses import host_and_port, is_private, make_address

RETRY_S = 0.03
SPREAD_S = 0.1
"""The random part of the pause is at least so long."""
MAX_TRIES = 20
MAX_CANDIDATES = 4
MAX_HOSTS = 2
"""A peer could have us dial strangers: not many."""
LOWEST_PORT = 1024
PUNCH_S = 4.0
GUESSES = 512

Target = tuple[str, int]


def candidates(seen: Sequence[Target], local: Target) -> tuple[str, ...]:
    """Where a partner may find a port of ours: as others see it, as a router that keeps ports would
    map it, and where it is.
    """
    found = [make_address(host, port) for host, port in seen]
    if seen:
        found.append(make_address(seen[0][0], local[1]))
    if not ipaddress.ip_address(local[0]).is_unspecified:
        found.append(make_address(*local))
    return tuple(dict.fromkeys(found))[:MAX_CANDIDATES]


def targets(offered: Sequence[str], mine: Sequence[str]) -> list[Target]:
    """What of a partner's candidates we dial. Addresses of a private network only if both of us are
    seen with the same public one.
    """
    public_mine = {host for host, _ in map(host_and_port, mine) if not is_private(host)}
    found: list[Target] = []
    for address in dict.fromkeys(offered[:MAX_CANDIDATES]):
        try:
            host, port = host_and_port(address)
            ip = ipaddress.ip_address(host)
        except ValueError:
            continue
        if (
            port < LOWEST_PORT
            or ip.is_loopback
            or ip.is_multicast
            or ip.is_unspecified
            or ip.is_link_local
        ):
            continue
        found.append((str(ip), port))
    together = any(host in public_mine for host, _ in found)
    found = [target for target in found if together or not is_private(target[0])]
    hosts = list(dict.fromkeys(host for host, _ in found))[: MAX_HOSTS + together]
    return [target for target in found if target[0] in hosts]


def guesses(to: Sequence[Target], rng: random.Random) -> list[Target]:
    """Ports of the first of these hosts at random, GUESSES of them."""
    return (
        [(to[0][0], port) for port in rng.sample(range(LOWEST_PORT, 65_536), GUESSES)] if to else []
    )


def is_symmetric(seen: Sequence[Target]) -> bool:
    """Whether two observers saw different ports: most likely every other destination sees yet
    another one. A hint only.
    """
    return len(set(seen)) > 1


class Punch:
    """The dials of one side. The driver dials whatever is `due` and says how it ended."""

    def __init__(self, now: float, to: Sequence[Target], rtt_s: float, rng: random.Random) -> None:
        """``rtt_s``: to the partner, as far as it is known."""
        self._due = dict.fromkeys(to, now)
        self._spread, self._rng = max(rtt_s, SPREAD_S), rng
        self._tries = dict.fromkeys(to, 0)
        self._ends: dict[Target, str] = {}

    def due(self, now: float) -> list[Target]:
        """Dial these now; each is then no longer due."""
        ready = [target for target, at in self._due.items() if at <= now]
        for target in ready:
            del self._due[target]
            self._tries[target] += 1
        return ready

    def next_at(self) -> float:
        """When something is due; infinite: when an end is reported at the earliest."""
        return min(self._due.values(), default=float("inf"))

    def ended(self, now: float, target: Target, why: str, *, again: bool) -> None:
        """A dial came to nothing; ``again``: another one at this target may not."""
        self._ends[target] = why
        if again and self._tries[target] < MAX_TRIES:
            self._due[target] = now + RETRY_S + self._rng.uniform(0.0, self._spread)

    def why(self) -> str:
        """What became of every candidate."""
        attempts = [
            f"{host}:{port} {self._ends.get((host, port), 'does not answer')}"
            for host, port in list(self._tries)[:MAX_CANDIDATES]
        ]
        return "; ".join(attempts) or "the other side has no address that could be dialled"
