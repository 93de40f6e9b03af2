"""Checkpoints of an attachment: exact resume, and what happens when the run has moved on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from round_table import RoundTable
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from atoll.collectives.errors import LocalProtocolError, OutOfDateError, StateError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.optim import Attachment, SoloSwarm, attach

H = 4
SETTINGS = RunSettings(
    sync_every=H,
    outer=OuterSettings("nesterov", 0.9, 0.6),
    deadline_s=0.0,
    exact=False,  # else nothing of so small a model is lost on the way
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        (model(torch.randn(8, 5, generator=generator)) - 1.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: Attachment) -> str:
    """One hash over everything a member has: live parameters and buffers, inner optimizer, anchor,
    counters.
    """
    hasher = blake3()
    for value in model.state_dict().values():
        hasher.update(value.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            hasher.update(value.numpy().tobytes())
    stats = attachment.stats
    hasher.update(
        repr(
            [
                stats[key]
                for key in ("round", "steps", "samples_counted", "samples_unsent", "counted")
            ]
        ).encode()
    )
    with attachment.evaluate_anchor() as view:
        hasher.update(view.digest.encode())
    return hasher.hexdigest()


def start(swarm: Any, seed: int = 0) -> tuple[nn.Sequential, torch.optim.AdamW, Attachment]:
    model = net(seed)
    optimizer = adamw(model)
    return model, optimizer, attach(model, optimizer, swarm)


@pytest.mark.parametrize("saved_at", [2 * H, 2 * H + 3])
@pytest.mark.parametrize("codec", ["fp32", "stat2", "sparse256"])
def test_exact_resume_by_hash_through_distributed_checkpoint(
    tmp_path: Path, saved_at: int, codec: str
) -> None:
    """Saved at a boundary and in the middle of a round; resumed in a fresh model, optimizer and
    swarm. With a residual where there is one.
    """
    settings = msgspec.structs.replace(SETTINGS, codec=codec)
    model, optimizer, attachment = start(SoloSwarm(settings))
    assert isinstance(attachment, Stateful)
    train(model, optimizer, range(saved_at))
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "atoll": attachment,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "warnings.warn", lambda *args, **kwargs: None
        )  # torch's own, about running without a process group
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
        train(model, optimizer, range(saved_at, 5 * H))
        again, other, resumed = start(SoloSwarm(settings), seed=5)
        loaded = {
            "model": again.state_dict(),
            "optimizer": get_optimizer_state_dict(again, other),
            "atoll": resumed,
        }
        assert (
            resumed.stats["steps"] == 0
        )  # making the optimizer's state took a step of learning rate 0: no inner step
        dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    again.load_state_dict(loaded["model"])
    set_optimizer_state_dict(again, other, loaded["optimizer"])
    assert resumed.stats["steps"] == saved_at
    train(again, other, range(saved_at, 5 * H))
    residual, before = (
        one.state_dict()["strands"]["0"].get("residual") for one in (resumed, attachment)
    )
    assert (residual is not None) == (codec != "fp32")
    if residual is not None:
        assert torch.equal(residual, before)
        assert residual.abs().max() > 0
    assert digest(again, other, resumed) == digest(model, optimizer, attachment)


def end_of_overlapped(overlap: Any, saved_at: int, *, interrupted: bool) -> str:
    """The hash of a member that settles at a step and trains five rounds more, with or without a
    new life in between.
    """
    settings = msgspec.structs.replace(SETTINGS, overlap=overlap, deadline_s=10.0)
    table = RoundTable(["me", "other"], settings, auto=False)
    model, optimizer, attachment = start(table.member("me"))
    other = table.member("other")
    other.open(attachment._flat.layout, lambda _: pytest.fail("founded already")).release()

    def decide(step: int) -> None:
        if "me" in table.offers:
            other.contribute(samples=3, write=lambda out: out.fill_(1e-3 * step))
            table.decide(["me", "other"])

    def train_on(steps: range) -> None:
        for step in steps:
            train(model, optimizer, range(step, step + 1))
            if step % H == 1:  # decided in the middle of a round, learnt at its end
                decide(step)

    train_on(range(saved_at))
    decide(saved_at)
    settled = attachment.settle()
    assert settled is not None
    assert settled.counted
    assert attachment.settle() is None
    if interrupted:
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attachment.state_dict()))
        attachment.detach()
        model, optimizer, attachment = resume(table, *state)
    train_on(range(saved_at, saved_at + 5 * H))
    decide(0)
    attachment.settle()
    assert attachment.round >= 6
    assert attachment.stats["samples_dropped"] == 0
    return digest(model, optimizer, attachment)


@pytest.mark.parametrize("overlap", ["late", "eager"])
@pytest.mark.parametrize("saved_at", [2 * H, 2 * H + 1, 2 * H + 3])
def test_a_settled_checkpoint_resumes_exactly_with_overlap(overlap: Any, saved_at: int) -> None:
    """Before and after the round under way is decided."""
    assert end_of_overlapped(overlap, saved_at, interrupted=True) == end_of_overlapped(
        overlap, saved_at, interrupted=False
    )


def test_saving_what_is_under_way_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    table = RoundTable(["me"], msgspec.structs.replace(SETTINGS, overlap="late"), auto=False)
    model, optimizer, attachment = start(table.member("me"))
    train(model, optimizer, range(H + 1))
    settled = attachment.settle()
    assert settled is not None
    assert settled.status == "open"
    attachment.state_dict()
    assert "call settle() before saving" in caplog.text


def saved_member(steps: int) -> tuple[RoundTable, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A member of a run with a log that trained ``steps`` steps, as its checkpoint; the run is at
    round 1.
    """
    table = RoundTable(["me"], SETTINGS)
    model, optimizer, attachment = start(table.member("me"))
    train(model, optimizer, range(steps))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attachment.state_dict()))
    attachment.detach()
    return table, *saved


