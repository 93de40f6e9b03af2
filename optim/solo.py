"""The swarm of one: a complete Swarm without a network or a node, for scripts on one machine and
for tests.

Rounds commit synchronously inside `contribute`, with the same outer step the node uses, so a script
attached to it is DiLoCo with one worker (Lookahead with Nesterov momentum). It keeps its state in
memory; `state_dict` holds anchor and momentum as tensors, because there is no log to fetch them
from again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from ..collectives.api import Handle, all_reduce
from ..collectives.codecs.codec import Chunking, chunk_elements
from ..collectives.codecs.encoded import EncodedVector, why_refused
from ..collectives.codecs.vanished import vanished_share
from ..collectives.errors import (
    ConfigError,
    LocalProtocolError,
    ModelMismatchError,
    OutOfDateError,
    SwarmClosedError,
)
from ..collectives.group import Evaluated, Member
from ..collectives.identifiers import PeerId, RunId
from ..collectives.layout import Layout, check_base, differences
from ..collectives.metrics import Warned
from ..collectives.op_names import OWN_NAME
from ..collectives.outcomes import Outcome, Share, Tally
from ..collectives.plain import buffer_length
from ..collectives.reducers import codec_fault, operation_codec
from ..collectives.script_swarm import Call, PeerView, Reduction
from ..collectives.swarm import RunSettings, sample_count
from ..security.rule_names import parse_reducer
from .model.feedback import as_decoded, contribution_grid
from .outer import OuterStep
from .outer.readings import reading_of
from .outer.reported import Reported, median_lag

if TYPE_CHECKING:
    from .data.shard import Shard

TALLIES = 256  # told at a time
UNFIT = "the tensor holds NaN or infinity, or a value too large for its codec"
T = TypeVar("T")


def flat_digest(flat: Tensor) -> str:
    """blake3 (hex) of a contiguous float32 CPU tensor's bytes."""
    return blake3(flat.numpy().data.cast("B")).hexdigest()


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is what crosses the seam: float32, contiguous, on the CPU."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


class SettledPending(Generic[T]):
    """A Pending that has come."""

    def __init__(self, result: T) -> None:
        self._result = result

    def done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout_s: float | None = None) -> T:
        """The result, at once."""
        return self._result


