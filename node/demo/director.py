"""Who is started and killed when. Reads what the processes print, keeps the board, and shows it
several times a second.
"""

from __future__ import annotations

import json
import queue
import random
import time
from collections.abc import Callable

from ...collectives.errors import AtollError, NetworkError
from .board import Board
from .processes import DemoProcess, Inbox, OutputLine, end, kill
from .stage import DemoStage
from .view import Screen

REDRAW_S = 0.2
START_S = 120.0  # six processes import torch and libp2p at once, perhaps from a cold disk
STUCK_S = 90.0  # without any round: something is wrong
KILL_AT, JOIN_AT = 1 / 3, 0.5  # of the rounds


class Cast:
    """The processes of one demo, by peer."""

    def __init__(self) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.nodes: dict[str, DemoProcess] = {}
        self.scripts: dict[str, DemoProcess] = {}
        self.others: list[DemoProcess] = []
        self.page: DemoProcess | None = None

    def end_nodes(self) -> None:
        """End the nodes in order."""
        end(list(self.nodes.values()))

    def end(self) -> None:
        end([*self.scripts.values(), *self.others, *([self.page] if self.page else [])])
        self.end_nodes()


class Director:
    """Runs one demo on a stage. ``late``: the name of the late peer; ``kill``: whether somebody is
    killed; ``browse`` is told the address of the page.
    """

    def __init__(
        self,
        stage: DemoStage,
        board: Board,
        screen: Screen,
        cast: Cast,
        *,
        seed: int,
        kill: bool,
        late: str,
        browse: Callable[[str], object] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage, self.board, self.screen, self.cast = stage, board, screen, cast
        self._kill, self._late = kill, late
        self._clock, self._started = clock, clock()
        self.browse = browse
        self._random = random.Random(seed)
        self._kill_due: float | None = None
        self._invite = ""
        self.run_id = ""

    @property
    def now_s(self) -> float:
        """Seconds since the demo started."""
        return self._clock() - self._started

    # ---- the acts
    def begin(self, *, page: bool = False) -> None:
        """Start the nodes, found the run on the first, open its ``page``, start the scripts."""
        names = [name for name in self.board.rows if name != self._late]
        self.board.phase = "starting a node for each peer"
        for name in names:
            self._start_node(name)
        self._until(
            lambda: not [name for name in names if not self._listens(name)],
            START_S,
            "the nodes did not start",
        )
        self.board.phase = f"{names[0]} founds the run"
        self.cast.others.append(new := self.stage.new(names[0], self.cast.inbox))
        self._until(lambda: bool(self._invite) or not new.alive, START_S, "the run was not founded")
        new.wait(5)
        self._drain()
        if not self._invite:
            raise AtollError(
                f"atoll new failed with status {new.process.returncode}", why=new.last_words()
            )
        self.stage.found(names[0], self.run_id)
        if page:
            self.cast.page = self.stage.page(names[0], self.run_id, self.cast.inbox)
        self.board.phase = "starting a script for each peer"
        for name in names:
            self._start_script(name)

    def train(self) -> None:
        """Until every surviving script has ended: the kill and the late join happen on the way."""
        self._until(
            lambda: any(row.state == "training" for row in self.board.rows.values()),
            START_S,
            "no script trains",
        )
        self.board.phase = "training"
        self._until(lambda: bool(self.board.rounds), START_S, "no round was committed")
        self._until(
            self._act,
            STUCK_S,
            "the swarm is stuck",
            moves=lambda: (self.board.round, sum(row.step for row in self.board.rows.values())),
        )
        self._until(
            lambda: not any(script.alive for script in self.cast.scripts.values()),
            STUCK_S,
            "a script does not end",
        )
        self._drain()
        for name, row in self.board.rows.items():
            if row.final:
                row.final["anchor_bits"] = self.stage.anchor_bits(name, int(row.final["round"]))

    def measure(self, *, alone: bool) -> None:
        """Evaluate the anchors that the first peer wrote; meanwhile train one machine alone."""
        self.board.phase = "one machine alone, for comparison" if alone else "measuring"
        tasks = [("anchors", str(self.stage.anchors(next(iter(self.board.rows)))))] + (
            [("alone", str(self.stage.steps))] if alone else []
        )
        children = [self.stage.measure(what, argument, self.cast.inbox) for what, argument in tasks]
        self.cast.others += children
        self._until(
            lambda: not any(child.alive for child in children),
            4 * STUCK_S,
            "the measurement does not end",
        )
        self._drain()

    # ---- what happens on the way
    def _act(self) -> bool:
        board, rounds = self.board, self.stage.rounds
        if self._kill and self._kill_due is None and board.round >= max(1, round(rounds * KILL_AT)):
            self._kill_due = self._clock() + self._random.uniform(0.0, 1.0)  # somewhere in a round
        if self._kill_due is not None and self._clock() >= self._kill_due and board.round < rounds:
            self._kill_due = float("inf")
            self._strike()
        if self._late not in self.cast.scripts and board.round >= round(rounds * JOIN_AT):
            self._enter()
        late = board.rows[self._late]
        if late.counted and not any(event.kind == "joined" for event in board.happenings):
            board.joined_late(self._late, self.now_s)
            self.screen.say(
                f"{self._late} joined: it fetched the state and contributed to round {late.round}"
            )
        return all(row.state in ("finished", "failed", "killed") for row in board.rows.values())

    def _strike(self) -> None:
        """Kill the last of the first peers, never the founder's: a swarm of two whose founder dies
        has no majority.
        """
        victim = [name for name in self.board.rows if name != self._late][-1]
        at = kill([self.cast.nodes[victim], self.cast.scripts[victim]])
        self.board.killed(victim, at - self._started)
        self.screen.say(f"SIGKILL to {victim}: its node and its script are dead")
        self._start_node(self._late)

    def _start_node(self, name: str) -> None:
        self.cast.nodes[name] = self.stage.node(name, self.cast.inbox)
        self.board.rows[name].note = "no node yet"

    def _start_script(self, name: str) -> None:
        self.cast.scripts[name] = self.stage.script(name, self._invite, self.cast.inbox)
        self.board.rows[name].note = "imports torch"

    def _listens(self, name: str) -> bool:
        row = self.board.rows[name]
        if not row.peer and (status := self.stage.status(name)) is not None:
            row.peer, row.note = str(status["peer"]), "node is up"
        return bool(row.peer)

    def _enter(self) -> None:
        self.screen.say(f"{self._late} starts, with the same invite")
        if self._late not in self.cast.nodes:
            self._start_node(self._late)
        self._until(
            lambda: self._listens(self._late), START_S, f"the node of {self._late} did not start"
        )
        self._start_script(self._late)

    # ---- the loop
    def _until(
        self,
        done: Callable[[], bool],
        limit_s: float,
        what: str,
        moves: Callable[[], object] | None = None,
    ) -> None:
        """Take in lines and redraw until ``done``. ``limit_s`` starts anew whenever ``moves``
        changes. Raises NetworkError.
        """
        until, last = self._clock() + limit_s, moves() if moves else None
        while not done():
            self._take_for(REDRAW_S)
            self.screen.show(self.board, self.now_s)
            if moves and moves() != last:
                until, last = self._clock() + limit_s, moves()
            if self._clock() > until:
                raise NetworkError(
                    f"{what} within {limit_s:.0f} s",
                    code="E112",
                    hint=f"Look into {self.stage.folder / 'logs'}",
                )

    def _take_for(self, seconds: float) -> None:
        """Take in what comes within this time: drawing once for all of it leaves the processor to
        the peers.
        """
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self._take(left)

    def _drain(self) -> None:
        while not self.cast.inbox.empty():
            self._take(0)
        self.screen.show(self.board, self.now_s)

    def _take(self, timeout_s: float) -> None:
        try:
            line = (
                self.cast.inbox.get(timeout=timeout_s)
                if timeout_s
                else self.cast.inbox.get_nowait()
            )
        except queue.Empty:
            return
        if line.role != "page":  # its address holds a secret
            self._keep(line)
        match line.role:
            case "node":
                self._node_line(line)
            case "script":
                self.board.line(line.name, line.record, line.at - self._started)
                self._script_exit(line)
            case "new":
                self.run_id = str(line.record.get("run_id", self.run_id))
                self._invite = str(line.record.get("invite", self._invite))
            case "page":
                self._page_line(line)
            case _:
                self.board.measured(line.record)

    def _keep(self, line: OutputLine) -> None:
        record = {
            "t": round(line.at - self._started, 3),
            "name": line.name,
            "role": line.role,
            **line.record,
        }
        with (self.stage.folder / "events.jsonl").open("a", encoding="utf-8") as events:
            print(json.dumps(record), file=events)

    def _page_line(self, line: OutputLine) -> None:
        if address := str(line.record.get("address", "")):
            self.screen.say(f"the page: {address}")
            self.browse(address)

    def _node_line(self, line: OutputLine) -> None:
        row = self.board.rows[line.name]
        if line.record.get("event") == "exit" and row.state not in ("killed", "finished"):
            row.state, row.note = "failed", "its node ended"
            self._broke("node", line)

    def _script_exit(self, line: OutputLine) -> None:
        row = self.board.rows[line.name]
        if line.record.get("event") == "exit" and row.state not in ("killed", "finished"):
            row.state = "failed"
            self._broke("script", line)

    def _broke(self, role: str, line: OutputLine) -> None:
        """A process that should run has ended."""
        processes = self.cast.nodes if role == "node" else self.cast.scripts
        raise AtollError(
            f"the {role} of {line.name} ended with status {line.record['code']}",
            why=processes[line.name].last_words(),
            hint=f"Look into {self.stage.folder / 'logs'}",
        )