def resume(
    table: RoundTable,
    model_state: dict[str, Any],
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
) -> Any:
    model, optimizer, attachment = start(table.member("me"), seed=5)
    attachment.load_state_dict(state)  # before the model, as torch's checkpoint does it
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    return model, optimizer, attachment


def test_a_residual_is_of_one_history_of_the_anchor() -> None:
    """It comes back with a state whose anchor is the run's; after other rounds, or without the live
    values it belongs to, it is zero.
    """
    table = RoundTable(
        ["me"],
        msgspec.structs.replace(SETTINGS, codec="sparse256", outer=OuterSettings("sgd", 1.0)),
    )
    model, optimizer, attachment = start(table.member("me"))
    train(model, optimizer, range(H))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attachment.state_dict()))
    residual = saved[2]["strands"]["0"]["residual"]
    assert residual.abs().max() > 0
    attachment.detach()
    *_, attachment = resume(table, *saved)
    assert torch.equal(attachment.state_dict()["strands"]["0"]["residual"], residual)
    attachment.detach()
    model, optimizer, attachment = resume(table, *saved)
    train(model, optimizer, range(H, 2 * H))
    attachment.detach()
    model, optimizer, attachment = resume(table, *saved)
    assert attachment.state_dict()["strands"]["0"]["residual"].abs().max() == 0
    train(model, optimizer, range(2 * H, 3 * H))
    assert attachment.state_dict()["strands"]["0"]["residual"].abs().max() > 0
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    train(model, optimizer, range(3 * H, 4 * H))
    assert attachment.state_dict()["strands"]["0"]["residual"].abs().max() == 0


def test_a_state_with_a_log_holds_no_tensors_and_resumes_in_the_middle_of_a_round() -> None:
    table, *saved = saved_member(H + 2)
    assert [key for key, value in saved[2].items() if isinstance(value, torch.Tensor)] == []
    assert (
        saved[2]["run"],
        saved[2]["strands"]["0"]["round"],
        saved[2]["strands"]["0"]["since"]["steps"],
    ) == ("table", 1, 2)
    straight, straight_optimizer, straight_attachment = resume(table, *copy.deepcopy(saved))
    assert straight_attachment.stats["samples_unsent"] == 2
    train(straight, straight_optimizer, range(H + 2, H + 3))
    assert straight_attachment.round == 1
    train(straight, straight_optimizer, range(H + 3, 2 * H))
    assert straight_attachment.round == 2
    assert table.decided[-1][0].samples == H
    assert straight_attachment.stats["steps"] == 2 * H


