"""The bans of one run at a node: handed on, and enforced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...collectives.errors import StorageError
from ...collectives.identifiers import PeerId
from ..banning import Bans, banned

if TYPE_CHECKING:
    from .run import RunService

MESSAGE = b"B"
"""Before the organiser's list, as one message of a run."""


class Banning:
    """Of one RunService. ``lists``: who is banned; everybody else is told the organiser's list on connecting, and when it changes."""

    def __init__(self, run: RunService) -> None:
        self._run = run
        self.lists = Bans(run.node.paths.run_dir(run.run_id), run.run_id, run.organiser)

    def load(self) -> None:
        """Read the lists on this machine's disk; a damaged one is told. Ends the run where the organiser has banned this node."""
        try:
            self.lists.load()
        except StorageError as error:
            self._run.troubles.tell(error)
        self._shut_out()

    async def reload(self) -> None:
        """The user has changed a list on disk."""
        self.load()
        self._hand_on()
        await self._expel()

    def take(self, sender: PeerId, data: bytes) -> None:
        """The organiser's list, from anybody. Raises RemoteProtocolError, StorageError."""
        if self.lists.take(data, sender):
            self._shut_out()
            self._hand_on(sender)
            self._run.node.nursery.start_soon(self._expel)

    def met(self, peer: PeerId) -> None:
        """A peer has connected."""
        if self.lists.encoded and peer not in self.lists.peers and peer in self._others():
            self._run.node.network.send(self._run.run_id, peer, MESSAGE + self.lists.encoded)

    def _others(self) -> set[PeerId]:
        members = self._run.whole.config_peers() if self._run.whole is not None else []
        return {*members, *(peer for peer, _ in self._run.node.network.members(self._run.run_id))} - {self._run.node.identity.peer}

    def _hand_on(self, sender: PeerId | None = None) -> None:
        if self.lists.encoded:
            for peer in sorted(self._others() - self.lists.peers - {sender}):
                self._run.node.network.send(self._run.run_id, peer, MESSAGE + self.lists.encoded)

    def _shut_out(self) -> None:
        run, me = self._run, self._run.node.identity.peer
        if me in self.lists.of_run:
            run.fail(banned(self.lists.why(me) or "", me))
        elif run.session is not None:
            run.session.membership.banned = self.lists.peers
            run.wake()

    async def _expel(self) -> None:
        for peer in sorted(self.lists.peers):
            await self._run.node.network.close_topic(self._run.run_id, peer)
