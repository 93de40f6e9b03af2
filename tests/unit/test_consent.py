"""Adoption with the optimizer's consent: no anchor is taken back, masters are written and read
unrounded, and what is not cured is named.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from remembering_kit import (
    FTRL,
    MADGRAD,
    BareLookahead,
    EightBit,
    Flagged,
    Lion,
    Lookahead,
    MasterInClosure,
    MasterInGroups,
    MasterInOne,
    MasterInState,
    MastersOf,
    Muonlike,
    OtherLookahead,
    ScheduleFreeAdamW,
    ScheduleFreeSGD,
    Several,
    SlowBeside,
    WantsNames,
    Warmed,
)
from round_table import RoundTable
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.optim import Attachment, DiLoCo, SoloSwarm, attach
from atoll.optim.data.ledger import attached_to
from atoll.optim.model.flat import FlatVector
from atoll.optim.model.vector import FlatTensor
from atoll.optim.script.checks import hooked
from atoll.optim.script.consent import Consent
from atoll.optim.script.optimizer_state import held_tensors
from atoll.optim.script.probe import GONE, probe

H = 4
SETTINGS = RunSettings(
    sync_every=H, deadline_s=0.0, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
)
Make = Callable[[Any], Any]


def lookahead(params: Any) -> Optimizer:
    return Lookahead(SGD(params, lr=0.05, momentum=0.9))


def seldom(params: Any) -> Optimizer:
    return Lookahead(SGD(params, lr=0.05), k=30)


def other_lookahead(params: Any) -> Optimizer:
    return OtherLookahead(Adam(params, lr=1e-2))


def schedule_free(params: Any) -> Optimizer:
    optimizer = ScheduleFreeSGD(params, lr=0.1)
    optimizer.train()
    return optimizer


def schedule_free_adamw(params: Any) -> Optimizer:
    optimizer = ScheduleFreeAdamW(params, lr=1e-2, warmup_steps=1000)
    optimizer.train()
    return optimizer


def lion(params: Any) -> Optimizer:
    return Lion(params, weight_decay=0.0)


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    """One on random gradients that depend on its number only, and are exact in bfloat16."""
    draw = torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).bfloat16().to(p.dtype)
    optimizer.step()


def anchor_of(swarm: Any) -> Tensor:
    view = swarm.anchor()
    out = torch.empty(view.numel)
    view.copy_into(out)
    view.release()
    return out


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---- the probe


@pytest.mark.parametrize(
    ("make", "gone", "positions"),
    [
        (lookahead, 0.5, {"state.slow"}),
        (seldom, 0.5, {"state.slow"}),
        (other_lookahead, 0.5, {"_base_optimizer.state.lookahead_slow"}),
        (schedule_free, 0.5, {"state.z"}),
        (schedule_free_adamw, 0.5, {"state.z"}),
        (MADGRAD, 0.72, {"state.x0"}),
        (MasterInOne, 1.0, {"flat"}),
    ],
)
def test_positions_are_found_on_toys_and_moving_them_is_a_cure(
    make: Make, gone: float, positions: set[str]
) -> None:
    optimizer = make(net().parameters())
    found = probe(optimizer, optimizer.param_groups)
    assert found.gone == pytest.approx(gone, abs=0.02)
    assert (found.positions, found.fault, found.harmless) == (positions, "", True)
    assert found.left <= 1e-3


@pytest.mark.parametrize("make", [MasterInState, MasterInGroups, MasterInOne])
def test_masters_of_narrow_parameters_are_positions_of_a_toy(make: Make) -> None:
    optimizer = make(net(torch.bfloat16).parameters())
    found = probe(optimizer, optimizer.param_groups)
    assert found.gone == pytest.approx(1, abs=1e-3)
    assert (len(found.positions), found.harmless) == (1, True)
    assert found.left <= 2e-3  # rounding of the toy's bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [Adam, SGD, torch.optim.ASGD, Lion, Muonlike, EightBit])
def test_most_take_nothing_back(make: Make, dtype: torch.dtype) -> None:
    optimizer = make(net(dtype).parameters())
    found = probe(optimizer, optimizer.param_groups)
    assert found.gone <= (1e-3 if dtype is torch.float32 else GONE / 2)
    assert (found.positions, found.fault) == (frozenset(), "")


@pytest.mark.parametrize(
    ("make", "dtype"), [(FTRL, torch.float32), (MasterInClosure, torch.bfloat16)]
)
def test_what_is_not_cured_is_known(make: Make, dtype: torch.dtype) -> None:
    optimizer = make(net(dtype).parameters())
    found = probe(optimizer, optimizer.param_groups)
    assert found.gone > 0.9
    assert (found.positions, found.harmless) == (frozenset(), False)


@pytest.mark.parametrize("lr", [1e-2, 1e-9])
def test_masters_are_told_from_what_rounds_like_them(lr: float) -> None:
    """At a low rate a start point rounds to the parameter for ever, and is no master."""
    optimizer = MastersOf(net(torch.bfloat16).parameters(), lambda copies: MADGRAD(copies, lr=lr))
    found = probe(optimizer, optimizer.param_groups)
    assert found.positions == {"copies", "inner.state.x0"}
    assert (found.masters, found.harmless) == ({"copies"}, True)
    narrow = MADGRAD(net(torch.bfloat16).parameters(), lr=lr)
    assert probe(narrow, narrow.param_groups).masters == frozenset()


def test_a_position_that_has_gone_far_is_found_by_what_moving_it_does() -> None:
    """Its rate is hidden in a function, so that no slower toy can be made."""

    def make(copies: Any) -> Optimizer:
        optimizer = ScheduleFreeSGD(copies, lr=1.0)
        optimizer.train()
        return optimizer

    optimizer = MastersOf(net().parameters(), make)
    found = probe(optimizer, optimizer.param_groups)
    assert (found.positions, found.harmless) == ({"copies", "inner.state.z"}, True)


def test_decay_that_is_hidden_inside_is_no_memory() -> None:
    def make(copies: Any) -> Optimizer:
        return torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.5)

    optimizer = MastersOf(net().parameters(), make)
    found = probe(optimizer, optimizer.param_groups)
    assert (found.positions, found.harmless) == ({"copies"}, True)


def test_flags_of_groups_and_closures_are_given_to_those_that_want_them() -> None:
    optimizer = Flagged([{"params": list(net().parameters()), "flag": True}])
    assert probe(optimizer, optimizer.param_groups).fault == ""


def test_a_start_point_that_is_kept_flat_is_held() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p]["p0"] = p.detach().flatten().clone()
    held = held_tensors(optimizer, list(model.parameters()))
    assert [each.key for each in held] == ["state.p0"] * 4
    assert all(
        torch.equal(each.tensor, p) for each, p in zip(held, model.parameters(), strict=True)
    )


def test_a_rate_that_begins_at_zero_and_one_parameter_a_group() -> None:
    model = net()
    groups = [{"params": [p]} for p in model.parameters()]
    inner = SGD(groups, lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(inner, lambda at: min(1.0, at / 100))
    optimizer = Lookahead(inner)
    assert inner.param_groups[0]["lr"] == 0.0
    found = probe(optimizer, optimizer.param_groups)
    assert (found.positions, found.harmless) == ({"state.slow"}, True)


def bits(optimizer: Any) -> list[bytes]:
    held: list[bytes] = []
    for state in (optimizer.state, optimizer.optimizer.state):
        for entries in state.values():
            held += [v.numpy().tobytes() for v in entries.values() if isinstance(v, Tensor)]
    return held


class Noisy(Lookahead):
    """Draws and prints in each step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        print("a step", random.random(), np.random.rand(), torch.rand(()))
        return super().step(closure)


