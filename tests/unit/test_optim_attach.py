"""attach: golden trajectories, weights, lost nodes, late rounds, and what it refuses."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from round_table import RoundTable, TableSwarm
from torch import nn

from atoll.collectives.errors import (
    ConfigError,
    DeadlineExceededError,
    LocalProtocolError,
    ModelMismatchError,
    SwarmClosedError,
)
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outcomes import Outcome, Share
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import PeerView
from atoll.collectives.swarm import RunSettings
from atoll.collectives.telemetry import subscribe
from atoll.optim import Attachment, SoloSwarm, attach
from atoll.optim.rounds.events import ProgressDropped, Reentered, RoundSeen, TrainingAlone
from atoll.optim.script.lookout import Lookout

H = 3
SETTINGS = RunSettings(sync_every=H, outer=OuterSettings("nesterov", 0.9, 0.6))
QUICK = RunSettings(sync_every=H, outer=OuterSettings("nesterov", 0.9, 0.6), deadline_s=0.0)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    data: int,
    each: Callable[[int], None] | None = None,
) -> None:
    """Steps of a loop whose data depend on the step and on ``data`` alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * data + step)
        inputs, targets = (
            torch.randn(4, 5, generator=generator),
            torch.randn(4, 3, generator=generator),
        )
        (model(inputs) - targets).square().mean().backward()
        if each is not None:
            each(step)
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> np.ndarray:
    return (
        torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        .numpy()
        .copy()
    )


def fill(model: nn.Module, values: np.ndarray) -> None:
    nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), model.parameters())


