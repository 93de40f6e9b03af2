"""scripts/_setup: the preflight stops before pip fails and names the line to type; an old Python is refused; a stamp is honoured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from house import ROOT


def _bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f'set -euo pipefail\n. "{ROOT}/scripts/_setup"\n{code}\n'
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter like this one, in which fastecdsa cannot be imported and pip finds no wheel."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *fastecdsa*|*"-m pip"*) exit 1;; esac\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    return wrapper


def test_preflight_names_the_missing_header_and_the_line_to_type(bare_python: Path) -> None:
    done = _bash(f'preflight "{bare_python}"', CFLAGS="-nostdinc")
    assert done.returncode != 0
    assert done.stderr.startswith("E001 gmp.h is missing")
    assert any(line in done.stderr for line in ("sudo apt install build-essential", "sudo dnf install gcc", "brew install gmp"))
    assert done.stdout == ""


def test_preflight_names_a_missing_compiler(bare_python: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("uname", "grep", "mktemp", "rm", "sh"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
        (tools / tool).symlink_to(found)
    done = _bash(f'PATH="{tools}"; preflight "{bare_python}"', CC="no-such-compiler")
    assert done.returncode != 0
    assert done.stderr.startswith("E001 a C compiler is missing")
    # no package manager on this PATH: all lines are shown
    assert all(line in done.stderr for line in ("sudo apt install", "sudo dnf install", "brew install gmp"))


def test_preflight_is_silent_where_nothing_has_to_be_compiled() -> None:
    done = _bash(f'preflight "{sys.executable}"', CC="no-such-compiler", CFLAGS="-nostdinc")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    done = _bash("find_python", ATOLL_PYTHON=str(old))
    assert done.returncode != 0
    assert done.stderr.startswith("no Python >= 3.11")
    assert _bash("find_python", ATOLL_PYTHON=sys.executable).stdout.strip() == sys.executable


def test_a_finished_environment_is_not_touched_again(tmp_path: Path) -> None:
    interpreter = tmp_path / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text("#!/bin/sh\necho touched >&2\nexit 1\n", encoding="utf-8")
    interpreter.chmod(0o755)
    want = subprocess.run(
        ["bash", "-c", f'cd "{ROOT}" && printf "%s " "{ROOT}" && cat pyproject.toml scripts/constraints.txt collectives/codecs/native.c | cksum'],
        capture_output=True, text=True, check=True,
    ).stdout.rstrip("\n")  # fmt: skip
    (tmp_path / ".atoll-plot").write_text(want, encoding="utf-8")
    done = _bash('atoll_setup plot; echo "$ATOLL_PY"', ATOLL_VENV=str(tmp_path))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(interpreter), "")
    # another set of extras is another stamp: the broken interpreter is noticed, not used
    assert _bash("atoll_setup plot,test", ATOLL_VENV=str(tmp_path), ATOLL_PYTHON="/nonexistent").returncode != 0
