"""What attach refuses before it touches anything, each with the reason and the way out."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import wraps
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...collectives.errors import AtollError, ConfigError
from ...collectives.script_swarm import FragmentSwarm, Shelved, Swarm
from ...collectives.swarm import RunSettings, sample_count
from ..data.declared import declared
from ..model.flat import FlatVector, clean_name, unwrap
from .saving import some

BY_HAND = (
    "attach(model, None, swarm), then call attachment.step() after each optimizer step (or "
    "attachment.sync() yourself)."
)


# Their wrappers keep no tensors of their own, and step the optimizer inside, or not.
WRAPPING = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "opacus")


def hooked(optimizer: object) -> Optimizer:
    """The outermost object whose step runs hooks, since what is outside may move the parameters
    after the inner one's hook (Lookahead does). Wrappers that only pass on have none
    (accelerate's, opacus'): the one that they keep under ``.optimizer``, or the only one that they
    hold. Of a sharpness-aware one, whose loop calls ``first_step`` and ``second_step``, its
    ``base_optimizer``. ConfigError when there is none.
    """
    at, seen = optimizer, set[int]()
    while id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, Optimizer) and _two_steps(at):
            at = cast("Any", at).base_optimizer
        elif isinstance(at, Optimizer) and _runs_hooks(at):
            return at
        elif (inside := _kept(at)) is not None:
            at = inside
    if isinstance(at, Optimizer):
        return at
    held = next((name for name, value in _attributes(at).items() if _are_optimizers(value)), None)
    raise ConfigError(
        f"{type(at).__name__} is not a torch.optim.Optimizer",
        key="optimizer",
        why="attach() counts steps with register_step_post_hook, which only torch optimizers have.",
        hint=f"attach(model, optimizer.{held}, swarm) attaches those that it holds"
        if held is not None
        else f"Attach by hand: {BY_HAND}",
    )


def outermost(optimizer: object) -> Any:
    """The object that keeps what there is of tensors beside parameters: the one that is given,
    but for wrappers of trainers, and for those that `hooked` looks into because they do not step.
    """
    at, seen = optimizer, set[int]()
    while id(at) not in seen and (
        type(at).__module__.partition(".")[0] in WRAPPING or not _steps(at)
    ):
        seen.add(id(at))
        inside = _kept(at)
        at = at if inside is None else inside
    return cast("Any", at).base_optimizer if _two_steps(at) else at


def _kept(optimizer: object) -> Any:
    """The optimizer that a wrapper keeps, None where that is not clear."""
    for name in ("optimizer", "opt"):  # as trainers' and fastai's name the one that they pass on to
        inside = getattr(optimizer, name, None)
        if isinstance(inside, Optimizer) or hasattr(inside, name):
            return inside
    if not isinstance(optimizer, Optimizer):  # what it does around the inner step, nobody knows
        return None
    held = {
        id(each): each for each in _attributes(optimizer).values() if isinstance(each, Optimizer)
    }
    return held.popitem()[1] if len(held) == 1 else None


def _attributes(optimizer: object) -> dict[str, Any]:
    return getattr(optimizer, "__dict__", {})


def _are_optimizers(value: object) -> bool:
    several = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    return len(several) > 1 and all(isinstance(each, Optimizer) for each in several)


def _steps(optimizer: object) -> bool:
    return callable(getattr(optimizer, "step", None))


def _two_steps(optimizer: object) -> bool:
    two = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    return two and isinstance(getattr(optimizer, "base_optimizer", None), Optimizer)


def in_step_of_base(optimizer: Optimizer) -> bool:
    """Whether a hook is called for the ``step`` of a class above, which the optimizer's own step
    has called: torch runs the hooks for both, once any optimizer of that class was made.
    """
    steps = [vars(each).get("step") for each in type(optimizer).__mro__]
    if sum(getattr(step, "hooked", False) for step in steps) < 2:
        return False
    running, frame = 0, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and running < 2:
        code = frame.f_code
        if (
            code.co_name == "wrapper"
            and code.co_filename == Optimizer.__init__.__code__.co_filename
        ):
            running += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return running == 2


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether there is a place for them: ``torch.optim.Optimizer.__init__`` makes it."""
    return "_optimizer_step_post_hooks" in vars(optimizer)


