"""A swarm's surroundings in virtual time: nothing here knows what a round is.

world     discrete events: a heap, a virtual clock, seeded randomness, a hash of all that happened
network   messages between peers: latency, bandwidth, loss, duplicates, reordering, partitions,
          freezes

The same seed gives the same run, event by event: ``World.trace()`` is the proof.
"""

from .network import Network, Weather
from .world import ProcessDied, Timer, World

__all__ = ["Network", "ProcessDied", "Timer", "Weather", "World"]
