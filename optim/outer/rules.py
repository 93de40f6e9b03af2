"""Outer optimizers: what each does to a range of the anchor. A new one is a class and its row in
`RULES`.

Every operation is one separately rounded multiplication, addition, subtraction, division or square
root on a whole range, in one fixed order; nothing fused is used (`add(alpha=)`, `addcmul`,
`addcdiv`, `lerp`), whose rounding differs by CPU and by position in the tensor; nor torch's square
root, whose library rounds some values otherwise than IEEE does: numpy's is the CPU's own. Norms are
sums of squares over whole tensors, as a tree whose shape follows from the length
(`kernels.square_sum`). So neither the instruction set nor the number of threads nor the cuts change
a bit.

g: mean pseudo-gradient, θ: anchor, lr: learning rate, μ: momentum, m and v: state vectors, zero at
first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...collectives.codecs import kernels
from ...collectives.swarm import OuterSettings

EMA = 0.9  # of norms that CO2 compares with
TINY = 1e-12


def as_float32(value: float) -> float:
    """``value`` rounded to float32, so that scalar factors are the same number everywhere."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


class Rule(Protocol):
    """One outer optimizer. ``vectors``: state vectors as long as the anchor, of which the first
    ``momenta`` hold past steps: a governor restarts these. ``whole``: ranges are whole tensors, of
    which each has ``numbers`` more numbers of state."""

    vectors: int
    momenta: int
    whole: bool
    numbers: int

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        """Write ``new`` from ``old`` and ``g``; update ``state``. All float32 (n,), as are the two
        scratch vectors.
        """


class Sgd:
    """``θ ← θ - lr·g``; no state (FedAvg, arXiv 1602.05629; with lr 1 plain averaging)."""

    vectors, momenta, whole, numbers = 0, 0, False, 0

    def __init__(self, settings: OuterSettings) -> None:
        pass

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        if lr == 1.0:  # the same bits, without a pass
            torch.sub(old, g, out=new)
            return
        update = scratch[0]
        torch.mul(g, lr, out=update)
        torch.sub(old, update, out=new)


class Nesterov:
    """``m ← μ·m + g``; ``θ ← θ - lr·(g + μ·m)``, as in PyTorch (DiLoCo, arXiv 2311.08105)."""

    vectors, momenta, whole, numbers = 1, 1, False, 0

    def __init__(self, settings: OuterSettings) -> None:
        self._mu = as_float32(settings.momentum)

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        momentum, update = state[0], scratch[0]
        momentum.mul_(self._mu)
        momentum.add_(g)
        torch.mul(momentum, self._mu, out=update)
        torch.add(g, update, out=update)
        update.mul_(lr)
        torch.sub(old, update, out=new)


class Momentum(Nesterov):
    """``m ← μ·m + g``; ``θ ← θ - lr·m`` (FedAvgM, arXiv 1909.06335). Not in a manifest yet."""

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        momentum, update = state[0], scratch[0]
        momentum.mul_(self._mu)
        momentum.add_(g)
        torch.mul(momentum, lr, out=update)
        torch.sub(old, update, out=new)


class Adam:
    """``m ← μ·m + (1-μ)·g``; ``v ← β·v + (1-β)·g²``; ``θ ← θ - lr·m / (√v + ε)``, without bias
    correction (FedAdam, arXiv 2003.00295).
    """

    vectors, momenta, whole, numbers = 2, 1, False, 0

    def __init__(self, settings: OuterSettings) -> None:
        self._mu, self._one_mu = as_float32(settings.momentum), as_float32(1 - settings.momentum)
        self._beta, self._one_beta = as_float32(settings.beta2), as_float32(1 - settings.beta2)
        self._epsilon = as_float32(settings.epsilon)

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        (m, v), (a, b) = state, scratch
        m.mul_(self._mu)
        torch.mul(g, self._one_mu, out=a)
        m.add_(a)
        torch.mul(g, g, out=a)
        self._square(v, a, b)
        _divided(m, v, self._epsilon, lr, a, b)
        torch.sub(old, b, out=new)

    def _square(self, v: Tensor, square: Tensor, scratch: Tensor) -> None:
        v.mul_(self._beta)
        square.mul_(self._one_beta)
        v.add_(square)


class Yogi(Adam):
    """As Adam, with ``v ← v - (1-β)·g²·sign(v - g²)`` (FedYogi, arXiv 2003.00295)."""

    def _square(self, v: Tensor, square: Tensor, scratch: Tensor) -> None:
        torch.sub(v, square, out=scratch)
        scratch.sign_()
        square.mul_(self._one_beta)
        square.mul_(scratch)
        v.sub_(square)


