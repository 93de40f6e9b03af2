"""Lookups go by disjoint paths: what a liar names is believed, and asked, on its own path only."""

from __future__ import annotations

import hashlib

from atoll.collectives.identifiers import PeerId
from atoll.node.net.dht.routing import closest, position
from atoll.node.net.dht.wire import FIND_NODE, Rpc
from atoll.node.net.dht.work import PATHS, Lookup
from atoll.security.identity import Identity

KEY = b"a place"


def peers(name: str, count: int) -> list[PeerId]:
    """So many, nearest to KEY first."""
    found = [
        Identity(hashlib.sha256(f"{name} {number}".encode()).digest()).peer
        for number in range(count)
    ]
    return closest(found, position(KEY), count)


def test_a_liar_spoils_one_path() -> None:
    known = peers("real", 120)
    invented, far, near = peers("invented", 400)[:20], known[60:], known[:60]
    start = far[:PATHS]
    lookup = Lookup(Rpc(FIND_NODE, KEY), position(KEY), start, hedge_s=0.05)
    asked, now, fresh = list[PeerId](), 0.0, lookup.poll(0.0)
    while not lookup.done:
        assert sum(peer in invented for peer, _ in fresh) <= 1
        for peer, _ in fresh:
            asked.append(peer)
            if peer in invented:
                lookup.failed(peer, now)
            elif peer == start[0]:
                lookup.answered(
                    peer, Rpc(FIND_NODE, KEY, closer=tuple((other, ()) for other in invented)), now
                )
            else:
                lookup.answered(
                    peer, Rpc(FIND_NODE, KEY, closer=tuple((other, ()) for other in near[:10])), now
                )
        now += 0.01
        fresh = lookup.poll(now)
    assert len(asked) == len(set(asked))  # each on one path, once
    assert set(near[: PATHS - 1]) <= set(asked)
