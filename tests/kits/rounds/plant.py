"""The seams at which a known bug can be planted. Production code has no switch for any of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from random import Random
from typing import Any, Protocol

from torch import Tensor

from atoll.collectives.exchange import Exchange
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes import relays
from atoll.collectives.modes import sealing as sealing_module
from atoll.collectives.modes.byzantine import acceptor as byzantine_acceptor_module
from atoll.collectives.modes.byzantine import blame as blame_module
from atoll.collectives.modes.byzantine import convener as byzantine_convener_module
from atoll.collectives.modes.byzantine import judge as judge_module
from atoll.collectives.modes.byzantine import model as byzantine_model_module
from atoll.collectives.round import convener as convener_module
from atoll.collectives.round import faults as faults_module
from atoll.collectives.round import machine as machine_module
from atoll.collectives.round import recovery as recovery_module
from atoll.node.session import barrier as barrier_module
from atoll.node.session import composing as composing_module
from atoll.node.session import prior_contributions as prior_module
from atoll.node.session import session as session_module
from atoll.node.session import waiting as waiting_module
from atoll.node.simulation import process as process_module

from .storage import SimStorage

DIALS = (
    "shattered",
    "dying",
    "losing",
    "recertified",
    "power",
    "moments",
    "twins",
    "lying",
    "lies",
)
"""What a plant says of the seeds in which its bug can show, apart from the bug."""


class Life(Protocol):
    """A script, as far as the names of its contributions go."""

    peer: PeerId
    life: int
    rounds: int
    """Contributions of this life."""


class Plant:
    """No bug. Subclasses override what they break."""

    shattered = 0.0  # share of the seeds in which for long nobody sees a quorum, most likely
    dying = 0.0  # share of the seeds in which members die for good
    losing = 0.0  # share of the seeds with each of the kinds of `losses`
    recertified = 0.0  # share of the seeds in which the organiser recertifies
    power = 0.0  # share of the seeds in which machines lose power, and not only processes die
    moments = 0.0  # share of the seeds with faults that aim (`moments`, `deaths.DyingHolders`)
    twins = 0.0  # share of the seeds in which a second process begins from a copy of a live home
    unforced = ""  # the name of files whose sync does nothing, or "folder"
    lying = 0  # how many members lie
    lies: tuple[str, ...] = ()
    exchange: type[Exchange] = Exchange
    machine: type[machine_module.RoundMachine] | None = None
    convener: type[convener_module.Convener] | None = None
    sealing: type[sealing_module.Sealing] | None = None
    recovery: type[recovery_module.Recovery] | None = None
    byzantine_acceptor: type[byzantine_acceptor_module.ByzantineAcceptor] | None = None
    byzantine_convener: type[byzantine_convener_module.ByzantineConvener] | None = None
    judge: type[judge_module.Judge] | None = None
    blame: type[blame_module.Blame] | None = None
    barrier: type[barrier_module.Barrier] | None = None
    waits: type[waiting_module.Waits] | None = None
    prior: type[prior_module.PriorContributions] | None = None

    @contextmanager
    def planted(self, relayed_above: int | None = None) -> Generator[None]:
        """Around one run: the classes of the protocol are replaced by broken ones.
        ``relayed_above``: larger configurations have relays; None: as in a node.
        """
        seams: list[tuple[Any, str, Any]] = [
            (session_module, "RoundMachine", self.machine),
            (faults_module, "Convener", self.convener),
            (sealing_module, "Sealing", self.sealing),
            (machine_module, "Recovery", self.recovery),
            (byzantine_model_module, "ByzantineAcceptor", self.byzantine_acceptor),
            (byzantine_model_module, "ByzantineConvener", self.byzantine_convener),
            (byzantine_acceptor_module, "Judge", self.judge),
            (byzantine_model_module, "Blame", self.blame),
            (process_module, "Barrier", self.barrier),
            (composing_module, "Waits", self.waits),
            (session_module, "PriorContributions", self.prior),
            (relays, "RELAYED_ABOVE", relayed_above),
        ]
        whole = [(module, name, getattr(module, name)) for module, name, _ in seams]
        try:
            for module, name, broken in seams:
                if broken is not None:
                    setattr(module, name, broken)
            yield
        finally:
            for module, name, right in whole:
                setattr(module, name, right)

    def crashed(self, storage: SimStorage) -> None:
        """A process died; its disk is as it left it."""

    def cid(self, rng: Random, script: Life) -> bytes:
        """The name of a new contribution."""
        return rng.randbytes(16)

    def late(self, vector: Tensor) -> None:
        """A contribution has been frozen for longer than the script cares to wait."""
