"""The package list of pyproject.toml is the folders, and the constraints name what is used."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib

import pytest
from house import LAYERS, ROOT, imports, package_files

DIRECT = {
    "starlette",
    "uvicorn",
    "rich",
    "torch",
    "trio",
    "libp2p",
    "cryptography",
    "numpy",
    "msgspec",
    "click",
    "safetensors",
    "blake3",
    "matplotlib",
    "zstandard",
    "transformers",
    "lightning",
    "prometheus_client",
    "segno",
    "ifaddr",
    "nvidia_ml_py",
    "pyarrow",
}
MODULES = {"pynvml": "nvidia_ml_py"}
"""Modules whose package has another name."""
WHERE_INSTALLED = {"opacus", "bitsandbytes"}  # large, and only some settings need them
COME_WITH_LIBP2P = {"multiaddr", "base58", "google", "exceptiongroup", "dns"}


def _project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_has_its_row() -> None:
    packages = {
        "atoll." + ".".join(path.parent.relative_to(ROOT).parts)
        for layer in LAYERS
        for path in (ROOT / layer).rglob("__init__.py")
    }
    rows = _project()["tool"]["setuptools"]["packages"]  # type: ignore[index]
    assert sorted(rows) == sorted(packages)
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("folder", ["collectives", "node", "optim"])
def test_a_stub_names_what_its_package_loads(folder: str) -> None:
    """Type checkers read the stub alone."""
    stub = ast.parse((ROOT / folder / "__init__.pyi").read_text(encoding="utf-8"))
    imported = [
        alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    package = importlib.import_module(f"atoll.{folder}")
    assert sorted(imported) == sorted(package.__all__)
    assert all(isinstance(node, ast.ImportFrom | ast.Assign) for node in stub.body)


def test_every_folder_with_code_is_a_package_and_the_four_are_typed() -> None:
    folders = {path.parent for path in package_files()}
    assert [
        str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()
    ] == []
    assert all((ROOT / layer / "py.typed").is_file() for layer in LAYERS)


def test_the_top_level_is_what_it_should_be() -> None:
    allowed = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs",
        "tests",
        "scripts",
        *LAYERS,
    }
    ignored = {"atoll-demo", "build", "dist", "atoll.egg-info", "shared"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__pycache__"))}
    assert found - ignored == allowed


def test_imports_are_declared_and_constraints_cover_them() -> None:
    foreign = {
        MODULES.get(module.split(".")[0], module.split(".")[0])
        for path in package_files()
        for _, level, module in imports(path)
        if level == 0
    }
    foreign -= set(sys.stdlib_module_names) | {"atoll"}
    assert foreign - DIRECT - COME_WITH_LIBP2P == WHERE_INSTALLED
    project = _project()["project"]
    declared = {re.split(r"[<>=\[ ]", row)[0] for row in project["dependencies"]}  # type: ignore[index]
    declared |= {
        re.split(r"[<>=\[ ]", row)[0]
        for rows in project["optional-dependencies"].values()
        for row in rows
    }  # type: ignore[index]
    declared = {name.lower().replace("-", "_") for name in declared}
    assert foreign & DIRECT <= declared
    pinned = {
        line.split("==")[0].lower().replace("-", "_")
        for line in (ROOT / "scripts/constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert declared <= pinned
