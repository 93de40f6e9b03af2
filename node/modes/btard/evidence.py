"""Evidence of a removal by BTARD (`security.btard.evidence`), in a run whose manifest names its
peers: what `run.evidence` calls *removed*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ....collectives.identifiers import PeerId
from ....collectives.seeded import MOST_PEERS
from ....security.btard import Bundle, Fault, verify_removals
from ....security.identity import verify as verify_for
from ...run.evidence import EvidenceClaim, EvidenceKind

FAULTS = {
    Fault.EQUIVOCATION: "it has signed two messages for one slot",
    Fault.NONSENSE: "it has signed what is no message",
    Fault.REVEAL: "its share of the draw is not the one it committed to",
    Fault.WITHHELD: "it has withheld what it owes, as most of the others testify",
    Fault.RESIDUAL: "it has stated of its vector what is not so, as most of the others have found",
    Fault.AGGREGATE: (
        "its aggregate is not that of the vectors it was sent, as most of the others have found"
    ),
    Fault.GRADIENT: (
        "its vector is not what follows from its seed, as most of the others have computed"
    ),
    Fault.ACCUSATION: "it has accused a peer falsely, as most of the others have found",
}


class BtardRemoval(msgspec.Struct, frozen=True, array_like=True, tag="btard"):
    """On what BTARD has removed a peer: the last of these; those before are against peers that were
    gone by then.
    """

    bundles: Annotated[tuple[Bundle, ...], msgspec.Meta(min_length=1, max_length=MOST_PEERS)]


def removal(bundles: Sequence[Bundle], bundle: Bundle) -> bytes:
    """The evidence of one removal, as it is kept and handed on; ``bundles``: what a peer has of the
    run, in order.
    """
    before = [
        each for each in bundles if each.context.roster[each.whom] not in bundle.context.roster
    ]
    return msgspec.msgpack.encode(BtardRemoval((*before, bundle)))


def _accused(found: BtardRemoval) -> PeerId | None:
    last = found.bundles[-1]
    return last.context.roster[last.whom] if last.whom < len(last.context.roster) else None


def _check_removal(found: BtardRemoval, claim: EvidenceClaim) -> tuple[PeerId, str]:
    last = found.bundles[-1]
    verify_removals(claim.run, claim.peers, found.bundles, verify_for)
    return last.context.roster[last.whom], f"{FAULTS[Fault(last.fault)]} (step {last.context.step})"


KINDS = (EvidenceKind(BtardRemoval, _accused, _check_removal),)
