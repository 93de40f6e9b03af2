#!/usr/bin/env python
"""Ring 1 alone: copies the files of docs/internals/kernel.txt, with all that they import, and
beside them `LocalSwarm` and `attach`, into an empty folder, and looks whether they stand there:

    scripts/ring_one.py                  # all of it
    scripts/ring_one.py --only trial     # or types, or tests

types   pyright, strict, finds no error
tests   the default tests that import nothing else pass; with ``coverage`` installed, how much of
        the ring they run is printed
trial   scripts/_ring_trial.py, four members on node/storage in memory, admitted by invites,
        through a death, a return from that memory and a late join, has the same bits there and in
        the whole product

The last line is one JSON object with the lines of both rings. The exit status is 1 where something
fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from house import edges_of_files, imports, package_files  # noqa: E402
from kernel import LIST, closure_of, count, read_rings, with_packages  # noqa: E402

BESIDE = [
    Path("node/local.py"),
    Path("node/run/invite.py"),
    Path("node/simulation/local_swarm.py"),
    Path("optim/script/attachment.py"),
]
"""What a trial of the ring needs beside it: the simulator, and the script's side."""
PARTS = ("types", "tests", "trial")


def environment(top: Path) -> dict[str, str]:
    """Of a process that finds `atoll` in ``top`` and nowhere else."""
    own = {"PYTHONPATH": str(top), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **own}


def copy_files(files: Iterable[Path], top: Path) -> None:
    """Product files into ``top``/atoll, with the stubs and compiled parts beside them."""
    for path in files:
        target = top / "atoll" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    for path in {path.parent for path in files}:
        for native in (ROOT / path).glob("_native*.so"):
            shutil.copy(native, top / "atoll" / path)


def modules_of(path: Path, kits: dict[str, Path]) -> tuple[set[str], set[Path]]:
    """Modules of the product, and kits, that a test file imports."""
    named = {module for _, level, module in imports(path) if not level}
    text = (ROOT / path).read_text(encoding="utf-8")
    product = set(re.findall(r"atoll(?:\.\w+)+", text)) | {m for m in named if m[:6] == "atoll."}
    return product, {kits[m] for m in named if m in kits}


def tests_within(files: Iterable[Path]) -> tuple[list[Path], set[Path]]:
    """Default test files that import, themselves or by kits, nothing but ``files``; and the kits
    that these need.
    """
    known = {".".join(path.with_suffix("").parts) for path in files}
    known |= {name.removesuffix(".__init__") for name in known}
    everything = {".".join(path.with_suffix("").parts) for path in package_files()}
    everything |= {name.removesuffix(".__init__") for name in everything}
    tests = ROOT / "tests"
    kits = {
        ".".join(path.relative_to(tests).with_suffix("").parts).removesuffix(".__init__"): path
        for path in [*tests.glob("*.py"), *(tests / "kits").rglob("*.py")]
    }
    kits = {name: path.relative_to(ROOT) for name, path in kits.items()}

    def foreign(path: Path, seen: set[Path]) -> bool:
        seen.add(path)
        product, used = modules_of(path, kits)
        named = {name.removeprefix("atoll.") for name in product}
        if any(name in everything and name not in known for name in named):
            return True
        return any(foreign(kit, seen) for kit in used - seen)

    found, needed = list[Path](), set[Path]()
    for path in sorted([*(tests / "unit").glob("test_*.py"), *(tests / "simulation").glob("*.py")]):
        seen = set[Path]()
        if not foreign(path.relative_to(ROOT), seen) and len(seen) > 0:
            product, _ = modules_of(path.relative_to(ROOT), kits)
            if product:
                found.append(path.relative_to(ROOT))
                needed |= seen
    return found, needed - set(found)


def check_types(top: Path) -> dict[str, Any]:
    """pyright, strict, on what is in ``top``."""
    (top / "pyrightconfig.json").write_text(
        json.dumps(
            {
                "include": ["atoll"],
                "typeCheckingMode": "strict",
                "extraPaths": [str(top)],
                "pythonVersion": "3.11",
                **{
                    f"report{name}": False
                    for name in (
                        "UnknownMemberType",
                        "UnknownArgumentType",
                        "UnknownVariableType",
                        "UnknownParameterType",
                        "UnknownLambdaType",
                        "MissingTypeStubs",
                        "PrivateUsage",
                        "UnsupportedDunderAll",
                    )
                },
            }
        )
    )
    command = [sys.executable, "-m", "pyright", "-p", str(top), "--pythonpath", sys.executable]
    run = subprocess.run(command, capture_output=True, text=True, cwd=top, env=environment(top))
    print(run.stdout[-3000:])
    return {"types": run.returncode == 0}


def play_trial(top: Path) -> dict[str, Any]:
    """The trial in ``top`` and in the whole product."""
    bits = list[dict[str, Any]]()
    for where, env in (("alone", environment(top)), ("whole", dict(os.environ))):
        copied = top / "_ring_trial.py"
        shutil.copy(ROOT / "scripts" / "_ring_trial.py", copied)
        command = [sys.executable, str(copied)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=top, env=env)
        print(f"{where}: {run.stdout.strip() or run.stderr[-2000:]}")
        if run.returncode:
            return {"trial": False}
        bits.append(json.loads(run.stdout))
    return {"trial": bits[0] == bits[1] and bits[0]["one_anchor"] and not bits[0]["troubles"]}


def play_tests(top: Path, ring: Iterable[Path], files: Iterable[Path]) -> dict[str, Any]:
    """The default tests that import nothing else, in ``top``."""
    tests, kits = tests_within(files)
    for path in [*tests, *kits, Path("tests/conftest.py"), Path("pyproject.toml")]:
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, top / path)
    print(f"{len(tests)} files of tests import nothing else")
    measured = importlib.util.find_spec("coverage") is not None
    within = ",".join(str(top / "atoll" / path) for path in ring)
    how = ["-m", "coverage", "run", f"--include={within}"] if measured else []
    command = [
        sys.executable,
        *how,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    run = subprocess.run(
        [*command, *map(str, tests)], capture_output=True, text=True, cwd=top, env=environment(top)
    )
    print(run.stdout[-3000:])
    found: dict[str, Any] = {"tests": run.returncode == 0, "summary": run.stdout.strip()[-120:]}
    if measured:
        report = [sys.executable, "-m", "coverage", "report", "--format=total"]
        total = subprocess.run(report, capture_output=True, text=True, cwd=top).stdout.strip()
        found["coverage"] = total
    return found


def main() -> int:
    """1 where something fails."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="One part; repeatable.")
    given = parser.parse_args()
    edges = with_packages(edges_of_files(types=True))
    rings = read_rings(LIST.read_text(encoding="utf-8"), package_files())
    ring = sorted(closure_of(rings[0], edges))
    files = sorted(closure_of([*rings[0], *BESIDE], edges))
    lines = {
        "ring 1": count(rings[0], edges),
        "both rings": count([path for each in rings for path in each], edges),
        "beside": count(files, edges),
    }
    found: dict[str, Any] = {name: [each.lines, each.closure_lines] for name, each in lines.items()}
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        copy_files(files, top)
        for part in given.only or PARTS:
            if part == "types":
                found |= check_types(top)
            elif part == "trial":
                found |= play_trial(top)
            else:
                found |= play_tests(top, ring, files)
    print(json.dumps(found))
    return 1 if any(found.get(part) is False for part in PARTS) else 0


if __name__ == "__main__":
    sys.exit(main())
