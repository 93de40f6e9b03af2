"""Runs the user's own training script for `atoll join --script`: as ``python SCRIPT ARGS`` would,
but errors of atoll are shown as errors.

``python -m atoll.node.cli.run_script SCRIPT [ARGS…]``. Any other exception of the script keeps its
traceback, less the frames that are ours. The end of stdin interrupts it: it does not outlive the
`atoll join` that started it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from ...collectives.errors import AtollError
from ..home.ending import interrupt_when_stdin_ends
from ..home.output import Terminal, show_error
from ..joining.speaking import print_traceback


def main() -> int:
    """Exit status of the script; of its AtollError, if it ends with one; 130 after Ctrl-C."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    folder = os.path.dirname(os.path.abspath(script))
    sys.path[: 0 if sys.flags.safe_path else 1] = [folder]  # with -P nothing stands in its place
    # It is how we are asked to end; a shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt_when_stdin_ends()
        runpy.run_path(script, run_name="__main__")
    except AtollError as error:
        sys.last_value = error
        show_error(Terminal(), error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        sys.last_value = error  # the swarm's last word to its node, when this process ends
        print_traceback(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
