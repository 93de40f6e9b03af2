"""What the loop says of held-out data, kept in the run's folder: the card of an exported model says
it again.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ....collectives.errors import AtollError
from ...home.paths import write_atomic
from ...records.model_card import EVALUATION_FILE
from .loop import Say

logger = logging.getLogger("atoll")


def keep_evaluations(say: Say, folder: Path) -> Say:
    """``say``, which also keeps the newest ``evaluation`` in ``folder``. What cannot be written is
    logged, and training goes on.
    """

    def kept(record: dict[str, Any]) -> None:
        if record.get("event") == "evaluation" and record.get("tokens"):
            found = {key: record[key] for key in ("round", "tokens", "held_out")}
            try:
                write_atomic(folder / EVALUATION_FILE, json.dumps(found).encode())
            except AtollError as error:
                logger.warning("%s", error)
        say(record)

    return kept
