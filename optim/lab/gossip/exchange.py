"""What gossip asks of a network: the mean of one tensor with some other peer's, or a group's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ....collectives.api import call_of
from ....collectives.averaging import mixed, pair_name
from ....collectives.errors import ConfigError
from ....collectives.identifiers import PeerId
from ....collectives.outcomes import Outcome
from ....collectives.plain import DEVICES, agreed, flat_of, kind_of, operate
from ....collectives.script_swarm import Swarm
from ....collectives.series import MAX_SERIES_NAME, Series, series_tag


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What became of an exchange.

    ``how``: "mean", the tensor is the mean over ``peers``, this one among them, which hold it, too;
    "mixed", they were decided without this peer, and the tensor is the mean of theirs and its own
    (theirs hold nothing of it); "own", nobody else came, or nothing was decided, and the tensor is
    as it was. ``number``: of the exchange. ``outcome``: of its operation.

        exchange = over_swarm(swarm, "weights")
        done = exchange(flat)  # float32, contiguous
        alone = done is not None and done.how == "own"
    """

    how: Literal["mean", "mixed", "own"]
    peers: tuple[PeerId, ...]
    number: int
    outcome: Outcome


LATE = 3
"""Exchanges in a row that a peer may find decided without it before it mixes one in."""

Exchange = Callable[[Tensor], Exchanged | None]
"""Replaces a contiguous float32 tensor by its mean with the tensor that one other peer gives to the
same exchange. Leaves it as it was where no other came: a step is then one's own. Says which, if it
knows.
"""


def over_swarm(
    swarm: Swarm, name: str, *, first: int = 0, codec: str = "fp32", deadline_s: float = 60.0
) -> Exchange:
    """Exchanges with a member drawn anew each time, all of which count alike.

    The number of an exchange is part of its operation's id. A peer goes on at the number at which
    another waits for it: one that is slow, new, or was started again exchanges with the others at
    its own pace, and ``first``, the least number to begin with, is only for a swarm that does not
    tell. An exchange that was decided while this peer came to it is left to the others, and the
    next is tried: both hold the mean, or nobody does, so the sum over all peers is what they did.
    After LATE of them in a row this peer mixes its own value in. An exchange raises what
    `Swarm.operate` raises; ConfigError for a ``name`` that is too long.
    """
    return _exchanges(swarm, name, pair_name(), True, first, codec, deadline_s)


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
    exchange is decided: who comes late adopts it without its own value, and `Exchanged.outcome` is
    not ``counted``. Numbered as those of `over_swarm`, but for late ones: members of a group call
    equally often.

    A group of machines that stand together is a run of its own: `over_group(island, ...)` beside
    `over_group(world, ...)`. An exchange raises what `Swarm.operate` raises.
    """
    return _exchanges(swarm, name, group, False, first, codec, deadline_s)


def _exchanges(
    swarm: Swarm, name: str, group: str, pairs: bool, first: int, codec: str, deadline_s: float
) -> Exchange:
    if not 1 <= len(name) <= MAX_SERIES_NAME:
        raise ConfigError(
            f"exchanges named {name!r}: 1 to {MAX_SERIES_NAME} characters", key="name"
        )
    following = first

    def once(flat: Tensor, kind: str, mixes: bool) -> Exchanged | None:
        """One operation. None: it was decided without this peer, and is not to be mixed in."""
        nonlocal following
        number = following
        if pairs and isinstance(swarm, Series):
            number = swarm.next_number(name, following)
        following = number + 1
        call = call_of(
            f"{name}/{number}",
            "mean",
            deadline_s,
            False,
            codec=codec,
            tag=series_tag(kind, name, number),
            group=group,
        )
        operating = operate(swarm, call, flat)
        try:
            outcome = agreed(operating.wait(None))
            peers = tuple(share.peer for share in outcome.contributors)
            if outcome.status != "committed":
                return Exchanged("own", (), number, outcome)
            if outcome.counted or not pairs:
                operating.copy_into(flat)
                how = "mean" if peers != (swarm.peer,) else "own"
                return Exchanged(how, peers, number, outcome)
            if not mixes:
                return None
            flat.copy_(mixed(operating, flat, 1 / (1 + len(peers))))
            return Exchanged("mixed", peers, number, outcome)
        finally:
            operating.release()

    def exchange(tensor: Tensor) -> Exchanged:
        flat, kind = flat_of(tensor, devices=DEVICES), kind_of(tensor, devices=DEVICES)
        # Of what is mixed in here alone the other keeps nothing, and the sum over all peers is no
        # longer what they did. So the next exchange is tried first.
        tries = LATE
        while (told := once(flat, kind, mixes=not tries)) is None:
            tries -= 1
        return told

    return exchange
