"""The node: your machine in a swarm. A daemon (`atoll up`) or the private child of a script; and
what scripts use of it.

    from atoll.node import join, site_data

loads neither trio nor libp2p nor torch. Rooms, lowest first:

    net/transport/     addresses, the libp2p host, streams: lowest, since settings hold addresses
    home/              a machine: files, settings, processes, the terminal
    run/               who may enter a run, who is kept out, who is there, how it goes
    manifest/          what a run trains, and by which rules; signed
    net/               libp2p, DHT, relays, lanes
    session/           a run's log at one member: rounds, state, transfer; sans I/O
    modes/             what some runs ask of a session; which of it a run does
    storage/           what a run keeps on disk
    bases/             a pretrained model's files, from member to member
    control/           the control socket: messages, shared memory, the server
    client/, joining/  the script's blocking side of it: `join`, RunSwarm, NodeClient
    service/, watching/, composing/   a node's work; what it notes for people; its process
    records/           what is left of a run: exported, audited, computed again
    simulation/        the whole swarm in virtual time
    views/, look/      documents and events as text; a run in one picture, for a terminal and a page
    recipes/, demo/, cli/   built-in training, the demonstration, the command line
    local              LocalSwarm: whole swarms in virtual time, for users' own tests
"""

# The stub beside this file has the names that this one loads when they are used.
# pyright: reportUnsupportedDunderAll=false

from __future__ import annotations

from importlib import import_module
from typing import Any

OF_DATA = ("site_data", "SiteData", "example_ledger")
__all__ = ["join", "site_data", "example_ledger", "NodeClient", "RunSwarm", "SiteData"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(
        import_module(".home.own_data" if name in OF_DATA else ".joining", __name__),
        name,
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
