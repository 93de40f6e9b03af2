"""By which invites peers have entered a run, as this node has seen it: what each may do, and how
many an invite has let in.

It is on the disk, so that neither a restart nor who comes back without its certificate gives
anybody more than it was given, and so that the command line can name the invite that a peer came
by. Of invites that restrict nothing it is kept as long as there is room.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from ...collectives.errors import NotAdmittedError, StorageError
from ...collectives.foreign import PLAIN
from ...collectives.group import MAX_PEER_ID
from ...collectives.identifiers import PeerId
from ..home.paths import make_private, write_atomic
from ..home.refusals import storage_error
from .capability import ID_BYTES, MOST_USES, Capability, Role

Peer = Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
FILE = "entrants"
MOST = 4096
MOST_BY_ONE = MOST * 3 // 4
"""By one invite: who holds its seed can name any number of peers, and leaves places for those who
come by another.
"""


class Entrant(msgspec.Struct, frozen=True, array_like=True):
    """One peer and its invite: role, nonce, and how many peers it admits (0: any number)."""

    peer: Peer
    role: Role
    nonce: Annotated[bytes, msgspec.Meta(max_length=ID_BYTES)]
    uses: Annotated[int, msgspec.Meta(ge=0, le=MOST_USES)] = 0


_decoder = msgspec.msgpack.Decoder(Annotated[tuple[Entrant, ...], msgspec.Meta(max_length=MOST)])


class Entrants:
    """Of one run. Nothing is read before `load`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.known: dict[PeerId, Entrant] = {}
        self.roles: dict[PeerId, str] = {}
        """Who is not in it trains."""

    def load(self) -> None:
        """Read what is on the disk. Raises StorageError E303 where it is damaged, which then counts
        as empty.
        """
        path = self._folder / FILE
        try:
            found = _decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(f"cannot read {path}", error) from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise StorageError(
                f"{path} is damaged: {error}",
                code="E303",
                exit_code=74,
                why="The disk, or something else than atoll, changed it.",
                hint=(
                    "Remove it. Who has entered by invites that admit only so many "
                    "is not known here then."
                ),
            ) from None
        for each in found:
            self._set(each.peer, each)

    def enter(self, peer: PeerId, capability: Capability) -> None:
        """A peer that is no member shows its invite. Raises NotAdmittedError where that has let in
        as many as it may.
        """
        others = sum(
            each.nonce == capability.id for each in self.known.values() if each.peer != peer
        )
        if capability.uses and others >= capability.uses:
            raise NotAdmittedError(
                f"this invite to run {capability.run_id} has let in {capability.uses} already",
                why="Its organiser has made it for so many peers.",
                hint="Ask the organiser for another: atoll invite new",
            )
        self.note(peer, capability)

    def recall(self, peer: PeerId, capability: Capability) -> None:
        """What a member came by, unless that is known: one that was revoked or has expired gives
        nobody another role. Raises as `note`.
        """
        if peer not in self.known:
            self.note(peer, capability)

    def forget(self, peers: Collection[PeerId]) -> None:
        """Others have used up the invite by which these came. Raises StorageError where that is in
        memory only.
        """
        for peer in peers:
            self.known.pop(peer, None)
            self.roles.pop(peer, None)
        if peers:
            self._write()

    def note(self, peer: PeerId, capability: Capability) -> None:
        """Keep what a peer's invite says. Raises NotAdmittedError where nothing more can be kept;
        StorageError where it is in memory only.
        """
        restricts = capability.role != "train" or capability.uses
        entrant = Entrant(peer, capability.role, capability.id, capability.uses)
        if self.known.get(peer) == entrant:
            return
        if not self._has_room(peer, capability.id):
            if not restricts:
                return
            raise NotAdmittedError(
                f"{len(self.known)} peers have entered by such invites here: no "
                "more can be kept in mind"
            )
        self._set(peer, entrant)
        self._write()

    def _write(self) -> None:
        make_private(self._folder)
        write_atomic(self._folder / FILE, msgspec.msgpack.encode(tuple(self.known.values())))

    def _has_room(self, peer: PeerId, nonce: bytes) -> bool:
        """Whether there is a place for ``peer`` by this invite, or one could be made."""
        if peer in self.known:
            return True
        if sum(each.nonce == nonce for each in self.known.values()) >= MOST_BY_ONE:
            return False
        return len(self.known) < MOST or self._make_room()

    def _make_room(self) -> bool:
        """Forget the oldest by whose invite nothing is restricted; whether there was one."""
        for peer, entrant in self.known.items():
            if entrant.role == "train" and not entrant.uses:
                del self.known[peer]
                return True
        return False

    def _set(self, peer: PeerId, entrant: Entrant) -> None:
        self.known.pop(peer, None)
        self.roles.pop(peer, None)
        self.known[peer] = entrant
        if entrant.role != "train":
            self.roles[peer] = entrant.role
