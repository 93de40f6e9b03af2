"""How long a reduction may take before somebody is to blame: from measured rates and round-trip
times, so that nobody need guess them.

Slow is not dead: on a slow or far link the next chunk takes its time, and asking again, or planning
anew, would only add to the load.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING

from ..codec import Grid
from ..group import Plan
from ..identifiers import PeerId
from ..messages import Ready
from ..pace import Pace
from .state import Shape

if TYPE_CHECKING:
    from .machine import RoundMachine

UNMEASURED = 1_000_000  # bytes/s of a link that nobody has measured yet
SLOWEST = 100_000  # bytes/s; who says less would make everybody wait
RTT_MOST_S = 5.0


def rate(said: Ready | Pace) -> int:
    """What a member's rates are good for, in bytes/s: the smaller of those known, else what it has
    proven.
    """
    return max(
        SLOWEST,
        min(
            [known for known in (said.up, said.down) if known > 0],
            default=max(UNMEASURED, said.proven),
        ),
    )


def rtt_s(machine: RoundMachine) -> float:
    """Round-trip time to the furthest member."""
    return min(RTT_MOST_S, machine.actions.pace().rtt_s)


def silence_s(machine: RoundMachine, peers: Collection[PeerId]) -> float:
    """For how long these may be silent while they live, as far as packets are lost on the way; 0
    where none are.
    """
    silences = machine.actions.pace().silences
    return max((silences.get(peer, 0.0) for peer in peers), default=0.0) if silences else 0.0


def gap_s(machine: RoundMachine) -> float:
    """The longest that a living source's next chunk takes: where its link, or ours, is shared by
    lanes to everybody.
    """
    slowest = min(
        [
            rate(machine.actions.pace()),
            *(rate(ready) for ready in machine.open.ready.values() if ready.cid is not None),
        ]
    )
    return (len(machine.config) - 1) * max(_chunk_bytes(machine.shape)) / slowest


def stuck_s(machine: RoundMachine) -> float:
    """A reduction without a new chunk for this long is stuck."""
    return max(
        machine.timing.revise_s,
        3 * gap_s(machine) + 4 * rtt_s(machine),
        silence_s(machine, machine.others),
    )


def silent_s(machine: RoundMachine, pulls: float) -> float:
    """A source that sent nothing for this long is asked again: after so many pulls, or later on a
    link that is slow or far.
    """
    return max(pulls * machine.timing.pull_s, 2 * gap_s(machine) + 2 * rtt_s(machine))


def transfer_s(machine: RoundMachine, plan: Plan) -> float:
    """How long the bytes of a plan take at the announced rates."""
    members, (part_bytes, result_bytes) = len(machine.config), _chunk_bytes(machine.shape)
    ready = {member.peer: offer for member, offer in machine.open.ready.items()}
    owned: dict[str, int] = {}
    for part in plan.parts:
        owned[part.owner] = owned.get(part.owner, 0) + part.stop - part.first
    longest = 0.0
    for contributor in plan.contributors:
        offer = ready.get(contributor.member.peer)
        own = owned.get(contributor.member.peer, 0)
        nbytes = (plan.chunks - own) * part_bytes + max(1, members - 1) * own * result_bytes
        longest = max(longest, nbytes / (rate(offer) if offer else UNMEASURED))
    return longest


@lru_cache(maxsize=64)
def _chunk_bytes(shape: Shape) -> tuple[int, int]:
    grid = Grid(shape.codec, shape.numel, shape.chunk_elements)
    return grid.wire_bytes(0), grid.results.wire_bytes(0)
