"""Optimizers that remember where the parameters were, and some that do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lookahead(Optimizer):
    """Slow weights (Zhang et al. 2019), as pytorch_optimizer has it: torch's ``__init__`` is not
    called, there is a place for hooks, and nothing runs them.
    """

    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        self.defaults = {"k": k, "alpha": alpha, **optimizer.defaults}
        for group in self.param_groups:
            group["counter"] = 0
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss


class BareLookahead(Optimizer):
    """As torch_optimizer has it: torch's ``__init__`` is not called, and no place made for hooks. The
    slow weights are taken at the first step, and pull at the first of every ``k``.
    """

    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0
        self.defaults = {"k": k, "alpha": alpha, **optimizer.defaults}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow_param", p.detach().clone())
                    p.mul_(self.alpha).add_(slow, alpha=1.0 - self.alpha)
                    slow.copy_(p)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss


class OtherLookahead(Optimizer):
    """As timm has it: its arguments under longer names, its state in the inner optimizer's."""

    def __init__(self, base_optimizer: Optimizer, alpha: float = 0.5, k: int = 6) -> None:
        self._base_optimizer = base_optimizer
        self.param_groups, self.defaults = base_optimizer.param_groups, base_optimizer.defaults
        self.state = defaultdict(dict)
        mine = {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}
        self.defaults.update(mine)
        for group in self.param_groups:
            group.update(mine)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for p in group["params"]:
                    state = self._base_optimizer.state[p]
                    if "lookahead_slow" not in state:
                        state["lookahead_slow"] = p.detach().clone()
                    slow = state["lookahead_slow"]
                    slow.add_(p - slow, alpha=group["lookahead_alpha"])
                    p.copy_(slow)
        return loss


class ScheduleFreeSGD(Optimizer):
    """Defazio et al. 2024: parameters are y, ``z`` is kept, the average x follows from both."""

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "k": 0,
            "weight_sum": 0.0,
            "lr_max": 0.0,
            "train_mode": False,
        }
        super().__init__(params, defaults)

    def train(self) -> None:
        """y into the parameters."""
        for group in self.param_groups:
            group["train_mode"] = True

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            warmth = min(1.0, (group["k"] + 1) / max(1, group["warmup_steps"]))
            lr = group["lr"] * warmth
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.detach().clone()
                z, grad = self.state[p]["z"], self.direction(group, p)
                p.lerp_(z, share)
                p.add_(grad, alpha=lr * (group["momentum"] * (1 - share) - 1))
                z.sub_(grad, alpha=lr)
            group["k"] += 1


class ScheduleFreeAdamW(ScheduleFreeSGD):
    """Its second moment scales the gradient."""

    def direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        assert p.grad is not None
        square = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
        square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        return p.grad / ((square / (1 - 0.999 ** (group["k"] + 1))).sqrt() + 1e-8)


