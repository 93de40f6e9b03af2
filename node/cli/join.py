"""join: from an invite to training, with consent, a live view and a clean end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...collectives.errors import AtollError, ConfigError
from ...collectives.foreign import escaped
from ..client.starting import BEGIN_VARIABLE, enter_pressed
from ..home.interpreter import PYTHON
from ..home.output import Terminal, as_json, bytes_text, current, span_text
from ..home.own_data import data_in, is_factory
from ..home.paths import user_path
from ..joining.speaking import QUIET_VARIABLE
from .basing import base_lines, from_members, lacks_base
from .consent import INVITE_VARIABLE, agree, check_fit, preview, target_of
from .daemon import connect, running
from .founding import Founding, bring_base, founding_in, is_settings, say_invite
from .options import DATA, DRAIN, GIVEN, HOURS, RUN, GivenPath, asking_options, shared_options
from .settings import settings_of
from .trying import try_join

if TYPE_CHECKING:
    from ..control.protocol import JoinRequest, RunInfo
    from ..joining.commands import NodeClient
    from ..manifest import SignedManifest
    from ..run.invite import Invite
    from ..views.live import RunProgress, TrainingView

_AFTER = "atoll.join.after"
STATUS_S = 0.5  # how often the node is asked
SCRIPTS_SHARE, NODES_SHARE = 0.5, 0.35
"""Of the time that --drain gives, what the script and then a node of its own may take."""
LEAST_DRAIN_S = 1.0  # that a node may be given
ATTACH_S = 60.0  # a script of one's own that has not attached by then is told so


class _JoinCommand(click.Command):
    """What comes after ``--`` is the script's, also where no invite stands before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The rest of the arguments."""
        own = list(takewhile(lambda word: word != "--", args))
        ctx.meta[_AFTER] = tuple(args[len(own) + 1 :])
        return super().parse_args(ctx, own)


