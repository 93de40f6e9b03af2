"""What `atoll join` shows while it trains: on a terminal a block that redraws itself, elsewhere one
line a round. To stderr.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...collectives.foreign import escaped, shown
from ..home.output import Terminal, bytes_text, short_peer, span_text
from ..run import events as e
from ..run.status import RunStatus
from .documents import metrics_of, run_state, too_few

if TYPE_CHECKING:
    from rich.live import Live

_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 14
REMEMBERED_LOSSES = 40
SCRIPT_CHARACTERS = 120  # of its line of progress


@dataclass
class RunProgress:
    """What is known of the run, from status documents and events; no I/O."""

    name: str
    rounds: int | None
    round: int = 0
    members: int = 0
    contributors: int = 0
    state: str = "joining"
    over: str = ""  # why the run is finished before its last round
    step: int = 0
    loss: float = math.nan
    bytes_sent: int = 0
    bytes_received: int = 0
    # What this site has spent of it; None in a run without noise.
    privacy: Mapping[str, Any] | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_LOSSES))

    def take_status(self, run: RunStatus) -> None:
        """Take in what the node says of the run."""
        self.members = len(run.members or ())
        self.state = run_state(run)
        self.over = run.over if run.finished else ""
        self.take_metrics(metrics_of(run.metrics))
        self.round = max(self.round, run.round)
        self.privacy = run.privacy or self.privacy
        self._take_traffic(run.bytes_sent or 0, run.bytes_received or 0)

    def take_round(self, event: e.EntryCommittedEvent) -> None:
        """A round was committed."""
        self.round = max(self.round, event.round)
        self.contributors = len(event.contributors) or self.contributors
        self.members = len(event.members)
        self._take_traffic(event.bytes_sent, event.bytes_received)

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """What the script reported, once a round."""
        self.step = int(metrics.get("step", self.step))
        loss = metrics.get("loss", math.nan)
        if math.isfinite(loss) and loss != self.loss:
            self.loss = loss
            self.losses.append(loss)

    def _take_traffic(self, sent: int, received: int) -> None:
        self.bytes_sent = max(self.bytes_sent, sent)
        self.bytes_received = max(self.bytes_received, received)

    def round_line(self, told: int | None = None) -> str:
        """One line for the newest round; ``told``: for that one, which for a newcomer that catches
        up with the log is an earlier one.
        """
        of = f"/{self.rounds}" if self.rounds else ""
        parts = [
            f"round {self.round if told is None else told}{of}",
            f"{self.contributors} of {self.members} members"
            if self.contributors
            else f"{self.members} members",
        ]
        if math.isfinite(self.loss):
            parts.append(f"loss {self.loss:.4f}")
        if self.step:
            parts.append(f"step {self.step}")
        if self.privacy:
            parts.append(f"epsilon {self.privacy['epsilon']:.3g}")
        parts.append(f"{bytes_text(self.bytes_sent)} sent")
        return "  ".join(parts)


def sparkline(values: Iterable[float]) -> str:
    """One character a value."""
    found = list(values)
    if not found:
        return ""
    low, high = min(found), max(found)
    return "".join(
        _BARS[int((len(_BARS) - 1) * (v - low) / (high - low))] if high > low else _BARS[0]
        for v in found
    )


class TrainingView:
    """The view, as a context. Its methods may be called from any thread."""

    def __init__(
        self, terminal: Terminal, progress: RunProgress, *, own_script: bool = True
    ) -> None:
        """``own_script``: whether a script of the user's trains, whose loop may be at fault."""
        self._terminal = terminal
        self._progress = progress
        self._own_script = own_script
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._waits = ""  # what was last said of sites that are missing
        self._script = ""  # its newest line of progress
        self._paused = ""  # why the script is kept from training, as last said
        self.starting = False  # the script waits for the members that the run is to begin with
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._terminal.live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                self._block(),
                console=Console(file=sys.stderr),
                refresh_per_second=4,
                transient=True,
            )
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
            live, self._live = self._live, None
        if live is not None:
            live.__exit__(kind, error, trace)

    def redraw(self, text: str) -> None:
        """What the script writes over and over, such as a progress bar: one line, until it writes
        another.
        """
        with self._lock:
            self._script = text or self._script
            self._refresh()

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._script = ""
            if self._live is not None:
                self._live.console.print(shown(text), markup=False, highlight=False)
            else:
                self._terminal.say(text)

    def take_status(self, run: RunStatus, *, draining: bool) -> None:
        """What the node says of the run."""
        with self._lock:
            self._progress.take_status(run)
            if run.phase == "running" and not (
                run.script or run.starting or run.finished or run.paused
            ):
                # to whoever started it, "no script" would be the opposite of what is going on
                self._progress.state = "the script that was started here loads; it has not attached"
            self.starting = run.starting is not None
            if self.starting and self._terminal.interactive:
                self._progress.state += ", or press Enter"
            if (waits := too_few(run)) != self._waits:
                self._waits = waits
                if waits and self._live is None:
                    self.say(waits)
            if (paused := run.paused) != self._paused:
                self._paused = paused
                if self._live is None:
                    self.say(
                        f"training is {escaped(paused)}; the node serves the run"
                        if paused
                        else "training may go on"
                    )
            if draining:
                self._progress.state = (
                    "draining: the round is finished or handed over; Ctrl-C again to stop now"
                )
            self._refresh()

    def take_event(self, event: e.RunEvent) -> None:
        """An event of the run."""
        with self._lock:
            if self._closed:
                return
            match event:
                case e.EntryCommittedEvent():
                    self._take_entry(event)
                case e.ScriptReportEvent():
                    self._progress.take_metrics(metrics_of(event.metrics))
                case e.PeerMisbehavedEvent():
                    self.say(event.words())
                case e.SumDisputedEvent():
                    wrong = ", ".join(map(short_peer, event.wrong))
                    self.say(
                        f"{short_peer(event.owner)} says that {wrong} stated another sum of its "
                        "site than its members contributed"
                    )
                case e.SumsDifferEvent():
                    self.say(
                        f"{' and '.join(map(short_peer, event.peers))} state different sums of a "
                        "part; others add it up anew, and one of them, or one that sent them "
                        "different things, lies"
                    )
                case e.VerdictWithdrawnEvent():
                    return
                case e.VerdictRaisedEvent():
                    of = f"{short_peer(event.subject)} " if event.subject else ""
                    code = escaped(event.code, 16)
                    self.say(f"{code} {of}{escaped(event.said, 2000)}; atoll explain {code}")
                case e.ScriptIdleEvent():
                    why = (
                        "does its loop call optimizer.step()?"
                        if self._own_script
                        else "a first step may take minutes on a slow or busy machine, where "
                        "--threads 1 may be faster"
                    )
                    self.say(f"{event.words()}; {why}")
                case e.StorageTroubleEvent() | e.RunTroubleEvent():
                    self.say(f"{event.code} {event.message}; {event.hint}")
                case _:
                    return
            self._refresh()

    def _take_entry(self, event: e.EntryCommittedEvent) -> None:
        self._progress.take_round(event)
        if event.lost:
            self.say(
                f"lost {', '.join(map(short_peer, event.lost))}; "
                + (
                    "the round was decided without it, nothing to do"
                    if isinstance(event, e.RoundCommittedEvent)
                    else "it is no member until it is back"
                )
            )
        if self._live is None and isinstance(event, e.RoundCommittedEvent):
            self.say(self._progress.round_line(event.round))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._block())

    def _block(self) -> Any:
        from rich.text import Text

        p = self._progress
        text = Text()
        text.append(f"{escaped(p.name)}  ", style="bold")
        text.append(escaped(p.state), style="green" if p.state == "training" else "yellow")
        text.append(f"  {span_text(time.monotonic() - self._started_s)}\n")
        if p.rounds:
            filled = min(_BAR_WIDTH, _BAR_WIDTH * p.round // p.rounds)
            text.append("━" * filled, style="cyan")
            text.append("━" * (_BAR_WIDTH - filled) + "  ", style="dim")
        text.append(f"{p.round_line()}, {bytes_text(p.bytes_received)} received\n")
        if self._script:
            text.append(f"{shown(self._script)[:SCRIPT_CHARACTERS]}\n")
        if p.losses:
            text.append(f"loss {sparkline(p.losses)}\n", style="magenta")
        text.append("Ctrl-C drains: the round is finished or handed over first", style="dim")
        return text
