"""What a member must not forget of branches, of how many operations, and what members have signed
of their contributions.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...collectives import messages as m
from ...collectives.group import Cid, Contributor, Count, Hash, LogName, Peer

DOMAIN = "atoll/contribution/1"
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


class Statement(msgspec.Struct, frozen=True, array_like=True):
    """``peer`` has signed that its contribution ``cid`` to entry ``entry`` encodes to chunks with
    this Merkle root.
    """

    peer: Peer
    log: LogName
    entry: Count
    cid: Cid
    root: Hash
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]

    def payload(self, run: str) -> bytes:
        """The bytes under the signature."""
        return statement_payload(run, self.log, self.entry, self.cid, self.root)


def statement_payload(run: str, log: str, entry: int, cid: bytes, root: bytes) -> bytes:
    """The bytes under the signature of a statement: a slot of its signer's, which it fills once."""
    return msgspec.msgpack.encode((DOMAIN, run, log, entry, cid, root))
