"""What one peer may ask of a node: token buckets, and what is refused is counted."""

from __future__ import annotations

from atoll.collectives.identifiers import PeerId
from atoll.node.session.budgets import (
    BEHIND_S,
    BYTES,
    JOBS_AT_ONCE,
    MAX_PAUSE_S,
    MAX_PEERS,
    MEMBER_MESSAGES,
    MESSAGES,
    OPERATION,
    REFUSED,
    REQUESTS,
    SPANS_BYTES,
    PeerUsage,
)

A, B = PeerId("a"), PeerId("b")


def test_a_flood_gets_its_burst_and_then_what_time_refills() -> None:
    budgets = PeerUsage()
    rate = REQUESTS["get"]
    passed = sum(budgets.request(0.0, A, "get") for _ in range(55_600))
    assert passed == rate.burst
    assert budgets.refused(A) == {"get": 55_600 - rate.burst}
    assert sum(budgets.request(2.0, A, "get") for _ in range(1000)) == 2 * rate.per_s
    assert budgets.request(2.0, B, "get"), "one peer's flood is not another's"
    assert budgets.refusing() == [A]


def test_the_stream_of_who_goes_beyond_its_budget_pauses_until_there_is_some_again() -> None:
    budgets = PeerUsage()
    for _ in range(int(MESSAGES.burst)):
        assert budgets.message(0.0, A, 0, member=False)
    assert budgets.pause_s() == 0.0
    assert not budgets.message(0.0, A, 0, member=False)
    assert 0 < budgets.pause_s() <= min(MAX_PAUSE_S, 1 / MESSAGES.per_s)
    assert budgets.pause_s() == 0.0, "told once"


def test_members_have_more_and_bytes_count_as_well_as_messages() -> None:
    budgets = PeerUsage()
    assert MEMBER_MESSAGES.burst > MESSAGES.burst
    size = 1 << 20
    passed = sum(budgets.message(0.0, A, size, member=False) for _ in range(1000))
    assert passed == BYTES.burst // size
    assert budgets.refused(A) == {"bytes": 1000 - passed}


def test_a_call_of_the_own_script_pays_for_what_peers_say_about_it() -> None:
    """At any rate of calls, more than an idle member listens to."""
    budgets = PeerUsage()
    refused = 0
    for _ in range(20_000):  # all at one moment
        budgets.called()
        for _ in range(8):
            refused += not budgets.operation(0.0, A)
    assert refused == 0


def test_jobs_at_once_are_few_and_end() -> None:
    budgets = PeerUsage()
    assert [budgets.begin_job(0.0, A, "get") for _ in range(JOBS_AT_ONCE + 2)] == [
        *[True] * JOBS_AT_ONCE,
        False,
        False,
    ]
    budgets.end_job(A)
    assert budgets.begin_job(0.0, A, "get")
    assert budgets.refused(A) == {"get": 2}


def test_any_number_of_peers_takes_bounded_memory() -> None:
    budgets = PeerUsage()
    for number in range(3 * MAX_PEERS):
        budgets.refuse(float(number), PeerId(str(number)), "get")
    assert MAX_PEERS * 15 // 16 <= len(budgets.refusing()) <= MAX_PEERS


def test_a_members_stream_goes_on_where_it_asks_too_much_of_one_kind() -> None:
    """Rounds wait for what is behind that."""
    budgets = PeerUsage()
    for member, pauses in ((True, False), (False, True)):
        peer = PeerId(f"member {member}")
        assert budgets.message(0.0, peer, 10, member=member)
        while budgets.request(0.0, peer, "get"):
            pass
        assert (budgets.pause_s() > 0) == pauses


def test_the_stream_of_a_member_that_goes_on_with_what_is_refused_pauses() -> None:
    """And rounds do not wait for it."""
    budgets, now, heard = PeerUsage(), 0.0, 0
    for _ in range(60_000):  # ten seconds of 6,000 a second, if nothing slowed it down
        heard += budgets.message(now, A, 100, member=True)
        budgets.operation(now, A)
        now += 1 / 6000 + budgets.pause_s()
    assert heard / now <= OPERATION.per_s + 3 * REFUSED.per_s
    assert budgets.deaf_to(now, A)
    assert not budgets.deaf_to(now + BEHIND_S, A)


def test_a_message_of_many_spans_is_as_several() -> None:
    budgets, rate = PeerUsage(), REQUESTS["get_chunks"]
    passed = sum(budgets.request(0.0, A, "get_chunks", 64 * SPANS_BYTES) for _ in range(1000))
    assert passed == rate.burst // 65
    short = SPANS_BYTES - 1
    assert sum(budgets.request(0.0, B, "get_chunks", short) for _ in range(10_000)) == rate.burst
    passed = sum(budgets.operation(0.0, A, 64 * SPANS_BYTES) for _ in range(1000))
    assert passed == OPERATION.burst // 65
    passed = sum(budgets.request(0.0, A, "need", 1 << 30) for _ in range(1000))
    assert passed == 1, "the longest takes all that there is, and can be said at all"
