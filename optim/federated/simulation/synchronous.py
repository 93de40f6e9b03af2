"""Synchronous rounds in virtual time: the server asks some clients and waits for all of them."""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

from ....collectives.errors import NotEnoughPeersError
from ....collectives.group import Member
from ....collectives.identifiers import PeerId
from ....collectives.round.sampling import drawn
from ....collectives.swarm import SampleSettings
from .study import ClientDelta, Study, StudyResult

MOST_EMPTY = 1000


def run_synchronous(study: Study, after_round: Callable[[], None] = lambda: None) -> StudyResult:
    """Rounds until the run's end. A round lasts until the last client that was asked is back, or
    should have been.

    Raises NotEnoughPeersError where it does not get on: too few come back for the rule.
    """
    settings, result, now, empty = study.settings, study.result, 0.0, 0
    study.measured(now)
    while (
        settings.rounds is None or study.server.version < settings.rounds
    ) and now < settings.seconds:
        now, there = _there(study, now)
        asked = _asked(study, there)
        served, end, works = study.server.served(), now, list[ClientDelta]()
        spent: list[float] = []
        for client in asked:
            steps, device = study.steps_of(client), study.fleet.devices[client]
            back = device.finished(now, steps)
            end = max(end, back)
            spent.append(back - now)
            if study.fleet.drops(study.rng):
                result.dropped += 1
            else:
                works.append(study.turn(client, served, steps))
        result.busy_s += sum(spent)
        result.waited_s += sum(end - now - each for each in spent)
        now = end
        version = study.server.version
        study.combined(works)
        empty = 0 if study.server.version > version else empty + 1
        if empty == MOST_EMPTY:
            raise NotEnoughPeersError(
                f"{empty} rounds in a row without a step: {len(asked)} clients "
                f"asked, f = {settings.f}"
            )
        after_round()
        if study.server.version > version and (
            study.server.version % settings.measure == 0 or study.server.version == settings.rounds
        ):
            study.measured(now)
    return study.ended()


def _asked(study: Study, there: list[int]) -> list[int]:
    """Who takes part, drawn as by a real run's log, in whose place the seed stands."""
    study.draws += 1
    if study.settings.asked is None:
        return there
    base = blake3(f"{study.settings.seed}/{study.draws}".encode()).digest()
    config = tuple(Member(PeerId(str(client)), 0) for client in there)
    return sorted(
        int(member.peer)
        for member in drawn("simulation", base, config, SampleSettings(count=study.settings.asked))
    )


def _there(study: Study, now: float) -> tuple[float, list[int]]:
    """When the next round can begin, and with whom."""
    now = min(device.next_there(now) for device in study.fleet.devices)
    return now, [
        client for client, device in enumerate(study.fleet.devices) if device.next_there(now) <= now
    ]
