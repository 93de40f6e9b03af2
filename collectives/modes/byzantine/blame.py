"""Who held up reductions, remembered over rounds where members may lie. Local to one member,
volatile, without I/O.

The convener of a ballot chooses contributions, owners and topology, and every member carries out
any such choice: so members need not agree on whom they remember.
"""

from __future__ import annotations

from ...identifiers import PeerId

# for so many rounds a peer owns no part after its first strike; after each further one for twice as
# many
ROUNDS = 16
MOST = 6  # strikes that count: at most 512 rounds
TREE = PeerId("")  # whoever held up a tree
REMEMBERED = 256  # peers; beyond that those are forgotten whose time is over


class Blame:
    """What one member holds against others in one log.

    ``owners`` that held up a reduction own no part for a while. ``givers`` are contributors whose
    contribution did not come, as this member saw itself: it plans none of theirs for a while.
    ``doubted`` are contributors of whom others say so: they are waited for no longer than their
    links take. Of a tree nobody knows who held it up: there is none for a while.
    """

    def __init__(self) -> None:
        self.owners, self.givers = Strikes(ROUNDS), Strikes(ROUNDS // 2)
        self.doubted, self._trees = Strikes(ROUNDS), Strikes(ROUNDS)

    def fell(self, round_: int) -> None:
        """A tree was held up in this round."""
        self._trees.strike(TREE, round_)

    def no_tree(self, round_: int) -> bool:
        """Whether this round's plans have no partial sums."""
        return bool(self._trees.shunned(round_, 1))


class Strikes:
    """By peer: its strikes, the round of the newest, and the first round that they do not count in.

    The first costs ``rounds``. A strike is forgotten after as many further rounds without a new one
    as it cost.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._of: dict[PeerId, tuple[int, int, int]] = {}

    def strike(self, peer: PeerId, round_: int) -> None:
        """The peer held up this round. A round counts once, whatever it did."""
        strikes, struck, over = self._of.get(peer, (0, -1, 0))
        if struck == round_:
            return
        while strikes and round_ >= over + (span := self.rounds << (strikes - 1)):
            strikes, over = strikes - 1, over + span
        strikes = min(MOST, strikes + 1)
        self._of[peer] = strikes, round_, round_ + (self.rounds << (strikes - 1))
        if len(self._of) > REMEMBERED:
            self._of = {who: known for who, known in self._of.items() if round_ < known[2]}

    def shunned(self, round_: int, most: int) -> set[PeerId]:
        """Peers whose strikes count in this round: at most ``most``, first those with the most
        strikes, then the newest. Where more peers were struck than may lie, the network is at
        fault."""
        held = [
            (-strikes, -struck, peer)
            for peer, (strikes, struck, over) in self._of.items()
            if round_ < over
        ]
        return {peer for *_, peer in sorted(held)[:most]}