@click.command("join", cls=_JoinCommand, context_settings={"ignore_unknown_options": False})
@click.argument("target", metavar="[INVITE|RUN|RUN.toml|-]", type=RUN, required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
@click.option(
    "--invite-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the invite from this file.",
)
@click.option(
    "--script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Train with your own script instead of the built-in one; ARGS go to it.",
)
@click.option(
    "--data",
    type=DATA,
    metavar="PATH|FILE.py:NAME",
    help=(
        "What to train on: a function of yours that returns a Dataset; or, for the built-in model, "
        "a text file or folder."
    ),
)
@click.option(
    "--model",
    type=GivenPath(exists=True, path_type=Path),
    metavar="PATH",
    help="Where this machine has the run's pretrained model: a folder, or a GGUF file.",
)
@click.option(
    "--steps", type=click.IntRange(1), help="Leave after so many inner steps of your own."
)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of torch, for the built-in script."
)
@click.option(
    "--devices",
    type=click.IntRange(1),
    help=(
        "GPUs of this machine that train a pretrained model together, as one member; default: all. "
        "Without a GPU: processes."
    ),
)
@click.option(
    "--max-up",
    metavar="RATE",
    type=GIVEN,
    help="Limit of what it sends, such as 20Mbit/s; for a node of this run's own.",
)
@click.option("--max-down", metavar="RATE", type=GIVEN, help="Limit of what it receives.")
@HOURS
@DRAIN
@click.option(
    "--begin",
    is_flag=True,
    help="Train at once, though the run waits for more members ([train] start_with).",
)
@click.option(
    "--fresh-key",
    is_flag=True,
    help=(
        "Take part under a key of this run's own, which nothing ties to this machine's other runs."
    ),
)
@click.option(
    "--dry-run",
    is_flag=True,
    help=(
        "Say what it would cost, and read the data of --data for a pretrained model; nothing is "
        "stored, nobody hears of this machine's key."
    ),
)
@asking_options
@shared_options
def join_command(
    target: str | None,
    arguments: tuple[str, ...],
    invite_file: Path | None,
    script: Path | None,
    data: str | None,
    model: Path | None,
    steps: int | None,
    threads: int | None,
    devices: int | None,
    max_up: str | None,
    max_down: str | None,
    hours: str | None,
    drain: float | None,
    begin: bool,
    fresh_key: bool,
    dry_run: bool,
) -> int:
    """Join a run by invite and train, with a live view; or found the run of a file
    RUN.toml, if this machine has not yet.

    An invite lets in whoever holds it, so give it where nobody else reads it: in --invite-file
    FILE, on stdin (atoll join -), or in ATOLL_INVITE. An argument stands in the shell's history,
    and for a moment in the list of processes.

    A run that this machine knows may be given by its id, the beginning of it, or its name. Ctrl-C
    once: the round is finished or handed over first. Twice: now.
    """
    from ..home.bandwidth import bytes_per_s

    terminal = current()
    arguments += click.get_current_context().meta[_AFTER]
    target = target_of(terminal, target, invite_file)
    if arguments and script is None:
        raise click.UsageError(
            "arguments after -- are for your own script: --script train.py -- ARGS"
        )
    if fresh_key:
        use_separate_home(terminal, target)
    settings = settings_of(terminal, ask=not dry_run)
    down = bytes_per_s(max_down or "", "max_down") or settings.config.limits[1] or None
    given = data or data_in(settings)
    if dry_run:
        return try_join(terminal, target, script, model, given, down, settings.config)
    founding = (
        founding_in(terminal, target, lambda run: check_fit(run, script, given))
        if is_settings(target)
        else None
    )
    invite, signed = (
        preview(terminal, target, settings.config, dry_run=False)
        if founding is None
        else (None, founding.signed)
    )
    base_of = partial(_base_of, terminal, model, founding, settings.config.models.share)
    asked = partial(_asked, terminal, invite, script, given, down, base_of, founding, devices)
    if signed is not None and not asked(signed):
        return 1
    awaited = signed is None or _is_awaited(terminal, signed, model, founding)
    if signed is not None and not awaited:
        bring_base(terminal, signed, model, founding)
    with ExitStack() as stack:
        limits = {"max_up": max_up, "max_down": max_down, "hours": hours}
        client, mine = _node(terminal, stack, limits, drain)
        known = {entry.get("run_id") for entry in client.runs()}
        info, entered = _enter(terminal, client, _request(terminal, invite, signed))
        if awaited:
            with _leaving(client, info.run_id, known):
                if signed is None:  # nobody had shown it, and --yes was given, whatever it says
                    asked(entered)
                fetch = from_members(terminal, client, info.run_id)
                bring_base(terminal, entered, model, founding, fetch)
        if founding is not None:
            say_invite(terminal, entered)
        own: dict[str, object] = {"--data": data, "--steps": steps, "--threads": threads}
        command = _command(entered, script, arguments, own | _devices_of(entered, script, devices))
        environment = _environment(terminal, info, data, mine=mine, begin=begin)
        return _train(terminal, client, info, command, environment, script, drain)


def _devices_of(
    signed: SignedManifest, script: Path | None, devices: int | None
) -> dict[str, object]:
    """The option of the script, if it was given. Raises UsageError where the script has none,
    ConfigError where this machine or the run cannot have so many.
    """
    if devices is None:
        return {}
    if script is not None or not recipe_of(signed).endswith("finetune"):
        raise click.UsageError(
            "--devices is for a pretrained model ([model] hub, folder or gguf): a script of yours "
            "is started by torchrun, and the built-in model needs one device"
        )
    from ..recipes.finetune.launching import devices_for

    return {"--devices": devices_for(devices, signed.open())}


def _base_of(
    terminal: Terminal,
    model: Path | None,
    founding: Founding | None,
    share: bool,
    shown: SignedManifest,
) -> list[str]:
    """What is said of the run's pretrained model before "y"."""
    given = model or (founding.source if founding is not None else None)
    founds = founding is not None and not founding.known
    run_id, table = shown.run_id, shown.open().model
    return base_lines(terminal.paths, run_id, table, given, share=share, founds=founds)


def _asked(
    terminal: Terminal,
    invite: Invite | None,
    script: Path | None,
    given: str,
    down: float | None,
    base_of: Callable[[SignedManifest], list[str]],
    founding: Founding | None,
    devices: int | None,
    signed: SignedManifest,
) -> bool:
    """Whether the owner agrees to what is shown of the run. Raises what `agree` and `_devices_of`
    do.
    """
    _devices_of(signed, script, devices)
    question = "Join?"
    if founding is not None:
        question = "Go on with this run?" if founding.known else "Found this run, and start it?"
    shown = base_of(signed)
    return agree(terminal, signed, invite, script, given, down, shown, question)


