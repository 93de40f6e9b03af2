"""The address manager: what this node knows of its own addresses, and which of them it tells
others. Sans-IO.

* Addresses of this machine's interfaces. One of the internet's is told at once, and no more when
  those who tried it say that it does not answer. An IPv6 one beside a private IPv4 one is behind
  the firewall of a house: it is told once somebody has reached us there.
* Addresses at which public peers see us (behind a NAT): told when servers on other hosts have
  reached us there.
* An address that the router was asked to map to us: the same.
* Relays' circuits, while nobody can dial us.
* Private addresses: only while we have met nobody of the internet, that is on networks without one.
  In a house with a way out they are told by LAN discovery and to peers that the world sees at the
  same address; broadcast they would only make others dial in their own houses.

Observations and verdicts age; a changed interface ends all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from ..transport.addresses import (
    has_public,
    host_and_port,
    is_direct,
    is_internet,
    is_ipv6,
    is_loopback,
    telling,
    usable,
)

Verdict = Literal["reachable", "unreachable", "unknown"]
Reach = Literal["public", "private", "unknown", "local"]
Nat = Literal["none", "endpoint-independent", "address-dependent", "unknown"]
FRESH_S = 900.0
"""How long an observation or a verdict counts."""
ENOUGH = 2
"""Observers on different hosts before a NAT is called endpoint-independent."""
MAX_CANDIDATES = 4
MAX_OBSERVERS = 16


class AddressManager:
    """``now``: monotonic seconds."""

    def __init__(self, announce: Sequence[str] = (), *, relay_only: bool = False) -> None:
        """``announce``: what the user says, which needs no proof. ``relay_only``: nobody is told
        anything but circuits, whatever is known; until there are some, loopback, which is nobody's.
        """
        self._announce, self._relay_only = () if relay_only else usable(announce), relay_only
        self._own: tuple[str, ...] = ()
        self._way = ""
        self._mapped: dict[str, str] = {}
        self._observed: dict[str, tuple[str, float]] = {}  # by the observer's host
        # By address and by the server's host.
        self._reports: dict[str, dict[str, tuple[bool, float]]] = {}
        self._circuits: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        return self._way

    # ---- what is learned
    def interfaces(self, addresses: Sequence[str], way: str = "") -> bool:
        """Where our interfaces listen now, and from which host of ours packets leave for the
        internet (IPv4); True when either has changed. Then all that others said of us is void."""
        if (tuple(addresses), way) == (self._own, self._way):
            return False
        self._own, self._way = tuple(addresses), way
        self._observed.clear()
        self._reports.clear()
        self._mapped.clear()
        return True

    def observed(self, by_host: str, address: str, now: float) -> None:
        """A public peer at ``by_host`` sees connections that leave from our listen port come from
        ``address``.
        """
        if not is_direct(address) or not is_internet(
            address
        ):  # a peer that we also reach through a relay may name the circuit
            return
        self._observed.pop(by_host, None)
        self._observed[by_host] = address, now
        while len(self._observed) > MAX_OBSERVERS:
            del self._observed[next(iter(self._observed))]

    def mapped(self, means: str, address: str | None) -> bool:
        """The router leads ``address`` to us, by ``means`` ("upnp", "nat-pmp"); None: no longer.
        True when that is news: verdicts from before it are void then."""
        if self._mapped.get(means) == address:
            return False
        self._reports.pop(self._mapped.pop(means, ""), None)
        if address is not None and is_direct(address) and is_internet(address):
            self._mapped[means] = address
            self._reports.pop(address, None)
        return True

    def report(self, address: str, by_host: str, reached: bool, now: float) -> None:
        """A server at ``by_host`` has tried ``address``."""
        self._reports = {
            other: reports
            for other, reports in self._reports.items()
            if any(now - at <= FRESH_S for _, at in reports.values())
        }
        self._reports.setdefault(address, {})[by_host] = reached, now

    def circuits(self, addresses: Sequence[str]) -> None:
        """Where relays lead to us."""
        self._circuits = tuple(addresses)

    # ---- what follows
    def seen_at(self, now: float) -> list[str]:
        """Where the internet sees our listen port, the address of most observers first."""
        if self._relay_only:
            return []
        fresh = [address for address, at in self._observed.values() if now - at <= FRESH_S]
        own = [address for address in self._own if is_internet(address)]
        return list(
            dict.fromkeys(
                [
                    *own,
                    *self._mapped.values(),
                    *sorted(set(fresh), key=lambda address: (-fresh.count(address), address)),
                ]
            )
        )

    def candidates(self, now: float) -> list[str]:
        """What may be worth telling, if it can be reached."""
        found = self.seen_at(now)
        if self.nat(now) == "address-dependent":  # a mapping for one destination is nobody else's
            known = {*self._own, *self._mapped.values()}
            found = [address for address in found if address in known or is_ipv6(address)]
        return found[:MAX_CANDIDATES]

    def lan(self) -> list[str]:
        """Addresses of our interfaces that are not the internet's, loopback last."""
        return (
            []
            if self._relay_only
            else sorted(
                (address for address in self._own if not is_internet(address)), key=is_loopback
            )
        )

    def nat(self, now: float) -> Nat:
        """Which kind of mapping stands between us and the internet, as far as TCP shows it: for
        IPv4, if we have that.
        """
        observed = [
            (address, at) for address, at in self._observed.values() if self._tells(address)
        ]
        named, fresh = (
            Counter(address for address, _ in observed),
            [address for address, at in observed if now - at <= FRESH_S],
        )
        if has_public(self._own) and 2 * sum(map(self._is_own, fresh)) >= len(fresh):
            return "none"
        if (
            max((named[address] for address in fresh), default=0) >= ENOUGH
        ):  # one that says otherwise may lie
            return "endpoint-independent"
        return (
            "address-dependent"
            if len({host_and_port(address)[1] for address in fresh}) > 1
            else "unknown"
        )

    def _tells(self, address: str) -> bool:
        """Whether an address is of the family by which others may reach us: IPv4 if we have it."""
        return address in telling([*self._own, address])

    def _is_own(self, address: str) -> bool:
        return host_and_port(address)[0] in {host_and_port(own)[0] for own in self._own}

    def verdict(self, address: str, now: float) -> Verdict:
        """What those who tried say, the majority of them."""
        fresh = [
            reached
            for reached, at in self._reports.get(address, {}).values()
            if now - at <= FRESH_S
        ]
        if not fresh:
            return "unknown"
        return "reachable" if 2 * sum(fresh) > len(fresh) else "unreachable"

    def plain(self, ipv6: bool) -> bool:
        """Whether an interface of ours has an address of the internet's, of this family: then no
        NAT is in between.
        """
        return any(is_internet(address) and is_ipv6(address) == ipv6 for address in self._own)

    @property
    def online(self) -> bool:
        """Whether we have met the internet: then private addresses mean our house only."""
        return any(is_internet(address) for address in (*self._own, *self._announce)) or bool(
            self._observed
        )

    def reach(self, now: float) -> Reach:
        """Whether others can dial us. "local": nobody outside of private networks was met, so that
        nobody can tell.
        """
        if self._relay_only:
            return "private"
        if any(is_internet(address) for address in self._announce):
            return "public"
        verdicts = [
            self.verdict(address, now) for address in self.candidates(now) if self._tells(address)
        ]
        if "reachable" in verdicts:
            return "public"
        if (verdicts and "unknown" not in verdicts) or (
            not verdicts and self.nat(now) == "address-dependent"
        ):
            return "private"
        return "unknown" if self.online else "local"

    def direct(self, now: float) -> list[str]:
        """Addresses of the internet at which we can be dialled, as far as anybody knows."""
        if self._relay_only:
            return []
        plain = has_public(self._own)  # no house's firewall, as far as our addresses show
        own = [
            address
            for address in self._own
            if plain and is_internet(address) and self.verdict(address, now) != "unreachable"
        ]
        return list(
            dict.fromkeys(
                [*own, *(a for a in self.candidates(now) if self.verdict(a, now) == "reachable")]
            )
        )

    def advertised(self, now: float) -> tuple[str, ...]:
        """What to tell others, most useful first. Never empty once interfaces are known: an empty
        list would say goodbye.
        """
        if self._relay_only:
            return usable(
                self._circuits or [address for address in self._own if is_loopback(address)]
            )
        if self._announce:
            return self._announce
        found = [*self.direct(now), *self._circuits]
        if not found or not self.online:
            found += self._own
        return usable(found)

    def status(self, now: float) -> dict[str, Any]:
        """For `atoll status` and `atoll netcheck`; plain values."""
        candidates = list(dict.fromkeys([*self.candidates(now), *self.seen_at(now)]))
        return {
            "reach": self.reach(now),
            "nat": self.nat(now),
            "candidates": {
                address: {
                    "verdict": self.verdict(address, now),
                    "reached_by": sorted(
                        host
                        for host, (reached, _) in self._reports.get(address, {}).items()
                        if reached
                    ),
                    "not_reached_by": sorted(
                        host
                        for host, (reached, _) in self._reports.get(address, {}).items()
                        if not reached
                    ),
                }
                for address in candidates
            },
            "observers": len(self._observed),
            "interfaces": list(self._own),
            "mappings": dict(self._mapped),
            "circuits": list(self._circuits),
            "relay_only": self._relay_only,
        }
