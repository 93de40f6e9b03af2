"""Which settings a run should have: those that reach a loss soonest, and why in words. Pure: equal
conditions give equal plans anywhere.

The time to a loss is the samples that it takes (`price`) over the samples a second (`estimate`).
Searched are codecs, waiting or training on meanwhile, fragments, steps a round and the delay; then
which peers are better left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ...collectives.codec_costs import PLANNED
from ...collectives.codec_names import DEFAULT_CODEC, FACTS
from ...collectives.growth import RoundLengths
from ...collectives.layout import MAX_FRAGMENTS
from ..rounds.again import LEAST_STEPS, MARGIN
from .conditions import Conditions, PeerConditions
from .estimate import ASK_S, SCRIPT_S, Choice, Estimate, RoundCost, estimate, round_of
from .price import DATA_EXPONENT, Price, price, with_plain_mean
from .whole import RunCost, full_rounds, lengths_of, run_cost

LEAST_VALUES = 1_000_000  # of a fragment: below, round trips cost more than what is saved
# A coarser codec must be this much sooner than the default: prices are off by 0.002 of the loss
# (int4 and stat2 were measured between them), which is 2 % of the samples.
CLEAR = 1.02
SPACING = 1.2  # between the lengths of rounds that are tried first
STARTS = 4  # of which the best is refined
SMALL_FLEET = 4  # peers of which every group is tried
FEW = 3  # names in a line


@dataclass(frozen=True, slots=True)
class Alternative:
    """What was not chosen: ``what`` in words, the ``share`` of its time that would be training, how
    many times as ``long`` it would take to the same loss, and ``why`` that is so.

    >>> Alternative("p0 alone", 0.99, 2.3, "one machine waits for nobody").long
    2.3
    """

    what: str
    share: float
    long: float
    why: str


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """``group``: who should be in the run; ``why``: the sentences behind it; ``reached``: whether
    the wanted share is. ``price``: what the settings cost in loss, from a table.
    ``rejected``: up to three others, the soonest first.
    """

    choice: Choice
    estimate: Estimate
    price: Price
    group: tuple[str, ...]
    why: tuple[str, ...]
    reached: bool
    rejected: tuple[Alternative, ...] = ()
    begins: RunCost | None = None
    """Its short rounds, where it begins with such."""
    run: RunCost | None = None
    """All of its rounds, where it has an end."""

    def steps(self, conditions: Conditions) -> dict[str, int]:
        """Whole steps that each of the group makes while the fastest makes ``sync_every``: none of
        who contributes to some rounds only.
        """
        peers = [peer for peer in conditions.peers if peer.name in self.group]
        fastest_s = min(peer.step_s for peer in peers)
        return {
            peer.name: int(self.choice.sync_every * fastest_s / peer.step_s + 1e-9)
            for peer in peers
        }

    def settings(self) -> dict[str, dict[str, Any]]:
        """Tables of a manifest with what was decided."""
        c = self.choice
        train: dict[str, Any] = {"sync_every": c.sync_every, "overlap": c.overlap, "delay": c.delay}
        return {
            "train": {key: value for key, value in train.items() if value is not None},
            "exchange": {"codec": c.codec, "fragments": c.fragments},
        }


def plan(conditions: Conditions) -> TrainingPlan:
    """The settings for these conditions, and the group of peers that is there soonest with them.

    Of up to SMALL_FLEET peers no group is there sooner, a single machine included. Of more, slow
    links are left out one after the other, the slowest first; then slow machines; then all but the
    fastest machine.
    """
    best = whole = _plan(conditions)
    left = conditions
    tried = [(conditions, whole)]
    for names in _groups(conditions):
        smaller = conditions.only(names)
        found = _plan(smaller)
        tried.append((smaller, found))
        sooner = judged_s(smaller, found.choice) < judged_s(left, best.choice)
        if len(names) == 1:  # it trains all of the time, which is no reason to prefer it
            better = sooner
        elif not found.reached and _slowest(smaller) <= _slowest(conditions):
            continue  # what brings nobody to the wanted share is no reason to leave an equal out
        else:
            better = sooner if found.reached == best.reached else found.reached
        if better:
            best, left = found, smaller
    begins, run = costs_of(left, best.choice, lengths_of(left, best.choice))
    return replace(
        best,
        begins=begins,
        run=run,
        why=(*_given(left), *best.why, *_group_words(conditions, whole, left, best)),
        rejected=tuple(_rejected(conditions, left, best, tried)),
    )


def synchronous_s(conditions: Conditions) -> float:
    """Wall seconds for a sample with gradient averaging in every step: all wait for the slowest
    step and for an exchange, and nothing is lost but what the codec costs.
    """
    one = round_of(conditions, DEFAULT_CODEC)
    slowest_s = max(peer.step_s for peer in conditions.peers)
    step_s = slowest_s + one.seconds + SCRIPT_S * conditions.parameters + ASK_S
    cost = price(conditions.parameters, Choice(1)).codec ** (1 / DATA_EXPONENT)
    return cost * step_s / sum(peer.samples for peer in conditions.peers)


def _rejected(
    conditions: Conditions,
    left: Conditions,
    best: TrainingPlan,
    tried: list[tuple[Conditions, TrainingPlan]],
) -> Iterator[Alternative]:
    """The fastest machine alone, the best other group, and gradients averaged in every step."""
    if len(conditions.peers) == 1:
        return
    chosen_s = seconds_a_sample(left, best.choice)

    def row(group: Conditions, found: TrainingPlan) -> Alternative:
        ratio = seconds_a_sample(group, found.choice) / chosen_s
        names = {peer.name for peer in group.peers}
        out = [peer.name for peer in conditions.peers if peer.name not in names]
        if len(names) == 1:
            what, why = f"{min(names)} alone", "one machine waits for nobody, and has no help"
        else:
            what = f"without {', '.join(out)}" if out else "all together"
            what = what if len(out) <= FEW else f"{len(names)} of {len(conditions.peers)}"
            bound, more = found.estimate.round.bound, found.estimate.rate / best.estimate.rate
            why = (
                f"rounds wait for {bound}"
                if found.estimate.share < best.estimate.share - 0.005
                else f"{more:.0%} of the samples a second"
            )
            if more >= 1:  # which is no reason to leave it
                dearer = found.price.loss / best.price.loss - 1
                why = f"{dearer:.1%} more loss by its settings, for {more:.0%} of the samples"
        return Alternative(what, found.estimate.share, ratio, why)

    groups = [
        (group, found)
        for group, found in tried
        if len(group.peers) > 1 and found.group != best.group
    ]
    if not groups and len(conditions.peers) > 2:
        fewer = conditions.only({peer.name for peer in conditions.peers} - {_last(conditions)})
        groups = [(fewer, _plan(fewer))]
    rows = list[Alternative]()
    if groups:
        rows.append(row(*min(groups, key=lambda each: seconds_a_sample(each[0], each[1].choice))))
    if len(best.group) > 1:
        quickest = min(conditions.peers, key=lambda p: (p.step_s / p.samples, p.name))
        alone = conditions.only({quickest.name})
        rows.append(row(alone, _plan(alone)))
    group = left if len(left.peers) > 1 else conditions
    slowest_s = max(peer.step_s for peer in group.peers)
    seconds = synchronous_s(group)
    share = slowest_s / (seconds * sum(peer.samples for peer in group.peers))
    bound = round_of(group, DEFAULT_CODEC).bound
    rows.append(
        Alternative(
            "gradients in every step",
            min(1.0, share),
            seconds / chosen_s,
            f'method = "gradient_averaging": each step waits for {bound}',
        )
    )
    yield from sorted(rows, key=lambda each: each.long)


def _last(conditions: Conditions) -> str:
    """The peer that is missed least."""
    return max(
        conditions.peers, key=lambda peer: (peer.step_s / peer.samples, -peer.up, peer.name)
    ).name


def _slowest(conditions: Conditions) -> float:
    return min(min(peer.up, peer.down) for peer in conditions.peers)


def _groups(conditions: Conditions) -> Iterator[set[str]]:
    """Groups without that of all: the larger ones first, since of two that are there as soon the
    first is kept, and of groups that are alike only one. Of one, the fastest machine.
    """
    order = sorted(
        conditions.peers, key=lambda peer: (-min(peer.up, peer.down), peer.step_s, peer.name)
    )
    if len(order) > SMALL_FLEET:
        yield from _first_ones(order, [-min(peer.up, peer.down) for peer in order])
        by_step = sorted(order, key=lambda peer: peer.step_s / peer.samples)
        yield from _first_ones(by_step, [peer.step_s / peer.samples for peer in by_step])
        yield {by_step[0].name}
        return
    seen = set[tuple[Any, ...]]()
    for size in range(len(order) - 1, 0, -1):
        for group in combinations(order, size):
            names = {peer.name for peer in group}
            kind = tuple((peer.up, peer.down, peer.step_s, peer.samples) for peer in group)
            links = frozenset(ends for ends in conditions.links if set(ends) <= names)
            if (kind, links) not in seen:
                seen.add((kind, links))
                yield names


def _first_ones(order: Sequence[PeerConditions], slowness: Sequence[float]) -> Iterator[set[str]]:
    """The first of ``order``, as many of two and more as end before a slower one."""
    for count in range(len(order) - 1, 1, -1):
        if slowness[count] > slowness[count - 1]:
            yield {peer.name for peer in order[:count]}


def seconds_a_sample(conditions: Conditions, choice: Choice, one: RoundCost | None = None) -> float:
    """Wall seconds of the whole group for what synchronous training learns from one sample. Results
    that must be there in time may take MARGIN times as long as estimated.
    """
    found = estimate(conditions, choice, one=one, margin=MARGIN)
    seconds = price_of(conditions, choice).samples / found.rate
    lengths = lengths_of(conditions, choice)
    if not lengths.growth or conditions.steps is None or len(conditions.peers) == 1:
        return seconds
    rounds = full_rounds(conditions.steps, choice.sync_every)
    assert rounds is not None
    whole = run_cost(
        conditions, choice, lengths, lengths.rounds_for(rounds), one=one, margin=MARGIN
    )
    return seconds * whole.seconds / (rounds * found.period_s)


def costs_of(
    conditions: Conditions, choice: Choice, lengths: RoundLengths
) -> tuple[RunCost | None, RunCost | None]:
    """What the rounds that begin short cost, and what the whole run does; None: there are none, and
    it has no end.
    """
    short, full = lengths.short_rounds, full_rounds(conditions.steps, choice.sync_every)
    rounds = None if full is None else lengths.rounds_for(full)
    short = short if rounds is None else min(short, rounds)
    return (
        run_cost(conditions, choice, lengths, short) if lengths.growth else None,
        None if rounds is None else run_cost(conditions, choice, lengths, rounds),
    )


def price_of(conditions: Conditions, choice: Choice, *, plain: bool | None = None) -> Price:
    """What settings cost in loss with the outer step that "auto" takes. ``plain``: whether it is
    the plain mean, where that is known.
    """
    found = price(conditions.parameters, choice, len(conditions.peers))
    if plain is None:
        plain = not lengths_of(conditions, choice).growth
    if not (plain and conditions.cold) or len(conditions.peers) == 1:
        return found
    return with_plain_mean(found, choice.sync_every, conditions.steps)


def judged_s(conditions: Conditions, choice: Choice, one: RoundCost | None = None) -> float:
    """What the settings are judged by: `seconds_a_sample`, times CLEAR with a codec that is coarser
    than the default. Nobody trades accuracy for a tie.
    """
    coarser = FACTS[choice.codec].round_error > FACTS[DEFAULT_CODEC].round_error
    return seconds_a_sample(conditions, choice, one) * (CLEAR if coarser else 1.0)


def _plan(conditions: Conditions) -> TrainingPlan:
    names = tuple(peer.name for peer in conditions.peers)
    if len(names) == 1:
        held = conditions.held
        codec = next(
            (each for each in PLANNED if held is None or (each, "none") in held), PLANNED[0]
        )
        choice = Choice(conditions.longest, codec)
        found, cost = estimate(conditions, choice), price(conditions.parameters, choice, 1)
        return TrainingPlan(
            choice, found, cost, names, ("One peer waits for nobody.",), reached=True
        )
    search = _PlanSearch(conditions)
    overlaps = ("none", "late") if conditions.longest > 1 else ("none",)  # a delay takes a step
    families = [
        search.best(codec, overlap)
        for overlap in overlaps
        for codec in PLANNED
        if conditions.held is None or (codec, overlap) in conditions.held
    ]
    families.sort(key=search.key)
    chosen = families[0]
    found = estimate(conditions, chosen, one=search.round(chosen))
    return TrainingPlan(
        chosen,
        found,
        price_of(conditions, chosen),
        names,
        (*_family_words(search, families), _verdict(conditions, found)),
        reached=search.reaches(chosen),
    )


class _PlanSearch:
    """The best settings of each codec, under fixed conditions; rounds are estimated once."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self._rounds: dict[tuple[str, int], RoundCost] = {}
        self._shares: dict[float, dict[str, float]] = {}

    def round(self, choice: Choice) -> RoundCost:
        """What one fragment's round costs."""
        key = choice.codec, choice.fragments
        if key not in self._rounds:
            self._rounds[key] = round_of(self.conditions, *key, self._shares)
        return self._rounds[key]

    def reaches(self, choice: Choice) -> bool:
        """Whether the wanted share of the time is training."""
        wanted = self.conditions.share
        return wanted is None or self._share(choice) >= wanted

    def key(self, choice: Choice) -> tuple[float, float]:
        """Least first: those that reach the wanted share, the soonest first; then those that come
        nearest to it."""
        if self.reaches(choice):
            return 0.0, judged_s(self.conditions, choice, self.round(choice))
        return 1.0, -self._share(choice)

    def best(self, codec: str, overlap: str) -> Choice:
        """Of the settings with this codec: the best that were tried, refined in single steps."""
        tried = sorted(self._tried(codec, overlap), key=self.key)
        return min((self._refined(choice) for choice in tried[:STARTS]), key=self.key)

    def _refined(self, choice: Choice) -> Choice:
        while True:
            nearer = min(self._around(choice), key=self.key, default=choice)
            if not self.key(nearer) < self.key(choice):
                return choice
            choice = nearer

    def _share(self, choice: Choice) -> float:
        return estimate(self.conditions, choice, one=self.round(choice), margin=MARGIN).share

    def _tried(self, codec: str, overlap: str) -> Iterator[Choice]:
        longest, steps = self.conditions.longest, float(min(LEAST_STEPS, self.conditions.longest))
        while steps < longest:
            yield from self._delayed(codec, overlap, math.ceil(steps))
            steps *= SPACING
        yield from self._delayed(codec, overlap, longest)

    def _delayed(self, codec: str, overlap: str, steps: int) -> Iterator[Choice]:
        if overlap == "none":
            yield Choice(steps, codec)
            return
        for fragments in range(1, min(MAX_FRAGMENTS, steps - 1) + 1):
            if not self._may(fragments):
                return
            needed, room = self._enough(codec, fragments), (steps - 1) // fragments
            for delay in {min(room, needed), min(room, max(1, needed // 2)), 1}:
                yield Choice(steps, codec, "late", delay, fragments)

    def _around(self, choice: Choice) -> Iterator[Choice]:
        """Settings that differ by a little in the steps of a round, the delay, or both; or by one
        fragment, which changes what delay is enough.
        """
        least = min(LEAST_STEPS, self.conditions.longest)
        for fragments in (choice.fragments - 1, choice.fragments + 1):
            if choice.delay is not None and self._may(fragments):
                enough = self._enough(choice.codec, fragments)
                for delay in {choice.delay, enough, max(1, enough - 1)}:
                    steps = {choice.sync_every, fragments * delay + 1, fragments * (delay + 1)}
                    for each in steps:
                        if least <= each <= self.conditions.longest and delay * fragments < each:
                            yield Choice(each, choice.codec, choice.overlap, delay, fragments)
        for more in (-8, -1, 0, 1, 8):
            steps = choice.sync_every + more
            if not least <= steps <= self.conditions.longest:
                continue
            if choice.delay is None:
                yield replace(choice, sync_every=steps)
                continue
            for later in (-8, -1, 0, 1, 8):
                delay = choice.delay + later
                if delay >= 1 and delay * choice.fragments < steps:
                    yield replace(choice, sync_every=steps, delay=delay)

    def _may(self, fragments: int) -> bool:
        """Whether the model may be cut into so many."""
        large = self.conditions.parameters >= fragments * LEAST_VALUES
        return 1 <= fragments <= MAX_FRAGMENTS and (fragments == 1 or large)

    def _enough(self, codec: str, fragments: int) -> int:
        """Steps until the result of one of so many fragments is surely there."""
        one = self.round(Choice(1, codec, "late", 1, fragments))
        return max(1, math.ceil(MARGIN * one.seconds / self.conditions.fastest_s))


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


def _family_words(search: _PlanSearch, families: Sequence[Choice]) -> Iterator[str]:
    """The best settings of each codec, the best codec first, and how much longer it would take."""
    conditions = search.conditions
    least, *_ = search.key(families[0])
    first_s = seconds_a_sample(conditions, families[0], search.round(families[0]))
    for choice in families:
        found = estimate(conditions, choice, one=search.round(choice))
        cost = price_of(conditions, choice)
        late = choice.overlap != "none"
        words = (
            f"{choice.codec}, {'training on meanwhile' if late else 'waiting for each round'}, "
            f"{choice.sync_every} steps a round"
        )
        if late:
            pieces = f" of {choice.fragments} fragments" if choice.fragments > 1 else ""
            words += f", results{pieces} {choice.delay} steps late"
        words += f": {found.share:.1%} training, {cost.loss - 1:.1%} more loss"
        if choice is families[0]:
            yield f"Chosen: {words}; {_round_words(found)}."
        elif search.key(choice)[0] > least:
            yield f"{words}; less training than you want."
        elif least == 0:
            longer = seconds_a_sample(conditions, choice, search.round(choice)) / first_s - 1
            if longer >= 0:
                yield f"{words}; {longer:.0%} longer to the same loss."
            else:
                yield f"{words}; only {-longer:.1%} sooner to the same loss, and coarser."


def _round_words(found: Estimate) -> str:
    one = found.round
    costs = {
        f"transfer over {one.bound}": one.transfer_s,
        "round trips": one.latency_s,
        "work on the values": one.work_s,
    }
    parts = " + ".join(f"{_s(seconds)} {what}" for what, seconds in costs.items())
    return (
        f"{'a round' if found.fragments == 1 else 'the round of one fragment'} takes "
        f"{_s(one.seconds)} ({parts})"
    )


def _verdict(conditions: Conditions, found: Estimate) -> str:
    source = (
        "What settings cost in loss is taken from a table: measured on small models, published of "
        f"large ones (docs/benchmarks-training.md). Rounds have at most {conditions.longest} steps."
    )
    if conditions.share is None and found.share < 0.5:
        return (
            f"Only {found.share:.0%} of the time is training: faster links, longer rounds or a "
            "smaller model would help, perhaps a codec that is sparse both ways "
            f"(docs/optimizers.md). {source}"
        )
    if conditions.share is None or found.share >= conditions.share:
        return source
    return (
        f"Nothing reaches {conditions.share:.0%}. Faster links, longer rounds or a smaller model "
        f"would help. {source}"
    )


def _group_words(
    conditions: Conditions, whole: TrainingPlan, left: Conditions, best: TrainingPlan
) -> Sequence[str]:
    kept = {peer.name for peer in left.peers}
    out = [peer.name for peer in conditions.peers if peer.name not in kept]
    if not out:
        return []
    gain = 1 - seconds_a_sample(left, best.choice) / seconds_a_sample(conditions, whole.choice)
    if len(kept) == 1:
        return [
            f"Train on {min(kept)} alone: it is at the same loss {gain:.0%} sooner than all "
            "together would be. Faster links, faster machines or a smaller model would make a run "
            "worth it."
        ]
    return [
        f"Without {', '.join(out)} the others are at the same loss {gain:.0%} sooner than all "
        "together would be: leave them out, or plan again when their links or machines are others."
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
