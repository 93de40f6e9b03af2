"""A swarm's surroundings in virtual time: nothing here knows what a round is.

world     discrete events: a heap, a virtual clock, seeded randomness, a hash of all that happened
network   messages between peers: latency, bandwidth, loss, duplicates, reordering, partitions,
          freezes
faults    seeded plans of faults, and traps that strike at the n-th message of a kind

The same seed gives the same run, event by event: ``World.trace()`` is the proof.
"""

from .faults import FaultInjector, FaultPlan, ProcessDied, Subject, quiet_plan, random_plan
from .network import Network, Weather
from .world import Timer, World

__all__ = [
    "FaultPlan",
    "FaultInjector",
    "Network",
    "ProcessDied",
    "Subject",
    "Timer",
    "Weather",
    "World",
    "quiet_plan",
    "random_plan",
]
