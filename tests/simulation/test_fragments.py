"""A run in fragments: each a log of its own, decided for itself, beside the others; one membership,
one data plane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seeds import daily

from atoll.collectives.api import all_reduce
from atoll.collectives.cutting import cut
from atoll.collectives.errors import ConfigError, LocalProtocolError, ModelMismatchError
from atoll.collectives.layout import Layout, make_layout
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import FragmentSwarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.session.fragments import Fragments, fragment_log
from atoll.node.simulation.local_member import LocalMember

LAYOUT = make_layout([("a", (4,)), ("b", (4,)), ("c", (2, 2))])
P = 3
SETTINGS = RunSettings(
    codec="fp32", fragments=P, outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
)


def run_of(member: LocalMember) -> Fragments:
    run = member._node().run
    assert isinstance(run, Fragments)
    return run


def enter(member: LocalMember, count: int) -> None:
    """Until all fragments have ``count`` members. All start from zero, so states of different
    fragments hold the same bytes.
    """
    member.open(LAYOUT, lambda initial: None)
    while any(len(session.config_peers()) < count for session in run_of(member).sessions):
        member.sleep(0.1)


def fill(flat: torch.Tensor, value: float) -> None:
    flat.fill_(value)


def give(member: LocalMember, fragment: int, value: float, base: int | None = None) -> Outcome:
    """Contribute a constant and wait: with the plain outer step of rate 1 the anchor falls by the
    mean.
    """
    return member.contribute_fragment(
        fragment, samples=1, write=lambda flat: fill(flat, value), base=base
    ).wait(60.0)


def play(
    count: int,
    body: Callable[[LocalMember], Any],
    arrange: Callable[[LocalSwarm], object] = lambda swarm: None,
) -> list[Any]:
    ended = set[int]()
    swarm = LocalSwarm(count, settings=SETTINGS)
    arrange(swarm)

    def script(member: Any) -> Any:
        try:
            return body(member)
        finally:
            ended.add(member.index)
            while not ended >= {peer.index for peer in swarm.peers if peer.process is not None}:
                member.sleep(0.5)

    return swarm.run(script, limit_s=600.0)


def anchors(member: LocalMember) -> list[list[float]]:
    return [[float(value) for value in set(_values(member, number))] for number in range(P)]


def _values(member: LocalMember, fragment: int) -> list[float]:
    """A fragment's anchor."""
    view = member.fragment_anchor(fragment)
    flat = torch.empty(view.numel)
    view.copy_into(flat)
    return flat.tolist()


@pytest.mark.parametrize(
    ("lengths", "fragments", "expected"),
    [
        ((10, 0, 3, 3, 4, 100, 1), 1, [121]),
        ((10, 0, 3, 3, 4, 100, 1), 2, [20, 101]),
        ((10, 0, 3, 3, 4, 100, 1), 6, [10, 3, 3, 4, 100, 1]),
        ((100,) * 12, 4, [300] * 4),
        ((100,) * 12, 5, [200, 300, 200, 300, 200]),
        ((0, 5, 0, 5, 0), 2, [5, 5]),
        ((1, 1, 50), 3, [1, 1, 50]),
    ],
)
def test_a_layout_is_cut_between_tensors(
    lengths: tuple[int, ...], fragments: int, expected: list[int]
) -> None:
    layout = make_layout([(f"t{index}", (length,)) for index, length in enumerate(lengths)])
    parts = cut(layout, fragments)
    assert [part.numel for part in parts] == expected
    assert [part.check() for part in parts] == [None] * fragments
    assert [(spec.name, spec.shape) for part in parts for spec in part.tensors] == [
        (spec.name, spec.shape) for spec in layout.tensors
    ]


@pytest.mark.parametrize("fragments", [0, 3])
def test_a_layout_that_cannot_be_cut_so_says_so(fragments: int) -> None:
    with pytest.raises(ConfigError, match=f"2 tensors do not make {fragments} fragments"):
        cut(
            Layout((*make_layout([("a", (1,)), ("none", (0,)), ("b", (2,))]).tensors,), 3),
            fragments,
        )


