"""How this node is reached, in words: what was found, and what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .output import bytes_text, short_peer, span_text

Document = Mapping[str, Any]

_NATS = {
    "none": "no NAT: this machine has an address of the internet",
    "endpoint-independent": "NAT with one mapping for everybody (hole punching works)",
    "address-dependent": "NAT with another mapping for every destination (“symmetric”; hole punching works only with peers that can be dialled)",
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
    return {
        "public": "others can dial this node",
        "local": "on private networks only; nobody of the internet was met",
        "relayed": f"behind a NAT; others come through {relays} relay{'' if relays == 1 else 's'}, then directly where the NATs allow it",
        "cut-off": "behind a NAT, and no relay takes this node: it dials others, nobody dials it   (atoll netcheck)",
        "unknown": "not known yet",
    }[outcome(reach)]


def netcheck_lines(reach: Document) -> list[tuple[str, str, str]]:
    """(level, what, text) rows; levels ok, warn, fail."""
    verdict, nat = outcome(reach), str(reach.get("nat") or "unknown")
    level = {"cut-off": "fail", "unknown": "warn"}.get(verdict, "ok")
    rows = [(level, "reach", reach_text(reach))]
    if verdict != "local":
        rows.append(("warn" if nat == "address-dependent" else "ok", "nat", _NATS.get(nat, nat)))
    for address, found in (reach.get("candidates") or {}).items():
        rows.append((*_tried(found), f"{address}  {_by(found)}"))
    for means, address in (reach.get("mappings") or {}).items():
        rows.append(("ok", "mapping", f"{address} by {means}"))
    for relay in reach.get("relays") or ():
        rows.append(("ok", "relay", f"a place at {short_peer(str(relay))}"))
    for relay, why in (reach.get("relays_refused") or {}).items():
        rows.append(("warn" if not reach.get("relays") else "ok", "relay", f"{short_peer(str(relay))} {why}"))
    relaying: Document = reach.get("relaying") or {}
    if relaying.get("reservations") or relaying.get("bytes"):
        rows.append(
            ("ok", "serves", f"{relaying['reservations']} places, {relaying['circuits']} circuits, {bytes_text(relaying['bytes'])} relayed")
        )
    return rows


CLOCK_WARN_S, CLOCK_LIMIT_S = 30.0, 300.0
"""Signed records are refused when the clocks of who signs and who reads are further apart than the latter."""


def clock_off(clock: Sequence[Document]) -> float | None:
    """By how many seconds our clock is ahead of those that were asked: the median; None where nobody was."""
    ahead = sorted(float(row["ahead_s"]) for row in clock)
    return ahead[(len(ahead) - 1) // 2] if ahead else None


def clock_row(clock: Sequence[Document]) -> tuple[str, str, str]:
    """What peers say of our clock. More than half of them must say that it is wrong before it counts as wrong."""
    off = clock_off(clock)
    if off is None:
        return "ok", "clock", "not compared: no peer is connected that tells its own"
    agree = sum(abs(float(row["ahead_s"]) - off) <= CLOCK_WARN_S for row in clock)
    text = f"{off:+.2f} s against {len(clock)} peer{'' if len(clock) == 1 else 's'}"
    if abs(off) <= CLOCK_WARN_S:
        return "ok", "clock", text
    side = f"{span_text(abs(off))} {'ahead of' if off > 0 else 'behind'} {agree} of {len(clock)} peers"
    if abs(off) <= CLOCK_LIMIT_S or 2 * agree <= len(clock):
        return "warn", "clock", f"{side}; beyond {CLOCK_LIMIT_S:g} s signed records are refused"
    return "fail", "clock", f"{side} (limit {CLOCK_LIMIT_S:g} s): they refuse what this node signs, and it what they sign (E120)"


def flow_row(flow: Document) -> tuple[str, str, str]:
    """How fast bytes went to a peer and back."""
    up, down = (mbit_text(float(flow[key])) for key in ("up_bytes_per_s", "down_bytes_per_s"))
    path = str(flow.get("path") or "")
    means = " (through a relay: it is the slower one's limit)" if path == "relay" else ""
    return "ok", "speed", f"to {short_peer(str(flow['peer']))} up {up}, down {down}, path {path}{means}"


def mbit_text(bytes_per_s: float) -> str:
    """Bandwidth as providers state it."""
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit:.0f} Mbit/s" if mbit >= 10 else f"{mbit:.1f} Mbit/s"


def lan_row(lan: Document) -> tuple[str, str, str] | None:
    """Who was found in the house; None where nobody looked, or nobody is there."""
    found: Document = lan.get("found") or {}
    if lan.get("trouble"):
        return "warn", "lan", f"peers in the house cannot be looked for: {lan['trouble']}"
    return ("ok", "lan", f"{len(found)} peer{'' if len(found) == 1 else 's'} found in the house") if found else None


def _tried(found: Document) -> tuple[str, str]:
    return {"reachable": ("ok", "address"), "unreachable": ("warn", "address")}.get(str(found.get("verdict")), ("warn", "address"))


def _by(found: Document) -> str:
    yes: Sequence[Any] = found.get("reached_by") or ()
    no: Sequence[Any] = found.get("not_reached_by") or ()
    if not yes and not no:
        return "nobody has tried it yet"
    return f"reached by {len(yes)} of {len(yes) + len(no)} public peers that tried"


def advice(reach: Document, port: int) -> str:
    """What to do, where something can be done; "" where nothing need be."""
    verdict = outcome(reach)
    if verdict == "cut-off":
        return f"Forward TCP {port} on your router to this machine, or ask a member with a public address to run: atoll relay"
    if verdict == "relayed":
        symmetric = reach.get("nat") == "address-dependent"
        slow = "Paths to peers behind other NATs stay relayed, which is slow. " if symmetric else ""
        return f"{slow}Faster: forward TCP {port} on your router to this machine, then: atoll netcheck"
    if verdict == "unknown":
        return "The verdict comes within seconds of the first public peer. Without one: atoll up --bootstrap ADDRESS"
    return ""
