"""Which texts are addresses that another peer could dial. `addresses` has the rest: our own, and
what hosts they name. Addresses come from strangers: everything here is strict and bounded.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from ....collectives.identifiers import PeerId
from ....security.identity import is_peer_id

MAX_ADDRESSES = 8
"""Addresses kept of one peer; more are of no use and cost a dial each."""
MAX_ADDRESS_CHARS = 200
CIRCUIT = "/p2p-circuit"
WILDCARDS = ("0.0.0.0", "::")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def host_and_port(address: str) -> tuple[str, int]:
    """Host and TCP port of ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT``. Raises ValueError on anything
    else.
    """
    fields = address.split("/", 5)
    if len(address) > MAX_ADDRESS_CHARS or len(fields) != 5 or fields[0] or fields[3] != "tcp":
        raise ValueError(f"not a TCP address: {address[:MAX_ADDRESS_CHARS]!r}")
    _, kind, host, _, port = fields
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"not a port: {port[:20]!r}")
    if kind == "ip4":
        ipaddress.IPv4Address(host)
    elif kind == "ip6":
        # An interface of whoever says it; an IPv4 address in disguise.
        if "%" in host or "." in host:
            raise ValueError(f"not a host: {host!r}")
        ipaddress.IPv6Address(host)
    elif kind not in ("dns", "dns4", "dns6") or not is_host_name(host):
        raise ValueError(f"not a host: {host!r}")
    return host, int(port)


def is_host_name(host: str) -> bool:
    """Whether ``host`` could be asked for in the DNS. One that ends in a number could not: systems
    take ``127.1`` for an address.
    """
    labels = host.removesuffix(".").split(".")
    return (
        len(host) <= 253
        and all(_LABEL.fullmatch(label) for label in labels)
        and not labels[-1].isdigit()
    )


def is_direct(address: str) -> bool:
    """Whether another peer could dial ``address`` itself: well formed, a real port, no wildcard, no
    relay.
    """
    try:
        host, port = host_and_port(address)
    except ValueError:
        return False
    return port > 0 and host not in WILDCARDS


def split_circuit(address: str) -> tuple[PeerId, str] | None:
    """The relay of a circuit and where it is dialled; None when ``address`` is no circuit."""
    head, mark, relay = address.removesuffix(CIRCUIT).rpartition("/p2p/")
    if (
        not address.endswith(CIRCUIT)
        or len(address) > MAX_ADDRESS_CHARS
        or not mark
        or not is_peer_id(relay)
        or not is_direct(head)
    ):
        return None
    return PeerId(relay), head


def is_address(address: str) -> bool:
    """Whether another peer could get somewhere with ``address``: by dialling it, or through the
    relay it names.
    """
    return is_direct(address) or split_circuit(address) is not None


def usable(addresses: Iterable[str]) -> tuple[str, ...]:
    """The dialable ones of ``addresses``, in order, each once, at most `MAX_ADDRESSES`."""
    return tuple(dict.fromkeys(address for address in addresses if is_address(address)))[
        :MAX_ADDRESSES
    ]
