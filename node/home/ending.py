"""How processes that belong together end together: what a child does when whoever started it is
gone, and which signals ask to end.

A child's stdin is a pipe that its parent holds open and never writes to. However the parent ends,
the system closes the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

GRACE_S = 60.0  # for draining; then SIGKILL


def interrupt_when_stdin_ends() -> None:
    """From now on the end of stdin is Ctrl-C for this process; what does not end within GRACE_S is
    killed. Call it in the main thread.
    """
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        with suppress(OSError):
            while os.read(
                0, 4096
            ):  # not sys.stdin: a thread inside its lock would keep the interpreter from ending
                pass
        signal.pthread_kill(main, signal.SIGINT)  # to the thread that may wait in the system
        threading.Event().wait(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="atoll-stdin", daemon=True).start()


def end_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a command to end. A closed terminal does, unless the command was started
    to outlive it (nohup).
    """
    asked = (signal.SIGINT, signal.SIGTERM)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)
