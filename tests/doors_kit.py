"""Doors of a run in virtual time, whose certificates are readable: real signatures are the business
of tests/unit/test_doors.py.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.collectives.group import Admitted
from atoll.collectives.identifiers import PeerId
from atoll.node.run.doors import Right, RunDoors

LATER_S = 10_000


def toy(
    peer: str, invite: bytes, *, uses: int = 0, expires_s: int = LATER_S, name: str = ""
) -> bytes:
    """What ``peer`` shows that has come by an invite, for a site of this name."""
    return msgspec.msgpack.encode((peer, invite, uses, expires_s, name))


def read(peer: PeerId, shown: bytes) -> Right | None:
    """What a toy gives this peer; None for another's, or for what is none."""
    try:
        whose, invite, uses, expires_s, name = msgspec.msgpack.decode(shown)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return None
    if whose != peer:
        return None
    return Right(Admitted(peer, shown, invite, uses, 0, expires_s), float(expires_s), name=name)


def toy_doors(
    organiser: PeerId,
    now_s: Callable[[], float],
    shown: dict[str, bytes],
    revoked: set[bytes] | None = None,
    *,
    named: bool = False,
) -> RunDoors:
    """Doors of one member, to which these have shown their certificates; ``revoked``: invites of
    which it has heard so.
    """
    heard = set[bytes]() if revoked is None else revoked
    doors = RunDoors(
        organiser,
        policy="invite",
        allow=(),
        read=read,
        refuses=lambda peer, invite: "its invite was revoked" if invite in heard else "",
        now_s=now_s,
        named=named,
    )
    for peer, certificate in shown.items():
        doors.note(PeerId(peer), certificate)
    return doors
