"""The plain numpy codecs of scripts/bench/_codec_reference.py, as a module of the tests."""

from __future__ import annotations

import importlib.util

from house import ROOT

_spec = importlib.util.spec_from_file_location(
    "codec_reference", ROOT / "scripts" / "bench" / "_codec_reference.py"
)
assert _spec is not None
assert _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)
