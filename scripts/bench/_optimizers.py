"""The optimizers of bench_optimizers.py: how each is made, how a step of it is written, and which
of its tensors are positions, to be moved by hand when its parameters are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

Parameters = Sequence[Tensor]
Held = Iterable[tuple[Tensor, Tensor]]  # parameters, and positions of theirs
Style = Literal["plain", "closure", "sharpness"]


@dataclass(frozen=True)
class Kind:
    """``make`` gives one optimizer or several over these parameters. ``style``: how a step is
    written. ``positions``: of such an optimizer, by the make's own source; None: it has none.
    """

    make: Callable[[Parameters], Any]
    style: Style = "plain"
    positions: Callable[[Any], Held] | None = None
    package: str = "torch"


class Masters(Optimizer):
    """Mixed precision as Apex O2 and Megatron write it: the optimizer that ``make`` gives steps
    copies in float32, which the parameters are then made of.
    """

    def __init__(self, params: Any, make: Callable[[Parameters], Any]) -> None:
        super().__init__(params, {})
        self.make = make
        self.narrow: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.masters = [p.detach().float().requires_grad_() for p in self.narrow]
        made = make(self.masters)
        self.inners: list[Any] = made if isinstance(made, list) else [made]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """From the parameters to the copies."""
        for narrow, master in zip(self.narrow, self.masters, strict=True):
            master.grad = None if narrow.grad is None else narrow.grad.float()

    @torch.no_grad()
    def give_values(self) -> None:
        """From the copies to the parameters."""
        for narrow, master in zip(self.narrow, self.masters, strict=True):
            narrow.copy_(master)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.take_gradients()
        if closure is None:
            for inner in self.inners:
                inner.step()
        else:

            def evaluated() -> Any:
                self.give_values()
                with torch.enable_grad():
                    loss = closure()
                self.take_gradients()
                return loss

            (inner,) = self.inners
            inner.step(evaluated)
        self.give_values()


def move_by_hand(kind: Kind, optimizer: Any, moved: Mapping[Tensor, Tensor]) -> None:
    """What an adopted anchor asks of this optimizer; ``moved``: by how much each parameter was."""
    if isinstance(optimizer, torch.optim.LBFGS):
        parameters = optimizer.param_groups[0]["params"]
        state = optimizer.state[parameters[0]]
        if "d" in state:
            jump = torch.cat([moved[p].reshape(-1) for p in parameters])
            if not state["t"]:
                state["d"].zero_()
                state["t"] = 1.0
            state["d"].add_(jump / state["t"])
    elif kind.positions is not None:
        for parameter, position in kind.positions(optimizer):
            position.add_(moved[parameter].view_as(position))


def _state(*keys: str, of: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    """Positions under these keys of the state that the optimizer keeps of each parameter."""

    def found(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter, state in of(optimizer).state.items():
            for key in keys:
                if key in state and state[key].numel() == parameter.numel():
                    yield parameter, state[key]  # Prodigy has 0 for where a zero began

    return found


def _lazily(package: str, name: str, *inner: Any, **settings: Any) -> Callable[[Parameters], Any]:
    """``name`` of a package that may be missing; ``inner``: what it wraps, made over the
    parameters.
    """

    def make(parameters: Parameters) -> Any:
        cls = getattr(_module(package), name)
        first = [each(parameters) for each in inner] or [list(parameters)]
        optimizer = cls(*first, **settings)
        if callable(train := getattr(optimizer, "train", None)):  # schedule-free ones ask for it
            train()
        return optimizer

    return make


def _trac(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for key, value in optimizer.optimizer.state["trac"].items():
        if isinstance(key, Tensor):
            yield key, value


def _module(name: str) -> ModuleType:
    """Timm's optimizers alone: the whole of timm wants torchvision."""
    package, _, rest = name.partition(".")
    if package != "timm" or name in sys.modules:
        return importlib.import_module(name)
    if (found := importlib.util.find_spec("timm")) is None:
        raise ModuleNotFoundError("No module named 'timm'")
    (folder,) = found.submodule_search_locations or [""]
    path = f"{folder}/{rest.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torch(name: str, **settings: Any) -> Callable[[Parameters], Any]:
    return lambda parameters: getattr(torch.optim, name)(list(parameters), **settings)


def _muon(parameters: Parameters) -> list[Any]:
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=3e-3)]


def _sharpness(parameters: Parameters) -> Any:
    made = _module("pytorch_optimizer").SAM(
        list(parameters), torch.optim.SGD, lr=0.02, momentum=0.9
    )
    return made


def _heavy_muon(parameters: Parameters) -> Any:
    return _module("heavyball").Muon(list(parameters), lr=2e-2, compile_step=False)


def _heavy_split(parameters: Parameters) -> Any:
    heavy = _module("heavyball")
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    plain = {"compile_step": False}
    return heavy.SplitOpt(
        [
            {"params": matrices, "optimizer": heavy.Muon, "lr": 2e-2, **plain},
            {"params": others, "optimizer": heavy.AdamW, "lr": 3e-3, **plain},
        ]
    )


ADAMW = _torch("AdamW", lr=3e-3)
SGD = _torch("SGD", lr=0.02, momentum=0.9)
PO = "pytorch_optimizer"

