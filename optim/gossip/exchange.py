"""What gossip asks of a network: the mean of one tensor with some other peer's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...collectives.averaging import average
from ...collectives.swarm import Swarm

Exchange = Callable[[Tensor], None]
"""Replaces a contiguous float32 tensor by its mean with the tensor that one other peer gives to the
same exchange. Leaves it as it was where no other came: a step is then one's own."""


def over_swarm(
    swarm: Swarm, name: str, *, first: int = 0, codec: str = "fp32", deadline_s: float = 60.0
) -> Exchange:
    """Exchanges with a member drawn anew each time, by `average` with ``plan="gossip"``.

    The number of an exchange is part of its operation's id, and all members count alike: they call
    it equally often. A peer that comes later begins with ``first`` = the number the others are at.
    An exchange raises what `Swarm.operate` raises.
    """
    number = first

    def exchange(tensor: Tensor) -> None:
        nonlocal number
        op_id, number = f"{name}/{number}", number + 1
        average(
            swarm,
            tensor,
            op_id=op_id,
            plan="gossip",
            rounds=1,
            codec=codec,
            deadline_s=deadline_s,
        ).wait()

    return exchange
