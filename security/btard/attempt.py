"""One attempt at a step, by one peer: the algorithm of the paper, stage by stage. Who is removed
ends it, and the step is begun again without it.

    stage        until all have said or sent   then
    commits      commitments to parts          send parts to their owners
    parts        parts of one's own            clip them about their fixed point; commit to that
                                               and to a share of the draw
    results      those commitments             send the aggregate to all; reveal the share
    reveals      shares, aggregates            draw; project clipped residuals on the directions
    residuals    projections and norms         verify them; accuse
    checks       accusations                   the step is over; or, where something is open:
    exhibits     parts that it is about        look at them; judge
    judgements   whom they find guilty         remove whom more than half find guilty; or the step
                                               is over

A peer that lacks something asks all for it, and then testifies that it is missing (`waiting`). No
clock, no network: drivers give times and frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...collectives.identifiers import PeerId
from . import draw
from .cases import Cases
from .evidence import kind_of
from .finished import Finished
from .judging import open_cases, sentence, verdicts
from .messages import (
    FLOAT,
    Accusation,
    Body,
    Bundle,
    Checks,
    Commit,
    CommittedVector,
    Context,
    Fault,
    Frame,
    Item,
    Judgement,
    Kind,
    Lacking,
    Residuals,
    Result,
    Reveal,
    Signed,
    Slotted,
    Vector,
    VectorRequest,
    decode,
    fits,
    is_signed,
    sign,
)
from .questions import Questions
from .residuals import ACCUSED, Residual, aggregate, differs, readable, residual
from .stages import BEFORE, HEARD, AttemptStage
from .table import AttemptVectors, Table
from .waiting import AttemptTimes

if TYPE_CHECKING:
    from .peer import BtardPeer


class Attempt:
    """The part of one peer, ``around``, in one attempt."""

    def __init__(self, context: Context, around: BtardPeer) -> None:
        self.context, self.around = context, around
        self.roster = context.roster
        self.me = self.roster.index(around.signer.peer)
        self.muted = False  # another attempt has taken its place
        self.over = False
        self.stage = AttemptStage.COMMITS
        previous = around.previous
        self.seeds = previous.draw if previous else draw.first_draw(context.run)
        drawn = {} if previous is None else previous.validators(around.settings.validators)
        self.targets = {
            validator: target for validator, target in drawn.items() if validator in self.roster
        }
        self.contributors = [
            number for number, peer in enumerate(self.roster) if peer not in self.targets
        ]
        self.bounds = draw.bounds(len(around.gradient), len(self.roster))
        self.radii = [
            around.distances.radius(stop - start)
            for start, stop in zip(self.bounds, self.bounds[1:], strict=False)
        ]
        self.table = Table(context)
        self.vectors = AttemptVectors(self.table, self.bounds, previous)
        self.draw = b""
        self.share = b""
        self.cases = Cases()
        self._at_once = {
            number
            for number in self.contributors
            if around.late.asks_at_once(context.step, self.roster[number])
        }
        self._waiting = AttemptTimes(around.settings, self._at_once)
        self._since = float("inf")  # until its own gradient is there
        self._further = float("inf")  # since when somebody is known to be further
        self._questions = Questions(self, self._waiting)
        self._shown: set[tuple[int, Kind]] = set()
        self._uninvited = 0
        self._dropped: set[Item] = set()  # parts of others for which there was no room

    # What the peer does, in order.

    def commit(self, now: float) -> None:
        """Begin: the gradient is there (a validator has none)."""
        parts = b""
        if self.me in self.contributors:
            for part in range(len(self.roster)):
                self.vectors.held[Kind.PART, self.me, part] = self.mine(part)
                parts += draw.part_commitment(
                    self.context, self.roster[self.me], part, self.mine(part)
                )
        self._enter(now, AttemptStage.COMMITS)
        self.say(now, Commit(parts, self.around.trail if parts else b""))
        self.show()

    def show(self) -> None:
        """The last step's validator sees the interval that was drawn."""
        piece = self.own_states()
        if piece is None:
            return
        for validator, target in self.targets.items():
            if target == self.roster[self.me]:
                self.send(piece.item, self.roster.index(validator))

    def own_states(self) -> CommittedVector | None:
        """What the last step's validator of this peer is to see; it is held from then on."""
        piece = self.around.shown()
        if piece is not None:
            self.vectors.put(piece, by_maker=True)
        return piece if piece is not None and piece.item in self.vectors.held else None

    def scatter(self, now: float) -> None:
        """All have committed: nobody can suit its gradient to another's any more."""
        self._enter(now, AttemptStage.PARTS)
        if self.me in self.contributors:
            for number in range(len(self.roster)):
                if number != self.me:
                    self.send((Kind.PART, self.me, number), number)
        self._questions.all_committed(now)
        if self._at_once:
            self.tick(now)

    def aggregate(self, now: float) -> None:
        """Clip about the fixed point; commit to it before anybody knows the draw."""
        rows = [self.vectors.held[Kind.PART, number, self.me] for number in self.contributors]
        for number in self.contributors:
            if number != self.me and number not in self._at_once | self._questions.behind:
                late = (Kind.PART, number, self.me) in self._waiting.asked
                self.around.late.came(self.context.step, self.roster[number], late=late)
        found = aggregate(rows, self.radii[self.me])
        self.vectors.held[Kind.AGGREGATE, self.me, 0] = found
        self.share = self.around.rng.randbytes(32)
        me = self.roster[self.me]
        committed = (
            draw.aggregate_commitment(self.context, me, found),
            draw.share_commitment(self.context, me, self.share),
        )
        self._enter(now, AttemptStage.RESULTS)
        self.say(now, Result(self.table.view(Kind.COMMIT), *committed))

    def reveal(self, now: float) -> None:
        """All have committed to their aggregates and shares."""
        self._enter(now, AttemptStage.REVEALS)
        for number in range(len(self.roster)):
            if number != self.me:
                self.send((Kind.AGGREGATE, self.me, 0), number)
        self.say(now, Reveal(self.table.view(Kind.RESULT), self.share))

    def project(self, now: float) -> None:
        """The draw is there: project one's residuals of all parts."""
        wrong = self._wrong_shares()
        if wrong:
            self.around.convict(now, wrong)
            return
        self.draw = draw.drawn(
            self.context, [each.share for each in self.table.all(Kind.REVEAL, Reveal)]
        )
        found = (
            [self.residual_of(self.mine(part), part) for part in range(len(self.roster))]
            if self.me in self.contributors
            else []
        )
        projections, norms = (
            np.array([each[i] for each in found], FLOAT).tobytes() for i in (0, 1)
        )
        self._enter(now, AttemptStage.RESIDUALS)
        self.say(now, Residuals(self.table.view(Kind.REVEAL), projections, norms))

    def check(self, now: float) -> None:
        """Verification 1 of the own part, and validation of the target's last gradient."""
        accusations: list[Accusation] = []
        for number in self.contributors:
            row = self.vectors.held[Kind.PART, number, self.me]
            found = self.residual_of(row, self.me)
            if (
                differs(
                    self.reported_residuals(number)[self.me], found, self.radii[self.me], ACCUSED
                )
                or not np.isfinite(row).all()
            ):
                accusations.append(Accusation(Fault.RESIDUAL, number))
        target = self.targets.get(self.roster[self.me])
        if (
            target is not None
            and target in self.roster
            and (self.around.examine(target) or 0.0) > self.around.settings.tolerance
        ):
            accusations.append(Accusation(Fault.GRADIENT, self.roster.index(target)))
        self._enter(now, AttemptStage.CHECKS)
        self.say(now, Checks(self.table.view(Kind.RESIDUALS), tuple(accusations)))

    def close(self, now: float) -> None:
        """Verifications 2 and 3, the same everywhere; over, or something is open."""
        self.cases = open_cases(self)
        if not self.cases.any():
            self.finish(now)
            return
        self._enter(now, AttemptStage.EXHIBITS)
        for whose, part in sorted(self.cases.exhibits):
            if self.me in (whose, part):
                self.publish((Kind.PART, whose, part))
        for number in sorted(self.cases.targets):
            self.publish((Kind.STATES, number, 0))

    def judge(self, now: float) -> None:
        """All exhibits are there."""
        self._enter(now, AttemptStage.JUDGEMENTS)
        self.say(now, Judgement(self.table.view(Kind.CHECKS), verdicts(self)))

    def sentence(self, now: float) -> None:
        """Whom more than half find guilty is removed."""
        guilty = sentence(self)
        if guilty:
            self.around.convict(now, guilty)
        else:
            self.finish(now)

    def finish(self, now: float) -> None:
        """Everybody has the same view of a step in which nothing is open."""
        self.over = True
        self.around.finished(now, self)

    # What it hears.

    def on_signed(self, now: float, signed: Signed) -> bool:
        """A message of this attempt, from whomever. False for one that its sender did not sign,
        which is dropped.
        """
        body = decode(signed.body)
        if self.knows(signed) or (
            isinstance(body, VectorRequest | Lacking)
            and self._questions.answered(signed.sender, body)
        ):
            return True  # heard already, which costs no check
        if not is_signed(self.context, signed, self.around.verify):
            return False
        if body is None or not fits(body, len(self.roster)):
            self.around.convict(
                now, [Bundle(self.context, Fault.NONSENSE, signed.sender, None, (signed,))]
            )
        elif isinstance(body, VectorRequest | Lacking):
            self._questions.heard(now, signed, body)
        else:
            self._on_slotted(now, signed, body)
        return True

    def knows(self, signed: Signed) -> bool:
        """Whether this message is in its slot already."""
        body = decode(signed.body)
        kind = None if body is None else kind_of(body)
        return (
            kind is not None
            and signed.tag == self.context.tag
            and self.table.signed(kind, signed.sender) == signed
        )

    def on_piece(self, now: float, sender: PeerId, piece: CommittedVector) -> None:
        """A vector of this attempt."""
        maker = piece.item[1]
        by_maker = maker < len(self.roster) and self.roster[maker] == sender
        if by_maker and piece.item[0] == Kind.PART and self.stage == AttemptStage.COMMITS:
            self.overtaken(now)
        if self._welcome(piece.item) and self.vectors.put(piece, by_maker=by_maker):
            wanted = self._waiting.settled(piece.item)
            if wanted is not None:
                self.send(piece.item, wanted)
            self.advance(now)

    def _welcome(self, item: Item) -> bool:
        """Whether this peer has a use for a vector; it keeps some parts of others that come before
        it hears what they are for.
        """
        if item[0] == Kind.STATES:
            return bool(self.around.settings.intervals) and any(
                self.roster[item[1] % len(self.roster)] == each for each in self.targets.values()
            )
        if (
            item[0] != Kind.PART
            or item[2] == self.me
            or self._waiting.is_appealed(item)
            or (item[1], item[2]) in self.cases.exhibits
        ):
            return True
        self._uninvited += 1
        if self._uninvited <= len(self.roster):
            return True
        if max(item[1:]) < len(self.roster):
            self._dropped.add(item)
        return False

    def appealed(self, now: float, item: Item, by: int) -> None:
        """Everybody is owed a part that its owner asks for. One that came before the question, and
        was dropped, is asked for again.
        """
        self._waiting.appealed(now, item, by)
        if item in self._dropped:
            self._dropped.discard(item)
            self._tell(item[1], sign(self.context, self.around.signer, VectorRequest((item,))))

    def _on_slotted(self, now: float, signed: Signed, body: Slotted) -> None:
        kind = kind_of(body)
        assert kind is not None
        if kind > HEARD.get(self.stage, Kind.JUDGEMENT):
            self.overtaken(now)
        proof = self.table.put(kind, signed, body)
        self._questions.arrived(kind, signed)
        if proof is not None:
            # What others were told: with it they may have ended this attempt.
            self.table.replace(kind, signed, body)
            self.around.convict(now, [proof])
        if kind in (Kind.COMMIT, Kind.RESULT):
            self.vectors.settle()
        self.advance(now)

    def overtaken(self, now: float) -> None:
        """Somebody is further than this peer, so all messages that keep it here can be had."""
        self._further = min(self._further, now)

    def hurry(self, now: float) -> None:
        """Others wait for this peer, which lacks something itself: it asks at once."""
        self._further = -float("inf")
        self.tick(now)

    # How it goes on.

    def advance(self, now: float) -> None:
        """Do what can be done."""
        entered = None
        while not (self.over or self.muted) and self.stage != entered and self.ready():
            entered = self.stage  # who is convicted ends the attempt; a stage is never left twice
            self._leave(now)
        if self.muted and not self.over and self._closed_elsewhere():
            self.finish(now)

    def ready(self) -> bool:
        """Whether the stage is complete."""
        heard = HEARD.get(self.stage)
        return (
            (heard is None or self.table.full(heard))
            and not self.lacking()
            and not self._computing()
        )

    def _leave(self, now: float) -> None:
        match self.stage:
            case AttemptStage.COMMITS:
                self.scatter(now)
            case AttemptStage.PARTS:
                self.aggregate(now)
            case AttemptStage.RESULTS:
                self.reveal(now)
            case AttemptStage.REVEALS:
                self.project(now)
            case AttemptStage.RESIDUALS:
                self.check(now)
            case AttemptStage.CHECKS:
                self.close(now)
            case AttemptStage.EXHIBITS:
                self.judge(now)
            case AttemptStage.JUDGEMENTS:
                self.sentence(now)

    def _closed_elsewhere(self) -> bool:
        """Whether this attempt, which another has replaced here, ended for somebody who has
        everybody's last word in it, this peer's included.
        """
        if self.stage < AttemptStage.CHECKS or not self._unanimous(Kind.CHECKS):
            return False
        return not open_cases(self).any() or (
            self._unanimous(Kind.JUDGEMENT) and not sentence(self)
        )

    def _unanimous(self, kind: Kind) -> bool:
        return self.table.full(kind) and all(
            self.acceptable(kind, number) for number in range(len(self.roster))
        )

    def lacking(self) -> list[Item]:
        """What keeps this peer in its stage."""
        heard = HEARD.get(self.stage)
        items: list[Item] = []
        if heard is not None:
            items = [
                (heard, number, 0)
                for number in range(len(self.roster))
                if not self.acceptable(heard, number)
            ]
        if self.stage == AttemptStage.PARTS:
            items = [(Kind.PART, number, self.me) for number in self.contributors]
        elif self.stage == AttemptStage.REVEALS:
            items += [(Kind.AGGREGATE, number, 0) for number in range(len(self.roster))]
        elif self.stage == AttemptStage.EXHIBITS:
            items = [(Kind.PART, whose, part) for whose, part in sorted(self.cases.exhibits)]
            items += [
                (Kind.STATES, number, 0)
                for number in sorted(self.cases.targets)
                if self.around.settings.intervals
            ]
        elif self.stage == AttemptStage.RESIDUALS and self.around.settings.intervals:
            target = self.targets.get(self.roster[self.me])
            items += [(Kind.STATES, self.roster.index(target), 0)] if target in self.roster else []
        return [item for item in items if item not in self.vectors.held]

    def acceptable(self, kind: Kind, sender: int) -> bool:
        """Whether somebody has said what it can say with the views that this peer has. Where views
        differ, each shows the other its own.
        """
        body = self.table.content(kind, sender)
        contributes = sender in self.contributors
        if body is None:
            return False
        if isinstance(body, Commit):
            return bool(body.parts) == contributes and bool(body.trail) == (
                contributes and self.around.settings.intervals > 0
            )
        before = BEFORE[kind]
        if body.seen != self.table.view(before):
            if (sender, before) not in self._shown:
                self._shown.add((sender, before))
                for number in range(len(self.roster)):
                    held = self.table.signed(before, number)
                    if held is not None:
                        self._tell(sender, held)
            return False
        return not isinstance(body, Residuals) or bool(body.norms) == contributes

    def tick(self, now: float) -> None:
        """Look at the time; every half of `timeout_s`, or more often. Who has not committed itself
        waits for nobody.
        """
        if self.over or self.muted or self._since == float("inf"):
            return
        asks, testimonies = self._waiting.look(now, self.lacking(), self._since, self._further)
        if asks:
            self.say(now, VectorRequest(tuple(asks)))
        if testimonies:
            self.say(now, Lacking(tuple(testimonies)))

    def _computing(self) -> bool:
        """Whether a gradient must be there first that is still computed."""
        targets = (
            [self.targets.get(self.roster[self.me])] if self.stage == AttemptStage.RESIDUALS else []
        )
        if self.stage == AttemptStage.EXHIBITS:
            targets = [self.roster[number] for number in self.cases.targets]
        return any(
            target in self.roster and self.around.examine(target) is None
            for target in targets
            if target is not None
        )

    def _enter(self, now: float, stage: AttemptStage) -> None:
        self.stage, self._since, self._further = stage, now, float("inf")

    def _wrong_shares(self) -> list[Bundle]:
        """Whose revealed share is not the one it committed to."""
        wrong: list[Bundle] = []
        for number, peer in enumerate(self.roster):
            result, reveal = (
                self.table.signed(kind, number) for kind in (Kind.RESULT, Kind.REVEAL)
            )
            committed, share = (
                self.table.body(Kind.RESULT, number, Result),
                self.table.body(Kind.REVEAL, number, Reveal),
            )
            if result is None or reveal is None or committed is None or share is None:
                continue  # nobody is missing here
            if committed.share != draw.share_commitment(self.context, peer, share.share):
                wrong.append(Bundle(self.context, Fault.REVEAL, number, None, (result, reveal)))
        return wrong

    # What it knows.

    def mine(self, part: int) -> Vector:
        """A part of one's own gradient."""
        return self.around.gradient[self.bounds[part] : self.bounds[part + 1]]

    def centre(self, part: int) -> Vector:
        """The aggregate of a part; zeros where its owner sent what is no number, which is not the
        fixed point either.
        """
        return readable(self.vectors.held[Kind.AGGREGATE, part, 0])

    def residual_of(self, row: Vector, part: int) -> Residual:
        """Of a contribution to a part."""
        return residual(
            row, self.centre(part), draw.direction(self.draw, part, len(row)), self.radii[part]
        )

    def states_of(self, target: PeerId) -> Vector | None:
        """What a target has shown of its trail."""
        return (
            self.vectors.held.get((Kind.STATES, self.roster.index(target), 0))
            if target in self.roster
            else None
        )

    def reported_residuals(self, number: int) -> list[Residual]:
        """What a contributor said of its residuals, by part."""
        body = self.table.body(Kind.RESIDUALS, number, Residuals)
        assert body is not None
        columns = (
            np.frombuffer(each, FLOAT).astype(np.float64).tolist()
            for each in (body.projections, body.norms)
        )
        return [Residual(*pair) for pair in zip(*columns, strict=True)]

    def outcome(self) -> Finished:
        """What there is to remember of the step."""
        parts = range(len(self.roster))
        reported = {
            self.roster[number]: self.reported_residuals(number) for number in self.contributors
        }
        commits = self.table.all(Kind.COMMIT, Commit)
        trails = {self.roster[number]: commits[number].trail for number in self.contributors}
        centres = [self.centre(part) for part in parts]
        intervals = self.around.settings.intervals
        return Finished(
            self.context,
            self.seeds,
            self.draw,
            centres,
            self.radii,
            reported,
            trails,
            self.around.start,
            intervals,
        )

    # What it says.

    def say(self, now: float, body: Body) -> None:
        """Sign a message, keep it, and send it to all."""
        if self.muted:
            return
        signed = sign(self.context, self.around.signer, body)
        self._tell(None, signed)
        self.on_signed(now, signed)

    def hand(self, to: int, signed: Signed) -> None:
        """Pass on somebody's message."""
        self._tell(to, signed)

    def send(self, item: Item, to: int) -> None:
        """Give somebody a vector that is here."""
        self._tell(to, self._piece(item))

    def publish(self, item: Item) -> None:
        """Give everybody a vector that is here."""
        if item in self.vectors.held:
            self._tell(None, self._piece(item))

    def _piece(self, item: Item) -> CommittedVector:
        return CommittedVector(
            self.context.step,
            self.context.tag,
            item,
            self.vectors.held[item],
            self.vectors.paths.get(item, ()),
        )

    def _tell(self, to: int | None, frame: Frame) -> None:
        if not self.muted:
            self.around.tell(None if to is None else self.roster[to], frame)
