"""A run's pretrained model on its way to this machine: where it will come from, said before "y",
and how far it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...collectives.errors import AtollError
from ..home.output import Terminal, bytes_text
from ..home.paths import Paths

if TYPE_CHECKING:
    from ..joining.commands import NodeClient
    from ..manifest.tables import ModelTable

_STEP = 0.1  # of the base, between two lines about it


def lacks_base(paths: Paths, run_id: str, model: ModelTable, given: Path | None) -> bool:
    """Whether this machine is to have the base from members, as soon as it is one: nobody has
    named a copy, none is known here, and members may hand it on.
    """
    from ..manifest.pretrained import travels
    from ..recipes.models.bringing import find_copy

    here = given or find_copy(paths, run_id, model)
    return here is None and travels(model) and not _is_cached(model)


def _is_cached(model: ModelTable) -> bool:
    from ..recipes.models.bringing import in_hubs_cache

    try:
        return in_hubs_cache(model)
    except AtollError:  # there is no client of the hub
        return False


def base_lines(
    paths: Paths,
    run_id: str,
    model: ModelTable,
    given: Path | None,
    *,
    share: bool,
    founds: bool = False,
) -> list[str]:
    """Where a run's pretrained model comes from, what that takes of the disk, and whether this
    machine hands it on, for people; none where the run has none. ``run_id``: "" of one that is not
    founded. ``founds``: the run is new, and nobody else has it.
    """
    from ..bases.own import fetched_folder
    from ..manifest.pretrained import travels
    from ..recipes.models.bringing import find_copy

    if model.base is None or not model.pretrained:
        return []
    size = bytes_text(model.base.size)
    if (copy := given or find_copy(paths, run_id, model)) is not None:
        lines = [f"base     on this machine: {copy}"]
    elif _is_cached(model):
        lines = ["base     in this machine's cache of the hub"]
    elif travels(model) and not founds:
        folder = fetched_folder(paths.cache_dir, model.base)
        hub = ", else from the hub" if model.hub is not None else ""
        lines = [
            f"base     {size} from members of the run, by sha256{hub}",
            f"{'':7}  into {folder}, where {_free(folder)} are free",
        ]
    elif model.hub is not None:
        nobody = "" if travels(model) else "; no member hands it on"
        lines = [f"base     {size} from the hub, by this machine's own login{nobody}"]
    else:
        lines = [f"base     {size}, not known on this machine: --model PATH"]
    if travels(model):
        lines.append(
            f"{'':7}  this machine then hands it on to members that lack it; else: "
            "atoll config set models.share false"
            if share
            else f"{'':7}  this machine does not hand it on ([models] share = false)"
        )
    return lines


def from_members(terminal: Terminal, client: NodeClient, run_id: str) -> Callable[[], object]:
    """What has members send the base, and says how far it is."""
    said = [-_STEP, ""]

    def progress(stage: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        if share - float(said[0]) >= _STEP or stage != said[1]:
            said[:] = [share, stage]
            terminal.say(f"base     {bytes_text(done)} of {bytes_text(total)}: {stage}")

    def fetch() -> None:
        found = client.fetch_base(run_id, progress)
        count = len(found["from"])
        terminal.say(
            f"base     {bytes_text(found['bytes'])} are in {found['folder']}"
            + (
                f", {bytes_text(found['fetched'])} of them from {count} "
                f"member{'s' * (count > 1)} now"
                if count
                else ""
            )
            + "; every file has its sha256"
        )

    return fetch


def _free(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return bytes_text(shutil.disk_usage(folder).free)
