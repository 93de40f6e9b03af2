"""Frames as bytes: a message or evidence in msgpack, a vector as a header and its raw values. All
sizes are bounded before anything is made of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from ...collectives.errors import RemoteProtocolError
from ...collectives.foreign import quoted
from .messages import FLOAT, TAG_BYTES, Bundle, CommittedVector, Frame, Hash, Item, Signed, Step

MAX_CONTROL_BYTES = 1 << 21
MAX_HEADER_BYTES = 1 << 12


class VectorHeader(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What stands before the values of a `CommittedVector`."""

    step: Step
    tag: Annotated[bytes, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
    item: Item
    path: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=64)] = ()


_control = msgspec.msgpack.Decoder(Signed | Bundle)
_header = msgspec.msgpack.Decoder(VectorHeader)


def encode(frame: Frame) -> tuple[bytes, bytes]:
    """A frame as (control bytes, raw values); the second is empty but for vectors."""
    if isinstance(frame, CommittedVector):
        header = VectorHeader(frame.step, frame.tag, frame.item, frame.path)
        return msgspec.msgpack.encode(header), np.ascontiguousarray(frame.values, FLOAT).tobytes()
    return msgspec.msgpack.encode(frame), b""


def decode(control: bytes, values: bytes, *, peer: str, elements: int) -> Frame:
    """A frame from ``peer``. ``elements``: as many values as any vector of the run can have. Raises
    RemoteProtocolError E141 that names the peer.
    """
    limit = MAX_HEADER_BYTES if values else MAX_CONTROL_BYTES
    if (
        len(control) > limit
        or len(values) > FLOAT.itemsize * elements
        or len(values) % FLOAT.itemsize
    ):
        raise RemoteProtocolError(
            f"a frame of {len(control)} and {len(values)} bytes is no frame of a step", peer=peer
        )
    try:
        if not values:
            return _control.decode(control)
        header = _header.decode(control)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed frame of a step: {quoted(error)}", peer=peer
        ) from None
    return CommittedVector(
        header.step, header.tag, header.item, np.frombuffer(values, FLOAT), header.path
    )
