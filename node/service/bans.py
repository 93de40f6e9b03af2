"""The bans of one run at a node: handed on, and enforced."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ...collectives.errors import ConfigError, StorageError
from ...collectives.identifiers import PeerId
from ...security.identity import verify
from ..run.banning import Ban, Bans, banned
from ..run.events import PeerConvictedEvent
from ..run.signing import DOMAIN

if TYPE_CHECKING:
    from .outside import RunTerms
    from .run import RunService

log = logging.getLogger("atoll")
MESSAGE, PROOF = b"B", b"E"
"""Before the organiser's list, and before evidence against a peer, as one message of a run."""
# Of one sender, that prove nothing or no news: then it is not listened to any more.
MOST_PROOFS = 16


class Banning:
    """Of one RunService. ``lists``: who is banned; everybody else is told the organiser's list on
    connecting, and when it changes.
    """

    def __init__(self, run: RunService) -> None:
        self._run = run
        self.lists = Bans(run.node.paths.run_dir(run.run_id), run.run_id, run.organiser)
        self._useless = Counter[PeerId]()

    def load(self) -> None:
        """Read the lists on this machine's disk; a damaged one is told. Ends the run where the
        organiser has banned this node.
        """
        if self._run.signed is not None:
            self.begin(self._run.node.manifests.terms(self._run.signed))
        try:
            self.lists.load()
        except StorageError as error:
            self._run.troubles.tell(error)
        self._shut_out()

    def begin(self, terms: RunTerms) -> None:
        """The manifest is known: whether the organiser's list counts against members."""
        run = self._run
        if terms.bans_by_quorum and run.node.identity.peer != run.organiser:
            self.lists.spared = self._members

    def _members(self) -> Collection[PeerId]:
        run = self._run
        members = run.whole.config_peers() if run.whole is not None else ()
        return [run.node.identity.peer, *members]

    def follow(self) -> None:
        """The configuration may have changed: the organiser's list counts against the evicted."""
        membership = self._run.membership
        if membership is None or not self.lists.of_run:
            return
        if membership.banned != self.lists.peers:
            self._shut_out()
            self._run.node.nursery.start_soon(self._expel)

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

    def take_proof(self, sender: PeerId, data: bytes) -> None:
        """Evidence against a peer, from anybody; it is checked, counts here, and is handed on.
        Raises RemoteProtocolError.
        """
        proofs = self._run.node.parts.proofs
        about = proofs.accused(data)
        if self._useless[sender] >= MOST_PROOFS or (
            about is not None and not self.lists.can_convict(about)
        ):
            return None  # what is known is handed over at every meeting, and costs no check
        self._useless[sender] += 1  # signatures cost time to check: what is news gets it back
        run = self._run
        settings = run.terms.settings if run.terms is not None else None
        btard = settings.btard if settings is not None else None
        found, why = proofs.check(
            data,
            run.run_id,
            lambda peer, payload, signature: verify(peer, DOMAIN, payload, signature),
            sender,
            btard.peers if btard is not None else (),
            settings.lying if settings is not None else 0,
            [run.whole.config_peers()] if run.whole is not None else (),
        )
        try:
            news = found != run.node.identity.peer and self.lists.convict(
                Ban(found, why, int(time.time()), data)
            )
        except (ConfigError, StorageError) as error:  # too many bans, or a full disk
            return run.troubles.tell(error)
        if not news:
            return None
        self._useless[sender] -= 1
        log.warning("run %s: %s is banned here: %s (proven)", run.run_id, found[-8:], why)
        run.node.publish(PeerConvictedEvent(run=run.run_id, peer=found, reason=why))
        self._shut_out()
        self._prove(self._others() - {sender}, [data])
        run.node.nursery.start_soon(self._expel)
        return None

    def _prove(self, peers: Iterable[PeerId], proofs: Iterable[bytes]) -> None:
        for peer in sorted(set(peers) - self.lists.peers):
            for proof in proofs:
                self._run.node.network.send(self._run.run_id, peer, PROOF + proof)

    def met(self, peer: PeerId) -> None:
        """A peer has connected."""
        if peer in self.lists.peers or peer not in self._others():
            return
        if self.lists.encoded:
            self._run.node.network.send(self._run.run_id, peer, MESSAGE + self.lists.encoded)
        self._prove([peer], [ban.evidence for ban in self.lists.here.values() if ban.evidence])

    def _others(self) -> set[PeerId]:
        members = self._run.whole.config_peers() if self._run.whole is not None else []
        return {
            *members,
            *(peer for peer, _ in self._run.node.network.members(self._run.run_id)),
        } - {self._run.node.identity.peer}

    def _hand_on(self, sender: PeerId | None = None) -> None:
        if self.lists.encoded:
            for peer in sorted(self._others() - self.lists.peers - {sender}):
                self._run.node.network.send(self._run.run_id, peer, MESSAGE + self.lists.encoded)

    def _shut_out(self) -> None:
        run, me = self._run, self._run.node.identity.peer
        if me in self.lists.peers:
            run.fail(banned(self.lists.why(me) or "", me))
        elif run.membership is not None:
            membership = run.membership
            membership.banned, membership.trusted = self.lists.peers, self.lists.trusted
            run.wake()

    async def _expel(self) -> None:
        """End the streams of who is banned, and of who came, no member, by a revoked invite."""
        run = self._run
        members = set(run.whole.config_peers()) if run.whole is not None else set[PeerId]()
        gone = {
            peer
            for peer, came in run.entrants.known.items()
            if came.nonce in self.lists.revoked and peer not in members
        }
        for peer in sorted((self.lists.peers | gone) - {run.organiser}):
            await self._run.node.network.close_topic(self._run.run_id, peer)
