"""The round's control messages: typed, bounded, encoded with msgpack. Nothing here has behaviour.

Every message travels in an Envelope bound to (log, round, incarnation of the sender); the run and
the sender are those of the authenticated stream. All are idempotent; loss is repaired by pull.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from .errors import RemoteProtocolError
from .foreign import PLAIN, quoted
from .group import (
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_STAR,
    NO_READING,
    Certified,
    Cid,
    Config,
    Count,
    Entry,
    Hash,
    LogName,
    Member,
    Peer,
    Plan,
    Reading,
    Vote,
)
from .identifiers import PeerId
from .layout import Layout

T = TypeVar("T")

MAX_CHUNK_LIST = 4096
MAX_MESSAGE_BYTES = 1 << 20
MAX_SITE = 64
MAX_HASHES = 1 << 19
MAX_SAMPLE_BYTES = MAX_MESSAGE_BYTES - 4096

PlanId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Span = tuple[Count, Count]
"""Chunks [first, stop)."""
Spans = Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_CHUNK_LIST)]
Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
Votes = Annotated[tuple[Vote, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """To the convener of (round, ballot): my contribution is frozen (cid), or I have nothing for
    this round (cid None).

    ``settle``: what an earlier life of mine offered is gone, and a script waits to hear so: decide
    any entry. ``site``: the label of the place where this member is; those of one place are near
    each other. Rates size parts and deadlines; who lies about them costs time, nothing else.
    ``ballot``: the one that this member is in; a convener that is in a later one than its own has
    given that up.
    """

    base: Hash
    cid: Cid | None
    weight: Count
    leave: bool
    settle: bool = False
    site: Annotated[str, msgspec.Meta(max_length=MAX_SITE, pattern=PLAIN)] = ""
    up: Count = 0  # bytes/s: see Pace
    down: Count = 0
    proven: Count = 0
    reading: Reading = NO_READING  # of the contribution
    ballot: Count = 0


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """The convener of ballot > 0: promise to ignore smaller ballots; what have you accepted?"""

    ballot: Count


class Accepted1(msgspec.Struct, frozen=True, array_like=True):
    """What an acceptor accepted last in this round."""

    ballot: Count
    entry: Entry


class Promise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """Answer to Prepare."""

    ballot: Count
    accepted: Accepted1 | None
    ready: Ready | None


class PlanMessage(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """The convener's plan; repeated until the round moves on."""

    plan: Plan


class PacedPlan(msgspec.Struct, frozen=True, array_like=True, tag="paced_plan"):
    """The convener's plan where there are relays (`modes.relays`). ``slowest``: the rate in bytes/s
    of the slowest contributor; elsewhere each member hears that in the others' Readys.
    """

    plan: Plan
    slowest: Count


class RoundCloses(msgspec.Struct, frozen=True, array_like=True, tag="closing"):
    """To the column of relays: somebody contributes to the envelope's round, after the
    entry with hash ``base``.
    """

    base: Hash


class Missing(msgspec.Struct, frozen=True, array_like=True, tag="missing"):
    """From who adds something up to the convener and the senders concerned: these contributions or
    partial sums have not (fully) arrived.
    """

    plan_id: PlanId
    lacking: Annotated[tuple[tuple[Cid, Spans], ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Disputed(msgspec.Struct, frozen=True, array_like=True, tag="disputed"):
    """From the owner of a part to all: what ``head`` and ``witness`` say of a partial sum (or what
    came of it) is not the same, so it is not used. ``wrong``: whose word was not true, once the
    owner has added up itself."""

    plan_id: PlanId
    chunk: Count
    head: Peer
    witness: Peer
    wrong: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=2)] = ()


class Need(msgspec.Struct, frozen=True, array_like=True, tag="need"):
    """To a part's owner, or who hands its result on to me: I lack these chunks of it."""

    plan_id: PlanId
    chunks: Spans


