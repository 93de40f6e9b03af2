"""The kits of tests/ for the scripts that measure with them: real peers, faults, the network
laboratory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from _bench import CANNOT, FailedError, progress

TESTS = Path(__file__).resolve().parents[2] / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

import twins  # noqa: E402
from faults import KINDS, PARTS, PHASES, TARGETS, Fault, Kind, Part, Phase, Target, fault  # noqa: E402
from netns.lab import Lab, LabError, missing  # noqa: E402
from real_faults import NETWORK, Armed, Ledger, Seen, Watch  # noqa: E402
from swarm_kit import Peer, Peers  # noqa: E402

__all__ = [
    "KINDS",
    "NETWORK",
    "PARTS",
    "PHASES",
    "TARGETS",
    "TESTS",
    "Armed",
    "Fault",
    "Kind",
    "Lab",
    "LabError",
    "Ledger",
    "Part",
    "Peer",
    "Peers",
    "Phase",
    "Seen",
    "Target",
    "Watch",
    "fault",
    "in_laboratory",
    "missing",
    "twins",
]


def in_laboratory(
    options: argparse.Namespace, run: Callable[[argparse.Namespace, Path], int]
) -> int:
    """What ``run`` returns, given a folder for a while. Exit code: 0 measured, 1 not, 64 cannot be
    done here.
    """
    if reason := missing():
        progress(f"cannot do it: {reason}")
        return CANNOT
    folder = Path(tempfile.mkdtemp(prefix="atoll-lab-"))
    try:
        return run(options, folder)
    except (AssertionError, FailedError, LabError) as error:
        progress(f"cannot measure: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
