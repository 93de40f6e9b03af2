"""Errors of the node as messages: they reach the client with their class, code and texts.
Sans-IO.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...collectives import errors
from ...collectives.errors import AtollError

Id = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Of a request, and of what answers it."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An AtollError of class ``kind``. ``id`` 0: no answer; the node then closes the connection."""

    id: Id
    kind: str
    code: str
    message: str
    why: str = ""
    hint: str = ""
    exit_code: int = 1
    retryable: bool = False
    peer: str = ""
    key: str = ""


_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, AtollError)
}


def failure(id_: int, error: AtollError) -> Failure:
    """An error as a message; the texts are cut to what a frame can carry."""
    return Failure(
        id_,
        type(error).__name__,
        error.code,
        error.message[:65_536],
        error.why[:8_192],
        error.hint[:8_192],
        error.exit_code,
        error.retryable,
        str(getattr(error, "peer", "")),
        str(getattr(error, "key", "")),
    )


def error_of(answer: Failure) -> AtollError:
    """The error that a Failure carries, of its own class where this side knows it."""
    kind: Any = _KINDS.get(answer.kind, AtollError)
    if issubclass(kind, errors.ConfigError):
        error = kind(answer.message, key=answer.key)
    elif issubclass(kind, errors._PeerError):
        error = kind(answer.message, peer=answer.peer)
    else:
        error = kind(answer.message)
    error.code, error.why, error.hint = answer.code, answer.why, answer.hint
    error.exit_code, error.retryable = answer.exit_code, answer.retryable
    error.annotate()
    return error