class Accept(msgspec.Struct, frozen=True, array_like=True, tag="accept"):
    """From the convener of ``ballot``: vote for this entry."""

    ballot: Count
    entry: Entry


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """A vote, to all of the configuration; in ballot 0, where there are relays, to its convener."""

    ballot: Count
    entry_hash: Hash
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class QuorumVotes(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """The votes of a quorum for an entry, where there are relays: from the convener to them, who
    ``pass_on`` it to their row.
    """

    entry_hash: Hash
    votes: Votes
    pass_on: bool


class Said(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The newest that a member said in a log: under which incarnation, in which round, and with
    which ballot it promised, voted or echoed there; -1 with none.
    """

    incarnation: Count
    round: Count
    ballot: Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Tell me what was decided from the envelope's round on.

    ``anew``: my process has just begun, and made up this number; 0: it has not. Then answer though
    nothing was decided, and tell the newest that you heard me say.
    """

    anew: Count = 0


class Catch(msgspec.Struct, frozen=True, array_like=True, tag="catch"):
    """Certified entries from the envelope's round on (a run of them; more on the next Fetch)."""

    entries: Annotated[tuple[Certified, ...], msgspec.Meta(max_length=64)]
    head: Count  # number of entries the sender has
    results_from: Count  # oldest entry whose result bytes the sender still has
    anew: Count = 0  # of the Fetch that this answers
    heard: Said | None = None  # the newest that the sender heard who asks say, where it is anew


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """I hold the state before the envelope's round; put me into the next configuration.

    ``holds`` is False while no state is here: count me among those that my invite lets in, so that
    I am given one (`round.entering`).
    """

    holds: bool = True


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Send me content: the result bytes of an entry (``name`` = entry hash) or a state (``name`` =
    its root).

    Without ``chunks`` it asks for the chunk hashes, answered by Offer; with them for these chunks,
    which come over the lane. Answered by Gone when it is no longer here.
    """

    name: Hash
    chunks: Spans


class AskState(msgspec.Struct, frozen=True, array_like=True, tag="ask_state"):
    """Which state can I have from you? Answered by Offer, bound to the round whose state it is.

    ``least``: the oldest that is of use. ``certified``: rather one that a decided entry names as
    the state before it, though it is older; results since it are kept.
    """

    certified: bool = False
    least: Count = 0


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Chunk hashes of content ``name``, 32 bytes each.

    For a state, their Merkle root is the name, the envelope's round r says "after entry r" and
    ``layout`` names its tensors. For a result, they must give the entry's part digests.
    """

    name: Hash
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_HASHES)]
    layout: Layout | None


class Seal(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    """From the organiser, signed: vote no more in the envelope's round after the entry ``base``;
    ``removed`` will never vote again.
    """

    base: Hash
    removed: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class Sealed(msgspec.Struct, frozen=True, array_like=True, tag="sealed"):
    """Answer to Seal, signed: what I accepted in this round."""

    removed: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    accepted: Accepted1 | None
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class Trial(msgspec.Struct, frozen=True, array_like=True, tag="trial"):
    """From a newcomer on probation: what I would contribute to the envelope's round, by the hashes
    of its encoded chunks, 32 bytes each.
    """

    cid: Cid
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_HASHES)]


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """The round is decided, its entry chose this chunk of my Trial; here it is, encoded."""

    cid: Cid
    chunk: Count
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_SAMPLE_BYTES)]


class Retained(msgspec.Struct, frozen=True, array_like=True, tag="retained"):
    """My contribution ``cid`` to the envelope's round encodes to chunks with this Merkle root:
    signed, and kept for an audit.
    """

    cid: Cid
    root: Hash
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """What a member says of the open round where some may lie, signed, so that others can show it:
    its contribution, and whom it would have in the next configuration (``admits``: who asks here to
    be let in; ``suspects``: who is silent here). ``number``: greater in each later claim of the
    member, over restarts too: what it no longer says counts no more."""

    base: Hash
    cid: Cid | None
    weight: Count
    reading: Reading
    leave: bool
    admits: Config
    suspects: Config
    number: Count = 0
    signature: Signature = b""


class Turn(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """I am in this ballot: where some may lie, nobody follows a convener before others have moved
    on, too.
    """

    ballot: Count


class Pledge(msgspec.Struct, frozen=True, array_like=True, tag="pledge"):
    """Answer to Prepare where some may lie: a Promise that the convener can show. ``proof``: the
    echoes for what was accepted.
    """

    ballot: Count
    accepted: Accepted1 | None
    proof: Votes
    ready: Ready | None
    signature: Signature


class Pledged(msgspec.Struct, frozen=True, array_like=True):
    """A member's pledge as the convener shows it: the hash and ballot accepted last (-1: none), and
    the signature.
    """

    member: Member
    ballot: Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]
    entry_hash: Annotated[bytes, msgspec.Meta(max_length=32)]
    signature: Signature


