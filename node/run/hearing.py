"""What a member of a large run asks of those that it does not beat to: `hearsay` and `partners`,
found in the registry once a run is that large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ...collectives.identifiers import PeerId
from .membership_records import HeardBeat
from .registry import MODES


class Hearing(ABC):
    """``asked``: of peers that have not been heard since, when they were asked first, and last;
    ``beaten``: partners, and when they were heard last.
    """

    mesh: Any
    asked: dict[PeerId, tuple[float, float]]
    beaten: dict[PeerId, float]
    partners: tuple[PeerId, ...]

    @abstractmethod
    def last(self, now: float, peer: PeerId) -> float:
        """When it lived last, by what partners say."""
        ...

    @abstractmethod
    def unanswered(self, now: float, peer: PeerId, last: float) -> bool:
        """Whether it was asked itself, and had its time to answer."""
        ...

    @abstractmethod
    def said(self, now: float, partner: PeerId, mesh: bytes, bits: bytes) -> None:
        """A partner says whom it hears. Raises RemoteProtocolError."""
        ...

    @abstractmethod
    def paused(self, until: float, pause_s: float) -> None:
        """This process stood still."""
        ...

    @abstractmethod
    def beat(self, now: float) -> HeardBeat:
        """What this member says."""
        ...

    @abstractmethod
    def questions(self, now: float, seen: Mapping[PeerId, float]) -> list[PeerId]:
        """Whom to ask for a sign of life."""
        ...

    @abstractmethod
    def silent(self, now: float) -> list[PeerId]:
        """Partners that are not heard."""
        ...


def mesh_of(peers: tuple[PeerId, ...]) -> Any:
    """The partners of a run of so many members, in order."""
    return MODES.load("large", "mesh_of", key="a large run")(peers)


def make_hearing() -> Callable[..., Any]:
    """What makes a `Hearing`."""
    return MODES.load("large", "Hearsay", key="a large run")
