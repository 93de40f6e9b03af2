"""Whether a private address can be meant for us: this machine has a way to it that is not the way
to the internet. Sends nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from ..transport.addresses import is_scoped, links

ROUTES = Path("/proc/net/route")
INTERNET = "192.0.2.1"
"""Nobody's; the way there is the way to the internet."""


def has_route(host: str) -> bool:
    """Whether ``host`` is on a network of ours, or has a route of its own (a VPN's, say)."""
    if is_scoped(host):
        return bool(links())
    default, own = source(INTERNET if ":" not in host else "2001:db8::1"), source(host)
    return bool(own) and (own != default or on_link(host, _read()) or _same_prefix(host, own))


def assigned(host: str) -> bool:
    """Whether ``host`` is an address of this machine now."""
    if is_scoped(host):
        return any(link.host == host for link in links())
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
        ) as sock:
            sock.bind((host, 0))
            return True
    except OSError:
        return False


def on_link(host: str, table: str) -> bool:
    """Whether a line of /proc/net/route says that ``host`` is reached without a gateway."""
    try:
        wanted = int(ipaddress.IPv4Address(host))
    except ValueError:
        return False
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or int(fields[2], 16) or not int(fields[7], 16):
            continue
        network, mask = (
            int.from_bytes(int(fields[index], 16).to_bytes(4, "little"), "big") for index in (1, 7)
        )
        if wanted & mask == network:
            return True
    return False


def _same_prefix(host: str, own: str) -> bool:
    """Where the routes cannot be read: the same 24 (64) bits."""
    if ROUTES.exists() and ":" not in host:
        return False
    return ipaddress.ip_address(own) in ipaddress.ip_network(
        f"{host}/{64 if ':' in host else 24}", strict=False
    )


def _read() -> str:
    try:
        return ROUTES.read_text(encoding="ascii")
    except OSError:
        return ""


def source(host: str = INTERNET) -> str:
    """From which address of ours a packet to ``host`` would leave; "" where there is no way."""
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
        ) as sock:
            sock.connect((host, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return ""
