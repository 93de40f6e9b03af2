"""Votes and certificates: what is signed, and when a chain of entries may be believed without
asking anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from ..codecs.ranges import ranges_of
from ..errors import ConfigError, RemoteProtocolError
from ..group import Certified, Config, Member, Vote, is_quorum
from ..identifiers import PeerId
from ..messages import Sealed

Verify = Callable[[PeerId, bytes, bytes], bool]
"""(peer, payload, signature) -> valid"""


def vote_payload(
    run: str, log: str, round_: int, base: bytes, ballot: int, entry_hash: bytes
) -> bytes:
    """The bytes under a vote's signature. ``base``, the hash of the entry before, says of which
    history the round is: after a disk was lost, or a run founded or recertified anew, the same peer
    may vote in a round of the same number again."""
    return msgspec.msgpack.encode(("atoll/vote/2", run, log, round_, base, ballot, entry_hash))


def genesis_payload(run: str, entry_hash: bytes) -> bytes:
    """The bytes under the organiser's signature of a genesis entry."""
    return msgspec.msgpack.encode(("atoll/genesis/1", run, entry_hash))


def seal_payload(run: str, log: str, round_: int, base: bytes, removed: Config) -> bytes:
    """The bytes under the organiser's signature of a seal."""
    return msgspec.msgpack.encode(("atoll/seal/1", run, log, round_, base, removed))


def sealed_payload(run: str, log: str, round_: int, base: bytes, body: Sealed) -> bytes:
    """The bytes under the signature of an answer to a seal."""
    return msgspec.msgpack.encode(
        ("atoll/sealed/1", run, log, round_, base, body.removed, body.accepted)
    )


def recertified_payload(
    run: str, log: str, round_: int, entry_hash: bytes, removed: Config
) -> bytes:
    """The bytes under the organiser's signature that stands for the votes of a quorum."""
    return msgspec.msgpack.encode(("atoll/recertified/1", run, log, round_, entry_hash, removed))


def check_genesis(
    certified: Certified, *, run: str, organiser: PeerId, verify: Verify, peer: PeerId
) -> None:
    """Raise RemoteProtocolError unless the organiser signed this genesis of ``run``, and it names a
    codec that there is.
    """
    entry = certified.entry
    well_formed = (
        entry.round == 0 and not entry.contributors and entry.next_config and certified.votes
    )
    try:
        ranges_of(entry.codec, entry.numel)
    except ConfigError as error:
        raise RemoteProtocolError(f"genesis entry: {error.message}", peer=peer) from None
    if not well_formed or not verify(
        organiser, genesis_payload(run, entry.hash()), certified.votes[0].signature
    ):
        raise RemoteProtocolError("genesis entry is not signed by the run's organiser", peer=peer)


def check_log(
    entries: Sequence[Certified],
    *,
    run: str,
    log: str,
    base: bytes,
    config: Config,
    organiser: PeerId | None,
    verify: Verify,
    peer: PeerId,
    tolerated: int = 0,
) -> list[Certified]:
    """Raise RemoteProtocolError unless ``entries`` continue the log after the entry with hash
    ``base`` and next_config ``config``.

    Every entry must carry valid votes of a quorum of its configuration under one ballot, or the
    organiser's signature over removed members (but for a run in which ``tolerated`` members may
    lie: its organiser's word is one of many).

    Returns the entries with the votes that members have signed, and no others: a certificate that
    is valid may be padded with votes that nobody gave, and what a member is held to have voted
    decides whether its home is an old copy.
    """
    found = list[Certified]()
    for certified in entries:
        entry = certified.entry
        if entry.base != base or entry.log != log:
            raise RemoteProtocolError(f"entry {entry.round} does not continue the log", peer=peer)
        digest = entry.hash()
        if certified.removed and not tolerated:
            payload = recertified_payload(run, log, entry.round, digest, certified.removed)
            signed = [vote for vote in certified.votes if vote.member.peer == organiser]
            if (
                organiser is None
                or len(signed) != 1
                or not verify(organiser, payload, signed[0].signature)
            ):
                raise RemoteProtocolError(
                    f"entry {entry.round} is not recertified by the run's organiser", peer=peer
                )
            found.append(_with_votes(certified, signed))
            base, config = digest, entry.next_config
            continue
        ballots = {vote.ballot for vote in certified.votes}
        if len(ballots) != 1:
            raise RemoteProtocolError(
                f"certificate of entry {entry.round} mixes ballots", peer=peer
            )
        payload = vote_payload(run, log, entry.round, base, ballots.pop(), digest)
        members, given = set(config), dict[Member, Vote]()
        for vote in certified.votes:
            if vote.member in members and verify(vote.member.peer, payload, vote.signature):
                given.setdefault(vote.member, vote)
        if not is_quorum(config, set(given), organiser, tolerated) or certified.removed:
            raise RemoteProtocolError(
                f"certificate of entry {entry.round} has no quorum", peer=peer
            )
        found.append(_with_votes(certified, given.values()))
        base, config = digest, entry.next_config
    return found


def _with_votes(certified: Certified, votes: Collection[Vote]) -> Certified:
    if len(votes) == len(certified.votes):
        return certified
    return msgspec.structs.replace(certified, votes=tuple(votes))
