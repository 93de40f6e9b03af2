"""DiLoCo as one torch.optim.Optimizer, for people who want one object. `attach` does the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ...collectives.errors import ConfigError
from ...collectives.outcomes import Outcome
from ...collectives.script_swarm import Swarm
from .attachment import Attachment, attach
from .checks import check_alone
from .consent import OnAdopted
from .evaluation import Evaluate

ATTACHMENT = "atoll"  # its key in a state


class SwarmOptimizer(Optimizer):
    """An optimizer that steps an inner one and synchronises with a swarm when a round is over.

    ``param_groups``, ``state`` and ``defaults`` are those of ``inner``: learning-rate schedulers,
    GradScaler and torch.distributed.checkpoint work on either. What belongs to the swarm is in
    `attachment`, which is Stateful by itself: ``state_dict()`` has it beside the inner optimizer's
    state, torch.distributed.checkpoint takes it as an object of its own.
    """

    method: ClassVar[str]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        inner: Optimizer,
        *,
        swarm: Swarm,
        model: nn.Module,
        include: Any = None,
        sync_every: int | None = None,
        round_s: float | None = None,
        on_round: Callable[[Outcome], None] | None = None,
        on_adopted: OnAdopted | None = None,
        strict: bool = False,
        evaluate: Evaluate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``params`` are the parameters of ``inner``, in the same groups or as one list; the rest
        is as for `attach`.

        Raises ConfigError when they differ, when the run's method is another one, or for what
        `attach` refuses.
        """
        check_alone(model, type(self).__name__)
        self._inner: Optimizer | None = None
        self._own: dict[str, Any] = {}
        super().__init__(params, {})  # type: ignore[arg-type]
        given = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        theirs = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        if given != theirs:
            raise ConfigError(
                (
                    f"{len(given ^ theirs)} parameters are in one of params and "
                    "the inner optimizer only"
                ),
                key="params",
                hint=(
                    f"{type(self).__name__}(model.parameters(), inner=AdamW(model.parameters()), "
                    "swarm=swarm, model=model)"
                ),
            )
        if (
            type(inner).state_dict is not Optimizer.state_dict
            or type(inner).load_state_dict is not Optimizer.load_state_dict
        ):
            raise ConfigError(
                f"{type(inner).__name__} keeps its state in its own way",
                key="inner",
                hint="Use attach(model, inner, swarm).",
            )
        if swarm.settings.method != self.method:
            raise ConfigError(
                (
                    f"the run's method is {swarm.settings.method!r}, "
                    f"{type(self).__name__} is {self.method!r}"
                ),
                key="$.train.method",
                why="The run's signed manifest sets it for all members alike.",
                hint="Use attach(model, inner, swarm), which follows the manifest.",
            )
        self._inner = inner
        self._own.clear()
        self._attachment = attach(
            model,
            inner,
            swarm,
            include=include,
            sync_every=sync_every,
            round_s=round_s,
            on_round=on_round,
            on_adopted=on_adopted,
            strict=strict,
            evaluate=evaluate,
            clock=clock,
        )

    @property
    def inner(self) -> Optimizer:
        """The optimizer of the inner steps."""
        assert self._inner is not None
        return self._inner

    @property
    def attachment(self) -> Attachment:
        """The membership: stats, done, log, sync, evaluate_anchor, and the state to save beside
        this optimizer's.
        """
        return self._attachment

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One inner step; synchronises when it ends a round. Returns the inner step's result."""
        return self.inner.step() if closure is None else self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "atoll" the attachment's: with the model's, all
        that an exact resume needs. In a job of several ranks all of them call it.
        """
        found: dict[str, Any] = super().state_dict()
        if self._attachment.attached:
            found[ATTACHMENT] = self._attachment.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, as `Attachment.load_state_dict` says. One without "atoll", such
        as that of the inner optimizer alone, leaves the attachment as it is.
        """
        super().load_state_dict(state_dict)
        if ATTACHMENT in state_dict:
            self._attachment.load_state_dict(state_dict[ATTACHMENT])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused with ConfigError: the run's flat vector is fixed."""
        if self._inner is not None:
            raise ConfigError(
                "a parameter group cannot be added after the start",
                key="params",
                why="All members of a run have the same flat vector.",
                hint="Give all parameters to the inner optimizer first.",
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused with ConfigError, and with it copy.deepcopy and pickle: a copy would be a second
        member over one connection.
        """
        raise ConfigError(
            f"a {type(self).__name__} cannot be copied or pickled",
            key="optimizer",
            why="It holds this script's membership in the run.",
            hint=(
                "Save its state_dict(). A copy of the inner optimizer: "
                "copy.deepcopy(optimizer.inner)"
            ),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner.__setstate__(state)

    # torch writes these while it makes an Optimizer; afterwards they are the inner optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self._get("param_groups")

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: list[dict[str, Any]]
    ) -> None:
        self._set("param_groups", value)

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self._get("state")

    @state.setter
    def state(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Any
    ) -> None:
        self._set("state", value)

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self._get("defaults")

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._set("defaults", value)

    def _get(self, name: str) -> Any:
        return self._own[name] if self._inner is None else getattr(self._inner, name)

    def _set(self, name: str, value: Any) -> None:
        if self._inner is None:
            self._own[name] = value
        else:
            setattr(self._inner, name, value)


class DiLoCo(SwarmOptimizer):
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105): H inner steps, then Nesterov momentum on
    the mean of anchor - parameters.

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        opt = DiLoCo(model.parameters(), inner, swarm=swarm, model=model)
        for x, y in loader:
            loss = criterion(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()                          # every H-th one is a round, too

    It does what `attach` does, as one torch.optim.Optimizer. H and the outer values are the run's
    (its manifest); the outer step runs in the node, on the anchor. ``state_dict`` holds the inner
    optimizer's state and the attachment's, so a run resumes exactly.
    """

    method = "diloco"
