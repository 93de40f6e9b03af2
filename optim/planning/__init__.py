"""The planner: from step time, rates and round-trip times to the settings of a run. Pure functions,
without torch.

conditions   what is known of the peers, checked
estimate     how long a round of given settings takes, and what share of the time is training
planner      which settings: the ladder, and why in words
pipeline     SkipPipe: which stages of a pipeline each microbatch visits; no run has one
again        how long the next round is, from what the log says of the last one
"""

from .again import Lag, RoundSteps, again
from .conditions import Conditions, PeerConditions
from .estimate import Choice, Estimate, estimate
from .pipeline import Pipeline, PipelineSchedule, skip_schedule
from .planner import TrainingPlan, plan

__all__ = [
    "Choice",
    "Conditions",
    "Estimate",
    "Lag",
    "RoundSteps",
    "PeerConditions",
    "Pipeline",
    "PipelineSchedule",
    "TrainingPlan",
    "again",
    "estimate",
    "plan",
    "skip_schedule",
]
