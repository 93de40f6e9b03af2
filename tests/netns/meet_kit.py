"""Pairs of peers behind two routers that come from a circuit to a connection of their own: how
many, by which path, and after how long.
"""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

from netns.lab import Lab
from netns.nat import Kind, Router
from netns.reach_kit import Node

FIRST_PORT = 4001


class Meeting(NamedTuple):
    """Of one pair. ``path``: the last one before patience ended; ``seconds``: from the relayed
    connection to the direct one, at the first peer; None where there was no relayed one, or is no
    direct one."""

    path: str
    seconds: float | None


class Meetings:
    """Two public nodes, and behind each of two routers enough peers that ``tries`` pairs can meet
    that never met before.
    """

    def __init__(self, a: Kind, b: Kind, tries: int, *, rtt_ms: float) -> None:
        self._stack, self._tries = ExitStack(), tries
        first = math.isqrt(tries - 1) + 1 if tries > 1 else 1
        with self._stack as stack:
            self.lab = stack.enter_context(Lab(4, internet=True, rtt_ms=rtt_ms))
            public = [stack.enter_context(Node(host, run="run")) for host in self.lab.hosts[:2]]
            known = [node.address for node in public]
            homes = [
                Router(host, kind) for host, kind in zip(self.lab.hosts[2:], (a, b), strict=True)
            ]
            counts = (first, math.ceil(tries / first))
            self.sides = [
                [
                    stack.enter_context(
                        Node(
                            home.hosts[0],
                            run="run",
                            bootstrap=known,
                            listen=[f"/ip4/0.0.0.0/tcp/{FIRST_PORT + number}"],
                        )
                    )
                    for number in range(count)
                ]
                for home, count in zip(homes, counts, strict=True)
            ]
            self._stack = stack.pop_all()

    def meet(self, patience_s: float, *, crossing: bool = False) -> list[Meeting]:
        """Let one pair after the other meet. ``crossing``: both call at the same moment."""
        for node in itertools.chain(*self.sides):
            node.status_when(lambda found: len(found["reach"]["relays"]) == 2)
        pairs = itertools.islice(itertools.product(*self.sides), self._tries)
        return [self._meet(one, other, patience_s, crossing) for one, other in pairs]

    @staticmethod
    def _meet(one: Node, other: Node, patience_s: float, crossing: bool) -> Meeting:
        ends = ((one, other), (other, one))
        for node, met in ends:
            node.until(
                "member",
                lambda member, peer=met.peer: (
                    member[0] == peer and "/p2p-circuit" in str(member[1])
                ),
            )
        for node, met in ends if crossing else ends[:1]:
            node.tell(connect=met.peer)
        one.tell(send=other.peer)

        def direct(path: list[str]) -> bool:
            return path[0] == other.peer and path[1] in ("direct", "punched")

        try:
            one.until("path", direct, patience_s=patience_s)
        except AssertionError:
            return Meeting("relay", None)
        told: list[dict[str, Any]] = [
            event for event in one.events if "path" in event and event["path"][0] == other.peer
        ]
        at = {event["path"][1]: event["at"] for event in reversed(told)}
        path = next(event["path"][1] for event in told if direct(event["path"]))
        return Meeting(path, round(at[path] - at["relay"], 3) if "relay" in at else None)

    def close(self) -> None:
        """End all."""
        self._stack.close()

    def __enter__(self) -> Meetings:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
