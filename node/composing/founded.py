"""A run that is founded and stored here, and that nobody has joined yet, shown to whoever holds an
invite: an organiser's node answers for it from the moment that the invite is printed.
"""

from __future__ import annotations

import time
from pathlib import Path

from ...collectives.errors import StorageError
from ...collectives.identifiers import PeerId, RunId
from ..home.paths import Paths
from ..manifest import list_runs
from ..net.look import Look, ShowElse
from ..run.banning import Bans
from ..run.gate import Gate


def show_founded(paths: Paths, own: PeerId, left: str) -> ShowElse:
    """What answers a look at any run that this node has founded. ``left``: the name of the file in
    a run's folder that says that it was left.
    """

    def show(asker: PeerId, look: Look) -> bytes | None:
        try:
            signed = list_runs(paths, []).get(RunId(look.run))
        except OSError:  # the folder went
            return None
        if signed is None or signed.organiser != own:
            return None
        folder: Path = paths.run_dir(signed.run_id)
        if (folder / left).exists():
            return None
        bans = Bans(folder, signed.run_id, own)
        try:
            bans.load()
        except StorageError:
            return None  # who is banned is not known: the node tells it once it enters the run
        gate = Gate(signed.run_id, own, bans, lambda: ())
        gate.policy = signed.open().join.policy
        gate.shows(look.bearer(asker, own), look.certificate, time.time())
        return signed.encode()

    return show