def test_an_older_state_takes_the_newest_anchor_and_drops_what_was_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, *saved = saved_member(H + 2)
    model, optimizer, attachment = start(table.member("me"), seed=5)
    train(model, optimizer, range(H))
    assert table.store is not None
    assert table.store.round == 2
    attachment.detach()
    again, other, resumed = resume(table, *saved)
    assert resumed.round == 2
    train(again, other, range(1))
    stats = resumed.stats
    assert (stats["samples_dropped"], stats["samples_unsent"], stats["steps"]) == (2, 1, H + 3)
    assert ["the run has moved on" in record.message for record in caplog.records] == [True]
    anchor = torch.cat([p.detach().reshape(-1) for p in again.parameters()])
    difference = (anchor - table.store.anchor[: anchor.numel()]).abs().max()
    assert 0 < difference <= 0.011  # the newest anchor and one AdamW step at 0.01 on it


def test_a_log_is_never_rewound() -> None:
    _, *saved = saved_member(H + 1)
    fresh = RoundTable(["me"], SETTINGS)
    _, _, attachment = start(fresh.member("me"))
    with pytest.raises(OutOfDateError, match="of round 1, the run is at round 0"):
        attachment.load_state_dict(saved[2])
    model, optimizer, attachment = start(fresh.member("me"), seed=3)
    train(model, optimizer, range(H, 2 * H))
    with pytest.raises(OutOfDateError, match="round 1 has anchor"):
        attachment.load_state_dict(saved[2])
    with pytest.raises(OutOfDateError, match="is of run other"):
        attachment.load_state_dict({**saved[2], "run": "other"})
    assert attachment.round == 1
    train(model, optimizer, range(2 * H, 3 * H))
    assert attachment.round == 2


def test_progress_that_was_not_loaded_is_not_claimed(caplog: pytest.LogCaptureFixture) -> None:
    """The state says two samples are in the model, but the model was never loaded after attach()."""
    table, _, _, state = saved_member(H + 2)
    model, optimizer, attachment = start(table.member("me"))
    attachment.load_state_dict(state)
    train(model, optimizer, range(1))
    assert attachment.stats["samples_unsent"] == 1
    assert attachment.stats["samples_dropped"] == 2
    assert "not loaded" in caplog.text


def test_an_undecided_contribution_is_not_sent_twice() -> None:
    table = RoundTable(["me"], SETTINGS, auto=False)
    model, optimizer, attachment = start(table.member("me"))
    train(model, optimizer, range(H + 1))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attachment.state_dict()))
    assert saved[2]["strands"]["0"]["frozen"] == H
    with pytest.raises(LocalProtocolError, match="undecided"):
        attachment.load_state_dict(saved[2])
    attachment.detach()
    again, other, resumed = resume(table, *saved)
    train(again, other, range(1))
    assert resumed.stats["samples_dropped"] == H + 1
    assert resumed.stats["samples_unsent"] == 1


@pytest.mark.parametrize(
    "damage", [{"version": 9}, {"strands": {"0": {"round": "x"}}}, {"totals": {}}, {"strands": {}}]
)
def test_damaged_states_are_refused(damage: dict[str, Any]) -> None:
    _, _, attachment = start(SoloSwarm(SETTINGS))
    state = attachment.state_dict()
    with pytest.raises(StateError):
        attachment.load_state_dict({**state, **damage})
    with pytest.raises(StateError):
        attachment.load_state_dict({})
    del state["swarm"]
    with pytest.raises(StateError, match="swarm"):
        attachment.load_state_dict(state)
