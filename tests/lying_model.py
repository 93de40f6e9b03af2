"""All that a round under lying members can do, state by state:
docs/internals/protocol/byzantine.md.

Messages are a soup that only grows: whatever was sent may arrive at any time, any number of times,
or never. The liars need no state. What they can sign is there from the start: every echo and every
vote of theirs, promises that claim nothing, or any value for which there is a certificate; and they
own every ballot, since an honest convener proposes nothing that a lying one could not. So a state
is what honest members have on their disks, and what they have signed. A crash takes what is
volatile, which is nothing by the rules: it does harm in broken variants.

Values 0 and 1 are valid, 2 is not. Checked in every state: no two values are decided, no ballot has
two certificates, nothing invalid is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

VALUES, INVALID = 3, 2
SILENT, NOTHING = -2, -1  # a promise that was not given; one that claims no value

Node = tuple[int, int, int, int, int, tuple[int, ...]]
"""promised, echoed, accepted (slots: ballot * VALUES + value, or NOTHING); signed: echoes and votes
(masks of slots), promise for each ballot.
"""
State = tuple[Node, ...]
FIELDS = {"promised": 0, "echoed": 1, "accepted": 2}


@dataclass(frozen=True)
class Rules:
    """The protocol, and what is broken of it. ``volatile``: what members forget in a crash."""

    honest: int
    liars: int
    ballots: int
    quorum: int = 0  # 0: as the protocol has it
    echoes: bool = True
    justified: bool = True
    claims_proven: bool = True
    validated: bool = True
    promise_binds: bool = True
    highest: bool = True
    decides_by_echoes: bool = False
    volatile: tuple[str, ...] = ()

    @property
    def needed(self) -> int:
        """How many honest members complete a quorum, where all liars help."""
        members = self.honest + self.liars
        return (self.quorum or (members + self.liars) // 2 + 1) - self.liars


class Wrong(Exception):
    """A state that must not be."""


def certified(rules: Rules, state: State, slot: int) -> bool:
    """Whether a quorum of echoes can be shown."""
    return sum(node[3] >> slot & 1 for node in state) >= rules.needed


def proposable(rules: Rules, state: State, ballot: int) -> int:
    """The values (a mask) that a convener can justify in this ballot: by promises of a quorum, or
    by none in ballot 0.
    """
    free = (1 << VALUES) - 1 if not rules.validated else (1 << VALUES) - 1 - (1 << INVALID)
    if ballot == 0 or not rules.justified:
        return free
    claims = sorted(node[5][ballot] for node in state if node[5][ballot] != SILENT)
    if len(claims) < rules.needed:
        return 0
    lower = range(ballot * VALUES)
    lies = (
        [
            slot
            for slot in lower
            if not rules.claims_proven or not rules.echoes or certified(rules, state, slot)
        ]
        if rules.liars
        else []
    )
    found = 0
    for top in set(claims[rules.needed - 1 :]):
        for claim in (top, *(lie for lie in lies if lie > top or not rules.highest)):
            found |= free if claim == NOTHING else 1 << claim % VALUES
    return found


def may(rules: Rules, node: Node, ballot: int) -> bool:
    """Whether what it has promised lets it take part in a ballot."""
    return ballot >= node[0] or not rules.promise_binds


def moves(rules: Rules, state: State) -> Iterator[tuple[int, Node]]:
    """Every step of every honest member, as its new state."""
    for ballot in range(rules.ballots):
        offered = proposable(rules, state, ballot)
        slots = range(ballot * VALUES, (ballot + 1) * VALUES)
        complete = [
            slot
            for slot in slots
            if (certified(rules, state, slot) if rules.echoes else offered >> slot % VALUES & 1)
        ]
        for index, node in enumerate(state):
            promised, echoed, accepted, echoes, votes, promises = node
            if ballot > max(0, promised) and promises[ballot] == SILENT:
                yield (
                    index,
                    (
                        ballot,
                        echoed,
                        accepted,
                        echoes,
                        votes,
                        (*promises[:ballot], accepted, *promises[ballot + 1 :]),
                    ),
                )
            if offered and rules.echoes and may(rules, node, ballot) and echoed < ballot * VALUES:
                for slot in slots:
                    if offered >> slot % VALUES & 1:
                        yield (
                            index,
                            (
                                max(promised, ballot),
                                slot,
                                accepted,
                                echoes | 1 << slot,
                                votes,
                                promises,
                            ),
                        )
            if may(rules, node, ballot):
                for slot in complete:
                    if accepted != slot and (rules.echoes or accepted // VALUES != ballot):
                        yield (
                            index,
                            (
                                max(promised, ballot),
                                echoed,
                                slot,
                                echoes,
                                votes | 1 << slot,
                                promises,
                            ),
                        )
    for index, node in enumerate(state):
        for name in rules.volatile:
            if node[FIELDS[name]] != NOTHING:
                yield index, (*node[: FIELDS[name]], NOTHING, *node[FIELDS[name] + 1 :])


def check(rules: Rules, state: State) -> None:
    """Raise Wrong for what must not be."""
    signed = 3 if rules.decides_by_echoes else 4
    decided, proven = set[int](), set[int]()
    for slot in range(rules.ballots * VALUES):
        if sum(node[signed] >> slot & 1 for node in state) >= rules.needed:
            decided.add(slot % VALUES)
        if rules.echoes and certified(rules, state, slot):
            if slot // VALUES in proven:
                raise Wrong(f"two certificates in ballot {slot // VALUES}: {state}")
            proven.add(slot // VALUES)
    if len(decided) > 1:
        raise Wrong(f"two values are decided: {state}")
    if INVALID in decided:
        raise Wrong(f"what is decided is not valid: {state}")


def normal(rules: Rules, state: State) -> State:
    """The same state for all that can still happen and is checked: without what no longer matters,
    members and values in one order.

    Promises for a ballot matter while somebody can echo in it; echoes while they may become a
    certificate, then only that they have; votes alike.
    """
    if not rules.volatile and rules.promise_binds:
        echoed = min(
            max(0, node[0], node[1] // VALUES + 1) for node in state
        )  # the first ballots in which somebody still may
        voted = min(max(0, node[0]) for node in state)
        echoes, votes = (
            _settled(rules, state, kind, first * VALUES)
            for kind, first in ((3, echoed), (4, voted))
        )
        state = tuple(
            (
                *node[:3],
                node[3] & echoes[0] | echoes[1],
                node[4] & votes[0] | votes[1],
                (SILENT,) * echoed + node[5][echoed:],
            )
            for node in state
        )
    swapped = tuple(sorted(swap(rules, node) for node in state))
    return min(tuple(sorted(state)), swapped)


def _settled(rules: Rules, state: State, kind: int, first: int) -> tuple[int, int]:
    """Of what was signed: the slots that may still become complete, as all from ``first`` on may,
    and those that are.
    """
    counts = [
        sum(node[kind] >> slot & 1 for node in state) for slot in range(rules.ballots * VALUES)
    ]
    full = sum(1 << slot for slot, count in enumerate(counts) if count >= rules.needed)
    return sum(1 << slot for slot in range(first, len(counts))), full


def swap(rules: Rules, node: Node) -> Node:
    """With values 0 and 1 exchanged."""

    def other(slot: int) -> int:
        return slot if slot < 0 or slot % VALUES == INVALID else slot + (1, -1)[slot % VALUES]

    def mirrored(mask: int) -> int:
        zeros = sum(1 << ballot * VALUES for ballot in range(rules.ballots))
        return (mask & zeros) << 1 | mask >> 1 & zeros | mask & zeros << INVALID

    promised, echoed, accepted, echoes, votes, promises = node
    return (
        promised,
        other(echoed),
        other(accepted),
        mirrored(echoes),
        mirrored(votes),
        tuple(map(other, promises)),
    )


def beginning(rules: Rules) -> State:
    """Nobody has said anything."""
    return ((NOTHING, NOTHING, NOTHING, 0, 0, (SILENT,) * rules.ballots),) * rules.honest


def explore(rules: Rules, *, reduced: bool = True, most: int = 100_000) -> set[State]:
    """All reachable states; with ``reduced`` one of each kind (`normal`). Raises Wrong, and
    OverflowError after ``most``.
    """
    first = beginning(rules)
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        for index, node in moves(rules, state):
            found = (*state[:index], node, *state[index + 1 :])
            found = normal(rules, found) if reduced else found
            if found not in seen:
                check(rules, found)
                seen.add(found)
                todo.append(found)
                if len(seen) > most:
                    raise OverflowError(f"more than {most} states")
    return seen


def wander(rules: Rules, rng: Random, steps: int = 1000) -> State:
    """Where one random path ends, for systems too large to be explored. Raises Wrong."""
    state = beginning(rules)
    for _ in range(steps):
        found = list(moves(rules, state))
        if not found:
            break
        index, node = rng.choice(found)
        state = (*state[:index], node, *state[index + 1 :])
        check(rules, state)
    return state