class Adagrad:
    """``v ← v + g²``; ``θ ← θ - lr·g / (√v + ε)`` (FedAdagrad with β₁ = 0, arXiv 2003.00295)."""

    vectors, momenta, whole, numbers = 1, 0, False, 0

    def __init__(self, settings: OuterSettings) -> None:
        self._epsilon = as_float32(settings.epsilon)

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        v, (a, b) = state[0], scratch
        torch.mul(g, g, out=a)
        v.add_(a)
        _divided(g, v, self._epsilon, lr, a, b)
        torch.sub(old, b, out=new)


def _divided(
    above: Tensor, square: Tensor, epsilon: float, lr: float, low: Tensor, out: Tensor
) -> None:
    """out = lr · above / (√square + ε)."""
    np.sqrt(square.numpy(), out=low.numpy())
    low.add_(epsilon)
    torch.mul(above, lr, out=out)
    out.div_(low)


class Co2:
    """``m ← μ·m + g/Λ``; m is clipped; ``θ ← θ - lr·m`` (CO2, arXiv 2401.16265), for contributions
    that are a round late.

    A tensor at a time. Λ = 1 + gap / (mean gap so far), the gap being how far the last step moved
    the anchor away from what contributions were made on; ‖m‖ is clipped to ``clip`` times its mean
    so far. Both means are exponential, and the first step sets them. (The public implementation has
    a constant Λ and a clip that drops its result, so published values cannot be taken over.)
    """

    vectors, momenta, whole = 1, 1, True
    numbers = 3  # last gap, mean gap, mean ‖m‖

    def __init__(self, settings: OuterSettings) -> None:
        self._mu, self._clip = as_float32(settings.momentum), settings.clip

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        """``state`` ends with this tensor's three numbers."""
        (momentum, numbers), update = state, scratch[0]
        gap, mean_gap, mean_norm = numbers.tolist()
        momentum.mul_(self._mu)
        torch.mul(g, as_float32(1 / (1 + gap / (mean_gap + TINY))), out=update)
        momentum.add_(update)
        size = norm(momentum)
        if mean_norm and size > self._clip * mean_norm:
            momentum.mul_(as_float32(self._clip * mean_norm / size))
            size = self._clip * mean_norm
        torch.mul(momentum, lr, out=update)
        torch.sub(old, update, out=new)
        gap = norm(update)
        numbers.copy_(
            torch.tensor(
                [gap, _mean(mean_gap, gap), _mean(mean_norm, size)],
                dtype=torch.float32,
                device="cpu",
            )
        )


class AdamW:
    """torch's AdamW, bias correction and all (arXiv 1711.05101), for runs whose members contribute
    gradients. A tensor at a time.
    """

    vectors, momenta, whole = 2, 1, True
    numbers = 2  # 1 - μᵗ, 1 - βᵗ

    def __init__(self, settings: OuterSettings) -> None:
        self._mu, self._one_mu = as_float32(settings.momentum), as_float32(1 - settings.momentum)
        self._beta, self._one_beta = as_float32(settings.beta2), as_float32(1 - settings.beta2)
        self._epsilon, self._decay = as_float32(settings.epsilon), settings.weight_decay

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        """``state`` ends with this tensor's two numbers."""
        (m, v, numbers), (a, b) = state, scratch
        first, second = numbers.tolist()
        first, second = self._mu * first + self._one_mu, self._beta * second + self._one_beta
        numbers.copy_(torch.tensor([first, second], dtype=torch.float32, device="cpu"))
        m.mul_(self._mu)
        torch.mul(g, self._one_mu, out=a)
        m.add_(a)
        torch.mul(g, g, out=a)
        v.mul_(self._beta)
        a.mul_(self._one_beta)
        v.add_(a)
        torch.mul(v, as_float32(1 / second), out=a)
        np.sqrt(a.numpy(), out=b.numpy())
        b.add_(self._epsilon)
        torch.mul(m, as_float32(lr / first), out=a)
        a.div_(b)
        torch.mul(old, as_float32(1 - lr * self._decay), out=new)
        new.sub_(a)


