"""Of how many operations a member remembers its votes, and what members have signed of their
contributions.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...collectives.group import Cid, Count, Hash, LogName, Peer

DOMAIN = "atoll/contribution/1"
MAX_SPENT = 4096
"""Operations remembered that this member voted in, the newest."""


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
