"""How long a living peer may be silent, by what the kernel has sent again."""

from __future__ import annotations

import pytest

from atoll.collectives.engine.losses import MEMORY, MOST_S, Losses, silence_s
from atoll.collectives.engine.meter import LaneCounters
from atoll.collectives.identifiers import PeerId

NEAR, FAR = PeerId("near"), PeerId("far")


def counters(segments: int, again: int, rtt_s: float = 0.04) -> LaneCounters:
    return LaneCounters(0, 0, 0.0, 0.0, rtt_s, rtt_s, segments, again)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, 0.0),
        (0.01, 0.24 + 0.48),  # two losses in a row of the same bytes: one in ten thousand
        (0.1, 0.24 + 0.48 + 0.96 + 1.0),  # four
        (0.3, MOST_S),
        (1.0, MOST_S),
    ],
)
def test_silence_is_as_long_as_rare_losses_take(share: float, expected: float) -> None:
    assert silence_s(share, 0.04) == pytest.approx(expected)


def test_shares_are_those_of_the_last_segments_to_each_peer() -> None:
    losses = Losses()
    losses.read(
        [(NEAR, 1, counters(1000, 0)), (FAR, 2, counters(400, 80)), (FAR, 3, counters(0, 0))]
    )
    assert (losses.share(NEAR), losses.share(FAR)) == (0.0, pytest.approx(0.2))
    assert losses.silences == {FAR: silence_s(losses.share(FAR), 0.04)}
    losses.read([(FAR, 3, counters(int(3 * MEMORY), 0))])  # nothing is lost any more
    assert losses.share(FAR) == pytest.approx(0.05)


def test_a_few_that_were_sent_again_say_nothing() -> None:
    losses = Losses()
    losses.read([(FAR, 1, counters(10, 3))])
    assert (losses.share(FAR), losses.silences) == (0.0, {})
    losses.read([(FAR, 1, counters(20, 4))])
    assert losses.share(FAR) == pytest.approx(0.2)


def test_what_is_known_of_a_way_outlives_its_lanes_but_not_the_wish_for_them() -> None:
    losses = Losses()
    losses.read([(FAR, 1, counters(300, 60))])
    losses.read([])
    assert losses.silences == {FAR: silence_s(0.2, 0.04)}
    losses.read([(FAR, 2, counters(100, 20))])  # another lane counts from nought
    assert losses.share(FAR) == pytest.approx(0.2)
    losses.forget(FAR)
    losses.read([])
    assert (losses.share(FAR), losses.silences) == (0.0, {})


def test_more_lanes_are_wanted_while_much_is_lost_and_not_in_turns_with_fewer() -> None:
    losses = Losses()
    found = list[bool]()
    sent = again = 0
    for more in (0.0, 0.02, 0.05, 0.02, 0.02, 0.0, 0.0):
        sent, again = sent + int(4 * MEMORY), again + int(4 * MEMORY * more)
        losses.read([(FAR, 1, counters(sent, again))])
        found.append(losses.many(FAR))
    assert found == [False, False, True, True, True, False, False]
