"""Network addresses as text (multiaddrs such as ``/ip4/192.0.2.7/tcp/4001``): parsing, validating,
listing our own.

A peer that nobody can dial is reached through a relay: its address is a circuit,
``/ip4/192.0.2.7/tcp/4001/p2p/RELAY/p2p-circuit``. Addresses come from strangers, so that everything
here is strict and bounded, and nothing needs libp2p.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import ifaddr

from ....collectives.errors import ConfigError
from ....collectives.identifiers import PeerId
from ....security.identity import is_peer_id
from .dialable import (
    CIRCUIT as CIRCUIT,
)
from .dialable import (
    MAX_ADDRESS_CHARS as MAX_ADDRESS_CHARS,
)
from .dialable import (
    MAX_ADDRESSES as MAX_ADDRESSES,
)
from .dialable import (
    WILDCARDS,
)
from .dialable import (
    host_and_port as host_and_port,
)
from .dialable import (
    is_address as is_address,
)
from .dialable import (
    is_direct as is_direct,
)
from .dialable import (
    is_host_name as is_host_name,
)
from .dialable import (
    split_circuit as split_circuit,
)
from .dialable import (
    usable as usable,
)

MAX_HOSTS = 6
"""Hosts of our own that others are told of, beside circuits and what a router leads to us."""
MAX_LINKS = 4
"""Interfaces by which an IPv6 address without a network (fe80) is dialled."""
# Interfaces between this machine and its own containers and virtual machines.
_INNER = (
    *("docker", "br-", "veth", "virbr", "vnet", "vmnet", "vboxnet", "lxcbr", "lxdbr"),
    *("podman", "cni", "cali", "flannel", "kube", "weave", "nerdctl", "incusbr"),
)

_NO_PORT = {  # errno of bind: why, and what to do
    errno.EADDRINUSE: (
        "another program listens there; most likely a node of yours, of this home or another",
        "atoll status    or choose another port with --port; 0: any free one",
    ),
    errno.EADDRNOTAVAIL: (
        "no network interface of this machine has this address",
        "Listen on /ip4/0.0.0.0/tcp/PORT; the address of a router goes into node.announce.",
    ),
    errno.EACCES: (
        "ports below 1024 need the rights of the system's administrator",
        "Choose another port with --port",
    ),
}


def split_peer(address: str) -> tuple[PeerId, str]:
    """Peer id and address of ``/ip4/…/tcp/…/p2p/PEER``. Raises ConfigError when it is not one."""
    head, mark, peer = address.strip().rpartition("/p2p/")
    if not mark or not is_peer_id(peer) or not is_address(head):
        raise ConfigError(
            f"not the address of a peer: {address[:MAX_ADDRESS_CHARS]!r}",
            key="bootstrap",
            why="an address needs a host, a TCP port and the id of the peer that must answer there",
            hint="/ip4/192.0.2.7/tcp/4001/p2p/12D3Koo…, an address that `atoll status` shows there",
        )
    return PeerId(peer), head


def check_listen(address: str) -> None:
    """Raise ConfigError unless a node can listen on ``address``: a numeric host and a TCP port, 0
    for any.
    """
    try:
        ipaddress.ip_address(host_and_port(address)[0])
    except ValueError:
        raise ConfigError(
            f"not an address to listen on: {address[:MAX_ADDRESS_CHARS]!r}",
            key="listen",
            why="a node listens on a numeric address of this machine and a TCP port",
            hint=(
                "/ip4/0.0.0.0/tcp/4150 for all addresses of this machine, "
                "/ip4/127.0.0.1/tcp/0 for this machine only"
            ),
        ) from None


def check_announce(address: str) -> None:
    """Raise ConfigError unless others could dial ``address``."""
    if not is_address(address):
        raise ConfigError(
            f"not an address to announce: {address[:MAX_ADDRESS_CHARS]!r}",
            key="announce",
            why="others dial it: it needs a host, a TCP port that is not 0, and no peer id",
            hint="/ip4/203.0.113.7/tcp/4150, or /dns4/node.example.org/tcp/4150",
        )


def join_peer(peer: PeerId, address: str) -> str:
    """The address together with the id of the peer that must answer there."""
    return f"{address}/p2p/{peer}"


def make_address(host: str, port: int) -> str:
    """The address of a numeric host."""
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


def is_private(host: str) -> bool:
    """Whether a numeric host is on this machine or on a private network."""
    ip = ipaddress.ip_address(host)
    return ip.is_private or ip.is_loopback or ip.is_link_local


def is_scoped(host: str) -> bool:
    """Whether a host is an IPv6 one that nobody has assigned (fe80): the same on every link, so
    that who dials it says by which of its own interfaces.
    """
    return host[:4].lower() == "fe80" and ":" in host


def is_public(host: str) -> bool:
    """Whether a host is one of the whole internet's. A name may be one; numbers of carrier-grade
    NATs and of documentation are not.
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return True
    return ip.is_global and not ip.is_multicast


