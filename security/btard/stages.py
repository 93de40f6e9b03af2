"""The stages of an attempt, and which message each waits for."""

from __future__ import annotations

from enum import IntEnum

from .messages import Kind


class AttemptStage(IntEnum):
    """What a peer waits for."""

    COMMITS = 1
    PARTS = 2
    RESULTS = 3
    REVEALS = 4
    RESIDUALS = 5
    CHECKS = 6
    EXHIBITS = 7
    JUDGEMENTS = 8


HEARD = {
    AttemptStage.COMMITS: Kind.COMMIT,
    AttemptStage.RESULTS: Kind.RESULT,
    AttemptStage.REVEALS: Kind.REVEAL,
    AttemptStage.RESIDUALS: Kind.RESIDUALS,
    AttemptStage.CHECKS: Kind.CHECKS,
    AttemptStage.JUDGEMENTS: Kind.JUDGEMENT,
}
BEFORE = {
    Kind.RESULT: Kind.COMMIT,
    Kind.REVEAL: Kind.RESULT,
    Kind.RESIDUALS: Kind.REVEAL,
    Kind.CHECKS: Kind.RESIDUALS,
    Kind.JUDGEMENT: Kind.CHECKS,
}
