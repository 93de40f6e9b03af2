"""What gossip asks of a network: the mean of one tensor with some other peer's, or a group's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....collectives.api import call_of
from ....collectives.averaging import average
from ....collectives.plain import DEVICES, agreed, kind_of, operate
from ....collectives.swarm import Swarm

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


def over_group(
    swarm: Swarm,
    name: str,
    group: str = "",
    *,
    first: int = 0,
    codec: str = "fp32",
    deadline_s: float = 60.0,
) -> Exchange:
    """Exchanges with all members of a run, or of this member's ``group`` of it, such as a line of a
    grid, ``2x4.1`` (`collectives.groups`). The result is the same, bit for bit, for all whose
    exchange is decided. Named and numbered as those of `over_swarm`.

    A group of machines that stand together is a run of its own: `over_group(island, ...)` beside
    `over_group(world, ...)`. An exchange raises what `Swarm.operate` raises.
    """
    number = first

    def exchange(tensor: Tensor) -> None:
        nonlocal number
        op_id, number = f"{name}/{number}", number + 1
        kind = kind_of(tensor, devices=DEVICES)
        call = call_of(op_id, "mean", deadline_s, False, codec=codec, tag=kind, group=group)
        flat = tensor.view(-1)
        operating = operate(swarm, call, flat)
        if agreed(operating.wait(None)).status == "committed":
            operating.copy_into(flat)
        operating.release()

    return exchange