def _runs_hooks(optimizer: Optimizer) -> bool:
    """Whether its step runs them, too. Torch makes it so in its ``__init__``; some Lookaheads make
    the place only, or not even that, and get from torch now what they have left out.
    """
    bare = not _has_hooks(optimizer)
    if bare and not _keeps_its_own(optimizer):
        return False
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if type(hooks := vars(optimizer).get(name, {})) is dict:  # nothing can refer to it weakly
            setattr(optimizer, name, OrderedDict(hooks))
    step = cast("Any", optimizer.step)
    if getattr(step, "hooked", False):
        return True
    if bare:  # this object alone: others of its class have no place

        @wraps(step)
        def bound(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        patched: Any = Optimizer.profile_hook_step(bound)
        patched.hooked = True
        optimizer.step = MethodType(patched, optimizer)
    elif "step" not in vars(optimizer):
        optimizer._patch_step_function()
    return getattr(optimizer.step, "hooked", False)


def _keeps_its_own(optimizer: Optimizer) -> bool:
    """Whether it is an optimizer by itself although torch's ``__init__`` was never called: it has
    groups and state of its own, and a step, which may move the parameters after an inner one's.
    """
    return (
        {"param_groups", "state"} <= vars(optimizer).keys()
        and type(optimizer).step is not Optimizer.step
        and type(optimizer).__module__.partition(".")[0] not in WRAPPING
    )


@contextmanager
def naming_tensors(flat: FlatVector) -> Generator[None]:
    """An error of torch inside, such as of a tensor subclass that cannot be copied, becomes a
    ConfigError that names the tensor. Raises anything else as it is.
    """
    try:
        yield
    except AtollError:
        raise
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"attach() wrote the run's anchor into the model ({flat.numel:,} values): a smaller "
            "batch comes too late, free memory of this device before"
        )
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        for spec, tensor in zip(flat.layout.tensors, flat.tensors, strict=True):
            if (why := _why_not_copied(tensor)) is not None:
                raise ConfigError(
                    f"{spec.name} (shape {list(spec.shape)}, {tensor.dtype}, {tensor.device}, "
                    f"{type(tensor).__name__}) cannot be read and written: {why}",
                    key="model",
                    why="The run reads each tensor of the model, and writes its anchor into it.",
                    hint=(
                        f"Make an ordinary parameter of {spec.name} before attach(), such as "
                        "nn.Parameter(torch.empty(shape)), or freeze it with "
                        "requires_grad_(False): frozen ones are no part of the run."
                    ),
                ) from error
        raise


def _why_not_copied(tensor: Tensor) -> str | None:
    """The first line of what torch says when it copies a tensor out and the same values back."""
    try:
        with torch.no_grad():
            tensor.copy_(tensor.detach().to("cpu", torch.float32, copy=True))
    except Exception as error:  # a subclass raises what it likes
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    return None


def included_names(model: nn.Module, include: Any) -> frozenset[str]:
    """The names of the parameters that ``include`` means: shell patterns of names, modules,
    parameters, or an iterable of these. Raises ConfigError for what means none of the model's.
    """
    if include is None:
        return frozenset()
    inner = unwrap(model)
    names = {id(parameter): clean_name(name) for name, parameter in inner.named_parameters()}
    if isinstance(include, str | Tensor | nn.Module) or not isinstance(include, Iterable):
        include = [include]
    found = set[str]()
    for each in cast("Iterable[Any]", include):
        if isinstance(each, str):
            new = {name for name in names.values() if fnmatchcase(name, each)}
        elif isinstance(each, nn.Module):
            new = {names[id(p)] for p in unwrap(each).parameters() if id(p) in names}
        else:
            new = {names[id(each)]} if id(each) in names else set[str]()
        if not new:
            given = repr(each) if isinstance(each, str) else type(each).__name__
            raise ConfigError(
                f"include names {given}, and the model has no such parameter",
                key="include",
                why=f"Its parameters are {some(sorted(names.values()))}.",
                hint='attach(model, optimizer, swarm, include=["encoder.*"]) or '
                "include=model.encoder.parameters()",
            )
        found |= new
    return frozenset(found)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ConfigError if ``optimizer``'s steps miss the hook or do not train ``model``."""
    if (
        not isinstance(getattr(optimizer, "state", None), dict)
        or not getattr(optimizer, "param_groups", None)
        or not _runs_hooks(optimizer)
    ):
        raise ConfigError(
            f"{type(optimizer).__name__} has no state, no parameter groups or no hooks",
            key="optimizer",
            why=(
                "It was not made by torch.optim.Optimizer.__init__, or with no parameters, so it "
                "has no hooks to count its steps by."
            ),
            hint=f"Call super().__init__(params, defaults) in it, or attach by hand: {BY_HAND}",
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} is capturable",
            key="optimizer.capturable",
            why=(
                "A step replayed from a CUDA graph runs no hooks, so its "
                "steps could not be counted."
            ),
            hint=f"Use capturable=False, or attach by hand: {BY_HAND}",
        )
    if _is_compiled(optimizer):
        raise ConfigError(
            f"the step of {type(optimizer).__name__} is compiled by torch.compile",
            key="optimizer.step",
            why="A compiled step may bypass hooks, so its steps could not be counted.",
            hint=(
                "Leave optimizer.step uncompiled (the model may be compiled), or "
                f"attach by hand: {BY_HAND}"
            ),
        )
    if any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in unwrap(model).parameters()
    ):
        raise ConfigError(
            "the parameters are stepped inside backward()",
            key="optimizer",
            why="Such steps run no hooks of the optimizer that is attached.",
            hint=f"Attach by hand: {BY_HAND}",
        )
    _check_parameters(model, optimizer)


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that steps others than the model's."""
    mine = {id(parameter) for parameter in unwrap(model).parameters()}
    strays = [
        (index, cast("Tensor", parameter))
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) not in mine
    ]
    stray = [f"group {index}: shape {list(each.shape)}" for index, each in strays]
    if stray and _like_masters(model, [each for _, each in strays]):
        raise ConfigError(
            f"the optimizer steps {len(stray)} float32 tensors beside the model's narrow ones",
            key="optimizer",
            why="As masters of these they do not move when the model adopts an anchor.",
            hint=(
                "attach(model, None, swarm, on_adopted=f), where f(moved) adds moved[parameter] "
                "to the master of each parameter, and attachment.step() after each step of the "
                "masters and their copy into the model. Or attach an optimizer over "
                "model.parameters() that keeps its masters itself."
            ),
        )
    if stray:
        raise ConfigError(
            f"{len(stray)} parameters of the optimizer are not the model's ({stray[0]})",
            key="optimizer",
            why=(
                "The optimizer was made for another model, or before the model's parameters were "
                "replaced (a move or a conversion)."
            ),
            hint="Make the optimizer from model.parameters() of the model that is attached.",
        )


