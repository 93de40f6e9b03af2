"""A node that minds nothing which speaks against itself: ``pushy_node.py FOLDER [arguments of
python -m atoll.node]``.

It takes part in the run as one that may train, whatever its invite says, and goes on where it is
banned or refused. In FOLDER a test writes `shows.json`, the peers that see its certificate in a
greeting (without the file: all), and `go`, before which it asks nobody to make it a member. It writes
`sent.json`: by peer how often it asked to be let in ("join") and offered a contribution ("ready");
and `pid`. It does not start once `over` is there.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from atoll.collectives import messages as m
from atoll.collectives.errors import AtollError
from atoll.collectives.identifiers import PeerId
from atoll.node.__main__ import main
from atoll.node.service.bans import Banning
from atoll.node.service.ports import RunPorts
from atoll.node.service.run import RunService
from atoll.node.session.actions import ROUND_PREFIX
from atoll.node.session.admission import Admission


def corrupt(folder: Path) -> None:
    """All runs of this node."""
    role, shut_out, greet = Admission._role, Banning._shut_out, RunService._greet
    send, fail = RunPorts._send, RunService.fail
    sent = Counter[str]()

    def trains(self: Admission, peer: PeerId) -> str:
        return "train" if peer == self.session.me else role(self, peer)

    def goes_on(self: Banning) -> None:
        if self._run.node.identity.peer not in self.lists.peers:
            shut_out(self)

    def shows(self: RunService, peer: PeerId) -> bytes:
        chosen = folder / "shows.json"
        hidden = chosen.exists() and peer not in json.loads(chosen.read_text())
        return b"" if hidden else greet(self, peer)

    def stays(self: RunService, error: BaseException) -> None:
        if not isinstance(error, AtollError) or error.code not in ("E201", "E205"):
            fail(self, error)

    def counts(self: RunPorts, peer: PeerId, data: bytes) -> None:
        body: Any = None
        if data[:1] == ROUND_PREFIX:
            body = m.decode(data[1:], peer).body
        if isinstance(body, m.Join) and body.holds and not (folder / "go").exists():
            return
        asks = isinstance(body, m.Join)
        if asks or (isinstance(body, m.Ready) and body.cid is not None):
            sent[f"{'join' if asks else 'ready'} {peer}"] += 1
            written = folder / "sent.tmp"
            written.write_text(json.dumps(sent))
            written.rename(folder / "sent.json")
        send(self, peer, data)

    Admission._role = trains  # type: ignore[method-assign]
    Banning._shut_out = goes_on  # type: ignore[method-assign]
    RunService._greet = shows  # type: ignore[method-assign]
    RunService.fail = stays  # type: ignore[method-assign]
    RunPorts._send = counts  # type: ignore[method-assign]


if __name__ == "__main__":
    if Path(sys.argv[1], "over").exists():
        sys.exit("it is over")
    Path(sys.argv[1], "pid").write_text(str(os.getpid()))
    corrupt(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
