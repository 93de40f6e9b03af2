"""What a run waits for, as a document for status and events."""

from __future__ import annotations

import time
from typing import Any

from ..session.events import Waiting


def document_of(waiting: Waiting, now: float) -> dict[str, Any]:
    """JSON-able; times are since 1970."""
    return {
        "state": waiting.state,
        "what": waiting.what,
        "of": list(waiting.of),
        "ends": waiting.ends,
        "since": round(time.time() - (now - waiting.since), 3),
        "round_open_s": round(waiting.round_open_s, 1),
    }
