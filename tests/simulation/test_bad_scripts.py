"""One member's script does what it should not: it is told clearly, and the others lose no round by
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from atoll.collectives.errors import AtollError, ConfigError, ModelMismatchError
from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.collectives.telemetry import subscribe
from atoll.node.local import LocalSwarm
from atoll.node.session import events as ev
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import Attachment, attach
from atoll.optim.rounds.events import ProgressDropped

H, ROUNDS, BAD = 3, 8, 2
SETTINGS = RunSettings(
    sync_every=H, rounds=ROUNDS, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
)


def net(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


@dataclass
class Life:
    """A loop as users write it, with places where it may go wrong."""

    member: LocalMember
    model: nn.Sequential = field(default_factory=net)
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    steps: int = 0

    def __post_init__(self) -> None:
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.draw = torch.Generator().manual_seed(self.member.index)

    def attached(self, **arguments: Any) -> Attachment:
        self.attachment = attach(
            self.model,
            self.optimizer,
            self.member,
            clock=self.member.clock,
            on_round=self.outcomes.append,
            **arguments,
        )
        return self.attachment

    def gradients(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 4, generator=self.draw)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.steps += 1

    def to_the_end(self) -> Life:
        while not self.attachment.done:
            self.step()
        return self


def play(
    bad: Callable[[LocalMember], Any],
    settings: RunSettings = SETTINGS,
    arrange: Callable[[LocalSwarm], Any] | None = None,
) -> Any:
    """Two good members and a bad one; what the bad one's script says. The good ones are counted in
    every round, one after the other, and end with the same bits."""

    def script(member: LocalMember) -> Any:
        if member.index == BAD:
            return bad(member)
        life = Life(member)
        life.attached()
        life.to_the_end()
        return life

    swarm = LocalSwarm(3, settings=settings, latency_s=0.01)
    if arrange is not None:
        arrange(swarm)
    *good, told = swarm.run(script, step_s=0.25)
    for life in good:
        assert [
            outcome.round for outcome in life.outcomes if outcome.status == "committed"
        ] == list(range(1, ROUNDS + 1))
        assert all(outcome.counted for outcome in life.outcomes if outcome.status == "committed")
        assert life.attachment.stats["samples_dropped"] == 0
    anchors = [
        torch.cat([value.detach().reshape(-1) for value in life.model.parameters()])
        for life in good
    ]
    assert torch.equal(*anchors)
    assert torch.isfinite(anchors[0]).all()
    return told


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_dropped_by_whoever_trained_it_and_counted(value: float) -> None:
    """In its third round; the model goes back to the anchor, and the next round is an ordinary one."""
    events: list[object] = []

    def script(member: LocalMember) -> Life:
        life = Life(member)
        life.optimizer = torch.optim.SGD(life.model.parameters(), lr=0.01)
        life.attached()
        while life.attachment.round < 2:
            life.step()
        with torch.no_grad():
            life.model[2].bias[1] = value
        return life.to_the_end()

    off = subscribe(events.append)
    life = play(script)
    off()
    stats = life.attachment.stats
    dropped = [event for event in events if isinstance(event, ProgressDropped)]
    assert [event.samples for event in dropped] == [stats["samples_dropped"]]
    assert dropped[0].samples in range(1, H + 1)
    assert "holds NaN or infinity" in dropped[0].reason
    assert (
        stats["samples_counted"] + stats["samples_dropped"] + stats["samples_unsent"]
        == stats["steps"]
    )
    assert life.outcomes[-1].counted


def test_what_the_codec_cannot_hold_is_dropped_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would be refused in every round to come, and all that is trained on top of it."""

    def script(member: LocalMember) -> Life:
        life = Life(member)
        life.optimizer = torch.optim.SGD(life.model.parameters(), lr=0.01)
        life.attached()
        while life.attachment.round < 2:
            life.step()
        life.optimizer.zero_grad(set_to_none=False)
        life.optimizer.param_groups[0]["lr"] = 1.0
        life.model[2].bias.grad[1] = -3.4e38
        life.optimizer.step()
        life.optimizer.param_groups[0]["lr"] = 0.01
        life.optimizer.zero_grad(set_to_none=False)
        while not life.attachment.stats["samples_dropped"]:
            life.optimizer.step()  # no loss: it would be infinite, and the gradients NaN
        return life.to_the_end()

    life = play(script, msgspec.structs.replace(SETTINGS, codec="bf16", exact=False))
    stats = life.attachment.stats
    assert stats["samples_dropped"] in range(1, H + 1)
    assert (
        stats["samples_counted"] + stats["samples_dropped"] + stats["samples_unsent"]
        == stats["steps"]
    )
    assert "too much for bf16 (element 1 of 2); the model goes back to the anchor" in caplog.text
    assert life.outcomes[-1].counted


