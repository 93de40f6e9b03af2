"""The ground of atoll: seams, bytes, groups, rounds, reductions. Knows neither libp2p nor keys nor
a network.

    from atoll.collectives import all_reduce, enter

Collectives take any swarm (docs/collectives.md). Rooms, lowest first:

errors         AtollError and its tree; nothing else defines a public error
identifiers    PeerId, RunId, sizes of hashes
forced         names of files and folders on the medium
foreign        words from outside, before a person or a log sees them
telemetry      typed events and one emit(); sinks subscribe
layout         what the flat vector means: names, shapes, offsets
cutting        a model cut into fragments
seeded         work that follows from a public seed: settings of BTARD
metrics        metrics of a script as floats; what is none is left out with a warning
codec_names    the codecs, and what is known of them without torch
codec_costs    what codecs cost, likewise
outer_rules    the outer optimizers, likewise
outcomes       what comes of rounds: outcomes, entries, anchors
round_settings   when rounds end: the settings that every run has
cold_start     with which rounds a cold start was measured
growth         how many steps the first rounds have, where they are shorter
arrivals       for whom a round waits that does not wait for everybody: settings
swarm          settings of a run, outcomes and anchors of its rounds
script_swarm   the Swarm seam: what a training script sees; no implementation
plain          tensors whose values are their memory: flat, as bytes, as words
target         where a result goes: a tensor of the caller, as it was when it was given
awaiting       handles under asyncio and trio, and those that nobody waits for
given          what a reduction is given, as the vector that travels
api            collectives for scripts: reductions, gathers, broadcasts, barriers, comparing states
averaging      the mean over many members in steps among few
group          members, configurations, quorums, plans, log entries: frozen values
reach          which members a configuration can lose
groups         parts of a configuration: lines of a grid, pairs
op_names, series   names of operations; operations that go by number
messages       the round's control messages: typed, bounded
compiled       libraries compiled at installation
bounds         how many members a run may have, by its plan and by what one message carries
digest         hashes of chunks, parts and states
compass        FedCompass' scheduler: who makes how many steps, so that groups arrive together
pace           how fast a member's links are
partition      one vector, parts per member
reduce         the Reducer seam in four forms: mean, sum, maximum, minimum, product, copies
schemes        places and their peers, as data: checked, and compiled to a plan
reducers       more reducers: of operations
terms          what is added up on the way of a part
trees          over which members a part is summed, and its result handed down
registry       modes by name, loaded once a run asks for one
rows           codecs and rules that are found by name
witnesses      who adds up a part beside its owner, where members may lie
record_layer   authenticated records for lanes
codecs/        the formats of encoded values, of chunks and of whole vectors
exchange/      the data plane of a round; sans I/O
engine/        one thread that runs an exchange over real sockets
round/         the round and its decision; sans I/O
modes/         what some runs ask of a log, behind doors of round/
simulation/    virtual time, an in-memory network, faults and traps
"""

# The stub beside this file has the names that this one loads when they are used.
# pyright: reportUnsupportedDunderAll=false

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "all_gather",
    "all_reduce",
    "average",
    "barrier",
    "broadcast",
    "check_state",
    "enter",
    "gather_objects",
    "modular_sum",
    "numbered",
    "reduce_scatter",
    "repair_state",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = {"average": ".averaging", "numbered": ".series"}.get(name, ".api")
    value = getattr(import_module(room, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
