"""Before anybody is a member: where an invite is taken from, what the run is that it opens, and
whether this machine's owner agrees.

Nothing in here writes a file or starts a node.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...collectives.errors import ConfigError, NetworkError
from ...collectives.foreign import quoted
from ..home.output import Terminal, short_peer, span_text
from ..home.own_data import is_factory
from ..home.process_title import hide_invites

if TYPE_CHECKING:
    from ...security.identity import Identity
    from ..composing.preview import Seen
    from ..home.config import NodeConfig
    from ..manifest import Manifest, SignedManifest
    from ..run.invite import Invite

INVITE_VARIABLE = "ATOLL_INVITE"
MAX_INVITE_FILE_BYTES = 1 << 16


def target_of(terminal: Terminal, given: str | None, file: Path | None) -> str:
    """The invite or run that is meant: ``given``, or one line of ``file``, of stdin (``given`` is
    ``-``), of ATOLL_INVITE.

    Raises click.UsageError where nothing or more than one is given, or there is no such line."""
    if given is not None and file is not None:
        raise click.UsageError("both an invite (or run) and --invite-file are given")
    if file is not None:
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(MAX_INVITE_FILE_BYTES)
        where = str(file)
    elif given == "-":
        text, where = _from_stdin(terminal), "stdin"
    elif given is not None:
        if not hide_invites():
            terminal.say(
                "this system keeps the invite in the list of processes: give it with "
                "--invite-file, or on stdin (-)"
            )
        return given
    else:
        text, where = terminal.environ.get(INVITE_VARIABLE, ""), INVITE_VARIABLE
    text = re.sub(r"\s+", "", text)
    if not text and where == INVITE_VARIABLE:
        raise click.UsageError(
            "no invite is given: as an argument, with --invite-file FILE, on stdin "
            "(-), or in ATOLL_INVITE"
        )
    if not text:
        raise click.UsageError(f"there is no invite in {where}")
    return text


def _from_stdin(terminal: Terminal) -> str:
    """One invite from stdin. Questions are then asked at the terminal that this process has, if it
    has one.
    """
    if terminal.interactive:
        return str(click.prompt("Invite", hide_input=True, err=True))
    text = sys.stdin.read(MAX_INVITE_FILE_BYTES)
    if not terminal.json and not terminal.no_input and sys.stderr.isatty():
        with contextlib.suppress(OSError):
            sys.stdin = open("/dev/tty", encoding="utf-8")  # noqa: SIM115  # open as long as we are
    return text


def preview(
    terminal: Terminal, target: str, config: NodeConfig, *, dry_run: bool
) -> tuple[Invite | None, SignedManifest | None]:
    """The invite, if ``target`` is one, and the run's manifest: stored here, or shown by a member,
    which leaves no trace on either side.

    No manifest: nobody at the invite's addresses shows it, and ``--yes`` was given. Raises
    NotAdmittedError, NetworkError (E110, E113, E120), ConfigError; click.exceptions.Exit where the
    owner does not want to ask strangers.
    """
    from ..manifest import list_runs, load_run
    from ..run.invite import is_invite, parse_invite

    if not is_invite(target):
        return None, load_run(terminal.paths, target)
    invite = parse_invite(target, now_s=time.time())
    stored = list_runs(terminal.paths, []).get(invite.run_id)
    if stored is not None and stored.organiser == invite.organiser:
        return invite, stored
    from ..composing.preview import among_strangers, at_addresses

    own = _own_key(terminal)
    terminal.say("asking at the invite's addresses what this run is …")
    seen = at_addresses(invite, own)
    if seen.signed is None and seen.refusal is None:
        if terminal.yes and not dry_run:
            return invite, None
        if not terminal.yes and not terminal.interactive:
            raise nobody_shows(invite, seen)
        for who, how in seen.tried.items():
            terminal.say(f"  {quoted(who[-8:])}: {how}")
        terminal.say("Nobody at the invite's addresses shows this run. Others may, as strangers:")
        terminal.say("each that is asked sees this machine's address, and a key made for that.")
        if not terminal.confirm("Look for other members?"):
            raise click.exceptions.Exit(1)
        seen = among_strangers(invite, own, config.node.bootstrap, dht=config.network.dht)
    if seen.signed is None:
        raise seen.refusal or nobody_shows(invite, seen)
    return invite, seen.signed


def _own_key(terminal: Terminal) -> Identity | None:
    from ...security.key_file import load

    file = terminal.paths.identity_file
    return load(file) if file.exists() else None


def nobody_shows(invite: Invite, seen: Seen) -> NetworkError:
    """Why the run could not be looked at."""
    from ..net.transport.addresses import at_home
    from ..run.clocks import wrong_clock

    tried = "; ".join(f"{who[-8:]}: {how}" for who, how in seen.tried.items()) or "no address"
    if seen.answered and (error := wrong_clock(list(seen.ahead_s.values()))) is not None:
        return error  # members may be there, and take what this machine signs for too old or new
    if seen.answered:
        return NetworkError(
            f"no member of run {invite.run_id} shows it: {tried}",
            code="E113",
            why="Who answers is not in the run: its members are off, or nobody has joined it yet.",
            hint="On the organiser's machine: atoll status. To join without having seen it: --yes",
        )
    why = "The machines of the invite are off, unreachable, or their addresses changed."
    if at_home(invite.bootstrap):
        why = (
            "The invite names addresses of a private network only: on another one they lead "
            "nowhere. Or that machine is off."
        )
    return NetworkError(
        f"nobody at the invite's addresses answers ({tried}); this is not a ban",
        code="E110",
        why=why,
        hint="Ask any member for a fresh one: atoll invite new",
    )


def agree(
    terminal: Terminal,
    signed: SignedManifest,
    invite: Invite | None,
    script: Path | None,
    data: str,
    down: float | None = None,
    base: Sequence[str] = (),
    question: str = "Join?",
) -> bool:
    """Show what the run asks of this machine, where it lacks that, and which code of its own runs
    for it, and ask the ``question``. ``down``: bytes/s that may come in, where that is limited.
    ``base``: what is said of its pretrained model (`basing.base_lines`).

    Raises ConfigError when the run cannot be trained with ``script`` and ``data``, or takes more
    memory than this machine has (E416)."""
    from .costs import describe_lines
    from .fitting import refuse_too_large
    from .needs import machine_lines, needs_of, this_machine, whole_machine

    manifest = signed.open()
    check_fit(manifest, script, data)
    if script is None:
        refuse_too_large(manifest, whole_machine())
    heading = _heading(signed.run_id, manifest, invite)
    terminal.say(terminal.style(heading, sys.stderr, bold=True))
    lines = describe_lines(manifest, down)
    lines += base
    lines += machine_lines(needs_of(manifest), this_machine(terminal.paths.state_dir))
    for line in lines:
        terminal.say(f"  {line}")
    own_code = [str(script)] if script is not None else []
    own_code += [data] if is_factory(data) else []
    for file in own_code:
        terminal.say(f"           of this machine's own, {file!r} may be run")
    return terminal.confirm(question)


def describe_run(
    terminal: Terminal,
    manifest: Manifest,
    run_id: str,
    invite: Invite | None = None,
    down: float | None = None,
    base: Sequence[str] = (),
) -> None:
    """Print what the run asks of a member, and what this machine lacks of it. ``run_id``: "" of one
    that is not founded.
    """
    from .costs import describe, describe_lines, no_id
    from .needs import machine_document, machine_lines, needs_of, this_machine

    needs, machine = needs_of(manifest), this_machine(terminal.paths.state_dir)
    heading = _heading(run_id or no_id(manifest), manifest, invite)
    lines = [
        terminal.style(heading, sys.stdout, bold=True),
        *(f"  {line}" for line in (*describe_lines(manifest, down), *base)),
        *(f"  {line}" for line in machine_lines(needs, machine)),
    ]
    document = {**describe(manifest, down), **machine_document(needs, machine)}
    terminal.data("\n".join(lines), {**document, "run_id": run_id or None})


def _heading(run_id: str, manifest: Manifest, invite: Invite | None) -> str:
    contact = f" {quoted(manifest.contact)}" if manifest.contact else ""
    by = (
        (
            f"  by {short_peer(invite.organiser)}{contact}, signature ok, invite ends in "
            f"{span_text(invite.expires_s - time.time())}"
        )
        if invite
        else ""
    )
    return f"{manifest.name}  {run_id}{by}"


def check_fit(manifest: Manifest, script: Path | None, data: str) -> None:
    """Raise ConfigError when the run cannot be trained with what was given, or with what is
    installed.
    """
    if script is None and manifest.model.pretrained:
        from ..recipes.models.libraries import refuse_without_bitsandbytes

        refuse_without_bitsandbytes(manifest.model.method, manifest.train.inner.optimizer)
    if script is None and manifest.model.entry.startswith("local:"):
        raise ConfigError(
            f"this run trains {manifest.model.entry}, which atoll does not have",
            key="$.model.entry",
            why="Every member brings the model in her own script.",
            hint="--script train.py",
        )
    if script is None and manifest.data.source in ("local", "shared") and not data:
        own = manifest.data.source == "local"
        raise ConfigError(
            "this run trains on every member's own text"
            if own
            else f"this run trains on one file of all members, {manifest.data.sha256[:12]}…",
            key="$.data.source",
            why=f'Its manifest says data.source = "{manifest.data.source}".',
            hint="--data chats.jsonl, a file or folder of chats, pairs or text"
            if manifest.model.pretrained
            else "--data FILE_OR_FOLDER, or FILE.py:NAME, a function that returns a Dataset",
        )
    if script is None and manifest.model.pretrained and not is_factory(data):
        from ..recipes.finetune.records import files_of

        files_of(data)  # before anything is downloaded
