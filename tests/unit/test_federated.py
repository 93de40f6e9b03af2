"""Federated methods on quadratics, where every answer is known: what each must be equal to, and
where each must end.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.collectives.errors import ConfigError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.optim.federated import METHODS, server_settings
from atoll.optim.federated.arrivals import (
    Staleness,
    async_weights,
    buffer_weights,
    buffered_factor,
    fixed_weights,
    mixed,
    staleness_factor,
)
from atoll.optim.federated.inner import (
    next_control,
    proximal,
    variance_reduced,
    with_momentum,
)
from atoll.optim.federated.member import InnerSteps, Knobs
from atoll.optim.federated.server import FederatedServer
from atoll.optim.outer.step import OuterStep

N, D, K, LR = 5, 4, 10, 0.1
ALL = list(range(N))
FLWR = json.loads((Path(__file__).parent / "federated_flwr.json").read_text(encoding="utf-8"))


class Quadratics:
    """Members i with the loss a_i/2 (y - b_i)², element by element, in float64: their optima and
    their curvatures differ.
    """

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.a = torch.rand(N, D, generator=rng, dtype=torch.float64) * 1.5 + 0.5
        self.b = torch.randn(N, D, generator=rng, dtype=torch.float64) * 3
        self.optimum = (self.a * self.b).sum(0) / self.a.sum(0)

    def gradient(self, members: list[int], y: Tensor) -> Tensor:
        """A row a member."""
        return self.a[members] * (y - self.b[members])


class Run:
    """Rounds of a method, of turns as a driver makes them, in float64; the server steps with lr 1."""

    def __init__(
        self, name: str, *, mu: float = 0.0, beta: float = 0.3, steps: int = K, seed: int = 0
    ) -> None:
        self.method, self.knobs, self.steps = METHODS[name], Knobs(LR, mu, beta), steps
        self.task, self.rng = Quadratics(seed), random.Random(seed)
        self.server = FederatedServer(
            self.method, OuterSettings("sgd", 1.0), torch.zeros(D, dtype=torch.float64)
        )
        self.own = torch.zeros(N, D, dtype=torch.float64)

    @property
    def x(self) -> Tensor:
        return self.server.anchor

    def round(self, asked: int = N) -> None:
        served = self.server.served()
        for site in self.rng.sample(range(N), asked):
            turn, y = (
                InnerSteps(
                    self.method, self.knobs, served, self.own[site] if self.method.control else None
                ),
                served.anchor,
            )
            for _ in range(self.steps):
                g = self.task.gradient([site], y)[0]
                at = turn.second_at(g, y)
                y = y - LR * turn.direction(
                    g, y, None if at is None else self.task.gradient([site], at)[0]
                )
            self.server.add(served.anchor - y, 1.0)
            control = turn.control(served.anchor - y, self.steps)
            if control is not None:
                self.server.note(control - self.own[site], 1 / N)
                self.own[site] = control
        self.server.step(self.steps, LR)

    def error(self) -> float:
        return float((self.x - self.task.optimum).abs().max())


def common(run: Run) -> Tensor:
    """The server's control variate."""
    assert run.server.common is not None
    return run.server.common


def ended(run: Run, rounds: int = 120, asked: int = N) -> Run:
    for _ in range(rounds):
        run.round(asked)
    return run


def test_one_inner_step_is_large_batch_sgd() -> None:
    """K = 1, everybody: every method without a memory is SGD on the mean loss."""
    for name in ("fedavg", "fedprox"):
        run, x = Run(name, mu=0.1, steps=1), torch.zeros(D, dtype=torch.float64)
        for _ in range(40):
            run.round()
            x = x - LR * run.task.gradient(ALL, x).mean(0)
            assert (run.x - x).abs().max() < 1e-12
    scaffold, x = Run("scaffold", steps=1), torch.zeros(D, dtype=torch.float64)
    for _ in range(40):
        scaffold.round()
        x = x - LR * scaffold.task.gradient(ALL, x).mean(0)
        assert (scaffold.x - x).abs().max() < 1e-12  # the control variates cancel in the mean


def test_scaffold_reaches_the_optimum_where_fedavg_does_not() -> None:
    drift = ended(Run("fedavg")).error()
    assert drift > 1e-2
    assert ended(Run("scaffold")).error() < 1e-8
    assert ended(Run("scaffold_m"), 200).error() < 1e-8
    assert ended(Run("fedavg_m", beta=0.1), 200).error() < 0.5 * drift
    assert ended(Run("fedprox", mu=5.0), 200).error() < drift


def test_scaffold_reaches_it_when_only_some_are_asked() -> None:
    for name in ("scaffold", "scaffold_m", "scaffold_m_vr"):
        assert ended(Run(name), 250, asked=2).error() < 1e-8, name
    assert ended(Run("fedavg"), asked=2).error() > 1e-2


