"""What becomes of buffers that no round averages: equal at all members, or learnt by one of them.

The class of a buffer is decided before the model has seen a batch (`model.buffers`). Where nobody
has decided, two things tell a constant from what is learnt:

* **Members compare** what they brought to `attach`, by `SKETCH` numbers a buffer, in a gather at
  rounds 1, 2, 4, … (`due`). A member that lies about its own is named as one that differs: nothing
  else comes of it. Of floats length and a random projection are compared, and the same of their
  logarithms, to within `NEAR`: the same table of sines differs in its last bits between processors,
  and in type between members.
* **Each member looks** whether its own have changed since then, after its first step and at those
  rounds. What changes is learnt, unless it is a cache (not persistent, or of another size by now),
  a count, or an average of the parameters.

Both are told once, in the script and to its node (`node.run.verdicts`, V18), with the buffers'
names.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor, nn

from ...collectives.api import Gathered, Handle, all_gather
from ...collectives.errors import AtollError, LocalProtocolError
from ...collectives.identifiers import PeerId
from ...collectives.script_swarm import Swarm
from ...collectives.swarm import RunSettings
from ..model.buffers import ModelBuffer
from ..model.flat import buffers_of, unwrap
from ..model.tensor_file import bytes_of
from .saving import some

logger = logging.getLogger("atoll")

MOST = 256  # buffers that are compared; models have many that are alike
SKETCH = 5  # float32 a buffer: elements, two lengths, two projections; or parts of a digest
NEAR = 0.01  # of the length
SKETCHED = 1 << 18  # elements of a buffer that a sketch is made of
EVERY = 64  # rounds, once they are so many
WAIT_S = 30.0  # for a gather, which no round waits for
ALIKE = 0.25  # of a parameter's length: how far its average lies from it
MOST_NAMED = 4  # buffers in a line and in a report
NAME = 48  # characters of a buffer's name in a report, its end


def due(round: int) -> bool:
    """Whether buffers are compared at the end of this round: all members know without asking."""
    return round > 0 and (round % EVERY == 0 if round > EVERY else not round & (round - 1))


@dataclass(slots=True)
class _Watched:
    """One buffer as it was at `attach`. ``told``: there is nothing more to say of it."""

    name: str
    declared: bool  # equal at all members
    persistent: bool
    shape: torch.Size
    dtype: torch.dtype
    digest: bytes
    told: bool = False


class BufferWatch:
    """Of one attachment: `stepped` after its steps, `round_over` at the end of rounds, `close` when
    it ends.
    """

    def __init__(self, model: nn.Module, swarm: Swarm, *, alone: bool) -> None:
        """``alone``: members do not compare: a job of several ranks has no gather."""
        self._model, self._swarm = weakref.ref(model), swarm
        self._private = swarm.settings.privacy is not None
        buffers = buffers_of(model, swarm.settings.buffers)
        watched = [b for b in buffers if b.kind in ("same", None) and _readable(b.tensor)]
        self._watched = [
            _Watched(b.name, b.kind == "same", b.persistent, t.shape, t.dtype, _digest(t))
            for b, t in ((b, b.tensor) for b in watched)
        ]
        compared = [] if alone or not compares(swarm.settings) else watched[:MOST]
        self._rows = {b.name: _sketch(b.tensor) for b in compared}
        self._exact = {b.name for b in compared if not b.tensor.is_floating_point()}
        self._gather: Handle[Gathered] | None = None
        self._differ = set[str]()  # that others have otherwise, as last told
        self._looked = self._told_other = False
        self._tell_classes(buffers)

    def _tell_classes(self, buffers: Sequence[ModelBuffer]) -> None:
        """Say how buffers take part, where that is more than running statistics and counters."""
        averaged = [b.name for b in buffers if b.kind == "mean"]
        own = [b.name for b in buffers if b.kind == "own" and not b.name.endswith("_tracked")]
        if own or self._watched or any(b.declared for b in buffers):
            logger.info(
                "buffers: averaged %s; equal at all members, and compared, %s; this member's own "
                "%s",
                some(averaged) or "none",
                some([each.name for each in self._watched]) or "none",
                some(own) or "none",
            )

    # ---- what changes here

    def stepped(self) -> None:
        """An inner step was made."""
        if not self._looked:
            self._looked = True
            self.look()

    @torch.no_grad()
    def look(self) -> None:
        """Find what has changed since `attach`."""
        if (model := self._model()) is None or all(each.told for each in self._watched):
            return
        live = {each.name: each.tensor for each in buffers_of(model, {})}
        changed = list[_Watched]()
        for each in self._watched:
            now = live.get(each.name)
            if each.told or now is None or not _readable(now):
                continue
            if now.dtype != each.dtype:  # the model was converted
                each.dtype, each.digest = now.dtype, _digest(now)
            elif now.shape != each.shape and each.shape.numel():
                each.told = not each.declared  # a cache that grows
            elif _digest(now) != each.digest:  # empty ones are observers' before the first batch
                each.told = True
                changed.append(each)
        self._tell_changed(model, changed, live)

    def _tell_changed(
        self, model: nn.Module, changed: Sequence[_Watched], live: Mapping[str, Tensor]
    ) -> None:
        same = [each.name for each in changed if each.declared]
        learnt = [
            each.name
            for each in changed
            if not each.declared and each.persistent and _holds_state(live[each.name])
        ]
        if learnt:  # looked for at last: it takes a pass over all parameters
            learnt = [name for name in learnt if not is_average(live[name], model)]
        if same:
            logger.warning(
                'declared "same" in the run\'s manifest, and changed here since attach(): %s. It '
                "is not averaged, so the run's model is another one at each member. In a new run: "
                '[model] buffers = { "%s" = "mean" }, or leave it as it was made',
                some(same),
                same[0],
            )
        if learnt:
            # under [privacy] one bound and one noise do not fit both
            kind = "own" if self._private else "mean"
            logger.warning(
                "learnt here, and not averaged: the buffers %s. Training changes them, and they "
                "are this member's own, so the run's model is another one at each member. In a new "
                "run the manifest declares them: [model] buffers = { %s }; %s",
                some(learnt),
                ", ".join(f'"{name}" = "{kind}"' for name in learnt[:MOST_NAMED])
                + (", …" if len(learnt) > MOST_NAMED else ""),
                "with [privacy] they cannot be averaged"
                if self._private
                else '"own" in place of "mean" keeps them apart on purpose',
            )
        self._tell({f"buffer_learnt/{name[-NAME:]}": 1.0 for name in (*same, *learnt)[:MOST_NAMED]})

    def round_over(self, round: int, peers: int, *, last: bool) -> None:
        """A round is adopted, the ``last`` of the run perhaps; ``peers`` others are there."""
        if last or due(round):
            self.look()
        if last:
            self.close()
        else:
            self._compare(round, peers)

    # ---- what others have

    def _compare(self, round: int, peers: int) -> None:
        """Ask all members what they brought. Take what was asked for before. Waits for nothing."""
        self._collect()
        if not self._rows or not peers or not due(round) or self._gather is not None:
            return
        table = torch.tensor(list(self._rows.values()), dtype=torch.float32)
        with suppress(AtollError):  # not a member yet, or no node: another round asks again
            gather = all_gather(self._swarm, table, op_id=f"buffers {round}", deadline_s=WAIT_S)
            gather.wait(0.0)  # a script may end without it
            self._gather = gather

    def close(self) -> None:
        """Nothing more is asked or told."""
        self._collect()
        if self._gather is not None:
            with suppress(AtollError):
                self._gather.cancel()
            self._gather = None

    def _collect(self) -> None:
        gather = self._gather
        if gather is None or not gather.done():
            return
        self._gather = None
        try:
            tables = gather.wait(0.0).tensors
        except LocalProtocolError as error:  # others call it with another shape
            if not self._told_other:
                self._told_other = True
                logger.warning(
                    "buffers are not compared: members have models with other numbers of them (%s)",
                    error,
                )
            return
        except AtollError:
            return
        self._tell_differing(tables)

    def _tell_differing(self, tables: Mapping[PeerId, Tensor]) -> None:
        learnt = {each.name for each in self._watched if each.told}
        others = {peer: table for peer, table in tables.items() if peer != self._swarm.peer}
        differing = dict[str, list[PeerId]]()
        for index, (name, mine) in enumerate(self._rows.items()):
            if name in learnt:  # and told of as such
                continue
            found = [
                peer
                for peer, table in others.items()
                if not _agree(mine, table[index].tolist(), exact=name in self._exact)
            ]
            if found:
                differing[name] = found
        if new := [name for name in differing if name not in self._differ]:
            peers = sorted({peer for name in new for peer in differing[name]})
            logger.warning(
                "buffers that other members have otherwise than this script: %s, at %s. Buffers do "
                "not travel: make them from the same configuration and seed before attach(), or "
                'declare them in a new run: [model] buffers = { "%s" = "mean" } or "own"',
                some(new),
                some([peer[-8:] for peer in peers]),
                new[0],
            )
        over = self._differ - differing.keys() if others else set[str]()
        self._differ = (self._differ - over) | differing.keys()
        self._tell(
            {f"buffer_differs/{name[-NAME:]}": 0.0 for name in sorted(over)[:MOST_NAMED]}
            | {
                f"buffer_differs/{name[-NAME:]}": float(len(differing[name]))
                for name in new[:MOST_NAMED]
            }
        )

    def _tell(self, metrics: dict[str, float]) -> None:
        if metrics:
            with suppress(AtollError):  # without a node the script has been told
                self._swarm.report(metrics)


def compares(settings: RunSettings) -> bool:
    """Whether members of such a run compare buffers: not where what a site has is nobody's to see,
    nor where members do not meet at the end of a round.
    """
    return not (settings.secure or settings.privacy or settings.sample or settings.arrivals)


def _readable(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def _holds_state(tensor: Tensor) -> bool:
    """Not a count: a flag, or numbers that are learnt."""
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool


def _digest(tensor: Tensor) -> bytes:
    found, flat = blake3(), tensor.detach().reshape(-1)
    for at in range(0, flat.numel(), SKETCHED):
        found.update(bytes_of(flat[at : at + SKETCHED]))
    return found.digest()


def _sketch(tensor: Tensor) -> list[float]:
    """`SKETCH` numbers that tell this buffer from others, float32."""
    if not tensor.is_floating_point():
        digest = blake3(repr(tuple(tensor.shape)).encode() + _digest(tensor)).digest(3 * SKETCH)
        return [float(int.from_bytes(digest[at : at + 3], "big")) for at in range(0, 3 * SKETCH, 3)]
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SKETCHED)][:SKETCHED]
    values = torch.nan_to_num(flat.cpu().double(), nan=0.0, posinf=1e4, neginf=-1e4)
    values = values.clamp(-1e15, 1e15)
    small = values.sign() * torch.log1p(values.abs() * 1e6)  # in which small values count as well
    signs = torch.empty(values.numel(), dtype=torch.float64)
    signs = signs.bernoulli_(generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1)
    numbers = [float(tensor.numel())]
    for each in (values, small):
        numbers += [float(each.norm()), float(signs @ each)]
    return torch.tensor(numbers, dtype=torch.float32).tolist()


def _agree(mine: Sequence[float], theirs: Sequence[float], *, exact: bool) -> bool:
    """NaN agrees with nothing."""
    if exact:
        return list(mine) == list(theirs)
    return mine[0] == theirs[0] and all(
        abs(mine[at] - theirs[at]) <= NEAR * mine[length] + 1e-30
        for length in (1, 3)
        for at in (length, length + 1)
    )


def is_average(buffer: Tensor, model: nn.Module) -> bool:
    """Whether it is near a trained parameter of its shape: an average that follows the parameters,
    of which each member may have its own.
    """
    if not buffer.is_floating_point() or buffer.numel() < 2:
        return False
    for parameter in unwrap(model).parameters():
        if (
            parameter.requires_grad
            and parameter.shape == buffer.shape
            and type(parameter) is nn.Parameter
        ):
            live = parameter.detach().to(buffer)
            if float((buffer.detach() - live).norm()) <= ALIKE * float(live.norm()):
                return True
    return False
