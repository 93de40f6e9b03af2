"""Files of a site's own as modules like any other: registered, imported once, and found again by
processes that start anew, such as a DataLoader's spawned workers, which import what they unpickle
by its module's name.

So the name of such a module holds its path: ``atoll.node.home.site_files.NAME_HEX``. Whoever
imports it imports this module first, which finds the file. Nothing that a peer sends is imported:
names of modules come from this machine's settings and from its own processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # what lies below this module is found by it

PREFIX = f"{__name__}."


def name_of(path: Path) -> str:
    """The module's name for a file: a readable part, and its path."""
    stem = re.sub(r"\W", "_", path.stem)
    return f"{PREFIX}{stem}_{str(path.absolute()).encode().hex()}"


def import_site_file(path: Path) -> ModuleType:
    """The file as a module, which its own folder's files can be imported from as well. Raises what
    it raises, once; then it is imported anew.
    """
    folder = str(path.absolute().parent)
    if folder not in sys.path:  # last: for what lies beside it, in nothing's place
        sys.path.append(folder)
    return importlib.import_module(name_of(path))


class SiteFileFinder(MetaPathFinder):
    """Finds files by names of `name_of`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        try:
            file = Path(bytes.fromhex(fullname.rpartition("_")[2]).decode())
        except ValueError:
            return None
        if not file.is_file() or name_of(file) != fullname:
            return None
        return importlib.util.spec_from_file_location(fullname, file)


if not any(type(finder).__name__ == SiteFileFinder.__name__ for finder in sys.meta_path):
    sys.meta_path.append(SiteFileFinder())
