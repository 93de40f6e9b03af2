"""One member on several cards of a machine: a process a card, the model in shards between them
(FSDP2, `fully_shard`), and everything else as with one.

All processes read the same documents and lay them out alike; each takes its share of a step's
micro-batches, and what they count is added up. So a step is that of one process on the same
documents, within rounding. The first card's process reads the data, has the swarm, writes what is
kept and speaks; the others hear from it what to do (`optim.ranks`). `loop` knows `Cards` alone:
with one card its methods do nothing. Who starts the processes: `launching`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ....collectives.errors import AtollError, ConfigError, StateError
from ....optim.ranks.talk import WAIT, Ranks
from .keeping import read_state, write_state
from .packing import Document, PackedBatch
from .preparing import DataSummary, PreparedData, StorePlace, TokenStore

T = TypeVar("T")


class Cards:
    """One process on one device, `ONE_CARD`. What several do otherwise says `ShardedCards`, method
    by method; whatever one of its processes calls, all do.
    """

    size = 1
    rank = 0
    casts = False
    """Whether what is calculated in bfloat16 is so without autocast."""

    def load(self, make: Callable[[], T]) -> T:
        """The model that ``make`` loads, ready for `FineTuning`."""
        return make()

    def shard(self, model: Any) -> None:
        """Cut the model among the cards, where it is not cut yet."""

    def let_go(self, model: nn.Module) -> None:
        """Forget gathered parameters: those of `parameters()` are then the ones that train."""

    def forward(self, module: Any, method: Callable[..., T]) -> Callable[..., T]:
        """``method``, which uses parameters of ``module`` without calling it."""
        return method

    def read(self, make: Callable[[], PreparedData]) -> PreparedData:
        """The data that ``make`` reads at the first card, at all."""
        return make()

    def decide(self, choice: bool) -> bool:
        """What the first card says, at all."""
        return choice

    def deal(self, batches: Sequence[PackedBatch]) -> list[tuple[PackedBatch, bool]]:
        """This card's micro-batches of ``batches``, and whether each counts."""
        return [(batch, True) for batch in batches]

    def add(self, number: float) -> float:
        """The sum over all cards, in float64."""
        return number

    def share(self, count: int) -> int:
        """This card's share of a number of samples."""
        return count

    def join(self, document: Document) -> list[Document]:
        """The documents that all cards have been given, each one."""
        return [document]

    def keep(self, path: Path, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Keep ``state``, which is the same at all cards but for the shards in it, and ``own``,
        which is this process's. Raises StorageError.
        """
        write_state(path, {**state, **own})

    def kept(self, path: Path) -> dict[str, Any] | None:
        """What was kept, by however many cards, as one dictionary; None where nothing was. Of as
        many cards each goes on as it was. Of another number the first goes on with what the first
        had, and the others begin their random numbers anew (``random`` is None). Raises StateError
        where values hang on the number.
        """
        state = read_state(path)
        if state is None:
            return None
        others = state.pop("others", [])
        if len(others) == self.size - 1:
            return state if not self.rank else {**state, **others[self.rank - 1]}
        for strand in ((state["attachment"] or {}).get("strands") or {}).values():
            if any(isinstance(value, Tensor) for value in strand.values()):
                raise StateError(
                    f"{path} was kept by {len(others) + 1} cards, and {self.size} go on",
                    why="This run's method keeps values of each card's own shards.",
                    hint=f"--devices {len(others) + 1}, or begin without it: mv {path} {path}.old",
                )
        return state if not self.rank else {**state, "random": None}

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Give a parameter the values of a whole tensor."""
        parameter.copy_(value)

    def resume(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Let an optimizer go on with a state of whole tensors."""
        optimizer.load_state_dict(state)


ONE_CARD = Cards()


class ShardedCards(Cards):
    """One of several processes, each on its card; torch.distributed's group of all is made here."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        """``store``: a file of their own by which they find one another. Waits for all."""
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
        self.casts = self.device.type == "cuda"
        # gloo carries what is on the host on every machine
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        where = f"file://{store}"
        dist.init_process_group(
            backend, init_method=where, rank=rank, world_size=size, timeout=WAIT
        )
        self._ranks = Ranks()
        self._mesh = init_device_mesh(self.device.type, (size,))
        torch.manual_seed(torch.initial_seed() + rank)  # or all would drop out the same

    def close(self) -> None:
        """At the end of all."""
        self._ranks.agreed("")  # whoever goes first takes the connections of the others with it
        dist.destroy_process_group()

    # ---- the model

    def load(self, make: Callable[[], T]) -> T:
        """One process after another, each cutting its copy before the next loads one: the host has
        room for one. What one of them raises ends all.
        """
        made, fault = list[T](), None
        for turn in range(self.size):
            if turn == self.rank:
                try:
                    made.append(make())
                    self.shard(cast("Any", made[0]).model)
                except AtollError as error:
                    fault = error
            if said := self._ranks.agreed(fault.message if fault is not None else ""):
                raise fault or ConfigError(said, key="model")
        return made[0]

    def shard(self, model: Any) -> None:
        """The layers, one by one, then the rest: embeddings, last norm and head, of which two may
        be one tensor. Shards stay of their type. Gathered on a GPU they are bfloat16: copies that
        autocast makes would stay until the backward pass. Gradients are added up in float32.
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        if isinstance(plain, FSDPModule):
            return
        layers = set[str](getattr(plain, "_no_split_modules", None) or ())
        short = torch.bfloat16 if self.casts else None
        policy = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=torch.float32)
        found = [each for each in plain.modules() if type(each).__name__ in layers]
        for module in [*reversed(found), plain]:
            fully_shard(module, mesh=self._mesh, mp_policy=policy)

    def let_go(self, model: nn.Module) -> None:
        """A forward pass without a backward one leaves the root's parameters gathered."""
        from ....optim.ranks.slices import reshard

        reshard(model)

    def forward(self, module: Any, method: Callable[..., T]) -> Callable[..., T]:
        """FSDP2 gathers the module's parameters before it, and cuts its gradients after."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        module.forward_of_recipe = method
        register_fsdp_forward_method(module, "forward_of_recipe")
        return module.forward_of_recipe

    # ---- data, and what is counted

    def read(self, make: Callable[[], PreparedData]) -> PreparedData:
        """The first card's process reads; the others open the files in which its tokens lie."""
        made = list[PreparedData]()

        def places() -> tuple[StorePlace, StorePlace]:
            made.append(make())
            return made[0].training.place(), made[0].held_out.place()

        training, held_out = self._ranks.tell(places, tuple[StorePlace, StorePlace])
        opened, fault = list[TokenStore](), ""
        try:
            opened = [] if made else [TokenStore.at(each) for each in (training, held_out)]
        except OSError as error:
            fault = f"card {self.rank} cannot read the data of card 0: {error}"
        if said := self._ranks.agreed(fault):
            raise ConfigError(
                said,
                key="devices",
                why="Processes of one user open one another's files by /proc, which Linux has.",
                hint="--devices 1",
            )
        return made[0] if made else PreparedData(opened[0], opened[1], DataSummary(), "")

    def decide(self, choice: bool) -> bool:
        return self._ranks.tell(lambda: choice, bool)

    def deal(self, batches: Sequence[PackedBatch]) -> list[tuple[PackedBatch, bool]]:
        """In turn. All make as many passes, since each gathers what it needs from all: who has none
        left makes the first again, and nothing of it counts.
        """
        mine = [(batch, True) for batch in batches[self.rank :: self.size]]
        passes = -(-len(batches) // self.size)
        return mine + [(batch, False) for batch in batches[: passes - len(mine)]]

    def add(self, number: float) -> float:
        sums = torch.tensor([number], dtype=torch.float64, device="cpu")
        dist.all_reduce(sums)
        return float(sums[0])

    def share(self, count: int) -> int:
        return count // self.size + (self.rank < count % self.size)

    def join(self, document: Document) -> list[Document]:
        ids, learned = document
        mine = (ids << 1 | learned).numpy().astype("<i4").tobytes()
        found = [np.frombuffer(each, "<i4") for each in self._ranks.gathered(mine, bytes)]
        tensors = [torch.from_numpy(each.astype(np.int64)) for each in found]
        return [(each >> 1, (each & 1).bool()) for each in tensors]

    # ---- what is kept

    def keep(self, path: Path, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Written as one process would, whole tensors, by the first card; beside them, as
        ``others``, what the processes of the other cards have of their own.
        """
        whole = self._whole(state)
        parts = [path.with_name(f"{path.stem}-card{rank}.part") for rank in range(self.size)]

        def write() -> None:
            others = [read_state(part) for part in parts[1:]]
            write_state(path, {**whole, **own, "others": others})

        try:
            self._together(lambda: write_state(parts[self.rank], own) if self.rank else None)
            self._together(lambda: None if self.rank else write())
        finally:
            parts[self.rank].unlink(missing_ok=True)

    def put(self, parameter: Tensor, value: Tensor) -> None:
        mine, target = self._cut(value, parameter), cast("Any", parameter)
        target.to_local().copy_(cast("Any", mine).to_local())

    def resume(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """A state's tensors are cut as the parameters that they belong to."""
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        at = 0
        for part in state.get("each", [state]):  # of an optimizer in backward one a parameter
            for index, values in part["state"].items():
                parameter = trained[at + int(index)]
                for name, value in values.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        values[name] = self._cut(value, parameter)
            at += sum(len(group["params"]) for group in part["param_groups"])
        optimizer.load_state_dict(state)

    def _whole(self, value: Any) -> Any:
        """Every tensor of a state put together at the first card, in host memory; elsewhere it is
        only asked for.
        """
        if hasattr(value, "full_tensor"):
            full = value.full_tensor()
            return full.cpu() if not self.rank else None
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return {key: self._whole(each) for key, each in pairs}
        if isinstance(value, list | tuple):
            return type(value)(self._whole(each) for each in cast("Sequence[Any]", value))
        return value

    def _cut(self, value: Tensor, like: Any) -> Tensor:
        """A whole tensor, which all processes have, as this one's shard."""
        from torch.distributed.tensor import distribute_tensor

        moved = value.to(device=self.device, dtype=value.dtype)
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)

    def _together(self, act: Callable[[], None]) -> None:
        """Each process does this; what one raises is raised by all."""
        fault: AtollError | None = None
        try:
            act()
        except AtollError as error:
            fault = error
        if said := self._ranks.agreed(fault.message if fault is not None else ""):
            raise fault or StateError(said)
