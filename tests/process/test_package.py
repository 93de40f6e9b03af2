"""sdist → wheel → a fresh environment: nothing but atoll/ is put on the path and the console script
works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from house import LAYERS, ROOT, module_name, package_files

pytestmark = pytest.mark.slow


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made from the sdist made from a copy of the project (so that nothing is left in the
    tree).
    """
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *LAYERS):
        found = ROOT / name
        if found.is_dir():
            shutil.copytree(found, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(found, source / name)
    _run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        source,
        cwd=folder,
    )
    wheels = list((folder / "dist").glob("*.whl"))
    assert len(wheels) == 1
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    return wheels[0]


def test_the_wheel_holds_every_module_and_only_atoll(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"atoll"}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {f"atoll/{path.as_posix()}" for path in package_files()}
    assert {f"atoll/{layer}/py.typed" for layer in LAYERS} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "atoll/__init__.py" not in names


def test_a_fresh_environment_runs_it(wheel: Path, tmp_path: Path, atoll_home: Path) -> None:
    venv = tmp_path / "venv"
    _run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    _run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    # The dependencies come from the environment of the tests; a path in a .pth file does not run
    # that one's own .pth files, so the editable atoll there is not seen.
    purelib = Path(
        _run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    (purelib / "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n", encoding="utf-8"
    )
    where = _run(
        python, "-c", "import atoll.node, atoll.optim; print(atoll.node.__file__)", cwd=tmp_path
    ).strip()
    assert Path(where).resolve().is_relative_to(purelib.resolve())
    assert "Usage: atoll" in _run(venv / "bin" / "atoll", "--help", cwd=tmp_path)
    assert _run(venv / "bin" / "atoll", "version", cwd=tmp_path).strip()
    names = ", ".join(
        repr(module_name(path)) for path in package_files() if path.name != "__main__.py"
    )
    _run(
        python,
        "-c",
        f"import importlib\nfor name in ({names},): importlib.import_module(name)",
        cwd=tmp_path,
    )