def is_internet(address: str) -> bool:
    """Whether what is dialled first for ``address`` is a numeric host of the whole internet's."""
    host = host_of(address)
    return (":" in host or host.replace(".", "").isdigit()) and is_public(host)


def is_loopback(address: str) -> bool:
    """Whether ``address`` is on whatever machine dials it."""
    host = host_of(address)
    return host == "localhost" or host == "::1" or host.startswith("127.")


def host_of(address: str) -> str:
    """The host that is dialled first to get to ``address``: a circuit's is its relay's. Raises
    ValueError.
    """
    found = split_circuit(address)
    return host_and_port(found[1] if found else address)[0]


def is_ipv6(address: str) -> bool:
    """Whether what is dialled first for ``address`` is an IPv6 host."""
    return ":" in host_of(address)


def telling(addresses: Iterable[str]) -> list[str]:
    """The direct addresses that show where a machine stands: the IPv4 ones, if it has any but
    loopback. With a private one it stands in a house, whose firewall keeps its IPv6 addresses from
    strangers, public as they are."""
    direct = [address for address in addresses if is_direct(address)]
    return [
        address for address in direct if not is_ipv6(address) and not is_loopback(address)
    ] or direct


def has_public(addresses: Iterable[str]) -> bool:
    """Whether a machine with these can, as far as they show, be dialled on the internet, by number
    and without a relay.
    """
    return any(map(is_internet, telling(addresses)))


def at_home(addresses: Iterable[str]) -> bool:
    """Whether these, each with or without ``/p2p/PEER``, lead nowhere but in one private network,
    or on one machine: nobody elsewhere can dial them.
    """
    known = [without_peer(address) for address in addresses]
    return (
        bool(known)
        and all(map(is_direct, known))
        and not any(is_public(host_of(address)) for address in telling(known))
    )


def own_hosts() -> list[str]:
    """Our numeric addresses for a wildcard listener: those of the default routes, those of other
    interfaces (a cable to the next machine, a laboratory's own network, an overlay), then loopback.
    Sends nothing.
    """
    default = list[str]()
    for family, probe in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((probe, 9))  # chooses a route, sends no packet
                default.append(sock.getsockname()[0])
        except OSError:
            continue
    adapters = list[tuple[str, list[str]]]()
    with contextlib.suppress(OSError):
        adapters = [
            (
                adapter.name,
                [str(ip.ip[0] if isinstance(ip.ip, tuple) else ip.ip) for ip in adapter.ips],
            )
            for adapter in ifaddr.get_adapters()
        ]
    return [*ordered_hosts(default, adapters), "127.0.0.1"]


class LinkHost(NamedTuple):
    """An interface with an fe80 host of ours: its number, and that."""

    number: int
    host: str


def links() -> list[LinkHost]:
    """The interfaces by which fe80 hosts are dialled, at most `MAX_LINKS`."""
    found = list[LinkHost]()
    with contextlib.suppress(OSError):
        for adapter in ifaddr.get_adapters():
            if not adapter.name.startswith(_INNER) and adapter.index is not None:
                hosts = [ip.ip[0] for ip in adapter.ips if isinstance(ip.ip, tuple)]
                found += [LinkHost(adapter.index, host) for host in hosts if is_scoped(host)][:1]
    return found[:MAX_LINKS]


