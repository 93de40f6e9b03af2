"""ban, allow, bans, trust: who is kept out of a run, or of this machine, and who is let in at once."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from ...collectives.errors import ConfigError
from ...collectives.foreign import quoted
from ...collectives.identifiers import PeerId, RunId
from .daemon import running
from .identity import identity_of
from .options import GIVEN, shared_options
from .output import Terminal, current, iso_time, short_peer

if TYPE_CHECKING:
    from ..banning import Ban, Bans
    from ..manifest import SignedManifest

_RUN = click.option(
    "--run",
    type=GIVEN,
    metavar="RUN",
    help="Id, its beginning, or name; the only one when left out.",
)
_HERE = click.option("--here", is_flag=True, help="On this machine only, also as the organiser.")


@click.command("ban")
@click.argument("peer", type=GIVEN)
@click.option("--reason", default="", help="Shown to everybody, also to the peer.")
@_RUN
@_HERE
@shared_options
def ban_command(peer: str, reason: str, run: str | None, here: bool) -> None:
    """Keep a peer out: of the run, if you are its organiser, else of this machine.

    PEER: an id, or its end as `atoll peers` shows it. Members hand the organiser's bans on to one another, and refuse the peer. It is evicted
    with the next round; what it has contributed to earlier ones stays. Lift it: atoll allow PEER
    """
    from ..banning import MAX_REASON, Ban

    terminal = current()
    if len(reason) > MAX_REASON:
        raise ConfigError(
            f"a reason has at most {MAX_REASON} characters, not {len(reason)}",
            key="--reason",
            exit_code=2,
        )
    signed, bans = _lists(terminal, run)
    banned = _peer(terminal, signed, bans, peer)
    known = bans.here.get(banned)  # where it is proven here, the run's ban carries the proof
    reason = reason or (known.reason if known else "")
    _change(
        terminal,
        signed,
        bans,
        banned,
        Ban(banned, reason, int(time.time()), known.evidence if known else b""),
        here,
    )


@click.command("allow")
@click.argument("peer", type=GIVEN)
@_RUN
@_HERE
@shared_options
def allow_command(peer: str, run: str | None, here: bool) -> None:
    """Lift a ban. PEER: an id, or its end as `atoll bans` shows it."""
    terminal = current()
    signed, bans = _lists(terminal, run)
    _change(terminal, signed, bans, _peer(terminal, signed, bans, peer), None, here)


@click.command("bans")
@_RUN
@shared_options
def bans_command(run: str | None) -> None:
    """Show who is banned, by whom, since when and why, and who is trusted.

    A ban with a proof needs nobody's word: atoll audit checks it.
    """
    terminal = current()
    signed, bans = _lists(terminal, run)
    rows = [("the organiser", ban) for ban in bans.of_run.values()] + [
        ("this machine", ban) for ban in bans.here.values()
    ]
    table = terminal.table(
        ("peer", "banned by", "since", "proof", "reason"),
        [
            (
                short_peer(ban.peer),
                by,
                iso_time(ban.since_s),
                "yes" if ban.evidence else "–",
                quoted(ban.reason) if ban.reason else "–",
            )
            for by, ban in rows
        ],
    )
    machine = [
        {
            "peer": ban.peer,
            "by": by,
            "since": iso_time(ban.since_s),
            "reason": ban.reason,
            "evidence": ban.evidence.hex() or None,
        }
        for by, ban in rows
    ]
    trusted = [f"trusted  {short_peer(peer)}" for peer in sorted(bans.trusted)]
    terminal.data(
        "\n".join([table if rows else "nobody is banned", *trusted]),
        {"run_id": signed.run_id, "bans": machine, "trusted": sorted(bans.trusted)},
    )


@click.command("trust")
@click.argument("peer", type=GIVEN)
@click.option("--no-longer", is_flag=True, help="Trust it no longer.")
@_RUN
@_HERE
@shared_options
def trust_command(peer: str, no_longer: bool, run: str | None, here: bool) -> None:
    """Let a peer in at once: without probation, however many have come this hour.

    Nor is it banned by what others prove of it. For all members, if you are the run's organiser, else on this machine.
    PEER: an id, or its end as `atoll peers` shows it.
    """
    terminal = current()
    signed, bans = _lists(terminal, run)
    who, identity = _peer(terminal, signed, bans, peer), identity_of(terminal)
    of_run = identity.peer == signed.organiser and not here
    changed = bans.trust(who, not no_longer, identity if of_run else None)
    tell_node(terminal, signed.run_id)
    where = "by the whole run" if of_run else "on this machine"
    done = (
        f"{short_peer(who)} is {'no longer ' if no_longer else ''}trusted {where}"
        if changed
        else "nothing changed"
    )
    terminal.data(
        done,
        {
            "run_id": signed.run_id,
            "peer": who,
            "trusted": not no_longer,
            "changed": changed,
            "whole_run": of_run,
        },
    )


def _lists(terminal: Terminal, run: str | None) -> tuple[SignedManifest, Bans]:
    from ..banning import Bans
    from ..manifest import list_runs, load_run

    if not run:
        stored = list(list_runs(terminal.paths))
        if len(stored) != 1:
            raise ConfigError(
                f"which run? This node knows {len(stored)}",
                hint="Name one: --run RUN      See them: atoll ls",
                exit_code=2,
            )
        run = stored[0]
    signed = load_run(terminal.paths, run)
    bans = Bans(terminal.paths.run_dir(signed.run_id), signed.run_id, signed.organiser)
    bans.load()
    return signed, bans


def _peer(terminal: Terminal, signed: SignedManifest, bans: Bans, name: str) -> PeerId:
    """The peer that was named. Raises ConfigError where none is, or several are, and for whom nobody can ban."""
    from ...security.identity import is_peer_id

    known, client = bans.peers | bans.trusted, running(terminal)
    if client is not None:
        with client, contextlib.suppress(ConfigError):  # it is not in this run now
            known |= {PeerId(str(row.get("peer", ""))) for row in client.peers(signed.run_id)}
    ends = sorted(peer for peer in known if peer.endswith(name.lstrip("…")))
    if len(ends) > 1:
        raise ConfigError(
            f"{name!r} is the end of {len(ends)} peers",
            key="PEER",
            hint="Give the whole id: atoll peers --json",
            exit_code=2,
        )
    if not ends and not is_peer_id(name):
        raise ConfigError(
            f"no peer is called {name!r}",
            key="PEER",
            hint="See them: atoll peers      Or give the whole id",
            exit_code=2,
        )
    peer = ends[0] if ends else PeerId(name)
    if peer in (signed.organiser, identity_of(terminal).peer):
        who = "the run's organiser" if peer == signed.organiser else "this machine"
        raise ConfigError(
            f"{short_peer(peer)} is {who}, and cannot be banned",
            key="PEER",
            hint="To have no part in the run: atoll leave",
        )
    return peer


def _change(
    terminal: Terminal,
    signed: SignedManifest,
    bans: Bans,
    peer: PeerId,
    ban: Ban | None,
    here: bool,
) -> None:
    identity = identity_of(terminal)
    of_run = identity.peer == signed.organiser and not here
    changed = bans.change(ban, peer, identity if of_run else None)
    still = bans.why(peer)
    if ban is None and still is not None:
        hint = "atoll allow PEER --here" if of_run else "Only the run's organiser can lift it."
        raise ConfigError(f"{short_peer(peer)} stays banned: {still}", hint=hint)
    tell_node(terminal, signed.run_id)
    where = (
        "from the run, for all its members"
        if of_run
        else "from this machine; other members decide for themselves"
    )
    done = (
        f"banned {short_peer(peer)} {where}"
        if ban is not None
        else f"{short_peer(peer)} is no longer banned"
        if changed
        else "nobody was banned"
    )
    machine = {
        "run_id": signed.run_id,
        "peer": peer,
        "banned": ban is not None,
        "changed": changed,
        "whole_run": of_run,
    }
    terminal.data(done, machine)


def tell_node(terminal: Terminal, run: RunId) -> None:
    """The run's lists on disk have changed: the running node, if there is one, takes them at once."""
    client = running(terminal)
    if client is None:
        terminal.say("No node is running here: it counts from the next start on (atoll up).")
        return
    with client:
        try:
            client.read_bans(run)
        except ConfigError:
            terminal.say("The node is not in this run now: it counts once it is (atoll join).")
