"""Who is where: addresses of peers, and the cache file with which a restarted node finds its swarm without a bootstrap."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from ...collectives.identifiers import PeerId
from ...security.identity import is_peer_id
from .addresses import MAX_ADDRESSES, usable

MAX_PEERS = 4096
CACHED_PEERS = 200
_MAX_FILE_BYTES = 1 << 20


class _Cached(msgspec.Struct, frozen=True):
    peer: Annotated[str, msgspec.Meta(max_length=128)]
    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]


class _File(msgspec.Struct, frozen=True):
    schema: int
    peers: Annotated[tuple[_Cached, ...], msgspec.Meta(max_length=MAX_PEERS)]


class PeerBook:
    """Addresses by peer, most recently confirmed last. Bounded; the stalest entry goes first."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._addresses: dict[PeerId, tuple[str, ...]] = {}

    def add(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember addresses, newest first; malformed ones are dropped."""
        if peer == self._me:
            return
        addresses, known = tuple(addresses), self._addresses.get(peer, ())
        if addresses and addresses == known[: len(addresses)]:  # most often: every answer of the DHT names the same peers
            return
        merged = usable((*addresses, *known))
        if not merged:
            return
        self._addresses[peer] = merged
        if len(self._addresses) > MAX_PEERS:
            del self._addresses[next(iter(self._addresses))]

    def confirm(self, peer: PeerId) -> None:
        """We were connected to ``peer``: it is the last to be forgotten and the first to be cached."""
        known = self._addresses.pop(peer, None)
        if known:
            self._addresses[peer] = known

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """At most 8 addresses; empty when none is known."""
        return self._addresses.get(peer, ())

    def peers(self) -> list[PeerId]:
        """All peers with an address, most recently confirmed first."""
        return list(reversed(self._addresses))

    def save(self, path: Path) -> None:
        """Write the most recent peers to ``path``, atomically. Raises OSError."""
        peers = tuple(_Cached(peer, self._addresses[peer]) for peer in self.peers()[:CACHED_PEERS])
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            draft.write_bytes(msgspec.json.encode(_File(1, peers)))
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Add what `save` wrote. A missing, oversized or corrupt file is no error: the cache is only a convenience."""
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES)
            cached = msgspec.json.decode(data, type=_File)
        except (OSError, msgspec.MsgspecError, ValueError):
            return
        for entry in reversed(cached.peers):
            if is_peer_id(entry.peer):
                self.add(PeerId(entry.peer), entry.addresses[:MAX_ADDRESSES])
