"""What is wrong with one run at this node: for `atoll status`, subscribers and the log. And how an
exception becomes a coded error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import trio

from ...collectives.errors import (
    AtollError,
    DoubledError,
    LocalProtocolError,
    RemovedError,
    StateError,
)
from ...collectives.identifiers import PeerId
from ..home.last_resort import refused
from ..run.events import RunEvent, RunTroubleEvent, StorageMendedEvent, StorageTroubleEvent
from ..session.events import HistorySplit

log = logging.getLogger("atoll")
HISTORY = 8
REPEAT_S = 60.0  # the same trouble is logged and published again after this long
REMEMBERED = 16  # troubles whose last telling is remembered


class Troubles:
    """Made in the node's trio thread; `tell` may be called in any thread, the rest in that one."""

    def __init__(self, run_id: str, publish: Callable[[RunEvent], None]) -> None:
        self.current: AtollError | None = None
        self._run_id, self._publish = run_id, publish
        self._past: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._token, self._thread = trio.lowlevel.current_trio_token(), threading.get_ident()
        self._reported_at: dict[str, float] = {}  # by trouble, the newest last
        self._storage_fails = self._failed_again = False

    def tell(self, error: AtollError) -> None:
        """Something fails; the run goes on as far as it can."""
        if threading.get_ident() != self._thread:
            with suppress(OSError):  # to wake trio is refused: it is queued all the same
                self._token.run_sync_soon(self.tell, error)
            return
        self.current = error
        storage = error.code in ("E303", "E501")
        self._storage_fails |= storage
        self._failed_again |= storage
        # A full disk fails one file after another, and small writes succeed in between: it is one
        # trouble.
        now, what = time.monotonic(), error.code if error.code == "E501" else error.message
        if now - self._reported_at.get(what, -REPEAT_S) < REPEAT_S:
            return
        self._reported_at.pop(what, None)
        self._reported_at[what] = now
        if len(self._reported_at) > REMEMBERED:
            del self._reported_at[next(iter(self._reported_at))]
        log.warning("run %s: %s %s", self._run_id, error.code, error.message)
        self._past.append({"at": time.time(), **described(error)})
        kind = StorageTroubleEvent if storage else RunTroubleEvent
        self._publish(kind.of(error, self._run_id))

    @property
    def storage_fails(self) -> bool:
        """Whether what must be written is refused, or was so in the newest round."""
        return self._storage_fails

    def clear(self) -> None:
        """A round is committed. Storage that has not failed since the round before works again."""
        self.current = None
        if self._storage_fails and not self._failed_again:
            self._storage_fails = False
            self._reported_at.pop("E501", None)  # should it fail again, that is news
            log.info("run %s: what must be written is written again", self._run_id)
            self._publish(StorageMendedEvent(run=self._run_id))
        self._failed_again = False

    def past(self) -> list[dict[str, Any]]:
        """The last ones, oldest first, each with the time it was told first."""
        return list(self._past)


def other_histories(
    foreign: Collection[PeerId], splits: Mapping[PeerId, HistorySplit]
) -> StateError | None:
    """These peers are on another history of a run: a trouble for as long as it is so. ``splits``:
    where the logs of those part that begin as ours.
    """
    if not foreign:
        return None
    who = (
        f"{', '.join(peer[-8:] for peer in sorted(foreign))} {'is' if len(foreign) == 1 else 'are'}"
    )
    found = next((splits[peer] for peer in sorted(foreign) if peer in splits), None)
    what = "it was founded twice"
    why = "The organiser's node had lost the run's state and founded it again."
    if found is not None:
        what = (
            f"entry {found.round} is {found.mine.hex()[:12]} here and {found.theirs.hex()[:12]} "
            f"there (newest: {found.my_newest} here, {found.their_newest} there)"
        )
        why = (
            "A home was put back from an old copy, or copied, and decided again what it did not "
            "know to be decided; or a member that `atoll recertify` gave up voted on."
        )
    return StateError(
        f"{who} on another history of this run; {what}",
        code="E305",
        why=f"{why} The two never meet: each trains without the other.",
        hint=(
            "Choose one. On every machine of the other: atoll down, move the run's folder "
            "away, atoll up, join again."
        ),
    )


def removed_here() -> RemovedError:
    """The organiser has removed this node's present life from the run."""
    return RemovedError(
        "the organiser has removed this node from the run",
        why=(
            "It was taken to be lost for ever (`atoll recertify`). What it did since is in no "
            "certified round; its votes count no more."
        ),
        hint=(
            "To come back as a new member: atoll down, move the run's folder "
            "away, atoll up, join again."
        ),
    )


def doubled_here() -> DoubledError:
    """Another process lives under this node's key."""
    return DoubledError(
        "another process has this node's key and lives; neither votes any more",
        why=(
            "Two with one key could vote twice in one round. This happens when a home is copied to "
            "another machine, or is in an image."
        ),
        hint=(
            "Stop one of the two. On its machine enter again with a key of its own: atoll join "
            "INVITE --fresh-key. Then start the other again."
        ),
    )


def described(error: AtollError) -> dict[str, Any]:
    """Code, message, why and hint."""
    return {"code": error.code, "message": error.message, "why": error.why, "hint": error.hint}


def coded(error: BaseException, where: str) -> AtollError:
    """An AtollError as it is; what the system refused as E501 or E502, without a traceback; all
    else is a defect of ours: logged with its traceback, and E142 for everybody else.

    Of an exception group the first AtollError counts, else the first refusal, else the first of
    all.
    """
    errors = list(_leaves(error))
    known = next((e for e in errors if isinstance(e, AtollError)), None)
    if known is not None and not isinstance(known, LocalProtocolError):
        return known
    refusals = [] if known is not None else [refused(each, where) for each in errors]
    if (refusal := next(filter(None, refusals), None)) is not None:
        log.error("%s %s", refusal.code, refusal.message)
        return refusal
    log.error("%s failed", where, exc_info=error)
    return known or LocalProtocolError(
        f"{where} failed: {type(errors[0]).__name__}: {errors[0]}",
        why="This is a defect of atoll.",
        hint=(
            "The node's log has the traceback. What was committed is safe; entering the "
            "run again tries again."
        ),
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
