"""Home routers for the laboratory: a host becomes one, and has hosts behind it.

    with Lab(3, internet=True, rtt_ms=80) as lab:
        home = Router(lab.hosts[1], "port-restricted")
        home.hosts[0].command([...])               # a process behind it
        Router(lab.hosts[2], "symmetric", behind=2)

The router's interface to the internet is eth0, the one to the house is "lan" (192.168.N.1/24, a
bridge). A house has IPv6 as houses do: a prefix of its own, addresses without translation, and a
firewall that lets nothing in that was not asked for.

kind             a port of a host keeps its port outside   who may answer to that port
full-cone        yes, to everybody                         anybody
port-restricted  yes, to everybody                         whom the host has sent something, from
                 the port that it sent it to
port-shifting    no: another port, but to everybody        the same
symmetric        no: another port for every destination    the same
no-udp           port-restricted, and UDP does not pass
rst              port-restricted, and whoever is not let in is refused by a RST; all others are not
                 answered
upnp             port-restricted, and a UPnP and NAT-PMP service that opens ports (`netns.igd`)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args

from netns.lab import FORWARDING, Host, configure, inside, run, write_settings

T = TypeVar("T")
Kind = Literal[
    "full-cone", "port-restricted", "port-shifting", "symmetric", "no-udp", "rst", "upnp"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHIFT = 0x1555
"""Exclusive or with this is what a port-shifting router does to a port: every port has another one,
and none two.
"""
IGD = Path(__file__).with_name("igd.py")

_MAPS = """
 map tcp_ports {{ type inet_service : ipv4_addr; flags dynamic,timeout; size 65535; timeout 10m; }}
 map udp_ports {{ type inet_service : ipv4_addr; flags dynamic,timeout; size 65535; timeout 10m; }}
 chain learn {{
  type filter hook forward priority -10;
  iifname "lan" oifname "eth0" meta l4proto tcp update @tcp_ports {{ tcp sport : ip saddr }}
  iifname "lan" oifname "eth0" meta l4proto udp update @udp_ports {{ udp sport : ip saddr }}
 }}
"""
_RULES = """
table ip nat {{
 {maps}
 chain pre {{
  type nat hook prerouting priority dstnat;
  {pre}
 }}
 chain post {{
  type nat hook postrouting priority srcnat;
  {post}
 }}
}}
table inet firewall {{
 chain input {{
  type filter hook input priority 0;
  iifname "eth0" meta l4proto ipv6-icmp accept
  {refuse}
  iifname "eth0" ct state new drop
 }}
 chain forward {{
  type filter hook forward priority 0;
  {udp}
  iifname "eth0" ct status dnat accept
  iifname "eth0" ct state new drop
 }}
}}
"""
_OPEN = """iifname "eth0" dnat to tcp dport map @tcp_ports
  iifname "eth0" dnat to udp dport map @udp_ports"""
_SHIFT = """oifname "eth0" meta l4proto tcp snat to {wan} : tcp sport ^ {shift}
  oifname "eth0" meta l4proto udp snat to {wan} : udp sport ^ {shift}"""


def rules(kind: Kind, wan: str, *, translates: bool = True) -> str:
    """What nft makes a router of this kind from. Who is not let in is dropped: answering at all
    spoils simultaneous opens.
    """
    plain = 'oifname "eth0" masquerade' if translates else ""
    post = {
        "port-shifting": f"{_SHIFT.format(wan=wan, shift=SHIFT)}\n  {plain}",
        "symmetric": f"{plain} fully-random",
    }.get(kind, plain)
    return _RULES.format(
        maps=_MAPS.format() if kind == "full-cone" else "",
        pre=_OPEN if kind == "full-cone" else "",
        post=post,
        refuse='iifname "eth0" meta l4proto tcp ct state new reject with tcp reset'
        if kind == "rst"
        else "",
        udp="meta l4proto udp drop" if kind == "no-udp" else "",
    )


class Inner:
    """A host behind a router."""

    def __init__(self, router: Router, index: int) -> None:
        self.router, self.index = router, index
        self.namespace = f"{router.host.namespace}-{index}"
        self.address = f"{router.lan}.{index + 2}"
        self.address6 = f"{router.prefix6}::{index + 2}"

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` here. It replaces itself by ``argv``, so that its pid
        is that of the program.
        """
        return ["ip", "netns", "exec", self.namespace, *argv]

    def inside(self, work: Callable[[], T]) -> T:
        """Do something in this host's network."""
        return inside(self.namespace, work)


