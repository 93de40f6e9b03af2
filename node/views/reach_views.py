"""How this node is reached, in words: what was found, and what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...collectives.errors import NetworkError
from ..home.output import bytes_text, short_peer, span_text
from ..run.clocks import LIMIT_S, WARN_S, clock_off, wrong_clock
from .alone import RELAY_ONLY_UP, alone, alone_advice, alone_error, alone_rows

Document = Mapping[str, Any]

_NATS = {
    "none": "no NAT: this machine has an address of the internet",
    "endpoint-independent": "NAT with one mapping for everybody (hole punching works)",
    "address-dependent": (
        "NAT with another mapping for every destination (“symmetric”): direct only with "
        "peers that can be dialled"
    ),
    "unknown": "not known: fewer than two public peers have been met",
}


def outcome(reach: Document) -> str:
    """The verdict as one word: public, relayed, cut-off, local, unknown."""
    kind = str(reach.get("reach") or "unknown")
    if kind in ("public", "local"):
        return kind
    if reach.get("relays"):
        return "relayed"
    return "cut-off" if kind == "private" else "unknown"


def reach_text(reach: Document) -> str:
    """The verdict in one line."""
    relays = len(reach.get("relays") or ())
    through = f"through {relays} relay{'' if relays == 1 else 's'}"
    if reach.get("relay_only"):
        return (
            f"others come {through}, and only so: network.relay_only is on"
            if relays
            else "through relays only, and no relay takes this node (yet)"
        )
    return {
        "public": "others can dial this node",
        "local": "on private networks only; nobody of the internet was met",
        "relayed": f"behind a NAT; others come {through}, then directly where the NATs allow it",
        "cut-off": "behind a NAT, and no relay takes this node: it dials others, nobody dials it",
        "unknown": "not known yet",
    }[outcome(reach)]


def netcheck_lines(reach: Document) -> list[tuple[str, str, str]]:
    """(level, what, text) rows; levels ok, warn, fail."""
    verdict, nat = outcome(reach), str(reach.get("nat") or "unknown")
    level = {"cut-off": "fail", "unknown": "warn"}.get(verdict, "ok")
    rows = [(level, "reach", reach_text(reach))]
    if verdict != "local" and not reach.get("relay_only"):
        rows.append(("warn" if nat == "address-dependent" else "ok", "nat", _NATS.get(nat, nat)))
    candidates: Document = reach.get("candidates") or {}
    if nat == "address-dependent" and verdict != "public":
        hosts = ", ".join(dict.fromkeys(str(address).split("/")[2] for address in candidates))
        rows.append(
            (
                "ok",
                "address",
                (
                    f"{hosts} with another port for everybody: no address of this "
                    "node can be told to others"
                ),
            )
        )
    else:
        rows += [
            (*_tried(found), f"{address}  {_by(found)}") for address, found in candidates.items()
        ]
    rows += _mapping_rows(reach, verdict)
    for relay in reach.get("relays") or ():
        rows.append(("ok", "relay", f"a place at {short_peer(str(relay))}"))
    for relay, why in (reach.get("relays_refused") or {}).items():
        rows.append(
            (
                "warn" if not reach.get("relays") else "ok",
                "relay",
                f"{short_peer(str(relay))} {why}",
            )
        )
    relaying: Document = reach.get("relaying") or {}
    if relaying.get("reservations") or relaying.get("bytes"):
        rows.append(
            (
                "ok",
                "serves",
                (
                    f"{relaying['reservations']} places, {relaying['circuits']} circuits, "
                    f"{bytes_text(relaying['bytes'])} relayed"
                ),
            )
        )
    return rows


def network_rows(network: Document, clock: Sequence[Document]) -> list[tuple[str, str, str]]:
    """All that is known of how this node is connected, for netcheck and doctor."""
    if alone(network):
        return alone_rows(network)
    return [
        *netcheck_lines(network.get("reach") or {}),
        clock_row(clock),
        *filter(None, [lan_row(network.get("lan") or {})]),
    ]


def clock_row(clock: Sequence[Document]) -> tuple[str, str, str]:
    """What peers say of our clock. More than half of them must say that it is wrong before it
    counts as wrong.
    """
    ahead_s = [float(row["ahead_s"]) for row in clock]
    found = clock_off(ahead_s)
    if found is None:
        return "ok", "clock", "not compared: no peer is connected that tells its own"
    off, agree = found
    text = f"{off:+.2f} s against {len(clock)} peer{'' if len(clock) == 1 else 's'}"
    if abs(off) <= WARN_S:
        return "ok", "clock", text
    side = (
        f"{span_text(abs(off))} {'ahead of' if off > 0 else 'behind'} {agree} of {len(clock)} peers"
    )
    if wrong_clock(ahead_s) is None:
        return "warn", "clock", f"{side}; beyond {LIMIT_S:g} s signed records are refused"
    return (
        "fail",
        "clock",
        (
            f"{side} (limit {LIMIT_S:g} s): they refuse what this node signs, and "
            "it what they sign (E120)"
        ),
    )


def flow_row(flow: Document) -> tuple[str, str, str]:
    """How fast bytes went to a peer and back."""
    up, down = (mbit_text(float(flow[key])) for key in ("up_bytes_per_s", "down_bytes_per_s"))
    path = str(flow.get("path") or "")
    means = " (through a relay: it is the slower one's limit)" if path == "relay" else ""
    return (
        "ok",
        "speed",
        f"to {short_peer(str(flow['peer']))} up {up}, down {down}, path {path}{means}",
    )


def mbit_text(bytes_per_s: float) -> str:
    """Bandwidth as providers state it."""
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit:.0f} Mbit/s" if mbit >= 10 else f"{mbit:.1f} Mbit/s"


def lan_row(lan: Document) -> tuple[str, str, str] | None:
    """Who was found in the house; None where nobody looked, or nobody is there."""
    found: Document = lan.get("found") or {}
    if lan.get("trouble"):
        return "warn", "lan", f"peers in the house cannot be looked for: {lan['trouble']}"
    return (
        ("ok", "lan", f"{len(found)} peer{'' if len(found) == 1 else 's'} found in the house")
        if found
        else None
    )


def _mapping_rows(reach: Document, verdict: str) -> list[tuple[str, str, str]]:
    """What the router opened when it was asked; that it did not, where that matters."""
    if mappings := reach.get("mappings") or {}:
        return [("ok", "mapping", f"{address} by {means}") for means, address in mappings.items()]
    words = {
        "none": "the router opens no port when it is asked (NAT-PMP, UPnP)",
        "inner": (
            "the router opened a port, but has no address of the internet itself: another router, "
            "or the provider's, stands before it"
        ),
        "off": "the router is not asked to open a port: network.port_mapping is off",
        "": "the router is being asked to open a port (NAT-PMP, UPnP)",
    }
    answer = reach.get("port_mapping")
    matters = verdict in ("relayed", "cut-off") and not reach.get("relay_only")
    return [("ok", "mapping", words[answer])] if matters and answer in words else []


def _tried(found: Document) -> tuple[str, str]:
    return {"reachable": ("ok", "address"), "unreachable": ("warn", "address")}.get(
        str(found.get("verdict")), ("warn", "address")
    )


def _by(found: Document) -> str:
    yes: Sequence[Any] = found.get("reached_by") or ()
    no: Sequence[Any] = found.get("not_reached_by") or ()
    if not yes and not no:
        return "nobody has tried it yet"
    return f"reached by {len(yes)} of {len(yes) + len(no)} public peers that tried"


def network_error(network: Document, clock: Sequence[Document]) -> NetworkError | None:
    """What is wrong with how this node is connected: E120 (its clock), E110 (nobody answers), E130
    (nobody can dial it).
    """
    wrong = wrong_clock([float(row["ahead_s"]) for row in clock])
    if wrong is not None:
        return wrong
    reach: Document = network.get("reach") or {}
    if alone(network) or outcome(reach) != "cut-off":
        return alone_error(network)
    reasons = ", ".join(
        dict.fromkeys(str(why) for why in (reach.get("relays_refused") or {}).values())
    )
    relays = f"The relays say: “{reasons}”. " if reasons else ""
    return NetworkError(
        "nobody can dial this node, and no relay takes it",
        code="E130",
        why=f"{relays}{_STILL[bool(reach.get('relay_only'))]}",
        hint=advice(reach, port_of(network)),
    )


_STILL = {
    False: "It can still train with members that can be dialled: it dials them.",
    True: "With network.relay_only it dials nobody but the nodes that settings and invites name.",
}
"""What is left to a node that nobody can dial; by whether it is relay-only."""


def port_of(network: Document) -> int:
    """The port to forward; that of the first address that is no relay's."""
    for address in network.get("addresses") or ():
        fields = str(address).split("/")
        if "p2p-circuit" not in fields and len(fields) > 4:
            return int(fields[4])
    for address in (network.get("reach") or {}).get("interfaces") or ():
        return int(str(address).split("/")[4])
    return 4150


