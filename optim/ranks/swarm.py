"""RankSwarm: rank 0's swarm as every rank of the job sees it, through its own slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor, nn

from ...collectives.codecs.vanished import vanished_share
from ...collectives.errors import ConfigError, LocalProtocolError
from ...collectives.group import Evaluated
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import Layout
from ...collectives.outcomes import AnchorView, Outcome, Pending, Spent, Tally
from ...collectives.script_swarm import Call, PeerView, Reduction, Swarm
from ...collectives.swarm import RunSettings
from ..data.shard import Shard
from ..model.flat import FlatVector
from .slices import RankVector, Slices, reshard, slice_model
from .talk import Ranks

WRITE = "write"  # rank 0's: send your slices


class _SwarmHead(msgspec.Struct):
    """What is fixed of a swarm."""

    peer: PeerId
    run_id: RunId
    settings: RunSettings
    model_folder: str  # "": None


class RankView:
    """One rank's slices of an anchor; an AnchorView. `digest` is the whole anchor's, and asked by
    all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        head: tuple[int, int, float, int],
        values: Tensor,
        view: AnchorView | None,
    ) -> None:
        self.round, self.samples, self.lag, self.steps = head
        self.numel = values.numel()
        self._ranks, self._values, self._view = ranks, values, view
        self._digest = ""

    @property
    def digest(self) -> str:
        if not self._digest:
            self._digest = self._ranks.tell(
                lambda: self._view.digest if self._view is not None else "", str
            )
        return self._digest

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        destination.copy_(self._values[start : start + destination.numel()])

    def release(self) -> None:
        """Of each rank by itself."""
        if self._view is not None:
            self._view.release()


class RankPending:
    """A contribution of the job; a Pending."""

    def __init__(self, ranks: Ranks, pending: Pending[Outcome] | None) -> None:
        self._ranks, self._pending = ranks, pending

    def done(self) -> bool:
        return self._ranks.tell(lambda: self._at_rank_0.done(), bool)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        return self._ranks.tell(lambda: self._at_rank_0.wait(timeout_s), Outcome)

    @property
    def _at_rank_0(self) -> Pending[Outcome]:
        assert self._pending is not None
        return self._pending


