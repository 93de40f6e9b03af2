"""A home router's service that opens ports: UPnP (IGD 1, WANIPConnection) and NAT-PMP (RFC 6886),
in the network of the router.

    igd.py LAN_ADDRESS WAN_ADDRESS

It says "ready" once it listens and ends when its stdin does. Mappings are elements of nft maps;
they end with their lease. A host may map ports to itself only, as careful routers have it.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

GROUP, SSDP, PMP, HTTP = "239.255.255.250", 1900, 5351, 5000
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
TARGETS = ("ssdp:all", "upnp:rootdevice", DEVICE, SERVICE)
TABLE = """
table ip igd {
 map tcp_open { type inet_service : ipv4_addr . inet_service; }
 map udp_open { type inet_service : ipv4_addr . inet_service; }
 chain pre {
  type nat hook prerouting priority dstnat;
  iifname "eth0" dnat ip to tcp dport map @tcp_open
  iifname "eth0" dnat ip to udp dport map @udp_open
 }
}
"""
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion><device>
<deviceType>{DEVICE}</deviceType><friendlyName>laboratory</friendlyName><manufacturer>atoll</manufacturer><modelName>lab</modelName>
<UDN>uuid:00000000-0000-0000-0000-000000000001</UDN><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><friendlyName>wan</friendlyName><manufacturer>atoll</manufacturer>
<modelName>lab</modelName><UDN>uuid:00000000-0000-0000-0000-000000000002</UDN><serviceList><service>
<serviceType>urn:schemas-upnp-org:service:WANCommonInterfaceConfig:1</serviceType>
<serviceId>urn:upnp-org:serviceId:WANCommonIFC1</serviceId>
<controlURL>/common</controlURL><eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL></service></serviceList><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><friendlyName>connection</friendlyName>
<manufacturer>atoll</manufacturer><modelName>lab</modelName><UDN>uuid:00000000-0000-0000-0000-000000000003</UDN><serviceList><service>
<serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>"""
FAULT = """<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>
<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{}</errorCode><errorDescription>{}</errorDescription></UPnPError></detail></s:Fault>"""
ENVELOPE = """<?xml version="1.0"?>
<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{}</s:Body>
</s:Envelope>"""


class RefusedError(Exception):
    """A UPnP error: its number and text."""


class Mapping(NamedTuple):
    """An open port: where it leads, what for, and when it ends (monotonic; infinite: never)."""

    address: str
    port: int
    about: str
    until: float


class Table:
    """The open ports, as nft has them."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], Mapping] = {}
        self._lock = threading.Lock()
        self._nft(TABLE)

    @staticmethod
    def _nft(text: str) -> None:
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)

    def add(
        self, protocol: str, outer: int, address: str, port: int, about: str, lease_s: float
    ) -> None:
        """Open a port, or renew it. Raises RefusedError where it leads to another host already."""
        with self._lock:
            older = self._open.get((protocol, outer))
            if older is not None and older.address != address:
                raise RefusedError(718, "ConflictInMappingEntry")
            if older is not None:
                self._nft(f"delete element ip igd {protocol}_open {{ {outer} }}\n")
            self._nft(f"add element ip igd {protocol}_open {{ {outer} : {address} . {port} }}\n")
            self._open[protocol, outer] = Mapping(
                address, port, about, time.monotonic() + lease_s if lease_s else float("inf")
            )

    def remove(self, protocol: str, outer: int, address: str = "") -> None:
        """Close a port, if it leads to ``address``. Raises RefusedError."""
        with self._lock:
            found = self._open.get((protocol, outer))
            if found is None or address not in ("", found.address):
                raise RefusedError(714, "NoSuchEntryInArray")
            del self._open[protocol, outer]
            self._nft(f"delete element ip igd {protocol}_open {{ {outer} }}\n")

    def find(self, protocol: str, outer: int) -> Mapping | None:
        """Where a port leads."""
        with self._lock:
            return self._open.get((protocol, outer))

    def list(self) -> list[tuple[str, int, Mapping]]:
        """All."""
        with self._lock:
            return [(protocol, outer, mapping) for (protocol, outer), mapping in self._open.items()]

    def expire(self) -> None:
        """Close what has had its time."""
        for protocol, outer, mapping in self.list():
            if mapping.until <= time.monotonic():
                self.remove(protocol, outer)


def entry(mapping: Mapping) -> dict[str, str]:
    """A mapping in UPnP's words."""
    left = 0 if mapping.until == float("inf") else max(1, round(mapping.until - time.monotonic()))
    return {
        "NewInternalPort": str(mapping.port),
        "NewInternalClient": mapping.address,
        "NewEnabled": "1",
        "NewPortMappingDescription": mapping.about,
        "NewLeaseDuration": str(left),
    }