class DelayedNesterov:
    """Between every N-th step ``θ ← θ - lr·(c·μ·m + g/N)``; at it ``m ← μ·m + B/N``, B the sum of
    the N last g, and ``θ ← θ - lr·((1 - cN + c)·μ·m + g/N)`` (arXiv 2401.09135), for rounds of
    single arrivals: momentum on each would be momentum on what is stale.

    N is ``every``, cN is ``spread``: 0, the published value, takes the momentum at every N-th step
    only, 1 a part of it at each. N steps on g are one Nesterov step on their mean.
    """

    vectors, momenta, whole = 2, 2, True
    numbers = 1  # steps since the last of momentum

    def __init__(self, settings: OuterSettings) -> None:
        self._every, part = settings.every, settings.spread / settings.every
        self._mu, self._share = as_float32(settings.momentum), as_float32(1 / settings.every)
        self._between = as_float32(part * settings.momentum)
        self._at_last = as_float32((1 - settings.spread + part) * settings.momentum)

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        """``state`` ends with this tensor's number."""
        (momentum, buffer, numbers), (update, share) = state, scratch
        count = int(numbers.item()) + 1
        torch.mul(g, self._share, out=share)
        buffer.add_(share)
        if count >= self._every:
            momentum.mul_(self._mu)
            momentum.add_(buffer)
            buffer.zero_()
            count = 0
        torch.mul(momentum, self._at_last if count == 0 else self._between, out=update)
        torch.add(share, update, out=update)
        update.mul_(lr)
        torch.sub(old, update, out=new)
        numbers.fill_(count)


class Heloco:
    """HeLoCo (arXiv 2606.00271): each tensor's g is turned to agree with its momentum first, then
    ``m ← μ·m + (1-μ)·ĝ``; ``θ ← θ - lr·(ĝ + μ·m)``.

    With c the cosine of g and m: from ``agreement`` on, ĝ = g; below 0 a part of what goes against
    m is taken out, ``min(-c·f, 1)`` of it; between, g is turned towards m, by ``(1-c)·f/2`` of the
    way, and stays as long as it is. f = ‖g‖ / (‖g‖ + ‖m‖). (The paper's strengths 1, 1 and 1/2; it
    leaves them to be tuned.) A tensor without momentum, or without g, is left as it is.
    """

    vectors, momenta, whole, numbers = 1, 1, True, 0

    def __init__(self, settings: OuterSettings) -> None:
        self._mu, self._one_mu = as_float32(settings.momentum), as_float32(1 - settings.momentum)
        self._agreement = settings.agreement

    def step(
        self,
        old: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        new: Tensor,
        lr: float,
        scratch: Sequence[Tensor],
    ) -> None:
        """``state`` ends with no numbers."""
        momentum, (corrected, update) = state[0], scratch
        self._correct(g, momentum, corrected, update)
        momentum.mul_(self._mu)
        torch.mul(corrected, self._one_mu, out=update)
        momentum.add_(update)
        torch.mul(momentum, self._mu, out=update)
        update.add_(corrected)
        update.mul_(lr)
        torch.sub(old, update, out=new)

    def _correct(self, g: Tensor, m: Tensor, out: Tensor, scratch: Tensor) -> None:
        out.copy_(g)
        long, usual = norm(g), norm(m)
        if not (long > TINY and usual > TINY and math.isfinite(long * usual)):
            return
        cosine = min(max(dot(g, m) / (long * usual), -1.0), 1.0)
        if cosine >= self._agreement:
            return
        trust = long / (long + usual)
        if cosine < 0:
            torch.mul(m, as_float32(min(-cosine * trust, 1.0) * cosine * long / usual), out=scratch)
            out.sub_(scratch)
            return
        turn = (1 - cosine) * trust / 2
        out.mul_(as_float32(1 - turn))
        torch.mul(m, as_float32(turn * long / usual), out=scratch)
        out.add_(scratch)
        if (length := norm(out)) > TINY:
            out.mul_(as_float32(long / length))


def _mean(before: float, value: float) -> float:
    return EMA * before + (1 - EMA) * value if before else value


def norm(x: Tensor) -> float:
    """The Euclidean norm of a float32 vector, with the same bits on every machine."""
    scratch = torch.empty(
        1 << max(0, x.numel() - 1).bit_length(), dtype=torch.float64, device="cpu"
    )
    return math.sqrt(kernels.square_sum(x, scratch))


def dot(x: Tensor, y: Tensor) -> float:
    """The inner product of two float32 vectors, with the same bits on every machine."""
    scratch = torch.zeros(
        1 << max(0, x.numel() - 1).bit_length(), dtype=torch.float64, device="cpu"
    )
    products = scratch[: x.numel()]
    products.copy_(x)
    products.mul_(y.double())  # exact: 24 bits by 24
    return kernels.tree_sum(scratch)


RULES: dict[
    str,
    type[Sgd | Nesterov | Adam | Yogi | Adagrad | Co2 | AdamW | DelayedNesterov | Heloco],
] = {
    "sgd": Sgd,
    "nesterov": Nesterov,
    "momentum": Momentum,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "co2": Co2,
    "adamw": AdamW,
    "delayed_nesterov": DelayedNesterov,
    "heloco": Heloco,
}
"""By `OuterSettings.kind`. A name stands for one rule for ever: a changed one gets a new name."""
