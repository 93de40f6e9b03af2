"""Every duration of the round protocol, with its reason. Seconds throughout."""

from __future__ import annotations

from math import isfinite

import msgspec


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations of one run. The defaults suit the internet; simulations scale them down."""

    pull_s: float = 0.05  # how often lost control messages are repaired by pull: max(50 ms, 2 RTT)
    heartbeat_s: float = 0.2
    detect_s: float = 1.0  # silence after which a peer is suspected: max(1 s, 8 x p99 RTT)
    revise_s: float = 1.0  # no progress of a reduction for this long: the convener revises the plan
    # detect_s + 4 RTT: no progress of a ballot for this long: the next convener takes over.
    takeover_s: float = 1.4
    ready_grace_min_s: float = 1.0  # a straggler of one scheduling hiccup is waited for
    # Upper bound of the wait after the first Ready; a quarter of a round below it.
    ready_grace_s: float = 5.0
    # A member in the middle of a step can offer nothing: so long are the others waited for at
    # least, as a part of the round, where steps last longer than seconds.
    step_share: float = 0.0
    step_most_s: float = 60.0  # however long steps are
    fetch_s: float = 0.25  # how often a lagging or joining member asks for what was decided
    # How often a member to which nothing happens asks whether it missed a decision.
    quiet_s: float = 2.0
    # a draw is not over sooner, though nobody that was sampled has contributed: scripts start,
    # models compile
    redraw_s: float = 120.0
    # A contribution closes a round over the heads of most members only once this many times the
    # duration of an exchange have passed; 0: at once. With 9, whoever offers one as each round
    # opens costs the others a tenth of their time at most.
    least_turn: float = 0.0
    # Who is lost stays a member for so long: on a busy machine most are back within it, and out of
    # a configuration that shrank meanwhile they could not help the others to a majority.
    evict_s: float = 0.0
    keep_rounds: int = 8  # result bytes kept for laggards
    # more members than so many beat to some of each other, and take their word for the rest
    sparse_above: int = 32
    # bytes that one byte of the vector stands for: more where a small model of a simulation stands
    # for a larger one
    weight: float = 1.0

    def grace(self, round_s: float | None, ballot: int = 0, open_s: float = 0.0) -> float:
        """How long after the first Ready the convener waits for the others, given the last round's
        duration; ``open_s``: how long this one had been open then.

        In a later ballot all have been waited for already. An infinite ``ready_grace_s`` waits for
        everyone, in every ballot.
        """
        if ballot > 0 and isfinite(self.ready_grace_s):
            return self.pull_s
        if round_s is None:
            return self.ready_grace_s
        usual_s = min(self.ready_grace_s, max(self.ready_grace_min_s, 0.25 * round_s))
        share = min(self.step_share, 0.25)
        return max(usual_s, min(self.step_most_s, share * max(round_s, open_s)))
