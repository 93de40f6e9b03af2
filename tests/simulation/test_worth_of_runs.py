"""The watch on worth in runs of the product's own code in virtual time: settings that harm are named
and cured, at all members from one entry; runs that are well are never accused; a liar moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from seeds import daily, seeds
from torch import Tensor, nn

from atoll.collectives.cold_start import GROWTH
from atoll.collectives.growth import RoundLengths
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import EvaluateSettings, RunSettings
from atoll.collectives.telemetry import Event, subscribe
from atoll.node.local import LocalSwarm
from atoll.node.manifest import parse_manifest
from atoll.optim import attach
from atoll.optim.outer.governor import Governed
from atoll.optim.outer.presets import preset_named

Evaluate = Callable[[nn.Module], Any]
Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[torch.Generator], Tensor], Evaluate]
Task = Callable[[int], Made]
HARMFUL = OuterSettings("nesterov", 0.9, 0.9, governor=True, watch=3)
WATCH = EvaluateSettings()


def samples(numbers: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(numbers, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


class Halves(nn.Module):
    """A linear map in two tensors, so that it can be cut into two fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(4, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] @ self.left + x[:, 4:] @ self.right


def line(index: int, lr: float = 0.0035) -> Made:
    """A linear regression, of whose distance to the optimum 100 steps take half. Its held-out
    data have no noise, so that losses fall to nearly nothing.
    """
    model = Halves()
    x, y = samples(256, 5)

    def loss(stream: torch.Generator) -> Tensor:
        x = torch.randn(32, 8, generator=stream)
        y = x.sum(1, keepdim=True) + 0.1 * torch.randn(32, 1, generator=stream)
        return (model(x) - y).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, loss, lambda model: (model(x) - y).square().mean()


def brisk(index: int) -> Made:
    """The same, in a quarter of the steps."""
    return line(index, 0.014)


def classes(index: int) -> Made:
    """Three classes, a small network and AdamW; 128 held-out samples."""
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
    kinds = torch.randn(8, 3, generator=torch.Generator().manual_seed(5))

    def drawn(stream: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8, generator=stream)
        noise = 0.5 * torch.randn(count, 3, generator=stream)
        return x, (torch.sin(2 * x) @ kinds + noise).argmax(1)

    held = drawn(torch.Generator().manual_seed(9), 128)

    def loss(stream: torch.Generator) -> Tensor:
        x, y = drawn(stream, 16)
        return nn.functional.cross_entropy(model(x), y)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (
        model,
        optimizer,
        loss,
        lambda model: nn.functional.cross_entropy(model(held[0]), held[1]),
    )


def unlike(index: int) -> Made:
    """Members whose data differ, each of which evaluates on its own: whatever it adopts, its own
    weights were better there.
    """
    model, (x, noise) = Halves(), samples(256, 5)
    weights = torch.full((8, 1), 1.0 + 0.4 * index)

    def error(x: Tensor, noise: Tensor) -> Tensor:
        return (model(x) - x @ weights - 0.1 * noise).square().mean()

    def loss(stream: torch.Generator) -> Tensor:
        return error(*(torch.randn(32, n, generator=stream) for n in (8, 1)))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.014)
    return model, optimizer, loss, lambda model: error(x, noise)


class Played:
    """What each member saw at the end, and at the ends of rounds."""

    def __init__(self) -> None:
        self.standing = dict[int, list[str]]()  # by member: what stood after each round
        self.held_out = dict[int, list[float]]()
        self.plain_since = dict[int, list[int]]()  # by member, of each fragment
        self.anchors = dict[int, list[float]]()
        self.told = dict[int, int]()  # readings in the logs that it has


