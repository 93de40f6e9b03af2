"""Two-word names for peers, from the hash of their id: easier to say than base58. Never used as an
identity.
"""

from __future__ import annotations

import hashlib

_FIRST = (
    "amber ample bold brave brisk calm candid clear clever coral crisp dapper dusky eager early "
    "fair fleet fresh gentle glad golden grand hardy hazel humble ivory jade jolly keen kind "
    "light lively lucid lunar mellow merry mild misty nimble noble olive patient pearl plain "
    "proud quick quiet rapid ready rosy salty sandy sharp silver sleek snowy solid steady sunny "
    "swift tidy vivid warm wise"
)
_SECOND = (
    "albatross auk avocet barnacle bittern booby clam cod conch coot cormorant crab crane "
    "curlew dolphin dugong eel egret eider gannet grebe grouper gull heron ibis kelp kestrel "
    "kite kittiwake krill limpet loon lobster manatee marlin mussel noddy nautilus octopus "
    "osprey otter oyster pelican penguin petrel plover prawn puffin ray sailfish sandpiper seal "
    "shrimp skate skua snipe sponge squid stilt tern tuna turtle urchin walrus whale"
)
FIRST, SECOND = _FIRST.split(), _SECOND.split()


def name_of(peer: str) -> str:
    """A name such as ``calm-heron``; about 4,000 exist, so two peers may share one."""
    digest = hashlib.sha256(peer.encode(errors="replace")).digest()
    return f"{FIRST[digest[0] % len(FIRST)]}-{SECOND[digest[1] % len(SECOND)]}"
