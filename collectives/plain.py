"""Tensors that a collective takes: those whose values are their memory, seen flat, as bytes or as
words.

Nothing here depends on the caller's default dtype, default device or inference mode.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from .errors import LocalProtocolError
from .identifiers import PeerId
from .outcomes import Outcome
from .script_swarm import MAX_TAG, TAG, Call, Operating, Swarm

if TYPE_CHECKING:
    from torch import Tensor

WORD_BYTES = 4
LONGEST_WAIT_S = 1e6
"""A longer wait is one without an end of its own: locks and sockets take no longer ones."""
CPU = ("cpu",)
DEVICES = ("cpu", "cuda")
log = logging.getLogger("atoll")
_told_alone = False
# a tensor that has its own (DTensor, a fake one) is not what its memory says
DISPATCH = "__torch_dispatch__"


def flat_of(tensor: Tensor, dtype: Any = None, *, devices: Collection[str] = CPU) -> Tensor:
    """A tensor's elements in its own memory, without history, whatever mode made it."""
    import torch

    check_plain(tensor, dtype, devices)
    with plainly():
        flat = tensor.detach().view(-1)
        if not flat.is_inference():
            return flat
        # Which takes from a storage that it can be resized.
        return torch.from_numpy(flat.view(torch.uint8).numpy()).view(tensor.dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    """Its memory, as uint8."""
    import torch

    return flat_of(tensor).view(torch.uint8)


def words_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous CPU tensor as words of 32 bits, float32 in name: a view of them, or
    a padded copy.
    """
    import torch

    flat = bytes_of(tensor)
    if flat.numel() % WORD_BYTES or flat.data_ptr() % WORD_BYTES:
        padded = flat.new_zeros(-(-flat.numel() // WORD_BYTES) * WORD_BYTES)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.float32)


def placed(source: Tensor, numel: int, members: Sequence[PeerId], me: PeerId) -> Tensor:
    """The whole vector of ``numel`` elements in which ``source`` is what one member gives: of a
    gather, its slot.
    """
    if source.numel() == numel:
        return source
    vector, start = source.new_zeros(numel), list(members).index(me) * (numel // len(members))
    vector[start : start + source.numel()] = source
    return vector


def kind_of(tensor: Tensor, prefix: str = "", devices: Collection[str] = CPU) -> str:
    """What all callers must agree in, in addition to the length, in words: dtype and shape."""
    check_plain(tensor, devices=devices)
    return tag_of(f"{prefix}{_kind(tensor)}")


def _kind(tensor: Tensor) -> str:
    dims = ",".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{dims}]"


def tag_of(text: str, otherwise: str = "") -> str:
    """``text`` as a tag of a Call. Where it is too long for one, or has other characters, its end
    is a hash of all of it, after as much of ``otherwise``, or of itself, as has room.
    """
    if len(text) <= MAX_TAG and re.match(TAG, text):
        return text
    shown = re.sub(r"[^!-.0-?A-~]+", "_", otherwise or text)
    return f"{shown[: MAX_TAG - 20]}...{blake3(text.encode(errors='replace')).hexdigest(8)}"


def tree_kind(tensors: Mapping[str, Tensor], prefix: str = "") -> str:
    """The same of named tensors, in the order of their names."""
    text = ",".join(f"{name}:{_kind(tensors[name])}" for name in sorted(tensors))
    return tag_of(f"{prefix}{text}", f"{prefix}{len(tensors)}:{text}")


def read_words(operating: Operating, start: int, dtype: Any, shape: Sequence[int]) -> Tensor:
    """A tensor out of the words of a result, from word ``start`` on."""
    import torch

    nbytes = torch.Size(shape).numel() * dtype.itemsize
    words = torch.empty(-(-nbytes // WORD_BYTES), dtype=torch.float32, device="cpu")
    operating.copy_into(words, start)
    return words.view(torch.uint8)[:nbytes].view(dtype).view(tuple(shape))


def agreed(outcome: Outcome) -> Outcome:
    """The outcome of an operation, unless others have called something else by its name or its
    result overflows. Raises LocalProtocolError, in words: who gave what. Says once where nobody
    else was there to take part.
    """
    global _told_alone
    if (outcome.status, outcome.members) == ("committed", 1) and outcome.config != "solo":
        if not _told_alone:
            log.warning(
                "an operation was decided by this member alone: it is the only one of the run so "
                "far. enter(swarm, start_with=2) waits until another is there."
            )
        _told_alone = True
    if outcome.overflows:
        raise LocalProtocolError(
            outcome.reason,
            why="All its callers are told so; no tensor is touched.",
            hint="divide the values before, or give them as float64",
        )
    if outcome.differs:
        raise LocalProtocolError(
            outcome.reason,
            why="Its callers must agree in what is reduced; nothing was decided.",
            hint=(
                "call it with the same op, shape, dtype, names, codec and kind of weights at all "
                "members, under another op_id"
            ),
        )
    return outcome


def whole(value: Any, name: str) -> int:
    """An integer argument. Raises LocalProtocolError."""
    try:
        return operator.index(value)
    except TypeError:
        raise LocalProtocolError(f"{name} is a whole number, not {value!r}") from None


def buffer_length(numel: Any) -> int:
    """Elements of a `Swarm.buffer`. Raises LocalProtocolError."""
    if (found := whole(numel, "numel")) < 1:
        raise LocalProtocolError(f"a buffer of {found} elements")
    return found


def seconds(value: Any, name: str) -> float:
    """A length of time: a number of seconds or a timedelta; infinity too. Raises
    LocalProtocolError.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str) or (found := _float(value)) is None or found != found:
        raise LocalProtocolError(f"{name} is a number of seconds, not {value!r}")
    return found