def by_hand(
    weights: list[int], rounds: int, outer: OuterSettings
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """DiLoCo from plain formulas in numpy: the anchor after each round, and each replica's live
    parameters at the end.
    """
    models = [net() for _ in weights]
    optimizers = [adamw(model) for model in models]
    anchor = flat(models[0])
    momentum, lr, mu = np.zeros_like(anchor), np.float32(outer.lr), np.float32(outer.momentum)
    anchors = []
    for round_ in range(rounds):
        total = np.zeros_like(anchor)
        for index, (model, optimizer, weight) in enumerate(
            zip(models, optimizers, weights, strict=True)
        ):
            train(model, optimizer, range(round_ * H, (round_ + 1) * H), index)
            total = total + np.float32(weight * H) * (anchor - flat(model))
        mean = total / np.float32(H * sum(weights))
        if outer.kind == "nesterov":
            momentum = mu * momentum + mean
            anchor = anchor - lr * (mean + mu * momentum)
        else:
            anchor = anchor - lr * mean
        anchors.append(anchor)
        for model in models:
            fill(model, anchor)
    return anchors, [flat(model) for model in models]


def run_members(table: RoundTable, script: Callable[[TableSwarm, int], None]) -> None:
    """Every member's script in a thread of its own; the first error is raised here."""
    errors: list[BaseException] = []

    def guarded(peer: str, index: int) -> None:
        try:
            script(table.member(peer), index)
        except BaseException as error:
            errors.append(error)
            for other in list(table.peers):
                table.lose(other)

    threads = [
        threading.Thread(target=guarded, args=(peer, index))
        for index, peer in enumerate(table.peers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("method", ["diloco", "local_sgd"])
@pytest.mark.parametrize("weights", [[1, 1], [1, 4, 2]])
def test_golden_trajectory(weights: list[int], method: str) -> None:
    """Two and three replicas through attach, against the plain formulas: equal bits, every round."""
    settings = RunSettings(method=method, sync_every=H, outer=SETTINGS.outer, deadline_s=60.0)  # type: ignore[arg-type]
    table = RoundTable([f"peer{index}" for index in range(len(weights))], settings)
    anchors: list[list[np.ndarray]] = [[] for _ in weights]
    models = [net() for _ in weights]  # made here: torch's seed is of the process

    def script(swarm: TableSwarm, index: int) -> None:
        model = models[index]
        optimizer = adamw(model)
        attachment = attach(
            model, optimizer, swarm, on_round=lambda outcome: anchors[index].append(flat(model))
        )
        train(
            model, optimizer, range(4 * H), index, lambda step: attachment.samples(weights[index])
        )
        assert attachment.stats["counted"] == 4
        assert attachment.stats["samples_counted"] == 4 * H * weights[index]

    run_members(table, script)
    expected, live = by_hand(
        weights, 4, OuterSettings("sgd", 1.0, 0.0) if method == "local_sgd" else SETTINGS.outer
    )
    for index in range(len(weights)):
        assert [np.array_equal(a, b) for a, b in zip(anchors[index], expected, strict=True)] == [
            True
        ] * 4
        assert np.array_equal(flat(models[index]), live[index])
    assert table.decided[0] == tuple(
        Share(peer, H * weight) for peer, weight in zip(table.peers, weights, strict=True)
    )


class Newcomer(SoloSwarm):
    """Is let in between the first look and the second."""

    others: tuple[PeerView, ...] = (PeerView(PeerId("p1"), 1, True, "direct", True),)
    looks = 0

    def members(self) -> list[PeerView]:
        self.looks += 1
        return [*self.others, *(super().members() if self.looks > 1 else ())]


def test_a_script_is_told_that_it_is_admitted_and_not_that_it_trains_alone_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "atoll"):
        newcomer = Lookout(Newcomer(SETTINGS))
        for _ in range(3):
            newcomer.count()
        alone = Lookout(SoloSwarm(SETTINGS))
        alone.look({}, undecided=False, done=True)
        assert [record.message for record in caplog.records] == [
            "p1 is a member",
            "admitted: this peer is a member of the run from now on",
        ]
        alone.look({}, undecided=False, done=False)
        assert caplog.records[-1].message == "training alone; peers may join at any time"


def test_the_optimizer_stays_the_users_and_training_alone_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    plain, plain_optimizer = copy.deepcopy(model), None
    optimizer = adamw(model)
    before = (type(optimizer), optimizer.state_dict().keys(), dict(optimizer.__dict__).keys())
    events: list[object] = []
    off = subscribe(events.append)
    with caplog.at_level(logging.INFO, "atoll"):
        attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
        train(model, optimizer, range(2 * H), 0)
    off()
    assert (
        type(optimizer),
        optimizer.state_dict().keys(),
        dict(optimizer.__dict__).keys(),
    ) == before
    assert [record.message for record in caplog.records] == [
        "training alone; peers may join at any time",
        "round 1: 1 contributed, 3 samples here",
        "round 2: 1 contributed, 3 samples here",
    ]
    assert events[0] == TrainingAlone("solo", node_lost=False)
    assert [type(event) for event in events[1:]] == [RoundSeen, RoundSeen]
    stats = attachment.stats
    assert (
        stats["round"],
        stats["alone"],
        stats["steps"],
        attachment.describe()["last_status"],
    ) == (
        2,
        True,
        2 * H,
        "committed",
    )
    plain_optimizer = adamw(plain)
    train(plain, plain_optimizer, range(H - 1), 0)
    again = copy.deepcopy(net())
    other = adamw(again)
    attach(again, other, SoloSwarm(SETTINGS))
    train(again, other, range(H - 1), 0)
    assert np.array_equal(flat(plain), flat(again))  # between boundaries attach changes nothing


def test_a_late_joiner_starts_from_the_anchor() -> None:
    table = RoundTable(["founder"], SETTINGS)
    founder, optimizer = net(), None
    optimizer = adamw(founder)
    attachment = attach(founder, optimizer, table.member("founder"))
    train(founder, optimizer, range(2 * H), 0)
    table.peers.append("late")  # type: ignore[arg-type]
    late = net(seed=9)
    joined = attach(late, adamw(late), table.member("late"))
    assert np.array_equal(flat(late), flat(founder))
    assert joined.round == attachment.round == 2
    assert joined.stats["peers"] == 1


def test_another_model_is_refused_by_name() -> None:
    table = RoundTable(["a", "b"], SETTINGS)
    model, other = net(), nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    attach(model, adamw(model), table.member("a"))
    with pytest.raises(ModelMismatchError, match=r"2.weight  yours \[4, 6\]  run \[3, 6\]"):
        attach(other, adamw(other), table.member("b"))


def test_an_open_round_costs_no_work_and_is_looked_at_first() -> None:
    table = RoundTable(["me", "other"], QUICK, auto=False)
    model = net()
    optimizer, outcomes = adamw(model), list[Outcome]()
    attachment = attach(model, optimizer, table.member("me"), on_round=outcomes.append)
    start = flat(model)
    train(model, optimizer, range(H), 0)
    frozen = flat(model)
    assert [outcome.status for outcome in outcomes] == ["open"]
    train(model, optimizer, range(H, H + 1), 0)
    assert attachment.stats["samples_unsent"] == H + 1
    table.decide(["me"])
    moved = flat(model)
    train(
        model, optimizer, range(H + 1, 2 * H), 0
    )  # the boundary adopts the old round first, then offers the new work
    assert [(outcome.status, outcome.counted) for outcome in outcomes] == [
        ("open", False),
        ("committed", True),
        ("open", False),
    ]
    assert table.store is not None
    delta = np.float32(H) * (start - frozen) / np.float32(H)
    anchor = start - np.float32(0.9) * (delta + np.float32(0.6) * delta)
    assert np.array_equal(table.store.anchor.numpy(), anchor)
    assert not np.array_equal(moved, frozen)
    offered = table.offers[table.peers[0]]
    assert offered.samples == H
    np.testing.assert_array_equal(offered.vector.numpy(), anchor - flat(model))
    assert attachment.stats["open"] == 2


def test_uncounted_work_is_carried_with_its_samples() -> None:
    table = RoundTable(["me", "other"], QUICK, auto=False)
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, table.member("me"))
    other = table.member("other")
    assert table.store is not None
    other.open(table.store.layout, lambda out: None).release()
    train(model, optimizer, range(H), 0, lambda step: attachment.samples(5))
    other.contribute(samples=2, write=lambda out: out.fill_(0.5))
    table.decide(["other"])
    assert attachment.sync() is not None
    stats = attachment.stats
    assert (stats["uncounted"], stats["samples_unsent"], attachment.describe()["last_status"]) == (
        1,
        5 * H,
        "open",
    )
    assert table.offers[table.peers[0]].samples == 5 * H
    table.decide(["me"])
    outcome = attachment.sync()
    assert outcome is not None
    assert outcome.counted
    assert attachment.stats["samples_counted"] == 5 * H
    assert np.array_equal(flat(model), table.store.anchor.numpy())


@pytest.mark.parametrize("offer_too", [False, True])
def test_a_lost_node_costs_a_round_not_the_training(
    offer_too: bool, caplog: pytest.LogCaptureFixture
) -> None:
    table = RoundTable(["me", "other"], QUICK, auto=False)
    model = net()
    optimizer, events = adamw(model), list[object]()
    attachment = attach(
        model, optimizer, table.member("me"), clock=lambda: 0.0
    )  # it tries again at once
    off = subscribe(events.append)
    train(model, optimizer, range(H), 0)
    frozen = flat(model)
    table.lose("me", offer_too=offer_too)
    train(model, optimizer, range(H, 3 * H), 0)
    stats = attachment.stats
    assert (stats["node_lost"], stats["alone"], stats["peers"], stats["steps"]) == (
        True,
        True,
        0,
        3 * H,
    )
    assert TrainingAlone("table", node_lost=True) in events
    with attachment.evaluate_anchor() as anchor:  # the mapping outlives the node
        assert anchor.round == 0
    table.find("me")
    progress = flat(model) - frozen
    train(model, optimizer, range(3 * H, 4 * H), 0)
    off()
    assert Reentered("table", 0) in events
    assert (ProgressDropped in [type(event) for event in events]) == offer_too
    offered = table.offers[table.peers[0]]
    assert offered.samples == (3 * H if offer_too else H)
    assert np.abs(progress).max() > 0
    table.decide(["me"])
    attachment.sync()
    assert attachment.stats["node_lost"] == 0
    assert (
        len([record for record in caplog.records if "until the node is back" in record.message])
        == 1
    )
    assert (
        attachment.stats["samples_counted"]
        + attachment.stats["samples_dropped"]
        + attachment.stats["samples_unsent"]
        == 4 * H
    )


def test_what_was_decided_while_the_node_was_away_is_told_once() -> None:
    table = RoundTable(["me", "other"], QUICK, auto=False)
    model, outcomes = net(), list[Outcome]()
    optimizer = adamw(model)
    attachment = attach(
        model, optimizer, table.member("me"), on_round=outcomes.append, clock=lambda: 0.0
    )
    train(model, optimizer, range(H), 0)
    table.lose("me", offer_too=False)
    train(model, optimizer, range(H, 2 * H), 0)
    table.decide(["me"])  # the others finished the round with the bytes they had
    table.find("me")
    train(model, optimizer, range(2 * H, 3 * H), 0)
    assert [(outcome.status, outcome.counted) for outcome in outcomes] == [
        ("open", False),
        ("committed", True),
        ("open", False),
    ]
    assert table.offers[table.peers[0]].samples == 2 * H
    stats = attachment.stats
    assert (
        stats["round"],
        stats["samples_counted"],
        stats["samples_unsent"],
        stats["samples_dropped"],
    ) == (1, H, 2 * H, 0)


def test_a_round_that_stays_undecided_is_not_a_boundary_at_every_step() -> None:
    """All have finished it, and too few are left to decide: training goes on as between rounds,
    until there is an outcome.
    """

    class Pressed(TableSwarm):
        closing = 1

    table, looks = RoundTable(["me", "other"], QUICK, auto=False), list[str]()
    model = net()
    optimizer = adamw(model)
    attachment = attach(
        model,
        optimizer,
        Pressed(table, table.peers[0]),
        on_round=lambda outcome: looks.append(outcome.status),
    )
    train(model, optimizer, range(1), 0)  # the others have finished
    train(model, optimizer, range(1, H - 1), 0)
    assert (looks, attachment.stats["open"]) == (["open"], 1)
    table.decide(["me"])
    train(model, optimizer, range(H - 1, H), 0)
    assert looks == ["open", "committed", "open"]
    assert attachment.round == 1


@pytest.mark.parametrize("offer_too", [False, True])
def test_a_late_result_is_learnt_from_a_node_that_came_back_in_the_middle_of_a_round(
    offer_too: bool,
) -> None:
    """With a delay there are moments to adopt a result and nothing else: entering again has adopted
    it already.
    """
    late = msgspec.structs.replace(QUICK, overlap="late", delay=1)
    table = RoundTable(["me", "other"], late, auto=False)
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, table.member("me"), clock=lambda: 0.0)
    table.member("other").open(attachment._flat.layout, lambda _: None).release()
    train(model, optimizer, range(H), 0)
    table.lose("me", offer_too=offer_too)
    train(model, optimizer, range(H, H + 1), 0)
    assert attachment.stats["node_lost"]
    table.member("other").contribute(samples=3, write=lambda out: out.zero_())
    table.decide(["other"] if offer_too else ["me", "other"])
    table.find("me")
    train(model, optimizer, range(H + 1, H + 2), 0)
    stats = attachment.stats
    assert (stats["node_lost"], stats["round"], stats["samples_unsent"]) == (False, 1, 2)
    assert (stats["samples_counted"], stats["samples_dropped"]) == ((0, H) if offer_too else (H, 0))


