"""The kits of tests/ for the scripts that measure with them: real peers, faults, the network laboratory."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

from faults import KINDS, PARTS, PHASES, TARGETS, Fault, Kind, Part, Phase, Target, fault  # noqa: E402
from netns.lab import Lab, LabError, missing  # noqa: E402
from real_faults import NETWORK, Armed, Ledger, Seen, Watch  # noqa: E402
from swarm_kit import Peer, Peers  # noqa: E402

__all__ = [
    "KINDS", "NETWORK", "PARTS", "PHASES", "TARGETS", "TESTS", "Armed", "Fault", "Kind", "Lab", "LabError", "Ledger", "Part", "Peer", "Peers",
    "Phase", "Seen", "Target", "Watch", "fault", "missing",
]  # fmt: skip