def patience(timeout_s: Any) -> float | None:
    """How long a `wait` may take, in seconds; None: until it is over, which the operation's own
    deadline bounds. Raises LocalProtocolError.
    """
    if timeout_s is None:
        return None
    found = seconds(timeout_s, "timeout_s")
    return None if found > LONGEST_WAIT_S else max(0.0, found)


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def check_swarm(swarm: Any) -> None:
    """Refuse what is no swarm, such as None at a rank that has not joined, or a class."""
    if isinstance(swarm, type) or not hasattr(swarm, "operate"):
        given = "the class" if isinstance(swarm, type) else "a"
        kind = swarm if isinstance(swarm, type) else type(swarm)
        raise LocalProtocolError(
            f"a collective takes a swarm first, not {given} {kind.__name__}",
            hint="join() returns one; of a job of several ranks rank 0 alone has it",
        )


def texts(values: Collection[Any], what: str) -> list[str]:
    """Arguments that must be str, sorted. Raises LocalProtocolError."""
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise LocalProtocolError(f"{what}: a str, not a {type(wrong[0]).__name__}")
    return sorted(values)


def plainly() -> AbstractContextManager[Any]:
    """What is made in the caller's inference mode could not be used again outside of it."""
    import torch

    return torch.inference_mode(False)


def operate(swarm: Swarm, call: Call, values: Tensor) -> Operating:
    """`Swarm.operate`, whatever mode the caller is in."""
    check_swarm(swarm)
    with plainly():
        return swarm.operate(call, values)


def check_plain(
    tensor: Any, dtype: Any = None, devices: Collection[str] = CPU, *, empty: bool = False
) -> None:
    """Refuse what is not a tensor whose values are its memory: its bytes are read and written as
    they lie there. No dtype: any. ``empty``: it may have no elements.
    """
    import torch

    given = tensor if isinstance(tensor, torch.Tensor) else None
    full = given is not None and (empty or bool(given.numel()))
    if (
        given is None
        or not (full and _plain(given, devices))
        or (dtype is not None and given.dtype != dtype)
    ):
        where = "CPU" if devices == CPU else "CPU or a GPU"
        kind = str(dtype).removeprefix("torch.") + " tensor" if dtype is not None else "tensor"
        raise LocalProtocolError(
            f"this collective takes a non-empty {kind}, contiguous and on the {where}, "
            f"not {_described(tensor)}",
            hint=_instead_of(tensor),
        )


def _plain(tensor: Tensor, devices: Collection[str]) -> bool:
    import torch

    ours = getattr(type(tensor), DISPATCH) is getattr(torch.Tensor, DISPATCH)
    dense = (
        ours
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.layout == torch.strided
        and tensor.device.type in devices
    )
    # Nobody outside of its mode could write to it.
    dense = dense and not (tensor.is_inference() and tensor.device.type != "cpu")
    return bool(dense and not tensor.is_conj() and not tensor.is_neg() and tensor.is_contiguous())


def _instead_of(value: Any) -> str:
    """What to give in place of what is no such tensor; "" where there is no one thing."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_nested and not value.is_contiguous():
            return "give kept = tensor.contiguous(), and tensor.copy_(kept) when it is over"
        return ""
    if type(value).__module__ == "numpy":
        return "torch.from_numpy(array) shares its memory"
    return "give tensors by name, as a mapping" if isinstance(value, list | tuple) else ""


def _described(value: Any) -> str:
    import torch

    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if value.is_nested:
        return f"a nested tensor of {value.dtype}"
    strange = [
        *(
            [str(value.layout)]
            if value.layout != torch.strided
            else ["not contiguous"] * (not value.is_contiguous())
        ),
        *(
            what
            for what, so in (("conjugated", value.is_conj()), ("negated", value.is_neg()))
            if so
        ),
        *([type(value).__name__] if type(value) not in (torch.Tensor, torch.nn.Parameter) else []),
    ]
    return ", ".join([f"{tuple(value.shape)} of {value.dtype} on {value.device}", *strange])