def test_a_swarm_that_knows_it_is_cut_off_is_believed() -> None:
    """The node's client answers waits with "open" when its node goes; ``connected`` tells."""
    table = RoundTable(["me", "other"], QUICK, auto=False)
    model, swarm = net(), table.member("me")
    optimizer = adamw(model)
    attachment = attach(model, optimizer, swarm, clock=lambda: 0.0)
    assert attachment.stats["peers"] == 1
    swarm.connected, swarm.trouble = False, "the node ended"  # type: ignore[attr-defined]
    train(model, optimizer, range(H), 0)
    assert (attachment.stats["node_lost"], attachment.stats["peers"]) == (True, 0)
    swarm.connected = True  # type: ignore[attr-defined]
    train(model, optimizer, range(H, 2 * H), 0)
    assert (
        attachment.stats["node_lost"],
        attachment.stats["peers"],
        attachment.stats["samples_dropped"],
    ) == (False, 1, 0)


def test_a_node_that_stays_away_is_not_asked_all_the_time() -> None:
    now = [0.0]

    class Slow(TableSwarm):
        attempts = 0

        def open(self, *args: object) -> object:  # type: ignore[override]
            Slow.attempts += self.table.store is not None
            now[0] += 2.0 if self.peer in self.table.lost else 0.0
            return super().open(*args)  # type: ignore[arg-type]

    table = RoundTable(["me"], QUICK)
    model = net()
    attachment = attach(model, adamw(model), Slow(table, table.peers[0]), clock=lambda: now[0])
    table.lose("me")
    for _ in range(40):
        attachment.samples(1)
        attachment.sync()
        now[0] += 1.0
    assert Slow.attempts == 2  # each took 2 s, so 20 s of training come between them


