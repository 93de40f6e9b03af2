"""What got this node into a run, kept in the run's folder for its next life: its certificate, and
where to look for members.

The secret of an invite is kept only where it is needed again: to invite others by the same
capability. One that is for a single peer is forgotten once its certificate is made.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec

from ...collectives.errors import NotAdmittedError
from ...collectives.identifiers import RunId
from ..home.paths import Paths, make_private, write_atomic
from ..home.private_files import remove_file
from .capability import MAX_CERTIFICATE_BYTES, Certificate, capability_name, genuine
from .invite import MAX_ADDRESSES, SECRET_BYTES, Invite

FILE = "admission"


class Standing(msgspec.Struct, frozen=True):
    """``certificate``: what members want to see, empty where this node entered without. ``secret``:
    of the invite key, or empty.
    """

    certificate: Annotated[bytes, msgspec.Meta(max_length=MAX_CERTIFICATE_BYTES)] = b""
    secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)] = b""
    bootstrap: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()

    def invite(self, bootstrap: tuple[str, ...]) -> Invite:
        """An invite by the capability that this node came by. Raises NotAdmittedError where it may
        not hand that on.
        """
        found = genuine(self.certificate)
        if found is not None and not found.capability.reissuable:
            raise NotAdmittedError(
                (
                    "this node cannot invite by what it came by, "
                    f"{capability_name(found.capability.id)}"
                ),
                why="The organiser has made that invite for one peer only.",
                hint="Ask the organiser.",
            )
        if found is None or len(self.secret) != SECRET_BYTES:
            raise NotAdmittedError(
                "this node cannot invite to this run",
                why="It is neither the organiser nor did it come by an invite.",
                hint="Ask the organiser.",
            )
        return Invite(self.secret, found.capability, bootstrap)


def standing_by(invite: Invite, certificate: Certificate) -> Standing:
    """What is kept of an invite."""
    kept = invite.secret if invite.capability.reissuable else b""
    return Standing(certificate.encode(), kept, invite.bootstrap)


def save_standing(paths: Paths, run_id: RunId, standing: Standing) -> None:
    """Keep it, readable by this user only. Raises StorageError."""
    folder = paths.run_dir(run_id)
    make_private(folder)
    write_atomic(folder / FILE, msgspec.msgpack.encode(standing), mode=0o600)


def forget_standing(paths: Paths, run_id: RunId, earlier: Standing | None) -> None:
    """A run could not be entered: back to what was kept before, which may be nothing at all. Raises
    StorageError.
    """
    if earlier is not None and earlier.certificate:
        save_standing(paths, run_id, earlier)
        return
    remove_file(paths.run_dir(run_id) / FILE)
    with contextlib.suppress(OSError):  # it has other files: they are of an earlier time
        paths.run_dir(run_id).rmdir()


def load_standing(paths: Paths, run_id: RunId) -> Standing:
    """What was kept, or nothing."""
    try:
        data = (paths.run_dir(run_id) / FILE).read_bytes()
        return msgspec.msgpack.decode(data, type=Standing)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return Standing()
