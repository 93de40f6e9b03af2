"""The commands of an `Exchange`, for other threads: each is queued and run in the engine's thread,
in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..codecs.encoded import EncodedVector
from ..exchange import Bounds
from ..group import MAX_STAR, Plan
from ..identifiers import PeerId


class EngineExchange:
    """Same names and meaning as `Exchange`. Nothing is returned or raised; a refused command is
    reported as `CommandFailed`.

    Commands are asynchronous: memory handed over with `freeze`, `provide` or `want` is in use until
    the engine has run the `release`, `withdraw` or `unwant` (see `EngineThread.sync`).
    """

    def __init__(self, submit: Callable[..., None]) -> None:
        self._submit: Callable[..., Any] = submit

    def open_round(
        self,
        log: str,
        round_: int,
        members: Sequence[PeerId],
        numel: int,
        chunk_elements: int,
        codec: str,
        early: int | None = None,
        most: int = MAX_STAR,
        overflows: bool = False,
        witnesses: int = 0,
    ) -> None:
        opened = (log, round_, tuple(members), numel, chunk_elements, codec, early, most)
        self._submit("open_round", *opened, overflows, witnesses)

    def freeze(self, log: str, round_: int, cid: bytes, vector: Tensor | EncodedVector) -> None:
        self._submit("freeze", log, round_, cid, vector)

    def release(self, cid: bytes) -> None:
        self._submit("release", cid)

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        self._submit("execute", plan, tuple(audience))

    def close_round(self, log: str, round_: int, *, linger: bool = True) -> None:
        self._submit("close_round", log, round_, linger=linger)

    def resend_parts(
        self, peer: PeerId, plan_id: bytes, cid: bytes, spans: Iterable[tuple[int, int]]
    ) -> None:
        self._submit("resend_parts", peer, plan_id, cid, tuple(spans))

    def resend_results(
        self, peer: PeerId, plan_id: bytes, spans: Iterable[tuple[int, int]]
    ) -> None:
        self._submit("resend_results", peer, plan_id, tuple(spans))

    def report(self, plan_id: bytes) -> None:
        self._submit("report", plan_id)

    def provide(self, name: bytes, data: memoryview, bounds: Bounds) -> None:
        self._submit("provide", name, data, bounds)

    def withdraw(self, name: bytes) -> None:
        self._submit("withdraw", name)

    def send_blob(self, peer: PeerId, name: bytes, spans: Iterable[tuple[int, int]]) -> None:
        self._submit("send_blob", peer, name, tuple(spans))

    def want(
        self,
        name: bytes,
        destination: memoryview,
        bounds: Bounds,
        hashes: Sequence[bytes],
        sources: Sequence[PeerId],
    ) -> None:
        self._submit("want", name, destination, bounds, tuple(hashes), tuple(sources))

    def unwant(self, name: bytes) -> None:
        self._submit("unwant", name)

    def report_blob(self, name: bytes) -> None:
        self._submit("report_blob", name)
