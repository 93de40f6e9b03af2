"""Doors of a run in fragments, and those that a node has."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...collectives.group import Admitted
from ...collectives.identifiers import PeerId
from ...collectives.round import Doors
from .doors import Right, RunDoors, right_of
from .gate import Gate


class InnerDoors:
    """Of every fragment but the first, each of which counts by its own log: who comes by a limited
    invite enters the first one before (``inside``), so that two who have the last use of one do not
    get one fragment each."""

    def __init__(self, doors: Doors, inside: Callable[[PeerId], bool]) -> None:
        self._doors, self._inside = doors, inside

    def warrant(self, peer: PeerId) -> Admitted | None:
        """None also while it is not in the first fragment."""
        found = self._doors.warrant(peer)
        return found if found is None or not found.uses or self._inside(peer) else None

    def name(self, admitted: Admitted) -> str:
        """As of the run."""
        return self._doors.name(admitted)

    def guest(self, peer: PeerId) -> Admitted | None:
        """The first fragment's log counts."""
        return None

    def limited(self, peer: PeerId) -> bool:
        """As of the run."""
        return self._doors.limited(peer)

    def valid(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> bool:
        """As of the run, with nobody who is only counted."""
        return {each.peer for each in admitted} <= {*new} and self._doors.valid(new, admitted)

    def objection(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> str:
        """Also against who is not in the first fragment, as far as is known here."""
        for each in admitted:
            if each.uses and not self._inside(each.peer):
                return (
                    f"{each.peer[-8:]}, who comes by a limited invite, is not in the first fragment"
                )
        return self._doors.objection(new, admitted)


def doors_of(gate: Gate, now_s: Callable[[], float]) -> RunDoors:
    """The doors behind a gate, whose policy is known."""

    def read(peer: PeerId, shown: bytes) -> Right | None:
        found = gate.recognise(peer, shown)
        return right_of(found) if found is not None else None

    return RunDoors(
        gate.organiser,
        policy=gate.policy or "invite",
        allow=gate.allow,
        read=read,
        refuses=gate.withdrawn,
        now_s=now_s,
        named=gate.named,
    )
