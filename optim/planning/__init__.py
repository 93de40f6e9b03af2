"""The planner: from step time, rates and round-trip times to the settings of a run. Pure functions,
without torch.

waiting      whom a round waits for, and how long
conditions   what is known of the peers, checked
estimate     how long a round of given settings takes, and what share of the time is training
price        what settings cost in loss, from a table
planner      which settings reach a loss soonest, and why in words
whole        what a run costs from its first round on, short ones among them
balance      how many samples each of unequal machines takes of a step
"""

from ..rounds.again import Lag, RoundSteps, again
from .balance import Machine, balance
from .conditions import Conditions, PeerConditions
from .estimate import Choice, Estimate, estimate
from .planner import (
    Alternative,
    TrainingPlan,
    costs_of,
    plan,
    price_of,
    seconds_a_sample,
)
from .price import Price, price
from .whole import RunCost, full_rounds, run_cost

__all__ = [
    "Alternative",
    "Choice",
    "Conditions",
    "Estimate",
    "Lag",
    "Machine",
    "RoundSteps",
    "PeerConditions",
    "Price",
    "RunCost",
    "TrainingPlan",
    "again",
    "balance",
    "costs_of",
    "estimate",
    "full_rounds",
    "plan",
    "price",
    "price_of",
    "run_cost",
    "seconds_a_sample",
]
