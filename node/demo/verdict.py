"""What came out of a demo: the checks that decide its exit status, the table for people, the object
for machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .board import Board, PeerRow
from .plot import Mark, braille_plot
from .view import mib

# Of the held-out loss before training; 700 steps reach about 0.45, --quick about 0.6.
MUST_FALL_TO = 0.75


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result. ``failures`` is empty when everything that the demo promises held."""

    board: Board
    seconds: float
    loss_start: float
    loss_swarm: float
    loss_solo: float | None
    anchors_identical: bool
    joined_late: bool
    recovery_s: float | None
    failures: tuple[str, ...]
    files: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints; its keys are stable."""
        board = self.board
        return {
            **self.extra,
            "ok": self.ok,
            "failures": list(self.failures),
            "anchors_identical": self.anchors_identical,
            "peers": len(board.rows),
            "killed": any(event.kind == "killed" for event in board.happenings),
            "joined_late": self.joined_late,
            "recovery_s": None if self.recovery_s is None else round(self.recovery_s, 3),
            "loss_start": round(self.loss_start, 4),
            "loss_swarm": round(self.loss_swarm, 4),
            "loss_solo": None if self.loss_solo is None else round(self.loss_solo, 4),
            "rounds": board.round,
            "bytes_sent": board.bytes_sent,
            "ddp_equivalent_bytes": board.ddp_equivalent_bytes,
            "seconds": round(self.seconds, 1),
            "runs": [
                {
                    "round": row.round,
                    "at_s": round(row.at_s, 3),
                    "contributors": list(row.contributors),
                    "samples": row.samples,
                }
                for row in board.rounds
            ],
            "files": list(self.files),
        }

    def text(self) -> str:
        """The plot and the table."""
        board = self.board
        marks = [
            Mark(event.round, "✗" if event.kind == "killed" else "+") for event in board.happenings
        ]
        lines = [
            "",
            *braille_plot([board.evaluations[1:], board.solo[1:]], marks=marks, x_label="rounds"),
        ]
        solo = (
            ""
            if not board.solo
            else "; the upper line where they part: one machine alone"
            if self._better
            else "; two lines: the swarm and one machine alone"
        )
        lines += [
            f"        held-out loss of the anchor after training began (✗ kill, + late join{solo})",
            "",
        ]
        lines += [f"  {name:<28}{value}" for name, value in self._table()]
        lines += ["", *(f"  FAILED  {failure}" for failure in self.failures)]
        return "\n".join(lines).rstrip()

    @property
    def _better(self) -> bool:
        return self.loss_solo is not None and self.loss_swarm < self.loss_solo

    def _table(self) -> list[tuple[str, str]]:
        board = self.board
        rows = [
            (
                "held-out loss, swarm",
                f"{self.loss_swarm:.4f} nats per byte (before training {self.loss_start:.4f})",
            )
        ]
        if self.loss_solo is not None:
            rows.append(
                (
                    "held-out loss, one machine",
                    (
                        f"{self.loss_solo:.4f} at equal steps; the swarm's is "
                        f"{self.loss_swarm / self.loss_solo:.3f} of it"
                    ),
                )
            )
        rows.append(
            (
                "anchors of the survivors",
                "identical, bit for bit" if self.anchors_identical else "DIFFERENT",
            )
        )
        if self.recovery_s is not None:
            rows.append(
                (
                    "recovery",
                    (
                        f"{self.recovery_s:.1f} s from the SIGKILL to the next committed "
                        "round without that peer"
                    ),
                )
            )
        late = [
            row
            for row in board.rows.values()
            if any(e.kind == "joined" and e.name == row.name for e in board.happenings)
        ]
        rows += [
            (f"{row.name}, joined late", f"contributed to {row.counted} rounds") for row in late
        ]
        rows.append(("bytes sent, all peers", f"{mib(board.bytes_sent)}"))
        rows.append(
            (
                "DDP, the same steps",
                f"{mib(board.ddp_equivalent_bytes)} (bf16 gradients, ring all-reduce, every step)",
            )
        )
        rows.append(("rounds, time", f"{board.round} rounds, {self.seconds:.0f} s in all"))
        rows += [("file", name) for name in self.files]
        return rows


def survivors(board: Board) -> list[PeerRow]:
    """The peers that were meant to reach the end."""
    return [row for row in board.rows.values() if row.state != "killed"]


def judge(
    board: Board,
    *,
    seconds: float,
    solo: bool,
    kill: bool,
    late: str | None,
    files: tuple[str, ...],
    extra: dict[str, Any],
) -> DemoResult:
    """Look at what the peers reported and decide. ``late``: the name of the late peer, None where
    none was to join.
    """
    rows = survivors(board)
    failures = [
        f"{row.name} did not finish: {row.state} {row.note}".rstrip()
        for row in rows
        if row.state != "finished"
    ]
    if not board.identical:
        digests = {
            (row.final.get("round"), row.final.get("anchor_bits")) for row in rows if row.final
        }
        failures.append(
            f"the anchors of {', '.join(row.name for row in rows)} are not the same: "
            f"{sorted(map(str, digests))}"
        )
    start, end = (
        (board.evaluations[0][1], board.evaluations[-1][1])
        if board.evaluations
        else (math.nan, math.nan)
    )
    if not end <= MUST_FALL_TO * start:
        failures.append(f"the loss did not fall: {start:.4f} before, {end:.4f} after")
    recovery = board.recovery_s()
    if kill and recovery is None:
        failures.append(
            "no round was committed after the kill" if board.happenings else "nobody was killed"
        )
    joined = late is not None and board.rows[late].counted > 0
    if late is not None and not joined:
        failures.append(f"{late} joined late and contributed to no round")
    loss_solo = board.solo[-1][1] if solo and board.solo else None
    if solo and loss_solo is None:
        failures.append("the run of one machine alone gave no result")
    return DemoResult(
        board,
        seconds,
        start,
        end,
        loss_solo,
        board.identical,
        joined,
        recovery,
        tuple(failures),
        files,
        extra,
    )
