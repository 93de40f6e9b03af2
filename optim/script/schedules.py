"""How many inner steps a member makes until its run is over: the end of a learning-rate
schedule.
"""

from __future__ import annotations

import logging

from ...collectives.errors import ConfigError
from ...collectives.swarm import RunSettings, Swarm
from ..data.ledger import attached_to

logger = logging.getLogger("atoll")
BY_POSITION = (
    "Let the schedule follow the run: LambdaLR(optimizer, lambda step: max(0.01, 1 - "
    "sync.position / total_samples)), with sync of attach()"
)


def steps_left(swarm: Swarm) -> int:
    """Inner steps (of the optimizer, accumulated batches being one) until ``swarm``'s run has all
    its rounds: rounds × sync_every, less those that are over. Before `attach`, too, as schedules
    are made before it. A round that is lost is made again, so it may take a few steps more.

        swarm = join(INVITE)
        total = steps_left(swarm)
        arguments = TrainingArguments(..., max_steps=total)         # transformers
        trainer = lightning.Trainer(max_steps=total, ...)           # Lightning
        schedule = LambdaLR(optimizer, lambda step: 1 - step / total)

    Raises ConfigError where the run does not say it: without a number of rounds, and where rounds
    end by time or samples, or are planned again.
    """
    settings = swarm.settings
    why = why_open(settings)
    if why:
        raise ConfigError(
            f"nobody can say how many steps this run has: {why}", key="$.train", hint=BY_POSITION
        )
    sync = attached_to(swarm)
    done = sync.begun[0] if sync is not None else int(getattr(swarm, "round", 0))
    return steps_after(settings, done)


def why_open(settings: RunSettings) -> str:
    """Why a run's number of steps is not known beforehand; "": it is."""
    if settings.rounds is None:
        return "it has no [train] rounds"
    if settings.sync_every is None:
        return "its rounds end by time or samples"
    if settings.share is not None:
        return "its rounds are planned again as they go ([train] share)"
    if settings.arrivals is not None:
        return "a round does not wait for every member ([exchange.arrivals])"
    return ""


def steps_after(settings: RunSettings, done: int) -> int:
    """Inner steps of the rounds that come after ``done`` of them; `why_open` says nothing."""
    assert settings.rounds is not None
    assert settings.sync_every is not None
    left = max(0, settings.rounds - done)
    short = min(left, max(0, settings.local_after - done))  # post-local SGD: rounds of one step
    return short + (left - short) * settings.sync_every


def compare_schedule(swarm: Swarm, planned: int, *, decays: bool, setting: str) -> None:
    """Warn where a trainer plans ``planned`` more steps and the run has another number of them.
    ``decays``: its learning rate depends on how many they are. ``setting``: how it is told another
    number, with ``{}`` for it.
    """
    if why_open(swarm.settings):
        return
    left = steps_left(swarm)
    if planned == left or left == 0 or (planned > left and not decays):
        return
    to_type = setting.format("steps_left(swarm)")
    if planned < left:
        logger.warning(
            "training is to end after %d steps here, and the run has %d more: %s, with steps_left "
            "of atoll.optim, trains to its end",
            planned,
            left,
            to_type,
        )
        return
    logger.warning(
        "the learning-rate schedule is made for %d steps, and the run ends after %d, at %.0f %% of "
        "its way: %s, with steps_left of atoll.optim, is the run's own number",
        planned,
        left,
        100 * left / planned,
        to_type,
    )
