"""Libraries compiled at installation (`native.c` beside the module that calls it): found, or left out and said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TypeVar

log = logging.getLogger("atoll")
Library = TypeVar("Library")


def load(folder: Path, open_it: Callable[[Path], Library], slower: str) -> Library | None:
    """The library in ``folder``, opened, if there is one that can be used. ``slower``: what is, without it."""
    for path in (folder / ("_native" + suffix) for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            try:
                return open_it(path)
            except (
                OSError,
                AttributeError,
            ) as error:  # built for another machine, or from an older source
                why = "fast kernels are off, so %s slower: %s does not fit this machine or version (%s)"
                log.warning(
                    why + "; install atoll again (in its source tree: pip install -e .)",
                    slower,
                    path,
                    error,
                )
                return None
    return None
