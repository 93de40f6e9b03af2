"""scripts/_setup: what stops it comes with the line to type (compiler, headers, old Python, no
venv); a stamp is honoured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from house import ROOT

KERNELS = "collectives/codecs/native.c security/rules/native.c"


def _bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f'set -euo pipefail\n. "{ROOT}/scripts/_setup"\n{code}\n'
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def tool(folder: Path, name: str, script: str) -> Path:
    """A command made for a test."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter like this one, in which fastecdsa cannot be imported and pip finds no wheel."""
    return tool(
        tmp_path,
        "python",
        f'case "$*" in *fastecdsa*|*"-m pip"*) exit 1;; esac; exec "{sys.executable}" "$@"',
    )


def test_preflight_names_the_missing_header_and_the_line_to_type(bare_python: Path) -> None:
    done = _bash(f'preflight "{bare_python}"', CFLAGS="-nostdinc")
    assert done.returncode == 69
    assert done.stderr.startswith("E001 gmp.h is missing")
    assert any(
        line in done.stderr
        for line in (
            "sudo apt install build-essential",
            "sudo dnf install gcc",
            "brew install python gmp",
        )
    )
    assert done.stdout == ""


def test_preflight_names_a_missing_compiler(bare_python: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("uname", "grep", "mktemp", "rm", "sh"):
        found = subprocess.run(
            ["which", tool], capture_output=True, text=True, check=True
        ).stdout.strip()
        (tools / tool).symlink_to(found)
    done = _bash(f'PATH="{tools}"; preflight "{bare_python}"', CC="no-such-compiler")
    assert done.returncode == 69
    assert done.stderr.startswith("E001 a C compiler is missing")
    # no package manager on this PATH: all lines are shown
    assert all(
        line in done.stderr
        for line in ("sudo apt install", "sudo dnf install", "brew install python gmp")
    )


def test_preflight_is_silent_where_nothing_has_to_be_compiled() -> None:
    done = _bash(f'preflight "{sys.executable}"', CC="no-such-compiler", CFLAGS="-nostdinc")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_old_python_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    old = tool(
        tmp_path,
        "python3",
        'case "$*" in *version_info*"< (3, 11)"*) exit 1;; esac; echo ": /usr/bin/python3 is 3.9"',
    )
    done = _bash("find_python", ATOLL_PYTHON=str(old))
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith(
        f"E001 no Python >= 3.11 was found (ATOLL_PYTHON={old}): /usr/bin/python3 is 3.9."
    )
    assert any(
        line in done.stderr
        for line in ("sudo apt install", "sudo dnf install", "brew install python")
    )
    assert _bash("find_python", ATOLL_PYTHON=sys.executable).stdout.strip() == sys.executable


def test_debian_is_asked_for_a_python_that_it_has(tmp_path: Path) -> None:
    tool(tmp_path, "uname", "echo Linux")
    tool(tmp_path, "apt-get", "exit 0")
    tool(tmp_path, "apt-cache", 'test "$2" = python3.12-venv')
    done = _bash(f'PATH="{tmp_path}:$PATH"; find_python', ATOLL_PYTHON="/nonexistent")
    assert done.returncode == 69
    assert (
        "     Debian/Ubuntu: sudo apt install build-essential python3.12-dev python3.12-venv libgmp-dev\n"
        in done.stderr
    )
    assert "dnf" not in done.stderr


def test_a_python_without_venv_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    python = tool(
        tmp_path, "python", f'case "$*" in *ensurepip*) exit 1;; esac; exec "{sys.executable}" "$@"'
    )
    tool(tmp_path, "uname", "echo Linux")
    tool(tmp_path, "apt-get", "exit 0")
    done = _bash(
        f'PATH="{tmp_path}:$PATH"; atoll_setup plot',
        ATOLL_PYTHON=str(python),
        ATOLL_VENV=str(tmp_path / "venv"),
    )
    assert done.returncode == 69
    assert done.stderr.startswith(f"E001 {python} has no module venv")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (
        f"sudo apt install build-essential python{version}-dev python{version}-venv libgmp-dev\n"
        in done.stderr
    )
    assert not (tmp_path / "venv").exists()


def test_a_finished_environment_is_not_touched_again(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    interpreter = tool(tmp_path / "bin", "python", "echo touched >&2; exit 1")
    want = subprocess.run(
        [
            "bash",
            "-c",
            f'cd "{ROOT}" && printf "%s " "{ROOT}" && cat pyproject.toml scripts/constraints.txt scripts/requirements.lock {KERNELS} | cksum',
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.rstrip("\n")
    (tmp_path / ".atoll-plot").write_text(want, encoding="utf-8")
    done = _bash('atoll_setup plot; echo "$ATOLL_PY"', ATOLL_VENV=str(tmp_path))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(interpreter), "")
    # another set of extras is another stamp: the broken interpreter is noticed, not used
    assert (
        _bash(
            "atoll_setup plot,test", ATOLL_VENV=str(tmp_path), ATOLL_PYTHON="/nonexistent"
        ).returncode
        == 69
    )
