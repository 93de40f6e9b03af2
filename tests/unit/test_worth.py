"""What evaluations say of averaging: medians less what members differ by, who may be believed, and
the governor that goes by them. Bytes and hashes of who says nothing of evaluations.
"""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest
import torch

from atoll.collectives import telemetry
from atoll.collectives.group import Contributor, Entry, Evaluated, Member, Plan, Reading
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import PLAIN_MEAN, OuterSettings
from atoll.optim.outer import OuterStep
from atoll.optim.outer.governor import Cured
from atoll.optim.outer.readings import reading_of
from atoll.optim.outer.standing import WorthWatch
from atoll.optim.outer.worth import (
    BEHIND,
    NUMBERS,
    Worth,
    by,
    drawn,
    judge,
    surely,
    worth_of,
)

WATCHED = OuterSettings("nesterov", 0.5, 0.5, governor=True, watch=3)


def told(anchor: float, own: float, before: float | None = None) -> Reading:
    return Reading(Evaluated(None, anchor, own, before))


def play(
    readings: list[list[Reading]], settings: OuterSettings = WATCHED, first: int = 1
) -> tuple[list[torch.Tensor], int, list[Cured]]:
    """The anchors of outer steps on a mean of 1, since when the plain mean is taken, and what the
    governor said of it.
    """
    step, anchor, out = OuterStep(settings), torch.zeros(1), list[torch.Tensor]()
    state, seen = torch.zeros(step.state_numel(1)), list[telemetry.Event]()
    off = telemetry.subscribe(seen.append)
    for entry, said in enumerate(readings, first):
        after = torch.empty(1)
        step.apply(anchor, torch.ones(1), state, after, [(1, each) for each in said], entry)
        out.append(anchor := after)
    off()
    return out, step.plain_since(state, 1), [each for each in seen if isinstance(each, Cured)]


# ---- bytes


def test_who_says_nothing_of_evaluations_has_the_bytes_and_hashes_of_before() -> None:
    """Written by the release before there were any."""
    encode = msgspec.msgpack.encode
    assert encode(Reading()).hex() == "93c0c0c0"
    assert encode(Reading(1.5, 2.5, 3.5)).hex() == (
        "93cb3ff8000000000000cb4004000000000000cb400c000000000000"
    )
    who = Contributor(Member(PeerId("p0"), 1), bytes(16), 3, Reading(1.5, lag=2.0))
    entry = Entry(
        "main", 1, bytes(32), bytes(32), (who,), (), (), 8, 4, "int8", "mean", (who.member,)
    )
    plan = Plan("main", 1, 0, 0, bytes(32), (who,), (), 8, 4, "int8")
    assert entry.hash().hex() == PINNED_ENTRY
    assert plan.plan_id.hex() == PINNED_PLAN


PINNED_ENTRY = "802f75bc59c0002b6bdc208c603bafff5c71a5ade29f6d6bbd043fbba93f08fc"
PINNED_PLAN = "b2d277468980b10815a83389096d6651"


def test_a_reading_travels_whole() -> None:
    reading = Reading(Evaluated(1.0, 2.0, 3.0, 4.0), 5.0, 6.0)
    decode = msgspec.msgpack.Decoder(Reading).decode
    assert decode(msgspec.msgpack.encode(reading)) == reading
    assert (reading.loss, reading.evaluated) == (1.0, Evaluated(1.0, 2.0, 3.0, 4.0))
    assert (Reading(1.0).loss, Reading(1.0).evaluated) == (1.0, None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e31, "2", None, [1.0]])
@pytest.mark.parametrize("place", [1, 2])
def test_a_hostile_value_is_refused_where_it_comes_in(wrong: object, place: int) -> None:
    values: list[object] = [1.0, 2.0, 3.0, 4.0]
    values[place] = wrong
    data = msgspec.msgpack.encode([values, None, None])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=Reading)


def test_what_is_said_of_a_contribution() -> None:
    """The loss only where a governor goes by losses; the evaluation in any case."""
    vector, layout = torch.ones(2), None
    found = Evaluated(1.5, 2.0, 3.0)
    plain, governed = (
        reading_of(vector, layout, each, found)  # type: ignore[arg-type]
        for each in (PLAIN_MEAN, WATCHED)
    )
    assert plain == Reading(Evaluated(None, 2.0, 3.0))
    assert governed == Reading(found)


# ---- a round's readings


