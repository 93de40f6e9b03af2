"""What a script says to its node at last: how it ended."""

from __future__ import annotations

import sys

OF_SIGNALS = 128
"""Exit statuses from here on are of scripts that a signal ended, such as 130 of Ctrl-C."""


def uncaught() -> BaseException | None:
    """The exception that ends this script, as the interpreter remembers it; None where none does,
    and in an interactive session, where it may be of any earlier command.
    """
    if hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", getattr(sys, "last_value", None))


def cause_of(error: BaseException | None) -> str:
    """For the node: the exception that ends a script, in a line; "" for an end as it was wanted, by
    Ctrl-C or with exit status 0.
    """
    if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return ""
    if isinstance(error, SystemExit):
        code = error.code
        ended = code is None or code == 0 or (isinstance(code, int) and code >= OF_SIGNALS)
        return "" if ended else f"exit status {code if isinstance(code, int) else 1}"
    try:
        line = str(error).strip().partition("\n")[0]
    except Exception:  # an exception of the script's own
        line = ""
    words = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return words.encode(errors="replace").decode()[:200]
