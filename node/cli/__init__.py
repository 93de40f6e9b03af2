"""The ``atoll`` command. Bottom up:

    completing         names of runs and ids of peers, for a shell
    options            options that every command takes, and the kinds of their values
    settings           settings in use; whether ./atoll.toml may be among them
    needs              memory, disk and the time of a join, and whether this machine has them
    costs              what a run asks of a member
    child, run_script  the training process that `join` starts; running a script of one's own in it
    meta               demo, explain, completion, version
    identity           init, id, config
    daemon             up, down, status, ls, peers, leave
    happenings         events, logs
    watching           watch
    looking            ui, top, replay
    reaching           netcheck, ping, relay
    drawing            the tree of validate --draw
    doctor             doctor
    recertify          recertify
    beginning          begin
    pausing            pause, resume
    service            service install, status, remove
    bans               ban, unban, bans, trust
    audit              audit
    splitting          split
    qr                 a text as a QR code
    invites            invite new, inspect, revoke
    templates          manifests to start from
    founding           from a file of settings to a run; its pretrained model on this machine
    runs               new, validate, export, rm
    machines           machines as people name them, and this one
    fitting            whether a machine holds a run, and which setting makes it so
    fit                fit
    holding            what `plan` plans for: the run as machines hold it
    planning           plan
    curves, simulating pictures of runs; simulate
    simulating_sites   simulate --sites: sizes, speeds and deaths of a federated run's sites
    simulating_fleet   simulate --peers: a run on the user's own machines
    basing             where a run's pretrained model comes from, and how far it is
    consent            where an invite is taken from, what the run is, whether the owner agrees
    trying             join --dry-run: what a run takes and how its data are read, without a trace
    join               join
    chat               chat

A command's module is imported when the command runs, and heavy packages inside its functions:
``atoll --help`` loads click and nothing else.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import IO, Any

import click

from ...collectives.errors import AtollError
from ..home.output import Terminal, as_json, show_error
from ..home.process_title import hide_invites
from .options import shared_options

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "meta",
        "Train a small model on this machine with three peers, kill one, let one join.",
    ),
    "init": ("identity", "Make this machine's key and settings; safe to repeat."),
    "up": ("daemon", "Run this machine's node."),
    "down": ("daemon", "Stop the node; it finishes its round first."),
    "service": (
        "service",
        "Let the system run the node, and start it again: systemd on Linux, launchd on macOS.",
    ),
    "new": ("runs", "Check and sign a run's manifest; print its id and an invite."),
    "validate": ("runs", "Check a run's manifest and say what it means."),
    "fit": ("fit", "Say what this machine, or a list of machines, can train."),
    "plan": (
        "planning",
        "Say which settings reach a loss soonest here, how long a round takes, and why.",
    ),
    "simulate": (
        "simulating",
        "Try federated methods, or the run on machines of your own, in virtual time.",
    ),
    "join": (
        "join",
        "Join a run by invite and train, with a live view; or found the run of a file.",
    ),
    "begin": ("beginning", "Let a run begin with the members that are there."),
    "pause": ("pausing", "Stop training in a run and go on serving it."),
    "resume": ("pausing", "Train again in a run that was paused."),
    "leave": ("daemon", "Leave a run; the node finishes its round first."),
    "ls": ("daemon", "List the runs of this node."),
    "status": ("daemon", "Show the node and its runs on one screen."),
    "peers": ("daemon", "Show the members of a run."),
    "events": ("happenings", "Say what happened in a run, in words."),
    "watch": (
        "watching",
        "Say what is wrong with a run over many rounds; exit status 0: nothing, 1: something.",
    ),
    "logs": ("happenings", "Show the node's log."),
    "ui": ("looking", "Watch a run as a page in a browser of this machine."),
    "top": ("looking", "Watch a run on one screen of the terminal."),
    "replay": ("looking", "Show again what happened in a run, from the file of its events."),
    "ping": ("reaching", "Say how a peer is reached, and how long a round trip takes."),
    "netcheck": ("reaching", "Say whether others can reach this node, and what that means."),
    "doctor": (
        "doctor",
        (
            "Check this machine as a node: versions, key, disk, the running node, and "
            "whether others reach it."
        ),
    ),
    "relay": (
        "reaching",
        "Be a bootstrap and a relay for others, on a machine with a public address.",
    ),
    "recertify": ("recertify", "Go on without members that are lost for ever (organiser only)."),
    "ban": ("bans", "Keep a peer out: of the run, if you are its organiser, else of this machine."),
    "unban": ("bans", "Lift a ban."),
    "bans": ("bans", "Show who is banned, by whom, since when and why."),
    "trust": (
        "bans",
        "Let a peer in at once: without probation, however many have come this hour.",
    ),
    "audit": (
        "audit",
        "Check every signature in a run's log, and say who decided and who contributed.",
    ),
    "split": (
        "splitting",
        "Find clusters of members whose updates point the same way, for a run of each.",
    ),
    "id": ("identity", "Print this machine's peer id, whose key is made where there is none."),
    "invite": ("invites", "Make, inspect or revoke invites."),
    "export": ("runs", "Write a run's model as safetensors that load without atoll."),
    "chat": ("chat", "Talk to a model: a folder that atoll export wrote, or the newest checkpoint"),
    "rm": ("runs", "Forget a run that this machine is not in any more."),
    "config": ("identity", "Show or change settings."),
    "explain": ("meta", "Explain an error code."),
    "completion": ("meta", "Print a completion script for your shell."),
    "version": ("meta", "Print versions."),
}


GROUPS: dict[str, tuple[str, ...]] = {
    "Start": (
        "demo",
        "init",
        "id",
        "config",
        "up",
        "down",
        "service",
        "new",
        "validate",
        "fit",
        "plan",
        "completion",
    ),
    "Train": ("join", "begin", "pause", "resume", "leave", "export", "chat", "rm"),
    "Look": (
        "status",
        "ui",
        "top",
        "ls",
        "peers",
        "events",
        "watch",
        "logs",
        "replay",
        "explain",
        "version",
    ),
    "Network": ("netcheck", "doctor", "ping", "relay"),
    "Organise": ("invite", "ban", "unban", "bans", "trust", "audit", "recertify"),
    "Research": ("simulate", "split"),
}
"""Every command under one heading of ``--help``."""


class LazyGroup(click.Group):
    """A group whose commands live in modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __name__)
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, but an unknown command comes with the known one that is most like it."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(
                f"there is no command {args[0]!r}."
                + (f" Did you mean `atoll {close[0]}`?" if close else "")
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in ``--help``, from the table: nothing is imported for it."""
        for group, names in GROUPS.items():
            with formatter.section(group):
                rows = [(f"{name:<10}", COMMANDS[name][1]) for name in names]
                formatter.write_dl(rows, col_max=14)


def _version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from .meta import version_command

        ctx.invoke(version_command)
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@shared_options
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="As atoll version.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train PyTorch models together, peer to peer.

    A node is your machine. A run is what a signed manifest, run.toml, says. An invite is one string
    that gets a node into a run. See it work: atoll demo
    """
    ctx.ensure_object(Terminal)


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit status; errors are printed here and nowhere else."""
    terminal = Terminal()
    # Also when the command line itself is wrong.
    terminal.json = "--json" in takewhile(lambda word: word != "--", argv)
    try:
        result: Any = cli.main(list(argv), prog_name="atoll", standalone_mode=False, obj=terminal)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        return _usage(terminal, error)
    except (click.Abort, KeyboardInterrupt):
        if terminal.json:
            print(as_json({"interrupted": True, "exit": 130}), flush=True)
        terminal.say("stopped")
        return 130
    except AtollError as error:
        if terminal.verbose >= 2:
            _traceback()
        show_error(terminal, error)
        return error.exit_code
    except (
        Exception
    ) as error:  # a defect, or the system failing under us: say so without a traceback
        return _unexpected(terminal, error)


def _usage(terminal: Terminal, error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "atoll"
    show_error(
        terminal,
        AtollError(
            error.format_message(), code="E002", hint=f"{path} --help", exit_code=error.exit_code
        ),
    )
    return error.exit_code


def _unexpected(terminal: Terminal, error: Exception) -> int:
    from ..home.last_resort import refused

    if terminal.verbose >= 2:
        _traceback()
    refusal = refused(error, "this command")
    if refusal is not None:
        show_error(terminal, refusal)
        return refusal.exit_code
    show_error(
        terminal,
        AtollError(
            f"{type(error).__name__}: {error}",
            why="This is a defect of atoll.",
            hint="The same command with -vv shows where.",
        ),
    )
    return 1


def _traceback() -> None:
    import traceback

    traceback.print_exc(file=sys.stderr)


def take_any_text(stream: IO[str] | None) -> None:
    """Write ? for what the stream's encoding lacks, on a terminal without UTF-8."""
    if isinstance(stream, io.TextIOWrapper):  # stderr is like this from the beginning
        stream.reconfigure(errors="replace")


def main() -> None:
    """The console script."""
    hide_invites()  # first of all: until then everybody on this machine can read it
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            # open as long as we are
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    take_any_text(sys.stdout)
    sys.exit(run(sys.argv[1:]))


# for tools that look at the commands
main.command = cli  # pyright: ignore[reportFunctionMemberAccess]
