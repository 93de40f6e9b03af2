"""Asks a feed of advisories (OSV) for known weaknesses of the locked dependencies: one question for
all of them, ten seconds at most.

    python scripts/audit.py [LOCK …]       default: scripts/requirements-test.lock and the torch of
        scripts/constraints.txt

Exit status 1 where a weakness is known. Where no feed can be reached it says so in one line and
exits with 0: nothing was audited. ATOLL_ADVISORIES names another feed with the same interface
(https://google.github.io/osv.dev/post-v1-querybatch/).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FEED = "https://api.osv.dev/v1/querybatch"
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 8 << 20


def pins(text: str) -> dict[str, str]:
    """Version by name, of the lines of a lock or a list of constraints."""
    return dict(re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s;\\]+)", text))


def ask(feed: str, found: dict[str, str]) -> dict[str, list[str]]:
    """The ids of the advisories of each package that has some. Raises OSError, ValueError."""
    names = sorted(found)
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": found[name]} for name in names
    ]
    request = urllib.request.Request(
        feed,
        json.dumps({"queries": queries}).encode(),
        {"Content-Type": "application/json", "User-Agent": "atoll-audit"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # nosec B310
        results: list[dict[str, Any]] = json.loads(answer.read(MAX_ANSWER_BYTES))["results"]
    if len(results) != len(names):
        raise ValueError(f"{len(results)} answers to {len(names)} questions")
    known = {
        name: [str(each["id"]) for each in result.get("vulns") or ()]
        for name, result in zip(names, results, strict=True)
    }
    return {name: ids for name, ids in known.items() if ids}


def main(locks: list[str]) -> int:
    """Say what is known, and how many packages were asked for."""
    files = [Path(lock) for lock in locks] or [ROOT / "scripts" / "requirements-test.lock"]
    found = {name: version for file in files for name, version in pins(file.read_text()).items()}
    if not locks:
        found["torch"] = pins((ROOT / "scripts" / "constraints.txt").read_text())["torch"]
    feed = os.environ.get("ATOLL_ADVISORIES", FEED)
    if not feed.startswith(("https://", "http://127.0.0.1:")):
        print(f"audit: {feed!r} is no feed: https:// is expected", file=sys.stderr)
        return 2
    try:
        known = ask(feed, found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"audit: skipped, no feed of advisories can be reached ({type(error).__name__})")
        return 0
    for name, ids in known.items():
        print(f"audit: {name} {found[name]} has known weaknesses: {', '.join(ids)}")
    print(f"audit: {len(found)} packages, {len(known)} with known weaknesses")
    return 1 if known else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("locks", nargs="*", metavar="LOCK", help="files of pinned versions")
    sys.exit(main(parser.parse_args().locks))
