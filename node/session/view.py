"""SessionView: what the parts of a session see of it and of its log's round (`LogRound`), and the
few things that they ask of both.

A part owns state of its own (branches, operations, what is served, who may enter) and stands below
`session.Session`, which makes it. It imports this protocol, never the session; a part that uses
another one is handed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

from ...collectives.errors import RemoteProtocolError
from ...collectives.group import NO_READING, Certified, Entry, Member, Plan, Reading
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import Layout
from ...collectives.round import Convener, RoundActions, RoundView, Sealing, Timing
from ...collectives.swarm import RunSettings
from ..run.membership import Membership
from . import events as ev
from .budgets import PeerUsage
from .contribution_queue import ContributionQueue
from .ports import AnchorReplica, SessionPorts
from .pre_round import PreRound
from .transfer import Transfer, TransferActions


class LogView(RoundActions, TransferActions, Protocol):
    """What parts see of what a session does for its run's log (`actions.LogActions`)."""

    @property
    def results(self) -> dict[tuple[bytes, ...], memoryview]:
        """Complete result bytes of the open round, by part digests; parts add to it."""
        ...

    def store(
        self, now: float, bound: Plan | Entry, digests: tuple[bytes, ...], data: memoryview
    ) -> None:
        """Result bytes of the open round are here: voted on once they are on the medium."""
        ...


class LogRound(RoundView, Protocol):
    """What parts see of the `RoundMachine` of a session's log, and what they tell it. Its state is
    its own: a part that has news calls the method which says what happened.
    """

    # ---- what it knows beyond the open round
    @property
    def convening(self) -> Convener:
        """The role that makes plans and proposals."""
        ...

    @property
    def sealing(self) -> Sealing:
        """The role that recertifies a round whose members are lost."""
        ...

    @property
    def frontier(self) -> list[Certified]:
        """Decided entries that are verified but not yet applied here, oldest first."""
        ...

    @property
    def joiners(self) -> Mapping[Member, tuple[int, float]]:
        """Who asks to enter: the round of the question, and when it came."""
        ...

    @property
    def forgotten(self) -> int:
        """The incarnation to go on under, where the journal is an old copy; 0: it is none."""
        ...

    def heard_votes_for(self, entry: Entry) -> bool:
        """Whether this process heard a member vote for an entry of the open round."""
        ...

    # ---- the own contribution and script
    def contribute(
        self, now: float, cid: bytes, weight: int, reading: Reading = NO_READING
    ) -> None:
        """Offer a frozen contribution."""
        ...

    def withdraw(self) -> None:
        """Take the own contribution back."""
        ...

    def set_unsettled(self, now: float, unsettled: bool) -> None:
        """Set whether a script waits for what became of an earlier life's contribution."""
        ...

    def keep_unsettled(self) -> None:
        """The entry that is being applied does not tell it: the script waits on."""
        ...

    # ---- what happened
    def on_result(self, now: float, bound: Plan | Entry, digests: tuple[bytes, ...]) -> None:
        """All result bytes with these part digests are stored here."""
        ...

    def on_kept(self, entry: Entry) -> None:
        """The bytes of an entry that an earlier life voted for are stored here."""
        ...

    def on_not_applied(self) -> None:
        """The decided entry could not be applied now: it is tried again."""
        ...

    def skip_ballot_0(self) -> None:
        """This member is on a branch: it takes no part in ballot 0. Raises StorageError."""
        ...

    def resume(self, now: float) -> list[RemoteProtocolError]:
        """Take up what came early; the answer is what of it broke a rule."""
        ...

    def take_renewed(self) -> bool:
        """Whether it has gone on as another member since this was last asked."""
        ...