def _is_awaited(
    terminal: Terminal, signed: SignedManifest, model: Path | None, founding: Founding | None
) -> bool:
    """Whether members are to send the run's pretrained model, once this machine is one. Who founds
    a run has no others yet.
    """
    from ..manifest import decode_manifest

    if founding is not None and not founding.known:
        return False
    table = decode_manifest(signed.manifest).model
    return table.pretrained and lacks_base(terminal.paths, signed.run_id, table, model)


@contextlib.contextmanager
def _leaving(client: NodeClient, run_id: str, known: Collection[object]) -> Generator[None]:
    """Leave a run that was not ``known`` before, where what comes next fails."""
    try:
        yield
    except BaseException:
        if run_id not in known:
            client.leave(run_id, now=True)
        raise


def recipe_of(signed: SignedManifest) -> str:
    """The module of the script that comes with atoll for such a run."""
    from ..manifest import decode_manifest

    pretrained = decode_manifest(signed.manifest).model.pretrained
    return f"atoll.node.recipes.{'finetune' if pretrained else 'train'}"


def _command(
    signed: SignedManifest,
    script: Path | None,
    arguments: tuple[str, ...],
    options: dict[str, object],
) -> list[str]:
    """What trains: the user's script with ``arguments``, or the built-in one with the ``options``
    that are not None.
    """
    if script is not None:
        return [*PYTHON, "-m", "atoll.node.cli.run_script", str(script), *arguments]
    given = [(name, str(value)) for name, value in options.items() if value is not None]
    command = [*PYTHON, "-m", recipe_of(signed), "--until-stdin-ends"]
    return [*command, *(part for pair in given for part in pair)]


def _environment(
    terminal: Terminal, info: RunInfo, data: str | None, *, mine: bool, begin: bool
) -> dict[str, str]:
    """The training process's environment. ``mine``: this command has started the node. ``begin``:
    it waits for nobody.
    """
    environment = {
        **terminal.child_environ(),
        "ATOLL_RUN": info.run_id,
        "PYTHONUNBUFFERED": "1",
        QUIET_VARIABLE: terminal.environ.get(QUIET_VARIABLE, "1"),  # the view says it
    }
    environment.pop(INVITE_VARIABLE, None)  # the node has it, and nobody else needs it
    if begin:
        environment[BEGIN_VARIABLE] = "1"
    if data is not None and is_factory(data):
        environment["ATOLL_DATA__FACTORY"] = data
    if terminal.home:
        environment["ATOLL_HOME"] = str(user_path(terminal.home))
    if mine:
        from ..joining.find import OWNER_VARIABLE

        environment[OWNER_VARIABLE] = str(os.getpid())
    return environment


def use_separate_home(terminal: Terminal, target: str) -> None:
    """From now on this command is about a home of the run's own, with a key of its own, which the
    same run finds again. Raises NotAdmittedError, or ConfigError where ``target`` is no invite."""
    from ..run.invite import inspect_invite, is_invite

    if not is_invite(target):
        raise ConfigError(
            (
                "--fresh-key needs the invite: a run that is known here is known "
                "under this machine's key"
            ),
            exit_code=2,
        )
    terminal.home = str(terminal.paths.data_dir / "apart" / inspect_invite(target).run_id)
    del terminal.paths  # it was looked up for the other home
    terminal.say(f"a home of its own: atoll --home {terminal.home} status")


def _request(
    terminal: Terminal, invite: Invite | None, signed: SignedManifest | None
) -> JoinRequest:
    """How to ask the node in: by invite, or with a manifest that is stored here."""
    from ..control.protocol import JoinRequest
    from ..home.names import name_of
    from .identity import identity_of

    terminal.paths.ensure()
    name = name_of(identity_of(terminal).peer)
    if invite is not None:
        return JoinRequest(invite=invite.encode(), name=name)
    assert signed is not None
    return JoinRequest(manifest=signed.encode(), name=name)


