"""The calls of the control socket that only look: status, peers, connections."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import trio

from ..control import protocol as p
from ..control.calls import CallRow, answers
from ..home.memory_use import resident_bytes
from ..manifest import Manifest
from ..net.network import PeerNetwork
from ..service.node import Node
from ..service.run import RunService
from ..service.troubles import described
from .links import Links
from .views import peers_of, status_of
from .watcher import RunWatcher


class NodeViews:
    """Of one node whose runs are watched by `RunWatcher`."""

    def __init__(self, node: Node, network: PeerNetwork, links: Links) -> None:
        self.node, self._network, self._links = node, network, links
        self._started = time.time()

    def rows(self) -> list[CallRow]:
        """For the node's table of calls."""
        return [
            answers(p.Status, self.status, p.Document),
            answers(p.Runs, self.runs, lambda id_, rows: p.Document(id_, {"runs": rows})),
            answers(p.Peers, self.peers, lambda id_, rows: p.Document(id_, {"peers": rows})),
            answers(p.Ping, self._links.ping, p.Document),
            answers(p.Check, self._links.check, p.Document),
        ]

    async def status(self) -> dict[str, Any]:
        """Answer `protocol.Status`."""
        await trio.lowlevel.checkpoint()
        node = self.node
        return {
            "schema": 1,
            "peer": node.peer,
            "private": node.private,
            "parent_pid": node.parent_pid,
            "addresses": self._network.addresses(),
            "uptime_s": round(time.time() - self._started, 1),
            "memory_bytes": resident_bytes(),
            "lane_bytes": {
                path: {"sent": sent, "received": received}
                for path, (sent, received) in node.context.engine.totals_by_path().items()
            },
            "network": self._network.status(),
            "runs": [self._row(run) for run in node.by_id.values()],
            "troubles": [described(error) for error in node.troubles],
        }

    async def runs(self) -> list[dict[str, Any]]:
        """Answer `protocol.Runs`."""
        await trio.lowlevel.checkpoint()
        return [self._row(run) for run in self.node.by_id.values()]

    async def peers(self, run: str) -> list[dict[str, Any]]:
        """Answer `protocol.Peers`."""
        await trio.lowlevel.checkpoint()
        return await self._links.of(self.peer_rows(self.node.find(run)))

    def peer_rows(self, run: RunService) -> list[dict[str, Any]]:
        """Members and known peers of a run, without how they are connected."""
        return peers_of(_watcher(run))

    def manifest_of(self, run: RunService) -> Manifest | None:
        """None before it is known."""
        return _watcher(run).manifest

    def _row(self, run: RunService) -> dict[str, Any]:
        watch, attached = _watcher(run), self.node.script_pid(run.run_id)
        joined = {*watch.script.idle.processes, *(() if attached is None else (attached,))}
        told = msgspec.structs.replace(
            status_of(watch), script_pid=attached, script_pids=sorted(joined)
        )
        return msgspec.to_builtins(told)


def _watcher(run: RunService) -> RunWatcher:
    assert isinstance(run.watch, RunWatcher)
    return run.watch
