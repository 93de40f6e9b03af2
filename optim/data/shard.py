"""Shard: a DataLoader that reads what is leased to its member. `Swarm.shard` makes it.

    data = swarm.shard(DataLoader(dataset, batch_size=32, num_workers=2))
    while not attachment.done:
        for batch in data:                      # one pass of all members over all samples
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            if attachment.done:
                break

Nothing is agreed on for it: the order of samples follows from the run's id (`order`), whose they
are from its log (`leases`), and where this member stands from what its attachment has not yet had
counted. So there is nothing to save beside the attachment either, and a state that is resumed
exactly goes on with the very next sample.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...collectives.errors import ConfigError, SwarmClosedError
from ...collectives.group import Member
from ...collectives.outcomes import Tally
from ...collectives.script_swarm import Swarm
from .leases import Leases
from .ledger import AttachmentView, SampleLedger, attached_to
from .order import Order
from .spans import Span

logger = logging.getLogger("atoll")

FIRST_PART = 16  # of the data set: what a member keeps before anything is known of its speed
ORDERS = frozenset(
    {"SequentialSampler", "RandomSampler", "SeedableRandomSampler", "DistributedSampler"}
)
"""Samplers, torch's, torchdata's and accelerate's, that put all samples into some order and choose
none: the run's order takes its place."""
STATEFUL = "StatefulDataLoader"  # torchdata's; a shard has nothing to save
_END = object()