class MADGRAD(Optimizer):
    """Defazio and Jelassi 2021: parameters are computed from where they began and sums."""

    def __init__(
        self, params: Any, lr: float = 1e-2, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            lamb = group["lr"] * (self.k + 1) ** 0.5
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["grad_sum_sq"], state["s"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["x0"] = p.detach().clone()
                state["grad_sum_sq"].addcmul_(p.grad, p.grad, value=lamb)
                state["s"].add_(p.grad, alpha=lamb)
                rms = state["grad_sum_sq"].pow(1 / 3).add_(1e-6)
                z = state["x0"].addcdiv(state["s"], rms, value=-1)
                p.lerp_(z, 1 - group["momentum"])
        self.k += 1


class FTRL(Optimizer):
    """McMahan et al. 2013: parameters are computed from sums."""

    def __init__(self, params: Any, alpha: float = 0.1, beta: float = 1.0) -> None:
        super().__init__(params, {"alpha": alpha, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["n"], state["z"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["z"].sub_(p / group["alpha"] * group["beta"])
                new = state["n"] + p.grad.square()
                sigma = (new.sqrt() - state["n"].sqrt()) / group["alpha"]
                state["z"].add_(p.grad - sigma * p)
                state["n"].copy_(new)
                p.copy_(-state["z"] / ((group["beta"] + new.sqrt()) / group["alpha"]))


class MasterInState(Optimizer):
    """Adam on copies in float32, which its first step makes."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                state["exp_avg"].lerp_(p.grad.float(), 0.1)
                state["master"].sub_(group["lr"] * state["exp_avg"].sign())
                p.copy_(state["master"])


class MasterInGroups(Optimizer):
    """An optimizer inside steps copies in float32."""

    def __init__(
        self, params: Any, inner: Callable[..., Optimizer] = torch.optim.AdamW, lr: float = 1e-2
    ) -> None:
        super().__init__(params, {"lr": lr})
        copies = [
            {"params": [p.detach().float().requires_grad_() for p in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = inner(copies, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        pairs = [
            (p, master)
            for group, copies in zip(self.param_groups, self.inner.param_groups, strict=True)
            for p, master in zip(group["params"], copies["params"], strict=True)
        ]
        for p, master in pairs:
            master.grad = p.grad.float()
        self.inner.step()
        for p, master in pairs:
            p.copy_(master)


class MasterInOne(Optimizer):
    """SGD with momentum on one flat tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        everything = [p for group in self.param_groups for p in group["params"]]
        self.flat = torch.cat([p.detach().float().reshape(-1) for p in everything])
        self.momentum = torch.zeros_like(self.flat)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        everything = [p for group in self.param_groups for p in group["params"]]
        gradient = torch.cat([p.grad.float().reshape(-1) for p in everything])
        self.flat.sub_(self.momentum.mul_(0.9).add_(gradient), alpha=self.param_groups[0]["lr"])
        parts = self.flat.split([p.numel() for p in everything])
        for p, part in zip(everything, parts, strict=True):
            p.copy_(part.view(p.shape))


class MastersOf(Optimizer):
    """Copies in float32 that another optimizer steps, whatever that keeps of them; the function
    which makes it is an argument.
    """

    def __init__(self, params: Any, make: Callable[[Any], Any]) -> None:
        super().__init__(params, {})
        self.make = make
        self.narrow = [p for group in self.param_groups for p in group["params"]]
        self.copies = [p.detach().float().clone().requires_grad_() for p in self.narrow]
        self.inner = make(self.copies)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p, copy in zip(self.narrow, self.copies, strict=True):
            copy.grad = p.grad.float()
        self.inner.step()
        for p, copy in zip(self.narrow, self.copies, strict=True):
            p.copy_(copy)


class MasterInClosure(Optimizer):
    """Copies that no attribute shows."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.masters: Callable[[], dict[Tensor, Tensor]]
        copies: dict[Tensor, Tensor] = {
            p: p.detach().float() for group in self.param_groups for p in group["params"]
        }
        self.masters = lambda: copies

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p, master in self.masters().items():
            assert p.grad is not None
            master.sub_(p.grad.float(), alpha=self.param_groups[0]["lr"])
            p.copy_(master)


class Quantised(Tensor):
    """State of eight bits, as libraries keep it: arithmetic on it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.sub, torch.Tensor.add, torch.sub, torch.add):
            raise TypeError("quantised state has no arithmetic")
        return super().__torch_function__(func, types, args, kwargs or {})


class EightBit(Optimizer):
    """Momentum in a subclass of Tensor, of the parameter's shape and, to begin with, its values."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = p.detach().clone().as_subclass(Quantised)
                p.sub_(group["lr"] * p.grad)


class Lion(Optimizer):
    """Chen et al. 2023."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * average.lerp(p.grad, 0.1).sign())
                average.lerp_(p.grad, 0.01)


class Muonlike(Optimizer):
    """Orthogonalised momentum for matrices, plain momentum for the rest."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = momentum.mul_(group["momentum"]).add_(p.grad).clone()
                if p.dim() == 2:
                    update = update.float()
                    update /= update.norm() + 1e-7
                    for _ in range(3):
                        square = update @ update.T
                        update = 1.5 * update - 0.5 * square @ update
                p.sub_(group["lr"] * update.to(p.dtype))


class Flagged(Optimizer):
    """Wants a flag of each group that no argument gives, and a closure."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        assert all("flag" in group for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise LookupError("no closure")
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


class WantsNames(Optimizer):
    """Cannot be built again: its constructor takes what it does not keep, and keeps what may be
    positions.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], lr: float = 1e-2) -> None:
        pairs = list(named)
        super().__init__([p for _, p in pairs], {"lr": lr})
        self.first = {name: p.detach().clone() for name, p in pairs}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


class Warmed:
    """A schedule around an optimizer (Vaswani et al. 2017), as many scripts have it: no optimizer
    of torch's, and its first argument is not called ``params``.
    """

    def __init__(self, width: int, opt: Any, warm: int) -> None:
        self.optimizer, self.scale, self.warm, self.number = opt, width**-0.5, warm, 0

    def step(self) -> None:
        """The next rate, and a step."""
        self.number += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.scale * min(self.number**-0.5, self.number * self.warm**-1.5)
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Of the optimizer inside."""
        self.optimizer.zero_grad()


class Several(Optimizer):
    """Optimizers side by side, given one by one; each steps a part of the parameters."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


class SlowBeside(Several):
    """With slow weights that its constructor makes."""

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__(*optimizers)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


class Sharpness(Optimizer):
    """Foret et al. 2021, as it is copied from script to script: ``step`` is never called, and the
    second half assigns ``p.data``.
    """

    def __init__(self, params: Any, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """To where the loss is higher."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self) -> None:
        """Back, and a step by the gradients from there."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