def _node(
    terminal: Terminal, stack: ExitStack, limits: dict[str, str | None], drain: float | None
) -> tuple[NodeClient, bool]:
    """The running node, or a private one with these limits that ends with this command; and whether
    it is the latter.
    """
    from ..home.bandwidth import bytes_per_s
    from ..home.hours import hours_of

    given = {name: text for name, text in limits.items() if text is not None}
    for name, text in given.items():
        (hours_of if name == "hours" else bytes_per_s)(text, name)
    client = running(terminal)
    if client is not None and given:
        client.close()
        raise click.UsageError(
            "a node runs already and has its own limits: atoll down, then atoll up --max-up RATE "
            "--max-down RATE --hours FROM-TO"
        )
    if client is not None:
        return stack.enter_context(client), False
    from ..client.link import Link
    from ..home.private_node import PrivateNode
    from ..joining.commands import NodeClient

    terminal.say("starting a node for this run (a lasting one: atoll up --background)")
    os.environ.update({f"ATOLL_NODE__{name.upper()}": text for name, text in given.items()})
    if drain is not None:
        os.environ["ATOLL_NODE__DRAIN_S"] = str(max(LEAST_DRAIN_S, drain * NODES_SHARE))
    os.environ.update(terminal.child_environ())
    os.environ.pop(INVITE_VARIABLE, None)  # the node is told it on its control socket
    node = PrivateNode.start(terminal.paths, home=terminal.home)
    stack.callback(node.end)
    return stack.enter_context(NodeClient(Link.connect(node.wait_ready()))), True


def _enter(
    terminal: Terminal, client: NodeClient, request: JoinRequest
) -> tuple[RunInfo, SignedManifest]:
    """Bring the node into the run and read its manifest, which the node has verified and stored."""
    from ..manifest import load_run

    shown = [""]

    def progress(stage: str, done: int, total: int) -> None:
        if stage != shown[0]:
            shown[0] = stage
            terminal.say(f"{stage} …")

    info = client.join(request, progress)
    return info, load_run(terminal.paths, info.run_id)


def _train(
    terminal: Terminal,
    client: NodeClient,
    info: RunInfo,
    command: list[str],
    environment: dict[str, str],
    script: Path | None,
    drain: float | None,
) -> int:
    """Run the training process and show the run until it ends. ``script``: where it is one of the
    user's own, which may do anything. ``drain``: seconds until all is over after SIGTERM.
    """
    from ..control.protocol import BeginRun
    from ..run.status import read_run_status
    from ..views.live import RunProgress, TrainingView
    from .child import ChildCommand

    progress = RunProgress(info.name, info.settings.rounds, round=info.round)
    started_s = time.monotonic()
    with (
        TrainingView(terminal, progress, own_script=script is not None) as view,
        ChildCommand(
            command,
            environment,
            view.say if terminal.live else None,
            redraw=view.redraw,
            to_stderr=terminal.json,
            term_s=drain and drain * SCRIPTS_SHARE,
        ) as child,
    ):
        _follow(terminal, info, view)
        watched: NodeClient | None = client
        under_way, attached = True, script is None
        while under_way:
            # Once more when it has ended: what its last round came to.
            under_way = child.wait(STATUS_S) is None
            watched = watched or _again(terminal, info, view)
            if watched is None:
                continue
            try:
                if view.starting and terminal.interactive and enter_pressed():
                    watched.ask(BeginRun, info.run_id)
                runs = watched.status().get("runs") or ()
            except AtollError as error:
                if under_way:
                    view.say(
                        f"{error.code} {error.message}; training goes on alone "
                        "until there is a node again"
                    )
                watched.close()
                watched = None
                continue
            for entry in runs:
                if entry.get("run_id") == info.run_id:
                    told = read_run_status(entry)
                    view.take_status(told, draining=bool(child.interrupted))
                    attached = attached or told.script_pid is not None
            if not attached and time.monotonic() - started_s > ATTACH_S:
                view.say(
                    f"{script} has run for {ATTACH_S:.0f} s and has attached nothing: it must call "
                    "join() and attach(model, optimizer, swarm)"
                )
                attached = True  # said once
        if watched is not None:
            watched.close()
        status = child.exit_status
        killed = status - 128 if status > 128 and not child.interrupted else 0
    again = again_line(info.run_id, command, script)
    took_s = time.monotonic() - started_s
    return tell_ending(terminal, info, progress, status, killed, took_s, again)


