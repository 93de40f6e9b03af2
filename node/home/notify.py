"""What a node tells whoever supervises it, in systemd's protocol (sd_notify): no package, no
systemd needed.

``atoll up --background`` is such a supervisor, too: it listens on a socket of its own and learns of
readiness, or of the error that prevented it, without polling.
"""

from __future__ import annotations

import contextlib
import os
import socket

import msgspec

from ...collectives.errors import AtollError

MAX_NOTE_BYTES = 65_536
_ERROR_KEY = "X_ATOLL_ERROR"  # systemd ignores names it does not know


def notify(*lines: str) -> None:
    """Send ``READY=1``, ``STATUS=round 41, 12 peers``, ``STOPPING=1``… to the supervisor, if there
    is one. Never raises.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(lines).encode()[:MAX_NOTE_BYTES], address)


def notify_failed(error: AtollError) -> None:
    """Tell the supervisor why the node cannot run."""
    from .failures import failure

    notify(
        f"STATUS={error.code} {error.message.splitlines()[0]}",
        f"{_ERROR_KEY}={msgspec.json.encode(failure(0, error)).decode()}",
    )


def error_in(note: str) -> AtollError | None:
    """The error in a note, or None."""
    from .failures import Failure, error_of

    for line in note.splitlines():
        if line.startswith(f"{_ERROR_KEY}="):
            with contextlib.suppress(msgspec.MsgspecError):
                return error_of(
                    msgspec.json.decode(line.removeprefix(f"{_ERROR_KEY}="), type=Failure)
                )
    return None
