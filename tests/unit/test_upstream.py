"""Faults of py-libp2p because of which `node.net.reach` speaks its protocols itself and
`node.net.workarounds` is there. A test that fails here says: it is mended, think again."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from libp2p.host.autonat import AutoNATService
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.stream_muxer.yamux.yamux import Yamux

from atoll.security.identity import Identity


class Ended:
    """A stream that has ended, and remembers whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def read(self, n: int | None = None) -> bytes:
        return b""

    async def close(self) -> None:
        self.closed = True

    reset = close


def test_the_end_of_one_circuit_still_closes_another_of_the_same_peer() -> None:
    relay: Any = CircuitV2Protocol.__new__(CircuitV2Protocol)
    relay.resource_manager = SimpleNamespace(get_reservation=lambda peer: None)
    relay._read_stream_with_retry = lambda stream: stream.read()
    old, new = (Ended(), Ended()), (Ended(), Ended())
    relay._active_relays = {"peer": new}  # the peer's second circuit has overwritten the first
    trio.run(relay._relay_data, *old, "peer")
    assert [stream.closed for stream in (*old, *new)] == [False, False, True, True]


def test_the_autonat_server_still_calls_whoever_is_connected_reachable() -> None:
    async def connect(info: Any) -> None:
        """What `BasicHost.connect` does for a peer that is connected: nothing."""

    server: Any = AutoNATService.__new__(AutoNATService)
    server.host = SimpleNamespace(connect=connect)
    dead = b"\x04\x0b\x00\x00\x07\x06\x00\x09"  # /ip4/11.0.0.7/tcp/9
    assert trio.run(server._try_dial, ID.from_base58(Identity.generate().peer), [dead]) == dead


def test_the_other_end_of_an_ipv6_connection_still_has_no_address() -> None:
    """In a process of its own, where nothing of ours was loaded."""
    program = """
from types import SimpleNamespace
from libp2p.io.trio import TrioTCPStream
stream = TrioTCPStream(SimpleNamespace(socket=SimpleNamespace(getpeername=lambda: ("2a0b::1", 4001, 0, 0))))
print(stream.get_remote_address())
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "None\n"
    )


def test_a_ping_without_an_answer_still_ends_no_connection() -> None:
    muxed: Any = Yamux.__new__(Yamux)
    muxed._ping_id, sent = 0, list[bytes]()

    async def write(data: bytes) -> None:
        sent.append(data)

    async def an_hour() -> None:
        muxed.event_shutting_down, muxed._write_frame = trio.Event(), write
        with trio.move_on_after(3600.0):
            await muxed._measure_rtt_loop()

    trio.run(an_hour, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(sent) > 50
