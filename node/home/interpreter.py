"""The interpreter for processes of our own. Without ``-P`` one that runs a module (``-m``) imports
from the current folder first: a ``trio.py`` in it would be run by every command, though nobody has
named it."""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-P")