def test_strict_raises_what_would_cost_a_round() -> None:
    table = RoundTable(["me", "other"], QUICK, auto=False)
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, table.member("me"), strict=True)
    with pytest.raises(DeadlineExceededError, match="undecided"):
        train(model, optimizer, range(H), 0)
    table.lose("me")
    with pytest.raises(SwarmClosedError):
        attachment.sync()


def test_skipped_scaler_steps_do_not_count() -> None:
    """A fused optimizer steps also when GradScaler skips; the skipped step is no inner step."""
    for fused in (True, False):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(H + 1):
            loss = model(torch.randn(4, 5)).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert attachment.round == (1 if step == H else 0)
        assert attachment.stats["steps"] == H
        assert attachment.stats["skipped_steps"] == int(fused)


def test_closures_schedulers_and_accumulation() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        return loss

    for _ in range(H):
        optimizer.step(closure)
    assert (attachment.round, attachment.stats["steps"]) == (1, H)
    model = net()
    other = adamw(model)
    attachment = attach(model, other, SoloSwarm(SETTINGS))
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda epoch: 1 / (epoch + 1))
    for _ in range(H):
        for _ in range(2):
            model(torch.ones(2, 5)).square().mean().backward()
            attachment.samples(2)
        other.step()
        scheduler.step()
        other.zero_grad()
    assert attachment.stats["samples_counted"] == 4 * H