def test_an_inner_optimizer_whose_state_is_damaged_contributes_nothing_any_more() -> None:
    """AdamW keeps the NaN of one gradient: its member drops all it trains, says so, and the others
    go on.
    """

    def script(member: LocalMember) -> Life:
        life = Life(member)
        life.attached()
        while life.attachment.round < 2:
            life.step()
        life.gradients()
        life.model[0].weight.grad = torch.full((5, 4), float("nan"))
        life.optimizer.step()
        return life.to_the_end()

    stats = play(script).attachment.stats
    assert stats["counted"] == 2
    assert stats["samples_dropped"] > H
    assert (
        stats["samples_counted"] + stats["samples_dropped"] + stats["samples_unsent"]
        == stats["steps"]
    )


def test_a_contribution_by_hand_that_is_not_finite_is_refused_before_it_is_sent() -> None:
    def script(member: LocalMember) -> list[Outcome]:
        member.open(
            make_layout(
                [("0.weight", (5, 4)), ("0.bias", (5,)), ("2.weight", (2, 5)), ("2.bias", (2,))]
            ),
            lambda out: None,
        ).release()
        return [
            member.contribute(samples=1, write=lambda out: out.fill_(float("nan"))).wait(60)
            for _ in range(2)
        ]

    refused = play(script)
    assert [(outcome.counted, outcome.contributors, outcome.reason) for outcome in refused] == [
        (False, (), "refused: 0.weight holds NaN (element 0 of 20)")
    ] * 2


def test_a_contribution_to_another_base_anchor_is_refused() -> None:
    """Made on the anchor of round 1, offered when the run was further on."""

    def script(member: LocalMember) -> tuple[int, Outcome]:
        life = Life(member)
        life.attached()
        while life.attachment.round < 1:
            life.step()
        life.attachment.detach()
        while (view := member.anchor()).round < 3:
            member.sleep(0.25)
        return view.round, member.contribute(
            samples=100, write=lambda out: out.fill_(1.0), base=1
        ).wait(60)

    at, outcome = play(script)
    assert (outcome.counted, outcome.contributors) == (False, ())
    assert outcome.reason == f"refused: it was made on the anchor of round 1, the run is at {at}"


def test_a_member_whose_node_is_on_another_base_is_not_counted() -> None:
    """Its messages name another entry than the run's last: they are refused in its name, and rounds
    go on without it.
    """
    accused: list[ev.PeerMisbehaved] = []
    swarms: list[LocalSwarm] = []

    def script(member: LocalMember) -> Outcome:
        life = Life(member)
        life.attached()
        while life.attachment.round < 3:
            life.step()
        for index in range(BAD):
            listen(swarms[0], index)
        process = swarms[0].peers[BAD].process
        assert process is not None
        assert process.session.machine is not None
        process.session.machine.base = bytes(32)  # as after a defect of its disk
        return member.contribute(samples=100, write=lambda out: out.fill_(1.0)).wait(2.0)

    def listen(swarm: LocalSwarm, index: int) -> None:
        process = swarm.peers[index].process
        assert process is not None
        emit = process.session.ports.emit

        def heard(event: object) -> None:
            if isinstance(event, ev.PeerMisbehaved):
                accused.append(event)
            emit(event)

        process.session.ports.emit = heard  # type: ignore[method-assign]

    outcome = play(script, arrange=swarms.append)
    assert not outcome.counted
    assert {event.peer for event in accused} == {"p2"}
    assert all("on another base" in event.reason for event in accused)


