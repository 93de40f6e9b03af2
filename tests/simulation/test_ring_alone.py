"""Ring 1 trains without the rest of the product, and the rest without a mode: by the scripts that
copy files (scripts/ring_one.py, scripts/amputate.py).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def played(python: str, root: Path, *command: str) -> None:
    run = subprocess.run([python, *command], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


def test_ring_one_alone_trains_to_the_same_bits(python: str, root: Path) -> None:
    played(python, root, "scripts/ring_one.py", "--only", "trial")


def test_without_all_modes_each_key_is_refused_in_one_sentence(python: str, root: Path) -> None:
    played(python, root, "scripts/amputate.py", "--only", "refusals")


@pytest.mark.rota(7)
@pytest.mark.parametrize("mode", ["byzantine", "btard"])
def test_what_is_left_without_a_mode_has_no_error_of_types(
    python: str, root: Path, mode: str
) -> None:
    played(python, root, "scripts/amputate.py", mode, "--only", "types", "--only", "refusals")