@pytest.mark.filterwarnings("ignore")  # torch warns about itself
def test_a_compiled_function_around_the_step_still_counts() -> None:
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    train(model, optimizer, range(1), 0)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2 * H - 1):
        model(torch.ones(2, 5)).square().mean().backward()
        compiled()
        optimizer.zero_grad()
    assert attachment.stats["steps"] == 2 * H
    assert attachment.round == 2


def test_rounds_by_time() -> None:
    now = [0.0]
    model = net()
    optimizer = adamw(model)
    attachment = attach(
        model,
        optimizer,
        SoloSwarm(RunSettings(sync_every=None, round_s=10.0)),
        round_s=10.0,
        clock=lambda: now[0],
    )
    for seconds, rounds in [(4.0, 0), (4.0, 0), (4.0, 1), (9.0, 1), (2.0, 2)]:
        now[0] += seconds
        train(model, optimizer, range(1), 0)
        assert attachment.round == rounds
    assert attachment.stats["samples_counted"] == 5


def test_done_and_detach(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, SoloSwarm(RunSettings(sync_every=H, rounds=2)))
    train(model, optimizer, range(2 * H), 0)
    assert attachment.done
    (finished,) = (line for line in caplog.messages if "is finished" in line)
    assert finished.endswith("it is in yours inside `with attachment.evaluate_anchor():`")
    assert "atoll export" not in finished, "no node has this run"
    after = flat(model)
    train(model, optimizer, range(H), 0)
    assert attachment.sync() is None
    assert (attachment.round, attachment.stats["steps"]) == (2, 2 * H)
    assert not np.array_equal(flat(model), after)
    attachment.detach()
    attachment.detach()
    train(model, optimizer, range(H), 0)
    with pytest.raises(LocalProtocolError, match="detached"):
        attachment.sync()
    assert isinstance(attach(model, optimizer, SoloSwarm()), Attachment)


