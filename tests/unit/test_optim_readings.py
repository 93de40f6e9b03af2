"""What contributors say of their norms and losses: an outer step that does not depend on their
number, and a governor that hears of losses.
"""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from atoll.collectives import messages as m
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.group import Reading
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import Layout, TensorSpec
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.telemetry import subscribe
from atoll.optim import OuterStep
from atoll.optim.outer.governor import Governed
from atoll.optim.outer.readings import median_loss, reading_of, stretch

STRETCH = OuterSettings(kind="nesterov", lr=0.5, momentum=0.5, stretch=True)


def corners(k: int, length: float) -> torch.Tensor:
    """k vectors of this length at right angles, (k, 16)."""
    return torch.eye(16)[:k] * length


def stepped(settings: OuterSettings, vectors: torch.Tensor) -> torch.Tensor:
    """How far a first step over these contributions, of equal weight, moves the anchor."""
    step, numel = OuterStep(settings), vectors.shape[1]
    anchor, out, state = (
        torch.zeros(numel),
        torch.empty(numel),
        torch.zeros(step.state_numel(numel)),
    )
    said = [(8, Reading(norm=float(vector.norm()))) for vector in vectors]
    step.run(anchor, [(0, vectors.mean(0))], state, out, said)
    return out


@pytest.mark.parametrize("k", [1, 3, 4, 16])
def test_a_stretched_step_is_as_long_whatever_the_number_of_members(k: int) -> None:
    """16 members become 3, or one: the first step of Nesterov at 0.5 / 0.5 moves 0.5 · 1.5 times a
    contribution's length; else 1/√k of it.
    """
    assert float(stepped(STRETCH, corners(k, 4.0)).norm()) == pytest.approx(0.75 * 4.0)
    plain = msgspec.structs.replace(STRETCH, stretch=False)
    assert float(stepped(plain, corners(k, 4.0)).norm()) == pytest.approx(0.75 * 4.0 / math.sqrt(k))


def test_contributions_that_agree_are_left_as_they_are() -> None:
    same = corners(1, 2.0).repeat(5, 1)
    assert torch.equal(
        stepped(STRETCH, same), stepped(msgspec.structs.replace(STRETCH, stretch=False), same)
    )


def test_how_much_a_mean_is_stretched() -> None:
    assert (
        stretch([(1, Reading(norm=3.0)), (3, Reading(norm=5.0))], 4.0) == 4.5 / 4.0
    )  # by samples: (3 + 15) / 4
    assert stretch([(1, Reading(norm=3.0)), (3, Reading())], 2.0) == math.sqrt(
        2
    )  # 1.5, and two contributions are stretched by √2 at most
    assert stretch(
        [(1, Reading(norm=1e30)), (1, Reading(norm=1.0)), (1, Reading(norm=1.0))], 1.0
    ) == math.sqrt(3)  # a false word does no more
    assert (
        stretch([(1, Reading(norm=0.0)), (1, Reading(norm=1.0))], 1.0) == 1.0
    )  # nor does it shorten the step
    assert (
        stretch([(1, Reading()), (1, Reading())], 1.0)
        == stretch([(1, Reading(norm=1.0))], 0.0)
        == stretch([], 1.0)
        == 1.0
    )


def test_a_reading_holds_what_the_run_asks_for_and_nothing_that_is_no_number() -> None:
    layout = Layout(
        (TensorSpec("a", (2,), 0), TensorSpec("m", (1,), 2, "mean"), TensorSpec("b", (1,), 3)), 4
    )
    vector = torch.tensor([3.0, 0.0, 100.0, 4.0])
    assert reading_of(vector, layout, OuterSettings("nesterov", 0.7, 0.9), 1.5) == Reading()
    assert reading_of(vector, layout, OuterSettings("nesterov", 0.7, stretch=True), 1.5) == Reading(
        norm=5.0
    )  # statistics are not stretched, nor measured
    assert reading_of(
        vector, layout, OuterSettings("nesterov", 0.7, governor=True), 1.5
    ) == Reading(1.5)
    for nonsense in (math.nan, math.inf, -math.inf, None):
        assert (
            reading_of(vector, layout, OuterSettings("nesterov", 0.7, governor=True), nonsense)
            == Reading()
        )
    assert (
        reading_of(
            torch.full((4,), math.nan), layout, OuterSettings("nesterov", 0.7, stretch=True), None
        )
        == Reading()
    )


