"""audit: check a run's log without asking anybody, hand it over, and compare it with another
member's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import AtollError, ConfigError, MisbehaviourError, SecurityError
from ..home.output import Terminal, bytes_text, current, short_peer
from .options import RUN, GivenPath, shared_options

if TYPE_CHECKING:
    from ..records.audit import Audited, AuditSource, ConfigurationChange, LogFork, Proven
    from ..records.figures import Leans
    from ..records.recompute import Recomputed

EVERY = 20_000  # entries between two words of progress
SHOWN = 8  # changes of the members on a screen


@click.command("audit")
@click.argument("run", type=RUN, metavar="RUN|FILE")
@click.option(
    "--export",
    "archive",
    type=GivenPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the log, to hand it over.",
)
@click.option(
    "--with",
    "other",
    type=GivenPath(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Compare with another's log.",
)
@click.option(
    "--recompute",
    "round_",
    type=click.IntRange(min=1),
    metavar="ROUND",
    help="Compute this round again from the contributions kept.",
)
@click.option(
    "--leaning",
    type=click.IntRange(min=40),
    metavar="ROUNDS",
    help="Say whose contributions keep pointing one way, over the newest ROUNDS.",
)
@click.option(
    "--from",
    "folders",
    type=GivenPath(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="Contributions of other members; repeatable.",
)
@shared_options
def audit_command(
    run: str,
    archive: Path | None,
    other: Path | None,
    round_: int | None,
    leaning: int | None,
    folders: tuple[Path, ...],
) -> None:
    """Check every signature in a run's log, and say who decided and who contributed.

    RUN is an id, its beginning, or a name: the log in this machine's journal, and the checkpoint
    beside it. FILE is what somebody wrote with
    --export. Nobody is asked, and no node needs to run. Exit status 0: all of it is proven.

    --recompute: where the manifest says [audit] keep_contributions, what members have signed and
    kept gives the round's result to the bit, or names whose part does not. Each member keeps its
    own in RUN'S FOLDER/contributions; name copies of the others' with --from.

    --leaning: from the same, whose contributions lean one way for longer than others' do
    (constancy), or against what the others do. A drift that no round shows looks like this, and so
    does an honest member whose data are unlike all others': nobody is banned for it.
    """
    from ..records.audit import audit, proven_bans, write_archive

    terminal = current()
    source = _source(terminal, run)
    reports = [audit(source, name, _progress(terminal)) for name in source.logs]
    state = _state(source, reports)
    bans = proven_bans(source)
    if other is not None:
        _compare(terminal, source, other)
    size = write_archive(source, archive) if archive is not None else None
    again = (
        [_recompute(terminal, source, report.log, round_, folders) for report in reports]
        if round_ is not None
        else []
    )
    leans = [_leans(terminal, source, report.log, leaning, folders) for report in reports]
    manifest = source.signed.open()
    machine: dict[str, Any] = {
        "run_id": source.signed.run_id,
        "name": manifest.name,
        "organiser": source.signed.organiser,
        "proven": True,
        "logs": [_machine(report) for report in reports],
        "state": state,
        "bans": [{"peer": ban.peer, "by": ban.by, "proves": ban.what} for ban in bans],
        "recomputed": [_recomputed(found) for found in again],
        "leaning": [_leaning(found) for found in leans if found is not None],
    }
    head = (
        f"{manifest.name}  {source.signed.run_id}\n  signed   by its organiser, "
        f"{short_peer(source.signed.organiser)}"
    )
    logs = [line for report in reports for line in _lines(terminal, report, len(reports))]
    rest = [*_words(state), *_ban_lines(bans), *_again_lines(again), *_lean_lines(terminal, leans)]
    terminal.data("\n".join([head, *logs, *rest]), machine)
    if other is not None:
        terminal.say(f"{other} says the same, as far as both go")
    if archive is not None and size is not None:
        terminal.say(
            f"{archive}: {bytes_text(size)}. Whoever has it checks it with  "
            f"atoll audit {archive.name}"
        )


def _source(terminal: Terminal, run: str) -> AuditSource:
    from ..manifest import load_run
    from ..records.audit import of_archive, of_node

    if Path(run).is_file():
        return of_archive(Path(run))
    return of_node(terminal.paths, load_run(terminal.paths, run))


def _progress(terminal: Terminal) -> Any:
    return lambda entry: None if entry % EVERY else terminal.say(f"{entry:,} entries checked")


def _compare(terminal: Terminal, source: AuditSource, other: Path) -> None:
    from ..records.audit import audit, fork, of_archive

    theirs = of_archive(other)
    if theirs.signed.run_id != source.signed.run_id:
        raise ConfigError(f"{other} is the log of another run: {theirs.signed.run_id}")
    for name in theirs.logs:
        audit(theirs, name, _progress(terminal))
    for name in source.logs:
        if (found := fork(source, theirs, name)) is not None:
            raise _two_histories(found)


def _two_histories(found: LogFork) -> AtollError:
    hint = (
        "Keep both files: they prove it to anybody. atoll explain E305 says how a run "
        "gets one history again."
    )
    message = (
        "the run has two histories: both logs are proven, and they differ from entry "
        f"{found.entry} of {found.log} on"
    )
    if not found.liars:
        return SecurityError(
            message,
            code="E204",
            why="Members that were removed for good have gone on, or more than one of them lied.",
            hint=hint,
        )
    signed = ", ".join(short_peer(peer) for peer in found.liars)
    error = MisbehaviourError(f"{message}; {signed} signed both", peer=found.liars[0])
    error.hint = hint
    return error


def _state(source: AuditSource, reports: list[Audited]) -> list[dict[str, Any]]:
    """For each log with a checkpoint: whether the log's next entry was decided on that state."""
    from ..records.audit import root_before
    from ..records.export import verified_checkpoint

    rows = list[dict[str, Any]]()
    for place, report in zip(source.folders, reports, strict=False):
        saved = verified_checkpoint(place)
        if saved is None:
            continue
        named = root_before(source, report.log, saved.entry + 1)
        if named is not None and named != saved.root:
            raise SecurityError(
                (
                    f"the checkpoint in {place} is not the state that entry "
                    f"{saved.entry + 1} was decided on"
                ),
                code="E204",
                why="The journal is proven, so it is this machine's model that is not the run's.",
                hint="Move the run's folder away and join again.",
            )
        rows.append(
            {
                "log": report.log,
                "entry": saved.entry,
                "round": saved.rounds,
                "root": saved.root.hex(),
                "named": named is not None,
            }
        )
    return rows


