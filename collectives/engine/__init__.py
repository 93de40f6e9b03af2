"""The lane engine: one thread that runs an exchange over real sockets. Lowest first:

settings    EngineSettings, socket options
poller      poll, or selectors
bucket      limits of bytes a second
meter       how fast this node's links are
congestion  which congestion control a lane needs
losses      for how long a living peer may be silent, by the packets that are lost
width       how many lanes to a peer
packing     which records are compressed
lane        one socket: records, heartbeats
plain       a lane whose payloads are neither encrypted nor copied
proxy       EngineExchange: commands from other threads
thread      EngineThread
"""

from __future__ import annotations

from ..record_layer import LaneKeys, derive_lane_keys
from .proxy import EngineExchange
from .settings import EngineSettings, tune
from .thread import EngineThread, LaneStats

__all__ = [
    "EngineExchange",
    "EngineSettings",
    "EngineThread",
    "LaneKeys",
    "LaneStats",
    "derive_lane_keys",
    "tune",
]
