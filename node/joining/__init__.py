"""How a script enters a run, and what it holds then: the client's parts, put together; and how
commands ask a node. Blocking, without trio and libp2p; torch only where tensors are touched. Lowest
first:

* find       the running node of a home, or a private one
* commands   NodeClient: what `atoll status` and its like ask
* beginning  what a run begins with that starts from a model
* speaking   lines about a run for a plain script, and how it ends
* swarm      RunSwarm, the Swarm of a run
* joining    `join()`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands import NodeClient
    from .joining import join
    from .swarm import RunSwarm

__all__ = ["NodeClient", "RunSwarm", "join"]

_HOMES = {"NodeClient": "commands", "RunSwarm": "swarm", "join": "joining"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