def again_line(run_id: str, command: Sequence[str], script: Path | None) -> str:
    """What is typed to go on: what the run does not know, its data and the like, is said again.

    >>> again_line("abcdefghij", ["python", "-m", "m", "--data", "my chats.jsonl"], None)
    "atoll join abcdefgh --data 'my chats.jsonl'"
    """
    words = ["atoll", "join", run_id[:8]]
    if script is not None:
        words += ["--script", str(script)]
        return shlex.join(words)
    for option in ("--data", "--steps", "--threads", "--devices"):
        if option in command:
            words += [option, command[list(command).index(option) + 1]]
    return shlex.join(words)


def _again(terminal: Terminal, info: RunInfo, view: TrainingView) -> NodeClient | None:
    """The node that is there after the one before was lost, once it has taken the run up; None as
    long as there is none.
    """
    try:
        client = running(terminal)
    except AtollError:  # it is starting or ending
        return None
    if client is None:
        return None
    try:
        there = any(entry.get("run_id") == info.run_id for entry in client.runs())
    except AtollError:
        there = False
    if not there:
        client.close()
        return None
    view.say("there is a node again")
    _follow(terminal, info, view)
    return client


def _follow(terminal: Terminal, info: RunInfo, view: TrainingView) -> None:
    """Feed the node's events to the view, in a thread that ends with node or process."""

    from ..run.events import read_event

    def follow() -> None:
        with contextlib.suppress(AtollError), connect(terminal) as feed:
            for event in feed.events():
                if event.get("run") == info.run_id:
                    view.take_event(read_event(event))

    threading.Thread(target=follow, name="atoll-events", daemon=True).start()


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def tell_ending(
    terminal: Terminal,
    info: RunInfo,
    progress: RunProgress,
    status: int,
    killed: int,
    seconds: float,
    again: str,
) -> int:
    """Say how it went. ``killed``: the number of the signal that ended the script, where it was
    not this command's; 0: none. ``again``: the command that goes on.
    """
    from ..records.export import CHECKPOINT_FOLDER
    from ..views.documents import privacy_text

    rounds, of = progress.round - info.round, info.settings.rounds
    whole = of is not None and progress.round >= of
    machine = {
        "run_id": info.run_id,
        "name": info.name,
        "round": progress.round,
        "rounds": rounds,
        "finished": whole or bool(progress.over),
        "over": progress.over,
        "step": progress.step,
        "loss": progress.loss if progress.loss == progress.loss else None,
        "bytes_sent": progress.bytes_sent,
        "bytes_received": progress.bytes_received,
        "privacy": progress.privacy,
        "seconds": round(seconds, 1),
        "exit": status,
    }
    if terminal.json:
        print(as_json(machine), flush=True)
    took = (
        f"{rounds} round{'' if rounds == 1 else 's'} and {span_text(seconds)}; "
        f"{bytes_text(progress.bytes_sent)} sent"
    )
    if machine["finished"]:
        why = f"all its {of} rounds are committed" if whole else escaped(progress.over, 400)
        terminal.say(
            f"{info.name} is finished: {why}"
            + (f", {took}" if rounds else "; nothing was to be done here")
        )
        terminal.say("A run that goes on from its export: atoll new --from DIR --name NAME")
    else:
        ending = f"stopped after {took}"
        if killed:
            ending = f"was killed by {_signal_name(killed)} after {took}"
        elif 0 < status <= 128:  # what it did before is the others' rounds as well
            ending = f"ended with status {status}: its last lines say why"
        terminal.say(f"the script {ending}. Again: {again}")
    if progress.privacy:
        terminal.say(f"Privacy: {privacy_text(progress.privacy)}")
    if (
        terminal.paths.state_dirs(info.run_id, info.settings.fragments)[0] / CHECKPOINT_FOLDER
    ).exists():
        terminal.say(f"The model: atoll export {info.run_id[:8]} DIR")
    return status
