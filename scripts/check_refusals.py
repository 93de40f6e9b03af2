#!/usr/bin/env python
"""Refuse one system call after another to a node, as it starts, is joined to a run, trains and
ends, and look at what it does and says: tests/refusals_kit.py says what must hold.

    ./scripts/check_refusals.py                       every case
    ./scripts/check_refusals.py --phase running --call fsync
    ./scripts/check_refusals.py --out cases.jsonl     goes on where it was interrupted

Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import errno
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kits")]

from refusals_kit import PHASES, Found, Playing, cases  # noqa: E402


def main() -> int:
    """1 where a case went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=PHASES, action="append")
    parser.add_argument("--call", action="append", default=[])
    parser.add_argument("--out", type=Path, help="a line a case; what stands in it is not repeated")
    options = parser.parse_args()
    begun, found = time.monotonic(), list[Found]()
    if options.out is not None and options.out.exists():
        found += [Found(**json.loads(line)) for line in options.out.read_text().splitlines()]
    known = {(each.phase, each.call, each.error) for each in found}
    for phase in options.phase or PHASES:
        with tempfile.TemporaryDirectory() as name, Playing(phase, Path(name)) as playing:
            for call, error in cases(phase, options.call):
                if (phase, call, errno.errorcode[error]) not in known:
                    found.append(_kept(playing.play(call, error), options.out))
    wrong = [each for each in found if each.faults]
    print(
        json.dumps(
            {
                "cases": len(found),
                "wrong": [f"{each.phase} {each.call} {each.error}" for each in wrong],
                "never_refused": sum(not each.refused for each in found),
                "wall_s": round(time.monotonic() - begun, 1),
            }
        )
    )
    return bool(wrong)


def _kept(found: Found, out: Path | None) -> Found:
    words = "; ".join(found.faults) or "well"
    print(f"{found.phase} {found.call} {found.error}: {words}", flush=True)
    if out is not None:
        with out.open("a") as file:
            print(json.dumps(asdict(found)), file=file)
    return found


if __name__ == "__main__":
    sys.exit(main())
