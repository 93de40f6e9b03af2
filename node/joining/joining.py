"""`join()`: from an invite to a swarm, in one call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..client.reattach import RunEntry
from ..client.starting import BEGIN_VARIABLE
from ..control.protocol import JoinRequest
from ..home.process_title import hide_invites
from ..run.invite import is_invite
from .beginning import beginning
from .find import Dial
from .speaking import end_in_words, speak
from .swarm import RunSwarm

PROGRESS_S = 2.0  # seconds between two lines about the same stage


def join(
    invite_or_run: str = "",
    *,
    home: str | Path | None = None,
    private: bool | None = None,
    name: str | None = None,
    quiet: bool | None = None,
    begin: bool | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    command: Sequence[str] = (),
) -> RunSwarm:
    """Enter a run with this machine's node.

    Args:
        invite_or_run: an invite (``atoll2:…``), or a run the node is in: its id, a unique prefix of
            it, or its name. Left out: what ``ATOLL_RUN`` or ``ATOLL_INVITE`` says
            (`atoll join --script` sets them), else the node's only run.
        home: folder of the node's files; default ``ATOLL_HOME``, else the XDG folders.
        private: None: the running node if there is one, else a private node that ends with this
            script. True: a private node. False: a running node.
        name: what other members see.
        quiet: whether only warnings are said of the run, and not a line for each round and each
            peer that comes or goes; None: as ``ATOLL_QUIET`` says. A script with logging of its own
            finds both under the logger ``atoll``, whatever this says.
        begin: whether to train at once, though fewer members are there than the run is to begin
            with (``[train] start_with``); None: as ``ATOLL_BEGIN`` says, by default not.
        progress: told (stage, done, total) while the state is fetched; default: lines to stderr.
        command: replaces ``python -m atoll.node`` as the private node's command.

    Raises:
        NetworkError: E003, no node runs and ``private`` is False; or nobody of the run was reached.
        StateError: E102, the home's node is another script's, or ``private`` is True and a node
            runs.
        SwarmClosedError: E161, the private node does not start.
        ConfigError, NotAdmittedError: the run is unknown; the invite is wrong or expired.

    When the node goes away meanwhile, it waits for another one. Ctrl-C while it waits leaves no
    process behind.
    """
    speak(quiet)
    end_in_words()
    hide_invites()  # a script may have been given it as an argument
    invite_or_run = (
        invite_or_run or os.environ.get("ATOLL_RUN", "") or os.environ.get("ATOLL_INVITE", "")
    )
    dial = Dial(home, private=private, command=command)
    on_progress = progress or Lines()
    if is_invite(invite_or_run):
        request, run = JoinRequest(invite=invite_or_run, name=name or ""), ""
    else:
        request, run = None, invite_or_run
    entry = RunEntry(dial, request, run, start_from=beginning)
    try:
        link, info = entry.outlive(lambda: entry.enter(on_progress), on_progress)
    except BaseException:
        dial.close()
        raise
    if begin is None:
        begin = os.environ.get(BEGIN_VARIABLE, "") not in ("", "0")
    return RunSwarm(entry, link, info, on_progress, begin=begin)


class Lines:
    """Progress as lines on stderr: each stage once, and again while it moves, at most every
    PROGRESS_S seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown: tuple[str, int, int] = ("", 0, 0)
        self._shown_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """One progress report."""
        now = self._clock()
        if self._shown == (stage, done, total) or (
            stage == self._shown[0] and now - self._shown_s < PROGRESS_S
        ):
            return
        self._shown, self._shown_s = (stage, done, total), now
        share = f" {100 * done // total}%" if total else ""
        print(f"atoll: {stage}{share}", file=sys.stderr, flush=True)
