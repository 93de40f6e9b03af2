"""What the command line asks a running node. Loads neither torch nor trio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from ...collectives.identifiers import PeerId
from ..control import protocol as p
from ..control.descriptors import Descriptor
from ..home.paths import Paths
from .find import connect_running
from .link import Link

ANSWER_S = 30.0


class NodeClient:
    """What `atoll status`, `atoll peers` and the other commands ask this machine's node, for
    programs. The documents are those that the commands print with ``--json``.

        from atoll.node.home.paths import find_paths

        with NodeClient.connect(find_paths()) as node:
            for run in node.runs():
                print(run["name"], len(node.peers(run["id"])), "peers")

    Every method blocks until the node answers. It raises SwarmClosedError when the node goes away,
    DeadlineExceededError when it does not answer within ANSWER_S seconds, and whatever error the
    node refuses with.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._events: list[dict[str, Any]] = []
        link.on_push = self._pushed

    @classmethod
    def connect(cls, paths: Paths) -> NodeClient:
        """Raises NetworkError (E003, exit status 3) when no node runs with this home."""
        return cls(connect_running(paths))

    @property
    def node(self) -> p.Welcome:
        """Who answered: pid, peer, private."""
        assert self._link.welcome is not None
        return self._link.welcome

    @property
    def process(self) -> int:
        """The node's process, to signal or to wait for; 0 where it runs in another container."""
        return self._link.process

    def status(self) -> dict[str, Any]:
        """The state of the node, ``schema`` 1."""
        return self._link.ask(p.Status, p.Document, timeout_s=ANSWER_S).value

    def runs(self) -> list[dict[str, Any]]:
        return self._link.ask(p.Runs, p.Document, timeout_s=ANSWER_S).value["runs"]

    def peers(self, run: str = "") -> list[dict[str, Any]]:
        """The members of a run: id, unique prefix, or name; "" = the only one."""
        return self._link.ask(lambda id_: p.Peers(id_, run), p.Document, timeout_s=ANSWER_S).value[
            "peers"
        ]

    def ping(self, peer: str) -> dict[str, Any]:
        """One round trip to a peer: ``{"peer", "path", "rtt_ms", "address"}``."""
        return self._link.ask(lambda id_: p.Ping(id_, peer), p.Document, timeout_s=ANSWER_S).value

    def check(self, bandwidth: str = "") -> dict[str, Any]:
        """What peers say of this machine's clock, and, with the id of a peer, how fast bytes go to
        it. See `NodeService.check`.
        """
        return self._link.ask(
            lambda id_: p.Check(id_, bandwidth), p.Document, timeout_s=ANSWER_S
        ).value

    def find_run(self, run: str = "") -> p.RunInfo:
        return self._link.ask(lambda id_: p.FindRun(id_, run), p.Joined, timeout_s=ANSWER_S).run

    def join(
        self, request: p.JoinRequest, progress: Callable[[str, int, int], None] | None = None
    ) -> p.RunInfo:
        """Put the node into a run; waits until the run's manifest is there."""
        call = self._link.submit(lambda id_: p.JoinRun(id_, request), progress)
        return self._link.finish(call, p.Joined, timeout_s=None).run

    def leave(self, run: str = "", *, now: bool = False) -> None:
        """Take the node out of a run; waits until the open round is handed over, unless ``now``."""
        self._link.ask(lambda id_: p.Leave(id_, run, now), p.Done, timeout_s=None)

    def recertify(self, run: str, without: Sequence[PeerId]) -> dict[str, Any]:
        """Go on without members that never vote again: the ``removed``, and ``awaited``, who has
        not sealed the round yet.
        """
        return self._link.ask(
            lambda id_: p.Recertify(id_, run, tuple(without)), p.Document, timeout_s=ANSWER_S
        ).value

    def begin(self, run: str = "") -> dict[str, Any]:
        """Let a run begin with the members that are there: see `NodeService.begin`."""
        return self._link.ask(
            lambda id_: p.BeginRun(id_, run), p.Document, timeout_s=ANSWER_S
        ).value

    def pause(self, run: str, paused: bool) -> dict[str, Any]:
        """Let a run's script rest, or train again: see `NodeService.pause`."""
        return self._link.ask(
            lambda id_: p.Pause(id_, run, paused=paused), p.Document, timeout_s=ANSWER_S
        ).value

    def fetch_base(
        self, run: str, progress: Callable[[str, int, int], None] | None = None
    ) -> dict[str, Any]:
        """Have members send the files of the run's pretrained model which this machine lacks: see
        `NodeService.fetch_base`.
        """
        call = self._link.submit(lambda id_: p.FetchBase(id_, run), progress)
        return self._link.finish(call, p.Document, timeout_s=None).value

    def read_bans(self, run: str) -> dict[str, Any]:
        """The lists of who is banned from a run have changed on disk: who is now, and why."""
        return self._link.ask(
            lambda id_: p.ReadBans(id_, run), p.Document, timeout_s=ANSWER_S
        ).value

    def down(self, *, now: bool = False) -> None:
        """Ask the node to end, then wait until it closes the connection."""
        self._link.ask(lambda id_: p.Down(id_, now), p.Done, timeout_s=ANSWER_S)
        self._link.wait_for(lambda: False, None)

    def events(self) -> Iterator[dict[str, Any]]:
        """Telemetry events from this call on, until the node ends. This connection is then good for
        nothing else.
        """
        self._link.ask(p.Subscribe, p.Done, timeout_s=ANSWER_S)
        return self._follow()

    def _follow(self) -> Iterator[dict[str, Any]]:
        while self._link.wait_for(lambda: bool(self._events), None):
            yield self._events.pop(0)

    def _pushed(self, push: p.Push, fds: Sequence[Descriptor]) -> None:
        del fds  # of reductions, which belong to scripts
        if isinstance(push, p.EventPush):
            self._events.append(push.event)

    def close(self) -> None:
        """Idempotent."""
        self._link.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
