"""js-libp2p as the foreign implementation: what we say is understood by somebody who has never seen
our code.

Its packages come with npm, by the lock file in tests/libp2p_js, into .ci/out. Skipped only where
there is no Node.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from swarm_kit import free_port

from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.dht import records
from atoll.node.net.dht.node import PROTOCOL
from atoll.node.net.network import PeerNetwork
from atoll.node.net.reach.ledger import RelayLimits
from atoll.node.net.reach.reach import ReachSettings
from atoll.security.identity import Identity

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "libp2p_js"
INSTALL_S = 110
BOUND_S = 60
KEY = records.run_key(RunId("run"))
LISTEN = ["/ip4/127.0.0.1/tcp/0"]

pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="there is no Node"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the foreign peer and its packages are; installed once for each lock file."""
    lock = hashlib.sha256((SOURCE / "package-lock.json").read_bytes()).hexdigest()[:16]
    ready = ROOT / ".ci" / "out" / f"libp2p_js-{lock}"
    if not ready.exists():
        draft = ready.with_name(f"{ready.name}.{os.getpid()}")
        shutil.copytree(SOURCE, draft, ignore=shutil.ignore_patterns("node_modules"))
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=draft, capture_output=True, text=True, timeout=INSTALL_S)
        assert not done.returncode, done.stderr
        draft.rename(ready)
    shutil.copy(SOURCE / "peer.mjs", ready)
    return ready


class Foreign:
    """A js-libp2p peer in a process of its own."""

    def __init__(self, process: trio.Process) -> None:
        self._process, self._buffer = process, b""
        self.peer, self.address = PeerId(""), ""

    async def answer(self) -> Any:
        """What it says next. Raises AssertionError with its error."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            data = await self._process.stdout.receive_some()
            assert data, "it has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        said = json.loads(line)
        assert "error" not in said, said["error"]
        return said["ok"]

    async def do(self, action: str, **arguments: object) -> Any:
        """Have it do something (see tests/libp2p_js/peer.mjs)."""
        assert self._process.stdin is not None
        values = {
            key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for key, value in arguments.items()
        }
        await self._process.stdin.send_all(json.dumps({"do": action, **values}).encode() + b"\n")
        return await self.answer()


@asynccontextmanager
async def foreign(folder: Path) -> AsyncIterator[Foreign]:
    """A running foreign peer."""
    command = ["node", str(folder / "peer.mjs"), PROTOCOL]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        peer = Foreign(process)
        hello = await peer.answer()
        peer.peer, peer.address = PeerId(hello["peer"]), hello["addresses"][0]
        yield peer
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()


def run(main: Callable[[trio.Nursery, Foreign], Awaitable[None]], folder: Path) -> None:
    """Run ``main`` with a foreign peer. The bound is for hangs."""

    async def bounded() -> None:
        with trio.fail_after(BOUND_S):
            async with foreign(folder) as peer, trio.open_nursery() as nursery:
                await main(nursery, peer)
                nursery.cancel_scope.cancel()

    trio.run(bounded, strict_exception_groups=True)


async def node(nursery: trio.Nursery, *bootstrap: str, relays: bool = False) -> PeerNetwork:
    """A running node of ours."""
    listen = [f"/ip4/127.0.0.1/tcp/{free_port()}"] if relays else LISTEN
    settings = ReachSettings(relay=RelayLimits(open_to_all=True), port_mapping=False)
    ours = PeerNetwork(
        Identity.generate(),
        listen=listen,
        bootstrap=bootstrap,
        announce=listen if relays else (),
        reach=settings,
    )
    await nursery.start(ours.run)
    return ours


async def acquainted(ours: PeerNetwork, js: Foreign) -> None:
    """Connected, and in each other's tables."""
    assert await js.do("connect", address=ours.addresses()[0]) == ours.peer
    while not await js.do("table") or js.peer not in ours.dht.table:
        await trio.sleep(0.02)


def test_it_pings_us_and_learns_what_we_speak(folder: Path) -> None:
    async def main(nursery: trio.Nursery, js: Foreign) -> None:
        ours = await node(nursery)
        assert await js.do("ping", address=ours.addresses()[0]) >= 0
        said = await js.do("identify", address=ours.addresses()[0])
        assert {PROTOCOL, "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"} <= set(said["protocols"])

    run(main, folder)


