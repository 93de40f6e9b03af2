"""What must hold in a swarm whatever the hostile do. It looks at honest peers, and at what they
send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from atoll.collectives.errors import SecurityError
from atoll.collectives.identifiers import PeerId
from atoll.security.btard.evidence import verify_evidence, verify_removals
from atoll.security.btard.finished import Finished
from atoll.security.btard.messages import (
    Bundle,
    CommittedVector,
    Fault,
    Frame,
    Kind,
    Reveal,
    Signed,
    Vector,
    decode,
)
from atoll.security.btard.residuals import aggregate

if TYPE_CHECKING:
    from .swarm import BtardMember, BtardSwarm

NEAR = 1e-4  # of radius and norm: how far an aggregate may be from the fixed point


class BtardChecker:
    """``problems``: what did not hold. ``steps``: how many are over at some honest peer.
    ``removals``: at the honest, who for what, in which step.
    """

    def __init__(self, swarm: BtardSwarm) -> None:
        self._swarm = swarm
        self.problems: list[str] = []
        self.steps = 0
        self.removals: dict[PeerId, tuple[Fault, int]] = {}
        self.clean_after = -1  # steps until no attacker was left
        self._outcomes: dict[int, tuple[bytes, bytes, tuple[PeerId, ...]]] = {}
        self._shares: set[bytes] = set()
        self._tag = b""  # of the attempt that ended the last step

    def problem(self, what: str) -> None:
        """Something does not hold."""
        self.problems.append(what)

    def clean(self) -> bool:
        """Whether every attacker has been removed."""
        return self._swarm.hostile <= self.removals.keys()

    def finished(self, member: BtardMember, step: Finished, state: Vector) -> None:
        """An honest peer's step is over: all agree, no attacker that struck is left, and parts are
        fixed points.
        """
        if member.attack is not None:
            return
        number = step.context.step
        found = (state.tobytes(), step.draw, step.context.roster)
        if self._outcomes.setdefault(number, found) != found:
            self.problem(f"step {number}: honest peers end it differently")
        if number < self.steps:
            return
        self.steps = number + 1
        attack = self._swarm.attack
        strikes, tag = self._swarm.gang.strikes, step.context.tag
        left = (strikes.get((tag, False), set()) | strikes.get((self._tag, True), set())) & set(
            step.context.roster
        )
        self._tag = tag
        if attack.at_once and left:
            self.problem(
                f"step {number}: {sorted(left)} struck and "
                f"{'is' if len(left) == 1 else 'are'} still there"
            )
        if self._swarm.options.attack != "collusion":
            self._check_parts(step)

    def removed(self, member: BtardMember, bundle: Bundle) -> None:
        """An honest peer removed somebody: rightly, and for what anybody can check who was not
        there.
        """
        if member.attack is not None:
            return
        copied = msgspec.msgpack.decode(msgspec.msgpack.encode(bundle), type=Bundle)
        try:
            gone = verify_evidence(copied, self._swarm.verify)
        except SecurityError as error:
            self.problem(error.message)
            return
        self.removals.setdefault(gone, (Fault(bundle.fault), bundle.context.step))
        if gone not in self._swarm.hostile:
            self.problem(
                f"step {bundle.context.step}: {gone} is honest and removed for "
                f"{Fault(bundle.fault).name.lower()}"
            )
        if self.clean() and self.clean_after < 0:
            self.clean_after = bundle.context.step + 1

    def sent(self, member: BtardMember, frame: Frame) -> None:
        """An honest peer sends something: parts after all commitments, its share after all
        aggregates' commitments, and no share twice.
        """
        attempt = member.machine.attempt
        if (
            member.attack is not None
            or attempt is None
            or attempt.context.tag != getattr(frame, "tag", b"")
        ):
            return
        if (
            isinstance(frame, CommittedVector)
            and frame.item[:2] == (Kind.PART, attempt.me)
            and not attempt.table.full(Kind.COMMIT)
        ):
            self.problem(
                f"step {frame.step}: {member.name} sends its part before all have committed"
            )
        if (
            isinstance(frame, Signed)
            and frame.sender == attempt.me
            and isinstance(body := decode(frame.body), Reveal)
        ):
            if not attempt.table.full(Kind.RESULT):
                self.problem(
                    f"step {frame.step}: {member.name} reveals its share before all have "
                    "committed to their aggregates"
                )
            if attempt.table.signed(Kind.REVEAL, attempt.me) is None:
                if body.share in self._shares:
                    self.problem(f"step {frame.step}: {member.name} draws the same share twice")
                self._shares.add(body.share)

    def end(self) -> None:
        """The run is over: evidence is a chain, and who struck is gone for what it did."""
        swarm = self._swarm
        for member in swarm.honest:
            try:
                verify_removals(
                    member.machine.run, swarm.names, member.machine.evidence, swarm.verify
                )
            except SecurityError as error:
                self.problem(error.message)
        for peer, (fault, step) in self.removals.items():
            if peer in swarm.hostile and fault not in swarm.attack.faults:
                self.problem(
                    f"step {step}: {peer} is removed for {fault.name.lower()}, not for what it did"
                )

    def _check_parts(self, step: Finished) -> None:
        roster = step.context.roster
        for part in range(step.context.step % 4, len(roster), 4):  # a quarter of them in each step
            held = self._closed(roster[part])
            if held is None:
                continue
            rows = [
                row
                for number in range(len(roster))
                if (row := held.get((Kind.PART, number, part))) is not None
            ]
            if len(rows) != len(step.residuals):
                continue
            distance = np.linalg.norm(
                aggregate(rows, step.radii[part]).astype(np.float64) - step.centres[part]
            )
            if not distance <= NEAR * (step.radii[part] + np.linalg.norm(step.centres[part])):
                self.problem(
                    f"step {step.context.step}: part {part} is {distance:.2g} from the fixed point"
                )

    def _closed(self, owner: PeerId) -> dict[tuple[int, int, int], Vector] | None:
        machine = self._swarm.members[owner].machine
        attempt = machine.attempt or machine.closed
        return None if attempt is None else attempt.vectors.held