def test_probing_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    def seed() -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)

    model, called = net(), list[object]()
    optimizer = Noisy(SGD(model.parameters(), lr=0.05))
    seed()
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    seed()
    handle = register_optimizer_step_post_hook(lambda *_: called.append(_))
    try:
        assert probe(optimizer, optimizer.param_groups).positions == {"state.slow"}
        assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected
        assert (called, capsys.readouterr().out) == ([], "")
        step(model, optimizer, 0)
    finally:
        handle.remove()
    assert len(called) == 1  # the inner one's: the global hook is there again


def test_the_scripts_optimizer_is_only_read() -> None:
    model = net()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.05, momentum=0.9))
    for number in range(3):
        step(model, optimizer, number)
    weights, held, state = flat(model), bits(optimizer), len(optimizer.state)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    probe(optimizer, optimizer.param_groups)
    assert torch.equal(flat(model), weights)
    assert (bits(optimizer), len(optimizer.state)) == (held, state)
    assert settings == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]


# ---- on the live optimizer


class Live:
    """A model whose parameters are moved in the middle, as adopting an anchor does."""

    def __init__(self, make: Make, *, jump: bool, dtype: torch.dtype = torch.float32) -> None:
        self.model = net(dtype)
        self.optimizer = make(self.model.parameters())
        vector = FlatVector(self.model)
        consent = Consent(self.model, vector, [self.optimizer], [hooked(self.optimizer)], None)
        for number in range(13):
            step(self.model, self.optimizer, number)
        self.before = flat(self.model)
        with consent.adopting():
            if jump:
                target = torch.randn(vector.numel, generator=torch.Generator().manual_seed(3))
                for segment, values in vector.pull():
                    values.add_(target[segment.start : segment.stop])
                    vector.push(segment, values)
        self.after = flat(self.model)
        for number in range(13, 60):
            step(self.model, self.optimizer, number)


