"""A look at a run: what is asked and answered, by two libp2p hosts on loopback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio

from atoll.collectives.errors import NetworkError, NotAdmittedError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net import look
from atoll.node.net.look import BUSY, NOT_HERE, Look, LookAnswer, Looks, ask, look_of
from atoll.node.net.transport.faults import Faults
from atoll.node.net.transport.framing import frame
from atoll.node.net.transport.host import Host
from atoll.node.net.transport.peer_stream import PeerStream
from atoll.security.identity import Identity

RUN = RunId("a" * 26)
ASKER, SERVER, OTHER = Identity(b"a" * 32), Identity(b"s" * 32), Identity(b"o" * 32)
LISTEN = ["/ip4/127.0.0.1/tcp/0"]


def between(body: Callable[[Host, Looks, Faults], Awaitable[None]]) -> None:
    """``body(the asker's host, the server's looks, its faults)``, connected."""

    async def main() -> None:
        asker, server, faults = Host(ASKER, LISTEN), Host(SERVER, LISTEN), Faults()
        looks = Looks(server, faults)
        async with trio.open_nursery() as nursery:
            await nursery.start(asker.run, lambda peer, up: None)
            await nursery.start(server.run, lambda peer, up: None)
            await asker.connect(SERVER.peer, server.addresses())
            await body(asker, looks, faults)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_it_is_shown_or_refused_by_the_runs_word() -> None:
    async def body(host: Host, looks: Looks, faults: Faults) -> None:
        def show(peer: PeerId, asked: Look) -> bytes:
            if asked.certificate != b"good":
                raise NotAdmittedError("no " + 600 * "x")
            return b"manifest of " + peer.encode()

        assert (await ask(host, SERVER.peer, Look(RUN))).code == NOT_HERE
        looks.open(RUN, show)
        shown = await ask(host, SERVER.peer, Look(RUN, b"good"))
        assert shown == LookAnswer("", "", b"manifest of " + ASKER.peer.encode())
        refused = await ask(host, SERVER.peer, Look(RUN, b"bad"))
        assert (refused.code, len(refused.reason), refused.manifest) == ("E201", 512, b"")
        looks.close(RUN)
        assert (await ask(host, SERVER.peer, Look(RUN, b"good"))).code == NOT_HERE
        assert not faults.total

    between(body)


def test_looks_are_answered_so_many_a_minute() -> None:
    async def body(host: Host, looks: Looks, faults: Faults) -> None:
        looks.open(RUN, lambda peer, asked: b"manifest")
        began = trio.current_time()
        codes = [(await ask(host, SERVER.peer, Look(RUN))).code for _ in range(30)]
        more = look.A_MINUTE_EACH / 60 * (trio.current_time() - began)
        assert codes[: look.A_MINUTE_EACH] == [""] * look.A_MINUTE_EACH
        assert 30 - look.A_MINUTE_EACH - more <= codes.count(BUSY) <= 30 - look.A_MINUTE_EACH

    between(body)


def test_silent_askers_keep_a_bounded_number_of_streams_and_another_machine_gets_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = "192.0.2.1"
    monkeypatch.setattr(PeerStream, "machine", property(lambda stream: machine))

    async def body(host: Host, looks: Looks, faults: Faults) -> None:
        silent = [await host.open_stream(SERVER.peer, look.PROTOCOL) for _ in range(look.AT_ONCE)]
        for stream in silent:
            await stream.send_all(b"\0")
        with pytest.raises(NetworkError):
            await ask(host, SERVER.peer, Look(RUN))
        nonlocal machine
        machine = "192.0.2.2"
        assert (await ask(host, SERVER.peer, Look(RUN))).code == NOT_HERE
        for stream in silent:
            await stream.aclose()

    between(body)


@pytest.mark.parametrize(
    "data", [b"\xff" * 40, msgspec.msgpack.encode((RUN, b"x" * (look.MAX_CERTIFICATE_BYTES + 1)))]
)
def test_garbage_is_a_fault_of_its_sender(data: bytes) -> None:
    async def body(host: Host, looks: Looks, faults: Faults) -> None:
        stream = await host.open_stream(SERVER.peer, look.PROTOCOL)
        await stream.send_all(frame(data))
        assert await stream.receive_some() == b""
        assert faults.total[ASKER.peer] == 1

    between(body)


def test_another_peers_certificate_takes_its_signature_for_this_asker_and_this_server() -> None:
    shown = look_of(RUN, b"certificate", ASKER.peer, SERVER.peer, OTHER)
    assert shown.bearer(ASKER.peer, SERVER.peer) == OTHER.peer
    assert Look(RUN, b"certificate").bearer(ASKER.peer, SERVER.peer) == ASKER.peer
    for asker, server in ((OTHER.peer, SERVER.peer), (ASKER.peer, OTHER.peer)):
        with pytest.raises(NotAdmittedError):
            shown.bearer(asker, server)
    for change in ({"run": "b" * 26}, {"holder": SERVER.peer}, {"holder": "nobody"}):
        with pytest.raises(NotAdmittedError):
            msgspec.structs.replace(shown, **change).bearer(ASKER.peer, SERVER.peer)
