"""Evidence against a dealer of shares (`security.masking.misdealt`): what `run.evidence` calls
*misdealt*.
"""

from __future__ import annotations

from ....collectives.identifiers import PeerId
from ....security.masking import Misdealt, verify_misdealt
from ...run.evidence import EvidenceClaim, EvidenceKind

MISDEALT = "it dealt shares of a mask that do not fit each other"


def _accused(found: Misdealt) -> PeerId | None:
    return found.roster[found.dealer] if found.dealer < len(found.roster) else None


def _check(found: Misdealt, claim: EvidenceClaim) -> tuple[PeerId, str]:
    return verify_misdealt(found, claim.run), MISDEALT


KINDS = (EvidenceKind(Misdealt, _accused, _check),)