@pytest.mark.parametrize(
    "make",
    [
        lookahead,
        seldom,
        other_lookahead,
        schedule_free,
        schedule_free_adamw,
        MADGRAD,
        MasterInOne,
        lion,
        EightBit,
        Adam,
    ],
)
def test_the_live_one_takes_nothing_back(make: Make) -> None:
    still, moved = Live(make, jump=False), Live(make, jump=True)
    delta = moved.after - moved.before
    assert delta.norm() > 1
    left = flat(moved.model) - flat(still.model)
    assert abs(1 - float(left @ delta / (delta @ delta))) <= 1e-3


def test_lbfgs_learns_of_the_jump_as_of_a_step() -> None:
    model = net()
    optimizer = LBFGS(model.parameters(), lr=0.3, max_iter=3)
    consent = Consent(model, FlatVector(model), [optimizer], [optimizer], None)
    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :3]).square().mean()
        loss.backward()
        return loss

    with consent.adopting(), torch.no_grad():  # before its first step it has no state
        next(iter(model.parameters())).add_(1.0)
    assert not optimizer.state
    optimizer.step(closure)
    state = optimizer.state[next(iter(model.parameters()))]
    way, before = state["d"] * state["t"], flat(model)
    with consent.adopting(), torch.no_grad():
        for p in model.parameters():
            p.add_(0.25)
    jump = (flat(model) - before).float()
    assert jump.norm() > 1
    torch.testing.assert_close(state["d"] * state["t"], way + jump)


# ---- masters


def masters(optimizer: Any) -> list[Tensor]:
    if isinstance(optimizer, MasterInState):
        return [optimizer.state[p]["master"] for p in optimizer.param_groups[0]["params"]]
    if isinstance(optimizer, MastersOf):
        return optimizer.copies
    if isinstance(optimizer, MasterInGroups):
        return list(optimizer.inner.param_groups[0]["params"])
    assert isinstance(optimizer, MasterInOne)
    return [optimizer.flat]


def wide(optimizer: Any) -> Tensor:
    return torch.cat([master.detach().reshape(-1) for master in masters(optimizer)])