Place = tuple[str, int] | tuple[str, int, int, int]
"""A socket's address: host, port, and of an fe80 host 0 and the interface's number."""


def places(host: str, port: int) -> list[Place]:
    """What to connect to for a numeric host: for an fe80 one that by each of our links, of which at
    most one leads there.
    """
    if not is_scoped(host):
        return [(host, port)]
    return [(host, port, 0, link.number) for link in links()]


def ordered_hosts(default: Sequence[str], adapters: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Of the hosts of ``adapters`` (name, numeric hosts) those that other machines may dial, at
    most `MAX_HOSTS`: first ``default``, those of the default routes, then IPv4, that which nobody
    has assigned (169.254) last, then one IPv6 address of each further interface, and the fe80 ones
    of interfaces without an IPv4 address that somebody has assigned. What containers and virtual
    machines of this machine are tied to leads to them only.
    """
    more = list[str]()
    for name, hosts in adapters:
        if name.startswith(_INNER):
            continue
        known = [ipaddress.ip_address(host) for host in hosts]
        usual = [ip for ip in known if not (ip.is_loopback or ip.is_multicast or ip.is_unspecified)]
        more += [str(ip) for ip in usual if ip.version == 4]
        if not any(host in default for host in hosts if ":" in host):
            more += [str(ip) for ip in usual if ip.version == 6 and not ip.is_link_local][:1]
        if all(ip.version == 6 or ip.is_link_local for ip in usual):
            more += [str(ip) for ip in usual if is_scoped(str(ip))][:1]

    def order(host: str) -> tuple[bool, bool]:
        ip = ipaddress.ip_address(host)
        return ip.version == 6, ip.is_link_local

    return list(dict.fromkeys([*default, *sorted(more, key=order)]))[:MAX_HOSTS]


def expand(host: str, port: int) -> list[str]:
    """The addresses under which a listener on ``host`` can be dialled (a wildcard has several)."""
    if host in WILDCARDS:
        version = ipaddress.ip_address(host).version
        hosts = [own for own in own_hosts() if ipaddress.ip_address(own).version == version] or [
            "::1"
        ]
    else:
        hosts = [host]
    return [make_address(own, port) for own in hosts]


def listening_at(bound: Iterable[tuple[str, int]]) -> list[str]:
    """The addresses of listeners on these hosts and ports: IPv4, IPv6, then loopback, that of IPv6
    only where there is no other.
    """
    found = sorted(
        (address for host, port in bound for address in expand(host, port)),
        key=lambda address: (is_loopback(address), is_ipv6(address)),
    )
    return [address for address in found if host_of(address) != "::1"] or found


def everywhere(port: int) -> tuple[str, ...]:
    """What to listen on for all addresses of this machine: IPv4, and IPv6 if there is any."""
    found = [f"/ip4/0.0.0.0/tcp/{port}"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("::", 0))
        found.append(f"/ip6/::/tcp/{port}")
    return tuple(found)


def check_port_free(host: str, port: int) -> None:
    """Raise ConfigError E101 when somebody else listens there already, or nobody here can.

    libp2p listens with SO_REUSEPORT, so that two nodes of one user could silently share a port and
    each lose half of its connections. Port 0 is always free.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            why, hint = _NO_PORT.get(
                error.errno or 0, ("the system refuses", "Choose another: --port, or --listen")
            )
            raise ConfigError(
                f"port {port}/tcp on {host} cannot be used: {error.strerror}",
                key="listen",
                code="E101",
                exit_code=73,
                why=why,
                hint=hint,
            ) from None


def circuit(relay: PeerId, address: str) -> str:
    """The address of whoever is reached through ``relay``, which is dialled at ``address``."""
    return f"{address}/p2p/{relay}{CIRCUIT}"


def without_peer(address: str) -> str:
    """``address`` less the ``/p2p/PEER`` of whom it leads to. A relay's stays."""
    head, mark, peer = address.rpartition("/p2p/")
    return head if mark and not peer.endswith(CIRCUIT) else address
