"""What is said when a message stream opens (`streams`), and what its two ends share.

The opener says Hello, which names the topic and shows nothing. The other side answers with what
shows its own standing. Only where that convinces the opener does it show its standing in turn
(Proof), and is answered with yes, or no and why. With the yes may come the offer of a wire
(`wires`) in the stream's place.

The first answer also hands the opener the newest membership record that its own key has signed, as
far as it is known there. Two processes with one key meet in this way even where each of the others
speaks to one of them only: a greeting is answered on the very stream that it came on, whichever of
the two sent it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId
from ...collectives.record_layer import SECRET_BYTES
from .wires import WireOffer

PROTOCOL = "/atoll/topic/1"
VERSION = 3
"""Version of what is said inside a topic; two peers of different versions refuse each other with
E140.
"""
MAX_TOPIC_CHARS = 128
MAX_SHOWN_BYTES = 1024
MAX_HELLO_BYTES = 1024
MAX_PROOF_BYTES = MAX_SHOWN_BYTES + 64
MAX_RECALLED_BYTES = 4096 + 128
"""Of the opener's own membership record."""
MAX_ANSWER_BYTES = MAX_SHOWN_BYTES + MAX_RECALLED_BYTES + 4096
HELLO_S = 10.0
PATIENCE_S = 30.0
"""So long an opener has for its Hello and its Proof. Who is shown out opens the next stream, which
costs more than this one does.
"""
NO_TOPIC = "topic"
"""Answer code: the other side has not opened this topic (yet). Not an error to show anybody."""
NOT_ACCEPTED = "standing"
"""The code of an opener's own refusal: the other side has not shown that it is one of the run."""
PING_S = 4.0
SILENT_S = 15.0
"""A stream on which nothing was heard for so long is dead, and the connection under it."""


class Preface(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of every Hello, whatever its version."""

    version: Annotated[int, msgspec.Meta(ge=0)]


class GreetingHello(msgspec.Struct, frozen=True, array_like=True):
    """The opener's greeting. ``secret``: empty where it wants no wire."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    topic: Annotated[str, msgspec.Meta(max_length=MAX_TOPIC_CHARS, pattern=PLAIN)]
    secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)] = b""


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """What the opener shows once the other side has convinced it."""

    shown: Annotated[bytes, msgspec.Meta(max_length=MAX_SHOWN_BYTES)]


class GreetingAnswer(msgspec.Struct, frozen=True, array_like=True):
    """``code`` "" means yes: to the Hello, with what is ``shown`` and ``recalled``; to the Proof,
    perhaps with a wire.
    """

    code: Annotated[str, msgspec.Meta(max_length=16, pattern=PLAIN)]
    reason: Annotated[str, msgspec.Meta(max_length=1024)]
    wire: WireOffer | None = None
    shown: Annotated[bytes, msgspec.Meta(max_length=MAX_SHOWN_BYTES)] = b""
    recalled: Annotated[bytes, msgspec.Meta(max_length=MAX_RECALLED_BYTES)] = b""


preface_decoder = msgspec.msgpack.Decoder(Preface)
proof_decoder = msgspec.msgpack.Decoder(Proof)
hello_decoder = msgspec.msgpack.Decoder(GreetingHello)
answer_decoder = msgspec.msgpack.Decoder(GreetingAnswer)


def transcript(opener: PeerId, other: PeerId, topic: str) -> bytes:
    """What both ends of a wire bind its keys to."""
    return "|".join((opener, other, topic)).encode()


@dataclass(frozen=True, slots=True)
class Topic:
    """What the owner of a topic registered: see `PeerNetwork.on_message`."""

    handler: Callable[[PeerId, bytes], float | None]
    greet: Callable[[PeerId], bytes]
    admit: Callable[[PeerId, bytes], bool]
    accept: Callable[[PeerId, bytes], bool] = lambda peer, shown: True
    recall: Callable[[PeerId], bytes] = lambda peer: b""
    reminded: Callable[[PeerId, bytes], None] = lambda peer, recalled: None


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_dropped: int = 0
    refusals: int = 0

    def sent(self, nbytes: int) -> None:
        """One more message went out."""
        self.messages_sent += 1
        self.bytes_sent += nbytes


class RefusedError(Exception):
    """The other side does not admit us, or we do not admit it."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason
