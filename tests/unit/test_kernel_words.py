"""Ring 1 speaks of no mode: outside the doors none of its files has a mode's word."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from house import ROOT, package_files

sys.path.append(str(ROOT / "scripts"))

from kernel import LIST, read_rings

DOORS = {
    Path(path)
    for path in (
        "collectives/round/arrival_policy.py",
        "collectives/round/dissemination.py",
        "collectives/round/faults.py",
        "collectives/round/log_modes.py",
        "collectives/round/own_results.py",
        "collectives/round/seals.py",
        "collectives/round/site_names.py",
        "node/session/measures.py",
        "node/session/modes.py",
        "node/session/other_logs.py",
        "node/session/pre_round.py",
        "node/session/recertification.py",
    )
}
"""Where a mode meets the kernel, which says there what it asks for."""
WORDS = re.compile(
    r"\b(?:lying|byzantine|arrival|drawn|grid|seal|mask|btard|federated|adapter)s?\b", re.IGNORECASE
)
MOST = 57
"""In all files together; to fall to 0."""


def test_the_kernel_speaks_of_no_mode() -> None:
    ring = read_rings(LIST.read_text(encoding="utf-8"), package_files())[0]
    found = {
        str(path): len(WORDS.findall((ROOT / path).read_text(encoding="utf-8")))
        for path in ring
        if path not in DOORS
    }
    assert sum(found.values()) <= MOST, {path: n for path, n in found.items() if n}
