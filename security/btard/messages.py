"""What peers say in a step of BTARD: typed, bounded, signed. Peers are named by their number in the
roster of the attempt.

Each of `Commit` to `Judgement` has one slot per sender and attempt: two that differ, signed by one
peer for one attempt, convict it. From the second on each names the view that its sender has of the
messages of the stage before (`Table.view`), so that who was told something else is found at once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ...collectives.foreign import PLAIN
from ...collectives.identifiers import HASH_BYTES, PeerId, RunId
from ..identity import Identity

DOMAIN = "atoll/btard/1"
MAX_PEERS = 256
MAX_BODY = HASH_BYTES * MAX_PEERS + 1024
TAG_BYTES = 8
FLOAT = np.dtype("<f4")
Vector = NDArray[np.float32]

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PEERS)]
Floats = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_PEERS)]
Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Kind(IntEnum):
    """What there can be one of in an attempt: messages by sender, vectors by maker and part."""

    COMMIT = 1
    RESULT = 2
    REVEAL = 3
    RESIDUALS = 4
    CHECKS = 5
    JUDGEMENT = 6
    PART = 7  # of a gradient, to the owner of that part
    AGGREGATE = 8  # of a part, by its owner
    STATES = 9  # both ends of an interval of the last step's trail


SLOTTED = (Kind.COMMIT, Kind.RESULT, Kind.REVEAL, Kind.RESIDUALS, Kind.CHECKS, Kind.JUDGEMENT)
Item = tuple[Annotated[int, msgspec.Meta(ge=1, le=9)], Number, Number]
"""(kind, whose, part): a message (part 0) or a vector that somebody lacks."""
Items = Annotated[tuple[Item, ...], msgspec.Meta(min_length=1, max_length=2 * MAX_PEERS)]


class Fault(IntEnum):
    """Why a peer is removed."""

    EQUIVOCATION = 1  # two messages for one slot
    NONSENSE = 2  # signed bytes that are no message
    REVEAL = 3  # a draw that is not the one committed to
    WITHHELD = 4  # what more than half testify not to have got
    RESIDUAL = 5  # projections or norms that its part does not have
    AGGREGATE = 6  # a result that is not the fixed point
    GRADIENT = 7  # not the gradient of its seed
    ACCUSATION = 8  # of an honest peer


class Context(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """What all signatures of an attempt are bound to: run, step, the hash of the state it starts
    from, and its peers in order.
    """

    run: Annotated[RunId, msgspec.Meta(max_length=64, pattern=PLAIN)]
    step: Step
    state: Hash
    roster: Annotated[
        tuple[Annotated[PeerId, msgspec.Meta(min_length=1, max_length=128, pattern=PLAIN)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_PEERS),
    ]

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name all of it."""
        return blake3(b"atoll/btard/context\0" + msgspec.msgpack.encode(self)).digest()

    @property
    def tag(self) -> bytes:
        """How messages name their attempt."""
        return self.digest[:TAG_BYTES]


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.COMMIT)):
    """Commitments to the parts of the sender's gradient, in the order of their owners; empty from a
    validator. ``trail``: to its states on the way, where there are local steps."""

    parts: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES * MAX_PEERS)]
    trail: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)] = b""


class Result(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.RESULT)):
    """Commitments to the aggregate of the sender's part, and to its share of the draw."""

    seen: Hash
    aggregate: Hash
    share: Hash


class Reveal(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.REVEAL)):
    """The sender's share of the draw."""

    seen: Hash
    share: Hash


class Residuals(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.RESIDUALS)):
    """By part, float32: projections of the sender's clipped residual on the drawn direction, and
    norms of the residual; empty from a validator.
    """

    seen: Hash
    projections: Floats
    norms: Floats


class Accusation(msgspec.Struct, frozen=True, array_like=True):
    """The sender of the Checks says that a peer's residual of the sender's part is wrong, or the
    last gradient of its target. Everybody looks at the bytes: who is wrong leaves, the accused or
    the accuser."""

    fault: Annotated[int, msgspec.Meta(ge=int(Fault.RESIDUAL), le=int(Fault.ACCUSATION))]
    whom: Number


