"""Reaching a node: the running one of a home, or a private one of this script's own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from ...collectives.errors import NetworkError
from ...collectives.identifiers import RunId
from ..client.link import HELLO_S, NOT_RUNNING, Link
from ..client.reattach import GiveUp
from ..home.lifecycle import already_running, read_node_file
from ..home.paths import Paths, find_paths
from ..home.private_node import PrivateNode

# a daemon that was there may be restarted by its supervisor before a private node takes its home
DAEMON_GRACE_S = 20.0
OWNER_VARIABLE = "ATOLL_NODE_OWNER"  # set by `atoll join` for the script it starts


def connect_running(
    paths: Paths, *, timeout_s: float = HELLO_S, give_up: GiveUp | None = None
) -> Link:
    """A connection to the node that runs with this home. Raises as `Link.connect`: NetworkError
    (E003) when there is none.
    """
    node = read_node_file(paths)
    # the node's own word first: its temporary folder, where long paths go, may be another than ours
    if node is not None and node.socket and Path(node.socket) != paths.control_socket:
        try:
            return Link.connect(Path(node.socket), timeout_s=timeout_s, give_up=give_up)
        except NetworkError as error:
            if error.code != NOT_RUNNING:  # a node that is there and does not answer
                raise
    return Link.connect(paths.control_socket, timeout_s=timeout_s, give_up=give_up)


def _owners() -> tuple[int, ...]:
    """Processes whose private node this script may use: its own, and that of the `atoll join` that
    started it.
    """
    named = os.environ.get(OWNER_VARIABLE, "")
    return (os.getpid(), int(named)) if named.isdecimal() else (os.getpid(),)


class Dial:
    """How one script reaches its node, now and again after it was lost.

    ``private`` None: the running node if there is one, else a private one; True: always a private
    one; False: never. ``command`` replaces ``python -m atoll.node`` (tests).
    """

    def __init__(
        self,
        home: str | Path | None = None,
        *,
        private: bool | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.paths = find_paths(home)
        self._home = home
        self._private = private
        self._command = command
        self._node: PrivateNode | None = None
        self._daemon_seen_s: float | None = None

    def reach(self, give_up: GiveUp | None = None) -> Link:
        """A connection. May start a private node and wait until it is ready; ``give_up`` is asked
        several times a second.

        Raises NetworkError (E003), StateError (E102: the home's node belongs to another script),
        SwarmClosedError (E161: a private node does not start), and what that node says it failed
        of.
        """
        if self._node is not None:
            if self._node.alive() and self._node.socket is not None:
                return Link.connect(self._node.socket, give_up=give_up)
            if self._node.ended_in_order():  # by `atoll up`, which takes its place
                self._daemon_seen_s = time.monotonic()
            self._node.end(0)
            self._node = None
        if self._private is not True:
            try:
                return self._running(give_up)
            except NetworkError as error:
                if error.code != NOT_RUNNING or self._private is False or self._daemon_may_return():
                    raise
        node = PrivateNode.start(self.paths, home=self._home, command=self._command)
        path = node.wait_ready(give_up=give_up)
        self._node = node
        return Link.connect(path, give_up=give_up)

    def _running(self, give_up: GiveUp | None) -> Link:
        link = connect_running(self.paths, give_up=give_up)
        welcome = link.welcome
        if welcome is None or (welcome.private and welcome.parent_pid not in _owners()):
            link.close()
            raise already_running(self.paths)
        self._daemon_seen_s = time.monotonic()
        return link

    def run_dir(self, run: RunId) -> Path:
        """Of a run, among the files of the node's home."""
        return self.paths.run_dir(run)

    def lost(self) -> None:
        """The connection was lost: a daemon's time to come back starts now."""
        if self._daemon_seen_s is not None:
            self._daemon_seen_s = time.monotonic()

    def _daemon_may_return(self) -> bool:
        return (
            self._daemon_seen_s is not None
            and time.monotonic() - self._daemon_seen_s < DAEMON_GRACE_S
        )

    def close(self) -> None:
        """End the private node, if there is one, and wait for it. Idempotent."""
        node, self._node = self._node, None
        if node is not None:
            node.end()