def test_medians_less_half_of_what_members_differ_by() -> None:
    readings = [told(3.0, 2.0, 2.5), told(3.0, 2.0, 2.5), told(3.0, 1.5, 2.0), Reading(1.0)]
    found = worth_of(readings)
    assert found is not None
    assert (found.anchor, found.own, found.members) == (3.0, 2.0, 3)
    assert found.behind == pytest.approx(1 / 3 - (1 / 2 - 1 / 3) / 2)
    unlike = worth_of([*readings, told(3.1, 2.0)])  # of the same anchor
    assert unlike is not None
    assert unlike.behind is None
    assert found.worse == pytest.approx(1 / 6 - (1 / 3 - 1 / 6) / 2)


@pytest.mark.parametrize(
    ("members", "telling", "lying", "enough"),
    [
        (2, 1, 0, False),
        (2, 2, 0, True),
        (3, 2, 0, True),
        (5, 2, 0, False),
        (100, 3, 0, True),
        (4, 2, 1, False),
        (4, 3, 1, True),
        (7, 4, 2, False),
    ],
)
def test_too_few_readings_are_none(members: int, telling: int, lying: int, enough: bool) -> None:
    readings = [told(3.0, 2.0)] * telling + [Reading()] * (members - telling)
    assert (worth_of(readings, lying) is not None) == enough


def test_a_plain_mean_on_a_convex_loss_is_never_behind() -> None:
    """Whatever the members' weights are: the mean's loss is at most the mean of theirs, to first
    order in what they differ by.
    """
    rng = random.Random(1)
    for _ in range(5_000):
        here, count = rng.uniform(0.5, 5.0), rng.randint(2, 5)
        owns = [here * (1 + rng.gauss(0, 0.02)) for _ in range(count)]
        found = worth_of([told(sum(owns) / count, own) for own in owns])
        assert found is not None
        assert found.behind is not None
        assert found.behind < BEHIND


def any_value(rng: random.Random) -> float:
    """Of any size and sign."""
    return rng.choice((-1, 1)) * 10 ** rng.uniform(-30, 30)


@pytest.mark.parametrize("lying", [1, 2])
def test_no_lie_accuses_more_than_the_honest_members_would_alone(lying: int) -> None:
    """Whatever liars tell: gain and catastrophe, an honest one's own values, or a little worse."""
    rng, told_of = random.Random(lying), 0
    for _ in range(4_000):
        spread = 10 ** rng.uniform(-3, 0)
        honest = [
            told(1.0, math.exp(rng.gauss(0, spread)), math.exp(rng.gauss(0, spread)))
            for _ in range(rng.randint(lying + 1, 3 * lying + 2))
        ]
        liars = [
            rng.choice(
                (
                    told(any_value(rng), any_value(rng), any_value(rng)),
                    told(1.0, 1 - spread * rng.random(), 1 - spread * rng.random()),
                    rng.choice(honest),
                )
            )
            for _ in range(lying)
        ]
        found = worth_of(rng.sample(honest + liars, len(honest + liars)), lying)
        alone = worth_of(honest)
        assert found is not None
        assert alone is not None
        assert alone.behind is not None
        assert alone.worse is not None
        assert found.behind is None or found.behind <= alone.behind + 1e-12
        assert found.worse is None or found.worse <= alone.worse + 1e-12
        told_of += found.behind is not None
    assert told_of > 1_000


@pytest.mark.parametrize("place", [1.0, 1.2, 1.4])
def test_a_liar_cannot_make_unlike_data_alike(place: float) -> None:
    """There each member is behind its own weights in any run."""
    honest = [told(anchor, 0.5 * anchor) for anchor in (1.0, 1.2, 1.4)]
    found = worth_of([*honest, told(place, 0.5 * place)], lying=1)
    assert found is not None
    assert found.behind is None


def test_what_all_members_find_is_found_where_some_may_lie() -> None:
    found = worth_of([told(2.0, own, own) for own in (1.0, 1.02, 1.04, 1.06)], lying=1)
    assert found is not None
    assert found.behind is not None
    assert 0.46 < found.behind < 0.49
    assert found.worse == found.behind
    assert drawn(1) >= 3


@pytest.mark.parametrize("lying", range(4))
def test_the_least_over_all_sets_without_so_many(lying: int) -> None:
    rng = random.Random(lying)
    for _ in range(500):
        values = [rng.gauss(0, 1) for _ in range(rng.randint(lying + 2, 8))]
        sets = itertools.combinations(values, len(values) - lying)
        assert surely(values, lying) == pytest.approx(min(map(surely, sets)))


def test_shares_of_values_of_any_sign() -> None:
    assert [by(2.0, 1.0), by(1.0, 2.0), by(1.0, -1.0), by(-1.0, -2.0)] == [0.5, -0.5, 2.0, 0.5]
    assert by(1e30, -1e30) == 2.0
    assert by(0.0, 0.0) == 0.0
    assert surely([1.0]) == 1.0