class Propose(msgspec.Struct, frozen=True, array_like=True, tag="propose"):
    """From the convener of ``ballot`` where some may lie: echo this entry, for these reasons.
    ``proof``: of the highest that was pledged.
    """

    ballot: Count
    entry: Entry
    claims: Annotated[tuple[tuple[Member, Claim], ...], msgspec.Meta(max_length=2 * MAX_MEMBERS)]
    pledges: Annotated[tuple[Pledged, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    proof: Votes
    signature: Signature
    reduced: Annotated[
        tuple[tuple[Peer, Signature], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ] = ()
    """Of an entry that the convener made up: what each owner of parts has signed of them."""


PartDigests = Annotated[
    tuple[tuple[Count, Hash], ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)
]


Inputs = Annotated[
    tuple[Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_STAR)], ...],
    msgspec.Meta(max_length=MAX_PARTS),
]


Receipts = Annotated[
    tuple[Annotated[tuple[Signature, ...], msgspec.Meta(max_length=MAX_STAR)], ...],
    msgspec.Meta(max_length=MAX_PARTS),
]


class Contributed(msgspec.Struct, frozen=True, array_like=True, tag="contributed"):
    """From a contributor to the owner of the chunks [first, stop) and its witnesses, where some may
    lie: what I send you of my contribution ``cid`` to these chunks has this Merkle root."""

    cid: Cid
    first: Count
    stop: Count
    root: Hash
    signature: Signature


class Account(msgspec.Struct, frozen=True, array_like=True):
    """How a member came to the parts that it states, where they have witnesses. ``inputs``: of each
    of these parts, in their order, the Merkle root of what came of each contribution;
    ``receipts``: under each of these roots the signature of who contributed it (`Contributed`).
    """

    inputs: Inputs
    receipts: Receipts
    signature: Signature


class Reduced(msgspec.Struct, frozen=True, array_like=True, tag="reduced"):
    """From the owner of parts, or a witness, to the convener, where some may lie: I have reduced
    these ``parts`` (by index in the plan), and this is what they are the result of
    (`digest.meaning`)."""

    meaning: Hash
    parts: PartDigests
    signature: Signature
    account: Account | None = None


class Echo(msgspec.Struct, frozen=True, array_like=True, tag="echo"):
    """I hold this entry's bytes and it is justified: the only one I echo in this ballot.
    ``proposed``: its convener's signature, if known.
    """

    ballot: Count
    entry_hash: Hash
    signature: Signature
    proposed: Signature


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """What you asked for is no longer here. Ask another member, or for a newer state."""

    name: Hash


Body = (
    Ready
    | Prepare
    | Promise
    | PlanMessage
    | PacedPlan
    | RoundCloses
    | Missing
    | Need
    | Accept
    | Accepted
    | QuorumVotes
    | Fetch
    | Catch
    | Join
    | Get
    | AskState
    | Offer
    | Gone
    | Seal
    | Sealed
    | Trial
    | Sample
    | Retained
    | Claim
    | Turn
    | Contributed
    | Pledge
    | Propose
    | Reduced
    | Echo
    | Disputed
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A round message and what it is bound to."""

    log: LogName
    round: Count
    incarnation: Count
    body: Body


class _Outline(msgspec.Struct, frozen=True, array_like=True):
    """An envelope whose body is still bytes."""

    log: LogName
    round: Count
    incarnation: Count
    body: msgspec.Raw


class Outline(NamedTuple):
    """What an envelope is, by a fraction of what decoding it costs: its log, the tag of its body
    ("" where it has none), the body's bytes.
    """

    log: str
    tag: str
    nbytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_outliner = msgspec.msgpack.Decoder(_Outline)


def encode(envelope: Envelope) -> bytes:
    """Wire bytes of an envelope."""
    return _encoder.encode(envelope)


def decode(data: bytes, peer: PeerId) -> Envelope:
    """Validated envelope from a peer's bytes. Raises RemoteProtocolError naming the peer."""
    if _shared is None or len(data) < SHARED_FROM:
        return _decoded(_decoder, data, peer)
    found = _shared.envelopes.get(data)
    if found is None:
        found = _decoded(_decoder, data, peer)
        _shared.keep(data, found)
    return found


def shared(name: bytes, make: Callable[[], T]) -> T:
    """What ``make`` makes, which is the same for all who make it under this name (a hash of it):
    one object for all members of a process, see `shared_decoding`. It must not be changed.
    """
    if _shared is None:
        return make()
    found = _shared.values.get(name)
    if found is None:
        found = _shared.values[name] = make()
        if len(_shared.values) > SHARED_VALUES:
            del _shared.values[next(iter(_shared.values))]
    return found


SHARED_FROM, SHARED_BYTES = 256, 32 << 20
SHARED_VALUES = 16_384


class _Shared:
    """Envelopes by their bytes, the newest `SHARED_BYTES` of these."""

    def __init__(self) -> None:
        self.envelopes: dict[bytes, Envelope] = {}
        self.values: dict[bytes, Any] = {}
        self._nbytes = 0

    def keep(self, data: bytes, envelope: Envelope) -> None:
        self.envelopes[data] = envelope
        self._nbytes += len(data)
        while self._nbytes > SHARED_BYTES:
            oldest = next(iter(self.envelopes))
            del self.envelopes[oldest]
            self._nbytes -= len(oldest)


_shared: _Shared | None = None


@contextmanager
def shared_decoding() -> Generator[None]:
    """While many members live in one process: what one has decoded, others are handed. Envelopes
    are immutable, so nobody notices, and one entry of a thousand members is there once.
    """
    global _shared
    before, _shared = _shared, _Shared()
    try:
        yield
    finally:
        _shared = before


def outline(data: bytes, peer: PeerId) -> Outline:
    """What `decode` would make of these bytes, whose body is not looked into. Raises
    RemoteProtocolError naming the peer.
    """
    found = _decoded(_outliner, data, peer)
    body = bytes(found.body)
    at = 1 if 0x90 <= body[0] <= 0x9F else 3  # an array of fewer than 16, or of fewer than 65,536
    length = body[at] - 0xA0 if at < len(body) else -1  # of a string of fewer than 32 bytes
    tag = body[at + 1 : at + 1 + length] if 0 <= length < 32 else b""
    return Outline(found.log, tag.decode("ascii", "replace"), len(body))


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes, peer: PeerId) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"control message of {len(data)} bytes, limit {MAX_MESSAGE_BYTES}", peer=peer
        )
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed control message: {quoted(error)}", peer=peer
        ) from None
