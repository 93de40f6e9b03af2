"""What a RoundMachine knows and asks for: the volatile state of the open round, the shape of the
vector, the actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .. import messages as m
from ..bounds import most_members
from ..codecs.ranges import has_partial_sums
from ..digest import meaning
from ..group import Certified, Config, Contributor, Entry, Member, Plan, TopologyKind
from ..identifiers import PeerId
from ..pace import Pace
from ..round_settings import SampleSettings
from .own_results import OwnResults

if TYPE_CHECKING:
    from .faults import Proofs

VOTES_KEPT = 8  # of a member in a round
PROPOSALS_KEPT = 8  # of a member in a round
KIN_BYTES = 8  # of a cid: what contributions have in common that are copies of one vector


@dataclass(frozen=True, slots=True)
class Shape:
    """The flat vector and its encoding on the wire: ``numel`` float32 elements in chunks of
    ``chunk_elements``.

    ``topology``: the ways that plans are made for. Any may be a butterfly: where a tree was held up
    and nobody is to blame. It is one where the codec has no partial sums. ``least``: how many
    contributors the reducer needs. ``kin``: all contributions to an entry are copies of one vector,
    which their cids begin with. ``single``: one member, the coordinator, adds up everything.
    ``sample``: how many of the members take part in a round; None: all that can. ``whole``: it
    waits until all who take part have done their work (`turns`). ``spare``: the part of the time
    that a member with a thin link may cost the others (`thin`); 0: all are waited for.
    ``witnesses``: so many members state what comes of each part beside its owner (`witnesses`).
    """

    numel: int
    chunk_elements: int
    codec: str
    reducer: str = "mean"
    topology: TopologyKind = "butterfly"
    least: int = 1
    kin: bool = False
    single: bool = False
    sample: SampleSettings | None = None
    whole: bool = False
    spare: float = 0.0
    witnesses: int = 0

    @property
    def most(self) -> int:
        """How many members a log of this shape may have."""
        return most_members(self.topology)

    def __post_init__(self) -> None:
        if not has_partial_sums(self.codec):
            object.__setattr__(self, "topology", "butterfly")

    def fits(self, what: Plan | Entry) -> bool:
        """Whether a plan or an entry is over this vector and over enough contributions, its parts
        covering it without gaps (none where nothing is contributed)."""
        same = (what.numel, what.chunk_elements, what.codec, what.reducer) == (
            self.numel,
            self.chunk_elements,
            self.codec,
            self.reducer,
        )
        same = (
            same
            and what.topology.kind in (self.topology, "butterfly")
            and what.topology.fault(len(what.contributors)) is None
        )
        chunks = -(-self.numel // self.chunk_elements) if what.contributors else 0
        same = same and (len(what.contributors) >= self.least or not what.contributors)
        same = same and (not self.single or len({part.owner for part in what.parts}) <= 1)
        same = same and (not self.kin or len({c.cid[:KIN_BYTES] for c in what.contributors}) <= 1)
        same = same and all(part.first < part.stop for part in what.parts)
        return same and [0, *(part.stop for part in what.parts)] == [
            *(part.first for part in what.parts),
            chunks,
        ]


class RoundActions(Protocol):
    """What a RoundMachine asks of its session. None of them blocks; answers come back as inputs of
    the machine.
    """

    @property
    def own_results(self) -> OwnResults: ...

    @property
    def proofs(self) -> Proofs: ...

    def send(self, peer: PeerId, log: str, round_: int, body: m.Body) -> None:
        """Send a control message; one to oneself is delivered like any other."""

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        """Let the data plane carry out a plan; ``audience`` receives the results."""

    def report(self, plan_id: bytes) -> None:
        """Ask the data plane what it waits for: answered by `on_report`."""

    def resend_parts(self, peer: PeerId, plan_id: bytes, cid: bytes, spans: m.Spans) -> None:
        """Send parts of the own contribution, or of a partial sum made here, again."""

    def resend_results(self, peer: PeerId, plan_id: bytes, spans: m.Spans) -> None:
        """Send chunks of the result again that the peer gets from here."""

    def fetch_result(self, entry: Entry, holders: Sequence[PeerId]) -> None:
        """Fetch the entry's result bytes from any of ``holders``: answered by `on_result`. Repeated
        calls are one.
        """

    def keep(self, entry: Entry) -> None:
        """The entry is about to be voted on: its bytes must survive what the vote survives."""

    def apply(self, entry: Entry) -> None:
        """Apply the outer step of a decided entry whose bytes are here: answered by `on_applied`,
        then `on_root`.
        """

    def decided(self, certified: Certified, counted: bool) -> None:
        """The entry is decided; ``counted``: the own frozen contribution is in it."""

    def results_from(self) -> int:
        """The oldest round whose result bytes are still here."""
        ...

    def closing(self, round_: int) -> None:
        """A contribution to the open round was offered, here or elsewhere: whoever has something
        contributes it now.
        """

    def nodes(self) -> Collection[PeerId]:
        """The nodes known to be there, acceptors or not."""
        ...

    def suspected(self, peer: PeerId) -> bool:
        """Whether the peer is believed dead, frozen or unreachable."""
        ...

    def excluded(self, peer: PeerId) -> bool:
        """Whether the peer takes no part in the run, however alive: it is banned, on another
        history, or two processes have its key.
        """
        ...

    def deaf_to(self, peer: PeerId) -> bool:
        """Whether this member does not listen to the peer for now, or the peer not to it
        (`unread`), though it may be as alive as any.
        """
        ...

    def unread(self, peer: PeerId) -> bool:
        """Whether the peer does not read for now what this member tells it: nothing that depends on
        that is to be expected of it.
        """
        ...

    def let_in(self, joiners: Sequence[Member]) -> list[Member]:
        """Who of those that want to become members may, now."""
        ...

    def helps(self, peer: PeerId) -> bool:
        """Whether the peer is a member to add up for the others, though it contributes nothing."""
        ...

    def pace(self) -> Pace:
        """How fast this member's links are."""
        ...

    def sign(self, payload: bytes) -> bytes:
        """Signature of this member."""
        ...

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        """Whether the peer's signature of the payload is valid."""
        ...


