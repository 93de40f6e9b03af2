"""The gate of one run at one node: who is let in, who is believed to be of the run, and whose
announcement is taken in.

It decides by what this node knows: the manifest's policy, the newest configuration, the organiser's
bans and revocations, and the certificate that is shown. Sans I/O; the clock is an argument. The
rules as a table: docs/internals/protocol/admission.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, Protocol

from ...collectives.errors import BadSignatureError, NotAdmittedError
from ...collectives.identifiers import PeerId, RunId
from .capability import Certificate, check_certificate, recognise

Policy = Literal["invite", "open", "allow"]


class KeptOut(Protocol):
    """Whom the organiser, or this machine, keeps out: `banning.Bans`."""

    @property
    def of_run(self) -> Collection[PeerId]:
        """Whom the organiser has banned."""
        ...

    @property
    def revoked(self) -> Collection[bytes]:
        """Invites by which nobody is let in any more."""
        ...

    def why(self, peer: PeerId) -> str | None:
        """Why a peer is kept out; None: it is not."""
        ...

    def refuse(self, peer: PeerId) -> None:
        """Raise NotAdmittedError where a peer is kept out."""

    def check_invite(self, nonce: bytes) -> None:
        """Raise NotAdmittedError where an invite was revoked."""


class Gate:
    """``policy`` is None until the manifest is here; ``members()`` is the newest configuration this
    node knows, empty for none.
    """

    def __init__(
        self,
        run_id: RunId,
        organiser: PeerId,
        bans: KeptOut,
        members: Callable[[], Collection[PeerId]],
    ) -> None:
        self.run_id, self.organiser, self._bans, self._members = run_id, organiser, bans, members
        self.policy: Policy | None = None
        self.allow: frozenset[str] = frozenset()
        self.named = False  # a run with noise: an invite is for the name of a site

    def recognise(self, peer: PeerId, shown: bytes) -> Certificate | None:
        """The certificate that ``peer`` shows, if it is one of this run for it; it may have expired
        or be revoked.
        """
        return recognise(shown, run_id=self.run_id, organiser=self.organiser, peer=peer)

    def admit(self, peer: PeerId, shown: bytes, now_s: float) -> Certificate | None:
        """``peer`` wants to be let in and shows this. Its certificate, if it has one; raises
        NotAdmittedError where it is kept out.

        Nothing is told to whom this raises for but why.
        """
        self._bans.refuse(peer)
        if self._at_home(peer):
            return self.recognise(peer, shown)
        if self.policy == "allow" and peer not in self.allow:
            raise NotAdmittedError(
                "this run admits only the peers that its manifest names ([join] allow)"
            )
        if self.policy in ("open", "allow"):
            return self.recognise(peer, shown)
        found = check_certificate(
            shown, run_id=self.run_id, organiser=self.organiser, peer=peer, now_s=now_s
        )
        self._bans.check_invite(found.capability.id)
        if self.named and not found.capability.name and found.capability.role != "observe":
            raise NotAdmittedError(
                "this invite is for no name, and a run with [privacy] counts by the names of sites",
                why="What a site has spent is bound to its name, whatever key it comes with.",
                hint="Ask the organiser for one: atoll invite new RUN --name SITE",
            )
        return found

    def accept(self, peer: PeerId, shown: bytes, now_s: float) -> None:
        """``peer``, to which this node opens a stream, shows this first. Raises NotAdmittedError
        where it gets nothing from us.

        A node that does not know the manifest yet accepts everybody: it only asks for the manifest,
        which proves itself. One that does not know the configuration yet accepts certificates that
        have expired, since members keep theirs.
        """
        self._bans.refuse(peer)
        if self.policy is None or self._at_home(peer):
            return
        if self.policy == "invite" and not self._members():
            found = self.recognise(peer, shown)
            if found is None:
                raise NotAdmittedError(f"{peer[-8:]} does not show that it is of run {self.run_id}")
            self._bans.check_invite(found.capability.id)
            return
        self.admit(peer, shown, now_s)

    def withdrawn(self, peer: PeerId, invite: bytes) -> str:
        """Why the organiser lets in this peer, or anybody by this invite, no more; "" for no
        reason.
        """
        if peer in self._bans.of_run:
            return "the run's organiser has banned it"
        return "its invite was revoked" if invite in self._bans.revoked else ""

    def in_force(self, found: Certificate, now_s: float) -> bool:
        """Whether a certificate lets somebody in now: what a member shows may have expired, or be
        revoked.
        """
        return now_s <= found.expires_s and found.capability.id not in self._bans.revoked

    def believes(self, peer: PeerId, shown: bytes) -> bool:
        """Whether a membership record of ``peer`` with this certificate is kept, and handed on.

        One that has expired will do: members keep theirs, and who has been away for long does not
        know who they are now. Raises BadSignatureError where nobody who knows the manifest keeps
        it, so that whoever hands it on is at fault.
        """
        if self.policy is None or self._at_home(peer):
            return True
        found = self.recognise(peer, shown)
        if (self.policy == "invite" and found is None) or (
            self.policy == "allow" and peer not in self.allow
        ):
            raise BadSignatureError(f"nothing proves that {peer[-8:]} is of run {self.run_id}")
        return not self.withdrawn(peer, found.capability.id if found is not None else b"")

    def hears_of(self, peer: PeerId, shown: bytes, now_s: float) -> bool:
        """Whether an announcement of ``peer`` with this certificate is taken in, and passed on."""
        if self.policy is None and not shown:
            return self._bans.why(peer) is None
        try:
            self.accept(peer, shown, now_s)
        except NotAdmittedError:
            return False
        return True

    def shows(self, peer: PeerId, shown: bytes, now_s: float) -> None:
        """``peer`` wants to see the manifest before it joins: whoever holds an invite may. Raises
        NotAdmittedError.
        """
        self._bans.refuse(peer)
        if self.policy != "open":
            found = check_certificate(
                shown, run_id=self.run_id, organiser=self.organiser, peer=peer, now_s=now_s
            )
            self._bans.check_invite(found.capability.id)

    def _at_home(self, peer: PeerId) -> bool:
        return peer == self.organiser or peer in self._members()
