"""Whoever may list the processes of a machine reads their arguments; an invite among them is taken
out, as early as can be.

Linux and macOS show a process's arguments from its own memory (``/proc/PID/cmdline``,
``KERN_PROCARGS2``), so it is overwritten there. ``sys.argv`` keeps them. Until then (the start of
the interpreter: a fraction of a second) they stand there, as they do in a shell's history and in
the arguments of whatever started this process: a file, stdin and ``ATOLL_INVITE`` are read by its
own user only.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_INVITE = re.compile(rb"atoll\d:[^\0]*", re.IGNORECASE)
_MOST_BYTES = 1 << 21  # what Linux allows for arguments and environment together
_ARG_START, _ARG_END = 48, 49  # fields of /proc/PID/stat, counted from 1


def hide_invites() -> bool:
    """Overwrite every invite among this process's arguments with stars. Whether none stands there
    any more.
    """
    if not any(_INVITE.search(os.fsencode(word)) for word in sys.orig_argv):
        return True
    import ctypes

    try:
        spans = _spans()
        for start, length in spans:
            for found in _INVITE.finditer(ctypes.string_at(start, length)):
                address, count = start + found.start(), found.end() - found.start()
                ctypes.memset(address, ord("*"), count)
        return bool(spans) and not _INVITE.search(_shown())
    except (OSError, ValueError, AttributeError, IndexError):
        return False


def _spans() -> list[tuple[int, int]]:
    """(address, bytes) of the memory that the system shows as the arguments."""
    if sys.platform == "linux":
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(") ")[2].split()
        start, end = int(fields[_ARG_START - 3]), int(fields[_ARG_END - 3])
        return [(start, end - start)] if 0 < end - start <= _MOST_BYTES and start else []
    if sys.platform == "darwin":
        import ctypes

        library = ctypes.CDLL(None)
        library._NSGetArgv.restype = ctypes.POINTER(ctypes.POINTER(ctypes.POINTER(ctypes.c_char)))
        words = library._NSGetArgv().contents
        addresses = [
            ctypes.cast(words[number], ctypes.c_void_p).value or 0
            for number in range(len(sys.orig_argv))
        ]
        return [(address, len(ctypes.string_at(address))) for address in addresses if address]
    return []


def _shown() -> bytes:
    """What others see of the arguments, where that can be read back."""
    return Path("/proc/self/cmdline").read_bytes() if sys.platform == "linux" else b""
