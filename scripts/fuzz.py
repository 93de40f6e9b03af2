#!/usr/bin/env python
"""Look for bytes that break a reader of foreign bytes, guided by coverage (atheris, in an
environment of its own).

Targets are those of tests/fuzz_targets.py. What is read in ways of its own is kept in tests/corpus,
fewest and shortest first, and so is what was found; every run of the tests reads them again. Exit
status 1 where there are findings.

    scripts/fuzz.py --target dht --seconds 600
    scripts/fuzz.py --target all --seconds 60 --keep no
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.append(str(ROOT / "scripts" / "bench"))  # helpers of the measurements

from _bench import FailedError, emit, progress  # noqa: E402
from _environment import OUT, Unavailable, set_up  # noqa: E402
from fuzz_targets import CORPUS, TARGETS, corpus, seeds  # noqa: E402

VERSION, INSTALL_S = "3.0.0", 600
FOLDER = OUT / "fuzz"
LONGEST, SLOWEST_S, MEMORY_MIB = 4096, 60, 2048
MOST_KEPT, MOST_BYTES = 40, 2048


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=["all", *TARGETS], default="all")
    parser.add_argument("--seconds", type=int, default=600, help="of each target")
    parser.add_argument(
        "--keep",
        choices=["yes", "no"],
        default="yes",
        help="whether tests/corpus gets what was found",
    )
    return parser.parse_args()


def environment() -> str:
    """Python of an environment with atheris, made on first use. Raises Unavailable."""
    python = FOLDER / "env" / "bin" / "python"
    if not (FOLDER / "complete").exists():
        progress(f"making an environment with atheris {VERSION}")
        what = f"atheris {VERSION}"
        set_up(what, [sys.executable, "-m", "venv", "--clear", str(FOLDER / "env")], INSTALL_S)
        set_up(
            what,
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-input",
                "--only-binary",
                ":all:",
                f"atheris=={VERSION}",
            ],
            INSTALL_S,
        )
        site = next((FOLDER / "env" / "lib").glob("python*")) / "site-packages"
        ours = next(Path(path) for path in sys.path if path.endswith("site-packages"))
        (site / "zz_atoll.pth").write_text(
            f"import site; site.addsitedir({str(ours)!r})\n", encoding="utf-8"
        )  # all else is ours
        (FOLDER / "complete").touch()
    return str(python)


def fuzz(python: str, target: str, seconds: int) -> dict[str, Any]:
    """One target for so long, or until the first finding. Raises FailedError where the fuzzer does
    not run.
    """
    work, found = FOLDER / "corpus" / target, FOLDER / "found" / target
    for folder in (work, found):
        folder.mkdir(parents=True, exist_ok=True)
    for old in found.iterdir():
        old.unlink()
    for data in corpus(target):
        (work / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    command = [
        python,
        str(ROOT / "scripts" / "_fuzz.py"),
        target,
        str(work),
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST}",
        f"-timeout={SLOWEST_S}",
        f"-report_slow_units={SLOWEST_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    (FOLDER / f"{target}.log").write_text(done.stderr, encoding="utf-8")
    count = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    findings = [path.read_bytes() for path in sorted(found.iterdir())]
    if count is None and not findings:
        raise FailedError(f"{target}: {done.stderr[-2000:]}")
    return {
        "target": target,
        "seconds": round(time.monotonic() - started),
        "executions": int(count[1]) if count else None,
        "coverage": int(coverage[-1][0]) if coverage else 0,
        "inputs": sum(1 for _ in work.iterdir()),
        "findings": [data.hex() for data in findings],
        "why": _why(done.stderr) if findings else "",
    }


def _why(log: str) -> str:
    lines = [
        line
        for line in log.splitlines()
        if re.match(r"\S*(Error|Exception|Interrupt)\b|==\d+== ?(ERROR|libFuzzer)", line.strip())
    ]
    return " / ".join(lines[-3:])[:400]


def lines_of(target: str, data: bytes) -> set[tuple[str, int, int]]:
    """Which steps from line to line of the package reading ``data`` takes."""
    seen, last = set[tuple[str, int, int]](), [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(str(ROOT)) or "/tests/" in code.co_filename:
            return None
        if event == "line":
            seen.add((code.co_filename, last[0], frame.f_lineno))
            last[0] = frame.f_lineno
        return trace

    sys.settrace(trace)
    try:
        TARGETS[target](data)
    finally:
        sys.settrace(None)
    return seen


def keep(target: str, findings: list[bytes]) -> int:
    """Write the corpus anew: all findings, and of the rest what adds most for its length; how many
    inputs it has.
    """
    file = CORPUS / f"{target}.txt"
    known = (
        [bytes.fromhex(line) for line in file.read_text(encoding="ascii").split()]
        if file.exists()
        else []
    )
    work = [path.read_bytes() for path in (FOLDER / "corpus" / target).iterdir()]
    seen = set[tuple[str, int, int]]()
    for data in seeds()[target]:
        seen |= lines_of(target, data)
    kept = dict.fromkeys(findings)
    for data in sorted(
        {*known, *work} - {*findings, *seeds()[target]}, key=lambda data: (len(data), data)
    ):
        if len(data) > MOST_BYTES or len(kept) >= MOST_KEPT:
            continue
        more = lines_of(target, data) - seen
        if more:
            kept[data] = None
            seen |= more
    CORPUS.mkdir(exist_ok=True)
    file.write_text(
        "".join(
            f"{data.hex() or '00'}\n" for data in sorted(kept, key=lambda data: (len(data), data))
        ),
        encoding="ascii",
    )
    return len(kept)


def main() -> None:
    """Fuzz, keep, tell."""
    given = options()
    runs: list[dict[str, Any]] = []
    try:
        python = environment()
        for target in TARGETS if given.target == "all" else [given.target]:
            row = fuzz(python, target, given.seconds)
            if given.keep == "yes":
                row["kept"] = keep(target, []) if not row["findings"] else len(row["findings"])
            progress(
                f"{target}: {row['executions']} inputs in {row['seconds']} s, {len(row['findings'])} findings {row['why']}"
            )
            runs.append(row)
    except (Unavailable, FailedError) as error:
        sys.exit(f"fuzz.py: {error}")
    findings = sum(len(row["findings"]) for row in runs)
    emit("fuzz", {"seconds": given.seconds}, runs, findings=findings)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
