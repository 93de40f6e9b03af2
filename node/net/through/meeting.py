"""One port of ours for one lane: how it is seen outside, its listener, and dials from it, until a
socket is authenticated.

Both sides send MAGIC, the token and a proof (see `lane_sockets`) on every socket that connects,
whoever dialled it. Of the sockets on which both proofs are right the driver takes the first, says
GO on it, and forgets the others. Roles come from the signalling: in a simultaneous open both sides
have dialled.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import random
import socket
from collections.abc import Sequence
from contextlib import suppress

import trio

from ....collectives.errors import PeerUnreachableError
from ....collectives.identifiers import PeerId
from ..transport.lane_sockets import (
    HELLO_S,
    PROOF_BYTES,
    detach,
    proof,
    receive_exactly,
    send_all,
    set_options,
)
from .observing import ASK_S, Seen, ask, reusable
from .punch import PUNCH_S, Punch, candidates, is_symmetric

MAGIC = b"atoll/p\n"
GO = b"g"
PORTS = (20_000, 32_000)
"""Below the range from which systems take ports by themselves."""
OBSERVERS = 2


class Spot:
    """A port, from the trio thread only. `close` it in any case."""

    def __init__(self, host: str, rng: random.Random) -> None:
        """``host``: where the lane listener listens. Raises OSError when no port is free."""
        self._host, self._rng = host, rng
        self.port, self._listener = _listen(host, rng)
        self.seen: list[Seen] = []
        self._held: list[trio.socket.SocketType] = []

    def close(self) -> None:
        """Release everything that was not handed out."""
        self._listener.close()
        for sock in self._held:
            sock.close()

    async def observe(self, observers: Sequence[tuple[str, int]]) -> None:
        """Ask how the port is seen, for at most ASK_S; connections stay open until `close`, so that
        routers keep its mapping.
        """

        async def one(observer: tuple[str, int]) -> None:
            with suppress(OSError):
                sock = trio.socket.from_stdlib_socket(reusable(self._host, self.port))
                self._held.append(sock)
                self.seen.append(await ask(sock, observer))

        with trio.move_on_after(ASK_S):
            async with trio.open_nursery() as nursery:
                for observer in observers[:OBSERVERS]:
                    nursery.start_soon(one, observer)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Where a partner may find the port."""
        return candidates(self.seen, (self._local(), self.port)) if self.seen else ()

    @property
    def symmetric(self) -> bool:
        """Whether observers disagree."""
        return is_symmetric(self.seen)

    def _local(self) -> str:
        """Our own address on the way to the observers."""
        with suppress(OSError):
            for sock in self._held:
                host = str(sock.getsockname()[0])
                if not ipaddress.ip_address(host).is_unspecified:
                    return host
        return self._host

    async def meet(
        self,
        peer: PeerId,
        punch: Punch,
        token: bytes,
        secrets: bytes,
        *,
        driver: bool,
        ports: int = 1,
    ) -> socket.socket:
        """A lane, authenticated, non-blocking. ``ports``: each dial is made from so many; more than
        one are not ours.

        Raises PeerUnreachableError with what became of the dials.
        """
        attempt = _Attempt(
            self._host, self.port if ports == 1 else 0, punch, token, secrets, driver, ports
        )
        with trio.move_on_after(PUNCH_S):
            found = await attempt.run(trio.socket.from_stdlib_socket(self._listener.dup()))
            if found is not None:
                return found
        raise PeerUnreachableError(f"no way through to {peer}: {punch.why()}", peer=peer)


class _Attempt:
    """The sockets of one punch."""

    def __init__(
        self,
        host: str,
        port: int,
        punch: Punch,
        token: bytes,
        secrets: bytes,
        driver: bool,
        ports: int,
    ) -> None:
        """``port``: where dials leave from; 0: from any, each from ``ports``."""
        self._host, self._port, self._punch, self._ports = host, port, punch, ports
        mine, theirs = (b"punch", b"punched") if driver else (b"punched", b"punch")
        self._says, self._wants, self._driver = (
            MAGIC + token + proof(secrets, mine, token),
            proof(secrets, theirs, token),
            driver,
        )
        self._head = MAGIC + token
        self._changed = trio.Event()
        self._chosen = False
        self._won: list[socket.socket] = []

    async def run(self, listener: trio.socket.SocketType) -> socket.socket | None:
        """The first socket that is authenticated. Cancelled, it leaves none behind."""
        try:
            with listener:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._accept, listener, nursery)
                    nursery.start_soon(self._dials, nursery)
        except BaseException:
            for sock in self._won:
                sock.close()
            raise
        return self._won[0] if self._won else None

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = await listener.accept()
            except OSError:  # out of descriptors, or the connection is gone again
                await trio.sleep(0.05)
            else:
                nursery.start_soon(self._accepted, sock, nursery)

    async def _accepted(self, sock: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        with sock, suppress(OSError):
            await self._greet(sock, nursery)

    async def _dials(self, nursery: trio.Nursery) -> None:
        while True:
            changed = self._changed
            for target in self._punch.due(trio.current_time()):
                for _ in range(self._ports):
                    nursery.start_soon(self._dial, target, nursery)
            with trio.move_on_at(self._punch.next_at()):
                await changed.wait()

    async def _dial(self, target: tuple[str, int], nursery: trio.Nursery) -> None:
        why, again = "ended before it had proved who it is", False
        try:
            with trio.socket.from_stdlib_socket(reusable(self._host, self._port)) as sock:
                set_options(sock)
                await sock.connect(target)
                await self._greet(sock, nursery)
        except ConnectionRefusedError:
            why, again = "refuses", self._ports == 1
        except OSError as error:
            why = errno.errorcode.get(error.errno or 0, str(error))
        self._punch.ended(trio.current_time(), target, why, again=again)
        self._changed.set()
        self._changed = trio.Event()

    async def _greet(self, sock: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        await send_all(sock, self._says)
        with trio.move_on_after(HELLO_S):
            received = await receive_exactly(sock, len(self._head) + PROOF_BYTES)
            if not hmac.compare_digest(received, self._head + self._wants):
                return
            if not self._driver:
                if await receive_exactly(sock, 1) == GO:
                    self._win(sock, nursery)
            elif not self._chosen:
                self._chosen = True
                try:
                    await send_all(sock, GO)
                except OSError:
                    self._chosen = False
                    raise
                self._win(sock, nursery)

    def _win(self, sock: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        self._won.append(detach(sock))
        nursery.cancel_scope.cancel()


def _listen(host: str, rng: random.Random) -> tuple[int, socket.socket]:
    """A listener on a port that nobody else has. Raises OSError."""
    for _ in range(20):
        port = rng.randint(*PORTS)
        try:
            with socket.socket(
                socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
            ) as probe:
                probe.bind((host, port))
            sock = reusable(host, port)
        except OSError:
            continue
        listening = trio.socket.from_stdlib_socket(sock)
        set_options(listening)
        listening.listen(16)
        return port, detach(listening)
    raise OSError(errno.EADDRINUSE, "no free port for a lane")
