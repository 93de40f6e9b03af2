"""Where the node serves its metrics, as people write it: ``:9464``, ``0.0.0.0:9464``."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from ...collectives.errors import ConfigError
from ..net.transport.addresses import is_host_name

LOOPBACK = "127.0.0.1"


class Endpoint(NamedTuple):
    """A TCP address to listen on."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """For whoever asks there."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    @property
    def local(self) -> bool:
        """Whether programs of this machine only reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def endpoint_of(text: str, key: str) -> Endpoint | None:
    """None for an empty text; without a host loopback. Raises ConfigError naming ``key``."""
    if not text.strip():
        return None
    host, colon, port = text.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    good = colon and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536
    if good and (bare == host or ":" in bare) and (not bare or _is_host(bare, bare != host)):
        return Endpoint(bare or LOOPBACK, int(port))
    raise ConfigError(
        f"{key} is {text[:100]!r}, not an address to listen on",
        key=f"$.{key}",
        code="E413",
        why="It is a port, with an address of this machine before the colon or none.",
        hint="For programs of this machine only: :9464    For all who reach it: 0.0.0.0:9464",
    )


def _is_host(host: str, brackets: bool) -> bool:
    try:
        return (ipaddress.ip_address(host).version == 6) == brackets
    except ValueError:
        return not brackets and is_host_name(host)
