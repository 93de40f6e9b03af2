"""What hostile clients send, for `atoll simulate --attack`, tests and benchmarks: pure functions of
what the honest ones have, float32 (h, d), not modified -> what each hostile one sends, float32
(d,). Nothing here is used by a node.

An attacker is omniscient: it sees what all honest members of a round have. All hostile members send
the same, unless something else is said. `Delayed` and `flipped_labels` are no functions of one
round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ....collectives.errors import ConfigError

Rule = Callable[[Tensor], Tensor]
"""rows, float32 (n, d) -> the result, float32 (d,)."""
REACH = 10.0  # the largest factor that an optimised attack looks at


def sign_flip(honest: Tensor, scale: float = 1.0) -> Tensor:
    """-scale times the mean. BTARD (arXiv 2106.11257) has 1000."""
    return (-scale * _mean(honest)).float()


def ipm(honest: Tensor, epsilon: float = 0.1) -> Tensor:
    """Inner product manipulation: -epsilon times the mean, so that the result points the other way,
    or nowhere. "Fall of empires" is this with a large epsilon. Xie et al. 2019, arXiv 1903.03936.
    """
    return sign_flip(honest, epsilon)


def alie(honest: Tensor, z: float = 1.5) -> Tensor:
    """A little is enough: the mean less z standard deviations (over h - 1) of each coordinate.
    Baruch et al. 2019, arXiv 1902.06156.
    """
    wide = honest.double()
    deviation = wide.std(0, correction=1) if len(honest) > 1 else torch.zeros_like(wide[0])
    return (_mean(honest) - z * deviation).float()


def mimic(honest: Tensor, row: int = 0) -> Tensor:
    """A copy of one honest member, who counts too much (Karimireddy 2022, arXiv 2006.09365)."""
    return honest[row].clone()


def random_direction(honest: Tensor, seed: int = 0, scale: float = 1000.0) -> Tensor:
    """A random direction that the attackers agreed on, ``scale`` times as long as the mean."""
    direction = torch.randn(
        honest.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (direction / direction.norm() * scale * _mean(honest).norm()).float()


def honest_radius(honest: Tensor) -> float:
    """The honest members' root mean square distance from their mean: the length that `drift` and
    `reverse` count in.
    """
    return float((honest.double() - _mean(honest)).norm() / len(honest) ** 0.5)


def drift(honest: Tensor, radii: float = 0.9, seed: int = 0) -> Tensor:
    """The mean and, in every round, the same random direction, ``radii`` of `honest_radius` long:
    no round shows it, and it adds up over rounds.
    """
    direction = torch.randn(
        honest.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (_mean(honest) + radii * honest_radius(honest) * direction / direction.norm()).float()


def reverse(honest: Tensor, radii: float = 0.9) -> Tensor:
    """The mean less ``radii`` of `honest_radius` along itself: where the honest differ more than
    they agree, that is backwards.
    """
    mean = _mean(honest)
    return (mean - radii * honest_radius(honest) * mean / max(float(mean.norm()), 1e-30)).float()


def gaussian(honest: Tensor, seed: int = 0, sigma: float = 200.0) -> Tensor:
    return sigma * torch.randn(honest.shape[1], generator=torch.Generator().manual_seed(seed))


def huge(honest: Tensor) -> Tensor:
    """The largest number that float32 has, everywhere: finite, and its squares are not."""
    return torch.full_like(honest[0], torch.finfo(torch.float32).max)


def no_number(honest: Tensor, value: float = float("nan")) -> Tensor:
    """NaN, or infinity, in one place; an honest member for the rest."""
    found = honest[0].clone()
    found[found.numel() // 2] = value
    return found


def optimised_alie(honest: Tensor, f: int, rule: Rule, evaluations: int = 20) -> Tensor:
    """`alie` with the z, of either sign, that moves ``rule`` farthest from the honest mean."""
    return _worst(honest, f, rule, lambda z: alie(honest, z), evaluations)


def optimised_ipm(honest: Tensor, f: int, rule: Rule, evaluations: int = 20) -> Tensor:
    """`ipm` with the epsilon, of both signs, that does most harm."""
    return _worst(honest, f, rule, lambda epsilon: ipm(honest, epsilon), evaluations)


def _worst(
    honest: Tensor, f: int, rule: Rule, attack: Callable[[float], Tensor], evaluations: int
) -> Tensor:
    """A grid over half of the evaluations, then a search around the best of it: the harm need not
    have one peak.
    """
    mean = _mean(honest)

    def harm(factor: float) -> float:
        rows = torch.cat([honest, attack(factor).expand(f, -1)])
        return float((rule(rows).double() - mean).norm())

    first = max(2, evaluations // 2)
    width = 2 * REACH / (first - 1)
    tried = {factor: harm(factor) for factor in (-REACH + width * i for i in range(first))}
    while len(tried) < evaluations:
        best, width = max(tried, key=lambda factor: tried[factor]), width / 2
        for factor in (best - width, best + width):
            tried.setdefault(factor, harm(factor))
    return attack(max(tried, key=lambda factor: tried[factor]))


def _mean(honest: Tensor) -> Tensor:
    return honest.double().mean(0)


ATTACKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sign_flip": sign_flip,
    "sign_flip_1000": lambda honest: sign_flip(honest, 1000.0),
    "ipm_0.1": ipm,
    "foe_10": lambda honest: ipm(honest, 10.0),
    "alie_1.5": alie,
    "mimic": mimic,
    "random_direction": random_direction,
    "drift_0.7": lambda honest: drift(honest, 0.7),
    "drift_0.9": drift,
    "reverse_0.7": lambda honest: reverse(honest, 0.7),
    "reverse_0.9": reverse,
    "gaussian": gaussian,
    "huge": huge,
    "nan": no_number,
    "inf": lambda honest: no_number(honest, float("inf")),
}
"""By the names of tables: attack(honest) -> what each hostile member sends."""


class Delayed:
    """Sends what it had ``steps`` rounds ago, and until then the first of it."""

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"a delay of {steps} rounds", key="steps")
        self._kept: deque[Tensor] = deque(maxlen=steps + 1)

    def send(self, own: Tensor) -> Tensor:
        """What is sent in place of an honest member's ``own``, of which a copy is kept."""
        self._kept.append(own.clone())
        return self._kept[0]


def flipped_labels(labels: Tensor, classes: int) -> Tensor:
    """Every label y becomes classes - 1 - y: an honest procedure on poisoned data. Raises
    ConfigError for labels of other classes.
    """
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ConfigError(
            f"labels from {int(labels.min())} to {int(labels.max())} of {classes} classes",
            key="classes",
        )
    return classes - 1 - labels