def _like_masters(model: nn.Module, strays: Sequence[Tensor]) -> bool:
    """Whether these may be masters of the model's narrow parameters."""
    narrow = [each for each in unwrap(model).parameters() if each.dtype.itemsize < 4]
    shapes = {each.shape for each in narrow if not nn.parameter.is_lazy(each)}
    return all(each.dtype.itemsize >= 4 and each.shape in shapes for each in strays)


def check_capture(optimizer: Optimizer) -> None:
    """Raise ConfigError when a step is being captured into a CUDA graph, which optimizers without
    state can be without being capturable.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"a step of {type(optimizer).__name__} is being captured into a CUDA graph",
            key="optimizer.step",
            why=(
                "A step replayed from a CUDA graph runs no hooks, so its "
                "steps could not be counted."
            ),
            hint=f"Capture forward and backward only, or attach by hand: {BY_HAND}",
        )


def check_method(settings: RunSettings) -> None:
    """Raise ConfigError when the run's members contribute gradients: an optimizer of the script's
    own would move the model between them; or what follows from seeds."""
    if settings.btard is not None:
        raise ConfigError(
            "the run has [btard]: what its members contribute follows from public seeds",
            key="$.btard",
            hint=(
                "SeededTraining(model, swarm, work), where work(seed) trains the "
                "model, in place of attach()"
            ),
        )
    if settings.method == "gradient_averaging":
        raise ConfigError(
            'the run\'s method is "gradient_averaging": it has one optimizer, in the nodes',
            key="$.train.method",
            hint=(
                "opt = GradientAveraging(model.parameters(), swarm=swarm, model=model), in "
                "place of your optimizer"
            ),
        )


def check_site(swarm: Swarm, optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigError if the run's federated method cannot take part in the inner steps."""
    site = swarm.settings.site
    if site is None:
        return
    from ..federated.site import method_of

    method, optimizer = method_of(site), optimizers[0] if len(optimizers) == 1 else None
    anybody = method.plain and not method.normalised and site.pull is None
    if site.work is not None and anybody and not swarm.settings.sample:
        return  # the steps are anybody's, and nothing is kept
    if optimizer is None or not isinstance(swarm, Shelved):
        raise ConfigError(
            f"the run's method {method.name} needs the steps of one optimizer"
            if optimizer is None
            else "a member of this run keeps something for itself",
            key="optimizer" if optimizer is None else "swarm",
            why="It corrects each gradient before the step."
            if optimizer is None
            else "A job of several ranks has no place for that.",
            hint="attach(model, optimizer, swarm) with a torch optimizer, in one process",
        )
    groups = optimizer.param_groups
    plain = type(optimizer) is torch.optim.SGD and not any(
        group["momentum"] or group["weight_decay"] or group["maximize"] for group in groups
    )
    if (method.control or method.momentum or method.normalised) and (
        not plain or len({float(group["lr"]) for group in groups}) > 1
    ):
        raise ConfigError(
            f"the run's method {method.name} with {type(optimizer).__name__} as it is",
            key="optimizer",
            why="Its formulas take a round's way for a sum of gradients times one learning rate.",
            hint="torch.optim.SGD(model.parameters(), lr=0.1), without momentum and weight decay",
        )


