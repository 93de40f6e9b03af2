"""demo, explain, completion, version: what needs no node."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

import click

from ...collectives.errors import ConfigError
from ..home.errors_catalogue import PAGES, ErrorPage
from ..home.output import current
from .options import GIVEN, GivenPath, shared_options

PROTOCOL_VERSION = 1


@click.command("version")
@shared_options
def version_command() -> None:
    """Print versions."""
    terminal = current()
    found = {
        "atoll": _installed("atoll"),
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
    }
    found |= {name: _installed(name) for name in ("torch", "libp2p", "trio", "cryptography")}
    found["platform"] = f"{platform.system()} {platform.machine()}"
    human = f"atoll {found['atoll']} (protocol {PROTOCOL_VERSION})"
    if terminal.verbose:
        human += "".join(
            f"\n{name} {value}"
            for name, value in found.items()
            if name not in ("atoll", "protocol")
        )
    terminal.data(human, found)


def _installed(name: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


WATCH_STATUS = 1  # of `atoll watch`, where a verdict stands


@click.command("explain")
@click.argument("code", required=False, type=GIVEN)
@shared_options
def explain_command(code: str | None) -> None:
    """Explain an error code, or a verdict's; without one, list them."""
    from ..run.verdicts import PAGES as VERDICTS

    terminal = current()
    pages = {
        **PAGES,
        **{
            code: ErrorPage(page.slug, page.title, WATCH_STATUS, page.text)
            for code, page in VERDICTS.items()
        },
    }
    if code is None:
        listed = [
            {"code": key, "slug": page.slug, "title": page.title, "exit": page.exit_code}
            for key, page in pages.items()
        ]
        terminal.data(
            terminal.table(
                ("CODE", "EXIT", "MEANING"),
                [(e, str(p.exit_code), p.title) for e, p in pages.items()],
            ),
            {"codes": listed},
        )
        return
    key = (
        code.upper()
        if code.upper() in pages
        else next((e for e, p in pages.items() if p.slug == code.lower()), "")
    )
    if not key:
        raise ConfigError(
            f"there is no error code {code!r}",
            why="Codes look like E110, those of verdicts like V01.",
            hint="All of them: atoll explain",
            exit_code=2,
        )
    page = pages[key]
    title = terminal.style(f"{key} {page.title}", sys.stdout, bold=True)
    terminal.data(
        f"{title}\n\n{page.text}\n\nExit status {page.exit_code}.", {"code": key, **page._asdict()}
    )


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@shared_options
def completion_command(shell: str) -> None:
    """Print a completion script for your shell.

    bash: atoll completion bash >> ~/.bashrc    zsh: the same into ~/.zshrc    fish: into
    ~/.config/fish/completions/atoll.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise ConfigError(f"no completion for {shell}", exit_code=2)
    script = kind(
        click.get_current_context().find_root().command, {}, "atoll", "_ATOLL_COMPLETE"
    ).source()
    current().data(script, {"shell": shell, "script": script})


@click.command("demo")
@click.option(
    "--peers",
    type=click.IntRange(2, 16),
    default=3,
    show_default=True,
    help="Peers at the start; one more joins late.",
)
@click.option("--steps", type=click.IntRange(20), default=None, help="Inner steps of each peer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of model and data.")
@click.option("--no-kill", is_flag=True, help="Kill nobody.")
@click.option("--no-baseline", is_flag=True, help="Skip the comparison with one machine alone.")
@click.option("--quick", is_flag=True, help="A shorter run.")
@click.option(
    "--out",
    type=GivenPath(file_okay=False),
    default="atoll-demo",
    show_default=True,
    help="Folder for plot and results.",
)
@click.option(
    "--keep-events",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="Write what happened for atoll replay; compressed if FILE ends in .gz.",
)
@click.option("--ui", is_flag=True, help="Show the run as a page in a browser, as atoll ui does.")
@shared_options
def demo_command(**options: Any) -> int:
    """Train a small model on this machine with three peers, kill one, let one join.

    Everything is real but the distance: processes, libp2p, DHT, encrypted lanes on 127.0.0.1.
    Nothing is downloaded.
    """
    from ..demo import DemoOptions, run_demo

    terminal = current()
    if options["ui"]:
        from .looking import page_server

        page_server()  # before a minute of training, if it is not there
    return run_demo(
        DemoOptions(
            **options,
            json=terminal.json,
            live=terminal.live,
            colour=terminal.colour(sys.stderr),
            quiet=terminal.quiet,
            browser=terminal.live and bool(terminal.environ.get("DISPLAY")),
        )
    )
