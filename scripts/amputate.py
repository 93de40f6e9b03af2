#!/usr/bin/env python
"""The amputation: deletes modes from a copy of the project, with the rows that register them, and
looks whether the rest stands:

    scripts/amputate.py                          # all modes at once
    scripts/amputate.py byzantine btard          # each of these alone
    scripts/amputate.py --each                   # each alone
    scripts/amputate.py --only types --each      # or refusals, tests, demo

types     pyright, strict, finds no error in what is left
refusals  a manifest that asks for the mode is refused in one sentence
tests     the default tests that import nothing of what was deleted pass (--tests: these files)
demo      real nodes train the demo to its end

With a mode go those that import it. The last line is one JSON object; the exit status is 1 where
something fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from house import edges_of_files, package_files  # noqa: E402
from ring_one import tests_within  # noqa: E402

MODES: dict[str, tuple[str, ...]] = {
    "byzantine": ("collectives/modes/byzantine/", "node/modes/byzantine.py"),
    "arrivals": (
        "collectives/modes/arrivals/",
        "optim/modes/arriving.py",
        "optim/modes/grouped.py",
    ),
    "relays": ("collectives/modes/relays.py",),
    "sealing": ("collectives/modes/sealing.py", "node/modes/recertifying.py"),
    "operations": ("node/modes/operations/",),
    "secure": ("security/masking/", "node/modes/secure/", "collectives/modes/site_ledger.py"),
    "privacy": ("security/privacy/", "optim/modes/privacy/"),
    "btard": ("security/btard/", "node/modes/btard/"),
    "rules": ("security/rules/", "node/modes/distances.py", "node/modes/leaning.py"),
    "clusters": ("optim/modes/clusters.py", "node/modes/splitting.py"),
    "adapters": ("optim/modes/adapters.py",),
    "gradients": ("optim/modes/gradients.py",),
    "federated": ("optim/modes/site.py",),
    "lab": ("optim/lab/",),
}
"""By name: its files and folders in the four folders."""
EVERYTHING = ("collectives/modes/", "node/modes/", "optim/modes/")
REGISTRIES = ("node/run/registry.py", "optim/model/registry.py")
ASKS = {
    "byzantine": "[quorum]\nlying = 1\n",
    "arrivals": "[exchange.arrivals]\ncount = 2\n",
    "rules": '[robust]\nrule = "median"\nf = 1\n',
    "adapters": '[adapters]\nmode = "ffa"\n',
    "gradients": '[train]\nmethod = "gradient_averaging"\n',
    "federated": 'kind = "federated"\n',
    "secure": 'kind = "federated"\n[secure]\nthreshold = 3\n',
    "privacy": 'kind = "federated"\n[privacy]\nnoise = 3.0\nclip = 1.0\n',
    "btard": 'kind = "seeded"\n[btard]\n',
}
"""By mode: what a manifest asks for it with."""
PARTS = ("types", "refusals", "tests", "demo")


def gone_with(names: Sequence[str]) -> tuple[list[str], list[Path]]:
    """The modes that go with these, since they import them; and all files that go. Raises
    SystemExit where a file that is no mode's imports one.
    """
    edges, names = edges_of_files(types=True), list(names)
    while True:
        prefixes = tuple(prefix for name in names for prefix in MODES[name])
        if len(names) == len(MODES):
            prefixes += EVERYTHING
        gone = {path for path in package_files() if path.as_posix().startswith(prefixes)}
        broken = {path for path in edges if path not in gone and edges[path] & gone}
        also = {
            name
            for name, owned in MODES.items()
            if name not in names and any(path.as_posix().startswith(owned) for path in broken)
        }
        if not also:
            if broken:
                sys.exit(f"{', '.join(names)}: imported by {', '.join(map(str, sorted(broken)))}")
            return names, sorted(gone)
        names += sorted(also)


def copy_without(top: Path, gone: Sequence[Path]) -> int:
    """The project into ``top`` without these files and without the rows that register them; how
    many rows that were.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        if (ROOT / line).is_file() and Path(line) not in gone:
            (top / line).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / line, top / line)
    for native in [*ROOT.glob("collectives/codecs/_native*.so"), *ROOT.glob("security/rules/*.so")]:
        target = top / native.relative_to(ROOT)
        if target.parent.is_dir():
            shutil.copy(native, target)
    removed = 0
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in gone}
    for registry in REGISTRIES:
        kept = list[str]()
        for line in (ROOT / registry).read_text(encoding="utf-8").splitlines(keepends=True):
            row = re.fullmatch(r' +"[\w.]+": "([\w.]+)",\n', line)
            if row is not None and row[1] in modules:
                removed += 1
            else:
                kept.append(line)
        (top / registry).write_text("".join(kept), encoding="utf-8")
    links = top / ".ci" / "typings" / "atoll"
    links.mkdir(parents=True, exist_ok=True)
    for folder in ("collectives", "security", "optim", "node"):
        (links / folder).symlink_to(top / folder)
    import trio

    (links.parent / "trio").symlink_to(Path(trio.__file__).parent)
    return removed


