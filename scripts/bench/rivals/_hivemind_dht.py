"""Runs inside hivemind's environment: one peer stores, another gets, among many. Prints
{"store_ms": [...], "get_ms": [...]} as its last line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from _hivemind_peers import started_dht


def main() -> None:
    """Start the peers one after the other, warm up, measure."""
    import hivemind  # pyright: ignore[reportMissingImports]  # in its own environment
    from hivemind.utils import get_dht_time  # pyright: ignore[reportMissingImports]

    settings: dict[str, Any] = json.loads(sys.argv[1])
    peers: list[Any] = []
    for _ in range(settings["peers"]):
        first = [str(address) for address in peers[0].get_visible_maddrs()] if peers else []
        peers.append(started_dht(hivemind, first))
    writer, reader = peers[:2]
    times: dict[str, list[float]] = {"store_ms": [], "get_ms": []}
    for number in range(settings["warmup"] + settings["reps"]):
        started = time.perf_counter()
        stored = writer.store(f"key {number}", number, expiration_time=get_dht_time() + 600)
        taken = time.perf_counter() - started
        time.sleep(settings["pause_s"])
        started = time.perf_counter()
        found = reader.get(f"key {number}", latest=True)
        if not stored or found is None or found.value != number:
            raise RuntimeError(f"store {number} was lost")
        if number >= settings["warmup"]:
            times["store_ms"].append(taken * 1e3)
            times["get_ms"].append((time.perf_counter() - started) * 1e3)
    for peer in peers:
        peer.shutdown()
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
