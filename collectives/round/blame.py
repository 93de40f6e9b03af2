"""Owners of parts that held up reductions, remembered over rounds where members may lie. Local to
one member, volatile, without I/O.

The convener of a ballot chooses who owns parts, and every member carries out any such choice: so
members need not agree on whom they remember.
"""

from __future__ import annotations

from ..identifiers import PeerId

# for so many rounds a peer owns no part after its first strike; after each further one for twice as
# many
ROUNDS = 16
MOST = 6  # strikes that count: at most 512 rounds
REMEMBERED = 256  # peers; beyond that those are forgotten whose time is over


class Blame:
    """By peer: its strikes, the round of the newest, and the first round in which it may own parts
    again.

    A strike is forgotten after as many further rounds without a new one as it cost.
    """

    def __init__(self) -> None:
        self._of: dict[PeerId, tuple[int, int, int]] = {}

    def strike(self, peer: PeerId, round_: int) -> None:
        """The peer held up this round. A round counts once, whatever it did."""
        strikes, struck, over = self._of.get(peer, (0, -1, 0))
        if struck == round_:
            return
        while strikes and round_ >= over + (span := ROUNDS << (strikes - 1)):
            strikes, over = strikes - 1, over + span
        strikes = min(MOST, strikes + 1)
        self._of[peer] = strikes, round_, round_ + (ROUNDS << (strikes - 1))
        if len(self._of) > REMEMBERED:
            self._of = {who: known for who, known in self._of.items() if round_ < known[2]}

    def shunned(self, round_: int, most: int) -> set[PeerId]:
        """Peers that are given no part in this round: at most ``most``, as many as may lie, first
        those with the most strikes, then the newest. Where more peers were struck, the network is
        at fault."""
        held = [
            (-strikes, -struck, peer)
            for peer, (strikes, struck, over) in self._of.items()
            if round_ < over
        ]
        return {peer for *_, peer in sorted(held)[:most]}
