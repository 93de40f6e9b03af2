"""The round where some members may lie: echoes, claims and proofs in the place of trust. Sans I/O;
docs/protocol/byzantine.md says why it is safe.

judge      whether a proposal is justified by what others have signed
blame      which owners of parts held up reductions, over rounds
acceptor   the acceptor's side: claims, turns, pledges, echoes, votes
convener   the convener's side: shows why its proposal is the one it may make
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .acceptor import Witness
from .blame import Blame
from .convener import Accountable
from .judge import Judge

if TYPE_CHECKING:
    from ..machine import RoundMachine

__all__ = ["Accountable", "Blame", "Judge", "Witness", "sides"]


def sides(machine: RoundMachine) -> tuple[Witness, Accountable]:
    """Both sides of the machine's open round, which bear that others lie."""
    witness = Witness(machine)
    return witness, Accountable(machine, witness)
