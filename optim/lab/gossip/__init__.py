"""Training without a shared anchor: peers average with one other peer at a time, and stay apart.

Nothing of a run's log is used. A method takes a function that averages a tensor with some other
peer's (`Exchange`); over a swarm that is `collectives.averaging.average` with ``plan="gossip"``, in
a test it is whatever the test says. docs/gossip.md says when this is worth it, and when not.

exchange   what an exchange is, and the swarm's
graph      how fast gossip spreads over a graph, and which rates are best
halos      two-level groups: outer steps within a group often, over all rarely
noloco     NoLoCo: inner steps, then an outer momentum step on the mean of a pair
acid       A²CiD²: momentum between exchanges, for graphs over which gossip is slow
dadao      DADAO: gradients and gossip at their own rates, for strongly convex problems
"""

from .acid import ContinuousMomentum
from .dadao import Dadao, dadao
from .exchange import Exchange, Exchanged, over_group, over_swarm
from .graph import Spread, gossip_rates, spread_of
from .halos import TwoLevel
from .noloco import NoLoCo

__all__ = [
    "ContinuousMomentum",
    "Dadao",
    "Exchange",
    "Exchanged",
    "NoLoCo",
    "Spread",
    "TwoLevel",
    "dadao",
    "gossip_rates",
    "over_group",
    "over_swarm",
    "spread_of",
]