def test_statistics_are_averaged_and_not_stretched() -> None:
    layout = Layout((TensorSpec("a", (2,), 0), TensorSpec("m", (1,), 2, "mean")), 3)
    step, out = OuterStep(OuterSettings(kind="sgd", lr=1.0, stretch=True), layout), torch.empty(3)
    said = [(1, Reading(norm=4.0)), (1, Reading(norm=4.0))]
    step.apply(
        torch.zeros(3), torch.tensor([3.0, 0.0, 3.0]), torch.zeros(step.state_numel(3)), out, said
    )
    assert out.tolist() == [-4.0, 0.0, -3.0]


@pytest.mark.parametrize(
    "bad", [[math.nan], [math.inf], [None, -1.0], [None, math.nan], ["loss"], [1e31]]
)
def test_a_reading_that_is_none_is_refused_by_name(bad: list[object]) -> None:
    good = m.encode(
        m.Envelope("log", 1, 0, m.Ready(bytes(32), bytes(16), 1, False, reading=Reading(2.5, 0.5)))
    )
    assert m.decode(good, PeerId("p")).body == m.Ready(
        bytes(32), bytes(16), 1, False, reading=Reading(2.5, 0.5)
    )
    plain = msgspec.msgpack.decode(good)
    plain[3][-1] = bad
    with pytest.raises(RemoteProtocolError) as caught:
        m.decode(msgspec.msgpack.encode(plain), PeerId("p"))
    assert caught.value.peer == "p"


def losses(*values: float | None) -> list[tuple[int, Reading]]:
    """What contributors say in a round."""
    return [(1, Reading(value)) for value in values]


def test_the_median_of_losses_does_not_follow_one_liar() -> None:
    assert median_loss(losses(2.0, 2.5, 1e30)) == 2.5
    assert median_loss(losses(2.0, 3.0)) == 2.5
    assert median_loss(losses(None, 2.0)) == 2.0
    assert median_loss(losses(None, None)) is None


def test_a_governor_that_advises_says_what_it_sees_and_changes_nothing() -> None:
    """Runs whose members may lie have it: the one that tells a loss, or sends more, moves nothing."""
    plain, advising = (
        OuterStep(OuterSettings("nesterov", 1.0, 0.5, governor=governor, advises=governor))
        for governor in (False, True)
    )
    anchors, seen = list[list[list[float]]](), list[object]()
    off = subscribe(seen.append)
    for step in (plain, advising):
        anchor, state = torch.zeros(2), torch.zeros(step.state_numel(2))
        anchors.append([])
        for loss, length in [*[(2.0, 1.0)] * 6, (99.0, 1.0), (2.0, 9.0), (2.0, 1.0)]:
            after = torch.empty(2)
            step.apply(anchor, torch.full((2,), length), state, after, losses(loss, None, None))
            anchor = after
            anchors[-1].append(after.tolist())
    off()
    assert anchors[0] == anchors[1]
    assert [each.what for each in seen if isinstance(each, Governed)] == ["loss", "norm"]


def test_a_jump_of_the_loss_restarts_momentum_and_halves_the_rate() -> None:
    seen: list[object] = []
    off = subscribe(seen.append)
    step = OuterStep(OuterSettings("nesterov", 1.0, 0.5, governor=True))
    anchor, out, state = torch.zeros(2), torch.empty(2), torch.zeros(step.state_numel(2))
    for loss in (2.5, 2.25, 2.0, 2.25, 2.0):
        step.apply(anchor, torch.ones(2), state, out, losses(loss, loss, 99.0))
        anchor = out.clone()
    assert seen == []
    assert state[0] == 1.9375  # the momentum of five rounds
    step.apply(
        anchor, torch.ones(2), state, out, losses(2.375, 2.375, 2.375)
    )  # above the median by less than a tenth or three deviations
    step.apply(
        anchor, torch.ones(2), state, out, losses(1e30, 1.0, 2.0)
    )  # one who lies is not followed
    step.apply(anchor, torch.ones(2), state, out)  # nobody says anything
    assert seen == []
    step.apply(anchor, torch.ones(2), state, out, losses(3.5, 3.5, 1.0))
    off()
    assert seen == [Governed("loss", value=3.5, median=2.25)]
    assert (anchor - out).tolist() == [0.75, 0.75]  # m = 1 again; half the rate: 0.5 · (1 + 0.5)