def _machine(report: Audited) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(report), "head": report.head.hex()}


def _lines(terminal: Terminal, report: Audited, logs: int) -> list[str]:
    of_all = max(1, sum(share.samples for share in report.contributors.values()))
    rows = [
        (
            short_peer(peer),
            f"{share.rounds:,}",
            f"{share.samples:,}",
            f"{share.samples / of_all:.1%}",
        )
        for peer, share in report.contributors.items()
    ]
    table = (
        terminal.table(("contributor", "rounds", "samples", "share"), rows).splitlines()
        if rows
        else []
    )
    hidden = len(report.changes) - SHOWN
    return [
        (
            f"  log      {report.log if logs > 1 else 'whole'}: {report.entries:,} entries, "
            f"{report.rounds:,} rounds, {report.votes:,} votes"
        ),
        f"  head     entry {report.entries - 1:,}  {report.head.hex()}",
        f"  members  {', '.join(short_peer(peer) for peer in report.members)}",
        *(f"  entry {change.entry:<6} {_change(change)}" for change in report.changes[-SHOWN:]),
        *([f"  and {hidden} earlier changes of the members: --json"] if hidden > 0 else []),
        *(f"  {line}" for line in table),
    ]


def _change(change: ConfigurationChange) -> str:
    findings = [
        (what, who)
        for what, who in (
            ("joined", change.joined),
            ("left", change.left),
            ("removed for good", change.removed),
        )
        if who
    ]
    return "; ".join(
        f"{what}: {', '.join(short_peer(peer) for peer in who)}" for what, who in findings
    )


def _recompute(
    terminal: Terminal, source: AuditSource, log: str, round_: int, folders: tuple[Path, ...]
) -> Recomputed:
    from ..records.recompute import recompute

    found = recompute(
        source,
        log,
        round_,
        folders,
        lambda chunk: None if chunk % 64 else terminal.say(f"chunk {chunk} of round {round_}"),
    )
    if found.wrong:
        owners = ", ".join(short_peer(peer) for peer in found.wrong)
        raise SecurityError(
            f"round {round_} is not what comes of its contributions: the part of {owners}",
            code="E204",
            why=(
                "Its owner, or with partial sums one of those who added it up, stated something "
                "else than what the contributors have signed comes to."
            ),
            hint=(
                "Keep the contributions: they show it to anybody. To keep the "
                "owner out: atoll ban PEER"
            ),
        )
    return found


def _recomputed(found: Recomputed) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(found), "same": not found.wrong}


def _again_lines(again: list[Recomputed]) -> list[str]:
    return [
        (
            f"  again    round {found.round}, entry {found.entry}: the {found.reducer} of "
            f"{len(found.contributors)} contributions, bit for bit"
        )
        for found in again
    ]


def _leans(
    terminal: Terminal, source: AuditSource, log: str, rounds: int | None, folders: tuple[Path, ...]
) -> Leans | None:
    if rounds is None:
        return None
    from ..run.registry import MODES

    leans = MODES.load("rules.leaning", "leans", key="--leaning")
    return leans(
        source,
        log,
        rounds,
        folders,
        lambda entry: None if entry % 64 else terminal.say(f"contributions to entry {entry}"),
    )


def _leaning(found: Leans) -> dict[str, Any]:
    import msgspec

    return msgspec.to_builtins(found)


def _lean_lines(terminal: Terminal, leans: Sequence[Leans | None]) -> list[str]:
    return [line for found in leans if found is not None for line in _leaners(terminal, found)]


def _leaners(terminal: Terminal, found: Leans) -> list[str]:
    named = [row for row in found.members if row.leans]
    rows = [
        (
            short_peer(row.peer),
            f"{row.constancy:.2f}",
            f"{row.against:.2f}",
            f"{row.rounds:,}",
            " and ".join(
                {"constancy": "one way", "against": "against the others"}[w] for w in row.leans
            ),
        )
        for row in found.members
    ]
    who = ", ".join(short_peer(row.peer) for row in named) or "nobody"
    heads = ("contributor", "constancy", "against", "rounds", "leans")
    return [
        (
            f"  leaning  {who}: {len(found.rounds)} rounds, {found.elements:,} elements of each "
            f"contribution, f = {found.f}"
        ),
        *(f"  {line}" for line in terminal.table(heads, rows).splitlines()),
        *(
            ["  a drift leans like this, and so does a member whose data are unlike all others'"]
            if named
            else []
        ),
    ]


def _ban_lines(bans: list[Proven]) -> list[str]:
    return [f"  banned   {short_peer(ban.peer)}, by {ban.by}: proven, {ban.what}" for ban in bans]


def _words(state: list[dict[str, Any]]) -> list[str]:
    return [
        f"  model    the checkpoint of round {row['round']} is "
        + (
            "the one that the log names"
            if row["named"]
            else "whole; the log names its state with the next entry"
        )
        for row in state
    ]