KINDS: dict[str, Kind] = {
    "SGD momentum": Kind(SGD),
    "SGD nesterov": Kind(_torch("SGD", lr=0.02, momentum=0.9, nesterov=True)),
    "Adam": Kind(_torch("Adam", lr=3e-3)),
    "AdamW fused": Kind(_torch("AdamW", lr=3e-3, fused=True)),
    "AdamW foreach": Kind(_torch("AdamW", lr=3e-3, foreach=True)),
    "AdamW amsgrad": Kind(_torch("AdamW", lr=3e-3, amsgrad=True)),
    "NAdam": Kind(_torch("NAdam", lr=3e-3)),
    "RAdam": Kind(_torch("RAdam", lr=3e-3)),
    "Adamax": Kind(_torch("Adamax", lr=3e-3)),
    "Adagrad": Kind(_torch("Adagrad", lr=2e-2)),
    "Adadelta": Kind(_torch("Adadelta", lr=1.0)),
    "Adafactor": Kind(_torch("Adafactor", lr=1e-2)),
    "RMSprop": Kind(_torch("RMSprop", lr=1e-3)),
    "Rprop": Kind(_torch("Rprop", lr=1e-4)),
    "ASGD": Kind(_torch("ASGD", lr=0.05)),
    "LBFGS": Kind(
        _torch("LBFGS", lr=0.5, max_iter=3, history_size=5, line_search_fn="strong_wolfe"),
        "closure",
    ),
    "Muon and AdamW": Kind(_muon),
    "Lookahead (pytorch_optimizer)": Kind(
        _lazily(PO, "Lookahead", ADAMW), positions=_state("slow_params"), package=PO
    ),
    "Lookahead (timm)": Kind(
        _lazily("timm.optim.lookahead", "Lookahead", ADAMW),
        positions=_state("lookahead_slow_buff", of=lambda optimizer: optimizer._base_optimizer),
        package="timm",
    ),
    "SAM": Kind(_sharpness, "sharpness", package=PO),
    "Ranger": Kind(_lazily(PO, "Ranger", lr=3e-3), positions=_state("slow_buffer"), package=PO),
    "AdEMAMix": Kind(_lazily(PO, "AdEMAMix", lr=3e-3), package=PO),
    "SOAP": Kind(_lazily(PO, "SOAP", lr=3e-3), package=PO),
    "FTRL": Kind(_lazily(PO, "FTRL", lr=0.1), package=PO),
    "TRAC": Kind(
        _lazily(PO, "TRAC", ADAMW),
        positions=_trac,
        package=PO,
    ),
    "Lion": Kind(_lazily("lion_pytorch", "Lion", lr=5e-4), package="lion_pytorch"),
    "Prodigy": Kind(_lazily("prodigyopt", "Prodigy"), positions=_state("p0"), package="prodigyopt"),
    "DAdaptSGD": Kind(
        _lazily("dadaptation", "DAdaptSGD"), positions=_state("x0", "z"), package="dadaptation"
    ),
    "MADGRAD (timm)": Kind(
        _lazily("timm.optim.madgrad", "MADGRAD", lr=3e-3), positions=_state("x0"), package="timm"
    ),
    "AdamWScheduleFree": Kind(
        _lazily("schedulefree", "AdamWScheduleFree", lr=1e-2),
        positions=_state("z"),
        package="schedulefree",
    ),
    "SGDScheduleFree": Kind(
        _lazily("schedulefree", "SGDScheduleFree", lr=0.2),
        positions=_state("z"),
        package="schedulefree",
    ),
    "ScheduleFreeWrapper": Kind(
        _lazily("schedulefree", "ScheduleFreeWrapper", _torch("SGD", lr=0.2)),
        positions=_state("z"),
        package="schedulefree",
    ),
    # torch's __init__ is never called: hooks have no place
    "Lookahead (torch_optimizer)": Kind(
        _lazily("torch_optimizer", "Lookahead", ADAMW),
        positions=_state("slow_param"),
        package="torch_optimizer",
    ),
    "AccSGD (torch_optimizer)": Kind(
        _lazily("torch_optimizer", "AccSGD", lr=1e-2),
        positions=_state("momentum_buffer"),  # a second point, whatever it is called
        package="torch_optimizer",
    ),
    "A2GradUni (torch_optimizer)": Kind(
        _lazily("torch_optimizer", "A2GradUni", lips=10.0),
        positions=_state("x_k"),
        package="torch_optimizer",
    ),
    "AdamW with Kahan sums (optimi)": Kind(
        _lazily("optimi", "AdamW", lr=3e-3, kahan_sum=True), package="optimi"
    ),
    "Muon (heavyball)": Kind(_heavy_muon, package="heavyball"),
    "SplitOpt (heavyball)": Kind(_heavy_split, package="heavyball"),
    "CAME": Kind(_lazily("came_pytorch", "CAME", lr=3e-3), package="came_pytorch"),
    "AdamW8bit (torchao)": Kind(
        _lazily("torchao.optim", "AdamW8bit", lr=3e-3, block_size=32), package="torchao"
    ),
    "AdamW8bit (bitsandbytes)": Kind(
        _lazily("bitsandbytes.optim", "AdamW8bit", lr=3e-3, min_8bit_size=64),
        package="bitsandbytes",
    ),
}
