"""NAT-PMP (RFC 6886): asking the router for a port, in two kinds of datagrams. Sans-IO."""

from __future__ import annotations

import socket
import struct

PORT = 5351
TRIES_S = (0.25, 0.5, 1.0)
"""How long an answer is waited for, one datagram each."""
ADDRESS, MAP_TCP = 0, 2
_REQUEST = struct.Struct(">BBHHHI")
_MAPPED = struct.Struct(">BBHIHHI")
_ADDRESS = struct.Struct(">BBHI4s")


def ask_address() -> bytes:
    """What is the router's address outside?"""
    return bytes((0, ADDRESS))


def ask_port(inside: int, outside: int, life_s: int) -> bytes:
    """Lead TCP port ``outside`` (a wish) to our port ``inside`` for ``life_s``; 0: no longer."""
    return _REQUEST.pack(0, MAP_TCP, 0, inside, outside if life_s else 0, life_s)


def address_in(data: bytes) -> str:
    """The address an answer names. Raises ValueError where it is none, or a refusal."""
    if len(data) != _ADDRESS.size:
        raise ValueError(f"{len(data)} bytes are no answer")
    version, kind, result, _, address = _ADDRESS.unpack(data)
    _check(version, kind, ADDRESS, result)
    return socket.inet_ntoa(address)


def mapping_in(data: bytes, inside: int) -> tuple[int, int]:
    """The port outside and for how many seconds. Raises ValueError where it is no answer about
    ``inside``, or a refusal.
    """
    if len(data) != _MAPPED.size:
        raise ValueError(f"{len(data)} bytes are no answer")
    version, kind, result, _, mine, outside, life_s = _MAPPED.unpack(data)
    _check(version, kind, MAP_TCP, result)
    if mine != inside:
        raise ValueError(f"about port {mine}")
    return outside, life_s


def _check(version: int, kind: int, wanted: int, result: int) -> None:
    if version != 0 or kind != wanted | 128:
        raise ValueError(f"message {kind} of version {version}")
    if result:
        raise ValueError(f"the router refuses: {result}")


def gateway(table: str) -> str:
    """The default gateway in the text of /proc/net/route; "" when there is none."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if (
            len(fields) > 7
            and not int(fields[1], 16)
            and not int(fields[7], 16)
            and int(fields[2], 16)
        ):
            return socket.inet_ntoa(int(fields[2], 16).to_bytes(4, "little"))
    return ""
