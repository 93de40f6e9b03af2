"""The demo on a terminal: a block that redraws itself, or one plain line a round where nobody looks
at a terminal. To stderr.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .board import Board, PeerRow
from .plot import sparkline

SILENCE_S = 4.0
"""The longest time without a word where nobody looks at a block that redraws itself."""
_COLOURS = {
    "starting": "dim",
    "joining": "yellow",
    "training": "green",
    "killed": "red",
    "finished": "cyan",
    "failed": "red",
}
_SIGNS = {
    "starting": "…",
    "joining": "↓",
    "training": "●",
    "killed": "✗",
    "finished": "✓",
    "failed": "!",
}


def doing(board: Board) -> str:
    """What happens now, in one line."""
    if board.round >= board.rounds_total:
        steps = f"step {board.solo_step} of {board.rounds_total * board.sync_every}"
        return f"{board.phase}: {steps}; {len(board.evaluations)} models of the swarm evaluated"
    peers = [
        f"{row.name} {peer_words(row)}" + (f", step {row.step}" if row.step else "")
        for row in board.rows.values()
        if row.note or row.state not in ("starting", "killed")
    ]
    return "; ".join([board.phase, *peers])


class Screen(AbstractContextManager["Screen"], Protocol):
    """Where the demo shows itself."""

    def show(self, board: Board, now_s: float) -> None:
        """The state now, ``now_s`` seconds after the start; called several times a second."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...


def mib(count: float) -> str:
    """``1536 * 1024`` as ``1.5 MiB``; GiB from 1,000 MiB on."""
    return f"{count / 2**30:.2f} GiB" if count >= 1000 * 2**20 else f"{count / 2**20:.1f} MiB"


def traffic(board: Board) -> str:
    """Bytes sent against plain data-parallel training, in words."""
    sent, ddp = board.bytes_sent, board.ddp_equivalent_bytes
    if not ddp:
        return "nothing sent yet"
    return (
        f"sent {mib(sent)}; DDP would have sent {mib(ddp)} for the same steps "
        f"({ddp / max(sent, 1):.0f} times as much)"
    )


def strip(board: Board, name: str) -> str:
    """One character a round: whether this peer's contribution is in it."""
    found = {row.round: name in row.contributors for row in board.rounds}
    kill = next(
        (
            event.round + 1
            for event in board.happenings
            if event.kind == "killed" and event.name == name
        ),
        0,
    )
    cells = [
        "✗"
        if number == kill
        else "█"
        if found.get(number)
        else "·"
        if number <= board.round
        else " "
        for number in range(1, board.rounds_total + 1)
    ]
    return "".join(cells)


def peer_words(row: PeerRow) -> str:
    """State of a peer in a few words."""
    words = {
        "starting": "starting",
        "joining": "joining",
        "training": "training",
        "killed": "killed (SIGKILL)",
        "finished": "done",
        "failed": "failed",
    }
    return (
        f"{words[row.state]}: {row.note}"
        if row.note and row.state in ("starting", "joining", "failed")
        else words[row.state]
    )


class LiveScreen:
    """A block of lines at the bottom of the terminal."""

    def __init__(self, *, colour: bool = True) -> None:
        self._console = Console(file=sys.stderr, no_color=not colour, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, board: Board, now_s: float) -> None:
        self._live.update(self.block(board, now_s), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def block(self, board: Board, now_s: float) -> Group:
        """The block as rich renders it."""
        lines = [
            Text(
                (
                    f"atoll demo   {board.phase}   round "
                    f"{board.round}/{board.rounds_total}   {now_s:.0f} s"
                ),
                style="bold",
            )
        ]
        for row in board.rows.values():
            line = Text(f"{_SIGNS[row.state]} {row.name}  ", style=_COLOURS[row.state])
            line.append(f"{peer_words(row):<26.26}")
            line.append(f"step {row.step:<5}")
            line.append(strip(board, row.name))
            if math.isfinite(row.loss):
                line.append(
                    f"  loss {row.loss:.3f} {sparkline([loss for _, loss in row.losses], 16)}"
                )
            lines.append(line)
        lines.append(Text(traffic(board), style="dim"))
        return Group(*lines)


class PlainScreen:
    """A line for each phase and each committed round, and where nothing comes for `SILENCE_S` one
    that says what is under way.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._shown, self._phase = quiet, 0, ""
        self._said, self._said_s = False, 0.0

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def show(self, board: Board, now_s: float) -> None:
        """Print what is new since the last call."""
        if board.phase != self._phase:
            self._phase = board.phase
            self.say(f"{now_s:5.1f} s  {board.phase}")
        for row in board.rounds[self._shown :]:
            losses = [
                peer.loss
                for peer in board.rows.values()
                if peer.state == "training" and math.isfinite(peer.loss)
            ]
            loss = f"  loss {sum(losses) / len(losses):.3f}" if losses else ""
            self.say(
                f"round {row.round:3}/{board.rounds_total}  {row.at_s:5.1f} s  "
                f"{', '.join(row.contributors)}{loss}"
            )
        self._shown = len(board.rounds)
        if not self._said and now_s - self._said_s >= SILENCE_S:
            self.say(f"{now_s:5.1f} s  {doing(board)}")
        if self._said:
            self._said, self._said_s = False, now_s

    def say(self, text: str) -> None:
        self._said = True
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)
