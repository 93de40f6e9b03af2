"""Work is conserved: whatever is counted or late, each unit of it is in the anchor once or in the
live parameters once; of what the others went on without, a half comes along."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_table import Offer, RoundTable
from torch import nn

from atoll.collectives.swarm import RunSettings
from atoll.optim.model.flat import FlatVector
from atoll.optim.model.pseudograd import write_pseudo_gradient
from atoll.optim.model.reconcile import adopt, rebase
from atoll.optim.model.vector import FlatTensor
from atoll.optim.rounds.replica import OfferedContribution, Replica

AVERAGING = RunSettings(method="local_sgd", sync_every=1)
MIXING = msgspec.structs.replace(AVERAGING, mixing=0.25)
NUMBERS = st.integers(-1000, 1000)  # as float32 they add and subtract exactly


class Numbers(nn.Module):
    """Four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(1))


def live(flat: FlatVector) -> torch.Tensor:
    out = torch.empty(flat.numel)
    flat.write_to(out)
    return out


def vector(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@given(st.lists(NUMBERS, min_size=4, max_size=4), st.lists(NUMBERS, min_size=4, max_size=4))
def test_pseudo_gradient_is_anchor_minus_live(anchor: list[int], now: list[int]) -> None:
    flat = FlatVector(Numbers())
    flat.read_from(FlatTensor(vector(*now)))
    out = torch.full((4,), float("nan"))
    write_pseudo_gradient(flat, FlatTensor(vector(*anchor)), out)
    assert torch.equal(out, vector(*anchor) - vector(*now))


@given(*(st.lists(NUMBERS, min_size=4, max_size=4) for _ in range(3)))
def test_rebase_carries_exactly_the_progress_over(
    start: list[int], now: list[int], new: list[int]
) -> None:
    flat = FlatVector(Numbers())
    flat.read_from(FlatTensor(vector(*now)))
    rebase(flat, FlatTensor(vector(*new)), FlatTensor(vector(*start)))
    assert torch.equal(live(flat), vector(*new) + vector(*now) - vector(*start))
    adopt(flat, FlatTensor(vector(*new)))
    assert torch.equal(live(flat), vector(*new))


ACTIONS = st.one_of(
    st.tuples(
        st.just("train"), st.integers(-8, 8)
    ),  # so small that float32 halves it exactly as often as there are actions
    st.tuples(st.just("boundary"), st.just(0)),
    st.tuples(
        st.just("decide"), st.sampled_from([0, 1])
    ),  # 1: mine is counted if there is one, 0: only the other member's
    st.tuples(
        st.just("lose"), st.sampled_from([0, 1])
    ),  # 1: the frozen contribution is lost with the node
)


@given(st.lists(ACTIONS, max_size=25))
@settings(max_examples=120)
def test_each_unit_of_work_is_counted_once_or_still_live(actions: list[tuple[str, int]]) -> None:
    table = RoundTable(["me", "other"], AVERAGING, auto=False)
    flat, lost = FlatVector(Numbers()), [0]
    replica = Replica(
        flat, table.member("me"), lambda: 0.0, lambda samples, reason: lost.append(samples)
    )
    replica.enter()
    other = table.member("other")
    other.open(flat.layout, lambda out: None).release()
    work, dropped, steps = torch.zeros(4), torch.zeros(4), 0

    def anchor() -> torch.Tensor:
        base = torch.empty(4)
        replica.base.copy_into(base)
        return base

    def halved(
        base: torch.Tensor, frozen: OfferedContribution | None, unsent: torch.Tensor
    ) -> torch.Tensor:
        """What is given up of a contribution, or of what was to be one, as the anchor went from
        ``base`` on without it.
        """
        moved = anchor() - base
        offer = frozen.pending if frozen is not None else None
        if (
            not moved.any()
            or offer in table.counted
            or (isinstance(offer, Offer) and offer.orphaned)
        ):
            return torch.zeros(4)
        return ((-offer.vector if isinstance(offer, Offer) else unsent) + moved) / 2

    def check() -> None:
        """All my work = what was counted and adopted + what is live but not in the anchor + what
        was given up or lost with a node.
        """
        base = anchor()
        pending = replica.frozen.pending if replica.frozen is not None else None
        seen = [offer for offer in table.counted if offer.peer == "me" and offer is not pending]
        assert torch.equal(
            sum((-offer.vector for offer in seen), torch.zeros(4)) + (live(flat) - base) + dropped,
            work,
        )
        frozen = replica.frozen.samples if replica.frozen is not None else 0
        assert sum(offer.samples for offer in seen) + replica.unsent + frozen + sum(lost) == steps

    for action, number in [*actions, *[("boundary", 0), ("decide", 1)] * 2, ("boundary", 0)]:
        before = (anchor(), replica.frozen, live(flat) - anchor())
        if action == "train":
            with torch.no_grad():
                for tensor in flat.tensors:
                    tensor.add_(float(number))
            work, steps = work + number, steps + 1
            replica.unsent += 1
        elif action == "boundary":
            for _ in replica.turn(0.0):
                pass
        elif action == "decide":
            mine = bool(number) and "me" in table.offers
            if not mine:
                other.contribute(samples=3, write=lambda out: out.fill_(-5.0))
            table.decide(["me" if mine else "other"])
        else:
            offer = table.offers.get(table.peers[0]) if number else None
            table.lose("me", offer_too=bool(number))
            table.find("me")
            replica.reenter()
            if offer is not None:
                dropped = dropped - offer.vector
        dropped = dropped + halved(*before)
        check()
    assert replica.frozen is None


def test_progress_made_while_a_round_was_open_survives_it_once() -> None:
    table = RoundTable(["me"], AVERAGING, auto=False)
    flat = FlatVector(Numbers())
    replica = Replica(flat, table.member("me"), lambda: 0.0, lambda samples, reason: None)
    replica.enter()

    def train(amount: float) -> None:
        with torch.no_grad():
            for tensor in flat.tensors:
                tensor.add_(amount)
        replica.unsent += 2

    train(1.0)
    assert [turn.outcome.status for turn in replica.turn(0.0)] == ["open"]
    train(10.0)
    assert [turn.outcome.status for turn in replica.turn(0.0)] == ["open"]
    table.decide(["me"])
    turns = list(replica.turn(0.0))
    assert [(turn.outcome.status, turn.outcome.counted, turn.samples) for turn in turns] == [
        ("committed", True, 2),
        ("open", False, 2),
    ]
    assert torch.equal(table.offers[table.peers[0]].vector, torch.full((4,), -10.0))
    assert torch.equal(live(flat), torch.full((4,), 11.0))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (
            AVERAGING,
            8 / 2 - 4 / 2 + 16,
        ),  # half of its way from the new anchor, and all that it trained since
        (MIXING, (8 + 16 - 4) / 4),  # a quarter of where it is
    ],
)
@pytest.mark.parametrize("overlap", ["none", "late", "eager"])
def test_of_progress_that_the_others_went_on_without_a_share_comes_along(
    settings: RunSettings, kept: float, overlap: Any
) -> None:
    settings = msgspec.structs.replace(settings, overlap=overlap)
    table = RoundTable(["me", "other"], settings, auto=False)
    flat = FlatVector(Numbers())
    replica = Replica(flat, table.member("me"), lambda: 0.0, lambda samples, reason: None, settings)
    replica.enter()
    other = table.member("other")
    other.open(flat.layout, lambda out: None).release()
    start = live(flat)

    def train(amount: float) -> None:
        with torch.no_grad():
            for tensor in flat.tensors:
                tensor.add_(amount)

    train(8.0)
    replica.unsent += 2
    assert [turn.outcome.status for turn in replica.turn(0.0)] == ["open"]
    if overlap != "eager":
        assert torch.equal(live(flat), start + 8)  # the anchor has not moved: nothing is mixed
    train(16.0)
    replica.unsent += 4
    other.contribute(samples=3, write=lambda out: out.fill_(-4.0))
    table.decide(["other"])
    turns = list(replica.turn(0.0))
    assert [(turn.outcome.status, turn.outcome.counted) for turn in turns] == [
        ("committed", False),
        ("open", False),
    ]
    assert torch.equal(table.offers[table.peers[0]].vector, torch.full((4,), -kept))
    assert turns[-1].samples == 6
    if overlap != "eager":
        assert torch.equal(live(flat), start + 4 + kept)
