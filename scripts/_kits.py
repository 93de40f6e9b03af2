"""Makes the kits of tests/ (real peers, faults, the network laboratory) importable for the scripts that measure with them."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))
