"""A system that refuses calls, for real processes: see refusing.c.

    system = Refusing(tmp_path, inside="atoll.node")
    node = Popen(..., env={**os.environ, **system.environ})
    system.refuse("open", errno.EMFILE, count=20)
    system.allow()

Linux, with a C compiler; `missing` says what is not there.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sys
from pathlib import Path

ROWS = 64
ROW = struct.Struct("20siii")
SOURCE = Path(__file__).with_name("refusing.c")


def missing() -> str:
    """Why no calls can be refused here; "" when they can."""
    if sys.platform != "linux":
        return "calls are refused on Linux only"
    return "" if shutil.which("cc") or shutil.which("gcc") else "no C compiler"


class Refusing:
    """``folder`` takes the library and the page. ``inside``: what the command line of the processes
    holds that are refused anything; all where it is empty.
    """

    def __init__(self, folder: Path, inside: str = "") -> None:
        library, page = folder / "refusing.so", folder / "refusing.page"
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", SOURCE, "-o", library, "-ldl"], check=True
        )
        page.write_bytes(bytes(ROWS * ROW.size))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), ROWS * ROW.size)
        self.environ = {
            "LD_PRELOAD": str(library),
            "REFUSE_FILE": str(page),
            "REFUSE_IN": inside,
        }
        """What the processes must have in their environment."""
        self._used = 0

    def refuse(self, call: str, error: int, *, before: int = 0, count: int = -1) -> None:
        """From now on refuse this call with this errno: after ``before`` that go well, ``count``
        times (-1: always). Several calls may be refused at a time.
        """
        ROW.pack_into(self._page, self._used * ROW.size, call.encode(), error, before, count)
        self._used += 1

    def left(self, row: int = 0) -> int:
        """How many refusals of a row are still to come."""
        return ROW.unpack_from(self._page, row * ROW.size)[3]

    def allow(self) -> None:
        """Refuse nothing more."""
        for row in range(self._used):
            self._page[row * ROW.size : (row + 1) * ROW.size] = bytes(ROW.size)
        self._used = 0
