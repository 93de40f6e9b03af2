"""What the command line asks a running node. Loads neither torch nor trio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..client.link import Link
from ..control import protocol as p
from ..control.descriptors import Descriptor
from ..home.paths import Paths
from .find import connect_running

ANSWER_S = 30.0
P = ParamSpec("P")
R = TypeVar("R", bound=p.Reply)


class NodeClient:
    """What `atoll status`, `atoll peers` and the other commands ask this machine's node, for
    programs. The documents are those that the commands print with ``--json``. What many ask has a
    method; whatever else the node answers: `ask`.

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

    def ask(
        self, kind: Callable[Concatenate[int, P], p.Ask[R]], *fields: P.args, **named: P.kwargs
    ) -> R:
        """The reply to a request of `control.protocol`, of its class and fields but for its id:
        ``node.ask(protocol.Ping, peer).value``.
        """
        return self._link.ask(lambda id_: kind(id_, *fields, **named), timeout_s=ANSWER_S)

    def status(self) -> dict[str, Any]:
        """The state of the node, ``schema`` 1."""
        return self.ask(p.Status).value

    def runs(self) -> list[dict[str, Any]]:
        return self.ask(p.Runs).value["runs"]

    def peers(self, run: str = "") -> list[dict[str, Any]]:
        """The members of a run: id, unique prefix, or name; "" = the only one."""
        return self.ask(p.Peers, run).value["peers"]

    def find_run(self, run: str = "") -> p.RunInfo:
        return self.ask(p.FindRun, run).run

    def join(
        self, request: p.JoinRequest, progress: Callable[[str, int, int], None] | None = None
    ) -> p.RunInfo:
        """Put the node into a run; waits until the run's manifest is there."""
        call = self._link.submit(lambda id_: p.JoinRun(id_, request), progress)
        return self._link.finish(call, timeout_s=None).run

    def leave(self, run: str = "", *, now: bool = False) -> None:
        """Take the node out of a run; waits until the open round is handed over, unless ``now``."""
        self._link.ask(lambda id_: p.Leave(id_, run, now), timeout_s=None)

    def fetch_base(
        self, run: str, progress: Callable[[str, int, int], None] | None = None
    ) -> dict[str, Any]:
        """Have members send the files of the run's pretrained model which this machine lacks: see
        `protocol.FetchBase`.
        """
        call = self._link.submit(lambda id_: p.FetchBase(id_, run), progress)
        return self._link.finish(call, timeout_s=None).value

    def down(self, *, now: bool = False) -> None:
        """Ask the node to end, then wait until it closes the connection."""
        self.ask(p.Down, now)
        self._link.wait_for(lambda: False, None)

    def events(self) -> Iterator[dict[str, Any]]:
        """Telemetry events from this call on, until the node ends. This connection is then good for
        nothing else.
        """
        self.ask(p.Subscribe)
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
