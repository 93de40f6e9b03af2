"""The planner: from step time, rates and round-trip times to the settings of a run. Pure functions,
without torch.

conditions   what is known of the peers, checked
estimate     how long a round of given settings takes, and what share of the time is training
price        what settings cost in loss, from a table
planner      which settings reach a loss soonest, and why in words
balance      how many samples each of unequal machines takes of a step
again        how long the next round is, from what the log says of the last one
"""

from .again import Lag, RoundSteps, again
from .balance import Machine, balance
from .conditions import Conditions, PeerConditions
from .estimate import Choice, Estimate, estimate
from .planner import TrainingPlan, plan, seconds_a_sample
from .price import Price, price

__all__ = [
    "Choice",
    "Conditions",
    "Estimate",
    "Lag",
    "Machine",
    "RoundSteps",
    "PeerConditions",
    "Price",
    "TrainingPlan",
    "again",
    "balance",
    "estimate",
    "plan",
    "price",
    "seconds_a_sample",
]
