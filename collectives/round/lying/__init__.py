"""The round where some members may be Byzantine: echoes, claims and proofs in the place of trust.
Sans I/O; docs/protocol/byzantine.md says why it is safe.

judge      whether a proposal is justified by what others have signed
acceptor   the acceptor's side: claims, turns, pledges, echoes, votes
convener   the convener's side: shows why its proposal is the one it may make
"""

from __future__ import annotations

from ..view import RoundView
from .acceptor import ByzantineAcceptor
from .convener import ByzantineConvener
from .judge import Judge

__all__ = ["ByzantineAcceptor", "ByzantineConvener", "Judge", "byzantine_roles"]


def byzantine_roles(view: RoundView) -> tuple[ByzantineAcceptor, ByzantineConvener]:
    """The acceptor and the convener of the view's open round."""
    acceptor = ByzantineAcceptor(view)
    convener = ByzantineConvener(view, acceptor)
    acceptor.convener = convener
    return acceptor, convener
