"""A look at a run before anybody joins it: ``/atoll/look/1``. The asker shows a certificate, a
member sends the signed manifest.

One stream, one Look, one Answer. Nothing is kept of it at either end: the asker is announced
nowhere and is nobody's member, no topic is opened, and an invite that admits so many peers is not
used up. The asker therefore takes a key of the moment. Where its invite is for one peer only, the
certificate is that peer's, whose key signs for the key of the moment (`Look.signature`).

The manifest proves itself: its hash is the run's id, and its organiser has signed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import trio

from ...collectives.errors import (
    AtollError,
    NotAdmittedError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import SIGNATURE_BYTES, Identity, verify
from .transport.allowance import Allowance
from .transport.door import Door
from .transport.faults import Faults
from .transport.framing import FrameReader, decode, frame
from .transport.host import Host, PeerStream

PROTOCOL = "/atoll/look/1"
DOMAIN = "atoll/look/1"
NOT_HERE, BUSY = "topic", "busy"
"""Answer codes that are no refusal: this peer is not in the run; it has been looked at too often
this minute.
"""
MAX_LOOK_BYTES = 2048
MAX_ANSWER_BYTES = 72_000
MAX_CERTIFICATE_BYTES = 1024
MAX_MANIFEST_BYTES = 66_560
LOOK_S = 10.0
AT_ONCE = 32
"""Open streams; where all are taken the machine that has most of them gives one up to another
(`Door`).
"""
A_MINUTE_EACH = 24
"""Looks of a machine that are answered in a minute."""


class Look(msgspec.Struct, frozen=True, array_like=True):
    """What the asker shows. ``signature``: empty where the certificate is the asker's own."""

    run: Annotated[str, msgspec.Meta(max_length=64, pattern=PLAIN)]
    certificate: Annotated[bytes, msgspec.Meta(max_length=MAX_CERTIFICATE_BYTES)] = b""
    holder: Annotated[str, msgspec.Meta(max_length=128, pattern=PLAIN)] = ""
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    def bearer(self, asker: PeerId, server: PeerId) -> PeerId:
        """Whose certificate it is to be: ``asker``'s, or the peer's that has signed for ``asker``
        to look here. Raises NotAdmittedError.
        """
        if not self.signature:
            return asker
        payload = _bound(self.run, asker, server)
        if not verify(PeerId(self.holder), DOMAIN, payload, self.signature):
            raise NotAdmittedError("the peer that was named has not signed this")
        return PeerId(self.holder)


class LookAnswer(msgspec.Struct, frozen=True, array_like=True):
    """``code`` "": here is the manifest. The code of an error: not for you, and why."""

    code: Annotated[str, msgspec.Meta(max_length=16, pattern=PLAIN)]
    reason: Annotated[str, msgspec.Meta(max_length=512)] = ""
    manifest: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)] = b""


Show = Callable[[PeerId, Look], bytes]
"""(asker, what it shows): the signed manifest. Raises AtollError for whom it is not shown."""
ShowElse = Callable[[PeerId, Look], bytes | None]
"""The same of any other run; None: this node has nothing to do with it."""
_looks, _answers = msgspec.msgpack.Decoder(Look), msgspec.msgpack.Decoder(LookAnswer)


def _bound(run: str, asker: PeerId, server: PeerId) -> bytes:
    return msgspec.msgpack.encode((run, asker, server))


def look_of(
    run: RunId, certificate: bytes, asker: PeerId, server: PeerId, holder: Identity | None
) -> Look:
    """What ``asker`` shows to ``server``. ``holder``: of the certificate, if not the asker."""
    if holder is None:
        return Look(run, certificate)
    signature = holder.sign(DOMAIN, _bound(run, asker, server))
    return Look(run, certificate, holder.peer, signature)


class Looks:
    """The answering end, for all runs of a node. Used from the trio thread only."""

    def __init__(self, host: Host, faults: Faults) -> None:
        self._host, self._faults = host, faults
        self._shown: dict[str, Show] = {}
        self.otherwise: ShowElse = lambda asker, look: None
        """For runs that are not open."""
        self._allowance = Allowance(A_MINUTE_EACH, A_MINUTE_EACH / 60)
        self._door = Door(AT_ONCE)
        host.handle(PROTOCOL, self._serve)

    def open(self, run: RunId, show: Show) -> None:
        """Answer for a run, until `close`."""
        self._shown[run] = show

    def close(self, run: RunId) -> None:
        """Answer no more. Idempotent."""
        self._shown.pop(run, None)

    async def _serve(self, stream: PeerStream) -> None:
        now = trio.current_time()
        if self._faults.shut_out(stream.peer, now):
            return
        scope = trio.CancelScope(deadline=now + LOOK_S)
        shown_out = self._door.enter(scope, stream.machine)
        if isinstance(shown_out, trio.CancelScope):
            shown_out.cancel()  # maybe our own
        try:
            with scope:
                payload = await FrameReader(stream.receive_some, stream.peer).next(MAX_LOOK_BYTES)
                if payload is None:
                    return
                answer = self._answer(stream, decode(_looks, payload, stream.peer))
                await stream.send_all(frame(msgspec.msgpack.encode(answer)))
                await stream.finish()
                await stream.receive_some(1)  # until the other end has read it
        except RemoteProtocolError:
            self._faults.count(stream.peer, now)
        finally:
            self._door.leave(scope)

    def _answer(self, stream: PeerStream, look: Look) -> LookAnswer:
        if not self._allowance.allows(stream.machine, trio.current_time()):
            return LookAnswer(BUSY, "looked at too often this minute")
        try:
            found = self._shown.get(look.run, self.otherwise)(stream.peer, look)
            if found is None:
                return LookAnswer(NOT_HERE, "this peer is not in the run")
            return LookAnswer("", "", found)
        except RemoteProtocolError:
            raise
        except AtollError as error:
            return LookAnswer(error.code[:16], error.message[:512])


async def ask(host: Host, server: PeerId, look: Look) -> LookAnswer:
    """What a connected peer answers. Raises NetworkError: NotSpokenError where it is no node of
    this version; RemoteProtocolError.
    """
    stream = await host.open_stream(server, PROTOCOL, LOOK_S)
    try:
        with trio.move_on_after(LOOK_S):
            await stream.send_all(frame(msgspec.msgpack.encode(look)))
            payload = await FrameReader(stream.receive_some, server).next(MAX_ANSWER_BYTES)
            if payload is not None:
                return decode(_answers, payload, server)
    finally:
        await stream.aclose()
    raise PeerUnreachableError(f"{server[-8:]} does not answer", peer=server)
