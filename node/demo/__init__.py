"""The demo: three peers on this machine train together, one is killed, a fourth joins late. Bottom
up:

options   what `atoll demo` takes
plot      a curve in a terminal: braille plot, sparkline
board     what the demo knows at a moment
view      the board on a terminal, live or as plain lines
figure    the loss plot as PNG
verdict   the checks that decide the exit status, the table, the JSON object
processes peers as processes: starting, reading, killing, ending
stage     files and folders of one demo: homes, manifest, logs, anchors
recording what happened, as a file for `atoll replay`
measure   a process: held-out losses of the anchors, and of one machine alone
director  who is started and killed when
run       `run_demo`: all of it, for the command line
"""

from __future__ import annotations

from .options import DemoOptions


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return its exit status: 0 when every promise held, 1 otherwise."""
    from .run import run

    return run(options)


__all__ = ["DemoOptions", "run_demo"]