class Bare(torch.optim.SGD):
    """An optimizer of one's own that forgets super().__init__, as some do."""

    def __init__(self, params: Any) -> None:
        self.parameters = list(params)


@pytest.mark.parametrize(
    ("why", "key", "words"),
    [
        ("sync_every", "$.train.sync_every", "sync_every=0 differs from the run's 3"),
        ("state", "optimizer", "Bare has no state, no parameter groups or no hooks"),
        ("stray", "optimizer", "2 parameters of the optimizer are not the model's"),
        ("closure", "optimizer", "function is not a torch.optim.Optimizer"),
        ("model", "", r"2.weight  yours \[3, 5\]  run \[2, 5\]"),
    ],
)
def test_what_is_refused_at_attach_costs_the_others_nothing(why: str, key: str, words: str) -> None:
    def script(member: LocalMember) -> AtollError:
        life = Life(member, net(3) if why == "model" else net())
        arguments: dict[str, Any] = {"sync_every": 0} if why == "sync_every" else {}
        if why == "state":
            life.optimizer = Bare(life.model.parameters())
        elif why == "stray":
            life.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        elif why == "closure":
            life.optimizer = lambda: life.gradients()  # type: ignore[assignment]
        with pytest.raises(
            ModelMismatchError if why == "model" else ConfigError, match=words
        ) as told:
            life.attached(**arguments)
        return told.value

    error = play(script)
    assert getattr(error, "key", "") == key
    assert error.hint


def test_a_model_that_changed_between_restarts_is_refused_by_the_tensors_name() -> None:
    """Killed in its third round; its second life has a layer more. Then it comes back as it was,
    and takes part again.
    """
    lives: list[str] = []

    def script(member: LocalMember) -> Life | None:
        lives.append("")
        if len(lives) == 2:
            other = Life(member, nn.Sequential(*net(), nn.Linear(2, 2)))
            with pytest.raises(ModelMismatchError) as told:
                other.attached()
            lives[1] = told.value.message
        life = Life(member)
        life.attached()
        return life.to_the_end()

    life = play(script, arrange=lambda swarm: swarm.crash_at(BAD, 2.5, back_after_s=0.5))
    assert "3.weight" in lives[1]
    assert life is not None
    assert life.outcomes[-1].counted


def test_a_closure_that_raises_is_the_scripts_own_error_and_no_step() -> None:
    """LBFGS evaluates its closure several times a step, which is one step; an exception passes
    through, and training goes on.
    """

    def script(member: LocalMember) -> Life:
        life = Life(member)
        life.optimizer = torch.optim.LBFGS(life.model.parameters(), lr=0.1, max_iter=3)
        life.attached()
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise ZeroDivisionError("the user's")
            return life.gradients()

        while not life.attachment.done:
            try:
                life.optimizer.step(closure)
                life.steps += 1
            except ZeroDivisionError:
                assert calls == 5
        return life

    life = play(script)
    assert life.attachment.stats["steps"] == life.steps
    assert life.attachment.stats["samples_dropped"] == 0
    assert life.outcomes[-1].counted


@pytest.mark.parametrize(
    "settings", [{"sync_every": 0}, {"sync_every": None, "round_s": 0.0}, {"codec": "int3"}]
)
def test_a_run_that_cannot_be_is_refused_to_all_of_its_members(settings: dict[str, Any]) -> None:
    """H = 0, no time, a codec that nobody knows: the manifest says so before
    (tests/unit/test_manifest.py).
    """
    with pytest.raises(ConfigError) as told:
        LocalSwarm(2, settings=msgspec.structs.replace(SETTINGS, **settings)).run(
            lambda member: Life(member).attached()
        )
    assert told.value.key or told.value.hint
