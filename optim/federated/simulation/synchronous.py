"""Synchronous rounds in virtual time: the server asks some clients and waits for all of them, or,
where the run says what the work of a round is, for those that nodes would wait for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from blake3 import blake3

from ....collectives.errors import NotEnoughPeersError
from ....collectives.group import Member
from ....collectives.identifiers import PeerId
from ....collectives.round.sampling import draw_members
from ....collectives.round.turns import TurnClock
from ....collectives.round_settings import SampleSettings
from .closing import Close, SiteTurn, closing
from .study import ClientDelta, PlayedRound, Study, StudyResult

MOST_EMPTY = 1000


def run_synchronous(study: Study, after_round: Callable[[], None] = lambda: None) -> StudyResult:
    """Rounds until the run's end. A round lasts until the last client that was asked is back, or
    should have been; with ``work`` as `closing` says.

    Raises NotEnoughPeersError where it does not get on: too few come back for the rule.
    """
    if study.settings.work is not None:
        return _run_by_work(study, after_round)
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
        study.combined(works, len(asked))
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


def _run_by_work(study: Study, after_round: Callable[[], None]) -> StudyResult:
    """Rounds that close as nodes close them. Only what is counted is trained: a turn that is given
    up leaves nothing behind.
    """
    settings, result, now = study.settings, study.result, 0.0
    clock = TurnClock(now)
    study.measured(now)
    while (
        settings.rounds is None or study.server.version < settings.rounds
    ) and now < settings.seconds:
        turns = _turns(study, now)
        close = closing(turns, now, clock.ends_at, partial(_lacks, study, turns))
        if isinstance(close, str):
            result.stalled = close
            break
        _settle(study, turns, now, close)
        for turn in turns:
            if turn.client in close.done:
                clock.done(max(clock.began, turn.done_at))
        now = close.at
        clock.next(now)
        after_round()
        if study.server.version % settings.measure == 0 or study.server.version == settings.rounds:
            study.measured(now)
    return study.ended()


def _turns(study: Study, now: float) -> list[SiteTurn]:
    """Of all that take part: the drawn members; without a draw also who comes back meanwhile."""
    back = [device.back_at(now) for device in study.fleet.devices]
    asked = _asked(study, [client for client, at in enumerate(back) if at <= now])
    late = range(len(back)) if study.settings.asked is None else ()
    return [
        *(_turn(study, client, now) for client in asked),
        *(
            replace(_turn(study, client, now), since=back[client])
            for client in late
            if now < back[client] < math.inf
        ),
    ]


def _turn(study: Study, client: int, now: float) -> SiteTurn:
    """What a member's turn comes to. Who does not come back from it is not heard from then on."""
    device = study.fleet.devices[client]
    done_at, away = device.done_at(now, study.steps_of(client)), device.killed
    if done_at < math.inf and study.fleet.drops(study.rng):
        study.result.dropped += 1
        away = (*(each for each in away if each[1] <= done_at), (done_at, math.inf))
    return SiteTurn(client, done_at, away)


def _lacks(study: Study, turns: list[SiteTurn], at: float, done: Collection[int]) -> str:
    """Why these contributions make no round at that time; "": they do."""
    members = [turn for turn in turns if turn.since <= at]
    heard = sum(turn.away_s(at) is None for turn in members)
    needed = max(2 * study.settings.f + 1, study.settings.fewest(len(members)))
    if 2 * heard <= len(members):
        return f"{heard} of {len(members)} sites are there, and more than half decide a round"
    if len(done) < needed:
        return f"{len(done)} of {len(members)} sites are there and done, and a round needs {needed}"
    return ""


def _settle(study: Study, turns: list[SiteTurn], now: float, close: Close) -> None:
    """Train those that are in the round, and make its outer step."""
    served, result = study.server.served(), study.result
    steps = {client: study.steps_of(client) for client in close.done}
    asked = sum(turn.since <= close.at for turn in turns)
    study.combined([study.turn(client, served, steps[client]) for client in steps], asked)
    busy = [min(turn.done_at, close.at) - now for turn in turns]
    result.busy_s += sum(busy)
    result.waited_s += sum(close.at - now - each for each in busy)
    missing = tuple(
        turn.client for turn in turns if turn.client not in steps and turn.since <= close.at
    )
    weights = {client: study.sizes[client] for client in steps}
    result.rounds.append(PlayedRound(close.at, steps, weights, missing))


def _asked(study: Study, there: list[int]) -> list[int]:
    """Who takes part, drawn as by a real run's log, in whose place the seed stands."""
    study.draws += 1
    if study.settings.asked is None:
        return there
    base = blake3(f"{study.settings.seed}/{study.draws}".encode()).digest()
    config = tuple(Member(PeerId(str(client)), 0) for client in there)
    return sorted(
        int(member.peer)
        for member in draw_members(
            "simulation", base, config, SampleSettings(count=study.settings.asked)
        )
    )


def _there(study: Study, now: float) -> tuple[float, list[int]]:
    """When the next round can begin, and with whom."""
    now = min(device.next_there(now) for device in study.fleet.devices)
    return now, [
        client for client, device in enumerate(study.fleet.devices) if device.next_there(now) <= now
    ]
