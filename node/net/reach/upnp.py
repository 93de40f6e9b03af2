"""UPnP's Internet Gateway Device (version 1): finding the router and asking it for a port. Texts
are made and read here; sans-IO.

What a router answers is read for a few elements only, within bounds and in linear time: no XML
parser meets it.
"""

from __future__ import annotations

import html
import re
from urllib.parse import SplitResult, urljoin, urlsplit

GROUP, PORT = "239.255.255.250", 1900
SEARCHES_S = (0.5, 1.5)
"""How long answers to a search are waited for, one datagram each: multicast over radio gets lost.
"""
SERVICES = tuple(
    f"urn:schemas-upnp-org:service:{name}"
    for name in ("WANIPConnection:1", "WANPPPConnection:1", "WANIPConnection:2")
)
MAX_ANSWER_BYTES = 65_536
MAX_ELEMENT_CHARS = 1000
_DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"


def search() -> bytes:
    """Who is a router here?"""
    return (
        f'M-SEARCH * HTTP/1.1\r\nHOST: {GROUP}:{PORT}\r\nMAN: "ssdp:discover"\r\nMX: '
        f"1\r\nST: {_DEVICE}\r\n\r\n"
    ).encode()


def location_in(answer: bytes, sender: str) -> str:
    """Where the router's description is; only at the host that answered. Raises ValueError."""
    found = re.search(rb"(?im)^location:[ \t]*(http://\S{1,200})\s*$", answer[:2048])
    if found is None:
        raise ValueError("no location")
    where = found[1].decode("ascii", "strict")
    if urlsplit(where).hostname != sender:
        raise ValueError(f"{sender} names another host")
    return where


def control_in(description: str, location: str) -> tuple[str, str]:
    """(service, control address) of the router's connection. Raises ValueError."""
    for block in description.split("<service>")[1:65]:
        service, control = _element(block, "serviceType"), _element(block, "controlURL")
        if service in SERVICES and control:
            address = urljoin(location, control)
            if urlsplit(address).hostname == urlsplit(location).hostname:
                return service, address
    raise ValueError("no connection to the internet in the description")


def call(service: str, control: str, action: str, arguments: dict[str, object]) -> bytes:
    """The whole HTTP request of an action."""
    where = urlsplit(control)
    inner = "".join(
        f"<{name}>{html.escape(str(value))}</{name}>" for name, value in arguments.items()
    )
    body = (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
        ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{service}">{inner}</u:{action}></s:Body></s:Envelope>'
    ).encode()
    head = (
        f"POST {_target(where)} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: text/xml; "
        f'charset="utf-8"\r\nSOAPAction: "{service}#{action}"\r\nContent-Length: '
        f"{len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def get(location: str) -> bytes:
    """The HTTP request for a description."""
    where = urlsplit(location)
    return (
        f"GET {_target(where)} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n\r\n"
    ).encode()


def body_of(answer: bytes) -> str:
    """What an HTTP answer carries. Raises ValueError when it is no success."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.[01] 200\b", head):
        described = _element(body.decode(errors="replace"), "errorDescription")
        raise ValueError(f"the router refuses: {described or head[:60].decode(errors='replace')}")
    return body.decode(errors="replace")


def add_port(outside: int, inside: int, host: str, life_s: int) -> dict[str, object]:
    """The arguments of AddPortMapping."""
    return {
        "NewRemoteHost": "",
        "NewExternalPort": outside,
        "NewProtocol": "TCP",
        "NewInternalPort": inside,
        "NewInternalClient": host,
        "NewEnabled": 1,
        "NewPortMappingDescription": "atoll",
        "NewLeaseDuration": life_s,
    }


def delete_port(outside: int) -> dict[str, object]:
    return {"NewRemoteHost": "", "NewExternalPort": outside, "NewProtocol": "TCP"}


def external_in(body: str) -> str:
    """The address that GetExternalIPAddress tells; "" for none."""
    return _element(body, "NewExternalIPAddress")


def _target(where: SplitResult) -> str:
    """What is asked for: some routers tell their services apart by the query alone."""
    return (where.path or "/") + (f"?{where.query}" if where.query else "")


def _element(text: str, name: str) -> str:
    inner, mark, _ = text.partition(f"<{name}>")[2].partition(f"</{name}>")
    return (
        html.unescape(inner.strip())
        if mark and len(inner) <= MAX_ELEMENT_CHARS and "<" not in inner
        else ""
    )
