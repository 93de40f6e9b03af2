"""How fast a member's links are, as far as it has measured: what sizes parts and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .identifiers import PeerId


class Lead(NamedTuple):
    """How far contributions may run ahead of results: what the uplink carries, bytes/s (0: no
    limit), and for how many seconds of it.

    ``near``: all others are so near that a few chunks keep the link busy: contributions go back and
    forth evenly.
    """

    rate: float = 0.0
    seconds: float = 0.0
    near: bool = False


class Pace(NamedTuple):
    """Of one member, in bytes/s to or from all others together.

    ``up`` and ``down``: what the links can carry, 0 while that is not known; ``proven``: what they
    carried both ways, at least; ``rtt_s``: the round-trip time to the furthest of them;
    ``silences``: of those on the way to whom packets are lost, how many seconds they may be silent
    and live.
    """

    up: int = 0
    down: int = 0
    proven: int = 0
    rtt_s: float = 0.0
    silences: Mapping[PeerId, float] = MappingProxyType({})
