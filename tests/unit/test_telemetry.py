"""Events reach every sink; a failing sink breaks nothing."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import pytest

from atoll.collectives.telemetry import Event, emit, subscribe


@dataclass(frozen=True, slots=True)
class Splash(Event):
    height: int


def test_sinks_see_events_in_order_until_they_unsubscribe() -> None:
    seen: list[tuple[str, Event]] = []
    off_a = subscribe(lambda event: seen.append(("a", event)))
    off_b = subscribe(lambda event: seen.append(("b", event)))
    emit(Splash(1))
    off_a()
    off_a()
    emit(Splash(2))
    off_b()
    emit(Splash(3))
    assert seen == [("a", Splash(1)), ("b", Splash(1)), ("b", Splash(2))]
    assert Splash(1).name == "Splash"


def test_a_failing_sink_breaks_neither_the_caller_nor_other_sinks() -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("sink")

    off, off_seen = subscribe(broken), subscribe(seen.append)
    emit(Splash(4))
    off()
    off_seen()
    assert seen == [Splash(4)]


def test_events_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Splash(1).height = 2  # type: ignore[misc]
