"""What free-standing operations may take of a member: `[limits]` of a manifest."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...collectives.swarm import MOST_OPERATION_ELEMENTS, LimitSettings

STANDARD = LimitSettings()


class LimitsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[limits]``: ``operation_elements``: the longest vector of a free-standing operation.
    ``operations``: how many a member takes part in at once. ``member_bytes``: what operations of
    one other member, which the own script has not called, may take of a member's memory and disk;
    those of all others together may take four times as much."""

    operation_elements: Annotated[int, msgspec.Meta(ge=1, le=MOST_OPERATION_ELEMENTS)] = (
        STANDARD.operation_elements
    )
    operations: Annotated[int, msgspec.Meta(ge=4, le=4096)] = STANDARD.operations
    member_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)] = STANDARD.member_bytes

    def settings(self) -> LimitSettings:
        """For sessions."""
        return LimitSettings(self.operation_elements, self.operations, self.member_bytes)
