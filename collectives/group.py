"""Who takes part: members, configurations, quorums, plans and log entries. Frozen values, pure
functions.

The round protocol over them is specified in docs/internals/protocol/round.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from .foreign import PLAIN, WORDS
from .identifiers import HASH_BYTES, PeerId

MAX_MEMBERS = 4096  # of a run whose plan is a tree: what an entry in one message can name
MAX_STAR = 256  # where each member's share of a round grows with their number (`bounds`)
MAX_PARTS = MAX_STAR
MAX_PEER_ID = 128
MAX_CODEC_NAME = 64
MAX_LOG_NAME = 208
MAX_CERTIFICATE = 512
INVITE_ID = 16

Peer = Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
CID_BYTES = 16
Cid = Annotated[bytes, msgspec.Meta(min_length=CID_BYTES, max_length=CID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
LAST_BALLOT = 1 << 48  # the last that can be said; nobody comes there by the clock
Short = Annotated[str, msgspec.Meta(max_length=MAX_CODEC_NAME, pattern=PLAIN)]
TopologyKind = Literal["butterfly", "ring", "two-level", "checked", "three-level"]
LogName = Annotated[str, msgspec.Meta(max_length=MAX_LOG_NAME, pattern=WORDS)]


class Member(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A peer in one life. One that lost its journal comes back under a larger incarnation."""

    peer: Peer
    incarnation: Count


Loss = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]


class Evaluated(msgspec.Struct, frozen=True, array_like=True):
    """What a member's script found when it evaluated the model on held-out data (`RunSettings`,
    ``evaluate``), beside the ``loss`` of its inner steps.

    ``anchor``: right after it had adopted a round's result; ``own``: just before, on the same data;
    ``before``: after the adoption that it evaluated before this one.
    """

    loss: Loss | None
    anchor: Loss
    own: Loss
    before: Loss | None = None


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of its contribution beside the vector: its own word, which the entry
    records. None: it does not say.

    ``told``: the mean loss of the inner steps in it, and what an evaluation found where there was
    one (`loss`, `evaluated`); ``norm``: that of the vector, without running
    statistics, or, of the mean of a masked sum, the bound on the next vectors', or, where a rule
    goes by it, how far contributions lay from the results of rounds before; ``lag``: how many inner
    steps its rounds last took to be decided, or, where members make turns of their own, how many
    seconds one takes it.
    """

    # Both in one field, so that who says nothing of evaluations has the bytes, and entries have the
    # hashes, that they had before there were any.
    told: Loss | Evaluated | None = None
    norm: Annotated[float, msgspec.Meta(ge=0, le=1e30)] | None = None
    lag: Annotated[float, msgspec.Meta(ge=0, le=1e30)] | None = None

    @property
    def loss(self) -> float | None:
        """The mean loss of the inner steps."""
        return self.told.loss if isinstance(self.told, Evaluated) else self.told

    @property
    def evaluated(self) -> Evaluated | None:
        """What an evaluation found."""
        return self.told if isinstance(self.told, Evaluated) else None


NO_READING = Reading()

Config = Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
"""The acceptors of one log entry, sorted."""


class Contributor(msgspec.Struct, frozen=True, array_like=True):
    """One frozen contribution: whose, which buffer, how many samples it stands for, and what its
    member says of it.
    """

    member: Member
    cid: Cid
    weight: Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
    reading: Reading = NO_READING


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Chunks [first, stop) of the flat vector and the member that reduces them."""

    owner: Peer
    first: Count
    stop: Count


