"""Peers that do not let us in: who said so, and what that is worth.

A member's refusal is a verdict, and so is that of a peer which the invite or the settings name, as
long as nobody knows who the members are. Anybody else can say anything, so its words are told as
its words and end nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.errors import AtollError, NotAdmittedError, VersionMismatchError
from ...collectives.foreign import quoted
from ...collectives.identifiers import PeerId
from ..run.banning import banned

MOST_REFUSALS = 64
"""That are remembered; the oldest is forgotten."""
MEMBER, NAMED, STRANGER = "member", "named", "stranger"
_WHO = {
    MEMBER: "member …{peer}",
    NAMED: "…{peer}, which the invite or the settings name,",
    STRANGER: "a stranger{where} (…{peer})",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """``code`` and ``reason`` are the peer's own words; ``address``: where it was met, "" where
    that is not known.
    """

    code: str
    reason: str
    standing: str
    address: str

    def text(self, peer: PeerId) -> str:
        """A sentence for people: a verdict refuses, a stranger says."""
        where = f" at {self.address}" if self.address else ""
        who = _WHO[self.standing].format(peer=peer[-8:], where=where)
        verb = "says" if self.standing == STRANGER else "refuses:"
        return f"{who} {verb} {quoted(self.reason)}"

    def verdict(self, peer: PeerId) -> AtollError | None:
        """The refusal as an error that ends an attempt to join; None where it proves nothing, or
        its code is none of a refusal's.
        """
        if self.standing == STRANGER:
            return None
        if self.code == "E140":
            return VersionMismatchError(
                self.text(peer),
                peer=peer,
                why="The two come from different versions of atoll.",
                hint="pip install -U atoll, then: atoll down && atoll up",
            )
        if self.code == "E205":
            return banned(self.text(peer), peer)
        if self.code in ("E201", "E202"):
            return NotAdmittedError(
                self.text(peer),
                code=self.code,
                peer=peer,
                why="The invite is too old, used up, revoked, or not of this run's.",
                hint="Ask a member for a new one: atoll invite new",
            )
        return None

    def row(self) -> list[str]:
        """For a status document: code, reason, standing, address."""
        return [self.code, self.reason, self.standing, self.address]
