"""The script's and the command line's side of the node: blocking, without trio and libp2p; torch
only where tensors are touched.

* eager        getting the interpreter soon while others compute in Python
* link         one connection: requests, answers, descriptors, pushes
* find         the running node of a home, or a private one
* reclaiming   memory of decided contributions goes back to the system
* memory       the mappings of an opened run, and the views of its anchor
* shared       tensors that the node reads where they lie: `Swarm.buffer`
* shelf        where a script keeps what is its own in a run
* seeded       what the node asks for by seed
* pending      what `contribute` and `all_reduce` return
* farewell     how a script ended, for its node
* swarm        RunClient: what a script asks of a run; survives its node
* reattach     how it gets a node again
* starting     waiting for the members that a run is to begin with
* commands     NodeClient: what `atoll status` and its like ask
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands import NodeClient
    from .swarm import RunClient

__all__ = ["NodeClient", "RunClient"]

_HOMES = {"NodeClient": "commands", "RunClient": "swarm"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
