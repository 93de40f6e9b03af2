"""Two peers behind routers, public hosts that help them, and a line over a public host on which
they agree on lanes.

The line stands in for a libp2p circuit: a public host passes on the bytes of a connection to a port
that a peer's firewall has open for IPv6. Lanes cannot take it: their listeners and dials have IPv4
only.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from netns.lab import PATIENCE_S, Host, Lab
from netns.nat import Inner, Kind, Router
from netns.warm import fork

PORT, LINE = 4001, 4100


class Peer:
    """A process of `netns.lane_peer`."""

    def __init__(self, host: Host | Inner, listen: str, log: Path) -> None:
        self.log = log
        with open(log, "wb") as errors:
            self.process = fork(
                host, "netns.lane_peer", listen, host.address, stderr=errors.fileno()
            )

    def say(self, do: str, **values: Any) -> None:
        """A command."""
        self.process.tell(json.dumps({"do": do, **values}))

    def expect(self, event: str) -> dict[str, Any]:
        """What it says next, which must be this."""
        try:
            said = json.loads(self.process.lines.get(timeout=PATIENCE_S) or '{"event": "end"}')
        except queue.Empty:
            raise AssertionError(f"nobody said {event!r}; {self.log.read_text()[-3000:]}") from None
        assert said["event"] == event, (said, self.log.read_text()[-3000:])
        return said


class Line:
    """A public host's port that leads to a peer behind a router."""

    def __init__(self, public: Host, target: tuple[str, int]) -> None:
        self._public, self._target = public, target
        self._server = public.inside(lambda: socket.create_server((public.address, LINE)))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = self._public.inside(
                    lambda: socket.create_connection(self._target, timeout=PATIENCE_S)
                )
            except OSError:
                return
            far.settimeout(None)
            self._ends += [near, far]
            for source, drain in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._threads.append(threading.Thread(target=self._pass, args=(source, drain)))
                self._threads[-1].start()

    @staticmethod
    def _pass(source: socket.socket, drain: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                drain.sendall(data)
            drain.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End all connections."""
        for sock in (self._server, *self._ends):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()


class Pair:
    """A laboratory with two public hosts (peers 0 and 1) and peers behind routers of these kinds (2
    and 3); a context manager.

    ``ends``: between which peers lanes are made, and which of them sends. ``lans``: of houses that
    have public addresses behind a firewall.
    """

    def __init__(
        self,
        folder: Path,
        a: Kind,
        b: Kind,
        *,
        rtt_ms: float = 0.0,
        mbit: float | None = None,
        loss: float = 0.0,
        lans: tuple[str, str] = ("", ""),
    ) -> None:
        self.lab = Lab(4, internet=True, rtt_ms=rtt_ms, mbit=mbit, loss=loss)
        self.peers: list[Peer] = []
        self.ends: tuple[int, int] = (2, 3)
        self._line: Line | None = None
        try:
            self.homes = [
                Router(host, kind, lan=lan, translates=not lan)
                for host, kind, lan in zip(self.lab.hosts[2:], (a, b), lans, strict=True)
            ]
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        one, other = (home.hosts[0] for home in self.homes)
        self.homes[1].open6(PORT)
        self._line = Line(self.lab.hosts[0], (other.address6, PORT))
        for index, host in enumerate(self.lab.hosts[:2]):
            self.peers.append(
                Peer(host, f"/ip4/{host.address}/tcp/{PORT}", folder / f"public{index}")
            )
        self.peers.append(Peer(one, f"/ip4/{one.address}/tcp/{PORT}", folder / "a"))
        self.peers.append(Peer(other, f"/ip6/{other.address6}/tcp/{PORT}", folder / "b"))
        told = [peer.expect("ready") for peer in self.peers]
        self.ids = [said["peer"] for said in told]
        for peer in self.peers[2:]:
            for public in (0, 1):
                peer.say(
                    "connect",
                    peer=self.ids[public],
                    addresses=[f"/ip4/{self.lab.hosts[public].address}/tcp/{PORT}"],
                )
                assert peer.expect("connected")["observers"] == public + 1
        self.peers[2].say(
            "connect", peer=self.ids[3], addresses=[f"/ip4/{self.lab.hosts[0].address}/tcp/{LINE}"]
        )
        self.peers[2].expect("connected")

    def become(self, a: Kind, b: Kind) -> None:
        """Give the two routers of other kinds."""
        for home, kind in zip(self.homes, (a, b), strict=True):
            home.become(kind)
        self.homes[1].open6(PORT)

    def guess(self, on: bool) -> None:
        """Whether the two guess ports."""
        for peer in self._tell("guess", on=on):
            peer.expect("guesses")

    def lanes(self, count: int = 1) -> list[dict[str, Any]]:
        """Make so many lanes between the two, and drop them: what the driver says of each."""
        made = self.make(count)
        self.drop()
        return made

    def make(self, count: int = 1) -> list[dict[str, Any]]:
        """Make so many lanes: what the driver says of each."""
        ends = self._tell("lanes", count=count)
        said = [[peer.expect("lane") for _ in range(count)] for peer in ends]
        assert all(lane["right"] for lanes in said for lane in lanes)
        by_path = [sorted((lane["index"], lane["path"]) for lane in lanes) for lanes in said]
        assert by_path[0] == by_path[1]
        return next(lanes for lanes in said if lanes[0]["drives"])

    def drop(self) -> None:
        """Close all lanes, and want none."""
        for peer in self._tell("drop"):
            peer.expect("dropped")

    def _tell(self, do: str, **values: Any) -> list[Peer]:
        """Say to both ends what to do with the other one."""
        one, other = self.ends
        for end, partner in ((one, other), (other, one)):
            self.peers[end].say(do, peer=self.ids[partner], **values)
        return [self.peers[one], self.peers[other]]

    def bulk(
        self, warm_s: float, seconds: float, congestion: str
    ) -> tuple[float, list[int], set[str]]:
        """Bytes a second over the lanes that are open, from the first end to the second, the bytes
        of each second, and the congestion controls they had at the end."""
        sender, receiver = (self.peers[end] for end in self.ends)
        receiver.say("receive", warm_s=warm_s, seconds=seconds)
        sender.say("send", seconds=warm_s + seconds + 2.0, congestion=congestion)
        found = receiver.expect("received")
        return (
            found["nbytes"] / found["seconds"],
            found["by_second"],
            set(sender.expect("sent")["congestion"]),
        )

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        for peer in self.peers:
            peer.process.kill()
        if self._line is not None:
            self._line.close()
        self.lab.close()