Places = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)], ...],
    msgspec.Meta(max_length=MAX_MEMBERS),
]
"""A number for each contributor, the same for those at one place."""


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """On which ways contributions reach the owner of a part, and its result the members: what
    `trees.py` makes its trees of.

    ``groups``: a number for each contributor, the same for those at one site; empty: everybody is a
    site of its own. ``hosts``: with three levels, a number of the same kind for those on one host,
    which is at one site; else empty.
    """

    kind: TopologyKind = "butterfly"
    groups: Places = ()
    hosts: Places = ()

    @property
    def named(self) -> tuple[object, ...]:
        """What is hashed of it: without hosts it is what it was before there were any."""
        return (self.kind, self.groups, self.hosts) if self.hosts else (self.kind, self.groups)

    @property
    def levels(self) -> tuple[Places, ...]:
        """Where contributors are, by place: sites first, then what lies within them."""
        return (self.groups, self.hosts) if self.hosts else (self.groups,) if self.groups else ()

    def fault(self, contributors: int) -> str | None:
        """Why these are no ways or places of so many contributors, or None."""
        if contributors > MAX_STAR and self.kind in ("butterfly", "ring"):
            return f"{contributors:,} contributors in a {self.kind}: at most {MAX_STAR}"
        for what, places in (("groups", self.groups), ("hosts", self.hosts)):
            if len(places) not in (0, contributors):
                return f"{len(places)} {what} of {contributors} contributors"
        if self.hosts and self.kind != "three-level":
            return f"hosts in a {self.kind} plan"
        if self.hosts and len({*zip(self.groups, self.hosts, strict=False)}) != len({*self.hosts}):
            return "a host at several sites"
        return None


BUTTERFLY = Topology()


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """By what a peer enters that is in no configuration before: the certificate that it has shown,
    and what of its invite is counted.

    ``invite`` is the invite's id, ``uses`` how many peers it lets in, 0 for any number; times are
    seconds since 1970, UTC, as the organiser signed them. What this layer counts by; whether it is
    what the certificate says, `round.entering.Doors` tells.
    """

    peer: Peer
    certificate: Annotated[bytes, msgspec.Meta(max_length=MAX_CERTIFICATE)]
    invite: Annotated[bytes, msgspec.Meta(max_length=INVITE_ID)] = b""
    uses: Count = 0
    issued_s: Count = 0
    expires_s: Count = 0


