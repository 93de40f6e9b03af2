"""What a member of a large run asks of those that it does not beat to: `hearsay` and `partners`,
found in the registry once a run is that large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...collectives.identifiers import PeerId
from .membership_records import HeardBeat
from .registry import MODES


class Mesh(Protocol):
    """Who are partners of each other."""

    def __contains__(self, peer: PeerId) -> bool: ...

    def partners(self, peer: PeerId) -> tuple[PeerId, ...]: ...

    def beside(self, stranger: PeerId) -> tuple[PeerId, ...]:
        """Whom one that is no member watches."""
        ...


class Hearing(Protocol):
    """``asked``: of peers that have not been heard since, when they were asked first, and last;
    ``beaten``: partners, and when they were heard last.
    """

    mesh: Mesh
    asked: dict[PeerId, tuple[float, float]]
    beaten: dict[PeerId, float]
    partners: tuple[PeerId, ...]

    def last(self, now: float, peer: PeerId) -> float:
        """When it lived last, by what partners say."""
        ...

    def unanswered(self, now: float, peer: PeerId, last: float) -> bool:
        """Whether it was asked itself, and had its time to answer."""
        ...

    def said(self, now: float, partner: PeerId, mesh: bytes, bits: bytes) -> None:
        """A partner says whom it hears. Raises RemoteProtocolError."""
        ...

    def paused(self, until: float, pause_s: float) -> None:
        """This process stood still."""
        ...

    def beat(self, now: float) -> HeardBeat:
        """What this member says."""
        ...

    def questions(self, now: float, seen: Mapping[PeerId, float]) -> list[PeerId]:
        """Whom to ask for a sign of life."""
        ...

    def silent(self, now: float) -> list[PeerId]:
        """Partners that are not heard."""
        ...


def mesh_of(peers: tuple[PeerId, ...]) -> Mesh:
    """The partners of a run of so many members, in order."""
    return MODES.load("large", "mesh_of", key="a large run")(peers)


def make_hearing() -> Callable[..., Any]:
    """What makes a `Hearing`."""
    return MODES.load("large", "Hearsay", key="a large run")
