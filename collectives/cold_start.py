"""With which rounds a cold start was measured: what presets and plans know of short first rounds
(`growth`).
"""

from __future__ import annotations

COLD_STEPS = range(10, 101)
"""Inner steps a round with which "cold" was measured, and never above a member alone."""


COLD_ROUNDS, COLD_LEAST = 10, 300  # rounds of full length, or steps, of the shortest runs


COLD_CODECS = ("fp32", "bf16", "int8", "int8_dither")
"""fp32 and int8 were measured. bf16 lies between the two; int8_dither is taken to be like int8: it
loses 1.4 % of a round in place of 1 %."""


GROWTH = 20
"""Of how many rounds "cold" makes the steps in shorter ones: all of a run that has fewer. In the
sweep each doubling gained again: with 4 members, 1,000 steps and the plain mean ``grow=5``, 10 and
20 have 1.081, 1.078 and 1.050 times the loss of one machine with H = 10, 1.122, 1.109 and 1.071
with 20, 1.175, 1.137 and 1.077 with 50, 1.202, 1.143 and 1.082 with 100. More was not tried."""


def measured_cold(sync_every: int | None, codec: str, rounds: int | None) -> bool:
    """Whether "cold" was measured with rounds like these, for which members wait: of so many steps,
    in this codec, and so many of full length (None: nobody says).

    >>> measured_cold(20, "int8", 50), measured_cold(20, "int4", 50), measured_cold(200, "int8", 50)
    (True, False, False)
    >>> measured_cold(20, "int8", 5), measured_cold(100, "int8", 5)
    (False, True)
    """
    if sync_every is None or sync_every not in COLD_STEPS or codec not in COLD_CODECS:
        return False
    if rounds is None or rounds >= COLD_ROUNDS:
        return True
    return rounds * sync_every >= COLD_LEAST
