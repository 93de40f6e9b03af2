"""pause, resume: whether this machine trains in a run; it serves the run in both cases."""

from __future__ import annotations

import click

from ..home.output import current
from .daemon import connect
from .options import RUN, shared_options


@click.command("pause")
@click.argument("run", required=False, type=RUN)
@shared_options
def pause_command(run: str | None) -> None:
    """Stop training in a run and go on serving it, until atoll resume.

    The script rests once its round is over: it keeps its memory and computes nothing. The other
    members do not wait for it. That holds over restarts of node and script. RUN: id, its beginning,
    or name; the only one when left out.
    """
    _say(run, paused=True)


@click.command("resume")
@click.argument("run", required=False, type=RUN)
@shared_options
def resume_command(run: str | None) -> None:
    """Train again in a run that was paused; outside of node.hours, until they begin.

    RUN: id, its beginning, or name; the only one when left out.
    """
    _say(run, paused=False)


def _say(run: str | None, *, paused: bool) -> None:
    from ..control.protocol import Pause

    with connect(current()) as client:
        info = client.find_run(run or "")
        answer = client.ask(Pause, info.run_id, paused).value
    of = info.settings.rounds
    text = (
        f"{info.name} is finished: all its {of} rounds are committed, and nothing trains here"
        if of is not None and info.round >= of
        else f"{info.name} rests here once the round is over; again: atoll resume {info.run_id[:8]}"
        if answer.get("paused")
        else f"{info.name} is trained here again"
        if answer.get("changed")
        else f"{info.name} was not paused"
    )
    current().data(text, {"run_id": info.run_id, "name": info.name, **answer})
