"""A stranger without an invite that asks and reads nothing: what a real node keeps for it, and that
others are answered meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import trio
from cli_kit import LISTEN as LISTEN_OPTION
from cli_kit import atoll, nothing_stays
from process.test_net import LISTEN, network, run, wait_for

from atoll.collectives.errors import NetworkError, PeerLostError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.announcements import AnnouncedRun, announce
from atoll.node.net.rendezvous import MAX_NEWS_BYTES, PROTOCOL, STREAMS_PER_PEER, _News
from atoll.node.net.transport.addresses import split_peer
from atoll.node.net.transport.framing import frame
from atoll.node.net.transport.host import Host, PeerStream
from atoll.security.identity import Identity

STRANGERS = 26
ASKED = 64
"""Times on each stream."""
GROWTH_BYTES = 64 << 20
KEPT = AnnouncedRun(RunId("strangers"))


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


def uploaded() -> list[bytes]:
    """Announcements of peers that do not exist, as long as they may be, in frames."""
    news, frames, now = list[bytes](), list[bytes](), time.time()
    where = [f"/dns4/{'a' * 60}.{'b' * 60}.{number}.example/tcp/4150" for number in range(8)]
    for _ in range(380):
        news.append(
            msgspec.msgpack.encode(announce(Identity.generate(), RunId(KEPT.run), where, now))
        )
    each = MAX_NEWS_BYTES // (2 * len(news[0]))
    for first in range(0, len(news), each):
        said = [msgspec.Raw(one) for one in news[first : first + each]]
        frames.append(frame(msgspec.msgpack.encode((KEPT.run, said, False))))
    return frames


class Crowd:
    """Strangers, each a libp2p host of its own."""

    def __init__(self, nursery: trio.Nursery, peer: PeerId, address: str) -> None:
        self._nursery, self._peer, self._address = nursery, peer, address

    async def come(self) -> Host:
        host = Host(Identity.generate(), LISTEN)
        await self._nursery.start(host.run, lambda peer, up: None)
        await host.connect(self._peer, [self._address])
        return host

    async def ask_and_read_nothing(self, host: Host) -> list[PeerStream]:
        """On as many streams as there may be of one peer."""
        question = frame(msgspec.msgpack.encode(_News(KEPT.run, (), True)))
        streams = [await host.open_stream(self._peer, PROTOCOL) for _ in range(STREAMS_PER_PEER)]
        for stream in streams:
            with contextlib.suppress(PeerLostError), trio.move_on_after(1.0):
                for _ in range(ASKED):
                    await stream.send_all(question)
        return streams


@pytest.mark.slow
@pytest.mark.rota(7)
def test_answers_that_nobody_reads_are_not_kept(tmp_path: Path) -> None:
    """104 streams, less than 1 MB uploaded: 64 MiB at most."""
    node = atoll(tmp_path / "home", "up", "--background", *LISTEN_OPTION)
    address = atoll(tmp_path / "home", "status")["addresses"][0]
    process = psutil.Process(node["pid"])
    peer, where = split_peer(address)

    async def main(nursery: trio.Nursery) -> None:
        crowd = Crowd(nursery, peer, where)
        first = await crowd.come()
        stream = await first.open_stream(peer, PROTOCOL)
        for data in uploaded():
            await stream.send_all(data)
        answer = first_answer(await first.open_stream(peer, PROTOCOL))
        assert await answer > 100_000  # it has been taken in
        hosts = [await crowd.come() for _ in range(STRANGERS)]
        before = process.memory_info().rss
        for host in hosts:
            nursery.start_soon(crowd.ask_and_read_nothing, host)
        honest, other = network(), network()
        for each in (honest, other):
            each.add_bootstrap([address])
            each.announce_run(RunId("honest"))
        most = 0
        await nursery.start(honest.run)
        await nursery.start(other.run)
        for _ in range(100):
            most = max(most, process.memory_info().rss - before)
            await trio.sleep(0.1)
        await wait_for(
            lambda: (
                other.peer in {news.peer for news in honest._rendezvous.members(RunId("honest"))}
            )
        )
        assert most <= GROWTH_BYTES, f"{most >> 20} MiB"

    async def first_answer(stream: PeerStream) -> int:
        """Bytes of what it has for who reads, once it has nearly all."""
        nbytes = 0
        with trio.fail_after(30.0):
            await stream.send_all(frame(msgspec.msgpack.encode(_News(KEPT.run, (), True))))
            while nbytes < 500_000:
                piece = await stream.receive_some()
                if not piece:
                    raise NetworkError("the node ended the stream")
                nbytes += len(piece)
        return nbytes

    try:
        run(main)
    finally:
        atoll(tmp_path / "home", "down")