def act(action: str, values: dict[str, str], client: str, wan: str, table: Table) -> dict[str, str]:
    """What an action answers. Raises RefusedError."""
    if action == "GetExternalIPAddress":
        return {"NewExternalIPAddress": wan}
    if action == "GetStatusInfo":
        return {
            "NewConnectionStatus": "Connected",
            "NewLastConnectionError": "ERROR_NONE",
            "NewUptime": "1000",
        }
    if action == "GetConnectionTypeInfo":
        return {"NewConnectionType": "IP_Routed", "NewPossibleConnectionTypes": "IP_Routed"}
    if action == "GetGenericPortMappingEntry":
        everything, index = table.list(), int(values["NewPortMappingIndex"])
        if index >= len(everything):
            raise RefusedError(713, "SpecifiedArrayIndexInvalid")
        protocol, outer, mapping = everything[index]
        return {
            "NewRemoteHost": "",
            "NewExternalPort": str(outer),
            "NewProtocol": protocol.upper(),
            **entry(mapping),
        }
    protocol, outer = values.get("NewProtocol", "").lower(), int(values.get("NewExternalPort", "0"))
    if action not in ("AddPortMapping", "DeletePortMapping", "GetSpecificPortMappingEntry"):
        raise RefusedError(401, "Invalid Action")
    if protocol not in ("tcp", "udp") or not 0 < outer < 65536:
        raise RefusedError(402, "Invalid Args")
    if action == "AddPortMapping":
        if values["NewInternalClient"] != client:
            raise RefusedError(606, "Action not authorized")
        about, lease_s = (
            values.get("NewPortMappingDescription", ""),
            float(values.get("NewLeaseDuration") or 0),
        )
        table.add(protocol, outer, client, int(values["NewInternalPort"]), about, lease_s)
    elif action == "DeletePortMapping":
        table.remove(protocol, outer, client)
    else:
        found = table.find(protocol, outer)
        if found is None:
            raise RefusedError(714, "NoSuchEntryInArray")
        return entry(found)
    return {}


def serve_http(lan: str, wan: str, table: Table) -> None:
    """Description and control."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200, DESCRIPTION if self.path == "/rootDesc.xml" else "<scpd/>")

        def do_POST(self) -> None:
            text = self.rfile.read(
                min(int(self.headers.get("Content-Length", "0")), 65536)
            ).decode()
            action = self.headers.get("SOAPAction", "").strip('"').rpartition("#")[2]
            values = dict(re.findall(r"<(New\w+)[^>]*>([^<]*)</", text))
            try:
                if self.path == "/common":
                    raise RefusedError(401, "Invalid Action")
                answer = act(action, values, self.client_address[0], wan, table)
            except (RefusedError, KeyError, ValueError) as error:
                number, why = (
                    error.args if isinstance(error, RefusedError) else (402, "Invalid Args")
                )
                self._answer(500, ENVELOPE.format(FAULT.format(number, why)))
                return
            inner = "".join(f"<{name}>{value}</{name}>" for name, value in answer.items())
            self._answer(
                200,
                ENVELOPE.format(
                    f'<u:{action}Response xmlns:u="{SERVICE}">{inner}</u:{action}Response>'
                ),
            )

        def _answer(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", 'text/xml; charset="utf-8"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((lan, HTTP), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def discovery(lan: str) -> socket.socket:
    """The socket on which searches arrive."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", SSDP))
    sock.setsockopt(
        socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + socket.inet_aton(lan)
    )
    return sock


def searched(sock: socket.socket, lan: str) -> None:
    """Answer one search."""
    data, asker = sock.recvfrom(2048)
    wanted = re.search(rb"(?im)^ST:\s*(\S+)", data)
    if not data.startswith(b"M-SEARCH") or wanted is None:
        return
    target = wanted[1].decode(errors="replace")
    for found in TARGETS[1:] if target == "ssdp:all" else [target] * (target in TARGETS):
        lines = (
            "HTTP/1.1 200 OK",
            "CACHE-CONTROL: max-age=120",
            f"ST: {found}",
            f"USN: uuid:00000000-0000-0000-0000-000000000001::{found}",
            "EXT:",
            "SERVER: lab/1 UPnP/1.0 lab/1",
            f"LOCATION: http://{lan}:{HTTP}/rootDesc.xml",
            "",
            "",
        )
        sock.sendto("\r\n".join(lines).encode(), asker)


def pmp(sock: socket.socket, wan: str, table: Table, began: float) -> None:
    """Answer one NAT-PMP request."""
    data, (client, port) = sock.recvfrom(64)
    if len(data) < 2 or data[0] != 0:
        return
    epoch = int(time.monotonic() - began)
    if data[1] == 0:
        sock.sendto(struct.pack(">BBHI4s", 0, 128, 0, epoch, socket.inet_aton(wan)), (client, port))
    elif data[1] in (1, 2) and len(data) == 12:
        inner, outer, lease_s = struct.unpack(">HHI", data[4:])
        protocol, result = {1: "udp", 2: "tcp"}[data[1]], 0
        try:
            if lease_s:
                outer = outer or inner
                table.add(protocol, outer, client, inner, "NAT-PMP", lease_s)
            else:
                outer = 0
                for kind, number, mapping in table.list():
                    if (kind, mapping.address) == (protocol, client) and inner in (0, mapping.port):
                        table.remove(kind, number, client)
        except RefusedError:
            result = 2
        sock.sendto(
            struct.pack(">BBHIHHI", 0, 128 + data[1], result, epoch, inner, outer, lease_s),
            (client, port),
        )


def main() -> int:
    """Serve until stdin ends."""
    lan, wan = sys.argv[1:]
    table, began = Table(), time.monotonic()
    serve_http(lan, wan, table)
    search = discovery(lan)
    mapper = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    mapper.bind((lan, PMP))
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([search, mapper, sys.stdin], [], [], 1.0)
        if search in ready:
            searched(search, lan)
        if mapper in ready:
            pmp(mapper, wan, table, began)
        if sys.stdin in ready and not sys.stdin.readline():
            return 0
        table.expire()


if __name__ == "__main__":
    sys.exit(main())
