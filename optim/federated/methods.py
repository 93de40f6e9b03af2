"""Federated methods by name: how each fills the frame. What is sent decides the bytes of a round,
what is kept decides what must survive a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.errors import ConfigError
from ...collectives.outer_rules import OuterSettings


@dataclass(frozen=True, slots=True)
class Method:
    """A federated method, as a row of `METHODS`: what it sends, keeps and corrects.

    >>> METHODS["scaffold"].up, METHODS["scaffold"].kept    # model and control variate; c_i
    (2, 1)

    ``down``, ``up``: vectors as long as the model that a member gets and sends in a
    round. ``kept``: vectors that a member keeps for itself (SCAFFOLD's c_i). ``momentum``,
    ``control``: which corrections its inner steps have (`inner`). ``proximal``: FedProx' mu
    applies. ``reduced``: two gradients a step, the second at the anchor before; ``ahead``: at a
    step further down. ``normalised``: what a site gives is divided by its inner steps, and the mean
    is made as long as the mean number of them."""

    name: str
    source: str
    outer: str = "sgd"
    down: int = 1
    up: int = 1
    kept: int = 0
    proximal: bool = False
    control: bool = False
    momentum: bool = False
    reduced: bool = False
    ahead: bool = False
    normalised: bool = False

    @property
    def plain(self) -> bool:
        """Whether its inner steps are anybody's, and nothing is kept: it is an outer step only."""
        return not (self.proximal or self.control or self.momentum or self.ahead)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("fedavg", "arXiv 1602.05629"),
        Method("fedavgm", "arXiv 1909.06335: momentum of the server", outer="momentum"),
        Method("fedprox", "arXiv 1812.06127", proximal=True),
        Method("fednova", "arXiv 2007.07481: of plain steps", normalised=True),
        Method("fedadam", "arXiv 2003.00295", outer="adam"),
        Method("fedyogi", "arXiv 2003.00295", outer="yogi"),
        Method("fedadagrad", "arXiv 2003.00295", outer="adagrad"),
        Method("scaffold", "arXiv 1910.06378, option II", down=2, up=2, kept=1, control=True),
        Method("fedavg_m", "arXiv 2306.16504: momentum in inner steps", down=2, momentum=True),
        Method("scaffold_m", "arXiv 2306.16504", down=3, up=2, kept=1, control=True, momentum=True),
        Method(
            "fedavg_m_vr", "arXiv 2306.16504: variance reduced", down=3, momentum=True, reduced=True
        ),
        Method(
            "scaffold_m_vr",
            "arXiv 2306.16504: variance reduced",
            down=4,
            up=2,
            kept=1,
            control=True,
            momentum=True,
            reduced=True,
        ),
        Method(
            "per_fedavg",
            "arXiv 2002.07948, first order: an anchor for being fine-tuned",
            ahead=True,
        ),
    )
}
"""A name stands for one method for ever."""


ARRIVING = ("fedasync", "fedbuff", "fedfix", "fedcompass")
"""Schemes of arrivals, whose members make FedAvg's steps and whose outer step is FedAvg's
(`arrivals`, `compass`).
"""


def method_of_steps(name: str) -> Method:
    """What the members of a method, or of a scheme of arrivals, do in a turn. Raises KeyError for
    neither.
    """
    return METHODS["fedavg" if name in ARRIVING else name]


SUMS = ("atoll.controls", "atoll.clients")
"""What travels beside the model in runs with control variates: the sum of all c_i, and how many
members have one in it.
"""


def server_settings(
    name: str,
    *,
    lr: float = 1.0,
    momentum: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-3,
    bias_correction: bool = False,
) -> OuterSettings:
    """The outer step of a method's server. lr, momentum, beta2, epsilon (the papers' tau): only
    those that its rule reads count.

    ``bias_correction`` is fedadam's, as torch's Adam has it; the paper has none. Raises ConfigError
    for a name or a combination that is none.
    """
    if name not in METHODS and name not in ARRIVING:
        raise ConfigError(
            f"no federated method {name!r}",
            key="$.train.method",
            hint=f"one of: {', '.join((*METHODS, *ARRIVING))}",
        )
    kind = method_of_steps(name).outer
    if bias_correction:
        if kind != "adam":
            raise ConfigError(
                f"{name} has no bias correction",
                key="$.train.outer.bias_correction",
                why="fedadam has",
            )
        kind = "adamw"  # without weight decay it is Adam
    return OuterSettings(
        kind=kind,  # type: ignore[arg-type]
        lr=lr,
        momentum=momentum,
        beta2=beta2,
        epsilon=epsilon,
    )