def test_rounds_of_all_fragments_are_under_way_at_once_and_each_counts_for_itself() -> None:
    def body(member: LocalMember) -> Any:
        enter(member, 3)
        assert isinstance(member, FragmentSwarm)
        assert (member.fragments, run_of(member).bounds(LAYOUT)) == (3, [(0, 4), (4, 8), (8, 12)])
        with pytest.raises(LocalProtocolError, match="cut into 3 fragments"):
            member.contribute(samples=1, write=lambda flat: None)
        pending = [
            member.contribute_fragment(
                k, samples=1, write=lambda flat, k=k: fill(flat, 10.0 * k + member.index)
            )
            for k in range(P)
        ]
        with pytest.raises(LocalProtocolError, match="still undecided"):
            give(member, 1, 0.0)
        assert not any(one.done() for one in pending)
        first = [one.wait(60.0) for one in reversed(pending)]
        second = give(member, 2, 1.0)
        member.sleep(2.0)
        return first, second, anchors(member), run_of(member).cut, member.anchor().round

    for first, second, held, cut_, round_ in play(3, body):
        assert all(
            (o.status, o.counted, len(o.contributors), o.round) == ("committed", True, 3, 1)
            for o in first
        )
        assert (second.round, len(second.contributors)) == (2, 3)
        assert held == [[-1.0], [-11.0], [-22.0]]
        assert (cut_, round_) == ({0: 1, 1: 1, 2: 2}, 1)


def test_a_fragment_that_waits_does_not_hold_the_others_up() -> None:
    """One member contributes to fragment 0 only: the rounds of fragment 1 go on without it after
    the grace; those of fragment 2 stay as they are.
    """

    def body(member: LocalMember) -> Any:
        enter(member, 3)
        outcomes = [give(member, 0, 1.0)]
        if member.index < 2:
            outcomes += [give(member, 1, float(turn)) for turn in (1, 2)]
        member.sleep(20.0)
        if member.index == 2:
            assert (member.fragment_closing(1), member.fragment_closing(2)) == (2, 0)
        return outcomes, anchors(member), run_of(member).cut

    results = play(3, body)
    for index, (outcomes, held, cut_) in enumerate(results):
        assert [len(outcome.contributors) for outcome in outcomes] == [3, 2, 2][: len(outcomes)]
        assert len(outcomes) == (1 if index == 2 else 3)
        assert (held, cut_) == ([[-1.0], [-3.0], [0.0]], {0: 1, 1: 2, 2: 0})


@pytest.mark.parametrize("after_s", daily(2, (0.02, 0.05, 0.005, 0.035, 0.1)))
def test_a_member_killed_under_way_comes_back_to_every_fragment_from_its_own_disk(
    after_s: float,
) -> None:
    lives = [0, 0, 0, 0]

    def body(member: LocalMember) -> Any:
        lives[member.index] += 1
        enter(member, 4)
        if lives[member.index] == 1:
            member.sleep(10.0 - member.clock())
            pending = [
                member.contribute_fragment(
                    k, samples=1, write=lambda flat, k=k: fill(flat, 2.0**member.index * (k + 1))
                )
                for k in range(P)
            ]
            first = [one.wait(60.0) for one in pending]
        else:
            # what its disk holds is the state of each fragment; it learns of what it missed when it
            # next has something to say
            assert min(run_of(member).cut.values()) >= 0
            first = [give(member, k, 0.0) for k in range(P)]
        member.sleep(60.0 - member.clock())
        assert [len(session.config_peers()) for session in run_of(member).sessions] == [4, 4, 4]
        last = [give(member, k, 0.0) for k in (2, 0, 1)]
        member.sleep(2.0)
        return first, last, anchors(member), run_of(member).cut

    results = play(4, body, lambda swarm: swarm.crash_at(3, 10.0 + after_s, back_after_s=8.0))
    assert lives == [1, 1, 1, 2]
    for index in range(3):
        first, last, held, cut_ = results[index]
        assert cut_ == results[3][3]
        assert min(cut_.values()) >= 2
        for number, outcome in enumerate(first):
            named = [int(share.peer[1:]) for share in outcome.contributors]
            assert held[number] == [
                pytest.approx(-sum(2.0**who * (number + 1) for who in named) / len(named))
            ]
        assert all(len(outcome.contributors) == 4 for outcome in last)
        assert held == results[3][2]


