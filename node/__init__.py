"""The node: your machine in a swarm. A daemon (`atoll up`) or the private child of a script; and
what scripts use of it.

    from atoll.node import join, site_data

loads neither trio nor libp2p nor torch. Rooms, lowest first:

    paths, bandwidth, hours, config   where files lie, and settings
    local_settings     ./atoll.toml, used only where it is named or trusted
    interpreter        the Python of processes that are started: it imports nothing from the
                       current folder
    process_title      invites out of the list of processes
    own_data           a site's own data, by a function in a file of its own
    strict_toml, manifest, manifest_refusals, manifest_checks, manifest_form, manifest_gpt,
    manifest_join, manifest_presets, manifest_methods, manifest_federated, manifest_quorum,
    manifest_btard, manifest_robust, manifest_limits   what a run is
    capability, invite, standing, entrants   how one gets into it: what the organiser signs, what is
                       handed on, what is kept
    evidence, banning, gate, doors   proof of lies; who is kept out; who is let in, and may enter
                       the log's configuration
    shared_memory      contribution and anchor, between node and script
    net/               libp2p, DHT, lanes
    membership_records, membership   who is there
    quorum             whether enough are, for people and tools
    secure/            rounds whose contributions are masked; sans I/O, beside a session
    btard/             rounds whose contributions follow from public seeds; likewise
    session/           a run's log: rounds, state, transfer; sans I/O
    storage/           what a run keeps on disk
    simulation/        the whole swarm in virtual time
    lifecycle, private_node, ending, notify, units, logs   one node a home; what ends with whom;
                       systemd, told and asked; lines of a log
    diary, verdicts, clocks   what happened in a run, on disk; what is wrong with it over many
                       rounds; what peers say of this machine's clock
    control/           the control socket: messages, what the node implements for it, the server
    service/           the node process's own work
    client/            the blocking side of the control socket: `join`, RunSwarm, NodeClient
    export, audit, recompute   a run's anchor as safetensors; its log checked and handed over; a
                       round computed again
    splitting          clusters of a run's members, for a run of each
    leaning            whose contributions keep pointing one way over many rounds
    local, local_member   LocalSwarm: whole swarms in one process and virtual time, for users' own
                       tests
    look/              a run looked at: one picture of it, for a terminal and a page
    recipes/, demo/, cli/   built-in training, the demonstration, the command line
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import NodeClient, RunSwarm, join
    from .own_data import SiteData, site_data

__all__ = ["join", "site_data", "NodeClient", "RunSwarm", "SiteData"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(
        import_module(".own_data" if name in ("site_data", "SiteData") else ".client", __name__),
        name,
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
