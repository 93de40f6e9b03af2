"""Sees training that is not counted (`silence`), and contributions without progress, and tells the
script and its node of it.

Gradients are seen by hooks on a few parameters. Hooks on modules would see more, such as a model
all of whose tensors were replaced; but `torch.cuda.make_graphed_callables` refuses modules that
have hooks, and a compiled model would trace them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from ...collectives.errors import AtollError
from ..model.flat import unwrap
from .silence import Finding, Silence
from .slots import ParameterPlaces
from .weights import WeightWatch

logger = logging.getLogger("atoll")

HOOKED = 16  # parameters that have a hook, at least
SAMPLED = 16  # elements of a parameter that are compared
REPORT_AGAIN_S = 60.0  # a report may be lost on its way to the node

CURES: Mapping[str, str] = {
    "replaced": (
        "the model holds other tensors than those that were attached ({names}): they are not "
        "those that the attached optimizer steps, so rounds contribute no progress. Load weights "
        "without assign=True and convert the model before attach(); or detach(), make the "
        "optimizer again from model.parameters(), and attach() both"
    ),
    "foreign": (
        "gradients have reached the model {backwards} times and its weights changed, but no step "
        "of the attached optimizer came between: nothing is contributed. Causes: an optimizer that "
        "was made again after attach(), one whose step() is never called (first_step and "
        "second_step), steps inside of backward(). Attach the optimizer that steps (its "
        "base_optimizer), or attach(model, None, swarm) and call attachment.step() after each step"
    ),
    "without": (
        "the script has set the model's weights {backwards} times, without gradients and without a "
        "step of the attached optimizer: nothing is contributed. attach(model, None, swarm) and "
        "attachment.step() after each change of the weights, or put the change into parameter.grad "
        "and call optimizer.step()"
    ),
    "nothing": (
        "the script goes on, and for {backwards} iterations no gradient has reached the attached "
        "model and no step was made: does it train a copy of it (copy.deepcopy, a model that was "
        "made again)? Attach the model that is trained; a notice that is wrong ends with the next "
        "step"
    ),
    "partial": (
        "{backwards} backwards and no step is counted: a step is over when each of the attached "
        "optimizers has stepped, and {names} did not. attach(..., counts=OPTIMIZER) names the "
        "one that ends a step"
    ),
    "cleared": (
        "gradients have reached the model {backwards} times and were cleared, and nothing has "
        "changed its weights: nothing is trained here. Causes: optimizer.step() is not called, the "
        "optimizer that steps was made from another model, such as a copy, or a GradScaler skips "
        "each step, since gradients are not finite"
    ),
    "adding": (
        "gradients add up at the model over {backwards} backwards, and no step is counted: "
        "nothing is contributed until one is. If this is a long accumulation, the next step ends "
        "this notice; else call optimizer.step(), or attachment.step() if the steps are counted "
        "by hand"
    ),
}
STILL: Mapping[str, str] = {
    "replaced": "the model holds other tensors than those that the attached optimizer steps",
    "frozen": "no attached parameter requires a gradient any more",
    "gradients": "no gradient reached an attached parameter",
    "zero": "every gradient is 0: the loss is at its least, or does not hang on the weights",
    "rate": "the learning rate is 0",
    "rounding": "steps are smaller than {names} can add to the weights; keep float32 weights",
    "other": "weights are at the anchor again; is something put back after each step?",
}
"""Why a contribution is exactly zero. The node has the same causes (`node.run.verdicts`, V15)."""


class Uncounted:
    """Of one attachment. The hooks hold no reference to it, and are not copied or saved with the
    model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        weights: WeightWatch,
        clock: Callable[[], float],
        report: Callable[[dict[str, float]], None],
    ) -> None:
        """``model``: just attached, so its trainable parameters are the attached ones. ``report``
        tells the node.
        """
        self._silence = Silence(by_hand=not optimizers)
        self._model, self._optimizers = weakref.ref(model), optimizers
        self._weights = weights
        self._clock, self._report = clock, report
        self._leaves = [
            each for each in unwrap(model).parameters() if each.is_leaf and each.requires_grad
        ]
        sharded = any(hasattr(each, "device_mesh") for each in self._leaves)
        # a sharded model's modules hold slices and whole tensors in turns
        self._slots = ParameterPlaces(model, () if sharded else set(map(id, self._leaves)))
        self._stepped = set[int]()  # attached optimizers that have stepped since the last count
        self._said_at = 0.0
        self._reached = set[int]()  # hooked parameters that this backward has reached
        self._reached_before = set[int]()
        self._versions: list[int] | None = None
        self._sample: Tensor | None = None
        self._told_by_versions = False
        self._inside_step = False
        self._looked_at = 0  # backwards when the script was last asked, and the weights then
        self._looked: list[int] | None = None
        self._changed_after = 0  # backwards before the newest change that such a look has seen
        self._still_why = ""
        if optimizers and (unstepped := self._unstepped()):
            logger.info(
                "in no attached optimizer, sent all the same (requires_grad_(False) before "
                "attach() leaves them out): %s",
                ", ".join(unstepped[:5]) + (", …" if len(unstepped) > 5 else ""),
            )
        stride = max(1, len(self._leaves) // HOOKED)
        dropped = _Dropped()
        self._hooks = [
            _hook(leaf, index, self, dropped)
            for index, leaf in list(enumerate(self._leaves))[::stride]
            if not hasattr(leaf, "device_mesh")  # no gradient is added to slices by autograd
        ]

    def remove(self) -> None:
        """Take the hooks off: the attachment counts no more steps."""
        for hook in self._hooks:
            hook.remove()
        self._slots.clear()
        self._leaves = []

    # ---- steps

    def stepping(self, stepping: bool) -> None:
        """An attached optimizer's step begins or ends. One that evaluates a closure has many
        backwards and changes of weights inside of a step, which are no finding.
        """
        self._inside_step = stepping
        self.wrote()

    def counted(self) -> None:
        """A step is counted."""
        self.wrote()
        self._told_by_versions = False
        self._stepped.clear()
        self._reached.clear()
        self._reached_before.clear()
        replaced = bool(self._replaced())
        if (finding := self._silence.counted(self._clock(), replaced=replaced)) is not None:
            logger.info("steps are counted again")
            self._tell({f"uncounted_{finding.cause}": 0.0})
        elif replaced:
            self._backward(cleared=0, replaced=True)

    def stepped_in_part(self, optimizer: Optimizer) -> None:
        """One of several attached optimizers has stepped, which is no step yet."""
        self._stepped.add(id(optimizer))
        self._silence.stepped_in_part()

    def wrote(self) -> None:
        """The attachment, or an attached optimizer, has changed weights."""
        self._versions = self._sample = self._looked = None
        self._changed_after = 0

    def look(self) -> None:
        """The script has told something of a step, or asked whether the run is done. Tensors that
        were replaced have no hooks, and who sets weights by hand has perhaps no gradients; so
        whether the model still holds the attached ones, and as they were, is asked here, too.
        """
        self.stepped_by_hand()
        if self._inside_step or not self._training():
            return
        if self._replaced():
            self._backward(cleared=0, replaced=True)
            return
        before, self._looked_at = self._looked_at, self._silence.backwards
        last, self._looked = self._looked, [_version(each) for each in self._leaves]
        if before != self._looked_at:  # hooks see what there is
            return
        if last is None or last == self._looked:
            self._found(self._silence.looked(self._clock()))
        elif self._changed_after == self._looked_at:
            self._found(self._silence.set_by_hand())
        else:  # the first change after a backward, which the next one tells of
            self._changed_after = self._looked_at

    def stepped_by_hand(self) -> None:
        """A script that steps by hand has perhaps made a step: whether it takes anchors back."""
        if words := self._weights.by_hand():
            logger.warning("%s", words)

    # ---- backwards

    def reached(self, index: int, gradient: Tensor) -> None:
        """A gradient comes to a hooked parameter."""
        parameter = self._leaves[index]
        if self._inside_step:
            return
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # no gradient comes, and a look at values would spoil the graph
        if self._reached and index not in self._reached:
            self._reached.add(index)  # in the same backward as the last one
            return
        self.stepped_by_hand()  # who calls sync() alone says nothing else of its steps
        self._reached_before, self._reached = self._reached, {index}
        # In evaluation mode gradients are asked for that no step is to follow.
        again = index in self._reached_before and self._training()
        cleared = self._cleared(parameter.grad, gradient) if again else 0
        self._backward(cleared=cleared, replaced=bool(self._replaced()))

    def _cleared(self, grad: Tensor | None, more: Tensor) -> int:
        """How often gradients were cleared since the last look. Zeros in their place
        (``zero_grad(set_to_none=False)``), to which ``more`` comes that is not zero, are looked for
        at backwards 1, 2, 4, 8, …, as a sample of the weights is.
        """
        if grad is None:
            return 1
        at = self._silence.backwards + 1
        plain = type(grad) is type(more) is Tensor and grad.layout is torch.strided
        if at <= self._silence.usual or at & (at - 1) or not plain:
            return 0
        return max(1, at // 2) if bool(more.any()) and not bool(grad.any()) else 0

    def _backward(self, *, cleared: int, replaced: bool) -> None:
        now = self._clock()
        self._found(
            self._silence.backward(now, foreign=self._foreign(), cleared=cleared, replaced=replaced)
        )

    def _found(self, found: Finding | None) -> None:
        now = self._clock()
        if found is not None:
            logger.warning("%s", self._words(found))
        standing = self._silence.finding
        if found is not None or (standing and now - self._said_at >= REPORT_AGAIN_S):
            assert standing is not None
            self._said_at = now
            self._tell({f"uncounted_{standing.cause}": float(standing.backwards)})

    def _foreign(self) -> int:
        """How often others have changed weights since the last look. Versions tell of all ways
        that autograd knows of. Ways that it does not (``.data``, kernels by pointer) are seen on a
        sample, at backwards 1, 2, 4, 8, … beyond the usual accumulation: that reads the device.
        """
        last, self._versions = self._versions, [_version(each) for each in self._leaves]
        told = last is not None and last != self._versions
        self._told_by_versions |= told
        changed, at = int(told), self._silence.backwards + 1
        if at > self._silence.usual and not at & (at - 1) and not self._told_by_versions:
            before, self._sample = self._sample, _sampled(self._leaves)
            if before is not None and not torch.equal(before, self._sample):
                changed = max(1, at // 2)  # as often as there were backwards since that look
        return changed

    def _training(self) -> bool:
        model = self._model()
        return model is not None and model.training

    def _replaced(self) -> list[str]:
        """The names that hold other tensors than at `attach`, which no attached optimizer steps.
        Without an optimizer none: each boundary takes up what the model holds then.
        """
        if not self._optimizers or not (moved := self._slots.moved()):
            return []
        stepped = self._ids()
        return [slot.name for slot, live in moved if live is not None and id(live) not in stepped]

    def _unstepped(self) -> list[str]:
        """The attached parameters that no attached optimizer has."""
        stepped = self._ids()
        slots = {id(slot.parameter): slot.name for slot in reversed(self._slots.all)}
        return [name for at, name in reversed(slots.items()) if at not in stepped]

    def _ids(self) -> set[int]:
        """Of the parameters of attached optimizers, as they are now."""
        return {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    # ---- contributions without progress

    def contributed(self, still: int) -> None:
        """``still`` contributions in a row were exactly zero, though their steps were counted."""
        if not still:
            if self._still_why:
                self._tell({f"still_{self._still_why}": 0.0})
            self._still_why = ""
            return
        why, names = self._why_still()
        if self._still_why or (still < 2 and why == "rate"):  # schedules may begin at 0
            return
        self._still_why = why
        logger.warning(
            "%d contributions in a row hold no progress, though steps were counted: %s",
            still,
            STILL[why].format(names=names),
        )
        self._tell({f"still_{why}": float(still)})

    def _why_still(self) -> tuple[str, str]:
        if self._replaced():
            return "replaced", ""
        trained = [
            parameter
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ] or list(self._leaves)
        rates = [group.get("lr") for each in self._optimizers for group in each.param_groups]
        if not any(parameter.requires_grad for parameter in trained):
            return "frozen", ""
        if rates and all(rate is not None and float(rate) == 0.0 for rate in rates):
            return "rate", ""
        if all(parameter.grad is None for parameter in trained):
            return "gradients", ""
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        if all(each.layout is torch.strided and not bool(each.any()) for each in grads):
            return "zero", ""
        narrow = {str(each.dtype) for each in trained if each.dtype.itemsize < 4}
        return ("rounding", ", ".join(sorted(narrow))) if narrow else ("other", "")

    # ---- telling

    def _words(self, finding: Finding) -> str:
        names = self._replaced()[:3]
        if finding.cause == "partial":
            names = [
                type(each).__name__ for each in self._optimizers if id(each) not in self._stepped
            ]
        return CURES[finding.cause].format(backwards=finding.backwards, names=", ".join(names))

    def _tell(self, metrics: dict[str, float]) -> None:
        with suppress(AtollError):  # without a node the script has been told
            self._report(metrics)


class _Dropped:
    """An attachment that the garbage collector has taken, whose model is still trained."""

    told = False

    def tell(self) -> None:
        if not self.told:
            self.told = True
            logger.warning(
                "the model is trained, and its attachment is gone: the script keeps neither it nor "
                "its optimizer, so no step is counted any more. Keep it for as long as the model "
                "is trained, sync = attach(...), and call sync.finish() when training ends"
            )


def _hook(parameter: Tensor, index: int, uncounted: Uncounted, dropped: _Dropped) -> Any:
    """A hook that is called before a gradient is added to the parameter's. It has no reference to
    the parameter, not even a weak one: `torch.utils.swap_tensors` refuses such tensors.
    """
    to = weakref.ref(uncounted)

    @torch.compiler.disable
    def hook(gradient: Tensor) -> None:
        if (watching := to()) is not None:
            watching.reached(index, gradient)
        else:
            dropped.tell()

    return cast("Any", parameter).register_hook(unserializable_hook(hook))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def _sampled(tensors: Sequence[Tensor]) -> Tensor:
    """A few elements of each tensor: float32, on the CPU."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        whole = tensor.detach()
        flat = whole.view(-1) if whole.is_contiguous() else whole.flatten()
        part = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].float()
        by_device.setdefault(part.device, []).append(part)
    return torch.cat([torch.cat(parts).cpu() for parts in by_device.values()] or [torch.empty(0)])