class Member:
    """A script in bfloat16 at a round table."""

    def __init__(self, table: RoundTable, peer: str, make: Make, dtype: torch.dtype) -> None:
        self.model, self.peer = net(torch.bfloat16).to(dtype), peer
        self.optimizer = make(self.model.parameters())
        self.sync: Attachment = attach(self.model, self.optimizer, table.member(peer), batch_size=1)
        self.made = 1000 * (int(peer[1:]) + 1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.made += 1
            step(self.model, self.optimizer, self.made)


def masters_and_slow(params: Any) -> Optimizer:
    """Slow weights are the masters themselves, bit for bit, at each boundary."""
    return MastersOf(params, lambda copies: Lookahead(SGD(copies, lr=0.05), k=H))


def masters_and_start(params: Any) -> Optimizer:
    return MastersOf(params, MADGRAD)


KINDS = [MasterInState, MasterInGroups, MasterInOne, masters_and_slow, masters_and_start]


@pytest.mark.parametrize("make", KINDS)
def test_masters_hold_the_anchor_unrounded_and_contributions_are_theirs(make: Make) -> None:
    table = RoundTable(["m0", "m1"], SETTINGS, auto=False)
    two = [Member(table, peer, make, torch.bfloat16) for peer in table.peers]
    for round_ in range(3):
        start = anchor_of(table.member("m0"))
        for each in two:
            each.run(H)
            offered = table.offers[each.sync.swarm.peer].vector
            assert torch.equal(offered, start - wide(each.optimizer))
        table.decide(["m0", "m1"])
        for each in two:
            each.sync.sync()
        anchor = anchor_of(table.member("m0"))
        assert not torch.equal(anchor, anchor.bfloat16().float())
        for each in two:
            assert torch.equal(wide(each.optimizer), anchor)
            assert torch.equal(flat(each.model).float(), anchor.bfloat16().float())
        assert {each.sync.round for each in two} == {round_ + 1}


@pytest.mark.parametrize("overlap", ["none", "late", "eager"])
@pytest.mark.parametrize("make", [MasterInState, MasterInOne, masters_and_slow, masters_and_start])
def test_with_masters_a_narrow_model_trains_as_a_float32_one(make: Make, overlap: str) -> None:
    """Gradients are the same whatever the parameters are, so the masters' bits must be those of the
    parameters that are float32 themselves. In the second round a contribution is lost.
    """
    settings = msgspec.structs.replace(SETTINGS, overlap=overlap)

    def trained(dtype: torch.dtype) -> list[Tensor]:
        table = RoundTable(["m0", "m1"], settings, auto=False)
        two = [Member(table, peer, make, dtype) for peer in table.peers]
        for round_ in range(5):
            for each in two:
                each.run(H)
            table.decide(["m0"] if round_ == 1 else ["m0", "m1"])
        if dtype is torch.float32:
            return [flat(each.model).float() for each in two]
        return [wide(each.optimizer) for each in two]

    narrow, full = trained(torch.bfloat16), trained(torch.float32)
    for one, other in zip(narrow, full, strict=True):
        if make is MasterInState:
            assert torch.equal(one, other)
        else:  # its flat copy of float32 parameters is a position, moved by their difference
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_positions_go_with_masters_where_the_parameters_show_nothing_of_it() -> None:
    """Steps so short that an anchor rounds to what the narrow parameters are already."""

    def make(params: Any) -> Optimizer:
        return MastersOf(params, lambda copies: Lookahead(SGD(copies, lr=1e-6), k=1000))

    table = RoundTable(["m0", "m1"], SETTINGS, auto=False)
    two = [Member(table, peer, make, torch.bfloat16) for peer in table.peers]

    def apart(member: Member) -> Tensor:
        slow = member.optimizer.inner.state
        copies = member.optimizer.copies
        return torch.cat([(slow[each]["slow"] - each.detach()).reshape(-1) for each in copies])

    for each in two:
        each.run(H)
    began, live = [apart(each) for each in two], [wide(each.optimizer).clone() for each in two]
    shown = flat(two[0].model)
    table.decide(["m0", "m1"])
    for each, was, before in zip(two, began, live, strict=True):
        each.sync.sync()
        assert torch.equal(flat(each.model), shown)
        assert not torch.equal(wide(each.optimizer), before)
        torch.testing.assert_close(apart(each), was, rtol=0, atol=1e-7)
        assert float(was.abs().max()) > 1e-6


def test_a_master_that_the_first_step_makes_begins_at_the_anchor_unrounded() -> None:
    table = RoundTable(["m0"], SETTINGS)
    first = Member(table, "m0", MasterInState, torch.bfloat16)
    first.run(H)
    anchor = anchor_of(table.member("m0"))
    table.peers.append("m1")  # type: ignore[arg-type]
    table.auto = False
    late = Member(table, "m1", MasterInState, torch.bfloat16)
    for _ in range(H):
        for p in late.model.parameters():
            p.grad = torch.zeros_like(p)
        late.optimizer.step()
    assert torch.equal(wide(late.optimizer), anchor)
    assert not table.offers[late.sync.swarm.peer].vector.any()


def test_zeros_are_no_masters() -> None:
    """A parameter that begins at zero, its momentum too: both round to it bit for bit."""
    model = net(torch.bfloat16)
    with torch.no_grad():
        list(model.parameters())[2].zero_()
    optimizer = MasterInState(model.parameters())
    vector = FlatVector(model)
    consent = Consent(model, vector, [optimizer], [optimizer], None)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with consent.adopting():
        found = dict(vector.masters)
        vector.read_from(FlatTensor(torch.full((vector.numel,), 0.3)))
    by_id = {id(p): optimizer.state[p] for p in model.parameters()}
    assert {key: wide.data_ptr() for key, wide in found.items()} == {
        key: state["master"].data_ptr() for key, state in by_id.items()
    }
    assert all(torch.equal(s["master"], torch.full_like(s["master"], 0.3)) for s in by_id.values())
    assert not any(state["exp_avg"].any() for state in by_id.values())


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_masters_follow_when_the_model_goes_back_to_the_anchor(value: float) -> None:
    """What others have put into the model, or NaN, is not contributed; the masters are the anchor's
    again, too.
    """
    model = net(torch.bfloat16)
    optimizer = MasterInState(model.parameters())
    swarm = SoloSwarm(SETTINGS)
    sync = attach(model, optimizer, swarm, batch_size=1)
    for number in range(2 * H + 2):
        step(model, optimizer, number)
    anchor = anchor_of(swarm)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
            if value != value:
                optimizer.state[p]["master"].fill_(value)
    sync.sync()
    assert sync.stats["samples_dropped"] == 2
    assert torch.equal(flat(model).float(), anchor.bfloat16().float())
    torch.testing.assert_close(wide(optimizer), anchor, rtol=2**-8, atol=0)
    step(model, optimizer, 99)
    assert (flat(model).float() - anchor).abs().max() < 0.05


def test_evaluating_the_anchor_leaves_masters_alone() -> None:
    model = net(torch.bfloat16)
    optimizer = MasterInGroups(model.parameters())
    swarm = SoloSwarm(SETTINGS)
    sync = attach(model, optimizer, swarm, batch_size=1)
    for number in range(H + 2):
        step(model, optimizer, number)
    before, live = wide(optimizer).clone(), flat(model)
    with sync.evaluate_anchor():
        assert torch.equal(flat(model).float(), anchor_of(swarm).bfloat16().float())
        assert torch.equal(wide(optimizer), before)
    assert torch.equal(flat(model), live)


def test_masters_of_a_checkpoint_go_on_bit_for_bit() -> None:
    def begun() -> tuple[nn.Module, MasterInState, SoloSwarm, Attachment]:
        model = net(torch.bfloat16)
        optimizer, swarm = MasterInState(model.parameters()), SoloSwarm(SETTINGS)
        return model, optimizer, swarm, attach(model, optimizer, swarm, batch_size=1)

    model, optimizer, swarm, sync = begun()
    for number in range(2 * H + 2):
        step(model, optimizer, number)
    saved = copy.deepcopy((model.state_dict(), sync.state_dict()))
    states = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
    again, other, its_swarm, its_sync = begun()
    again.load_state_dict(saved[0])
    for p, state in zip(again.parameters(), states, strict=True):
        other.state[p] = state
    its_sync.load_state_dict(saved[1])
    for number in range(2 * H + 2, 4 * H + 1):
        step(model, optimizer, number)
        step(again, other, number)
    assert sync.round == its_sync.round == 4
    assert torch.equal(anchor_of(swarm), anchor_of(its_swarm))
    assert torch.equal(wide(optimizer), wide(other))


# ---- what is not cured


def test_each_that_is_not_cured_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for make, dtype, words in (
        (FTRL, torch.float32, "FTRL remembers where the parameters were"),
        (MasterInClosure, torch.bfloat16, "next steps take back 100%"),
        (WantsNames, torch.float32, "whether WantsNames remembers where"),
    ):
        caplog.clear()
        model = net(dtype)
        named = model.named_parameters() if make is WantsNames else model.parameters()
        optimizer = make(named)  # type: ignore[arg-type]
        attach(model, optimizer, SoloSwarm(SETTINGS), batch_size=1)
        for number in range(2 * H):
            step(model, optimizer, number)
        (said,) = warnings_of(caplog)
        assert words in said
        assert "attach(..., on_adopted=f)" in said


def halves(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [SGD(matrices, lr=0.05, momentum=0.9), Adam(others, lr=1e-2)]


def test_wrappers_whose_constructors_take_what_they_do_not_keep_are_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A schedule and a list of optimizers keep nothing of positions; slow weights are found out."""
    model = net()
    for made in (
        Warmed(64, SGD(model.parameters(), lr=0.05), 100),
        Several(*halves(model)),
        Warmed(64, lookahead(model.parameters()), 100),
    ):
        attach(model, made, SoloSwarm(SETTINGS), batch_size=1).detach()
    assert warnings_of(caplog) == []
    attach(model, SlowBeside(*halves(model)), SoloSwarm(SETTINGS), batch_size=1)
    (said,) = warnings_of(caplog)
    assert "whether SlowBeside remembers where the parameters were" in said


@pytest.mark.parametrize("kept", ["alone", "list", "dict"])
def test_an_lbfgs_inside_another_is_named(kept: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net(torch.bfloat16)
    optimizer: Any = MastersOf(model.parameters(), LBFGS)
    if kept != "alone":  # as wrappers of several keep them
        (name,) = [name for name, value in vars(optimizer).items() if isinstance(value, LBFGS)]
        inner = getattr(optimizer, name)
        setattr(optimizer, name, [inner] if kept == "list" else {"all": inner})
    attach(model, optimizer, SoloSwarm(SETTINGS), batch_size=1)
    (said,) = warnings_of(caplog)
    assert "MastersOf steps by an LBFGS inside of it" in said
    assert "attach(..., on_adopted=f)" in said


def test_what_is_cured_and_what_is_torchs_own_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for make in (lookahead, Adam, MADGRAD, Lion, EightBit):
        model = net()
        attach(model, make(model.parameters()), SoloSwarm(SETTINGS), batch_size=1)
    assert warnings_of(caplog) == []


def test_the_scripts_own_way(caplog: pytest.LogCaptureFixture) -> None:
    """It hears by how much parameters were moved, and nothing else is done."""
    model = net(torch.bfloat16)
    optimizer = MasterInClosure(model.parameters())
    heard: list[dict[Tensor, Tensor]] = []

    def adopted(moved: Any) -> None:
        heard.append(moved)
        for p, delta in moved.items():
            optimizer.masters()[p].add_(delta)

    sync = attach(model, optimizer, SoloSwarm(SETTINGS), batch_size=1, on_adopted=adopted)
    assert heard == []  # the founder's parameters are the anchor
    before: list[Tensor] = []
    for number in range(H):
        if number == H - 1:
            optimizer.register_step_post_hook(lambda *_: before.append(flat(model)))
        step(model, optimizer, number)
    (moved,) = heard
    assert list(moved) == list(model.parameters())
    assert all(delta.dtype == torch.float32 for delta in moved.values())
    adopted_at = flat(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(flat(model), adopted_at, atol=2**-8)
    assert (warnings_of(caplog), sync.round) == ([], 1)


def test_in_the_scripts_own_way_positions_are_left_to_it() -> None:
    model = net()
    optimizer = lookahead(model.parameters())
    calls: list[object] = []
    attach(model, optimizer, SoloSwarm(SETTINGS), batch_size=1, on_adopted=calls.append)
    slow = [state["slow"].clone() for state in optimizer.state.values()]
    for number in range(H):  # fewer than its k
        step(model, optimizer, number)
    assert len(calls) == 1
    assert all(
        torch.equal(state["slow"], old)
        for state, old in zip(optimizer.state.values(), slow, strict=True)
    )


def test_one_that_counts_steps_by_hand_and_diloco_have_it_too() -> None:
    model, calls = net(), list[Any]()
    sync = attach(model, None, SoloSwarm(SETTINGS), batch_size=1, on_adopted=calls.append)
    for number in range(H):
        step(model, SGD(model.parameters(), lr=0.1), number)
        sync.step()
    assert [list(moved) for moved in calls] == [list(model.parameters())]
    model, calls = net(), []
    optimizer = DiLoCo(
        model.parameters(),
        SGD(model.parameters(), lr=0.1),
        swarm=SoloSwarm(SETTINGS),
        model=model,
        on_adopted=calls.append,
    )
    for number in range(H):
        step(model, optimizer, number)
    assert len(calls) == 1


# ---- hooks


def test_hooks_sit_on_the_outermost_object_that_has_them() -> None:
    """A Lookahead moves the parameters after its inner optimizer's step: what a round contributes
    is what it has left there.
    """
    settings = msgspec.structs.replace(SETTINGS, sync_every=5)
    table = RoundTable(["m0", "m1"], settings, auto=False)
    model, plain = net(), net()
    optimizer, alone = lookahead(model.parameters()), lookahead(plain.parameters())
    sync = attach(model, optimizer, table.member("m0"), batch_size=1)
    assert hooked(optimizer) is optimizer
    assert attached_to(optimizer) is sync
    assert attached_to(optimizer.optimizer) is None  # type: ignore[attr-defined]
    start = flat(model).float()
    for number in range(5):
        step(model, optimizer, number)
        step(plain, alone, number)
    offered = table.offers[sync.swarm.peer].vector
    assert torch.equal(offered, start - flat(plain).float())
    assert sync.stats["steps"] == 5


@pytest.mark.parametrize("scheduled", ["not", "before", "after"])
def test_a_lookahead_without_a_place_for_hooks_gets_one(
    scheduled: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted inside of it, its first pull was a change that nobody had made, and a round lost. A
    second object of the class, which no run has, steps as before.
    """
    settings = msgspec.structs.replace(SETTINGS, sync_every=6)
    table = RoundTable(["m0", "m1"], settings, auto=False)
    model, plain = net(), net()
    optimizer, alone = (
        BareLookahead(SGD(each.parameters(), lr=0.1, momentum=0.9)) for each in (model, plain)
    )
    schedule = None
    if scheduled == "before":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    sync = attach(model, optimizer, table.member("m0"), batch_size=1)
    if scheduled == "after":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    assert hooked(optimizer) is optimizer
    start = flat(model).float()
    for number in range(6):
        step(model, optimizer, number)
        step(plain, alone, number)
        if schedule is not None:
            schedule.step()
    assert torch.equal(table.offers[sync.swarm.peer].vector, start - flat(plain).float())
    assert sync.stats["steps"] == 6
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and r.name == "atoll"]


@pytest.mark.filterwarnings("ignore")  # of lightning and accelerate, at import
def test_hooks_of_trainers_wrappers_sit_on_the_inner_one() -> None:
    accelerate = pytest.importorskip("accelerate")
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    optimizer = SGD(net().parameters(), lr=0.1)
    assert hooked(accelerate.Accelerator(cpu=True).prepare(optimizer)) is optimizer
    assert hooked(lightning.LightningOptimizer(optimizer)) is optimizer
