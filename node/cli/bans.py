"""ban, unban, bans, trust: who is kept out of a run, or of this machine, and who is let in at
once.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from ...collectives.errors import ConfigError
from ...collectives.foreign import quoted
from ...collectives.identifiers import PeerId, RunId
from ..home.output import Terminal, current, iso_time, short_peer
from .daemon import running
from .identity import identity_of
from .options import PEER, RUN, asking_options, shared_options

if TYPE_CHECKING:
    from ..manifest import SignedManifest
    from ..run.banning import Ban, Bans
    from ..run.entrants import Entrant

_RUN = click.option(
    "--run",
    type=RUN,
    metavar="RUN",
    help="Id, its beginning, or name; the only one when left out.",
)
_HERE = click.option("--here", is_flag=True, help="On this machine only, also as the organiser.")


@click.command("ban")
@click.argument("peer", type=PEER)
@click.option("--reason", default="", help="Shown to everybody, also to the peer.")
@click.option(
    "--revoke-invite",
    is_flag=True,
    help="Let nobody in any more by the invite that the peer came by. Organiser only.",
)
@_RUN
@_HERE
@asking_options
@shared_options
def ban_command(peer: str, reason: str, revoke_invite: bool, run: str | None, here: bool) -> None:
    """Keep a peer out: of the run, if you are its organiser, else of this machine.

    PEER: an id, or its end as `atoll peers` shows it. Members hand the organiser's bans on to one
    another, and refuse the peer. It is evicted with the next round; what it has contributed to
    earlier ones stays. Lift it: atoll unban PEER

    A ban is on a key. Who still holds the invite can come back under a fresh one, until that invite
    is revoked: you are asked.
    """
    from ..run.banning import MAX_REASON, Ban

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
        _revoked_too(terminal, signed, bans, banned, revoke_invite, here),
    )


def _revoked_too(
    terminal: Terminal,
    signed: SignedManifest,
    bans: Bans,
    peer: PeerId,
    given: bool,
    here: bool,
) -> str:
    """By which invite ``peer`` came, and whether it is revoked with the ban: on the flag, or on a
    yes. What is to be told of it.
    """
    from ..manifest import decode_manifest
    from ..run.capability import capability_name

    identity = identity_of(terminal)
    if identity.peer != signed.organiser or here:
        if given:
            raise ConfigError(
                "only the run's organiser revokes invites, and not with --here",
                key="--revoke-invite",
                exit_code=2,
            )
        return ""
    if decode_manifest(signed.manifest).join.policy != "invite":
        return ""
    known = came_by(terminal, signed.run_id)
    came = known.get(peer)
    if came is None:
        return (
            "By which invite it came is not known here. Who holds one comes back under a fresh "
            "key: atoll invite revoke INVITE"
        )
    name = capability_name(came.nonce)
    if came.nonce in bans.revoked:
        return f"It came by invite {name}, which is revoked: nobody enters by it any more."
    others = sum(each.nonce == came.nonce for each in known.values()) - 1
    what = f"It came by invite {name}, as did {others} of the other peers known here"
    consequence = "Who is a member by it stays one, but cannot come back by it once it is out."
    if given or (
        terminal.interactive and terminal.confirm(f"{what}. Revoke that invite? {consequence}")
    ):
        bans.revoke(came.nonce, identity)
        return f"{what}. That invite is revoked: nobody enters by it any more. {consequence}"
    return (
        f"{what}, and can come back by it under a fresh key until you revoke it: "
        f"atoll invite revoke {name} --run {signed.run_id[:8]}"
    )


def came_by(terminal: Terminal, run: RunId) -> dict[PeerId, Entrant]:
    """By which invites peers have come, as far as this machine's node has seen it. Raises
    StorageError E303.
    """
    from ..run.entrants import Entrants

    entrants = Entrants(terminal.paths.run_dir(run))
    entrants.load()
    return entrants.known


@click.command("unban")
@click.argument("peer", type=PEER)
@_RUN
@_HERE
@shared_options
def unban_command(peer: str, run: str | None, here: bool) -> None:
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
@click.argument("peer", type=PEER)
@click.option("--no-longer", is_flag=True, help="Trust it no longer.")
@_RUN
@_HERE
@shared_options
def trust_command(peer: str, no_longer: bool, run: str | None, here: bool) -> None:
    """Let a peer in at once: without probation, however many have come this hour.

    Nor is it banned by what others prove of it. For all members, if you are the run's organiser,
    else on this machine. PEER: an id, or its end as `atoll peers` shows it.
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


def stored_run(terminal: Terminal, run: str | None) -> str:
    """The run that was named, or the only one. Raises ConfigError where there is not one only."""
    from ..manifest import list_runs

    if run:
        return run
    stored = list(list_runs(terminal.paths))
    if len(stored) != 1:
        raise ConfigError(
            f"which run? This node knows {len(stored)}",
            hint="Name one: --run RUN      See them: atoll ls",
            exit_code=2,
        )
    return stored[0]


def _lists(terminal: Terminal, run: str | None) -> tuple[SignedManifest, Bans]:
    from ..manifest import load_run
    from ..run.banning import Bans

    signed = load_run(terminal.paths, stored_run(terminal, run))
    bans = Bans(terminal.paths.run_dir(signed.run_id), signed.run_id, signed.organiser)
    bans.load()
    return signed, bans


def _peer(terminal: Terminal, signed: SignedManifest, bans: Bans, name: str) -> PeerId:
    """The peer that was named. Raises ConfigError where none is, or several are, and for whom
    nobody can ban.
    """
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
    more: str = "",
) -> None:
    from ..manifest import decode_manifest

    identity = identity_of(terminal)
    of_run = identity.peer == signed.organiser and not here
    changed = bans.change(ban, peer, identity if of_run else None)
    still = bans.why(peer)
    if ban is None and still is not None:
        hint = "atoll unban PEER --here" if of_run else "Only the run's organiser can lift it."
        raise ConfigError(f"{short_peer(peer)} stays banned: {still}", hint=hint)
    tell_node(terminal, signed.run_id)
    quorum = decode_manifest(signed.manifest).quorum
    where = (
        (
            "as a stranger, and as a member here; members evict it once "
            f"{2 * quorum.lying + 1} of them have banned it"
        )
        if of_run and quorum.bans == "quorum"
        else "from the run, for all its members"
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
    machine: dict[str, object] = {
        "run_id": signed.run_id,
        "peer": peer,
        "banned": ban is not None,
        "changed": changed,
        "whole_run": of_run,
    }
    if more:
        machine["note"] = more
    terminal.data("\n".join([done, *([more] if more else [])]), machine)


def tell_node(terminal: Terminal, run: RunId) -> None:
    """The run's lists on disk have changed: a running node takes them at once."""
    from ..control.protocol import ReadBans

    client = running(terminal)
    if client is None:
        terminal.say("No node is running here: it counts from the next start on (atoll up).")
        return
    with client:
        try:
            client.ask(ReadBans, run)
        except ConfigError:
            terminal.say("The node is not in this run now: it counts once it is (atoll join).")