def test_who_joins_late_gets_the_state_of_every_fragment() -> None:
    def body(member: LocalMember) -> Any:
        if member.index < 2:
            enter(member, 2)
            for fragment, turns in enumerate(
                (1, 2, 1)
            ):  # states of fragments 0 and 2 hold the same bytes
                for _ in range(turns):
                    give(member, fragment, 1.0)
        else:
            member.open(LAYOUT, lambda initial: None)
        enter(member, 3)
        before = anchors(member), run_of(member).cut
        member.sleep(30.0 - member.clock())
        outcomes = [give(member, fragment, 3.0) for fragment in range(P)]
        member.sleep(2.0)
        return before, [len(outcome.contributors) for outcome in outcomes], anchors(member)

    for before, counted, held in play(3, body, lambda swarm: swarm.join_at(2, 20.0)):
        assert before == ([[-1.0], [-2.0], [-1.0]], {0: 1, 1: 2, 2: 1})
        assert (counted, held) == ([3, 3, 3], [[-4.0], [-5.0], [-4.0]])


def test_operations_and_leaving_are_of_the_whole_run() -> None:
    def body(member: LocalMember) -> Any:
        enter(member, 3)
        flat = torch.full((5,), float(member.index))
        assert all_reduce(member, flat, op_id="sum", op="sum").wait().counted
        if member.index == 2:
            member.leave()
            assert all(
                member.peer not in session.config_peers() for session in run_of(member).sessions
            )
            return flat.tolist()
        for fragment in range(P):
            give(member, fragment, 1.0)
        member.sleep(5.0)
        assert [len(session.config_peers()) for session in run_of(member).sessions] == [2, 2, 2]
        return flat.tolist()

    assert play(3, body) == [[3.0] * 5] * 3


@pytest.mark.parametrize("odd", [0, 1])
def test_nan_in_one_fragment_is_refused_there_also_the_conveners(odd: int) -> None:
    def body(member: LocalMember) -> Any:
        enter(member, 2)
        outcome = give(member, 1, float("nan") if member.index == odd else 4.0)
        member.sleep(100.0 - member.clock())
        other = give(member, 2, 1.0)
        member.sleep(10.0)
        logs = [
            session.machine.journal.entries[0].entry.log
            for session in run_of(member).sessions
            if session.machine
        ]
        return (outcome.status, outcome.counted), other.counted, anchors(member), logs

    for index, (outcome, other, held, logs) in enumerate(play(2, body)):
        assert (outcome, other, held) == (
            ("committed", True) if index != odd else ("lost", False),
            True,
            [[0.0], [-4.0], [-1.0]],
        )
        assert logs == [fragment_log("local", number) for number in range(P)]


def test_a_script_of_another_model_is_attached_to_no_fragment() -> None:
    """The first fragment is the same in both models, the last is not."""

    def body(member: LocalMember) -> Any:
        enter(member, 2)
        odd = make_layout([("a", (4,)), ("b", (4,)), ("c", (4,))])
        with member._node().alive():
            run_of(member).detach(member.clock())
        with pytest.raises(ModelMismatchError, match="c  yours"):
            run_of(member).attach(member.clock(), odd)
        held = [session.script for session in run_of(member).sessions]
        member.open(LAYOUT, lambda initial: None)
        member.sleep(20.0 - member.clock())  # until both have a script again
        return held, give(member, 0, 1.0).counted

    assert play(2, body) == [([None] * P, True)] * 2


def test_a_killed_process_is_known_to_be_gone_at_once() -> None:
    """Every input of a session is one of a run in fragments, too."""

    def body(member: LocalMember) -> None:
        enter(member, 2)
        run, [other] = (
            run_of(member),
            [peer for peer in run_of(member).config_peers() if peer != member.peer],
        )
        if member.index == 0:
            run.on_link(member.clock(), other, False)
            assert not run.sessions[0].membership.suspected(member.clock(), other)
            run.on_gone(member.clock(), other)
            assert all(session.actions.suspected(other) for session in run.sessions)

    play(2, body)