@dataclass(slots=True)
class OpenRound:
    """Volatile state of the open round; gone at a restart.

    Larger than others: all of it begins anew with each round, so that opening one forgets it all.
    """

    born: float
    progress_at: float
    ready: dict[Member, m.Ready] = field(default_factory=dict[Member, m.Ready])
    first_ready_at: float | None = None
    closes: bool = False  # a contribution was announced to all
    # Since when it may end though members train that have not had their turn yet.
    closing_at: float | None = None
    # Since when the contributions are there that the round waits for, where it waits for some only.
    ripe_at: float | None = None
    enough_at: float | None = None  # since when there are so many, where it waits for some more
    due: Set[PeerId] = frozenset()  # whose contributions those are, where members come in groups
    plan: Plan | None = None
    plan_sender: PeerId | None = None
    announced_dispute: m.Disputed | None = None  # what was last told to all of a partial sum
    # Of what is added up here, by its cid.
    senders: dict[bytes, frozenset[PeerId]] = field(default_factory=dict[bytes, frozenset[PeerId]])
    planned_at: float = 0.0
    # The newest plan whose result is complete here, and its part digests.
    reduced: tuple[Plan, tuple[bytes, ...]] | None = None
    lacking: int | None = None  # chunks not yet here, for progress; None before the first report
    bulk_at: float = 0.0  # when `lacking` last shrank
    # From whom result chunks have not come: owners, or who hands their results on.
    lacking_owners: frozenset[PeerId] = frozenset()
    # Whose lane was lost while the plan was carried out.
    cut: set[PeerId] = field(default_factory=set[PeerId])
    waiting: dict[tuple[bytes, bytes], tuple[int, float]] = field(
        default_factory=dict[tuple[bytes, bytes], tuple[int, float]]
    )
    """By (plan, cid or owner): chunks outstanding from that source, and since when no fewer."""
    held: set[tuple[bytes, tuple[bytes, ...]]] = field(
        default_factory=set[tuple[bytes, tuple[bytes, ...]]]
    )
    """Complete results: what they are the result of (`digest.meaning`), and their part digests."""
    known: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])  # entries seen, by hash
    unverified: set[tuple[int, bytes, Member]] = field(
        default_factory=set[tuple[int, bytes, Member]]
    )
    """Votes, by ballot and entry, that came before the entry was known."""
    votes: dict[tuple[int, bytes], dict[Member, bytes]] = field(
        default_factory=dict[tuple[int, bytes], dict[Member, bytes]]
    )
    # Of each member the newest ballots and entries that it voted for, or proposed.
    voted: dict[Member, deque[tuple[int, bytes]]] = field(
        default_factory=dict[Member, deque[tuple[int, bytes]]]
    )
    proposed: dict[Member, deque[bytes]] = field(default_factory=dict[Member, deque[bytes]])
    begun: dict[Member, int] = field(default_factory=dict[Member, int])  # the newest ballot of each
    # Of each member how much of what it may raise the ballot, and offer something else, is used up:
    # until when, by a clock.
    raised: dict[Member, float] = field(default_factory=dict[Member, float])
    renewed: dict[Member, float] = field(default_factory=dict[Member, float])
    pending: tuple[int, Entry, PeerId] | None = None  # an Accept whose bytes are not all here
    decided: Certified | None = None
    applying: bool = False
    decided_at: float = 0.0
    # The rate of the slowest contributor, by the plan of a relayed round.
    slowest: int | None = None
    # When all others were last told of the own contribution, since too few were known.
    announced_at: float = -1e9
    # the ballot in which the own contribution is not offered: it held up the one before
    aside: int = -1

    def note_vote(self, who: Member, ballot: int, entry_hash: bytes, signature: bytes) -> None:
        """Of a member's votes the newest `VOTES_KEPT` count: in a round it votes a few times, once
        a ballot, and could otherwise have others keep as many as it sends.
        """
        voted = self.voted.setdefault(who, deque())
        if len(voted) == VOTES_KEPT:
            oldest = voted.popleft()
            self.unverified.discard((*oldest, who))
            others = self.votes.get(oldest, {})
            others.pop(who, None)
            if not others:
                self.votes.pop(oldest, None)
        voted.append((ballot, entry_hash))
        self.votes.setdefault((ballot, entry_hash), {})[who] = signature

    def note_proposal(self, who: Member, entry: Entry, needed: Set[bytes]) -> None:
        """Of the entries that a member proposes the newest `PROPOSALS_KEPT` are known, beside those
        that somebody has voted for, and those with ``needed`` hashes.
        """
        proposed, digest = self.proposed.setdefault(who, deque()), entry.hash()
        if digest in proposed:
            return
        proposed.append(digest)
        if len(proposed) > PROPOSALS_KEPT:
            oldest = proposed.popleft()
            if oldest not in needed and all(digest != oldest for _, digest in self.votes):
                self.known.pop(oldest, None)

    @property
    def first_after_s(self) -> float:
        """How long it had been open when its first contribution was there; 0 until then."""
        first = self.closing_at or self.first_ready_at
        return first - self.born if first is not None else 0.0

    def hold(self, bound: Plan | Entry, digests: tuple[bytes, ...]) -> None:
        """All result bytes with these part digests are stored here; they were reduced, or checked,
        for this plan or entry.
        """
        self.held.add((meaning(bound), digests))

    def holds(self, entry: Entry) -> bool:
        """Whether bytes are here that are the result of exactly what the entry names."""
        return (meaning(entry), entry.part_digests) in self.held

    def lacking_of(self, owner: PeerId) -> bool:
        """Whether result chunks of this owner have not arrived."""
        return self.lacking is None or owner in self.lacking_owners

    def offers(self, config: Config, kin: bool = False) -> list[Contributor]:
        """The frozen contributions offered for this round, in the order of its configuration; with
        ``kin`` those of the vector most have.
        """
        ready = [(member, self.ready[member]) for member in config if member in self.ready]
        found = [
            Contributor(member, offer.cid, offer.weight, offer.reading)
            for member, offer in ready
            if offer.cid is not None
        ]
        if not kin or not found:
            return found
        families = [offer.cid[:KIN_BYTES] for offer in found]
        largest = max(sorted(set(families)), key=families.count)
        return [offer for offer in found if offer.cid[:KIN_BYTES] == largest]
