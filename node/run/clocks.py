"""What peers say of this machine's clock, and when that says that it is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ...collectives.errors import NetworkError

WARN_S, LIMIT_S = 30.0, 300.0
"""Signed records are refused when the clocks of who signs and who reads are further apart than the
latter.
"""


def clock_off(ahead_s: Sequence[float]) -> tuple[float, int] | None:
    """By how many seconds our clock is ahead of those that were asked (the lower median), and how
    many of them agree; None: nobody was asked.
    """
    if not ahead_s:
        return None
    off = sorted(ahead_s)[(len(ahead_s) - 1) // 2]
    return off, sum(abs(each - off) <= WARN_S for each in ahead_s)


def wrong_clock(ahead_s: Sequence[float]) -> NetworkError | None:
    """E120, where more than half of those that were asked agree that our clock is off by more than
    `LIMIT_S`.
    """
    found = clock_off(ahead_s)
    if found is None:
        return None
    off, agree = found
    if abs(off) <= LIMIT_S or 2 * agree <= len(ahead_s):
        return None
    side = "ahead of" if off > 0 else "behind"
    return NetworkError(
        f"this machine's clock is {abs(off):,.0f} s {side} {agree} of {len(ahead_s)} peers",
        code="E120",
        exit_code=75,
        why=(
            f"Signed records carry the time; beyond {LIMIT_S:g} s the others "
            "refuse ours and we theirs."
        ),
        hint="sudo timedatectl set-ntp true      then: atoll netcheck",
    )
