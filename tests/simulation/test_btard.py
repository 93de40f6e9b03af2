"""Swarms of BTARD peers in virtual time: every attack ends as it must, honest peers agree to the
bit, and planted bugs are found.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest
from kits.btard.hostile import ATTACKS, PROTOCOL_ATTACKS, VECTORS
from kits.btard.plants import PLANTS, find
from kits.btard.swarm import BtardMember, BtardOptions, BtardSwarm
from seeds import daily

from atoll.collectives.identifiers import PeerId
from atoll.security.btard import Fault, GradientTask
from atoll.security.btard.peer import MOST_OFFENCES

SMALL = BtardOptions(n=8, b=3, rate=0.5, steps=60)


def honest_removed(swarm: BtardSwarm) -> set[Fault]:
    return {
        fault for peer, (fault, _) in swarm.checker.removals.items() if peer not in swarm.hostile
    }


@pytest.mark.parametrize("attack", daily(4, PROTOCOL_ATTACKS))
def test_an_attack_on_the_protocol_ends_with_the_attackers_and_no_other(attack: str) -> None:
    swarm = BtardSwarm(1, replace(SMALL, attack=attack))
    checker = swarm.run()
    assert checker.problems == []
    assert checker.removals.keys() == swarm.hostile
    assert {fault for fault, _ in checker.removals.values()} <= set(ATTACKS[attack].faults)


@pytest.mark.parametrize("attack", daily(3, VECTORS))
def test_hostile_gradients_end_with_the_attackers_and_no_other(attack: str) -> None:
    swarm = BtardSwarm(2, replace(SMALL, attack=attack, steps=400, rate=1.0))
    checker = swarm.run()
    assert checker.problems == []
    assert checker.removals.keys() == swarm.hostile


def test_of_a_flood_of_messages_that_nobody_signed_few_are_checked() -> None:
    swarm = BtardSwarm(12, replace(SMALL, attack="flood", rate=1.0, steps=2, until_clean=False))
    watched = swarm.honest[0].machine
    checked: list[bool] = []
    verify = watched.verify

    def counted(peer: PeerId, domain: str, data: bytes, signature: bytes, /) -> bool:
        checked.append(verify(peer, domain, data, signature))
        return checked[-1]

    watched.verify = counted
    assert swarm.run().problems == []
    assert checked.count(False) == MOST_OFFENCES * len(swarm.hostile)


@pytest.mark.parametrize(
    ("attack", "n", "b"),
    daily(
        3,
        (
            ("grudge", 7, 3),
            ("ambush", 4, 1),
            ("elimination", 7, 3),
            ("demands", 7, 3),
            ("demands", 16, 7),
            ("ambush", 7, 3),
            ("elimination", 16, 7),
        ),
    ),
)
def test_no_attacker_takes_an_honest_peer_along(attack: str, n: int, b: int) -> None:
    """Before, each took one where parts got from one of the two to the other in public only: of 7
    one was left, of 16 two.
    """
    options = BtardOptions(n=n, b=b, attack=attack, steps=8, until_clean=False)
    swarm = BtardSwarm(3, options)
    checker = swarm.run()
    assert checker.problems == []
    assert checker.steps == 8
    assert honest_removed(swarm) == set()
    assert checker.removals.keys() == (swarm.hostile if attack == "elimination" else set())


def test_a_grudge_costs_a_few_waits_and_no_more() -> None:
    """Who sends its part to one peer in public only is asked for it at once, after a few steps."""
    swarm = BtardSwarm(3, replace(SMALL, attack="grudge", rate=1.0, steps=17, until_clean=False))
    ends: list[float] = []
    finished = swarm.checker.finished

    def note(member, step, state) -> None:  # type: ignore[no-untyped-def]
        if member is swarm.honest[0]:
            ends.append(swarm.now)
        finished(member, step, state)

    swarm.checker.finished = note  # type: ignore[method-assign]
    assert swarm.run().problems == []
    waited = [
        step for step in range(1, 16) if ends[step] - ends[step - 1] >= SMALL.settings.timeout_s
    ]
    assert 3 <= len(waited) <= 6
    assert max(waited) <= 8


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("compute_s", [4.0, 24.0])
def test_who_tells_its_words_to_all_but_one_keeps_nobody_back(n: int, compute_s: float) -> None:
    """Who is left out is given them by the others before it is testified to be missing itself, and
    nobody leaves because of parts that came late.
    """
    settings = msgspec.structs.replace(SMALL.settings, compute_s=compute_s)
    options = replace(
        SMALL, n=n, b=1, attack="whisper", rate=1.0, steps=8, until_clean=False, settings=settings
    )
    checker = BtardSwarm(1, options).run()
    assert (checker.problems, checker.removals, checker.steps) == ([], {}, 8)


@pytest.mark.parametrize(("seed", "n", "b"), [(0, 4, 1), (0, 8, 3), (1, 8, 3)])
def test_what_reaches_a_part_of_the_honest_only_costs_none_of_them_its_place(
    seed: int, n: int, b: int
) -> None:
    """Questions and testimonies are among what is lost: so others are told that somebody owes what
    it was never asked for.
    """
    swarm = BtardSwarm(
        seed,
        replace(SMALL, n=n, b=b, attack="moods", rate=1.0, steps=8, until_clean=False),
    )
    checker = swarm.run()
    assert checker.problems == []
    assert honest_removed(swarm) == set()


def test_who_says_nothing_at_all_is_removed_also_where_the_others_compute_for_long() -> None:
    settings = msgspec.structs.replace(SMALL.settings, timeout_s=1.0)
    swarm = BtardSwarm(
        1,
        replace(
            SMALL,
            attack="silence",
            rate=0.0,
            steps=3,
            until_clean=False,
            settings=settings,
        ),
    )

    def slowly(member: BtardMember, task: GradientTask) -> None:
        swarm.world.after(2.5, lambda: member.machine.computed(swarm.now, task, *member.work(task)))

    for member in swarm.members.values():
        slow = partial(slowly, member)
        member.compute = (lambda task: None) if member.name in swarm.hostile else slow  # type: ignore[method-assign]
    checker = swarm.run()
    assert (checker.problems, checker.steps) == ([], 3)
    assert checker.removals.keys() == swarm.hostile


def local_steps(options: BtardOptions) -> BtardOptions:
    return replace(options, settings=msgspec.structs.replace(options.settings, intervals=3))


@pytest.mark.parametrize("attack", daily(1, ("sign_flip", "ipm_0.1", "mimic")))
def test_who_leaves_the_way_of_its_local_steps_is_found(attack: str) -> None:
    """DiLoCo's form: a state on the way is another, in one of three intervals; a validator computes
    one of them.
    """
    swarm = BtardSwarm(9, local_steps(replace(SMALL, attack=attack, steps=400, rate=1.0)))
    checker = swarm.run()
    assert checker.problems == []
    assert checker.removals.keys() == swarm.hostile
    assert {fault for fault, _ in checker.removals.values()} == {Fault.GRADIENT}


@pytest.mark.parametrize("attack", ["equivocation", "withheld_parts", "false_accusation"])
def test_attacks_on_the_protocol_with_local_steps(attack: str) -> None:
    swarm = BtardSwarm(10, local_steps(replace(SMALL, attack=attack)))
    checker = swarm.run()
    assert checker.problems == []
    assert checker.removals.keys() == swarm.hostile


def test_nobody_is_removed_where_all_take_local_steps_on_machines_that_differ() -> None:
    checker = BtardSwarm(
        11, local_steps(BtardOptions(n=8, b=0, steps=25, noise=1e-3, until_clean=False))
    ).run()
    assert (checker.problems, checker.removals, checker.steps) == ([], {}, 25)


def test_an_equivocator_in_the_last_word_of_a_step_leaves_no_two_endings() -> None:
    for seed in (4, 6, 14):  # in which some had ended the step before others saw two messages
        assert BtardSwarm(seed, replace(SMALL, attack="equivocation")).run().problems == []


def test_false_testimony_and_evidence_that_proves_nothing_do_nothing() -> None:
    checker = BtardSwarm(4, replace(SMALL, attack="false_testimony", rate=1.0, steps=6)).run()
    assert (checker.problems, checker.removals, checker.steps) == ([], {}, 6)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_nobody_is_removed_where_all_are_honest(noise: float) -> None:
    checker = BtardSwarm(5, BtardOptions(n=8, b=0, steps=25, noise=noise, until_clean=False)).run()
    assert (checker.problems, checker.removals, checker.steps) == ([], {}, 25)


def test_control_bytes_of_sixteen_peers() -> None:
    swarm = BtardSwarm(6, BtardOptions(b=0, steps=4, until_clean=False))
    assert swarm.run().problems == []
    assert sum(swarm.control_bytes.values()) / 16 / 4 <= 20 * 1024


def test_a_seed_gives_the_same_run() -> None:
    one, two = (BtardSwarm(7, replace(SMALL, attack="equivocation")) for _ in range(2))
    assert one.run().removals == two.run().removals
    assert one.control_bytes == two.control_bytes


def test_a_draw_is_fair_though_attackers_abort_those_that_they_do_not_like() -> None:
    """They reveal last, and only draws that begin with a zero bit: each abort costs an identity,
    and afterwards the bit is fair.
    """
    swarm = BtardSwarm(
        8, replace(SMALL, attack="abort_abuse", rate=1.0, steps=64, until_clean=False)
    )
    draws: list[int] = []
    finished = swarm.checker.finished
    watched = swarm.honest[0]

    def note(member, step, state) -> None:  # type: ignore[no-untyped-def]
        if member is watched and swarm.checker.clean():
            draws.append(step.draw[0] >> 7)
        finished(member, step, state)

    swarm.checker.finished = note  # type: ignore[method-assign]
    assert swarm.run().problems == []
    assert len(draws) > 40
    assert 0.25 < sum(draws) / len(draws) < 0.75


@pytest.mark.parametrize("name", daily(4, PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    found = find(PLANTS[name], 200)
    assert found is not None, PLANTS[name].what


def test_without_a_bug_the_attacks_of_the_plants_show_nothing() -> None:
    for attack in sorted({plant.attack for plant in PLANTS.values()}):
        options = BtardOptions(n=8, b=3, attack=attack, steps=12, rate=0.5, until_clean=False)
        assert BtardSwarm(0, options).run().problems == []
