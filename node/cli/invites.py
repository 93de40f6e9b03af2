"""invite new, invite inspect, invite revoke."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...collectives.errors import ConfigError, NotAdmittedError
from ..home.durations import duration_s
from ..home.output import Terminal, current, iso_time, short_peer, span_text
from ..run.capability import MOST_USES, ROLES, Role
from .consent import target_of
from .options import GIVEN, RUN, shared_options

if TYPE_CHECKING:
    from ..manifest import SignedManifest
    from ..run.invite import Invite

_ADDRESS = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/[!-.0-~]+/tcp/[0-9]+/p2p/[1-9A-HJ-NP-Za-km-z]+|"
    r"/dnsaddr/[!-.0-~]+(/p2p/[1-9A-HJ-NP-Za-km-z]+)?"
)
INVITE_FILE = click.option(
    "--invite-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read the invite from FILE.",
)


def check_addresses(given: tuple[str, ...]) -> None:
    """Raise ConfigError when one of them is not the address of a peer."""
    for address in given:
        if not _ADDRESS.fullmatch(address):
            raise ConfigError(
                f"{address!r} is no address of a peer",
                key="bootstrap",
                why="It needs a host, a TCP port and a peer id.",
                hint="/ip4/203.0.113.7/tcp/4150/p2p/12D3KooW…",
            )


def addresses_in_use(
    terminal: Terminal, given: tuple[str, ...], signed: SignedManifest | None
) -> tuple[str, ...]:
    """Addresses to put into an invite: given ones, else the running node's, else those of the
    settings and the manifest.

    Raises ConfigError when there is none.
    """
    from ..manifest import decode_manifest
    from ..net.transport.addresses import at_home
    from .daemon import node_addresses
    from .settings import settings_of

    config = settings_of(terminal).config
    found = given or node_addresses(terminal) or config.node.bootstrap
    if not found and signed is not None:
        found = decode_manifest(signed.manifest).network.bootstrap
    if not found:
        raise ConfigError(
            "there is no address to put into the invite",
            why=(
                "No node of yours is running, and neither the settings nor the manifest "
                "name a bootstrap address."
            ),
            hint=(
                "atoll up --background, then again; or give one: --bootstrap "
                "/ip4/203.0.113.7/tcp/4150/p2p/12D3KooW…"
            ),
        )
    if at_home(found):
        terminal.say(
            "This invite works on your own network only: nobody elsewhere can dial its addresses. "
            "What to do: atoll netcheck"
        )
    return tuple(found)


def fresh_invite(
    terminal: Terminal,
    signed: SignedManifest,
    addresses: tuple[str, ...],
    life_s: float,
    peer: str = "",
    role: Role = "train",
    uses: int = 0,
    name: str = "",
) -> Invite:
    """An invite to a stored run: the organiser's own, for one ``peer`` only where that is given, or
    a member's from the one she joined with. Raises ConfigError where the run wants a name.
    """
    from ..manifest import decode_manifest
    from ..run.capability import check_expiry
    from ..run.invite import make_invite
    from ..run.standing import load_standing
    from .identity import identity_of

    identity = identity_of(terminal)
    named = decode_manifest(signed.manifest).names_sites
    if named and not name and role != "observe":
        raise ConfigError(
            "an invite of this run is for one site, by name",
            key="--name",
            why="A run with [privacy] counts what a site has spent by its name, whatever key it "
            "comes with; a pseudonym will do.",
            hint=f"One for each site: atoll invite new {signed.run_id[:8]} --name site-a",
        )
    if name and not named:
        raise ConfigError(
            "--name is for runs with [privacy] that sites enter by invites",
            key="--name",
            why="Nothing else is bound to a site's name.",
            hint="Leave it out.",
            exit_code=2,
        )
    if identity.peer == signed.organiser:
        return make_invite(
            signed.run_id,
            addresses,
            identity,
            now_s=time.time(),
            life_s=life_s,
            peer=peer,
            role=role,
            uses=uses,
            name=name,
        )
    if name or peer or uses or role != "train":
        what = (
            "for a site"
            if name
            else "for one peer"
            if peer
            else "for so many peers"
            if uses
            else f"to {role}"
        )
        raise NotAdmittedError(
            f"only the organiser makes invites {what}: {short_peer(signed.organiser)}",
            hint="Ask the organiser.",
        )
    own = load_standing(terminal.paths, signed.run_id).invite(addresses)
    check_expiry(own.capability, own.expires_s, time.time())
    return own


@click.group("invite")
@shared_options
def invite_command() -> None:
    """Make, inspect or revoke invites."""


@invite_command.command("new")
@click.argument("run", required=False, type=RUN)
@click.option(
    "--expires", default="7d", show_default=True, help="How long it is valid: 90s, 30min, 12h, 7d."
)
@click.option(
    "--bootstrap",
    multiple=True,
    type=GIVEN,
    metavar="ADDRESS",
    help="Address to start from; repeatable.",
)
@click.option(
    "--for",
    "peer",
    default="",
    metavar="PEER",
    help="Only this peer enters by it (its id: atoll id). Organiser only.",
)
@click.option(
    "--uses",
    type=click.IntRange(1, MOST_USES),
    default=None,
    help="Only the first so many peers enter by it. Organiser only.",
)
@click.option(
    "--name",
    default="",
    metavar="SITE",
    help="The site that it lets in, in a run with [privacy]. Organiser only.",
)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="train",
    show_default=True,
    help="What it admits to. Organiser only.",
)
@click.option(
    "--qr",
    is_flag=True,
    help="Draw it as a QR code, too. Whoever photographs that has the invite.",
)
@shared_options
def new(
    run: str | None,
    expires: str,
    bootstrap: tuple[str, ...],
    peer: str,
    uses: int | None,
    name: str,
    role: Role,
    qr: bool,
) -> None:
    """Print a fresh invite to RUN (id, its beginning, or name; the only one when left out).

    Who enters to observe has the model and no vote; who enters to aggregate votes and adds up for
    the others, and contributes nothing.
    """
    from ...security.identity import is_peer_id
    from ..manifest import decode_manifest, list_runs, load_run
    from ..run.capability import MOST_NAME, SITE_NAME

    terminal = current()
    check_addresses(bootstrap)
    if len(name) > MOST_NAME or re.search(SITE_NAME, name) is None:
        raise ConfigError(
            f"{name!r} is no name of a site",
            key="--name",
            hint=f"Up to {MOST_NAME} of a-z, 0-9, '.', '_', '-': --name site-a",
            exit_code=2,
        )
    if peer and not is_peer_id(peer):
        raise ConfigError(
            f"{peer!r} is no peer id",
            key="--for",
            hint="Whose machine it is prints it: atoll id",
            exit_code=2,
        )
    if not run:
        stored = list(list_runs(terminal.paths))
        if len(stored) != 1:
            raise ConfigError(
                f"which run? This node knows {len(stored)}",
                hint="Name one: atoll invite new RUN      See them: atoll ls",
                exit_code=2,
            )
        run = stored[0]
    signed = load_run(terminal.paths, run)
    invite = fresh_invite(
        terminal,
        signed,
        addresses_in_use(terminal, bootstrap, signed),
        duration_s(expires),
        peer,
        role,
        uses or 0,
        name,
    )
    line = invite.encode()
    terminal.data(line, {"invite": line, **described(invite)})
    if qr:
        from .qr import show_qr

        show_qr(terminal, line)
    policy = decode_manifest(signed.manifest).join.policy
    if policy != "invite" and (peer or uses):
        terminal.say(
            f'Whom this run lets in does not depend on invites ([join] policy = "{policy}"): '
            "nobody is kept out by this one's limits."
        )


@invite_command.command("inspect")
@click.argument("given", metavar="[INVITE|-]", required=False, type=GIVEN)
@INVITE_FILE
@shared_options
def inspect(given: str | None, invite_file: Path | None) -> int:
    """Say what an invite contains and whether it is valid.

    Whoever holds an invite enters by it: give it in --invite-file FILE, on stdin (-), or in
    ATOLL_INVITE, where nobody else reads it.
    """
    from ..run.capability import capability_name
    from ..run.invite import inspect_invite, parse_invite

    terminal = current()
    invite = target_of(terminal, given, invite_file)
    found = inspect_invite(invite)
    left_s = found.expires_s - time.time()
    only, uses = found.capability.peer, found.capability.uses
    site = [f"site       {found.capability.name}"] if found.capability.name else []
    lines = [
        f"run        {found.run_id}",
        f"organiser  {short_peer(found.organiser)}   {found.organiser}",
        f"invite id  {capability_name(found.capability.id)}",
        f"made       {iso_time(found.capability.issued_s)}",
        (
            f"signature  ok, {'ends in ' + span_text(left_s) if left_s > 0 else 'EXPIRED'} "
            f"({iso_time(found.expires_s)})"
        ),
        f"role       {found.capability.role}",
        f"for        {f'{short_peer(only)} only   {only}' if only else 'any peer'}",
        *site,
        f"uses       {f'the first {uses} that enter by it' if uses else 'any number'}",
        *(f"address    {address}" for address in found.bootstrap),
    ]
    terminal.data("\n".join(lines), {**described(found), "valid": left_s > 0})
    if left_s <= 0:
        if not terminal.json:
            parse_invite(invite, now_s=time.time())
        return NotAdmittedError.exit_code
    return 0


@invite_command.command("revoke")
@click.argument("given", metavar="[INVITE|-]", required=False, type=GIVEN)
@INVITE_FILE
@click.option(
    "--run",
    type=RUN,
    metavar="RUN",
    help="The run, where INVITE is an id; the only one when left out.",
)
@click.option("--evict", is_flag=True, help="Ban whoever came by it, as far as is known here.")
@shared_options
def revoke(given: str | None, invite_file: Path | None, run: str | None, evict: bool) -> None:
    """Let nobody in by an invite any more, nor by those that members have made of it (organiser
    only).

    INVITE: the line (also in --invite-file FILE, on stdin (-), or in ATOLL_INVITE), or its id, as
    `atoll invite inspect` and `atoll ban` show it. All certificates under it end with it. Who is a
    member by it stays one while it is there; with --evict it is banned.
    """
    from ..manifest import load_run
    from ..run.banning import Ban, Bans
    from ..run.capability import capability_id, capability_name
    from ..run.invite import inspect_invite, is_invite
    from .bans import came_by, stored_run, tell_node
    from .identity import identity_of

    terminal, identity = current(), identity_of(current())
    invite = target_of(terminal, given, invite_file)
    known = capability_id(invite)
    if known is not None and not is_invite(invite):
        run_id, organiser = (
            (signed := load_run(terminal.paths, stored_run(terminal, run))).run_id,
            signed.organiser,
        )
    else:
        found = inspect_invite(invite)
        run_id, organiser, known = found.run_id, found.organiser, found.capability.id
    if identity.peer != organiser:
        raise NotAdmittedError(
            f"only the organiser revokes an invite: {short_peer(organiser)}",
            hint="Ask the organiser.",
        )
    bans = Bans(terminal.paths.run_dir(run_id), run_id, organiser)
    bans.load()
    bans.revoke(known, identity)
    gone = sorted(peer for peer, came in came_by(terminal, run_id).items() if came.nonce == known)
    gone = [peer for peer in gone if peer != organiser] if evict else []
    for peer in gone:
        bans.change(Ban(peer, "its invite was revoked", int(time.time())), peer, identity)
    tell_node(terminal, run_id)
    name = capability_name(known)
    lines = [
        f"revoked {name}: nobody enters run {run_id} by it any more",
        *(f"banned {short_peer(peer)}, who came by it" for peer in gone),
    ]
    terminal.data(
        "\n".join(lines),
        {
            "run_id": run_id,
            "organiser": organiser,
            "id": name,
            "revoked": True,
            "banned": gone,
        },
    )


def described(invite: Invite) -> dict[str, Any]:
    """The fields of an invite but its secret, for JSON."""
    from ..run.capability import capability_name

    return {
        "run_id": invite.run_id,
        "organiser": invite.organiser,
        "id": capability_name(invite.capability.id),
        "issued": iso_time(invite.capability.issued_s),
        "expires": iso_time(invite.expires_s),
        "for": invite.capability.peer,
        "role": invite.capability.role,
        "site": invite.capability.name or None,
        "uses": invite.capability.uses or None,
        "bootstrap": list(invite.bootstrap),
    }
