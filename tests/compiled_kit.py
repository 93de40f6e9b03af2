"""The project's kernels, compiled for a test, whatever is installed."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from house import ROOT


def compiled(name: str, folder: Path) -> Path:
    """The library of the extension ``name``, built in ``folder`` as an installation builds it.
    Skips where there is no compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    extensions = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["ext-modules"]
    [extension] = [extension for extension in extensions if extension["name"] == name]
    path = folder / "native.so"
    command = [
        compiler,
        *extension["extra-compile-args"],
        "-shared",
        "-fPIC",
        *extension["sources"],
        "-o",
        path,
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return path