class Router:
    """A host of a laboratory, made a router of this kind, and the hosts behind it. It ends with the
    laboratory.
    """

    def __init__(
        self,
        host: Host,
        kind: Kind,
        behind: int = 1,
        *,
        lan: str = "",
        isolated: bool = False,
        translates: bool = True,
    ) -> None:
        """``lan``: the first three numbers of the house's addresses (default 192.168.N);
        ``isolated``: its hosts do not see each other; without ``translates`` the house has these
        addresses on the internet, too, and the router is a firewall.
        """
        self.translates = translates
        self.host, self.kind = host, kind
        self.address = host.address
        self.lan = lan or f"192.168.{host.index + 1}"
        self.prefix6 = f"{host.prefix6}:1"
        self.hosts = [Inner(self, index) for index in range(behind)]
        host.lab.more += [inner.namespace for inner in self.hosts]
        self._wire(isolated)
        write_settings(host.namespace, FORWARDING)
        self.become(kind)
        if kind == "upnp":
            host.lab.start(host.command([sys.executable, str(IGD), f"{self.lan}.1", host.address]))

    def become(self, kind: Kind) -> None:
        """Be of another kind for new connections, but for the service of "upnp"; ports that were
        opened are closed.
        """
        self.kind = kind
        run(
            self.host.command(["nft", "-f", "-"]),
            "flush ruleset\n" + rules(kind, self.host.address, translates=self.translates),
        )

    def open6(self, port: int) -> None:
        """Let IPv6 connections in to this port of any host of the house, as its owner may tell the
        firewall to.
        """
        run(
            self.host.command(
                [
                    "nft",
                    "insert",
                    "rule",
                    "inet",
                    "firewall",
                    "forward",
                    "meta",
                    "nfproto",
                    "ipv6",
                    "tcp",
                    "dport",
                    str(port),
                    "accept",
                ]
            )
        )

    def _wire(self, isolated: bool) -> None:
        mine, lab = self.host.namespace, self.host.lab
        links = [
            f"link add name in{inner.index} netns {mine} type veth peer name eth0 netns {inner.namespace}"
            for inner in self.hosts
        ]
        run(
            ["ip", "-batch", "-"],
            "\n".join([*(f"netns add {inner.namespace}" for inner in self.hosts), *links]) + "\n",
        )
        own = [
            "link add name lan type bridge",
            f"addr add {self.lan}.1/24 dev lan",
            "link set lan up",
        ]
        for inner in self.hosts:
            own += [
                f"link set in{inner.index} master lan up",
                *([f"link set in{inner.index} type bridge_slave isolated on"] if isolated else []),
            ]
        if lab.internet:
            own.append(f"addr add {self.prefix6}::1/64 dev lan nodad")
            configure(lab.hub, [f"route add {self.prefix6}::/64 via {self.host.prefix6}::2"])
        if not self.translates:
            configure(lab.hub, [f"route add {self.lan}.0/24 via {self.address}"])
        configure(mine, own)
        for inner in self.hosts:
            lines = [
                "link set lo up",
                f"addr add {inner.address}/24 dev eth0",
                "link set eth0 up",
                f"route add default via {self.lan}.1",
            ]
            if lab.internet:
                lines += [
                    f"addr add {inner.address6}/64 dev eth0 nodad",
                    f"route add default via {self.prefix6}::1",
                ]
            configure(inner.namespace, lines)
