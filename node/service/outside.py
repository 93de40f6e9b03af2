"""What a node is given by whoever puts its process together (`node.composing`).

So the node names neither the network's parts nor manifests, neither screens nor modes: it is given
values and functions, and the objects whose methods it calls are these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from ...collectives.errors import AtollError, StorageError
from ...collectives.identifiers import PeerId, RunId
from ...collectives.swarm import RunSettings
from ..control.service import ExpectedScript
from ..run.events import RunEvent
from ..run.gate import Policy


class Topics(Protocol):
    """The messages of runs. `net.network.PeerNetwork` says what each method does."""

    def on_message(
        self,
        topic: str,
        handler: Callable[[PeerId, bytes], float | None],
        greet: Callable[[PeerId], bytes],
        admit: Callable[[PeerId, bytes], bool],
        accept: Callable[[PeerId, bytes], bool],
        recall: Callable[[PeerId], bytes],
        reminded: Callable[[PeerId, bytes], None],
    ) -> None: ...
    def announce_run(
        self,
        run: RunId,
        organiser: str,
        certificate: bytes,
        hears: Callable[[PeerId, bytes], bool],
        free: bool | None,
    ) -> None: ...
    def settle_run(self, run: RunId, free: bool) -> None: ...
    def withdraw_run(self, run: RunId) -> None: ...
    def members(self, run: RunId) -> list[tuple[PeerId, tuple[str, ...]]]: ...
    def send(self, topic: str, peer: PeerId, data: bytes) -> None: ...
    def unread(self, topic: str, peer: PeerId, rtt_s: float) -> bool: ...
    async def close_topic(self, topic: str, peer: PeerId | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerPlaces:
    """Peers and their addresses, whatever run they are in: methods of the same object."""

    addresses: Callable[[], list[str]]
    add_addresses: Callable[[PeerId, Sequence[str]], None]
    add_bootstrap: Callable[[Sequence[str]], None]
    named: Callable[[PeerId], bool]
    connected: Callable[[PeerId], bool]
    address_of: Callable[[PeerId], str]
    traffic: Callable[[], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LaneLinks:
    """Sockets for bulk bytes: likewise."""

    ensure_lane: Callable[[PeerId, int], None]
    release_lane: Callable[[PeerId, int], None]
    lane_paths: Callable[[], Mapping[PeerId, str]]


@dataclass(frozen=True, slots=True)
class SignedRun:
    """A run's manifest with its organiser's signature. ``data``: both, as bytes."""

    run_id: RunId
    organiser: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What a node must know of a run's manifest. ``settings`` has what rounds go by."""

    name: str
    settings: RunSettings
    policy: Policy
    """Who may enter: ``[join] policy``; by "allow" those in ``allow``."""
    allow: frozenset[PeerId]
    names_sites: bool
    probation: int
    per_hour: int
    encrypts: bool
    lanes: int
    """To each peer, at most."""
    checkpoint_every: int
    keep_contributions: int
    start_with: int
    """Members that the first round is to have."""
    least_masked: int
    """Members that a masked sum needs; 0 where none is made."""
    bans_by_quorum: bool
    parameters: int | None
    """Of the model that is promised, ``entry``; None where any will do."""
    entry: str
    averaging: str
    """How the run averages, in words."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """Manifests as bytes and on this machine's disk (`node.manifest`)."""

    decode: Callable[[bytes], SignedRun]
    """Raises ConfigError."""
    terms: Callable[[SignedRun], RunTerms]
    """After checking the signature. Raises BadSignatureError, ConfigError, VersionMismatchError."""
    save: Callable[[SignedRun], None]
    """Raises ConfigError where this run is known as another organiser's, StorageError."""
    load: Callable[[str], SignedRun]
    """By id, by a unique beginning of it, or by name. Raises ConfigError, StorageError."""
    stored: Callable[[list[StorageError]], Mapping[RunId, SignedRun]]
    """All that are here; what is damaged is added to the list."""


