"""top, replay, ui: a run looked at on a terminal or as a page, now or as it was recorded."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import AtollError, ConfigError
from ..home.output import Terminal, as_json, current, painted
from .options import RUN, GivenPath, shared_options

if TYPE_CHECKING:
    from ..look.source import PictureSource
    from ..manifest import Manifest, SignedManifest

REDRAW_S = 0.5
_HOME, _CLEAR, _TO_END, _TO_EOL = "\x1b[H", "\x1b[2J", "\x1b[J", "\x1b[K"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, no cursor


def chosen(terminal: Terminal, run: str | None) -> SignedManifest:
    """The run that is named; without a name the only one, or the one to which something happened
    last. Raises ConfigError.
    """
    from ..manifest import list_runs, load_run

    if run:
        return load_run(terminal.paths, run)
    stored = list_runs(terminal.paths, [])
    if not stored:
        raise ConfigError(
            "there is no run on this machine",
            hint="Join one: atoll join INVITE      See everything work: atoll demo",
        )

    def newest(run_id: str) -> float:
        with contextlib.suppress(OSError):
            return (terminal.paths.run_dir(run_id) / "events.jsonl").stat().st_mtime
        return 0.0

    return stored[max(stored, key=newest)]


@click.command("top")
@click.argument("run", type=RUN, required=False)
@click.option("--once", is_flag=True, help="Print one screen and end.")
@shared_options
def top_command(run: str | None, once: bool) -> None:
    """Watch a run on one screen of the terminal; q ends it.

    RUN is an id, its beginning, or a name; without it the run to which something happened last.
    It works while the node is down, too, from what happened until then.
    """
    from ..look.source import Live

    terminal = current()
    with Live(terminal.paths, chosen(terminal, run)) as source:
        if once or terminal.json:
            source.settle()
        watch(terminal, source, once=once)


@click.command("replay")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=GivenPath(exists=True, path_type=Path),
    metavar="FILE...",
)
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    help="How many seconds of then pass in one of now. Without: all at once.",
)
@click.option("--once", is_flag=True, help="Print the last screen and end.")
@click.option("--ui", is_flag=True, help="Show it as a page instead.")
@click.option("--no-browser", is_flag=True, help="With --ui: print the address, open nothing.")
@shared_options
def replay_command(
    files: tuple[Path, ...], speed: float | None, once: bool, ui: bool, no_browser: bool
) -> None:
    """Show again what happened in a run, from the file of its events.

    FILE is events.jsonl of a run's folder, or the folder, which has the older files, too, or what
    atoll demo --keep-events FILE wrote; also compressed by gzip. Several are those of several peers
    of one run, of which the first is the one who looks.
    """
    from ..look.source import Replay

    terminal = current()
    source = Replay(files, None if once else speed, _manifest_of(terminal, files[0]))
    with source:
        if ui:
            _serve(terminal, source, 0, browser=not no_browser)
        else:
            watch(terminal, source, once=once or (speed is None and not terminal.live))


def _manifest_of(terminal: Terminal, file: Path) -> Manifest | None:
    """The manifest of a recorded run: it lies beside the file, or the run is known here."""
    from ..look.source import run_of
    from ..manifest import load_manifest, load_run

    with contextlib.suppress(AtollError):
        recipe = (file if file.is_dir() else file.parent) / "run.toml"
        if recipe.exists():
            found = load_manifest(recipe)
            if found.run_id == run_of(file):
                return found
        return load_run(terminal.paths, run_of(file)).open()
    return None


def watch(terminal: Terminal, source: PictureSource, *, once: bool) -> None:
    """Draw until q or Ctrl-C, or one screen. With --json one document."""
    from ..look.document import document
    from ..look.frame import frame, plain

    def lines(width: int, height: int, *, colour: bool) -> list[str]:
        with source.lock:
            found = document(source.view, source.now())

        def paint(text: str, **style: Any) -> str:
            return terminal.style(text, sys.stdout, **style)

        return frame(found, width, height, paint if colour else plain)

    if terminal.json:
        with source.lock:
            found = document(source.view, source.now())
        terminal.print(as_json(found))
        return
    size = os.terminal_size((terminal.width, 24))
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(sys.stdout.fileno())
    if once or not sys.stdout.isatty() or not terminal.live:
        terminal.data("\n".join(lines(min(size.columns, 120), 64, colour=True)), {})
        return
    with _screen() as asked_to_end:
        while True:
            source.look()
            with contextlib.suppress(OSError):
                size = os.get_terminal_size(sys.stdout.fileno())
            drawn = lines(size.columns, size.lines, colour=True)
            text = "".join(f"{painted(line)}{_TO_EOL}\r\n" for line in drawn)
            sys.stdout.write(f"{_HOME}{text}{_TO_END}q ends{_TO_EOL}")
            sys.stdout.flush()
            if asked_to_end(REDRAW_S):
                return


@contextlib.contextmanager
def _screen() -> Generator[Callable[[float], bool]]:
    """The terminal's other screen, without echo; yields what waits for a key, and whether that is
    q. Ctrl-C raises, and everything is as it was.
    """
    import termios
    import tty

    stdin = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(stdin) if stdin is not None else None

    def asked_to_end(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            ready = select.select([stdin] if stdin is not None else [], [], [], left)[0]
            if ready and os.read(ready[0], 64)[:1] in (b"q", b"Q", b"\x04", b""):
                return True
        return False

    try:
        if stdin is not None:
            tty.setcbreak(stdin)
        sys.stdout.write(_ENTER + _CLEAR)
        yield asked_to_end
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if stdin is not None and before is not None:
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


@click.command("ui")
@click.argument("run", type=RUN, required=False)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port; any by itself.")
@click.option("--no-browser", is_flag=True, help="Print the address, open nothing.")
@shared_options
def ui_command(run: str | None, port: int, no_browser: bool) -> None:
    """Watch a run as a page in a browser of this machine.

    RUN is an id, its beginning, or a name; without it the run to which something happened last.
    Only programs of this machine reach the page, and only who has the address sees the run. Over
    ssh: ssh -L PORT:127.0.0.1:PORT, with --port PORT. Ctrl-C ends it; the run goes on.
    """
    from ..look.source import Live

    terminal = current()
    with Live(terminal.paths, chosen(terminal, run)) as source:
        _serve(terminal, source, port, browser=not no_browser)


def page_server() -> Callable[
    [PictureSource, int, Callable[[str], None], Callable[[], None]], None
]:
    """`look.server.serve`. Raises ConfigError where the packages of the page are not installed."""
    try:
        from ..look.server import serve
    except ImportError as error:
        raise ConfigError(
            f"the page needs a package that is not installed: {error.name}",
            hint="pip install 'atoll[ui]'      On the terminal: atoll top",
        ) from None
    return serve


def _serve(terminal: Terminal, source: PictureSource, port: int, *, browser: bool) -> None:
    from ..look.opening import Leading

    serve, leading = page_server(), Leading(terminal.paths.cache_dir)

    def ready(address: str) -> None:
        terminal.data(address, {"address": address})
        terminal.say("Ctrl-C ends the page; the run goes on.")
        if browser and not terminal.json and terminal.environ.get("DISPLAY"):
            try:
                leading.show(address)
            except (AtollError, OSError) as error:
                terminal.say(f"No browser was opened, open the address yourself: {error}")

    try:
        serve(source, port, ready, leading.remove)
    finally:
        leading.remove()