def play(
    task: Task,
    settings: RunSettings,
    seed: int,
    peers: int = 2,
    evaluate: Callable[[int, Evaluate], Evaluate] = lambda index, honest: honest,
    arrange: Callable[[LocalSwarm], LocalSwarm] = lambda swarm: swarm,
) -> Played:
    """A run that starts cold. ``evaluate``: what a member's script gives in place of the task's."""
    played = Played()

    def script(member: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, optimizer, loss_of, honest = task(member.index)
        sync = attach(
            model,
            optimizer,
            member,
            batch_size=8,
            clock=member.clock,
            evaluate=evaluate(member.index, honest),
        )
        length = (settings.rounds or 1) * (settings.sync_every or 1)
        decay = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / length))
        )
        stream = torch.Generator().manual_seed(1000 * seed + member.index)
        standing, held = list[str](), list[float]()
        while not sync.done:
            before = sync.round
            optimizer.zero_grad()
            loss_of(stream).backward()
            optimizer.step()
            if task is classes:
                decay.step()
            if sync.round > before:
                told = sync.describe()
                standing.append(told["averaging"])
                held += [told["evaluation"]["held_out"]] if told["evaluation"] else []
        with torch.no_grad(), sync.evaluate_anchor():
            held.append(float(honest(model)))
            anchor = [value for each in model.parameters() for value in each.flatten().tolist()]
        sessions = [member._session(number) for number in range(settings.fragments)]
        played.standing[member.index], played.held_out[member.index] = standing, held
        played.anchors[member.index] = anchor
        played.plain_since[member.index] = [each.replica.plain_since for each in sessions]
        played.told[member.index] = sum(
            contributor.reading.evaluated is not None
            for session in sessions
            for certified in session.machine.journal.entries.since(1)
            for contributor in certified.entry.contributors
        )

    arrange(LocalSwarm(peers, settings=settings, seed=seed)).run(script, step_s=0.1)
    return played


def harmful(**changes: Any) -> RunSettings:
    settings = RunSettings(sync_every=25, rounds=9, outer=HARMFUL, evaluate=WATCH)
    return msgspec.structs.replace(settings, **changes)


# ---- settings that harm


@pytest.mark.parametrize("seed", seeds(0, 6))
def test_momentum_from_a_cold_start_is_named_within_five_rounds_and_cured(seed: int) -> None:
    """0.9 / 0.9 at H = 100: the second anchor is past the optimum."""
    named_and_cured(line, 100, 2 + seed % 3, seed)


@pytest.mark.slow
@pytest.mark.rota(7)
def test_momentum_from_a_cold_start_is_cured_in_short_rounds_too() -> None:
    named_and_cured(brisk, 25, 2, 0)


def named_and_cured(task: Task, steps: int, peers: int, seed: int) -> None:
    """From the entry that holds the reading of an anchor past the optimum on, all members take the
    plain mean, and the loss falls as that one's does.
    """
    settings = harmful(sync_every=steps)
    cured = play(task, settings, seed, peers)
    assert len({tuple(each) for each in cured.anchors.values()}) == 1
    (since,) = {each for numbers in cured.plain_since.values() for each in numbers}
    for standing in cured.standing.values():
        first = next(at for at, text in enumerate(standing, 1) if text)
        assert first <= 5
        assert standing[first - 1].startswith("a round's model is worse than the one before")
        assert standing[first - 1].endswith(f"takes the plain mean from entry {since} on")
        assert standing[-1] == ""  # withdrawn since
    unwatched = msgspec.structs.replace(HARMFUL, watch=0)
    left = play(task, msgspec.structs.replace(settings, outer=unwatched), seed, peers)
    assert all("what helps: outer momentum" in standing[-1] for standing in left.standing.values())
    assert set(map(tuple, left.plain_since.values())) == {(0,)}
    assert cured.held_out[0][-1] < 0.05 * left.held_out[0][-1]


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_newcomer_and_one_that_comes_back_take_the_plain_mean_from_the_same_entry() -> None:
    played = play(
        brisk,
        harmful(rounds=12),
        1,
        4,
        arrange=lambda swarm: swarm.join_at(3, 14.0).crash_at(1, 19.0, back_after_s=0.5),
    )
    assert sorted(played.anchors) == [0, 1, 2, 3]
    assert len({tuple(each) for each in played.anchors.values()}) == 1
    assert len({tuple(each) for each in played.plain_since.values()}) == 1
    assert played.plain_since[0][0] > 0
    assert played.held_out[0][-1] < 0.01


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("changes", daily(1, [{"fragments": 2}, {"overlap": "late"}]))
def test_rounds_of_other_kinds_are_named_and_cured_too(changes: dict[str, Any]) -> None:
    settings = harmful(rounds=12, **changes)
    cured = play(brisk, settings, 1)
    left = play(
        brisk, msgspec.structs.replace(settings, outer=OuterSettings("nesterov", 0.9, 0.9)), 1
    )
    assert len({tuple(each) for each in cured.anchors.values()}) == 1
    assert len({tuple(each) for each in cured.plain_since.values()}) == 1
    assert all(since > 0 for since in cured.plain_since[0])
    assert all(any(standing) for standing in left.standing.values())
    assert cured.held_out[0][-1] < 0.2 * left.held_out[0][-1]