def test_an_attachment_that_nobody_keeps_is_named_once_its_model_is_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told(model: nn.Module) -> int:
        gc.collect()
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        lines = sum("its attachment is gone" in r.getMessage() for r in caplog.records)
        caplog.clear()
        return lines

    def attached(model: nn.Module) -> tuple[torch.optim.Optimizer, Attachment]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, attach(model, optimizer, SoloSwarm(RunSettings(sync_every=1, rounds=1)))

    models = [nn.Linear(2, 2) for _ in range(4)]
    attached(models[0])
    assert told(models[0]) == 1
    attach(models[1], None, SoloSwarm(RunSettings(sync_every=1)))
    assert told(models[1]) == 1
    optimizer = attached(models[2])[0]  # which keeps it
    assert told(models[2]) == 0
    optimizer.step()  # all rounds
    del optimizer
    assert told(models[2]) == 0
    attached(models[3])[1].detach()
    assert told(models[3]) == 0


def test_by_hand() -> None:
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, None, SoloSwarm(SETTINGS))
    for _ in range(H):
        train(model, optimizer, range(1), 0)
        attachment.step()
    assert attachment.round == 1
    train(model, optimizer, range(1), 0)
    assert attachment.sync() is None  # nobody told of a step
    attachment.samples(7)
    outcome = attachment.sync()
    assert outcome is not None
    assert outcome.contributors[0].samples == 7
    attachment.detach()
    hooked = attach(model, optimizer, SoloSwarm(SETTINGS))
    with pytest.raises(ConfigError, match="hook"):
        hooked.step()


def test_log_is_read_once_a_round_and_reported_as_a_mean() -> None:
    swarm = SoloSwarm(SETTINGS)
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, swarm)
    for step in range(H):
        attachment.log(loss=torch.tensor([float(step)], requires_grad=True), lr=0.5)
        assert "loss" not in swarm.reported
        train(model, optimizer, range(1), 0)
    assert swarm.reported == {"step": H, "samples": H, "loss": 1.0, "lr": 0.5}
    assert attachment.describe()["metrics"] == {"loss": 1.0, "lr": 0.5}


