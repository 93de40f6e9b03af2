"""One target under atheris, whose environment this runs in: it looks for bytes that are read in new
ways, until one is a defect.

python scripts/_fuzz.py TARGET FOLDER [libFuzzer's options]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Never returns but by the fuzzer's end."""
    import atheris  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

    fuzzer: Any = atheris
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    torch.set_num_threads(1)
    with fuzzer.instrument_imports(include=["atoll"]):
        from fuzz_targets import TARGETS
    target = TARGETS[sys.argv[1]]
    fuzzer.Setup([sys.argv[0], *sys.argv[2:]], target)
    fuzzer.Fuzz()


if __name__ == "__main__":
    main()