# ---- over rounds


def of(behind: float | None, worse: float | None = None) -> Worth:
    return Worth(1.0, 1.0, behind, worse, 3)


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        ([of(0.02)] * 3, ["", "", "behind"]),
        ([of(0.02), of(0.0), of(0.02), of(0.02)], ["", "", "", ""]),
        ([of(0.01)] * 9, [""] * 9),
        ([of(0.0, 0.06), of(0.0), of(0.0), of(0.0), of(0.0, 0.06)], ["", "", "", "", "worse"]),
        ([of(0.0, 0.06), *[of(0.0)] * 4, of(0.0, 0.06)], [""] * 6),
        ([of(0.5, 0.26)], ["worse"]),
        ([of(-2.0, None)] * 4, [""] * 4),
        ([of(None, 0.04)] * 4, [""] * 4),
        ([of(None, 0.06)] * 2, ["", "worse"]),
    ],
)
def test_what_readings_in_a_row_mean(readings: list[Worth], found: list[str]) -> None:
    state = [0.0] * NUMBERS
    assert [judge(state, each, 3) for each in readings] == found


def test_what_stands_is_withdrawn_after_as_many_readings_without_fault() -> None:
    watch = WorthWatch()
    assert "what helps" in watch.take(0, of(0.5, 0.5), 2)
    standing = [bool(watch.take(0, of(0.0, 0.0), 2)) for _ in range(6)]
    assert standing == [True, False, False, False, False, False]
    assert watch.take(1, of(0.5, 0.5), 2)
    assert watch.take(0, of(0.0), 2)  # another fragment's is not withdrawn by this one


# ---- the governor


def test_the_governor_takes_the_plain_mean_from_a_named_entry() -> None:
    """0.5 · (1 + 0.5 · 1) first; from the third reading against averaging on, the mean itself."""
    bad = [told(2.0, 1.9)] * 2
    anchors, since, said = play([bad] * 5, first=7)
    assert since == 9
    assert [round(float(each), 6) for each in anchors] == [-0.75, -1.625, -2.625, -3.625, -4.625]
    assert [each.entry for each in said] == [9]
    assert "2 and 1.9 on held-out data" in said[0].finding


@pytest.mark.parametrize(
    "settings",
    [
        msgspec.structs.replace(WATCHED, watch=0),
        msgspec.structs.replace(WATCHED, governor=False),
        msgspec.structs.replace(WATCHED, kind="sgd", lr=1.0),
    ],
)
def test_a_governor_that_does_not_watch_steps_as_without_readings(settings: OuterSettings) -> None:
    bad, none = [told(9.0, 1.0, 1.0)] * 3, [Reading()] * 3
    anchors, since, said = play([bad] * 6, settings)
    assert anchors == play([none] * 6, settings)[0]
    assert (since, said) == (0, [])


def test_a_run_without_watching_has_the_state_of_before() -> None:
    plain = OuterSettings("nesterov", 0.5, 0.5, governor=True)
    assert OuterStep(plain).state_numel(10) == 10 + 34
    assert OuterStep(msgspec.structs.replace(plain, watch=3)).state_numel(10) == 10 + 34 + 8


@pytest.mark.parametrize("kind", ["nesterov", "adam", "delayed_nesterov", "heloco", "co2", "sgd"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_rule_can_be_replaced_by_the_plain_mean(kind: str, dtype: str) -> None:
    if kind == "sgd" and dtype == "bf16":
        pytest.skip("has no momentum")
    settings = OuterSettings(
        kind,  # type: ignore[arg-type]
        0.3,
        0.0 if kind == "sgd" else 0.8,
        governor=True,
        stretch=True,
        watch=2,
        momentum_dtype=dtype,  # type: ignore[arg-type]
    )
    anchors, since, _ = play([[told(2.0, 1.0, 1.0)] * 2] * 4, settings)
    assert since == 1
    assert [float(each) for each in anchors] == [-1.0, -2.0, -3.0, -4.0]


def test_a_warm_up_goes_on_counting_and_the_mean_stays_plain() -> None:
    settings = msgspec.structs.replace(WATCHED, warmup=5)
    step, state = OuterStep(settings), torch.zeros(OuterStep(settings).state_numel(1))
    anchor = torch.zeros(1)
    for entry in range(1, 8):
        after = torch.empty(1)
        step.apply(anchor, torch.ones(1), state, after, [(1, told(9.0, 1.0, 1.0))] * 2, entry)
        anchor = after
    assert (float(anchor), float(state[-1]), step.plain_since(state, 1)) == (-7.0, 5.0, 1)
