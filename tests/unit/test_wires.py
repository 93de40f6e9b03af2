"""Wires over socket pairs: what is written arrives, and nothing but what the other end sealed, in
its order.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import PeerLostError
from atoll.collectives.identifiers import PeerId
from atoll.node.net.wires import PIECE_BYTES, Wire

A, B = bytes(32), bytes(range(32))


def ends() -> tuple[Wire, Wire, socket.socket, socket.socket]:
    """Opener, the other end, and their sockets."""
    left, right = socket.socketpair()
    for sock in (left, right):
        sock.setblocking(False)
    return (
        Wire(PeerId("b"), left, A, B, b"t", opener=True),
        Wire(PeerId("a"), right, B, A, b"t", opener=False),
        left,
        right,
    )


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await main()

    trio.run(bounded)


async def read(wire: Wire, count: int) -> bytes:
    got = b""
    while len(got) < count and (piece := await wire.receive_some()):
        got += piece
    return got


def test_bytes_of_any_length_arrive_both_ways_while_tcp_takes_little_at_a_time() -> None:
    async def main() -> None:
        opener, other, _, _ = ends()
        forth, back = (
            bytes(range(256)) * 12_000,
            b"x" * (PIECE_BYTES + 1),
        )  # 3 MB: more than a socket's buffer
        got: list[bytes] = []

        async def take() -> None:
            got.append(await read(other, len(forth)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await opener.send_all(forth)
        await other.send_all(back)
        assert (got[0], await read(opener, len(back))) == (forth, back)
        other.close()
        assert await opener.receive_some() == b""
        with pytest.raises(PeerLostError, match="wire to b"):
            opener.write(b"more")

    run(main)


def test_what_tcp_does_not_take_waits_for_flush() -> None:
    async def main() -> None:
        opener, other, _, _ = ends()
        opener.write(b"y" * (4 << 20))
        assert opener.blocked
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opener.flush)
            assert await read(other, 4 << 20) == b"y" * (4 << 20)
        assert not opener.blocked
        opener.close()
        other.close()

    run(main)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_get_through(data: bytes) -> None:
    async def main() -> None:
        opener, other, raw, _ = ends()
        raw.send(data)
        raw.shutdown(socket.SHUT_WR)
        assert await other.receive_some() == b""
        opener.close()

    run(main)


@pytest.mark.parametrize("length", [0, 16, PIECE_BYTES + 17, 0xFFFFFFFF])
def test_a_length_that_no_record_has_ends_the_wire_before_it_is_read(length: int) -> None:
    async def main() -> None:
        opener, other, raw, _ = ends()
        raw.send(
            struct.pack(">I", length) + bytes(40)
        )  # the socket stays open: nothing is waited for
        assert await other.receive_some() == b""
        opener.close()

    run(main)


@pytest.mark.parametrize("change", ["flip", "replay", "swap", "cut", "other wire"])
def test_a_record_that_is_not_the_next_one_ends_the_wire(change: str) -> None:
    async def main() -> None:
        opener, other, _, _ = ends()
        left, right = socket.socketpair()
        right.setblocking(False)
        records: list[bytes] = []
        for text in (b"one", b"two"):
            opener.write(text)
            records.append(other._socket.recv(1000))  # pyright: ignore[reportPrivateUsage]
        secret = bytes([1]) * 32 if change == "other wire" else B
        reader = Wire(PeerId("a"), right, secret, A, b"t", opener=False)
        flipped = records[0][:-1] + bytes([records[0][-1] ^ 1])
        said = {
            "flip": [flipped],
            "replay": [records[0], records[0]],
            "swap": records[::-1],
            "cut": [records[0], records[1][:-1]],
            "other wire": records,
        }[change]
        left.send(b"".join(said))
        left.shutdown(socket.SHUT_WR)
        expected = b"one" if change in ("replay", "cut") else b""
        assert (await read(reader, 6)) == expected
        left.close()
        opener.close()
        other.close()

    run(main)


def test_who_comes_to_a_wire_after_its_end_is_told_so_and_leaves_nothing_behind() -> None:
    """A reader that was doing something else while it ended: the next one of another wire found its
    place taken.
    """

    async def main() -> None:
        for _ in range(2):
            opener, other, _, _ = ends()
            opener.close()
            assert await opener.receive_some() == b""
            assert await other.receive_some() == b""
            opener._unsent += b"x"
            with pytest.raises(PeerLostError):
                await opener.flush()

    run(main)
