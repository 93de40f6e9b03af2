"""Multicast DNS (RFC 6762) as libp2p's peer discovery uses it: one question, and one answer that
names a peer's addresses. Sans-IO.

A node asks for the PTR records of `SERVICE`. Who hears that answers with a PTR record to a random
name of its own and, with that name, a TXT record of strings ``dnsaddr=ADDRESS/p2p/PEER``. go, js
and Rust libp2p read ours; a string `MARK` tells our nodes from other programs' peers.

Whatever is on a network may send us these datagrams: names are followed backwards only and to 255
bytes, records counted, and of everything else on multicast DNS (printers, loudspeakers) nothing is
kept.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

GROUP, GROUP6, PORT = "224.0.0.251", "ff02::fb", 5353
SERVICE = ("_p2p", "_udp", "local")
MARK = "atoll=1"
ADDRESS = "dnsaddr="
LIFE_S = 120
MAX_BYTES = 9000
"""Of a datagram, says RFC 6762; ours have less than 1400."""
MAX_QUESTIONS, MAX_RECORDS, MAX_TEXTS, MAX_NAME = 16, 64, 16, 255

_HEADER = struct.Struct(">HHHHHH")
_QUESTION = struct.Struct(">HH")
_RECORD = struct.Struct(">HHIH")
_PTR, _TXT, _ANY, _IN = 12, 16, 255, 1
_RESPONSE, _AUTHORITATIVE = 0x8000, 0x0400
_OWN = 0x8000
"""Of a record's class: nobody else has records of this name. Of a question's: the answer may come
to us alone.
"""


@dataclass(frozen=True, slots=True)
class Heard:
    """What of a datagram concerns us: whether it ``asks`` for peers, or the texts of each peer that
    it names.
    """

    asks: bool
    texts: tuple[tuple[str, ...], ...]


def question() -> bytes:
    """Which peers are on this network?"""
    return _HEADER.pack(0, 0, 1, 0, 0, 0) + _packed(SERVICE) + _QUESTION.pack(_PTR, _IN)


def answer(name: str, addresses: Sequence[str], *, life_s: int = LIFE_S) -> bytes:
    """This peer is. ``name``: a random label; ``addresses``: with ``/p2p/PEER``."""
    own = _packed((name, *SERVICE))
    texts = b"".join(
        bytes((len(text),)) + text
        for text in (item.encode() for item in (*(ADDRESS + a for a in addresses), MARK))
    )
    pointer = _packed(SERVICE) + _RECORD.pack(_PTR, _IN, life_s, len(own)) + own
    return (
        _HEADER.pack(0, _RESPONSE | _AUTHORITATIVE, 0, 1, 0, 1)
        + pointer
        + own
        + _RECORD.pack(_TXT, _IN | _OWN, life_s, len(texts))
        + texts
    )


def read(data: bytes) -> Heard:
    """What a datagram says. Raises ValueError where it is malformed or too long."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes")
    try:
        return _read(data)
    except (struct.error, IndexError):
        raise ValueError("it ends too early") from None


def _read(data: bytes) -> Heard:
    _, flags, questions, *records = _HEADER.unpack_from(data)
    if questions > MAX_QUESTIONS or sum(records) > MAX_RECORDS:
        raise ValueError(f"{questions} questions, {sum(records)} records")
    at, asks, texts = _HEADER.size, False, list[tuple[str, ...]]()
    for _ in range(questions):
        name, at = _name(data, at)
        kind, _ = _QUESTION.unpack_from(data, at)
        at += _QUESTION.size
        asks = asks or (not flags & _RESPONSE and name == SERVICE and kind in (_PTR, _ANY))
    for _ in range(sum(records) if flags & _RESPONSE else 0):
        name, at = _name(data, at)
        kind, _, _, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size + size
        if at > len(data):
            raise ValueError("a record ends behind its datagram")
        if kind == _TXT and name[1:] == SERVICE:
            texts.append(_texts(data[at - size : at]))
    return Heard(asks, tuple(texts))


def _packed(labels: Sequence[str]) -> bytes:
    return b"".join(bytes((len(label),)) + label.encode() for label in labels) + b"\0"


def _name(data: bytes, at: int) -> tuple[tuple[str, ...], int]:
    """The labels of a name in lower case, and where it ends. A pointer leads to an earlier place
    only, so that no name is endless.
    """
    labels, end, nbytes, limit = list[str](), 0, 0, at
    while size := data[at]:
        if size & 0xC0 == 0xC0:
            target = (size & 0x3F) << 8 | data[at + 1]
            end, at = end or at + 2, target
            if target >= limit:
                raise ValueError("a name leads forward")
            limit = target
            continue
        nbytes += size + 1
        if size > 63 or nbytes > MAX_NAME or at + 1 + size > len(data):
            raise ValueError("not a name")
        labels.append(data[at + 1 : at + 1 + size].decode("utf-8", "replace").lower())
        at += 1 + size
    return tuple(labels), end or at + 1


def _texts(data: bytes) -> tuple[str, ...]:
    """Strings of a TXT record, a byte of length before each."""
    found, at = list[str](), 0
    while at < len(data) and len(found) < MAX_TEXTS:
        stop = at + 1 + data[at]
        if stop > len(data):
            raise ValueError("a text ends behind its record")
        found.append(data[at + 1 : stop].decode("utf-8", "replace"))
        at = stop
    return tuple(found)
