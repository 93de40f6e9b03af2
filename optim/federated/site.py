"""What a member of a real run keeps for itself from round to round, and across its lives. Pure, but
for `SiteState.pack`'s bytes, which go on a shelf.

A control variate must be in the run's sum exactly once. So what a member keeps says which anchor
its newest contribution was made on, and holds its c_i with that contribution and without it: the
run's log tells which of the two it is (`SiteState.resolve`), whoever was killed in between. Until
it does the member offers the same change again.

The sum over all members travels in the flat vector, beside the model (`sums_beside`), and is
decided with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...collectives.errors import ConfigError, StateError
from ...collectives.layout import STEPS
from ...collectives.swarm import RunSettings, SiteSettings
from .member import Knobs
from .methods import METHODS, SUMS, Method

CONTROLS, CLIENTS = SUMS

VERSION = 1


def method_of(site: SiteSettings) -> Method:
    """The row of a run's method."""
    return METHODS[site.method]


def knobs_of(site: SiteSettings) -> Knobs:
    """A run's values for inner steps; the learning rate is the inner optimizer's own."""
    return Knobs(mu=site.mu, beta=site.beta, ahead=site.ahead)


def sums_beside(settings: RunSettings, parameters: int) -> dict[str, Tensor]:
    """What the run's flat vector has beside a model of so many parameters, by name, float32 and
    zero at first: nothing, or SCAFFOLD's sums, or FedNova's mean number of steps.
    """
    if settings.site is None:
        return {}
    if method_of(settings.site).normalised:
        return {STEPS: torch.zeros(1, dtype=torch.float32, device="cpu")}
    if not method_of(settings.site).control:
        return {}
    return {
        name: torch.zeros(numel, dtype=torch.float32, device="cpu")
        for name, numel in ((CONTROLS, parameters), (CLIENTS, 1))
    }


@dataclass(slots=True)
class SiteState:
    """A member's own state. Vectors: float32 (parameters,) on the CPU, None where the method has
    none.

    ``round``: of the anchor that the newest contribution was made on, -1 before the first;
    ``open``: whether it is not known to be decided. ``own``: c_i without it, ``next``: with it;
    ``member``: whether this member is among the `CLIENTS` without it. ``anchor``: parameters of
    that anchor, ``before``: of the one before; ``rate``: inner steps times learning rate of that
    contribution, by which a difference of anchors is a mean direction. ``personal``: Ditto's model.
    ``examples``: how many this site has declared; 0: none yet.
    """

    round: int = -1
    open: bool = False
    member: bool = False
    rate: float = 0.0
    own: Tensor | None = None
    next: Tensor | None = None
    anchor: Tensor | None = None
    before: Tensor | None = None
    personal: Tensor | None = None
    examples: int = 0

    def resolve(self, counted: bool) -> None:
        """The newest contribution is decided: its change of c_i is in the sum, or it is lost."""
        if self.open and counted:
            self.own, self.member = self.next, True
        self.open, self.next = False, None

    def pack(self) -> bytes:
        """As bytes."""
        from safetensors.torch import save

        tensors = {
            name: tensor.contiguous()
            for name, tensor in self._vectors().items()
            if tensor is not None
        }
        numbers = {
            "version": VERSION,
            "round": self.round,
            "open": self.open,
            "member": self.member,
            "rate": self.rate,
            "examples": self.examples,
        }
        return save(
            tensors or {"nothing": torch.zeros(1, dtype=torch.float32, device="cpu")},
            metadata={"kept": msgspec.json.encode(numbers).decode()},
        )

    def _vectors(self) -> Mapping[str, Tensor | None]:
        return {
            name: getattr(self, name) for name in ("own", "next", "anchor", "before", "personal")
        }


class _Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    round: int
    open: bool
    member: bool
    rate: float
    examples: int = 0


def check_examples(before: int, now: int) -> None:
    """Raises ConfigError where a site declares another number of examples than it did before in the
    same run: what it counts is constant, or the mean would be of no method."""
    if before and now != before:
        raise ConfigError(
            f"this site has {now} examples now, and declared {before} in this run",
            key="examples",
            why="What a site counts is constant in a run: every round is weighed by it.",
            hint=(
                f"attach(..., examples={before}) goes on as before; what has come since is for a "
                "new run"
            ),
        )


def unpack(data: bytes, parameters: int) -> SiteState:
    """The inverse of `SiteState.pack`. Raises StateError for anything else, and for vectors of
    another length than ``parameters``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")
        head = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, object]])
        numbers = msgspec.json.decode(str(head["__metadata__"]["kept"]), type=_Numbers)
        tensors = load(data)
    except (SafetensorError, msgspec.MsgspecError, KeyError, ValueError, OverflowError) as error:
        raise StateError(
            f"what this member keeps for itself is damaged: {error}",
            why="The disk, or something else than atoll, changed it.",
            hint=(
                "Without it this site's share in the run's control variates is unknown: found a "
                "new run from the model (atoll export RUN DIR; atoll new RUN.toml --from DIR)."
            ),
        ) from None
    if numbers.version != VERSION:
        raise StateError(
            f"what this member keeps has version {numbers.version}, this program reads {VERSION}",
            hint="pip install -U atoll",
        )
    known = {field.name for field in fields(SiteState)}
    vectors: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in known}
    if wrong := [
        name
        for name, tensor in vectors.items()
        if tensor.dtype != torch.float32 or tensor.shape != (parameters,)
    ]:
        raise StateError(
            f"what this member keeps is of another model: {wrong[0]} has shape "
            f"{list(vectors[wrong[0]].shape)}"
        )
    found = SiteState(numbers.round, numbers.open, numbers.member, numbers.rate, **vectors)
    found.examples = numbers.examples
    return found