class Checks(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.CHECKS)):
    """Whom the sender accuses: mostly nobody."""

    seen: Hash
    accusations: Annotated[tuple[Accusation, ...], msgspec.Meta(max_length=MAX_PEERS)]


class GuiltyVerdict(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Somebody is guilty of something."""

    whom: Number
    fault: Annotated[int, msgspec.Meta(ge=int(Fault.RESIDUAL), le=int(Fault.ACCUSATION))]


class Judgement(msgspec.Struct, frozen=True, array_like=True, tag=int(Kind.JUDGEMENT)):
    """Whom the sender finds guilty after it has looked at all that was open."""

    seen: Hash
    verdicts: Annotated[tuple[GuiltyVerdict, ...], msgspec.Meta(max_length=MAX_PEERS)]


class VectorRequest(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Send me this. A part of a gradient: let everybody have it."""

    items: Items


class Lacking(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """A testimony: I asked for this, and nobody sent it."""

    items: Items


Slotted = Commit | Result | Reveal | Residuals | Checks | Judgement
Body = Slotted | VectorRequest | Lacking


class Signed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One message. ``tag``: of its attempt's context, which the signature covers."""

    step: Step
    tag: Annotated[bytes, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
    sender: Number
    body: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_BODY)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Bundle(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Evidence: messages of one attempt that prove a fault of peer number ``whom``
    (`evidence.verify_evidence`).
    """

    context: Context
    fault: Annotated[int, msgspec.Meta(ge=1, le=8)]
    whom: Number
    item: Item | None
    messages: Annotated[tuple[Signed, ...], msgspec.Meta(min_length=1, max_length=MAX_PEERS)]


class CommittedVector(NamedTuple):
    """A vector, for which its commitment vouches. ``path``: of states on a trail, the hashes of all
    its states.
    """

    step: int
    tag: bytes
    item: tuple[int, int, int]
    values: Vector
    path: tuple[bytes, ...] = ()


Frame = Signed | Bundle | CommittedVector
Verify = Callable[[PeerId, str, bytes, bytes], bool]
"""(peer, domain, data, signature) -> whether ``peer`` signed this (`identity.verify`)."""

_decoder = msgspec.msgpack.Decoder(Body)


def decode(body: bytes) -> Body | None:
    """What was signed; None where it is no message."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def sign(context: Context, signer: Identity, body: Body) -> Signed:
    """``body`` as its sender's message in this attempt."""
    return sign_bytes(context, signer, msgspec.msgpack.encode(body))


def sign_bytes(context: Context, signer: Identity, data: bytes) -> Signed:
    """`sign` of a body that is encoded."""
    number = context.roster.index(signer.peer)
    return Signed(
        context.step,
        context.tag,
        number,
        data,
        signer.sign(DOMAIN, _covered(context, number, data)),
    )


def is_signed(context: Context, signed: Signed, verify: Verify) -> bool:
    """Whether it is its sender's message in this attempt."""
    if (
        signed.tag != context.tag
        or signed.step != context.step
        or signed.sender >= len(context.roster)
    ):
        return False
    return verify(
        context.roster[signed.sender],
        DOMAIN,
        _covered(context, signed.sender, signed.body),
        signed.signature,
    )


def _covered(context: Context, sender: int, body: bytes) -> bytes:
    return context.digest + sender.to_bytes(2, "big") + body


def fits(body: Body, peers: int) -> bool:
    """Whether ``body`` can be said by anybody in an attempt of so many peers."""
    match body:
        case Commit(parts, trail):
            return len(parts) in (0, HASH_BYTES * peers) and len(trail) in (0, HASH_BYTES)
        case Residuals(_, projections, norms):
            return (
                len(projections) == len(norms)
                and len(norms) in (0, 4 * peers)
                and all(_finite(each) for each in (projections, norms))
            )
        case Checks(_, accusations):
            return all(each.whom < peers for each in accusations)
        case Judgement(_, verdicts):
            return all(each.whom < peers for each in verdicts)
        case VectorRequest(items) | Lacking(items):
            places = {kind: peers if kind == Kind.PART else 1 for kind in Kind}
            return all(whose < peers and part < places[Kind(kind)] for kind, whose, part in items)
        case _:
            return True


def _finite(data: bytes) -> bool:
    return bool(np.isfinite(np.frombuffer(data, FLOAT)).all())
