"""The identifiers every layer shares."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""A peer's public identity: the base58 libp2p peer id of its Ed25519 key (any unique string in a
simulation).
"""

RunId = NewType("RunId", str)
"""base32(sha256(canonical manifest bytes))[:26], lower case."""

CID_BYTES = 16
"""A cid is the random id of one frozen contribution buffer."""

HASH_BYTES = 32
"""blake3 digests throughout."""