@dataclass(frozen=True, slots=True)
class EvidenceCheck:
    """Evidence against peers, of which the modes have kinds of their own: `node.run.evidence`."""

    accused: Callable[[bytes], PeerId | None]
    """Whom it is about, which is not checked; None where that cannot be read."""
    check: Callable[..., tuple[PeerId, str]]
    """Whom it proves to have lied, and how. Raises RemoteProtocolError."""


class FilesNews(NamedTuple):
    """How far the files of a pretrained model are on their way. ``document``: what came of it."""

    over: bool
    error: AtollError | None
    progress: tuple[str, int, int]
    document: Mapping[str, Any]


class ModelFiles(Protocol):
    """The pretrained model of a run, handed on to members and had from them (`node.bases`)."""

    def begin(self, now: float) -> object: ...
    def news(self) -> FilesNews: ...
    def end(self) -> None: ...
    def drop_all(self) -> None: ...
    def take(self, now: float, peer: PeerId, data: bytes) -> None: ...
    def on_exchange(self, now: float, event: object) -> None: ...
    def tick(self, now: float, peers: Sequence[PeerId]) -> None: ...
    def next_due(self, now: float) -> float: ...


ScriptTurn = Literal["may train", "gives", "waits", "asks", "is gone"]
"""What a script does: it may make its first step; it has contributed, or made steps; it waits for a
round, or rests; it has asked for something, or has what it waited for; its connection ended.
"""


class ScriptWatch(Protocol):
    """Who notes whether this machine's script is there, and makes steps."""

    @property
    def same_order(self) -> Mapping[PeerId, int]:
        """Who reads the same data in the same order, for how many rounds running."""
        ...

    def expect(self, pid: int) -> ExpectedScript:
        """A script has joined, and is to attach."""
        ...

    def attached(self, pid: int, averaging: str) -> None:
        """``averaging``: how the run averages, in words."""
        ...

    def ended(self, pid: int, farewell: str | None, *, node_ends: bool) -> None:
        """Its connection ended, with these last words, or None. ``node_ends``: so it would have
        had to.
        """
        ...

    def note_turn(self, turn: ScriptTurn) -> None: ...
    def note_report(
        self,
        metrics: Mapping[str, float],
        first_batch: tuple[int, bytes] | None,
        read: Sequence[bytes],
    ) -> None:
        """As `control.protocol.Report` has them."""
        ...

    def left(self) -> None:
        """The run is left: nobody is to train here."""
        ...

    async def buried(self, patience_s: float) -> None:
        """Wait until it is known how those ended that are gone."""
        ...


class RunWatch(Protocol):
    """Who notes what happens in a run for people and tools (`node.watching`)."""

    @property
    def script(self) -> ScriptWatch: ...
    @property
    def progress(self) -> tuple[str, int, int]:
        """How far entering the run is."""
        ...

    @property
    def against_averaging(self) -> str:
        """What members' evaluations have against it; "" where nothing."""
        ...

    def begin(self) -> None:
        """The node is in the run now."""
        ...

    def note(self, fragment: int, event: object) -> None:
        """An event of the session of one fragment, after what it means for the run was done."""
        ...

    def note_published(self, event: RunEvent) -> None:
        """An event of this run was published."""
        ...

    def on_exchange(self, event: object) -> None:
        """An event of the engine."""
        ...

    def look(self) -> None:
        """Time has passed."""
        ...

    def close(self) -> None:
        """The run is over here."""
        ...


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why nobody answers."""

    tried: Callable[[], str]
    """What came of each address from which the node starts."""
    of_silence: Callable[[RunId, PeerId, Sequence[str]], AtollError]
    """Of a run and its organiser, whose manifest no member gave; and of addresses that the invite
    names.
    """
    wrong_clock: Callable[[], Awaitable[AtollError | None]]
    """E120, where the peers that are connected agree on it."""
