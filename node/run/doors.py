"""By what peers enter the configuration of a run, for the entries of its log: implements
`collectives.round.Doors`.

What a certificate proves is the same for everybody and at any time: run, organiser, peer, role, and
both signatures (`valid`). Whether it is banned, revoked or expired each node knows as far as it has
heard (`objection`); for an entry of another member a clock may be `SKEW_S` off. For what it lets in
itself a node is strict (`warrant`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...collectives.group import Admitted
from ...collectives.identifiers import PeerId
from .capability import Certificate

SKEW_S = 600.0
MOST_SHOWN = 4096
MOST_BY_ONE = MOST_SHOWN * 3 // 4


@dataclass(frozen=True, slots=True)
class Right:
    """What a certificate gives its peer: the entry's word for it, and until when. ``member``: it
    may be more than an observer. ``name``: the site's.
    """

    admitted: Admitted
    expires_s: float
    member: bool = True
    name: str = ""


def right_of(certificate: Certificate) -> Right:
    """What a genuine certificate gives."""
    capability = certificate.capability
    admitted = Admitted(
        certificate.peer,
        certificate.encode(),
        capability.id,
        capability.uses,
        capability.issued_s,
        capability.expires_s,
    )
    return Right(admitted, certificate.expires_s, capability.role != "observe", capability.name)


class RunDoors:
    """Of one run at one node. ``read(peer, shown)``: what a certificate of this run for this peer
    gives it; None: it is none.

    ``refuses(peer, invite)``: why the organiser lets in this peer, or anybody by this invite, no
    more; "" for no reason. ``now_s``: seconds since 1970, UTC. ``policy``, ``allow``: of the
    manifest. ``named``: each needs a name (`modes.site_ledger`).
    """

    def __init__(
        self,
        organiser: PeerId,
        *,
        policy: str,
        allow: Collection[str],
        read: Callable[[PeerId, bytes], Right | None],
        refuses: Callable[[PeerId, bytes], str],
        now_s: Callable[[], float],
        named: bool = False,
    ) -> None:
        self.named = named
        self.organiser, self.policy, self.allow = organiser, policy, frozenset(allow)
        self._read, self._refuses, self._now_s = read, refuses, now_s
        self._shown: dict[PeerId, tuple[bytes, bytes]] = {}  # certificate, and its invite
        self._by_invite: dict[bytes, dict[PeerId, None]] = {}  # oldest first

    def note(self, peer: PeerId, shown: bytes) -> None:
        """``peer`` has shown this. The newest are remembered: where there is no room, the invite by
        which most have come makes some, and none has more than `MOST_BY_ONE` places, since who
        holds its seed can name any number of peers."""
        known = self._shown.get(peer)
        if not shown or (known is not None and known[0] == shown):
            return
        right = self._read(peer, shown)
        if right is None:
            return
        self._forget(peer)
        invite = right.admitted.invite
        if len(self._by_invite.get(invite, ())) >= MOST_BY_ONE:
            self._forget(next(iter(self._by_invite[invite])))
        elif len(self._shown) >= MOST_SHOWN:
            self._forget(next(iter(max(self._by_invite.values(), key=len))))
        self._shown[peer] = (shown, invite)
        self._by_invite.setdefault(invite, {})[peer] = None

    def shown(self, peer: PeerId) -> bytes:
        """The certificate that ``peer`` has shown, or another member for it in the log or in a
        record that ``peer`` has signed; empty where none is remembered. Who shows it to one member
        alone is of the run all the same: else the others would not hear it ask to be let in.
        """
        return self._shown.get(peer, (b"",))[0]

    def _forget(self, peer: PeerId) -> None:
        known = self._shown.pop(peer, None)
        if known is not None:
            beside = self._by_invite[known[1]]
            del beside[peer]
            if not beside:
                del self._by_invite[known[1]]

    # ---- collectives.round.Doors
    def name(self, admitted: Admitted) -> str:
        """What its certificate says."""
        right = self._read(admitted.peer, admitted.certificate)
        return right.name if right is not None else ""

    def guest(self, peer: PeerId) -> Admitted | None:
        """By what ``peer`` may be counted now that comes by a limited invite, whatever it is to."""
        right = self._read(peer, self.shown(peer)) if self._needs(peer) else None
        if right is None or not right.admitted.uses or self._now_s() > right.expires_s:
            return None
        return None if self._refuses(peer, right.admitted.invite) else right.admitted

    def limited(self, peer: PeerId) -> bool:
        """Whether ``peer`` needs an invite, and has shown one for so many, or none that is
        remembered.
        """
        if not self._needs(peer):
            return False
        right = self._read(peer, self.shown(peer))
        return right is None or bool(right.admitted.uses)

    def warrant(self, peer: PeerId) -> Admitted | None:
        """By what ``peer`` may enter now."""
        free = Admitted(peer, b"")
        if not self._needs(peer):
            return free if self._may(peer) and not self._refuses(peer, b"") else None
        right = self._read(peer, self.shown(peer))
        if right is None or not right.member or self._now_s() > right.expires_s:
            return None
        if self.named and not right.name:
            return None
        return None if self._refuses(peer, right.admitted.invite) else right.admitted

    def valid(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> bool:
        """Whether each of these peers may enter, and shows exactly what it needs; others are
        counted where they come by a limited invite.
        """
        rights = [self._read(each.peer, each.certificate) for each in admitted]
        return (
            all(map(self._may, new))
            and {*filter(self._needs, new)} <= {each.peer for each in admitted}
            and all(
                self._needs(each.peer)
                and right is not None
                and right.admitted == each
                and bool(right.name or not self.named)
                and (right.member if each.peer in new else bool(each.uses))
                for right, each in zip(rights, admitted, strict=True)
            )
        )

    def objection(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> str:
        """What the organiser has said against them, as far as it came here; or their end, if that
        is `SKEW_S` ago.
        """
        for each in admitted:
            right = self._read(each.peer, each.certificate)
            if right is not None and self._now_s() > right.expires_s + SKEW_S:
                return f"the certificate of {each.peer[-8:]} has expired"
        invites = {each.peer: each.invite for each in admitted}
        reasons = (self._refuses(peer, invites.get(peer, b"")) for peer in sorted({*new, *invites}))
        return next(filter(None, reasons), "")

    def _needs(self, peer: PeerId) -> bool:
        return self.policy == "invite" and peer != self.organiser

    def _may(self, peer: PeerId) -> bool:
        return self.policy != "allow" or peer == self.organiser or peer in self.allow
