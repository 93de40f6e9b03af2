"""How a port of ours is seen from outside. Every lane listener says to whoever asks with MAGIC from
which address it is asked.

The answer is 18 bytes: an IPv6 address (IPv4 mapped into it) and a port, big-endian. The asked
keeps the connection open until the asker ends it, so that routers keep the mapping, but no longer
than HELD_S.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections import Counter

import trio

MAGIC = b"atoll/o\n"
HELD_S = 30.0
MAX_HELD = 256
MAX_HELD_OF_ONE = 64
"""Of one address: several nodes behind one router may open all their lanes at once."""
ASK_S = 3.0

Seen = tuple[str, int]
_ANSWER = struct.Struct(">16sH")


class Observing:
    """Answers who asks; give `answer` to the listener. Used from the trio thread only."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    async def answer(self, sock: trio.socket.SocketType) -> None:
        """Serve one connection whose MAGIC was read."""
        host, port = sock.getpeername()[:2]
        if self._held.total() >= MAX_HELD or self._held[host] >= MAX_HELD_OF_ONE:
            return
        self._held[host] += 1
        try:
            with trio.move_on_after(HELD_S):
                address = ipaddress.ip_address(host.partition("%")[0])
                mapped = (
                    address if address.version == 6 else ipaddress.IPv6Address(f"::ffff:{address}")
                )
                await sock.send(_ANSWER.pack(mapped.packed, port))
                await sock.recv(1)
        finally:
            self._held[host] -= 1
            if not self._held[host]:
                del self._held[host]


async def ask(sock: trio.socket.SocketType, observer: tuple[str, int]) -> Seen:
    """How ``observer`` sees this bound socket's port; it stays connected. Raises OSError."""
    await sock.connect(observer)
    await sock.send(MAGIC)
    data = b""
    while len(data) < _ANSWER.size:
        piece = await sock.recv(_ANSWER.size - len(data))
        if not piece:
            raise ConnectionError("the observer did not answer")
        data += piece
    packed, port = _ANSWER.unpack(data)
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address), port


def reusable(host: str, port: int) -> socket.socket:
    """A non-blocking TCP socket on a port that others of ours use, too: the lane's listener and all
    its dials. Raises OSError.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock
