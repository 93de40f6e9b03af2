"""How long a reduction may take before somebody is to blame. Pure functions of measured rates and
round-trip times, so that nobody has to configure timeouts for slow links.

Slow is not dead: on a slow or far link the next chunk takes its time, and asking again, or planning
anew, would only add to the load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from ..codecs.codec import Chunking
from ..group import Plan
from ..identifiers import PeerId
from ..messages import Ready
from ..pace import Pace
from ..witnesses import stated_by
from .state import Shape
from .timing import Timing

UNMEASURED = 1_000_000  # bytes/s of a link that nobody has measured yet
SLOWEST = 100_000  # bytes/s; a member that reports less would make everybody wait
RTT_MOST_S = 5.0
# where members may lie: results that others already have are late here after so many pulls
PULLS_ALL_BUT = 3.0


def rate(reported: Ready | Pace) -> int:
    """The rate to expect of a member in bytes/s: the smaller of its known link rates, else what it
    has proven.
    """
    return max(
        SLOWEST,
        min(
            [known for known in (reported.up, reported.down) if known > 0],
            default=max(UNMEASURED, reported.proven),
        ),
    )


def rtt_s(pace: Pace) -> float:
    """Round-trip time to the furthest member, as this member has measured it."""
    return min(RTT_MOST_S, pace.rtt_s)


def silence_s(pace: Pace, peers: Collection[PeerId]) -> float:
    """How long these peers may be silent though they live, because packets are lost on the way to
    them; 0 where none are.
    """
    silences = pace.silences
    return max((silences.get(peer, 0.0) for peer in peers), default=0.0) if silences else 0.0


def gap_s(rates: Iterable[int], members: int, chunk_bytes: int) -> float:
    """The longest time between two chunks of a living source: the slowest of ``rates`` (bytes/s),
    shared by lanes to all other members.
    """
    return (members - 1) * chunk_bytes / min(rates)


def stuck_s(timing: Timing, gap_s: float, rtt_s: float, silence_s: float) -> float:
    """A reduction is stuck when no new chunk came for this long."""
    return max(timing.revise_s, 3 * gap_s + 4 * rtt_s, silence_s)


def silent_s(timing: Timing, pulls: float, gap_s: float, rtt_s: float) -> float:
    """A source that sent nothing for this long is asked again: after so many ``pulls``, or later on
    a link that is slow or far.
    """
    return max(pulls * timing.pull_s, 2 * gap_s + 2 * rtt_s)


def transfer_s(
    plan: Plan,
    ready: Mapping[PeerId, Ready],
    members: int,
    chunk_bytes: tuple[int, int],
    witnesses: int = 0,
) -> float:
    """How long the bytes of a plan take at the announced rates. ``chunk_bytes``: of a contribution
    and of a result; ``witnesses``: of each part, to which contributions go, too.
    """
    part_bytes, result_bytes = chunk_bytes
    owned, stated = dict[str, int](), dict[str, int]()
    for part, peers in zip(plan.parts, stated_by(plan, witnesses), strict=True):
        owned[part.owner] = owned.get(part.owner, 0) + part.stop - part.first
        for peer in peers:
            stated[peer] = stated.get(peer, 0) + part.stop - part.first
    sent = plan.chunks * min(witnesses + 1, max(1, len(plan.contributors)))
    longest = 0.0
    for contributor in plan.contributors:
        offer = ready.get(contributor.member.peer)
        own = owned.get(contributor.member.peer, 0)
        kept = stated.get(contributor.member.peer, 0)
        nbytes = (sent - kept) * part_bytes + max(1, members - 1) * own * result_bytes
        longest = max(longest, nbytes / (rate(offer) if offer else UNMEASURED))
    return longest


@lru_cache(maxsize=64)
def chunk_bytes(shape: Shape) -> tuple[int, int]:
    """Bytes of a whole chunk on the wire: of a contribution, and of a result."""
    chunking = Chunking(shape.codec, shape.numel, shape.chunk_elements)
    return chunking.wire_bytes(0), chunking.results.wire_bytes(0)
