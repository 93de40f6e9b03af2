"""Events of a node for whoever listens: the slow miss some, are told how many, and nothing else of
an event changes.
"""

from __future__ import annotations

import trio

from atoll.node.run.events import read_event
from atoll.node.service.subscribers import EVENT_QUEUE, Subscribers


def test_who_is_slow_is_told_how_many_events_it_missed_beside_what_they_say() -> None:
    """`round.committed` has a `lost` of its own: the members that were lost."""

    async def main() -> None:
        subscribers = Subscribers()
        async with subscribers.subscribe() as slow, subscribers.subscribe() as quick:
            for number in range(EVENT_QUEUE + 3):
                subscribers.publish(
                    read_event({"event": "round.committed", "round": number, "lost": ["p"]})
                )
                assert (await anext(quick))["round"] == number
            first = await anext(slow)
            subscribers.publish(read_event({"event": "round.committed", "round": 0, "lost": ["p"]}))
            seen = [first, *[await anext(slow) for _ in range(EVENT_QUEUE)]]
            told = await anext(quick)
        assert all(list(event["lost"]) == ["p"] for event in seen)
        assert [event.get("missed") for event in seen] == [None] * EVENT_QUEUE + [3]
        assert "missed" not in told, "another's slowness is not the quick one's"

    trio.run(main)