def test_variance_reduced_forms_damp_a_batchs_noise_and_move_no_limit() -> None:
    """Noise that both gradients share is damped to beta of it; on exact gradients the limit is that
    of the method without.
    """
    g, before, common, noise = torch.randn(4, 9, dtype=torch.float64)
    noisy, exact = (
        variance_reduced(g + noise, before + noise, common, 0.3),
        variance_reduced(g, before, common, 0.3),
    )
    assert (noisy - exact - 0.3 * noise).abs().max() < 1e-14
    assert (ended(Run("fedavg_m_vr")).x - ended(Run("fedavg")).x).abs().max() < 1e-8
    assert (
        ended(Run("scaffold_m_vr", beta=1.0), 9).x - ended(Run("scaffold"), 9).x
    ).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["scaffold", "scaffold_m", "scaffold_m_vr"])
def test_control_variates_add_up_and_are_mean_gradients(name: str) -> None:
    run = Run(name)
    for _ in range(30):
        run.round(asked=run.rng.randint(1, N))
        assert (run.own.mean(0) - common(run)).abs().max() < 1e-12
    ended(run, 250)
    at_optimum = run.task.gradient(ALL, run.task.optimum)
    assert (run.own - at_optimum).abs().max() < 1e-7
    assert common(run).abs().max() < 1e-7


def test_a_lost_control_variate_bends_the_optimum_until_all_begin_anew() -> None:
    """Taking c in its place leaves c another number than the mean of the c_i, for ever."""
    run = ended(Run("scaffold"), 50)
    run.own[2] = common(run)
    assert ended(run, 150).error() > 1e-3
    run.server.common, run.own = torch.zeros_like(run.x), torch.zeros_like(run.own)
    assert ended(run, 150).error() < 1e-8


def test_neutral_values_change_no_bit() -> None:
    gradient, other = torch.randn(9), torch.randn(9)
    assert proximal(gradient, other, gradient, 0.0) is gradient
    assert with_momentum(gradient, other, 1.0) is gradient
    assert torch.equal(variance_reduced(gradient, other, gradient, 1.0), gradient)
    assert ended(Run("fedprox", mu=0.0), 20).x.tolist() == ended(Run("fedavg"), 20).x.tolist()
    assert ended(Run("fedavg_m", beta=1.0), 20).x.tolist() == ended(Run("fedavg"), 20).x.tolist()


def served(settings: OuterSettings, means: list[Tensor]) -> Tensor:
    """The anchor after outer steps from zero."""
    step, x = OuterStep(settings), torch.zeros(3)
    state = torch.zeros(step.state_numel(3))
    for mean in means:
        out = torch.empty(3)
        step.apply(x, mean.clone(), state, out)
        x = out
    return x


def test_the_servers_steps_are_the_papers() -> None:
    """Against the formulas in float64: g is minus the papers' Delta, tau is epsilon, v starts at 0."""
    rng = torch.Generator().manual_seed(1)
    means = [torch.randn(3, generator=rng) for _ in range(6)]
    for name in METHODS:
        x = m = v = torch.zeros(3, dtype=torch.float64)
        kind = METHODS[name].outer
        for g in (mean.double() for mean in means):
            if kind == "sgd":
                x = x - 0.5 * g
            elif kind == "momentum":
                m = 0.9 * m + g
                x = x - 0.5 * m
            else:
                m = 0.9 * m + 0.1 * g if kind != "adagrad" else g
                square = g * g
                v = {
                    "adam": 0.99 * v + 0.01 * square,
                    "yogi": v - 0.01 * square * torch.sign(v - square),
                    "adagrad": v + square,
                }[kind]
                x = x - 0.5 * m / (v.sqrt() + 1e-3)
        assert torch.allclose(
            served(server_settings(name, lr=0.5), means).double(), x, rtol=1e-5
        ), name


@pytest.mark.parametrize("name", FLWR["anchors"])
def test_the_servers_steps_are_flwrs(name: str) -> None:
    """From the same contributions, by what Flower printed (`scripts/bench/rivals/_flwr.py`). Its FedAdam is the
    paper's with a learning rate that is corrected anew for every round, and counts rounds from 2.
    """
    options, weights = FLWR["options"][name], FLWR["weights"]
    lr = options.get("eta", options.get("server_learning_rate", 1.0))
    x, state = torch.zeros(7), torch.zeros(14)
    for number, (deltas, theirs) in enumerate(
        zip(FLWR["deltas"], FLWR["anchors"][name], strict=True), 1
    ):
        rate = (
            lr * (1 - 0.99 ** (number + 1)) ** 0.5 / (1 - 0.9 ** (number + 1))
            if name == "FedAdam"
            else lr
        )
        server = FederatedServer(METHODS[name.lower()], server_settings(name.lower(), lr=rate), x)
        server._state = state[: len(server._state)]  # goes on where the round before ended
        for delta, weight in zip(deltas, weights, strict=True):
            server.add(-torch.tensor(delta), weight)
        server.step()
        x = server.anchor
        assert torch.allclose(x, torch.tensor(theirs), rtol=2e-5, atol=1e-6), number


