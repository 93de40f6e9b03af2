"""The base of one run at this node: handed on to members that lack it, and had from those that have
it. Sans I/O.

A base that is gated, as its founder was told or as this machine was, is neither served nor asked
for: each member has it from the hub by a login of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

from ...collectives import messages as m
from ...collectives.errors import ConfigError
from ...collectives.exchange import BadChunk, BlobProgress
from ...collectives.identifiers import PeerId
from ..home.paths import Paths
from ..manifest.pretrained import travels
from ..manifest.tables import BaseTable, ModelTable
from .fetching import PULL_S, BaseFetching
from .own import OWN_FILE, OwnBase, fetched_folder, read_own, stamp_of, unchanged
from .pieces import Cutting, FilePorts, decode, encode
from .serving import IDLE_S, BaseServing


class BaseSharing:
    """Of one run, in whose folder among ``paths`` this machine says where its copy lies."""

    def __init__(
        self,
        run: str,
        model: ModelTable,
        paths: Paths,
        ports: FilePorts,
        rng: Random,
        *,
        share: bool = True,
        cutting: Cutting | None = None,
    ) -> None:
        """``share``: whether the owner of this machine hands the base on. ``cutting``: a smaller
        one, in tests.
        """
        assert model.base is not None
        self._run, self._model, self._rng = run, model, rng
        self._base: BaseTable = model.base
        self._folder, self._cache, self._ports = paths.run_dir(run), paths.cache_dir, ports
        self._cutting = cutting or Cutting()
        self._own: tuple[tuple[int, int] | None, OwnBase] = (None, OwnBase())
        self.fetching: BaseFetching | None = None
        self.serving: BaseServing | None = None
        if share and travels(model):
            self.serving = BaseServing(run, self._base, self._find, ports, self._cutting)

    def begin(self, now: float) -> BaseFetching:
        """Fetch what this machine lacks, until `end`. Raises ConfigError E415."""
        if not travels(self._model):
            raise ConfigError(
                f"the base of this run is not handed on by members: {self._why_not()}",
                code="E415",
                hint="hf auth login, then the same command again"
                if self._model.hub is not None
                else "Get it from whoever invited you, then: atoll join … --model PATH",
            )
        if self.fetching is not None:
            raise ConfigError(
                "the base of this run is being fetched by another command already", code="E415"
            )
        self.fetching = BaseFetching(
            now,
            self._run,
            self._base,
            fetched_folder(self._cache, self._base),
            self._ports,
            self._rng,
            self._cutting,
        )
        return self.fetching

    def end(self) -> None:
        """Fetch no more. Idempotent."""
        if self.fetching is not None:
            self.fetching.stop()
            self.fetching = None

    def drop_all(self) -> None:
        """The run ends here."""
        self.end()
        if self.serving is not None:
            self.serving.drop_all()

    # ---- inputs
    def take(self, now: float, peer: PeerId, data: bytes) -> None:
        """A message of a peer that is admitted to the run. Raises RemoteProtocolError."""
        body = decode(data, peer)
        if isinstance(body, m.Get):
            if self.serving is not None:
                self.serving.on_get(now, peer, body)
            else:
                self._ports.send(peer, encode(m.Gone(body.name)))
        elif self.fetching is not None and isinstance(body, m.Offer):
            self.fetching.on_offer(now, peer, body)
        elif self.fetching is not None and isinstance(body, m.Gone):
            self.fetching.on_gone(now, peer, body.name)

    def on_exchange(self, now: float, event: object) -> None:
        """An event of the data plane; of others' content nothing comes of it."""
        if self.fetching is None:
            return
        if isinstance(event, BlobProgress):
            self.fetching.on_blob(now, event)
        elif isinstance(event, BadChunk):
            self.fetching.on_bad_chunk(event)

    def tick(self, now: float, peers: Sequence[PeerId]) -> None:
        """``peers``: members that are connected."""
        if self.fetching is not None:
            self.fetching.tick(now, peers)
        if self.serving is not None:
            self.serving.tick(now)

    def next_due(self, now: float) -> float:
        """When `tick` is to be called next."""
        if self.fetching is not None:
            return now + PULL_S
        return now + IDLE_S if self.serving is not None and self.serving.held_bytes else math.inf

    # ---- the own copy
    def _find(self, name: str) -> Path | None:
        """The own file of this name, where it may be given to others."""
        try:
            stamp = stamp_of(self._folder / OWN_FILE)
        except OSError:
            return None
        if self._own[0] != stamp:  # the recipe, another process, has compared it meanwhile
            self._own = stamp, read_own(self._folder)
        own = self._own[1]
        return None if own.gated else unchanged(own, name)

    def _why_not(self) -> str:
        if self._base.gated:
            return "its owner wants its licence accepted on the hub by each"
        if self._model.hub is not None and self._base.gated is None:
            return "whether it is gated was not known when the run was founded"
        return "the manifest does not say how large its files are"