def network_advice(network: Document) -> str:
    """What to do, where something can be done."""
    return (
        alone_advice(network)
        if alone(network)
        else advice(network.get("reach") or {}, port_of(network))
    )


def advice(reach: Document, port: int) -> str:
    """What to do, where something can be done; "" where nothing need be."""
    verdict, house = (
        outcome(reach),
        [str(a).split("/")[2] for a in reach.get("interfaces") or () if str(a).startswith("/ip4/")],
    )
    here = next((host for host in house if not host.startswith("127.")), "this machine")
    forward = f"forward TCP {port} on your router to {here}"
    strange = any("knows" in str(why) for why in (reach.get("relays_refused") or {}).values())
    join = "Join a run: its relays know this node then. Or " if strange else ""
    if reach.get("relay_only"):
        name = (
            "ame a node that relays, as atoll relay does on a machine with a public "
            f"address: {RELAY_ONLY_UP}"
        )
        return "" if verdict == "relayed" else f"{join}{'n' if join else 'N'}{name}"
    if reach.get("port_mapping") == "inner":
        forward += (
            ", and on the router before it to yours (where that is your provider's, ask for an "
            "IPv4 address of your own)"
        )
    if verdict == "cut-off":
        return (
            f"{join}{forward if join else forward[0].upper() + forward[1:]}, or ask a member with "
            "a public address to run: atoll relay"
        )
    if verdict == "relayed":
        symmetric = reach.get("nat") == "address-dependent"
        slow = "Paths to peers behind other NATs stay relayed, which is slow. " if symmetric else ""
        return f"{slow}You can train. Faster: {forward}, then: atoll netcheck"
    if verdict == "unknown":
        return (
            "The verdict comes within seconds of the first public peer. Without one: atoll "
            "up --bootstrap ADDRESS"
        )
    return ""