def test_we_dial_it_and_it_dials_us(folder: Path) -> None:
    async def main(nursery: trio.Nursery, js: Foreign) -> None:
        ours = await node(nursery, js.address)
        while not ours.connected(js.peer):
            await trio.sleep(0.02)
        other = await node(nursery)
        assert await js.do("connect", address=other.addresses()[0]) == other.peer
        while not other.connected(js.peer):  # the dialer may know first
            await trio.sleep(0.02)

    run(main, folder)


def test_what_one_puts_the_other_gets(folder: Path) -> None:
    async def main(nursery: trio.Nursery, js: Foreign) -> None:
        ours = await node(nursery)
        await acquainted(ours, js)
        owner = Identity.generate()
        key, value = records.sign(owner, "status", b"from there", 1, int(time.time()) + 600)
        await js.do("put", key=key, value=value)
        assert await ours.dht.get(owner.peer, "status") == b"from there"
        assert (
            ours.dht.engine.server.values.get(key, time.time()) == value
        )  # it was stored with us, too

        assert await ours.dht.put("status", b"from here") == 1
        mine = records.owner_key(ours.peer, "status")
        got = base64.b64decode(await js.do("get", key=mine))
        assert records.check(mine, got, time.time()).payload == b"from here"

    run(main, folder)


def test_a_value_that_its_owner_did_not_sign_is_refused_on_store_and_on_read(folder: Path) -> None:
    async def main(nursery: trio.Nursery, js: Foreign) -> None:
        ours = await node(nursery)
        await acquainted(ours, js)
        victim = Identity.generate().peer
        key = records.owner_key(victim, "status")
        await js.do("put", key=key, value=b"forged")
        assert ours.dht.engine.server.values.get(key, time.time()) is None
        faults = ours.status()["faults"][js.peer]
        assert (
            await ours.dht.get(victim, "status") is None
        )  # although the other one keeps it and answers with it
        assert ours.status()["faults"][js.peer] > faults

    run(main, folder)


def test_whom_one_provides_the_other_finds(folder: Path) -> None:
    async def main(nursery: trio.Nursery, js: Foreign) -> None:
        ours, third = await node(nursery), await node(nursery)
        await acquainted(ours, js)
        await acquainted(third, js)
        assert await ours.dht.provide(KEY) >= 1
        found = await js.do("find", key=KEY)
        assert found["peer"] == ours.peer
        assert dict(await third.dht.find_providers(KEY))[ours.peer]

        other = records.run_key(RunId("another"))
        await js.do("provide", key=other)
        assert js.peer in dict(await ours.dht.find_providers(other))

    run(main, folder)


async def place(ours: PeerNetwork, relay: PeerId) -> str:
    """Where ``ours``, which believes to be behind a NAT, is called through ``relay``."""
    while not ours.connected(relay):
        await trio.sleep(0.02)
    ours.reach.manager.observed("11.1.0.1", "/ip4/11.0.0.7/tcp/4001", trio.current_time())
    assert await ours.reach.circuits.reserve(relay)
    (circuit,) = ours.reach.circuits.addresses()
    return f"{circuit}/p2p/{ours.peer}"


def test_it_relays_for_us(folder: Path) -> None:
    async def main(nursery: trio.Nursery, js: Foreign) -> None:
        hidden, caller = await node(nursery, js.address), await node(nursery)
        got = list[tuple[PeerId, bytes]]()
        hidden.on_message("run", lambda peer, data: got.append((peer, data)))
        caller.on_message("run", lambda peer, data: None)
        caller.add_addresses(hidden.peer, [await place(hidden, js.peer)])
        assert await js.do("places") == 1
        await caller.connect(hidden.peer)
        assert (caller.path(hidden.peer), hidden.path(caller.peer)) == ("relay", "relay")
        caller.send("run", hidden.peer, b"through it")
        while not got:
            await trio.sleep(0.02)
        assert got == [(caller.peer, b"through it")]

    run(main, folder)


def test_we_relay_for_it(folder: Path) -> None:
    """It keeps a place with us, and is called there; and it calls somebody who keeps one."""

    async def main(nursery: trio.Nursery, js: Foreign) -> None:
        relay = await node(nursery, relays=True)
        hidden, caller = await node(nursery, *relay.addresses()), await node(nursery)
        (circuit,) = await js.do("keep", address=relay.addresses()[0])
        caller.add_addresses(js.peer, [circuit])
        assert await caller.ping(js.peer) > 0
        assert caller.path(js.peer) == "relay"
        assert await js.do("ping", address=await place(hidden, relay.peer)) >= 0
        assert hidden.path(js.peer) == "relay"
        assert relay.reach.status()["relaying"]["circuits"] == 2
        assert relay.reach.status()["relaying"]["reservations"] == 2

    run(main, folder)
