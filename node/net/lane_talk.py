"""What two peers say to each other about a lane, on a libp2p stream (protocol ``/atoll/lane/1``).

The driver offers, by itself or after Ask or Again; the other side takes or refuses. Then the driver
proposes one way after the other (`ways`), and says how it ended:

Reverse            dial me                                       answered by Dialled
Meet, then Sync    where I am seen; then: dial me, I dial you    Meet is answered by Met
Relayed            show this voucher at that relay
Done               the lane is made, in the way that was proposed last, or by the driver's dial
Bridge             this stream is the lane
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
import trio

from ...collectives.errors import PeerLostError
from ...collectives.foreign import PLAIN
from .through.vouchers import VOUCHER_BYTES
from .transport.addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES
from .transport.framing import FrameReader, decode, frame
from .transport.host import PeerStream

SECRET_BYTES = 32
ANSWER_S = 5.0
MAX_LANES = 8
"""To one peer."""
_MAX_MESSAGE_BYTES = 8192

_Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
_Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS, pattern=PLAIN)], ...],
    msgspec.Meta(max_length=MAX_ADDRESSES),
]

_Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LANES)]


class LaneRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Larger to smaller: please make an offer. ``lost`` is the token of the lane that broke (zeros:
    there was none).
    """

    lost: _Token
    index: _Index


class Again(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """Larger to smaller: our lane is roundabout. Please look for a better one now."""

    index: _Index


class LaneOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Driver: a lane with this secret, at these addresses."""

    token: _Token
    secret: _Secret
    addresses: _Addresses
    index: _Index
    plain: bool


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """The other side's, and whether the lane is plain."""

    secret: _Secret
    addresses: _Addresses
    plain: bool


class Terms(NamedTuple):
    """What is settled of a lane that is being made."""

    mine: bytes
    theirs: bytes
    initiator: bool
    token: bytes
    place: int
    plain: bool

    @property
    def both(self) -> bytes:
        """Both secrets, the driver's first."""
        return self.mine + self.theirs if self.initiator else self.theirs + self.mine


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """No lane, and why."""

    reason: Annotated[str, msgspec.Meta(max_length=512)]


class Reverse(msgspec.Struct, frozen=True, array_like=True, tag="reverse"):
    """Driver: I did not get through. Dial me."""


class Dialled(msgspec.Struct, frozen=True, array_like=True, tag="dialled"):
    """Answer to Reverse."""

    ok: bool


class LaneDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Driver: the connection made last is the lane."""


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet"):
    """Driver: a port of mine is seen there. Where is one of yours? No candidates: not known.
    ``guesses``: whether I would guess ports.
    """

    candidates: _Addresses
    symmetric: bool
    guesses: bool = False


class Met(msgspec.Struct, frozen=True, array_like=True, tag="met"):
    """Answer to Meet."""

    candidates: _Addresses
    symmetric: bool
    guesses: bool = False


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="sync"):
    """Driver: dial me now. I dial when this has arrived. ``guess``: see `through.punch`; only if
    both would.
    """

    guess: bool = False


class Relayed(msgspec.Struct, frozen=True, array_like=True, tag="relayed"):
    """Driver: there is a circuit for us at a relay."""

    addresses: _Addresses
    voucher: Annotated[bytes, msgspec.Meta(min_length=VOUCHER_BYTES, max_length=VOUCHER_BYTES)]


class Bridge(msgspec.Struct, frozen=True, array_like=True, tag="bridge"):
    """Driver: this stream is the lane; all that follows is its bytes."""


Message = (
    LaneRequest
    | Again
    | LaneOffer
    | Take
    | Refuse
    | Reverse
    | Dialled
    | Meet
    | Met
    | Sync
    | Relayed
    | LaneDone
    | Bridge
)
_decoder = msgspec.msgpack.Decoder(Message)


class LaneTalk:
    """Messages over one stream."""

    def __init__(self, stream: PeerStream) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.reader = FrameReader(stream.receive_some, stream.peer)

    async def say(self, message: Message) -> None:
        """Send one. Raises PeerLostError."""
        await self.stream.send_all(frame(msgspec.msgpack.encode(message)))

    async def hear(self, timeout_s: float = ANSWER_S) -> Message:
        """The next one. Raises PeerLostError, RemoteProtocolError."""
        with trio.move_on_after(timeout_s):
            payload = await self.reader.next(_MAX_MESSAGE_BYTES)
            if payload is not None:
                return decode(_decoder, payload, self.peer)
        raise PeerLostError(f"{self.peer} did not answer about a lane", peer=self.peer)
