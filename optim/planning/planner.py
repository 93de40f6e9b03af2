"""Which settings a run should have: the ladder of `plan`, and every step of it in words. Pure:
equal conditions give equal plans anywhere.

Each rung takes the shortest round that keeps training at the wanted share of the time; what is too
long for the model's quality goes to the next rung, which costs quality in another way:

    1  int8, waiting for each round         free of loss (measured)
    2  int4, waiting                        within 0.5 % of fp32 (measured)
    3  int8, training on meanwhile          results come late: 1 % more than waiting, in fragments,
       too (measured)
    4  int4, training on meanwhile

Where no rung fits, the one with the largest share at the longest round is taken, and said to fall
short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...collectives.layout import MAX_FRAGMENTS
from .conditions import Conditions
from .estimate import Choice, Estimate, estimate, round_of

# shorter rounds did not come closer to synchronous training (5 against 10, measured on 42k
# parameters)
LEAST_STEPS = 10
# results are due this much later than estimated: links are never exactly as fast as they were
MARGIN = 1.25
HARMLESS_STEPS = 5  # of delay (arXiv 2501.18512)
LEAST_VALUES = 1_000_000  # of a fragment: below, round trips cost more than what is saved
GAIN = 2 / 3  # twice as many fragments must bring the delay down to this part of it


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """``group``: who should be in the run; ``why``: the sentences behind it; ``reached``: whether
    the wanted share is.
    """

    choice: Choice
    estimate: Estimate
    group: tuple[str, ...]
    why: tuple[str, ...]
    reached: bool

    def settings(self) -> dict[str, dict[str, Any]]:
        """Tables of a manifest with what was decided."""
        c = self.choice
        train: dict[str, Any] = {"sync_every": c.sync_every, "overlap": c.overlap, "delay": c.delay}
        return {
            "train": {key: value for key, value in train.items() if value is not None},
            "exchange": {"codec": c.codec, "fragments": c.fragments},
        }


def plan(conditions: Conditions) -> TrainingPlan:
    """The settings for these conditions, and the group of peers that trains most with them."""
    order = sorted(
        conditions.peers, key=lambda peer: (-min(peer.up, peer.down), peer.step_s, peer.name)
    )
    best = whole = _plan(conditions)
    left = conditions
    for count in range(len(order) - 1, 1, -1):  # of one peer there is no swarm
        if min(order[count].up, order[count].down) >= min(
            order[count - 1].up, order[count - 1].down
        ):
            continue  # alike: leaving one of them out gains nothing
        smaller = conditions.only({peer.name for peer in order[:count]})
        found = _plan(smaller)
        if _speed(smaller, found) > _speed(left, best):
            best, left = found, smaller
    return replace(
        best, why=(*_given(left), *best.why, *_group_words(conditions, whole, left, best))
    )


def _plan(conditions: Conditions) -> TrainingPlan:
    if len(conditions.peers) == 1:
        choice = Choice(min(conditions.longest, 100))
        return TrainingPlan(
            choice,
            estimate(conditions, choice),
            (conditions.peers[0].name,),
            ("One peer waits for nobody.",),
            True,
        )
    why: list[str] = []
    short: list[Choice] = []
    chosen: Choice | None = None
    for codec, overlap in (("int8", False), ("int4", False), ("int8", True), ("int4", True)):
        choice, words = _overlapped(conditions, codec) if overlap else _waiting(conditions, codec)
        why.append(words)
        if choice.sync_every <= conditions.longest:
            chosen = choice
            break
        short.append(_cut(choice, conditions.longest))
    reached = chosen is not None
    chosen = chosen or max(short, key=lambda choice: estimate(conditions, choice).share)
    found = estimate(conditions, chosen)
    why.append(_verdict(conditions, chosen, found, reached))
    return TrainingPlan(
        chosen, found, tuple(peer.name for peer in conditions.peers), tuple(why), reached
    )


def _waiting(conditions: Conditions, codec: str) -> tuple[Choice, str]:
    """The shortest round that keeps the share while scripts wait."""
    one = estimate(conditions, Choice(1, codec))
    needed = _steps(conditions, one.waiting_s + one.script_s)
    words = (
        f"{codec}, waiting for each round: {_round_words(conditions, codec, 1)}; "
        f"{conditions.share:.0%} training then needs {needed} steps a round"
    )
    return Choice(needed, codec), words + _limit(conditions, needed)


def _overlapped(conditions: Conditions, codec: str) -> tuple[Choice, str]:
    """The shortest round in which results arrive before they are due; in fragments where that makes
    them come sooner.
    """
    found = _in_fragments(conditions, codec, 1)
    while (count := 2 * found.fragments) <= MAX_FRAGMENTS and (found.delay or 0) > HARMLESS_STEPS:
        finer = _in_fragments(conditions, codec, count)
        if conditions.parameters < count * LEAST_VALUES or finer.sync_every > conditions.longest:
            break
        if (finer.delay or 0) > GAIN * (found.delay or 0):
            break
        found = finer
    pieces = f" in {found.fragments} fragments, each" if found.fragments > 1 else ","
    words = (
        f"{codec}, training on meanwhile: "
        f"{_round_words(conditions, codec, found.fragments)}{pieces} due {found.delay} steps later "
        f"(a quarter to spare), so a round needs {found.sync_every} steps"
    )
    return found, words + _limit(conditions, found.sync_every)


def _in_fragments(conditions: Conditions, codec: str, fragments: int) -> Choice:
    step_s = min(peer.step_s for peer in conditions.peers)
    delay = max(1, math.ceil(MARGIN * round_of(conditions, codec, fragments).seconds / step_s))
    one = estimate(conditions, Choice(delay + 1, codec, "late", delay, fragments))
    steps = max(_steps(conditions, one.script_s), fragments * delay + 1)
    return Choice(steps, codec, "late", delay, fragments)


def _steps(conditions: Conditions, lost_s: float) -> int:
    """How many inner steps must share the loss of so many seconds a round."""
    needed = (
        conditions.share
        / (1 - conditions.share)
        * lost_s
        / min(peer.step_s for peer in conditions.peers)
    )
    return max(min(LEAST_STEPS, conditions.longest), math.ceil(needed - 1e-9))


def _cut(choice: Choice, longest: int) -> Choice:
    """The same with a round as long as is allowed."""
    delay = None if choice.delay is None else max(0, min(choice.delay, longest - 1))
    return replace(
        choice, sync_every=longest, delay=delay, fragments=min(choice.fragments, longest)
    )


def _speed(conditions: Conditions, found: TrainingPlan) -> float:
    """Inner steps a second of all peers together."""
    return found.estimate.share * sum(1 / peer.step_s for peer in conditions.peers)


# ── words
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def _given(conditions: Conditions) -> Sequence[str]:
    steps = [peer.step_s for peer in conditions.peers]
    step = f"a step takes {_ms(min(steps))}" + (
        f" to {_ms(max(steps))}" if max(steps) > min(steps) else ""
    )
    slow = min(conditions.peers, key=lambda peer: min(peer.up, peer.down))
    count = len(conditions.peers)
    return [
        f"{count} peer{'s' * (count > 1)}, {conditions.parameters:,} parameters, {step}; the "
        f"slowest link, {slow.name}'s, carries {8e-6 * min(slow.up, slow.down):.4g} Mbit/s, the "
        f"longest round trip is {_ms(conditions.rtt_s)}."
    ]


def _round_words(conditions: Conditions, codec: str, fragments: int) -> str:
    one = round_of(conditions, codec, fragments)
    costs = {
        f"transfer over {one.bound}": one.transfer_s,
        "round trips": one.latency_s,
        "work on the values": one.work_s,
    }
    parts = " + ".join(f"{_s(seconds)} {what}" for what, seconds in costs.items())
    return (
        f"{'a round' if fragments == 1 else 'the round of one fragment'} takes "
        f"{_s(one.seconds)} ({parts})"
    )


def _limit(conditions: Conditions, steps: int) -> str:
    if steps <= conditions.longest:
        return "."
    source = (
        "as you say"
        if conditions.max_steps
        else f"for a model of {conditions.parameters:,} parameters"
    )
    return f", more than the {conditions.longest} that are allowed {source}."


def _verdict(conditions: Conditions, choice: Choice, found: Estimate, reached: bool) -> str:
    if not reached:
        return (
            f"Nothing reaches {conditions.share:.0%}: with {conditions.longest} steps a round, "
            f"{choice.codec} and overlap {choice.overlap!r} {found.share:.1%} of the time is "
            "training. Faster links, longer rounds or a smaller model would help."
        )
    why = f"the shortest round, {choice.sync_every} steps"
    if choice.sync_every == LEAST_STEPS:
        why = f"{LEAST_STEPS} steps, since shorter rounds bring nothing"
    return (
        f"Chosen: {choice.codec}, overlap {choice.overlap!r}, {why}: {found.share:.1%} "
        "of the time is training."
    )


def _group_words(
    conditions: Conditions, whole: TrainingPlan, left: Conditions, best: TrainingPlan
) -> Sequence[str]:
    kept = {peer.name for peer in left.peers}
    out = [peer.name for peer in conditions.peers if peer.name not in kept]
    if not out:
        return []
    gain = _speed(left, best) / _speed(conditions, whole) - 1
    return [
        f"Without {', '.join(out)} the others make {gain:.0%} more steps than all together would: "
        "leave them out, or let them join when their links are faster."
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