def run_in(top: Path, *command: str, limit_s: float = 3600) -> subprocess.CompletedProcess[str]:
    """A process that finds `atoll` in the copy."""
    path = {"PYTHONPATH": str(top / ".ci" / "typings")}
    own = {**os.environ, **path, "ATOLL_HOME": str(top / "home"), "COLUMNS": "400"}
    command = (sys.executable, *command)
    return subprocess.run(
        command, cwd=top, env=own, capture_output=True, text=True, timeout=limit_s
    )


def check_types(top: Path) -> bool:
    """pyright, strict, on the four folders."""
    found = run_in(
        top, "-m", "pyright", "--pythonpath", sys.executable, "collectives", "security", "optim",
        "node",
    )  # fmt: skip
    print(found.stdout[-2000:])
    return found.returncode == 0


def check_refusals(top: Path, names: Sequence[str]) -> bool:
    """Each mode's key is refused, in one sentence of the registry."""
    well = True
    for name in names:
        if name in ASKS:
            file = top / f"{name}.toml"
            text = 'schema = 1\nname = "x"\n' + ASKS[name]
            file.write_text(text, encoding="utf-8")
            found = run_in(top, "-m", "atoll.node.cli", "validate", str(file))
            sentence = f"this installation has no mode '{name}'"
            said = found.stdout + found.stderr
            if sentence not in said:
                print(f"{name}: not refused: {said[-1500:]}")
            well &= sentence in said and found.returncode != 0
    return well


def play_tests(top: Path, gone: Sequence[Path], only: Sequence[str]) -> str:
    """The tests that are left: the summary of pytest."""
    tests, _ = tests_within([path for path in package_files() if path not in gone])
    kept = [str(path) for path in tests if not only or path.as_posix() in only]
    found = run_in(top, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *kept)
    print(found.stdout[-3000:])
    return found.stdout.strip().rpartition("\n")[2] if found.returncode else ""


def play_demo(top: Path) -> bool:
    """Real nodes train it to its end."""
    out = top / "demo"
    found = run_in(
        top, "-m", "atoll.node.cli", "demo", "--quick", "--no-baseline", "--json", "--out", str(out)
    )
    print(found.stdout[-800:] or found.stderr[-2000:])
    return found.returncode == 0


def amputate(names: Sequence[str], parts: Sequence[str], only: Sequence[str]) -> dict[str, Any]:
    """Delete modes, and look at the rest."""
    names, gone = gone_with(names)
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve()
        found: dict[str, Any] = {"gone": names, "files": len(gone)}
        found["rows"] = copy_without(top, gone)
        if "types" in parts:
            found["types"] = check_types(top)
        if "refusals" in parts:
            found["refusals"] = check_refusals(top, names)
        if "tests" in parts:
            failed = play_tests(top, gone, only)
            found["tests"] = failed or True
        if "demo" in parts:
            found["demo"] = play_demo(top)
    print(json.dumps(found))
    return found


def main() -> int:
    """1 where something fails."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], help="Each alone.")
    parser.add_argument("--each", action="store_true", help="Every mode alone.")
    parser.add_argument("--only", choices=PARTS, action="append", help="One part; repeatable.")
    parser.add_argument("--tests", nargs="*", default=[], help="Only these files of tests.")
    given = parser.parse_args()
    alone = list(MODES) if given.each else list(given.modes)
    asked = [[name] for name in alone] or [list(MODES)]
    found = [amputate(names, given.only or PARTS, given.tests) for names in asked]
    print(json.dumps(found))
    wrong = [each for each in found if any(each.get(part, True) is not True for part in PARTS)]
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