def examples_of(settings: RunSettings, given: int | None) -> int:
    """How many examples this site counts by, of a run that goes by them; 0 elsewhere. ``given``: to
    `attach`; None: as its data set says (`site_data`). Raises ConfigError where nobody says it."""
    if given is not None and (given := sample_count(given)) < 1:
        raise ConfigError(
            f"examples = {given} is not a positive number",
            key="examples",
            hint="How many examples this site trains on, such as len(train_set).",
        )
    work = settings.work
    if work is None or not work.declares:
        return 0
    examples = given if given is not None else declared()
    if examples is None:
        raise ConfigError(
            "this site has not said how many examples it has",
            key="examples",
            why=(
                f"In this run a site's work is {work} a round, and it counts "
                + ("by its examples." if work.weights == "examples" else "as much as any other.")
            ),
            hint="attach(..., examples=len(train_set)), or site_data(), which says it",
        )
    secure = settings.secure
    most = secure.max_weight if secure is not None and settings.privacy is None else examples
    if work.weights == "examples" and examples > most:
        raise ConfigError(
            f"this site has {examples:,} examples, and the run's [secure] max_weight is {most:,}",
            key="examples",
            why="Its update would count less than its examples do.",
            hint="The organiser founds the run with a max_weight of the largest site's.",
        )
    return examples


def in_job(model: nn.Module) -> bool:
    """Whether this process is one rank of several, or the model is cut as in such a job."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if torch.distributed.get_world_size() > 1:
        return True
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())  # DTensors


def check_alone(model: nn.Module, name: str) -> None:
    """Raise ConfigError at all ranks of a job: ``name`` is an optimizer of one process."""
    if in_job(model):
        raise ConfigError(
            f"{name} is for a job of one process",
            key="torch.distributed",
            why="In a job of several ranks rank 0 alone has the swarm.",
            hint=(
                "attach(model, optimizer, swarm) in every rank, with swarm None in all but rank 0."
            ),
        )


def check_arguments(settings: RunSettings, given: dict[str, Any]) -> None:
    """Raise ConfigError for an argument that differs from the run's manifest, which has authority
    (None means "as the run says").
    """
    for name, value in given.items():
        agreed = getattr(settings, name)
        if value is not None and value != agreed:
            raise ConfigError(
                f"{name}={value!r} differs from the run's {agreed!r}",
                key=f"$.train.{name}",
                why="The run's signed manifest sets it for all members alike.",
                hint=f"Leave {name} out, or join a run made with {name} = {value!r}.",
            )


def check_swarm(swarm: object) -> None:
    """Raise ConfigError if ``swarm`` is no Swarm, such as an invite that was not joined."""
    if not isinstance(swarm, Swarm):
        raise ConfigError(
            f"{type(swarm).__name__} is not a swarm",
            key="swarm",
            hint="swarm = atoll.node.join(INVITE), or atoll.optim.SoloSwarm() without a network.",
        )
    if swarm.settings.fragments > 1 and not isinstance(swarm, FragmentSwarm):
        raise ConfigError(
            (
                f"{type(swarm).__name__} has no fragments, and the run's model is cut into "
                f"{swarm.settings.fragments}"
            ),
            key="$.exchange.fragments",
            hint="atoll.node.join(INVITE) has; without a network leave fragments out.",
        )


def _is_compiled(optimizer: Optimizer) -> bool:
    step: Any = optimizer.step
    while step is not None:
        if hasattr(step, "_torchdynamo_orig_callable"):
            # Torch.compile itself wraps some optimizers (LBFGS) so as never to compile them.
            return not getattr(step, "_torchdynamo_disable", False)
        step = getattr(step, "__wrapped__", None)
    return False


def has_gradient(optimizer: Optimizer) -> bool:
    """Whether a parameter of it has a gradient, be it zero."""
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def moves_nothing(optimizer: Optimizer) -> bool:
    """Whether every learning rate and every gradient is 0, as far as that can be seen without
    asking other ranks. Where there was no state before, such a step is how
    torch.distributed.checkpoint makes it; at the end of a schedule that falls to 0 a step is a
    step."""
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if lr is None or (isinstance(lr, Tensor) and lr.device.type != "cpu") or float(lr) != 0.0:
            return False
    gradients = (
        parameter.grad for group in optimizer.param_groups for parameter in group["params"]
    )
    return not any(
        grad is not None
        and grad.layout is torch.strided
        and not hasattr(grad, "device_mesh")
        and bool(grad.any())
        for grad in gradients
    )
