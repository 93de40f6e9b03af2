"""begin: training starts with the members that are there."""

from __future__ import annotations

import click

from ..home.output import current
from .daemon import connect
from .options import RUN, shared_options


@click.command("begin")
@click.argument("run", required=False, type=RUN)
@shared_options
def begin_command(run: str | None) -> None:
    """Let a run begin with the members that are there, though its manifest waits for more.

    For a run with [train] start_with, in which this machine's script waits. Its first round then
    begins it for everybody. RUN: id, its beginning, or name; the only one when left out.
    """
    from ..control.protocol import BeginRun

    terminal = current()
    with connect(terminal) as client:
        info = client.find_run(run or "")
        answer = client.ask(BeginRun, info.run_id).value
    without = int(answer.get("missing", 0))
    text = (
        f"{info.name} begins with the members that are there, without {without} more"
        if answer.get("begun")
        else f"{info.name} waits for nobody: it has begun, or may"
    )
    if answer.get("begun") and (lacking := int(answer.get("lacking", 0))):
        text += (
            f"; its scripts train, but no round is counted before {lacking} more have joined: a "
            "masked sum needs them"
        )
    terminal.data(text, {"run_id": info.run_id, "name": info.name, **answer})
