"""Which parameters are factors of an adapter, by their names."""

from __future__ import annotations

import re

FACTOR = re.compile(r"(?<![^.])lora_(embedding_)?([AB])(?![^.])")
