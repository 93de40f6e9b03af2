"""Addresses as the bytes of libp2p's messages (multiaddr), and back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from multiaddr import Multiaddr

from .addresses import MAX_ADDRESSES, is_address, without_peer

MAX_BYTES = 256


@lru_cache(maxsize=4096)
def _pack(address: str) -> bytes:
    try:
        return Multiaddr(address).to_bytes()
    except Exception:  # the parser raises several kinds
        return b""


@lru_cache(maxsize=4096)
def _unpack(data: bytes) -> str:
    try:
        text = without_peer(str(Multiaddr(data)))
    except Exception:
        return ""
    return text if is_address(text) else ""


def pack(addresses: Iterable[str]) -> list[bytes]:
    """Addresses as bytes. One that has no such form is left out: libp2p knows no host name with an
    underscore, say, and our user or a stranger may have named one."""
    return [data for data in map(_pack, addresses) if data]


def unpack(entries: Iterable[object], limit: int = MAX_ADDRESSES) -> tuple[str, ...]:
    """Those among a stranger's ``entries`` that are addresses of ours, without whom they lead to
    and without duplicates, at most ``limit``.
    """
    found: dict[str, None] = {}
    for count, entry in enumerate(entries):
        if count >= 4 * limit or len(found) >= limit:
            break
        if isinstance(entry, bytes) and len(entry) <= MAX_BYTES and (text := _unpack(entry)):
            found[text] = None
    return tuple(found)