class RankSwarm:
    """A Swarm of the job's slices (`place` first). Each call is one of all ranks, but for `report`
    and `close`, which are rank 0's.
    """

    def __init__(self, swarm: Swarm | None, ranks: Ranks) -> None:
        """``swarm``: rank 0's; None at the others, or ConfigError is raised at all ranks."""
        self.ranks = ranks
        if fault := ranks.agreed(
            f"rank {ranks.rank} has a swarm of its own" if ranks.rank and swarm is not None else ""
        ):
            raise ConfigError(
                fault,
                key="swarm",
                why=(
                    "A job of several ranks is one peer; each rank would join as a "
                    "peer with the same data."
                ),
                hint="swarm = join(INVITE) if torch.distributed.get_rank() == 0 else None",
            )
        self._swarm = swarm
        head = ranks.tell(
            lambda: _SwarmHead(
                self._at_rank_0.peer,
                self._at_rank_0.run_id,
                self._at_rank_0.settings,
                str(self._at_rank_0.model_folder or ""),
            ),
            _SwarmHead,
        )
        self.peer, self.run_id, self.settings = head.peer, head.run_id, head.settings
        self.model_folder = Path(head.model_folder) if head.model_folder else None
        self._model: nn.Module | None = None
        self._slices: Slices | None = None
        self._newest: tuple[tuple[int, int, float, int], Tensor] | None = None

    def place(self, model: nn.Module, flat: FlatVector) -> RankVector:
        """Cut ``flat``, the vector of the whole model: returns this rank's slices. Raises
        ConfigError at all ranks for what cannot be cut, or for settings that need whole vectors."""
        self._model = model
        self._slices, mine = slice_model(model, flat, self.ranks)
        settings, several, cut = self.settings, "job of several ranks", "sharded model"
        for refused, what, who, key in (
            (settings.fragments > 1, "fragments", several, "$.exchange.fragments"),
            (
                settings.method == "gradient_averaging",
                "gradient averaging",
                several,
                "$.train.method",
            ),
            (
                settings.has_feedback and not self._slices.whole,
                "error feedback",
                cut,
                "$.exchange.feedback",
            ),
        ):
            if refused:
                raise ConfigError(
                    f"the run uses {what}, which a {who} cannot do yet",
                    key=key,
                    hint="Attach in a job of one process, or make a run without it.",
                )
        return mine

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> RankView:
        """``layout`` and ``initial`` are of this rank's slices."""
        slices = self._sliced()
        assert layout == slices.mine
        view = self._written(lambda whole: self._at_rank_0.open(slices.layout, whole), initial)
        self._newest = None
        return self._lease(view)

    def anchor(self) -> RankView:
        view = self._at_rank_0_or_none(lambda swarm: swarm.anchor())
        return self._lease(view)

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> RankPending:
        """``write`` fills the vector of this rank's slices, ``samples`` are those of all ranks."""
        pending = self._written(
            lambda whole: self._at_rank_0.contribute(
                samples=samples, write=whole, base=base, loss=loss, lag=lag, hold_s=hold_s
            ),
            write,
        )
        return RankPending(self.ranks, pending)

    @property
    def closing(self) -> int:
        return self.ranks.tell(lambda: self._at_rank_0.closing, int)

    @property
    def paused(self) -> str:
        """Rank 0's."""
        return self.ranks.tell(lambda: self._at_rank_0.paused, str)

    @property
    def connected(self) -> bool:
        """Whether rank 0 has its node."""
        return self.ranks.tell(lambda: bool(getattr(self._at_rank_0, "connected", True)), bool)

    @property
    def trouble(self) -> str:
        """Why not."""
        return self.ranks.tell(lambda: str(getattr(self._at_rank_0, "trouble", "")), str)

    def members(self) -> Sequence[PeerView]:
        return self.ranks.tell(lambda: list(self._at_rank_0.members()), list[PeerView])

    @property
    def spent(self) -> Spent | None:
        """Of the job's privacy: rank 0's."""
        return self.ranks.tell(lambda: getattr(self._at_rank_0, "spent", None), Spent | None)

    def tallies(self, first: int) -> Sequence[Tally]:
        return self.ranks.tell(lambda: list(self._at_rank_0.tallies(first)), list[Tally])

    def shard(self, loader: Any) -> Shard:
        """This rank's part of the job's batches."""
        return Shard(self, loader)

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Rank 0's ``clock`` at all ranks."""
        return lambda: self.ranks.tell(clock, float)

    def written(self) -> None:
        """Live parameters were replaced in mid-training; a forward may have left gathered ones."""
        if self._model is not None:
            reshard(self._model)

    def report(self, metrics: Mapping[str, float]) -> None:
        """What rank 0 has logged."""
        if self._swarm is not None:
            self._swarm.report(metrics)

    @property
    def first_batch(self) -> Callable[[int, bytes], None] | None:
        """Rank 0's: it reads for the job."""
        return getattr(self._swarm, "first_batch", None)

    @property
    def read_batch(self) -> Callable[[bytes], None] | None:
        """Rank 0's."""
        return getattr(self._swarm, "read_batch", None)

    def leave(self) -> None:
        self.ranks.tell(lambda: self._at_rank_0.leave(), None)

    def close(self) -> None:
        if self._swarm is not None:
            self._swarm.close()

    def buffer(self, numel: int) -> Tensor:
        """Refused, as the next two: a job's ranks have torch.distributed among themselves."""
        self._refuse("buffer")

    def vanished(self, flat: Tensor, codec: str) -> float:
        return vanished_share(flat, codec)

    def operate(self, call: Call, source: Tensor) -> Any:
        """Refused."""
        self._refuse(call.name)

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
    ) -> Any:
        """Refused."""
        self._refuse("all_reduce")

    def _refuse(self, what: str) -> NoReturn:
        raise LocalProtocolError(
            f"{what} is not for all ranks of a job",
            hint="call it at rank 0, on the swarm that it joined",
        )

    @property
    def _at_rank_0(self) -> Swarm:
        assert self._swarm is not None
        return self._swarm

    def _sliced(self) -> Slices:
        if self._slices is None:
            raise LocalProtocolError("place() comes first")
        return self._slices

    def _at_rank_0_or_none(self, ask: Callable[[Swarm], Any]) -> Any:
        """What rank 0 gets, and None at the others; its error at all."""
        found = list[Any]()
        self.ranks.tell(lambda: found.append(ask(self._at_rank_0)), None)
        return found[0] if found else None

    def _written(
        self, ask: Callable[[Callable[[Tensor], None]], Any], write: Callable[[Tensor], None]
    ) -> Any:
        """Rank 0 asks with a writer of the whole vector; when that is called, every rank writes its
        slices. What rank 0 gets; None elsewhere.
        """
        ranks, slices, found = self.ranks, self._sliced(), list[Any]()
        mine = torch.empty(slices.mine.numel, dtype=torch.float32, device="cpu")

        def whole(out: Tensor) -> None:
            ranks.say(WRITE)
            write(mine)
            slices.put(0, mine, out)
            strange = list[str]()
            for rank in range(1, ranks.size):
                theirs = torch.empty(slices.of(rank).numel, dtype=torch.float32, device="cpu")
                ranks.receive(theirs, rank)
                if name := slices.put(rank, theirs, out):
                    strange.append(
                        f"{name} is not the same at rank {rank} as at the ranks before it"
                    )
            if strange:
                raise ConfigError(
                    strange[0],
                    key="model",
                    why=(
                        "Each rank trains a model of its own, and only one of "
                        "them would be contributed."
                    ),
                    hint="Wrap the model in all ranks: DistributedDataParallel or fully_shard.",
                )

        if ranks.rank == 0:
            ranks.tell(lambda: found.append(ask(whole)), None)
            return found[0]
        while ranks.hear(str | None) == WRITE:
            write(mine)
            ranks.send(mine, 0)
        return None

    def _lease(self, view: AnchorView | None) -> RankView:
        """A view of every rank's slices of rank 0's view; they travel once a round."""
        ranks, slices = self.ranks, self._sliced()
        head = ranks.tell(
            lambda: (
                (view.round, view.samples, view.lag, view.steps)
                if view is not None
                else (0, 0, 0.0, 0)
            ),
            tuple[int, int, float, int],
        )
        if self._newest is None or self._newest[0] != head:
            values = torch.empty(slices.mine.numel, dtype=torch.float32, device="cpu")
            if view is None:
                ranks.receive(values, 0)
            else:
                slices.cut(0, view, values)
                for rank in range(1, ranks.size):
                    theirs = torch.empty(slices.of(rank).numel, dtype=torch.float32, device="cpu")
                    slices.cut(rank, view, theirs)
                    ranks.send(theirs, rank)
            self._newest = head, values
        return RankView(ranks, head, self._newest[1], view)


def rank_swarm(swarm: Swarm | None, check: Callable[[object], None]) -> RankSwarm:
    """The RankSwarm of this job. ``check`` runs on rank 0's swarm; all ranks raise its error."""
    ranks = Ranks()
    ranks.tell(lambda: check(swarm), None)
    return RankSwarm(swarm, ranks)
