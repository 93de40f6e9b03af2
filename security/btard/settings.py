"""What all peers of a run have in common before its first step."""

from __future__ import annotations

import msgspec


class AttemptSettings(msgspec.Struct, frozen=True):
    """Numbers of the protocol. Times are seconds.

    radius: at which differences of whole vectors are clipped in the first step; later ones take it
    from distances seen (`history`). validators: how many peers check another's last gradient
    instead of computing one. tolerance: relative error of a recomputed gradient above which its
    validator accuses; judges convict above half of it, so that machines that round differently
    agree: five times the noise between two of them, or more. timeout_s: after it something is asked
    for, after twice that it is testified to be missing; more than six times the longest delay of a
    message. compute_s: the same where a gradient is computed. patience: how often a peer's part may
    come late before it is asked for at once (`waiting.Late`). intervals: of the local steps behind
    a gradient, at most 63 (`trail`); 0: none. least: with fewer peers nothing goes on.
    """

    radius: float
    validators: int = 1
    tolerance: float = 1e-2
    timeout_s: float = 5.0
    compute_s: float = 60.0
    patience: int = 3
    intervals: int = 0
    least: int = 3