class Shard:
    """Batches of one member. Iterating is a pass: it ends where the member's next sample is of
    another epoch than its first one was.

    Batches are always full: the last one of a pass may hold the first samples of the next. What a
    DataLoader's workers have read ahead is thrown away where a round gave it to others. In a job of
    several ranks each has its part of a batch of them all, and all iterate alike.
    """

    def __init__(self, swarm: Swarm, source: Any) -> None:
        """``source``: a DataLoader over a map-style data set, or such a data set, which is then
        read a sample at a time.

        Every member brings the same data set. Raises ConfigError for what has no order of its own
        to give up: streams, samplers that choose, batch samplers; and in a run with ``[secure]``,
        whose members do not learn how many samples a contribution stands for.
        """
        if swarm.settings.secure is not None:
            raise ConfigError(
                "samples cannot be shared out in a run with [secure]",
                why=(
                    "They are shared out by what each contribution is said to stand for, "
                    "and there nobody is told."
                ),
                hint="Each site reads data of its own: an ordinary DataLoader.",
            )
        loader = cast(
            "DataLoader[Any]",
            source if isinstance(source, DataLoader) else DataLoader(source, batch_size=None),
        )
        batch = _batch_of(loader)
        self._swarm = swarm
        self._size = len(cast("Any", loader.dataset))
        self._batch = batch or 1
        self._order = Order(self._size, swarm.run_id)
        self._leases = Leases(self._size // FIRST_PART)
        self._turn = -1  # of the ledger, when the lease was looked up
        self._next = 0  # in this member's stream since the newest entry: what comes out next
        # Positions of the batches that the loader is at work on.
        self._drawn = deque[NDArray[np.int64]]()
        self._checked = True  # since then: whether what was drawn is still this member's
        self._pass = 0
        self._displaced = 0
        self._lost = 0  # of what this member has begun: displaced already
        self._loader = _reordered(loader, self, collated=batch is not None)
        ranks = getattr(swarm, "ranks", None)
        self._rank, self._ranks = (ranks.rank, ranks.size) if ranks is not None else (0, 1)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(endless=False)

    def __len__(self) -> int:
        """Raises TypeError: how many batches of a pass come to this member hangs on the others."""
        raise TypeError(
            "a shard has no len(): how many batches of a pass come to this member is decided as "
            "members train. A schedule goes over the steps of the run, steps_left(swarm) of "
            "atoll.optim, or follows attachment.position; len(loader) of the loader that was "
            "sharded is a pass of one machine alone"
        )

    def __bool__(self) -> bool:
        return True

    def endless(self) -> Iterator[Any]:
        """Pass after pass, for a loop whose epochs have a length of their own. What is given and
        not yet counted at the end of a pass stays this member's.
        """
        return self._batches(endless=True)

    def _batches(self, *, endless: bool) -> Iterator[Any]:
        attachment = self._attachment()
        # What was given and led to no step is given again.
        attachment.ledger.used, attachment.ledger.given, self._turn = (
            True,
            0,
            -1,
        )
        self._follow(attachment)
        self._begin_pass()
        batches: Iterator[Any] | None = None
        while True:
            if self._follow(attachment) or batches is None:
                self._drawn.clear()
                batches = iter(self._loader)
            batch = next(batches, _END)
            if batch is _END and endless:
                self._begin_pass()
                batches = None
                continue
            if batch is _END:
                return
            self._drawn.popleft()
            self._next += self._batch * self._ranks
            attachment.ledger.given += self._batch
            attachment.first_batches.saw(batch, attachment.round)
            yield batch

    def _begin_pass(self) -> None:
        """The epoch of the next sample is that of the pass."""
        self._pass = self._spans(self._next)[0][0] // self._size

    @property
    def batch(self) -> int:
        """Samples of each batch; in a job of several ranks of this rank's part of it."""
        return self._batch

    @property
    def displaced(self) -> int:
        """Samples that this member had begun when it heard that others were to read them: as many
        may be missing from its epoch. In a job of several ranks all ask, or none."""
        if (attachment := self._attached()) is not None:
            self._catch_up(attachment)
        return self._displaced

    def draw(self) -> Iterator[list[int]]:
        """The samples of the batches to come, as the loader asks for them."""
        while True:
            spans = self._spans(self._next + len(self._drawn) * self._batch * self._ranks)
            if spans[0][0] // self._size > self._pass:
                return
            positions = self._order.positions(spans)
            self._drawn.append(positions)
            mine = self._rank * self._batch
            yield self._order(positions[mine : mine + self._batch]).tolist()

    def _follow(self, attachment: AttachmentView) -> bool:
        """After a turn: take up what the log says. Whether what was drawn is another's now."""
        self._catch_up(attachment)
        if self._checked:
            return False
        self._checked, step = True, self._batch * self._ranks
        return any(
            (self._order.positions(self._spans(self._next + at * step)) != drawn).any()
            for at, drawn in enumerate(self._drawn)
        )

    def _catch_up(self, attachment: AttachmentView) -> None:
        """Take up what the log says since the last turn, and where this member stands in it."""
        ledger = attachment.ledger
        if ledger.turns == self._turn:
            return
        round_, begun = attachment.begun
        self._turn, self._checked = ledger.turns, False
        try:
            # After the end it will be in no round.
            self._learn(list(self._news(round_)), 0 if attachment.done else begun, ledger)
        except SwarmClosedError:
            pass  # the lease holds until there is a node again
        self._next = begun + ledger.given * self._ranks

    def _news(self, round_: int) -> Iterator[Tally]:
        """The entries after the newest that is known, as far as the script has adopted them: they
        are in the anchor of ``round_``.
        """
        entry = self._leases.entry
        while found := self._swarm.tallies(entry + 1):
            for tally in found:
                if tally.round > round_:
                    return
                entry = tally.entry
                yield tally

    def _learn(self, news: list[Tally], begun: int, ledger: SampleLedger) -> None:
        """Go on to the newest of these entries. None holds this member's ``begun`` samples."""
        me, known = self._swarm.peer, self._leases.entry >= 0
        counts = [
            sum(samples for member, samples in tally.shares if member.peer == me) for tally in news
        ]
        for at, tally in enumerate(news):
            ahead, begun_then = list[Span](), begun + sum(counts[at + 1 :]) if known else 0
            if begun_then:
                mine = self._leases.stream(self._me)
                mine.take(counts[at])
                ahead = mine.take(begun_then)
            self._leases.decided(tally)
            self._lost = min(max(0, self._lost - counts[at]), begun_then)
            if self._lost < begun_then and ahead != self._leases.stream(self._me).take(begun_then):
                lost, self._lost = begun_then - self._lost, begun_then
                self._displaced += lost
                logger.warning(
                    (
                        "%d samples that were read here are others' to read, too: this "
                        "member was away too long"
                    ),
                    lost,
                )

    def _spans(self, first: int) -> list[Span]:
        """Of a batch of all ranks, from index ``first`` of this member's stream on."""
        cursor = self._leases.stream(self._me)
        cursor.take(first)
        return cursor.take(self._batch * self._ranks)

    @property
    def _me(self) -> Member | None:
        """This member, in its newest life; None while it is not in the configuration."""
        return max(
            (member for member in self._leases.members if member.peer == self._swarm.peer),
            default=None,
        )

    def _attached(self) -> AttachmentView | None:
        return attached_to(self._swarm)

    def _attachment(self) -> AttachmentView:
        if (found := self._attached()) is None:
            raise ConfigError(
                "a shard of a swarm to which nothing is attached",
                key="swarm",
                why="Which samples are this member's depends on what its rounds have counted.",
                hint=(
                    "attach(model, optimizer, swarm) first; in a job of several ranks: "
                    "attachment.swarm.shard(loader); in Trainer and Lightning shard=True of the "
                    "callback, and the loader as it is."
                ),
            )
        return found


class _Draws:
    """A Shard's `draw` as a batch sampler; or, where batches are not collated, as a sampler."""

    def __init__(self, shard: Shard, *, collated: bool) -> None:
        self._shard, self._collated = shard, collated

    def __iter__(self) -> Iterator[Any]:
        draws = self._shard.draw()
        return draws if self._collated else (index for (index,) in draws)


def _batch_of(loader: DataLoader[Any]) -> int | None:
    """How many samples a batch has; None where samples are not collated. Raises ConfigError for a
    loader whose samples cannot be leased.
    """
    dataset, sampler, of_batches = cast("Any", loader.dataset), loader.sampler, loader.batch_sampler
    size, why = loader.batch_size, ""
    if size is None and of_batches is not None:
        inside = of_batches
        if type(of_batches).__name__ == "BatchSamplerShard":  # accelerate's, of one of the ranks
            inside = cast("Any", of_batches).batch_sampler
        sampler, size = getattr(inside, "sampler", None), getattr(of_batches, "batch_size", None)
        if type(inside) is not BatchSampler or getattr(of_batches, "split_batches", False):
            why = f"it has a batch sampler of its own, {type(inside).__name__}"
    kind = type(loader)
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        why = "a stream has no numbered samples"
    elif not len(dataset):
        why = "the data set is empty"
    elif hasattr(loader, "base_dataloader"):
        why = "accelerate has prepared it, and moves its batches to a device"
    elif kind.__iter__ is not DataLoader.__iter__ and kind.__name__ != STATEFUL:
        why = f"{kind.__name__} has an __iter__ of its own, which a shard would not call"
    elif not why and (
        type(sampler).__name__ not in ORDERS or getattr(sampler, "replacement", False)
    ):
        why = f"it has a sampler of its own, {type(sampler).__name__}"
    if why:
        raise ConfigError(
            f"this loader cannot be shared out among members: {why}",
            key="loader",
            why=(
                "Each sample is leased to one member by its number; the order "
                "of samples is the run's."
            ),
            hint="Give shard() the loader before accelerator.prepare(), leave it out of prepare(), "
            "and move batches yourself: batch.to(accelerator.device)."
            if hasattr(loader, "base_dataloader")
            else "Give shard() a DataLoader(dataset, batch_size=…) over a map-style data set. Of a "
            "stream, let each member read its own part: items whose hash is in its share.",
        )
    return size


def _reordered(loader: DataLoader[Any], shard: Shard, *, collated: bool) -> DataLoader[Any]:
    """The same loader, of the samples that ``shard`` draws. It takes nothing from torch's global
    random numbers.
    """
    draws: Any = _Draws(shard, collated=collated)
    how: dict[str, Any] = (
        {"batch_sampler": draws} if collated else {"sampler": draws, "batch_size": None}
    )
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **how,
    )
