"""What the demo knows at a moment: peers, rounds, losses, bytes. Fed with JSON lines and instants;
no I/O, no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..look.view import ddp_bytes as own_ddp_bytes

PeerState = Literal["starting", "joining", "training", "killed", "finished", "failed"]
SMOOTHING = 0.9  # of the loss shown while training; the table quotes held-out losses only


@dataclass(slots=True)
class PeerRow:
    """One peer, by the name it has on screen."""

    name: str
    peer: str = ""  # its id, once known
    state: PeerState = "starting"
    note: str = ""
    round: int = 0
    step: int = 0
    loss: float = math.nan  # smoothed training loss
    # (round and a fraction, smoothed loss).
    losses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    round_step: int = 0  # the step at which this peer's current round began
    counted: int = 0  # committed rounds that hold a contribution of this peer
    bytes_sent: int = 0
    final: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One committed round, as the first peer to tell of it told it."""

    round: int
    at_s: float  # seconds since the demo's start
    contributors: tuple[str, ...]  # names on screen
    samples: int


@dataclass(frozen=True, slots=True)
class Happening:
    """A kill or a late join: when, after which round, and whom it concerns."""

    kind: Literal["killed", "joined"]
    name: str
    at_s: float
    round: int


def ddp_bytes(contributors: int, params: int) -> float:
    """Bytes that ``contributors`` peers would send together for one step of plain data-parallel
    training.
    """
    return contributors * own_ddp_bytes(contributors, params)


class Board:
    """The state of the demo. ``rounds_total`` rounds of ``sync_every`` steps on a model of
    ``params`` parameters.
    """

    def __init__(
        self, names: list[str], *, rounds_total: int, sync_every: int, params: int
    ) -> None:
        self.rows = {name: PeerRow(name) for name in names}
        self.rounds_total, self.sync_every, self.params = rounds_total, sync_every, params
        self.rounds: list[RoundRow] = []
        self.happenings: list[Happening] = []
        self.evaluations: list[tuple[int, float]] = []  # (round, held-out loss of the anchor)
        # (steps as rounds, held-out loss of one machine alone).
        self.solo: list[tuple[float, float]] = []
        self.solo_step = 0
        self.phase = "starting"

    @property
    def round(self) -> int:
        """The newest committed round."""
        return self.rounds[-1].round if self.rounds else 0

    @property
    def bytes_sent(self) -> int:
        """What all peers sent, as their nodes counted it."""
        return sum(row.bytes_sent for row in self.rows.values())

    @property
    def ddp_equivalent_bytes(self) -> int:
        """What plain data-parallel training of the same steps would have sent (`ddp_bytes`)."""
        return round(
            sum(
                self.sync_every * ddp_bytes(len(row.contributors), self.params)
                for row in self.rounds
            )
        )

    @property
    def identical(self) -> bool:
        """Whether several peers are left and all ended with one anchor, by its bits."""
        left = [row.final for row in self.rows.values() if row.state != "killed"]
        bits = {(final.get("round"), final.get("anchor_bits")) for final in left}
        return len(bits) == 1 < len(left) and all(final.get("anchor_bits") for final in left)

    def name_of(self, peer: str) -> str:
        return next((row.name for row in self.rows.values() if row.peer == peer), peer[-8:])

    def line(self, name: str, record: Mapping[str, Any], at_s: float) -> None:
        """Take in one JSON line of a peer's script. Unknown events are ignored."""
        row = self.rows[name]
        if row.state == "killed":
            return
        match record.get("event"):
            case "joined":
                row.peer, row.state = str(record.get("peer", "")), "joining"
            case "progress":
                row.note = str(record.get("stage", ""))
            case "state":
                row.state, row.note, row.round = "training", "", int(record.get("round", 0))
            case "step":
                self._step(row, record)
            case "round":
                self._round(row, record, at_s)
            case "final":
                row.final, row.state = dict(record), "finished"
            case "error":
                row.state, row.note = "failed", str(record.get("message", ""))
            case _:
                pass

    def _step(self, row: PeerRow, record: Mapping[str, Any]) -> None:
        row.state, row.step = "training", int(record.get("step", row.step))
        loss = float(record.get("loss", math.nan))
        if math.isfinite(loss):
            row.loss = (
                loss if math.isnan(row.loss) else SMOOTHING * row.loss + (1 - SMOOTHING) * loss
            )
            row.losses.append(
                (row.round + min(1.0, (row.step - row.round_step) / self.sync_every), row.loss)
            )

    def _round(self, row: PeerRow, record: Mapping[str, Any], at_s: float) -> None:
        if record.get("status") != "committed":
            row.note = str(record.get("reason") or record.get("status") or "")
            return
        row.note = ""
        number = int(record["round"])
        if number > row.round:
            row.round, row.round_step = number, row.step
        row.counted += bool(record.get("counted"))
        row.bytes_sent += int(record.get("bytes_sent", 0))
        if number > self.round:
            shares: list[Mapping[str, Any]] = list(record.get("contributors", ()))
            contributors = tuple(self.name_of(str(share["peer"])) for share in shares)
            self.rounds.append(
                RoundRow(
                    number,
                    at_s,
                    contributors,
                    sum(int(share.get("samples", 0)) for share in shares),
                )
            )

    def measured(self, record: Mapping[str, Any]) -> None:
        """Take in one JSON line of `measure`."""
        match record.get("event"):
            case "anchor":
                self.evaluations.append((int(record["round"]), float(record["held_out"])))
            case "alone":
                self.solo.append((record["step"] / self.sync_every, float(record["held_out"])))
            case "step":
                self.solo_step = int(record["step"])
            case _:
                pass

    def killed(self, name: str, at_s: float) -> None:
        self.rows[name].state = "killed"
        self.happenings.append(Happening("killed", name, at_s, self.round))

    def joined_late(self, name: str, at_s: float) -> None:
        """A late peer took part for the first time."""
        self.happenings.append(Happening("joined", name, at_s, self.round))

    def recovery_s(self) -> float | None:
        """Seconds from the kill to the next committed round that does without the killed peer; None
        when there was none.
        """
        kill = next(
            (happening for happening in self.happenings if happening.kind == "killed"), None
        )
        if kill is None:
            return None
        return next(
            (
                row.at_s - kill.at_s
                for row in self.rounds
                if row.at_s >= kill.at_s and kill.name not in row.contributors
            ),
            None,
        )
