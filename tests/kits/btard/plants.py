"""Known bugs, planted to see that the checker finds them. Production code has no switch for any of
them.

A plant replaces names of the protocol's modules for the time of one run. Beside it stands the
attack under which it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import numpy as np

from atoll.collectives.identifiers import PeerId
from atoll.security.btard import attempt as attempt_module
from atoll.security.btard import draw as draw_module
from atoll.security.btard import evidence as evidence_module
from atoll.security.btard import finished as finished_module
from atoll.security.btard import judging as judging_module
from atoll.security.btard import peer as peer_module
from atoll.security.btard import table as table_module
from atoll.security.btard.attempt import Attempt
from atoll.security.btard.messages import (
    Body,
    Bundle,
    Checks,
    Context,
    Fault,
    GuiltyVerdict,
    Kind,
    Reveal,
    Signed,
    Slotted,
    Vector,
    VectorRequest,
)
from atoll.security.btard.residuals import readable

from .swarm import BtardOptions, BtardSwarm


class BtardPlant(NamedTuple):
    """``what``: the bug, in words; ``seams``: (where, name, what stands there instead); ``rate``:
    in which part of the steps attackers strike.
    """

    what: str
    attack: str
    seams: tuple[tuple[Any, str, Any], ...]
    rate: float = 0.5


@contextmanager
def planted(plant: BtardPlant) -> Generator[None]:
    """Around one run."""
    whole = [(where, name, getattr(where, name)) for where, name, _ in plant.seams]
    try:
        for where, name, broken in plant.seams:
            setattr(where, name, broken)
        yield
    finally:
        for where, name, right in whole:
            setattr(where, name, right)


def find(plant: BtardPlant, seeds: int, first: int = 0) -> tuple[int, str] | None:
    """The first of so many seeds that finds the bug, and what does not hold; None: none does."""
    options = BtardOptions(
        n=8, b=3, attack=plant.attack, steps=12, rate=plant.rate, until_clean=False
    )
    for seed in range(first, first + seeds):
        with planted(plant):
            problems = BtardSwarm(seed, options).run().problems
        if problems:
            return seed, problems[0]
    return None


_commit, _aggregate, _verdicts, _put = (
    Attempt.commit,
    Attempt.aggregate,
    judging_module.verdicts,
    table_module.Table.put,
)
_part_commitment, _seed_of = draw_module.part_commitment, draw_module.seed_of


def _parts_at_once(self: Attempt, now: float) -> None:
    _commit(self, now)
    for number in range(len(self.roster)):
        if self.me in self.contributors and number != self.me:
            self.send((Kind.PART, self.me, number), number)


def _without_maker(context: Context, maker: PeerId, part: int, values: Vector) -> bytes:
    return _part_commitment(context, PeerId(""), part, values)


def _reveal_at_once(self: Attempt, now: float) -> None:
    _aggregate(self, now)
    self.say(now, Reveal(self.table.view(Kind.COMMIT), self.share))


def _share_of_step(self: Attempt, now: float) -> None:
    self.around.rng = Random(f"{self.context.step}/{self.me}")
    _aggregate(self, now)


def _first_counts(
    self: table_module.Table, kind: Kind, signed: Signed, body: Slotted
) -> Bundle | None:
    return _put(self, kind, signed, body) if self.signed(kind, signed.sender) is None else None


def _accuser_is_right(attempt: Attempt) -> tuple[GuiltyVerdict, ...]:
    accused = {GuiltyVerdict(whom, Fault.RESIDUAL) for _, whom in attempt.cases.residuals}
    return tuple(
        sorted(accused | {GuiltyVerdict(whom, Fault.GRADIENT) for whom in attempt.cases.targets})
    )


def _takes_along(attempt: Attempt) -> tuple[GuiltyVerdict, ...]:
    checks = attempt.table.all(Kind.CHECKS, Checks)
    taken = {
        GuiltyVerdict(each.whom, Fault.ACCUSATION)
        for number in attempt.cases.void
        for each in checks[number].accusations
    }
    return tuple(sorted(taken | set(_verdicts(attempt))))


def _accuser_goes_free(attempt: Attempt) -> tuple[GuiltyVerdict, ...]:
    return tuple(each for each in _verdicts(attempt) if each.fault != Fault.ACCUSATION)


def _all_count(bundle: Bundle, says: Callable[[Body], bool]) -> bool:
    bodies = (evidence_module.decode(each.body) for each in bundle.messages)
    return 2 * sum(body is not None and says(body) for body in bodies) > len(bundle.context.roster)


def _seed_of_first(draw: bytes, step: int, peer: PeerId) -> bytes:
    return _seed_of(draw, 0, peer)


def _never_testifies(self: Attempt, now: float) -> None:
    asks, _ = self._waiting.look(now, self.lacking(), self._since, self._further)
    if asks:
        self.say(now, VectorRequest(tuple(asks)))


def _mean(rows: Sequence[Vector], radius: float) -> Vector:
    return np.asarray(
        np.mean([readable(row) for row in rows], axis=0, dtype=np.float64), np.float32
    )


PLANTS: dict[str, BtardPlant] = {
    "parts-at-once": BtardPlant(
        "parts are sent before all have committed",
        "sign_flip",
        ((Attempt, "commit", _parts_at_once),),
    ),
    "free-commitment": BtardPlant(
        "a commitment does not bind its maker",
        "copied_commitments",
        (
            (draw_module, "part_commitment", _without_maker),
            (table_module, "part_commitment", _without_maker),
        ),
    ),
    "reveal-at-once": BtardPlant(
        "a share is revealed before all have committed",
        "sign_flip",
        ((Attempt, "aggregate", _reveal_at_once),),
    ),
    "share-unchecked": BtardPlant(
        "a revealed share is believed",
        "wrong_reveal",
        ((Attempt, "_wrong_shares", lambda self: []),),
    ),
    "share-reused": BtardPlant(
        "a step that is begun again draws its old share",
        "abort_abuse",
        ((Attempt, "aggregate", _share_of_step),),
    ),
    "no-sum": BtardPlant(
        "nobody adds up projections",
        "wrong_aggregate",
        ((judging_module, "unbalanced", lambda *_: False),),
    ),
    "first-counts": BtardPlant(
        "of two messages for a slot the first counts",
        "equivocation",
        ((table_module.Table, "put", _first_counts),),
    ),
    "any-view": BtardPlant(
        "nobody compares views",
        "other_view",
        (
            (
                Attempt,
                "acceptable",
                lambda self, kind, sender: self.table.content(kind, sender) is not None,
            ),
        ),
    ),
    "accuser-believed": BtardPlant(
        "who is accused is guilty",
        "false_accusation",
        ((attempt_module, "verdicts", _accuser_is_right),),
    ),
    "takes-along": BtardPlant(
        "who leaves for a senseless accusation takes along whom it named, without a proof",
        "false_accusation",
        ((attempt_module, "verdicts", _takes_along),),
    ),
    "evidence-unread": BtardPlant(
        "evidence is believed without its proof",
        "false_testimony",
        ((evidence_module, "_PROOFS", dict.fromkeys(Fault, lambda _: True)),),
    ),
    "part-forgotten": BtardPlant(
        (
            "a part that came before its owner asked everybody for it, and was dropped, is "
            "testified to be withheld"
        ),
        "ambush",
        ((Attempt, "appealed", lambda self, now, item, by: self._waiting.appealed(now, item, by)),),
        rate=1.0,
    ),
    "accuser-free": BtardPlant(
        "a false accuser stays",
        "false_accusation",
        ((attempt_module, "verdicts", _accuser_goes_free),),
    ),
    "votes-counted-twice": BtardPlant(
        "all signatures of one witness count",
        "false_testimony",
        ((evidence_module, "_most", _all_count),),
    ),
    "any-roster": BtardPlant(
        "evidence may name any roster",
        "false_testimony",
        ((peer_module, "belongs", lambda *_: True),),
    ),
    "other-seed": BtardPlant(
        "validators take another seed", "silence", ((finished_module, "seed_of", _seed_of_first),)
    ),
    "no-testimony": BtardPlant(
        "nobody testifies that something is withheld",
        "silence",
        ((Attempt, "tick", _never_testifies),),
    ),
    "patient-asker": BtardPlant(
        "who is kept back asks only when it would ask for what is computed",
        "whisper",
        ((Attempt, "hurry", lambda *_: None), (Attempt, "overtaken", lambda *_: None)),
    ),
    "no-fixed-point": BtardPlant(
        "owners send the mean", "sign_flip", ((attempt_module, "aggregate", _mean),)
    ),
}
"""By the names of `bench_btard.py --plant`."""
