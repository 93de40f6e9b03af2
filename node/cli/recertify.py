"""recertify: the organiser's word that members are lost for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import ConfigError
from ...collectives.identifiers import PeerId
from ..home.output import Terminal, current, short_peer
from .daemon import connect
from .options import PEER, RUN, asking_options, shared_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..joining.commands import NodeClient

DANGER = """\
Their votes are given up for good. If one of them still runs anywhere, cut off from here, it may go
on deciding rounds with others, and the run then has two certified histories that never meet. A
round that only they knew of is lost. Do this only when their disks or machines are gone, or you
have stopped their nodes for ever. All other nodes of the run must be reachable: each of them is
waited for."""


@click.command("recertify")
@click.argument("run", required=False, type=RUN)
@click.option(
    "--without",
    multiple=True,
    required=True,
    metavar="PEER",
    type=PEER,
    help="A member that is lost for ever; repeat it for each.",
)
@asking_options
@shared_options
def recertify_command(run: str | None, without: tuple[str, ...]) -> None:
    """Go on without members that are lost for ever (organiser only).

    Only for a run whose remaining members are too few to decide a round, and never will be more.
    PEER: an id, or its end as `atoll peers` shows it. RUN: id, its beginning, or name; the only one
    when left out.
    """
    from ..control.protocol import Recertify

    terminal = current()
    with connect(terminal) as client:
        info = client.find_run(run or "")
        lost = _named(client, info.run_id, without)
        if not _sure(terminal, info.name, lost):
            terminal.say("nothing was done")
            raise click.exceptions.Exit(1)
        answer = client.ask(Recertify, info.run_id, tuple(lost)).value
    awaited: Sequence[Any] = answer.get("awaited") or ()
    waits = (
        f"; waiting for {', '.join(short_peer(str(peer)) for peer in awaited)}" if awaited else ""
    )
    terminal.data(
        (
            f"recertifying {info.name} ({info.run_id[:8]}) without {len(lost)} "
            f"member{'' if len(lost) == 1 else 's'}{waits}"
        ),
        {"run_id": info.run_id, "name": info.name, **answer},
    )
    terminal.say("How far it is: atoll status")


def _named(client: NodeClient, run: str, names: Sequence[str]) -> list[PeerId]:
    """Peer ids of what was given. Raises ConfigError for an ending that several peers have."""
    known = [PeerId(str(row.get("peer", ""))) for row in client.peers(run)]
    found = list[PeerId]()
    for name in names:
        ends = [peer for peer in known if peer.endswith(name.lstrip("…"))]
        if len(ends) > 1:
            raise ConfigError(
                f"{name!r} is the end of {len(ends)} peers",
                key="--without",
                hint="Give the whole id: atoll peers --json",
            )
        found.append(ends[0] if ends else PeerId(name))
    return list(dict.fromkeys(found))


def _sure(terminal: Terminal, name: str, lost: Sequence[PeerId]) -> bool:
    terminal.say(f"Going on with {name} without:")
    for peer in lost:
        terminal.say(f"  {short_peer(peer)}")
    terminal.say(DANGER)
    return terminal.confirm("Are they lost for ever?")