class AnchorLease:
    """An AnchorView on one generation of an `AnchorStore`."""

    def __init__(
        self,
        flat: Tensor,
        round_: int,
        give_back: Callable[[], None],
        samples: int = 0,
        lag: float = 0.0,
        steps: int = 0,
    ) -> None:
        self._flat: Tensor | None = flat
        self._give_back = give_back
        self.round, self.samples, self.lag, self.steps = round_, samples, lag, steps
        self.numel = flat.numel()
        self._digest = ""

    @property
    def digest(self) -> str:
        """blake3 of the anchor's bytes, in hex; computed when first asked for."""
        if not self._digest:
            self._digest = flat_digest(self._held())
        return self._digest

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Raises LocalProtocolError after `release`, or when the range or the destination does not
        fit.
        """
        flat, count = self._held(), destination.numel()
        if not _plain(destination):
            raise LocalProtocolError(
                f"destination must be float32, contiguous and on the CPU, not {destination.dtype}"
            )
        if start < 0 or start + count > self.numel:
            raise LocalProtocolError(
                f"elements [{start}, {start + count}) of a vector of {self.numel}"
            )
        destination.detach().view(-1).copy_(flat[start : start + count])

    def release(self) -> None:
        if self._flat is not None:
            self._flat = None
            self._give_back()

    def _held(self) -> Tensor:
        if self._flat is None:
            raise LocalProtocolError("this view of the anchor was released")
        return self._flat


class AnchorStore:
    """Anchor generations and momentum of a run in memory. Leased ones are never overwritten."""

    def __init__(
        self, layout: Layout, settings: RunSettings, initial: Callable[[Tensor], None]
    ) -> None:
        self.layout = layout
        self.round = self.samples = 0
        self.lag = 0.0
        self._step = OuterStep(settings.effective_outer, layout)
        numel = self._step.state_numel(layout.numel)
        self.momentum = (
            torch.zeros(numel, dtype=torch.float32, device="cpu")
            if self._step.needs_momentum
            else None
        )
        self.anchor = torch.empty(layout.numel, dtype=torch.float32, device="cpu")
        initial(self.anchor)
        self._free: list[Tensor] = []
        self._leases: dict[int, int] = {}  # id of a generation's tensor: how many leases are out

    def lease(self) -> AnchorLease:
        """A lease on the newest generation."""
        flat = self.anchor
        self._leases[id(flat)] = self._leases.get(id(flat), 0) + 1

        def give_back() -> None:
            self._leases[id(flat)] -= 1
            if not self._leases[id(flat)]:
                del self._leases[id(flat)]
                if flat is not self.anchor:
                    self._free.append(flat)

        return AnchorLease(flat, self.round, give_back, self.samples, self.lag)

    def commit(self, mean: Tensor, reported: Reported = ()) -> None:
        """Apply the outer step with this mean; ``reported``: what its contributors report. The
        result is the newest generation.
        """
        old, new = self.anchor, self._spare()
        self._step.apply(old, mean, self.momentum, new, reported)
        self.samples += sum(weight for weight, _ in reported)
        self.lag = median_lag([reading for _, reading in reported])
        self._turn(new, self.round + 1)

    def replace(self, anchor: Tensor, momentum: Tensor, round_: int, samples: int) -> None:
        """Make copies of these the newest state. Empty ``momentum``: a run without any."""
        self.samples, self.lag = samples, 0.0
        new = self._spare()
        new.copy_(anchor)
        if self.momentum is not None:
            self.momentum.copy_(momentum)
        self._turn(new, round_)

    def _spare(self) -> Tensor:
        return (
            self._free.pop()
            if self._free
            else torch.empty(self.layout.numel, dtype=torch.float32, device="cpu")
        )

    def _turn(self, new: Tensor, round_: int) -> None:
        old, self.anchor, self.round = self.anchor, new, round_
        if id(old) not in self._leases:
            self._free.append(old)


class MemoryShelf:
    """A `collectives.script_swarm.Shelf` that ends with the process."""

    def __init__(self) -> None:
        self._data: bytes | None = None

    def load(self) -> bytes | None:
        return self._data

    def save(self, data: bytes) -> None:
        self._data = data


class Alone:
    """An operation over one member. Implements `Operating`."""

    def __init__(
        self, op_id: str, members: tuple[PeerId, ...], result: Tensor, outcome: Outcome
    ) -> None:
        self.op_id, self.members, self.numel = op_id, members, result.numel()
        self._result, self._outcome = result, outcome

    def done(self) -> bool:
        """At once."""
        return True

    def wait(self, timeout_s: float | None = None) -> Outcome:
        return self._outcome

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        destination.view(-1).copy_(self._result[start : start + destination.numel()])

    def release(self) -> None:
        """Nothing is held."""

    def cancel(self) -> None:
        """It is over."""


def _reduced_alone(flat: Tensor, codec: str) -> Tensor | None:
    """The result of an operation whose only member gives ``flat``: encoded as a contribution and
    once more as a result, as a run does it. None where it cannot be encoded. Raises ConfigError for
    an unknown codec.
    """
    chunking = Chunking(codec, flat.numel(), chunk_elements(codec, flat.numel()))
    values = flat.to("cpu", copy=True)
    for step in (chunking, chunking.results):
        encoded = EncodedVector(step, memoryview(bytearray(step.nbytes)))
        if not encoded.encode(values):
            return None
        for _ in step.decode(encoded.data, values):
            pass
    return values


class SoloSwarm:
    """A run whose only member is this script: no node, no network, the same outer steps. Use it to
    try settings, or to keep one script for both cases. Implements `Swarm`; obeys torch's Stateful.

    >>> import torch
    >>> from atoll.collectives.swarm import RunSettings
    >>> from atoll.optim import SoloSwarm, attach
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = attach(model, optimizer, SoloSwarm(RunSettings(sync_every=5, rounds=2)))
    >>> while not sync.done:
    ...     optimizer.zero_grad()
    ...     model(torch.ones(8, 4)).square().mean().backward()
    ...     optimizer.step()
    >>> sync.round
    2
    """

    alone = True  # nobody else ever comes

    def __init__(
        self, settings: RunSettings | None = None, *, peer: str = "solo", run_id: str = "solo"
    ) -> None:
        self.settings = settings if settings is not None else RunSettings(codec="fp32")
        self.peer = PeerId(peer)
        self.run_id = RunId(run_id)
        self.reported: dict[str, float] = {}
        self._refused = Warned("swarm.report()")
        self._store: AnchorStore | None = None
        self._frozen: Tensor | None = None
        self._shelf = MemoryShelf()
        self._operations = set[str]()
        self._counted = array("Q", [0])  # samples in all rounds up to each
        self._closed = self._left = False

    def shelf(self) -> MemoryShelf:
        """It ends with this object."""
        return self._shelf

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> AnchorLease:
        """The first call founds the run."""
        self._check_open()
        if self._store is None:
            self._store = AnchorStore(layout, self.settings, initial)
        elif self._store.layout != layout:
            check_base(layout, self._store.layout)
            raise ModelMismatchError(
                "your model is not this run's model:\n"
                + "\n".join(differences(layout, self._store.layout)),
                hint="Attach the model the run was opened with, or make another SoloSwarm.",
            )
        return self._store.lease()

    def anchor(self) -> AnchorLease:
        return self._opened().lease()

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> SettledPending[Outcome]:
        """The round is decided when this returns; when ``write`` raises nothing has happened."""
        store = self._opened()
        if self._left:
            raise SwarmClosedError(
                "this member has left the run", hint="Make another SoloSwarm to train on."
            )
        if (samples := sample_count(samples)) < 1:
            raise LocalProtocolError(f"a contribution of {samples} samples; at least 1 is needed")
        if base is not None and base != store.round:
            return SettledPending(
                Outcome(
                    "lost",
                    store.round,
                    reason=f"refused: it was made on the anchor of round {base}",
                )
            )
        started = time.monotonic()
        if self._frozen is None:
            self._frozen = torch.empty(store.layout.numel, dtype=torch.float32, device="cpu")
        write(self._frozen)
        if not bool(torch.isfinite(self._frozen).all()):
            raise LocalProtocolError(
                f"not finite: {why_refused(self._frozen, store.layout, 'fp32')}; "
                "nothing was committed"
            )
        mean = self._frozen
        # What the codec loses will come again; the contribution stays as it was written.
        if self.settings.has_feedback:
            mean = torch.empty_like(mean)
            as_decoded(contribution_grid(store.layout, self.settings), self._frozen, mean)
        outer = self.settings.effective_outer
        store.commit(mean, [(samples, reading_of(mean, store.layout, outer, loss, lag))])
        self._counted.append(self._counted[-1] + samples)
        share = Share(self.peer, samples)
        return SettledPending(
            Outcome(
                "committed",
                store.round,
                (share,),
                counted=True,
                elapsed_s=time.monotonic() - started,
            )
        )

    @property
    def closing(self) -> int:
        """Nobody else is here."""
        return 0

    @property
    def model_folder(self) -> None:
        """No node has it."""

    @property
    def paused(self) -> str:
        """Never."""
        return ""

    def buffer(self, numel: int) -> Tensor:
        """An ordinary tensor. Raises LocalProtocolError as that of a run."""
        return torch.zeros(buffer_length(numel), dtype=torch.float32, device="cpu")

    def vanished(self, flat: Tensor, codec: str) -> float:
        return vanished_share(flat, codec)

    def operate(self, call: Call, source: Tensor) -> Alone:
        """Whatever the reduction, over one member it is ``source`` itself."""
        self._check_open()
        if source.dtype != torch.float32 or not source.is_contiguous() or not source.numel():
            raise LocalProtocolError(f"{call.name} takes a non-empty float32 tensor, contiguous")
        if call.op_id in self._operations:
            raise LocalProtocolError(f"{call.name} was called already", hint=OWN_NAME)
        codec = operation_codec(call.reducer, call.codec)
        if fault := codec_fault(call.reducer, codec):
            raise ConfigError(f"{call.name}: {fault}", key="codec")
        result = _reduced_alone(source.detach().view(-1), codec)
        self._operations.add(call.op_id)
        finite = result is not None
        rule = parse_reducer(call.reducer)
        if call.weight and finite and (rule is None or (rule.by_coordinate and not rule.f)):
            outcome = Outcome(
                "committed",
                0,
                (Share(self.peer, call.weight),),
                counted=True,
                config="solo",
                members=1,
            )
        else:
            why = (
                "nobody has given anything"
                if not call.weight
                else "a robust rule needs more members than one"
            )
            outcome = Outcome("open", 0, reason=why if finite else UNFIT)
        given = source.detach().view(-1).clone() if result is None else result
        return Alone(call.op_id, (self.peer,), given, outcome)

    def all_reduce(
        self,
        flat: Tensor,
        *,
        op_id: str,
        op: Reduction = "mean",
        weight: int = 1,
        deadline_s: float = 60.0,
        codec: str = "",
        everyone: bool = False,
    ) -> Handle[Outcome]:
        return all_reduce(
            self,
            flat,
            op_id=op_id,
            op=op,
            weight=weight,
            deadline_s=deadline_s,
            codec=codec,
            everyone=everyone,
        )

    def members(self) -> Sequence[PeerView]:
        self._check_open()
        return (
            PeerView(self.peer, self._store.round if self._store is not None else 0, True, "self"),
        )

    def tallies(self, first: int) -> Sequence[Tally]:
        """After `load_state_dict` the rounds before it are one."""
        me, counted = Member(self.peer, 0), self._counted
        rounds = range(first, min(first + TALLIES, len(counted)))
        return [
            Tally(at, at, ((me, counted[at] - counted[at - 1]),) if at else (), (me,))
            for at in rounds
        ]

    def next_number(self, name: str, least: int = 0) -> int:
        while f"{name}/{least}" in self._operations:
            least += 1
        return least

    def shard(self, loader: Any) -> Shard:
        from .data.shard import Shard

        return Shard(self, loader)

    @property
    def round(self) -> int:
        """Committed rounds, 0 before `open`."""
        return self._store.round if self._store is not None else 0

    def report(self, metrics: Mapping[str, float]) -> None:
        """Kept in ``reported``."""
        self.reported.update(self._refused.taken(metrics))

    def leave(self) -> None:
        self._left = True

    def close(self) -> None:
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """Round, samples, anchor and momentum (copies; an empty tensor where the outer step has
        none). Needs `open` first.
        """
        store = self._opened()
        momentum = (
            store.momentum
            if store.momentum is not None
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        return {
            "round": store.round,
            "samples": store.samples,
            "anchor": store.anchor.clone(),
            "momentum": momentum.clone(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back or forward to a saved state. Raises OutOfDateError when it is of another model or
        outer optimizer.
        """
        store = self._opened()
        anchor, momentum = state_dict["anchor"], state_dict["momentum"]
        expected = store.momentum.numel() if store.momentum is not None else 0
        if anchor.numel() != store.layout.numel or momentum.numel() != expected:
            raise OutOfDateError(
                f"the saved state has {anchor.numel()} parameters and {momentum.numel()} momentum "
                f"values, this run {store.layout.numel} and {expected}"
            )
        store.replace(anchor, momentum, int(state_dict["round"]), int(state_dict.get("samples", 0)))
        self._counted = array("Q", [0] * store.round + [int(state_dict.get("samples", 0))])

    def _check_open(self) -> None:
        if self._closed:
            raise SwarmClosedError("this swarm was closed")

    def _opened(self) -> AnchorStore:
        self._check_open()
        if self._store is None:
            raise LocalProtocolError("open() comes first")
        return self._store