def test_bias_correction_is_adams() -> None:
    rng = torch.Generator().manual_seed(2)
    means = [torch.randn(3, generator=rng) for _ in range(6)]
    x = m = v = torch.zeros(3, dtype=torch.float64)
    for t, g in enumerate((mean.double() for mean in means), 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        x = x - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3)
    ours = served(server_settings("fedadam", lr=0.1, bias_correction=True), means)
    assert torch.allclose(ours.double(), x, rtol=1e-5)
    assert not torch.allclose(ours, served(server_settings("fedadam", lr=0.1), means), rtol=0.1)
    with pytest.raises(ConfigError):
        server_settings("fedyogi", bias_correction=True)
    with pytest.raises(ConfigError):
        server_settings("fed")


def test_staleness_factors_never_grow() -> None:
    kinds: tuple[Staleness, ...] = ("constant", "polynomial", "hinge")
    for kind in kinds:
        for a in (None, 0.0, 0.5, 3.0):
            factors = [staleness_factor(kind, u, a) for u in range(60)]
            assert factors[0] == 1
            assert factors == sorted(factors, reverse=True)
            assert factors[-1] > 0
        with pytest.raises(ConfigError):
            staleness_factor(kind, 1, -0.5)
        with pytest.raises(ConfigError):
            staleness_factor(kind, -1)
    assert staleness_factor("hinge", 6) == 1 / 21
    assert buffered_factor(3) == 0.5
    assert mixed(torch.zeros(2), torch.ones(2), 0.4).tolist() == pytest.approx([0.4, 0.4])
    with pytest.raises(ConfigError):
        mixed(torch.zeros(2), torch.ones(2), 1.5)


SHARES = {PeerId("a"): 0.3, PeerId("b"): 0.7}
SECONDS = {PeerId("a"): 1.0, PeerId("b"): 4.0}


def arrived(weights: dict[PeerId, float], period: float | None, gamma: float = 0.01) -> float:
    """Where f_a = (x - 0)²/2 and f_b = (x - 1)²/2 come to rest: one gradient step a round on the
    anchor that was sent. Without a period every arrival is a step of its own. The mean over the
    last quarter."""
    targets, x = {PeerId("a"): 0.0, PeerId("b"): 1.0}, 0.5
    sent = dict.fromkeys(targets, x)
    due, seen = dict(SECONDS), []
    now, end = 0.0, 3000.0
    while now < end:
        now = now + period if period else min(due.values())
        step = 0.0
        for peer in [peer for peer in due if due[peer] <= now + 1e-9]:
            step += weights[peer] * (sent[peer] - targets[peer])
        x -= gamma * step
        for peer in [peer for peer in due if due[peer] <= now + 1e-9]:
            sent[peer], due[peer] = x, now + SECONDS[peer]
        if now > 0.75 * end:
            seen.append(x)
    return sum(seen) / len(seen)


def test_weights_lead_to_the_optimum_of_the_shares_and_without_them_to_that_of_speed() -> None:
    assert arrived(async_weights(SHARES, SECONDS), None) == pytest.approx(0.7, abs=0.01)
    rates = {peer: SHARES[peer] / SECONDS[peer] for peer in SHARES}
    assert arrived(SHARES, None) == pytest.approx(
        rates[PeerId("b")] / sum(rates.values()), abs=0.01
    )
    for period in (1.0, 2.0, 4.0, 8.0):
        assert arrived(fixed_weights(SHARES, SECONDS, period), period) == pytest.approx(
            0.7, abs=0.01
        ), period


def test_weights_have_the_right_limits() -> None:
    assert fixed_weights(SHARES, SECONDS, 4.0) == SHARES
    assert fixed_weights(SHARES, SECONDS, 1.0) == pytest.approx({"a": 0.3, "b": 2.8})
    assert async_weights(SHARES, dict.fromkeys(SHARES, 3.0)) == pytest.approx({"a": 0.6, "b": 1.4})
    assert buffer_weights(SHARES, {PeerId("a"): 1.0, PeerId("b"): 0.5}) == pytest.approx(
        {"a": 0.3, "b": 1.4}
    )
    for wrong in (
        lambda: fixed_weights(SHARES, SECONDS, 0.0),
        lambda: fixed_weights({PeerId("a"): 0.5}, SECONDS, 1.0),
        lambda: async_weights(SHARES, {PeerId("a"): 1.0}),
        lambda: buffer_weights(SHARES, {PeerId("a"): 1.0, PeerId("b"): 0.0}),
        lambda: proximal(torch.ones(1), torch.ones(1), torch.ones(1), -1.0),
        lambda: with_momentum(torch.ones(1), torch.ones(1), 0.0),
        lambda: variance_reduced(torch.ones(1), torch.ones(1), torch.ones(1), 1.1),
        lambda: next_control(torch.ones(1), torch.ones(1), torch.ones(1), 0, 0.1),
    ):
        with pytest.raises(ConfigError):
            wrong()
