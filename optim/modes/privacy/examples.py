"""Differential privacy of single examples in a site's own inner steps: DP-SGD (Abadi et al. 2016,
arXiv 1607.00133).

Beside `[privacy]`, which protects all data of a site together against everybody else; this protects
one example against whoever sees what the site trained, the others' noise or not. Each example's
gradient is clipped, and their sum gets noise: discrete Gaussian on a grid of clip / 2^20, so that
nothing leaks through low bits. **A batch is a Poisson sample**: each example by itself with the
same probability; fixed batches of a shuffled loader are not, and spend more than is accounted here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ....collectives.errors import ConfigError
from ....security.privacy import Accountant, NoisePlan, add_noise, clip
from .example_ledger import ExampleLedger
from .ghost import can_clip, clipped_sum

GRID = 1 << 20  # steps in the clipping bound
Example = TypeVar("Example")


class PrivateExamples:
    """One site's examples, numbered from 0 to ``count`` - 1, and what steps on them have spent.

        private = PrivateExamples(
            len(data), rate=0.01, noise=1.1, bound=1.0, delta=1e-6, stop_at_epsilon=8.0,
            kept=example_ledger("patients"),
        )
        while private.allows:
            batch = [data[i] for i in private.batch()]
            private.step(model, batch, lambda example: loss(model, example))
            optimizer.step()

    ``rate``: an example's probability of being in a batch. ``noise``: deviation in units of
    ``bound``, the largest norm of an example's gradient. ``kept``: the file in which what is spent
    is counted, before a gradient is used, over all runs and restarts; of one data set, and one
    process at a time (`atoll.node.example_ledger`). None: the count of steps, `accountant.steps`,
    is the caller's to keep. ``rng``: None, outside tests: `random.SystemRandom()`. Raises
    ConfigError for values that promise nothing, StateError and StorageError for ``kept``.

    What this protects is an example, and what `[privacy]` does a site: two figures, which are never
    added.
    """

    def __init__(
        self,
        count: int,
        *,
        rate: float,
        noise: float,
        bound: float,
        delta: float,
        stop_at_epsilon: float = math.inf,
        steps: int = 0,
        kept: Path | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """``steps``: made in earlier lives, beside what ``kept`` says."""
        if count < 1 or not 0 < rate <= 1 or not noise > 0 or not bound > 0:
            raise ConfigError(
                f"private examples: {count} of them, rate {rate}, noise {noise}, bound {bound}",
                why="all are above 0",
            )
        self.count, self.rate, self.noise, self.bound = count, rate, noise, bound
        self.accountant = Accountant(delta, stop_at_epsilon)
        self.accountant.spend(rate, noise, steps)
        self._chance = rng or random.SystemRandom()
        # by parameter what its gradient was made, and how often the parameter was written by then
        self._given: dict[int, tuple[Tensor, int]] = {}
        self._ledger = ExampleLedger(kept, self.accountant) if kept is not None else None

    def close(self) -> None:
        """Let go of the file, and give back what was reserved in it. Idempotent."""
        if self._ledger is not None:
            self._ledger.close()

    @property
    def allows(self) -> bool:
        """Whether one more step stays within ``stop_at_epsilon``."""
        return self.accountant.allows(self.rate, self.noise)

    def _check_limit(self) -> None:
        if not self.allows:
            raise ConfigError(
                f"private examples: epsilon {self.accountant.epsilon:.3g} is spent",
                key="stop_at_epsilon",
            )

    def batch(self) -> list[int]:
        """The examples of a step: a Poisson sample, perhaps empty."""
        return [index for index in range(self.count) if self._chance.random() < self.rate]

    def step(
        self, model: nn.Module, examples: Sequence[Example], loss: Callable[[Example], Tensor]
    ) -> None:
        """Fill ``grad`` of the model's parameters: the noisy sum over ``examples`` by the batch's
        expected size. ``loss``: of one example, a scalar. Where the parameters have not been
        stepped since the last call it is added to that one's: both are paid.

        Raises ConfigError where it would pass the limit, ValueError for a gradient that is not
        finite; then ``grad`` is as it was.
        """
        self._check_limit()
        parameters = _trained(model)
        total = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
        with _no_trace(model):
            for example in examples:
                # Zeros where it does not go.
                found = torch.autograd.grad(loss(example), parameters, materialize_grads=True)
                gradient = torch.cat(
                    [each.detach().reshape(-1).to("cpu", torch.float32) for each in found]
                )
                clip(gradient, self.bound)
                total += gradient
        self._give(parameters, total)

    def step_batch(
        self, model: nn.Module, batch: Sequence[Tensor], losses: Callable[..., Tensor]
    ) -> None:
        """As `step`, of a batch at once: ``batch``: tensors whose first dimension is the examples;
        ``losses(*batch)``: a loss for each, (count,). By opacus' ghost clipping, where that is
        installed, in the time of about two plain steps and the noise; else one example after
        another.

        Raises as `step` does; ConfigError for a model that opacus cannot take apart.
        """
        if not can_clip():
            return self.step(
                model,
                range(len(batch[0])),
                lambda at: losses(*(each[at : at + 1] for each in batch)).sum(),
            )
        self._check_limit()
        parameters = _trained(model)
        total = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
        if len(batch[0]):
            with _no_trace(model):
                sums = clipped_sum(model, parameters, lambda: losses(*batch), self.bound)
            total += torch.cat([each.reshape(-1).to("cpu", torch.float64) for each in sums])
        return self._give(parameters, total)

    def _give(self, parameters: Sequence[nn.Parameter], total: Tensor) -> None:
        """Put noise over a sum of clipped gradients, count the step, fill ``grad``."""
        step = self.bound / GRID
        multiples = torch.round(total / step).to(torch.int64).numpy()
        add_noise(
            multiples, NoisePlan(self.noise, self.bound, step, len(multiples), 1), self._chance
        )
        if self._ledger is not None:
            self._ledger.reserve(self.rate, self.noise)
        self.accountant.spend(self.rate, self.noise)
        noisy, at = (
            torch.from_numpy(multiples).to(torch.float64) * (step / (self.rate * self.count)),
            0,
        )
        for parameter in parameters:
            piece = noisy[at : at + parameter.numel()].view(parameter.shape)
            made, at = piece.to(parameter.device, parameter.dtype), at + parameter.numel()
            given, written = self._given.get(id(parameter), (None, -1))
            if given is not None and parameter.grad is given and parameter._version == written:
                made = given.add_(made)
            parameter.grad = made
            self._given[id(parameter)] = made, parameter._version


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def _no_trace(model: nn.Module) -> Generator[None]:
    """Refuse a model that keeps something of the examples beside their gradients: nothing bounds
    it, and no noise is over it. Vectors of spectral norm follow from the weights alone.
    """
    mixing = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.training
        and (isinstance(module, nn.modules.batchnorm._BatchNorm) or module.track_running_stats)
    ]
    if mixing:
        raise _traced("layers", mixing, "keep statistics of the examples, or mix those of a batch")
    before = _buffers(model)
    yield
    after = _buffers(model)
    changed = [name for name, was in before.items() if after.get(name) != was]
    if changed:
        raise _traced("buffers", changed, "are learnt from the examples")


def _buffers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of those that follow from data: which tensor each is, and how often it was written."""
    return {
        f"{name}.{key}".lstrip("."): (id(buffer), buffer._version)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and not _of_weights(module, key)
    }


def _of_weights(module: nn.Module, key: str) -> bool:
    """Whether a buffer is a vector of spectral_norm's, a parametrization or a hook."""
    hooked = f"{key[:-2]}_orig" in module._parameters
    return type(module).__name__ == "_SpectralNorm" or (key.endswith(("_u", "_v")) and hooked)


def _traced(what: str, names: Sequence[str], why: str) -> ConfigError:
    some = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
    return ConfigError(
        f"private examples: {len(names)} {what} {why}: {some}",
        key="model",
        why="Only gradients are clipped and get noise: what stays in a buffer goes out as it is.",
        hint="GroupNorm or LayerNorm in place of BatchNorm, observers off, or .eval() of these "
        "modules.",
    )