def test_evaluate_anchor_swaps_and_restores_bit_for_bit() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).to(torch.bfloat16)
    optimizer = adamw(model)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    start = copy.deepcopy(model.state_dict())
    for _ in range(H - 1):
        model(torch.randn(4, 5, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    live = copy.deepcopy(model.state_dict())
    with attachment.evaluate_anchor() as anchor:
        assert anchor.round == 0
        assert all(
            torch.equal(value, start[name])
            for name, value in model.state_dict().items()
            if "num_batches" not in name
        )
        with pytest.raises(ConfigError, match="evaluate_anchor"):
            optimizer.step()
    assert all(torch.equal(value, live[name]) for name, value in model.state_dict().items())
    with attachment.evaluate_anchor(), pytest.raises(ConfigError, match="evaluate_anchor"):
        attachment.sync()


def test_running_statistics_are_averaged_and_stay_sane() -> None:
    table = RoundTable(
        ["a", "b"],
        RunSettings(sync_every=1, outer=OuterSettings("nesterov", 0.9, 0.6), deadline_s=60.0),
    )
    models = [nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def script(swarm: TableSwarm, index: int) -> None:
        optimizer = adamw(models[index])
        attachment = attach(models[index], optimizer, swarm)
        norm = models[index][1]
        assert isinstance(norm, nn.BatchNorm1d)
        models[index](torch.ones(4, 5)).sum().backward()
        with torch.no_grad():  # statistics that momentum would carry past zero
            norm.running_mean.fill_(float(index))
            norm.running_var.fill_(0.125)
        optimizer.step()
        assert attachment.round == 1

    run_members(table, script)
    for model in models:
        assert model[1].running_mean.tolist() == [0.5] * 6
        assert model[1].running_var.tolist() == [0.125] * 6


def test_parameters_that_are_not_finite_are_not_contributed() -> None:
    model = net()
    optimizer, events = adamw(model), list[object]()
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    start = flat(model)
    off = subscribe(events.append)
    train(model, optimizer, range(H - 1), 0)
    with torch.no_grad():
        model[0].weight[2, 1] = float("nan")
    train(model, optimizer, range(1), 0)
    off()
    assert np.array_equal(flat(model), start)
    assert (attachment.round, attachment.stats["samples_dropped"]) == (0, H)
    assert any(isinstance(event, ProgressDropped) and event.samples == H for event in events)


def refused(key: str, words: str, *arguments: object, **settings: object) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        attach(*arguments, **settings)  # type: ignore[arg-type]
    assert error.value.key == key
    assert error.value.hint


def test_refusals_name_the_key_and_the_way_out() -> None:
    model, swarm = net(), SoloSwarm(SETTINGS)
    optimizer = adamw(model)
    refused("$.train.sync_every", "differs from the run's 3", model, optimizer, swarm, sync_every=5)
    refused("$.train.round_s", "differs from the run's None", model, optimizer, swarm, round_s=5.0)
    refused("swarm", "str is not a swarm", model, optimizer, "atoll2:abc")
    refused("optimizer", "not a torch.optim.Optimizer", model, object(), swarm)
    refused("optimizer", "not the model's", net(), optimizer, swarm)
    bare = torch.optim.SGD.__new__(
        torch.optim.SGD
    )  # as a class makes it that forgets super().__init__
    refused("optimizer", "no state, no parameter groups or no hooks", model, bare, swarm)
    refused("model", "no trainable", nn.Linear(1, 1).requires_grad_(False), None, swarm)
    optimizer.param_groups[0]["capturable"] = True
    refused("optimizer.capturable", "capturable", model, optimizer, swarm)
    compiled = adamw(model)
    compiled.step = torch.compile(compiled.step, backend="eager")  # type: ignore[method-assign]
    refused("optimizer.step", "compiled", model, compiled, swarm)
    good = adamw(model)
    attachment = attach(model, good, swarm, sync_every=H)
    refused("model", "attached already", model, adamw(model), swarm)
    other = net()
    refused("swarm", "this swarm is attached already", other, adamw(other), swarm)
    with pytest.raises(ConfigError):
        attachment.samples(-1)
    for nonsense in (2.5, "4", None):
        with pytest.raises(ConfigError, match="is not a number of samples"):
            attachment.samples(nonsense)  # type: ignore[arg-type]
    for number in (3, np.int64(4), torch.tensor(5)):
        attachment.samples(number)  # type: ignore[arg-type]
    train(model, good, range(H), 0)
    assert attachment.stats["samples_counted"] == 3 + 4 + 5 + H - 1


@pytest.mark.filterwarnings("ignore")  # torch warns about itself
def test_steps_inside_backward_are_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = net()
    optimizer = adamw(model)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    refused("optimizer", "inside backward", model, optimizer, SoloSwarm(SETTINGS))


def test_a_wrapped_optimizer_is_attached_inside() -> None:
    class Wrapper:
        """As accelerate keeps it."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = net()
    optimizer = adamw(model)
    attachment = attach(model, Wrapper(Wrapper(optimizer)), SoloSwarm(SETTINGS))  # type: ignore[arg-type]
    train(model, optimizer, range(2), 0)
    assert attachment.stats["steps"] == 2


def test_one_member_with_plain_averaging_follows_its_inner_optimizer_alone() -> None:
    """a - (a - b) is not b in floating point, but nearly: within 3e-7 of the norm."""
    model, plain = net(), net()
    optimizer, alone = adamw(model), adamw(plain)
    attach(model, optimizer, SoloSwarm(RunSettings(method="local_sgd", sync_every=H)))
    train(model, optimizer, range(4 * H), 0)
    train(plain, alone, range(4 * H), 0)
    difference = np.linalg.norm(flat(model) - flat(plain)) / np.linalg.norm(flat(plain))
    assert difference <= 3e-7


@pytest.mark.parametrize("members", [2, 4])
def test_members_that_do_the_same_equal_one_bit_for_bit(members: int) -> None:
    """Sums of two or four equal numbers are exact, and so is their mean, where their weights are
    powers of two.
    """
    four = msgspec.structs.replace(SETTINGS, sync_every=4, deadline_s=60.0)
    table = RoundTable([f"peer{index}" for index in range(members)], four)
    models = [net() for _ in range(members)]

    def script(swarm: TableSwarm, index: int) -> None:
        optimizer = adamw(models[index])
        attach(models[index], optimizer, swarm)
        train(models[index], optimizer, range(20), 0)

    run_members(table, script)
    one = net()
    optimizer = adamw(one)
    attach(one, optimizer, SoloSwarm(four))
    train(one, optimizer, range(20), 0)
    assert [np.array_equal(flat(model), flat(one)) for model in models] == [True] * members


def test_a_round_that_is_ended_in_inference_mode_leaves_nothing_that_cannot_be_written() -> None:
    table = RoundTable(["me"], QUICK, auto=False)
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, table.member("me"))
    train(model, optimizer, range(H - 1), 0)
    with torch.inference_mode():
        outcome = attachment.sync()
    assert outcome is not None
    assert outcome.status == "open"
    table.decide(["me"])
    train(model, optimizer, range(2 * H), 0)
    assert attachment.round == 1


def test_a_founders_model_with_nan_is_refused_and_founds_nothing() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[2, 3] = torch.nan
    swarm = SoloSwarm(SETTINGS)
    with pytest.raises(ConfigError, match=r"0\.weight holds NaN or infinity") as error:
        attach(model, adamw(model), swarm)
    assert error.value.key == "model"
    model = net()
    attachment = attach(model, adamw(model), swarm)  # the run can still be founded
    assert attachment.round == 0


def test_samples_are_the_batch_size_unless_a_step_says_more() -> None:
    model, swarm = net(), SoloSwarm(SETTINGS)
    optimizer = adamw(model)
    outcomes: list[Outcome] = []
    attachment = attach(model, optimizer, swarm, batch_size=64, on_round=outcomes.append)
    train(model, optimizer, range(H), data=0)
    train(model, optimizer, range(H), data=0, each=lambda step: attachment.samples(5))
    assert [outcome.contributors[0].samples for outcome in outcomes] == [64 * H, 5 * H]
    for wrong in (0, -1, 2.5):
        with pytest.raises(ConfigError):
            attach(net(), adamw(net()), SoloSwarm(SETTINGS), batch_size=wrong)  # type: ignore[arg-type]


def test_who_does_not_say_how_many_samples_a_step_has_is_told_once_that_it_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = "each step counts as one sample"
    for batch_size, times in ((None, 2), (4, 0)):  # each of the two once, over two rounds
        caplog.clear()
        table = RoundTable(["one", "two"], msgspec.structs.replace(SETTINGS, deadline_s=60.0))

        def script(swarm: TableSwarm, index: int, batch_size: int | None = batch_size) -> None:
            model = net()
            optimizer = adamw(model)
            attach(model, optimizer, swarm, batch_size=batch_size)
            train(model, optimizer, range(2 * H), 0)

        run_members(table, script)
        assert sum(said in record.getMessage() for record in caplog.records) == times


def test_of_several_optimizers_an_inner_step_is_one_of_each() -> None:
    model, swarm = net(), SoloSwarm(SETTINGS)
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    other = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    attachment = attach(model, [one, other], swarm)
    for step in range(2 * H):
        model(torch.ones(2, 5)).sum().backward()
        one.step()
        assert attachment.stats["steps"] == step
        other.step()
        assert attachment.stats["steps"] == step + 1
    assert attachment.round == 2
    with pytest.raises(ConfigError, match="names one twice"):
        attach(net(), [one, one], SoloSwarm(SETTINGS))
