"""One share for all strangers: rates that machines have in equal parts, and time that is measured
step by step.
"""

from __future__ import annotations

import random
import time

import pytest
import trio

from atoll.node.net.transport.strangers import FairRate, timed


def test_who_is_alone_has_the_whole_rate() -> None:
    rate = FairRate(at_once=100.0, per_s=10.0)
    assert rate.rest_s("a", 0.0) == 0.0
    rate.take("a", 100.0, 0.0)
    assert rate.rest_s("a", 0.0) == 0.0
    rate.take("a", 50.0, 0.0)
    assert rate.rest_s("a", 0.0) == pytest.approx(5.0)
    assert rate.rest_s("a", 4.0) == pytest.approx(1.0)
    assert rate.rest_s("a", 5.0) == 0.0
    assert rate.rest_s("b", 5.0) == 0.0  # has had nothing


def test_who_asks_little_does_not_wait_for_who_asks_much() -> None:
    rate = FairRate(at_once=100.0, per_s=10.0)
    rate.take("greedy", 1e6, 0.0)
    for second in range(1, 100):
        rate.take("modest", 4.0, float(second))
        assert rate.rest_s("modest", float(second)) == 0.0
    assert rate.rest_s("greedy", 100.0) > 1e4


def test_what_one_leaves_goes_to_the_others() -> None:
    rate = FairRate(at_once=0.0, per_s=10.0)
    for who, amount in (("a", 10.0), ("b", 30.0), ("c", 50.0)):
        rate.take(who, amount, 0.0)
    # a is done after 3 s, b 4 s later, and c has the rest to itself
    assert [rate.rest_s(who, 2.9) > 0 for who in "abc"] == [True, True, True]
    assert [rate.rest_s(who, 3.1) > 0 for who in "abc"] == [False, True, True]
    assert [rate.rest_s(who, 7.1) > 0 for who in "abc"] == [False, False, True]
    assert [rate.rest_s(who, 9.1) > 0 for who in "abc"] == [False, False, False]


@pytest.mark.parametrize("seed", range(20))
def test_together_they_have_no_more_than_the_rate_and_each_no_less_than_its_part(seed: int) -> None:
    """Machines that take as soon as they need not rest, amounts and numbers drawn."""
    rng = random.Random(seed)
    rate = FairRate(at_once=64.0, per_s=16.0)
    machines = [f"m{number}" for number in range(rng.randrange(2, 9))]
    most, had, now = 4.0, dict.fromkeys(machines, 0.0), 0.0
    while now < 200.0:
        for who in machines:
            if not rate.rest_s(who, now):
                amount = rng.uniform(0.1, most)
                rate.take(who, amount, now)
                had[who] += amount
        now += rng.uniform(0.0, 0.1)
    assert sum(had.values()) <= 64.0 + 16.0 * now + most * len(machines)
    part = (64.0 + 16.0 * now) / len(machines)
    assert all(part - 2 * most - 0.1 * 16.0 <= its <= part + 2 * most for its in had.values())


def test_nothing_is_kept_of_who_is_paid_up() -> None:
    rate = FairRate(at_once=1.0, per_s=100.0)
    for number in range(5000):
        rate.take(f"m{number}", 1.0, number / 50)
        assert len(rate._due) == len(rate._next) <= 2


def test_a_thousand_machines_cost_no_more_to_look_at_than_a_few() -> None:
    """Steps of the counter, of which each take and look makes as many as machines were paid up."""
    rate = FairRate(at_once=0.0, per_s=1.0)
    for number in range(1000):
        rate.take(f"m{number}", 1.0 + number, 0.0)
    before = list(rate._next)
    rate.rest_s("m7", 1.0)
    assert rate._next == before


def test_time_is_counted_in_steps_of_the_task_and_not_while_it_waits() -> None:
    spent: list[float] = []

    async def work() -> str:
        for _ in range(3):
            began = time.perf_counter()
            while time.perf_counter() - began < 0.02:
                pass
            await trio.sleep(0.2)
        return "done"

    async def main() -> str:
        return await timed(work(), spent.append)

    assert trio.run(main) == "done"
    assert len(spent) == 4
    assert 0.06 <= sum(spent) < 0.6


def test_errors_and_cancellation_pass_through() -> None:
    spent: list[float] = []

    async def fails() -> None:
        await trio.sleep(0)
        raise ValueError("no")

    async def sleeps() -> None:
        try:
            await trio.sleep_forever()
        finally:
            spent.append(1000.0)

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await timed(fails(), spent.append)
        with trio.move_on_after(0.01) as scope:
            await timed(sleeps(), spent.append)
        assert scope.cancelled_caught

    trio.run(main)
    assert 1000.0 in spent
