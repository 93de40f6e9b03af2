"""What federated methods do beside plain SGD: a correction of every gradient, and what a member and
the run keep from round to round.

All vectors are flat, of one shape and dtype (float32 in a run, float64 in tests), and are read
only. y: live parameters, x: anchor, g: gradient at y, lr: inner learning rate, K: inner steps in
the round, S: members that contributed, N: all members.

The inner optimizer is plain SGD without momentum: its steps are what SCAFFOLD's and FedAvg-M's
formulas take them to be. FedProx goes with any.
"""

from __future__ import annotations

from torch import Tensor

from ...collectives.errors import ConfigError


def proximal(gradient: Tensor, live: Tensor, anchor: Tensor, mu: float) -> Tensor:
    """``g + mu (y - x)``: of the loss with mu/2 |y - x|² added (FedProx, arXiv 1812.06127). mu = 0
    is FedAvg, bit for bit.
    """
    if not mu >= 0:
        raise ConfigError(
            f"FedProx: mu is {mu}", key="mu", why="it must be at least 0; usual are 0.001 to 1"
        )
    return gradient if mu == 0 else gradient + mu * (live - anchor)


def controlled(gradient: Tensor, own: Tensor, common: Tensor) -> Tensor:
    """``g - c_i + c`` (SCAFFOLD, arXiv 1910.06378): without the member's drift from the others."""
    return gradient - own + common


def with_momentum(direction: Tensor, momentum: Tensor, beta: float) -> Tensor:
    """``beta d + (1 - beta) G``, G being the mean direction of the round before (FedAvg-M of Cheng
    et al. 2024, arXiv 2306.16504).

    Not FedAvgM, whose momentum is the server's. With d = `controlled` it is SCAFFOLD-M; with beta =
    1 nothing is changed. G = 0 at first.
    """
    if not 0 < beta <= 1:
        raise ConfigError(
            f"FedAvg-M: beta is {beta}",
            key="beta",
            why="it is a share above 0, at most 1; 0.1 is usual",
        )
    return direction if beta == 1 else beta * direction + (1 - beta) * momentum


def variance_reduced(direction: Tensor, before: Tensor, momentum: Tensor, beta: float) -> Tensor:
    """``d + (1 - beta)(G - g(x_prev))``: the same with the gradient of the same batch at the last
    anchor, two gradients a step (FedAvg-M-VR).

    What both gradients have of the batch's noise is damped to beta of it; the drift is not: with
    exact gradients it ends where FedAvg does. With d = g - beta (c_i - c) it is SCAFFOLD-M-VR.
    """
    if not 0 < beta <= 1:
        raise ConfigError(
            f"FedAvg-M-VR: beta is {beta}", key="beta", why="it is a share above 0, at most 1"
        )
    return direction + (1 - beta) * (momentum - before)


def met_ahead(live: Tensor, gradient: Tensor, ahead: float) -> Tensor:
    """``y - ahead g``: where Per-FedAvg takes the gradient that it steps along, so that one step of
    fine-tuning does most (arXiv 2002.07948, first order)."""
    if not ahead > 0:
        raise ConfigError(
            f"Per-FedAvg: a step of {ahead} ahead",
            key="ahead",
            why="it is a learning rate, above 0",
        )
    return live - ahead * gradient


def _check_steps(steps: float, lr: float) -> None:
    if steps < 1 or not lr > 0:
        raise ConfigError(
            f"{steps} inner steps with learning rate {lr}",
            why="control variates are means over the steps of a round",
        )


def mean_direction(pseudo: Tensor, steps: float, lr: float) -> Tensor:
    """``(x - y) / (K lr)``: what an inner step was on average. Of the members' mean it is the next
    round's G.
    """
    _check_steps(steps, lr)
    return pseudo / (steps * lr)


def next_control(own: Tensor, common: Tensor, pseudo: Tensor, steps: int, lr: float) -> Tensor:
    """``c_i - c + (x - y) / (K lr)``: the mean of the uncorrected gradients (SCAFFOLD's option II).
    ``pseudo``: x - y.

    c_i must survive a restart of its member: taking c or 0 in its place leaves c other than the
    mean of the c_i, which bends what the run converges to for ever. Where one is lost all begin
    anew, at 0.
    """
    return own - common + mean_direction(pseudo, steps, lr)


def next_control_with_momentum(
    own: Tensor,
    common: Tensor,
    momentum: Tensor,
    pseudo: Tensor,
    steps: int,
    lr: float,
    beta: float,
) -> Tensor:
    """SCAFFOLD-M's c_i: the mean of the gradients, from what the steps were: ``(x - y) / (K lr) =
    beta (mean g - c_i + c) + (1 - beta) G``.
    """
    return own - common + (mean_direction(pseudo, steps, lr) - (1 - beta) * momentum) / beta
