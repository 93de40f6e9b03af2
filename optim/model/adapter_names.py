"""Names of adapters without PEFT: which tensor of a folder that PEFT's ``save_pretrained`` wrote is
which live one. PEFT puts the adapter's name, and for some kinds more, into the live names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

LIBRARY = "base_model.model."  # before saved names of adapters that transformers holds
LONGEST = 3  # parts of a name that are left out of the saved one, neighbours of one another
PROMPT = re.compile(r"prompt_encoder\.[^.]+\.embedding\.weight")

Shapes = Mapping[str, tuple[int, ...]]


def saved_names(live: Shapes, saved: Shapes) -> dict[str, str]:
    """The saved name of each live tensor that has one: equal shapes, and the live name with as few
    parts left out as possible.
    """
    found = dict[str, str]()
    taken = set[str]()
    for name, shape in live.items():
        for candidate in _candidates(name):
            if candidate not in taken and saved.get(candidate) == shape:
                found[name] = candidate
                taken.add(candidate)
                break
    return found


def _candidates(name: str) -> Iterator[str]:
    if PROMPT.fullmatch(name):
        yield "prompt_embeddings"
    parts = name.split(".")
    for left_out in range(LONGEST + 1):
        for first in range(len(parts) - left_out, -1, -1) if left_out else (0,):
            shorter = ".".join(parts[:first] + parts[first + left_out :])
            yield shorter
            yield LIBRARY + shorter
