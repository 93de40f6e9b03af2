"""RunView: what the parts of a run at a node see of it, and the few things that they ask of it.

Bans, the chronicle, the session's ports and the start of the first round own state of their own and
stand below `run.RunService`, which makes them. They import this protocol, never the service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...collectives.identifiers import PeerId, RunId
from ..manifest import Manifest, SignedManifest
from ..run.entrants import Entrants
from ..run.membership import Membership
from ..session.fragments import Whole
from .context import NodeContext
from .phases import Phases
from .timings import Timings
from .troubles import Troubles


class RunView(Protocol):
    """One run at a node. Attributes are for reading; the objects behind them are changed by their
    own methods.
    """

    @property
    def node(self) -> NodeContext:
        """What all runs of the node share."""
        ...

    @property
    def run_id(self) -> RunId:
        """Id of the run."""
        ...

    @property
    def organiser(self) -> PeerId:
        """Who founded the run."""
        ...

    @property
    def signed(self) -> SignedManifest | None:
        """The manifest as it was signed; None before it is here."""
        ...

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None before it is here."""
        ...

    @property
    def entrants(self) -> Entrants:
        """How many each invite has let in."""
        ...

    @property
    def whole(self) -> Whole | None:
        """The session, or all fragments of it; None before the run has begun here."""
        ...

    @property
    def membership(self) -> Membership | None:
        """Records and liveness of the run's peers; None before the run has begun here."""
        ...

    @property
    def foreign(self) -> set[PeerId]:
        """Peers that are on another history of this run."""
        ...

    @property
    def roles(self) -> dict[PeerId, str]:
        """What invites let peers do; nothing of those that may train."""
        ...

    @property
    def troubles(self) -> Troubles:
        """What is wrong at this node."""
        ...

    @property
    def phases(self) -> Phases:
        """What the round is doing."""
        ...

    @property
    def timings(self) -> Timings:
        """Where the time of reductions goes."""
        ...

    @property
    def reach(self) -> dict[str, Any] | None:
        """Of the open round's quorum: who is there, who is needed, JSON-able; None where this node
        cannot tell.
        """
        ...

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received for the run."""
        ...

    def peers(self) -> list[dict[str, Any]]:
        """One a member or known peer, JSON-able."""
        ...

    # ---- what parts ask of it
    def wake(self) -> None:
        """Look at the session now."""
        ...

    def guard(self, act: Callable[[], object]) -> None:
        """Do something for the session: what it raises ends the run, or is told."""
        ...

    def fail(self, error: BaseException) -> None:
        """The run does not go on at this node."""
        ...

    def on_event(self, event: object) -> None:
        """What the session tells."""
        ...

    def take_proof(self, evidence: bytes) -> None:
        """This node has found evidence against a peer."""
        ...
