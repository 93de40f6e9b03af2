"""Files that scripts write: an exception between any two lines leaves no descriptor open, no draft
beside the file, and the old file or the new one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from atoll.collectives import forced
from atoll.collectives.forced import make_folder, new_file, sync_folder
from atoll.node.home import private_files
from atoll.node.home.private_files import write_atomic
from atoll.optim.model import tensor_file
from atoll.optim.model.tensor_file import write_tensors

# A file that is closed with its last reference says so, to whoever asks for such warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

FILES = {forced.__file__, private_files.__file__, tensor_file.__file__}


class Stop(BaseException):
    """What interrupts."""


def stopped(write: Callable[[], Any], line: int) -> bool:
    """Run ``write`` with an exception before its ``line``-th line. Whether it got so far."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        write()
    except Stop:
        return True
    finally:
        sys.settrace(before)
    return False


def leads_to(folder: Path) -> list[str]:
    """What below a folder this process has open."""
    found = list[str]()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("kind", ["bytes", "tensors", "folder"])
def test_an_exception_before_each_line_leaves_nothing_open(tmp_path: Path, kind: str) -> None:
    file, line = tmp_path / "kept" / "file", 0
    make_folder(file.parent)
    file.write_bytes(b"old")

    def write() -> None:
        if kind == "bytes":
            write_atomic(file, b"new")
        elif kind == "tensors":
            write_tensors(file, {"w": torch.ones(3)}, {"id": "new"})
        else:
            sync_folder(file.parent)

    while True:
        line += 1
        ended = not stopped(write, line)
        assert leads_to(tmp_path) == []
        left = {path.name for path in file.parent.iterdir()}
        # The clean-up itself can be stopped, too, but by nothing that comes once.
        assert left == {"file"}, (line, left)
        assert file.read_bytes() == b"old" or b"new" in file.read_bytes()
        if ended:
            break
    assert line > (4 if kind == "folder" else 8)


def test_a_new_file_has_its_mode_from_the_first(tmp_path: Path) -> None:
    with new_file(tmp_path / "file", 0o600) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(file.fileno())