# ---- runs that are well

WELL = ((brisk, 12, 12), (classes, 10, 12), (unlike, 25, 12), (classes, 30, 8))


@pytest.mark.parametrize("seed", seeds(1, 24))
def test_a_run_that_is_well_is_never_accused(seed: int) -> None:
    """Nor moved by its governor: the plain mean, and the preset for cold runs with its short
    rounds; two to four members, losses that fall to nearly nothing and others that do not, data
    alike and unlike.
    """
    task, steps, rounds = WELL[seed % 4]
    preset = preset_named(("plain-mean", "cold")[seed // 4 % 2])
    lengths = RoundLengths(steps, GROWTH if preset.growing else 0)
    outer = msgspec.structs.replace(
        preset.growing or preset.outer, governor=True, watch=3, short=lengths.short_rounds
    )
    settings = RunSettings(
        sync_every=steps,
        growth=lengths.growth,
        rounds=lengths.rounds_for(rounds),
        outer=outer,
        evaluate=WATCH,
    )
    peers = 2 + seed % 3
    played = play(task, settings, seed, peers)
    assert all(not any(standing) for standing in played.standing.values())
    assert set(map(tuple, played.plain_since.values())) == {(0,)}
    assert min(played.told.values()) >= (rounds - 3) * peers


# ---- who lies, and who says nothing

LYING = """
schema = 1
name = "lied-to"
model = { entry = "local:line" }
train = { sync_every = 12, rounds = 8, outer = { lr = 0.5, momentum = 0.5, governor = true } }
exchange = { codec = "fp32" }
quorum = { lying = 1 }
evaluate = {}
"""


def liar(index: int, honest: Evaluate) -> Evaluate:
    """The last member's evaluations say that every adoption is a catastrophe: 1, then 1e30."""
    calls = [0]

    def evaluate(model: nn.Module) -> float:
        calls[0] += 1
        own = calls[0] == 1 or (calls[0] > 3 and calls[0] % 2 == 0)
        return 1.0 if own else 1e30

    return evaluate if index == 3 else honest


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_a_liar_moves_no_governor_and_raises_no_verdict(seed: int) -> None:
    settings = parse_manifest(LYING).settings()
    assert (settings.lying, settings.outer.governor, settings.outer.watch) == (1, True, 0)
    honest, lied_to = (
        play(brisk, settings, seed, 4, evaluate) for evaluate in (lambda _, own: own, liar)
    )
    assert min(lied_to.told.values()) >= 4 * 5
    assert lied_to.anchors == honest.anchors
    for played in (honest, lied_to):
        assert not any(text for standing in played.standing.values() for text in standing)
    assert lied_to.plain_since == {index: [0] for index in range(4)}


# Seeds in which two honest members of three are behind their own weights three times: too few to
# accuse the run, and the liar is a third.
CLOSE = (12, 16, 21, 24, 27, 30, 34)


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("seed", CLOSE)
def test_a_liar_raises_no_verdict_that_is_close(seed: int) -> None:
    lied_to = play(brisk, parse_manifest(LYING).settings(), seed, 4, liar)
    assert not any(text for standing in lied_to.standing.values() for text in standing)


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("seed", range(3))
def test_settings_that_harm_are_named_where_members_may_lie(seed: int) -> None:
    """With the cure, since the governor advises only."""
    settings = harmful(sync_every=100, lying=1, outer=msgspec.structs.replace(HARMFUL, watch=0))
    played = play(line, settings, seed, 4)
    for standing in played.standing.values():
        first = next(at for at, text in enumerate(standing, 1) if text)
        assert first <= 5
        assert "what helps: outer momentum" in standing[first - 1]


def lied_to(settings: RunSettings, lie: str, seed: int) -> tuple[list[float], list[Governed]]:
    """Member 3 tells losses that fall and then soar, or sends nothing and then four times what it
    has; the others tell no losses. The anchor's values at the end, and what governors said.
    """
    values, said = dict[int, list[float]](), list[Event]()

    def script(member: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, optimizer, loss_of, _ = classes(member.index)
        lies, contribute = member.index == 3, member.contribute
        sync = attach(model, optimizer, member, batch_size=8, clock=member.clock)

        def changed(*, write: Callable[[Tensor], None], **told: Any) -> Any:
            factor = 4.0 if sync.round > 8 and sync.round % 2 else 0.0
            return contribute(write=lambda out: (write(out), out.mul_(factor)), **told)

        if lies and lie == "length":
            member.contribute = changed
        stream = torch.Generator().manual_seed(1000 * seed + member.index)
        while not sync.done:
            optimizer.zero_grad()
            loss_of(stream).backward()
            optimizer.step()
            if lies and lie == "loss":
                sync.log(loss=1e-9 if sync.round < 8 else 1e9)
        with torch.no_grad(), sync.evaluate_anchor():
            flat = torch.cat([each.flatten() for each in model.parameters()])
            values[member.index] = flat.tolist()

    ended = subscribe(said.append)
    try:
        LocalSwarm(4, settings=settings, seed=seed).run(script, step_s=0.1)
    finally:
        ended()
    assert all(each == values[0] for each in values.values())
    return values[0], [each for each in said if isinstance(each, Governed)]


JUMPS = (0, 2)  # of the first seeds: those in which a governor that acts takes the length for one


@pytest.mark.parametrize("seed", seeds(0, 3))
@pytest.mark.parametrize("lie", ["loss", "length"])
def test_a_liar_moves_no_governor_by_losses_or_lengths(lie: str, seed: int) -> None:
    """The anchor is that of a run without governor, to the last bit. One that acts is moved by a
    loss, and by a length where the honest members' lengths let it jump.
    """
    text = LYING.replace("rounds = 8", "rounds = 16")
    manifest = parse_manifest(text + 'robust = { rule = "trimmed_mean", f = 1 }\n')
    settings = manifest.settings()
    outer = settings.outer
    ends = {
        (governor, advises): lied_to(
            msgspec.structs.replace(
                settings,
                outer=msgspec.structs.replace(outer, governor=governor, advises=advises),
            ),
            lie,
            seed,
        )
        for governor, advises in ((True, outer.advises), (False, False), (True, False))
    }
    values, said = ends[True, True]
    assert values == ends[False, False][0]
    if lie == "loss" or seed in JUMPS:
        assert said
        assert values != ends[True, False][0]


def test_without_lying_members_one_of_three_moves_it_neither() -> None:
    outer = OuterSettings("nesterov", 0.5, 0.5, governor=True, watch=2)
    settings = RunSettings(sync_every=12, rounds=8, outer=outer, evaluate=WATCH)
    three = play(brisk, settings, 1, 4, liar)
    assert three.plain_since == {index: [0] for index in range(4)}
    assert all(not any(standing) for standing in three.standing.values())


def test_scripts_without_evaluate_and_runs_without_the_table_hold_no_readings() -> None:
    for settings, evaluate in (
        (harmful(rounds=4, evaluate=None), lambda _, honest: honest),
        (harmful(rounds=4), lambda _, honest: None),
    ):
        played = play(brisk, settings, 1, evaluate=evaluate)  # type: ignore[arg-type]
        assert set(played.told.values()) == {0}
        assert played.plain_since == {0: [0], 1: [0]}
        assert all(not any(standing) for standing in played.standing.values())
