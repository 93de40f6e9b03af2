"""What is open after the checks of an attempt, who is found guilty, and of whom that is proven.

What is open follows from messages that all have, so all look at the same. An accuser who is wrong
pays with its own place. Whoever is unsure at the edge of rounding convicts nobody: accusers need
`ACCUSED` roundings (or the tolerance), judges `CONVICTED` (or half of it), so what one honest peer
accuses all honest ones convict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .cases import Cases
from .draw import direction
from .messages import Bundle, Checks, Fault, GuiltyVerdict, Judgement, Kind
from .residuals import CONVICTED, differs, impossible, off_centre, unbalanced

if TYPE_CHECKING:
    from .attempt import Attempt


def open_cases(attempt: Attempt) -> Cases:
    """Accusations; Verification 2: projections that do not add up to zero; Verification 3: a part
    from which most are too far.
    """
    cases = Cases()
    for accuser, checks in enumerate(attempt.table.all(Kind.CHECKS, Checks)):
        target = attempt.targets.get(attempt.roster[accuser])
        for each in checks.accusations:
            if each.fault == Fault.RESIDUAL and each.whom in attempt.contributors:
                cases.residuals.add((accuser, each.whom))
            elif each.fault == Fault.GRADIENT and target == attempt.roster[each.whom]:
                cases.gradients.add((accuser, each.whom))
            else:
                cases.void.add(accuser)
    reported = {number: attempt.reported_residuals(number) for number in attempt.contributors}
    for part, radius in enumerate(attempt.radii):
        column = [residuals[part] for residuals in reported.values()]
        length = attempt.bounds[part + 1] - attempt.bounds[part]
        far = attempt.around.distances.too_far(length)
        if unbalanced(column, attempt.centre(part), radius) or 2 * sum(
            each.norm > far for each in column
        ) > len(column):
            cases.columns.add(part)
        reach = float(np.linalg.norm(direction(attempt.draw, part, length)))
        cases.impossible |= {
            number for number in reported if impossible(reported[number][part], reach, radius)
        }
    cases.exhibits = {(whom, accuser) for accuser, whom in cases.residuals}
    cases.exhibits |= {(number, part) for part in cases.columns for number in attempt.contributors}
    return cases


def verdicts(attempt: Attempt) -> tuple[GuiltyVerdict, ...]:
    """Whom this peer finds guilty."""
    cases = attempt.cases
    guilty = {GuiltyVerdict(number, Fault.ACCUSATION) for number in cases.void}
    guilty |= {GuiltyVerdict(number, Fault.RESIDUAL) for number in cases.impossible}
    for accuser, whom in cases.residuals:
        guilty.add(
            GuiltyVerdict(whom, Fault.RESIDUAL)
            if _misstated(attempt, whom, accuser)
            else GuiltyVerdict(accuser, Fault.ACCUSATION)
        )
    for accuser, whom in cases.gradients:
        wrong = (
            attempt.around.examine(attempt.roster[whom]) or 0.0
        ) > attempt.around.settings.tolerance / 2
        guilty.add(
            GuiltyVerdict(whom, Fault.GRADIENT)
            if wrong
            else GuiltyVerdict(accuser, Fault.ACCUSATION)
        )
    for part in cases.columns:
        rows = [attempt.vectors.held[Kind.PART, number, part] for number in attempt.contributors]
        guilty |= {
            GuiltyVerdict(number, Fault.RESIDUAL)
            for number in attempt.contributors
            if _misstated(attempt, number, part)
        }
        if off_centre(rows, attempt.vectors.held[Kind.AGGREGATE, part, 0], attempt.radii[part]):
            guilty.add(GuiltyVerdict(part, Fault.AGGREGATE))
    return tuple(sorted(guilty))


def sentence(attempt: Attempt) -> list[Bundle]:
    """Proofs against all whom more than half find guilty, one each."""
    votes: dict[GuiltyVerdict, list[int]] = {}
    for judge, judgement in enumerate(attempt.table.all(Kind.JUDGEMENT, Judgement)):
        for verdict in set(judgement.verdicts):
            votes.setdefault(verdict, []).append(judge)
    found: dict[int, Bundle] = {}
    for verdict, judges in sorted(votes.items()):
        if 2 * len(judges) > len(attempt.roster):
            signed = tuple(
                each
                for judge in judges
                if (each := attempt.table.signed(Kind.JUDGEMENT, judge)) is not None
            )
            found.setdefault(
                verdict.whom, Bundle(attempt.context, verdict.fault, verdict.whom, None, signed)
            )
    return list(found.values())


def _misstated(attempt: Attempt, whom: int, part: int) -> bool:
    """Whether a contributor said of its part what is not so, or sent what is no number."""
    row = attempt.vectors.held[Kind.PART, whom, part]
    found = attempt.residual_of(row, part)
    return not np.isfinite(row).all() or differs(
        attempt.reported_residuals(whom)[part], found, attempt.radii[part], CONVICTED
    )