class SessionView(Protocol):
    """One run at one member. Attributes are for reading; the objects behind `machine`, `replica`,
    `membership`, `offering` and `transfer` are changed by their own methods.
    """

    # ---- what the run is
    @property
    def run(self) -> RunId:
        """Id of the run."""
        ...

    @property
    def log(self) -> str:
        """Name of the log."""
        ...

    @property
    def me(self) -> PeerId:
        """This node's peer."""
        ...

    @property
    def organiser(self) -> PeerId:
        """Who founded the run."""
        ...

    @property
    def settings(self) -> RunSettings:
        """What all members of the run have in common."""
        ...

    @property
    def timing(self) -> Timing:
        """How long things may take."""
        ...

    @property
    def site(self) -> str:
        """The label of the place where this member is."""
        ...

    @property
    def seeding(self) -> bool:
        """Whether this member takes part also while no script is attached."""
        ...

    # ---- what the session is made of
    @property
    def ports(self) -> SessionPorts:
        """The driver: data plane, storage, sending, jobs."""
        ...

    @property
    def rng(self) -> Random:
        """All chance of the session."""
        ...

    @property
    def membership(self) -> Membership:
        """Records and liveness of the run's peers."""
        ...

    @property
    def budgets(self) -> PeerUsage:
        """What each peer may still ask of this node."""
        ...

    @property
    def machine(self) -> LogRound | None:
        """The log's round; None before its genesis is known."""
        ...

    @property
    def replica(self) -> AnchorReplica | None:
        """Anchor and momentum; None before there is a state."""
        ...

    @property
    def actions(self) -> LogView:
        """What the session does for the run's log."""
        ...

    @property
    def transfer(self) -> Transfer:
        """What is being fetched."""
        ...

    @property
    def queue(self) -> ContributionQueue:
        """Contributions of the script that are in no round yet."""
        ...

    @property
    def pre_round(self) -> PreRound | None:
        """What members do together before the log is given anything; None: nothing."""
        ...

    # ---- where it stands
    @property
    def began_at(self) -> float:
        """When this life of the session began."""
        ...

    @property
    def script(self) -> Layout | None:
        """Layout of the attached script; None: no script is attached."""
        ...

    @property
    def contacts(self) -> Sequence[PeerId]:
        """Peers that discovery says take part in the run now."""
        ...

    @property
    def left(self) -> bool:
        """Whether this member left the run."""
        ...

    @property
    def doubled(self) -> bool:
        """Whether another process lives under this key."""
        ...

    @property
    def removed(self) -> bool:
        """Whether this member's present life was removed from the run."""
        ...

    @property
    def installs(self) -> bool:
        """Whether a fetched state is being installed: nothing may be applied meanwhile."""
        ...

    @property
    def on_branch(self) -> bool:
        """Whether the replica holds a branch's state, which no entry certifies."""
        ...

    @property
    def round(self) -> int:
        """The entry whose anchor is current; -1 before there is a state."""
        ...

    @property
    def completed(self) -> int:
        """Rounds in the current anchor; -1 before there is a state."""
        ...

    def rounds(self, entry: int) -> int:
        """How many rounds are in the state after log entry ``entry``."""
        ...

    def readings(self, entry: int) -> list[Reading]:
        """What contributors say of the newest round in the state after log entry ``entry``."""
        ...

    def clock(self) -> float:
        """The time of the input being handled."""
        ...

    def in_config(self, peer: PeerId) -> bool:
        """Whether a peer is a member of the newest configuration known."""
        ...

    def config_peers(self) -> list[PeerId]:
        """The members of the newest configuration known."""
        ...

    def find(self, name: bytes) -> tuple[Entry, memoryview] | None:
        """An entry of any log here by its hash, with its result bytes, if both are here."""
        ...

    # ---- what parts ask of it
    def resume(self, now: float, machine: LogRound) -> None:
        """Its round is open: take up what came early."""
        ...

    def settle(self, now: float) -> None:
        """After a command to a part: deliver what it said to this member itself."""
        ...

    def misbehaved(self, now: float, peer: PeerId, reason: str) -> None:
        """A message of a peer broke a rule."""
        ...

    def tell(self, event: ev.OperationDone | ev.OperationRefused) -> None:
        """What became of a free-standing operation."""
        ...