class SpentWord(msgspec.Struct, frozen=True, array_like=True):
    """A site's signature that it may spend no more of its privacy in the run."""

    peer: Peer
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class Plan(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """How the open round is to be reduced: revision ``revision`` of ballot ``ballot`` of entry
    ``round`` of ``log``.

    ``chunk_elements`` is the fixed chunking: chunk c covers elements [c*chunk_elements,
    (c+1)*chunk_elements). ``contributors`` is the order of reduction. The parts cover all chunks,
    in order, without gaps.
    """

    log: LogName
    round: Count
    ballot: Count
    revision: Count
    base: Hash
    contributors: Annotated[tuple[Contributor, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_PARTS)]
    numel: Count
    chunk_elements: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
    codec: Short
    reducer: Short = "mean"
    topology: Topology = BUTTERFLY

    @cached_property
    def plan_id(self) -> bytes:
        """16 bytes that name this plan."""
        return blake3(b"atoll/plan/1" + msgspec.msgpack.encode(self)).digest(16)

    @property
    def chunks(self) -> int:
        return -(-self.numel // self.chunk_elements)


class Entry(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Entry ``round`` of a log: everything the round changes. Entry 0 is the genesis, signed by the
    organiser.

    ``base`` is the hash of the entry before; ``base_state`` the Merkle root of (anchor, momentum)
    before this entry is applied (of the initial state, for the genesis and entry 1). Without
    contributors the entry only changes the configuration. ``elapsed_s``: seconds since the entry
    before, by the clock of whoever proposes it; said only where members come in groups
    (`modes.arrivals`). ``admitted``: by what peers come in that the configuration before does not
    name; ``tally``: the hash of whom limited invites have let in after it, empty for nobody
    (`round.entering`). ``spent``: what members have said of themselves that no entry before has, in
    a run with noise.
    """

    log: LogName
    round: Count
    base: Hash
    base_state: Hash
    contributors: Annotated[tuple[Contributor, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_PARTS)]
    part_digests: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_PARTS)]
    numel: Count
    chunk_elements: Count
    codec: Short
    reducer: Short
    next_config: Config
    topology: Topology = BUTTERFLY
    elapsed_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    admitted: Annotated[tuple[Admitted, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    tally: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)] = b""
    spent: Annotated[tuple[SpentWord, ...], msgspec.Meta(max_length=MAX_STAR)] = ()

    def counts(self, peer: PeerId, cid: bytes) -> bool:
        """Whether this contribution of this peer is in it: a liar may have named one of the same
        cid as its own.
        """
        return any(c.cid == cid and c.member.peer == peer for c in self.contributors)

    def hash(self) -> bytes:
        """blake3 of the canonical encoding, in which an entry ends before the fields that say
        nothing (``spent``, and both ``admitted`` and ``tally``), and a topology without hosts
        before those: so logs from before there were such fields keep their hashes.
        """
        return self._hash

    @cached_property
    def _hash(self) -> bytes:
        topology = self.topology
        fields = tuple(
            topology.named if each is topology else each for each in msgspec.structs.astuple(self)
        )
        said = 0 if self.spent else 1 if self.admitted or self.tally else 3
        named = fields[: len(fields) - said]
        return blake3(b"atoll/entry/1" + msgspec.msgpack.encode(named)).digest()


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """One acceptor's signature under (run, log, round, ballot, entry hash)."""

    member: Member
    ballot: Count
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class Certified(msgspec.Struct, frozen=True, array_like=True):
    """An entry with the votes of a quorum under one ballot (for the genesis: the organiser's
    signature).

    ``removed``: members that never vote again, on the organiser's word: its signature over them
    stands for the votes (`modes.sealing`).
    """

    entry: Entry
    votes: Annotated[tuple[Vote, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    removed: Config = ()


def least_members(tolerated: int) -> int:
    """How many members bear ``tolerated`` that lie: below, a run is being founded."""
    return 3 * tolerated + 1 if tolerated else 1


def is_quorum(
    config: Config, voters: Collection[Member], organiser: PeerId | None, tolerated: int = 0
) -> bool:
    """Whether ``voters`` decide for ``config``: a majority of it, or exactly half including the
    organiser's member.

    Any two quorums of one configuration intersect. Where ``tolerated`` members may lie, two have
    one more than these in common, the organiser's counts as any other; and it decides alone until
    there are `least_members`.
    """
    yes = set(config).intersection(voters)
    if tolerated:
        founding = len(config) < least_members(tolerated)
        return (
            any(member.peer == organiser for member in yes)
            if founding
            else len(yes) > (len(config) + tolerated) // 2
        )
    if 2 * len(yes) > len(config):
        return True
    return 2 * len(yes) == len(config) and any(member.peer == organiser for member in yes)


def conveners(run: str, log: str, round_: int, config: Config) -> list[Member]:
    """Who owns which ballot of a round: sorted by hash(run, log, round, peer), ballots in turn.
    Opinion does not enter. The list is shared by all who ask for it: not to be changed.
    """
    for name, members, order in tuple(_sorted):
        if members is config and name == (run, log, round_):
            return order

    def key(member: Member) -> bytes:
        return blake3(
            msgspec.msgpack.encode(("atoll/convener/1", run, log, round_, member.peer))
        ).digest()

    order = sorted(config, key=key)
    if len(config) > MAX_SHORT:
        _sorted.append(((run, log, round_), config, order))
    return order


MAX_SHORT = 32  # members whose order is made anew each time
_sorted: deque[tuple[tuple[str, str, int], Config, list[Member]]] = deque(maxlen=8)
"""Orders of conveners that were asked for last."""


def convener(run: str, log: str, round_: int, ballot: int, config: Config) -> Member:
    """The one owner of a ballot."""
    return conveners(run, log, round_, config)[ballot % len(config)]
