"""Who is where: addresses of peers, and the cache file with which a restarted node finds its swarm
without a bootstrap.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from ....collectives.forced import sync_folder
from ....collectives.foreign import PLAIN
from ....collectives.identifiers import PeerId
from ....security.identity import is_peer_id
from .addresses import MAX_ADDRESSES, usable

MAX_PEERS = 4096
CACHED_PEERS = 200
_MAX_FILE_BYTES = 1 << 20


class _Cached(msgspec.Struct, frozen=True):
    peer: Annotated[str, msgspec.Meta(max_length=128, pattern=PLAIN)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=PLAIN)], ...], msgspec.Meta(max_length=64)
    ]


class _PeerbookFile(msgspec.Struct, frozen=True):
    schema: int
    peers: Annotated[tuple[_Cached, ...], msgspec.Meta(max_length=MAX_PEERS)]


class PeerBook:
    """Addresses by peer, most recently confirmed last. Bounded; the stalest entry goes first.

    What our user gave stays. What a peer says of itself comes before what others say of it, and is
    not forgotten for their sake: else anybody who answers a question of ours could name addresses
    that lead nowhere, and so many strangers, that we found nobody again.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._given: dict[PeerId, tuple[str, ...]] = {}
        self._announced: dict[PeerId, tuple[str, ...]] = {}
        self._heard: dict[PeerId, tuple[str, ...]] = {}

    def give(self, peer: PeerId, address: str) -> None:
        """Our user, or what our user trusts, says where ``peer`` is."""
        self._note(self._given, peer, (address,))

    def add(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """``peer`` says where it is, newest first; malformed addresses are dropped."""
        self._note(self._announced, peer, tuple(addresses))

    def hear(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Somebody else says where ``peer`` is."""
        self._note(self._heard, peer, tuple(addresses))

    def _note(
        self, shelf: dict[PeerId, tuple[str, ...]], peer: PeerId, addresses: tuple[str, ...]
    ) -> None:
        known = shelf.get(peer, ())
        if peer == self._me or (
            addresses and addresses == known[: len(addresses)]
        ):  # most often: every answer of the DHT names the same peers
            return
        if merged := usable((*addresses, *known)):
            shelf[peer] = merged
            if len(shelf) > MAX_PEERS:
                del shelf[next(iter(shelf))]

    def confirm(self, peer: PeerId) -> None:
        """We were connected to ``peer``: it is the last to forget and the first to cache."""
        known = usable((*self._announced.pop(peer, ()), *self._heard.pop(peer, ())))
        if known:
            self._announced[peer] = known

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """At most 8 addresses; empty when none is known."""
        return usable(
            (*self._given.get(peer, ()), *self._announced.get(peer, ()), *self._heard.get(peer, ()))
        )

    def peers(self) -> list[PeerId]:
        """All peers with an address, most recently confirmed first."""
        return list(
            dict.fromkeys([*reversed(self._announced), *self._given, *reversed(self._heard)])
        )

    def cached(self) -> bytes:
        """What `save` writes."""
        peers = tuple(_Cached(peer, self.addresses(peer)) for peer in self.peers()[:CACHED_PEERS])
        return msgspec.json.encode(_PeerbookFile(1, peers))

    def save(self, path: Path) -> None:
        """Write the most recent peers to ``path``: see `save_cache`. Raises OSError."""
        save_cache(path, self.cached())

    def load(self, path: Path) -> None:
        """Add what `save` wrote. A missing, oversized or corrupt file is no error: the cache is
        only a convenience.
        """
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES)
            cached = msgspec.json.decode(data, type=_PeerbookFile)
        except (OSError, msgspec.MsgspecError, ValueError):
            return
        for entry in reversed(cached.peers):
            if is_peer_id(entry.peer):
                self.add(PeerId(entry.peer), entry.addresses[:MAX_ADDRESSES])


def save_cache(path: Path, data: bytes) -> None:
    """Replace the cache file, atomically and on the medium. From any thread. Raises OSError.

    After a power cut of all, members whose own addresses have changed find one another by it, as
    after a kill.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)
