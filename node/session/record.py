"""What a member must not forget of branches, and of how many operations."""

from __future__ import annotations

import msgspec

from ...collectives import messages as m
from ...collectives.group import Contributor

MAX_SPENT = 4096
"""Operations remembered that this member voted in, the newest."""


class BranchRecord(msgspec.Struct, frozen=True, array_like=True):
    """``base``: hash of the certified entry that was forked from (b"": none); ``tip``: where the
    branch stands; ``left``: own contributions to branches that were left; ``lost``: contributions,
    and their samples, that no certified entry will ever count."""

    base: bytes = b""
    tip: m.Tip | None = None
    left: tuple[Contributor, ...] = ()
    lost: int = 0
    lost_samples: int = 0
