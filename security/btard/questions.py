"""What others lack of an attempt: it is given to them, or handed on later; what nobody has is
proven to be withheld.

A part is first owed to its owner only; when the owner asks, it is owed to all, who hand it on. A
message is given by whoever has it, also when it comes after the question. So whoever has told
anything to one honest peer has told it to all that lack it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .messages import Bundle, Fault, Item, Kind, Lacking, Signed, VectorRequest
from .stages import AttemptStage
from .waiting import AttemptTimes

if TYPE_CHECKING:
    from .attempt import Attempt

MOST_EARLY = 8  # questions of one peer that wait for all commitments


class Questions:
    """Of one attempt, by numbers in its roster."""

    def __init__(self, attempt: Attempt, waiting: AttemptTimes) -> None:
        self._attempt, self._waiting = attempt, waiting
        self._served: set[tuple[int, type[VectorRequest | Lacking], Item]] = set()
        self._testimonies: dict[Item, dict[int, Signed]] = {}
        # Who has asked for a message that was not here yet.
        self._standing: dict[Item, set[int]] = {}
        # For parts, before all have committed.
        self._early: list[tuple[Signed, VectorRequest | Lacking]] = []
        self.behind: set[int] = set()  # who has lacked a commitment, so that it is late itself

    def answered(self, sender: int, body: VectorRequest | Lacking) -> bool:
        """The cheap test: whether a question changes nothing: a repeat, or one too many."""
        waiting = [signed.sender for signed, _ in self._early].count(sender)
        return waiting >= MOST_EARLY or all(
            (sender, type(body), item) in self._served for item in body.items
        )

    def heard(self, now: float, signed: Signed, body: VectorRequest | Lacking) -> None:
        """A question or a testimony."""
        attempt = self._attempt
        if attempt.stage == AttemptStage.COMMITS and any(
            item[0] == Kind.PART for item in body.items
        ):
            # Nobody owes a part yet; but who asks may have the commitments that are lacking here.
            self._early.append((signed, body))
            attempt.hurry(now)
            return
        for item in body.items:
            if (signed.sender, type(body), item) not in self._served:
                self._served.add((signed.sender, type(body), item))
                self._serve(now, signed.sender, item)
                if self._waiting.is_appealed(item) and item[1] != attempt.me:
                    attempt.hand(item[1], signed)  # lest it was told to all but who owes it
            if isinstance(body, Lacking):
                witnesses = self._testimonies.setdefault(item, {})
                witnesses[signed.sender] = signed
                if 2 * len(witnesses) > len(attempt.roster):
                    proof = Bundle(
                        attempt.context, Fault.WITHHELD, item[1], item, tuple(witnesses.values())
                    )
                    attempt.around.convict(now, [proof])
                    return

    def all_committed(self, now: float) -> None:
        """Parts are owed from now on."""
        early, self._early = self._early, []
        for signed, body in early:
            self.heard(now, signed, body)

    def arrived(self, kind: Kind, signed: Signed) -> None:
        """A message is here: who has asked for it gets it."""
        for asker in self._standing.pop((kind, signed.sender, 0), ()):
            self._attempt.hand(asker, signed)

    def _serve(self, now: float, asker: int, item: Item) -> None:
        kind, whose, _ = item
        if kind == Kind.STATES:
            self._serve_states(now, asker, item)
        elif kind in (Kind.PART, Kind.AGGREGATE):
            self._serve_vector(now, asker, item)
        else:
            self._serve_message(now, asker, Kind(kind), whose)

    def _serve_message(self, now: float, asker: int, kind: Kind, whose: int) -> None:
        attempt = self._attempt
        if kind == Kind.COMMIT:
            self.behind.add(asker)
        if asker == attempt.me:
            return
        held = attempt.table.signed(kind, whose)
        if held is not None:
            attempt.hand(asker, held)
        elif whose == attempt.me:
            attempt.hurry(now)
        else:
            self._standing.setdefault((kind, whose, 0), set()).add(asker)

    def _serve_vector(self, now: float, asker: int, item: Item) -> None:
        attempt, (kind, whose, part) = self._attempt, item
        committed = attempt.table.signed(Kind.COMMIT if kind == Kind.PART else Kind.RESULT, whose)
        if committed is not None and asker != attempt.me:
            # What it was sent may not open another commitment that it was told.
            attempt.hand(asker, committed)
        owner_asks = (
            kind == Kind.PART and asker == part and whose in attempt.contributors and whose != part
        )
        if owner_asks and whose == attempt.me:
            attempt.publish(item)
        elif item in attempt.vectors.held:
            attempt.send(item, asker)
        elif owner_asks and asker != attempt.me:
            attempt.appealed(now, item, asker)

    def _serve_states(self, now: float, asker: int, item: Item) -> None:
        """Its validator lacks what a target has to show: all are owed it now."""
        attempt = self._attempt
        if item[1] == attempt.me:
            if attempt.own_states() is not None:
                attempt.publish(item)
        elif item in attempt.vectors.held:
            attempt.send(item, asker)
        elif (
            asker != attempt.me
            and attempt.targets.get(attempt.roster[asker]) == attempt.roster[item[1]]
        ):
            self._waiting.appealed(now, item, asker)
