"""A node that has met nobody, in words: what was tried, how each try ended, what that means and
what to type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...collectives.errors import NetworkError
from ..home.output import short_peer
from ..net.transport.addresses import at_home

Document = Mapping[str, Any]
Row = tuple[str, str, str]

RELAY_ONLY_UP = "atoll up --relay-only --bootstrap ADDRESS"

_NO_NAME = "the name leads nowhere: it is misspelt, or the DNS does not answer"
_NO_WAY = "no way there: this machine's network does not lead to it (/ip4/ needs IPv4, /ip6/ IPv6)"
_MEANINGS = {
    "refused": "refused: that machine is there, but no node listens at that port",
    "no answer in": "no answer: it is off, has moved, or a firewall is in between",
    ("another peer answers"): (
        "another peer answers: that machine has a new key, or its address is somebody else's now"
    ),
    ("is no node"): (
        "what answers is no node: a web server, or the login page or proxy of this network"
    ),
    "resolve": _NO_NAME,
    "not known": _NO_NAME,
    "unreachable": _NO_WAY,
    "no route": _NO_WAY,
}
"""By what the system or the network says."""


def alone(network: Document) -> bool:
    """Whether the node is connected to nobody. A document that does not tell says no."""
    return "connected" in network and not network["connected"]


def alone_rows(network: Document) -> list[Row]:
    """What was tried. The first row fails if there was somebody to try and all tries failed."""
    entries: Document = network.get("bootstrap") or {}
    hidden = _reach(network).get("relay_only")
    if not entries:
        others = (
            "and nobody comes to a node without a relay: network.relay_only is on"
            if hidden
            else "so others must come to this node"
        )
        text = f"nobody was met; no bootstrap address is known, {others}"
    elif _failed(network):
        text = "nobody was met, so nobody can tell how this node is reached"
    else:
        text = "nobody was met yet: bootstrap addresses are being tried"
    rows = [("fail" if _failed(network) else "warn", "reach", text)]
    rows += [
        ("warn", "entry", f"{entry_name(str(entry))}  {entry_text(str(state))}")
        for entry, state in entries.items()
    ]
    lan: Document = network.get("lan") or {}
    why = "network.relay_only is on" if hidden else "network.lan_discovery is off"
    house = (
        "nobody found in the house (multicast DNS)"
        if lan.get("on")
        else f"the house is not searched: {why}"
    )
    if lan.get("trouble"):
        house = f"the house cannot be searched (multicast DNS): {lan['trouble']}"
    count = int(network.get("remembered") or 0)
    past = f"none of {count} remembered peers answers" if count else "no other peers are remembered"
    return [*rows, ("ok", "besides", f"{house}; {past}; the DHT is asked through peers only")]


def alone_error(network: Document) -> NetworkError | None:
    """E110, where addresses were tried and none answered."""
    if not alone(network) or not _failed(network):
        return None
    count = len(network["bootstrap"])
    which = (
        f"none of {count} bootstrap addresses answers"
        if count > 1
        else "the bootstrap address does not answer"
    )
    why = (
        "Training goes on alone. The node keeps trying, and tells all that was learned "
        "when it meets somebody."
    )
    hint = (
        "Another way in: any member prints an invite with fresh addresses (atoll invite new), then "
        "here: atoll join INVITE"
    )
    if offline(network):
        why, hint = (
            f"This machine has no network that leads there. {why}",
            (
                "Connect it (cable, Wi-Fi, VPN), then: atoll netcheck. With IPv6 only, "
                "ask for an /ip6/ address"
            ),
        )
    return NetworkError(
        f"{which}; this is not a ban and your key is fine", code="E110", why=why, hint=hint
    )


def alone_advice(network: Document) -> str:
    """What to do where it is no error (yet)."""
    if network.get("bootstrap"):
        return "Ask again in a few seconds: atoll netcheck"
    reach = _reach(network)
    if reach.get("relay_only"):
        return (
            "Name a node that relays, or join by an invite that names one: "
            f"{RELAY_ONLY_UP}, or atoll join INVITE"
        )
    if at_home(network.get("addresses") or ()):
        return (
            "Alone is fine for the first node of a run whose members are all on its network: they "
            "come with its invite (atoll invite new). For others name a node with a public address "
            "(there: atoll relay): atoll up --bootstrap ADDRESS"
        )
    return (
        "Alone is fine for the first node of a run: others come with its invite (atoll invite "
        "new). Else: atoll up --bootstrap ADDRESS"
    )


def entry_text(state: str) -> str:
    """How the try of a bootstrap address ended: what the network said, and what that means."""
    if state == "connecting":
        return "is being tried"
    head, _, tried = state.partition(": ")
    text = tried if head.startswith("cannot reach") else state
    meaning = next((words for key, words in _MEANINGS.items() if key in text.lower()), "")
    address = next((word.rstrip(":,;") for word in text.split() if word.startswith("/")), "")
    return f"{address} {meaning}" if meaning and address else text


def offline(network: Document) -> bool:
    """Whether nothing that was tried is on a network that this machine is on."""
    states = [str(state) for state in (network.get("bootstrap") or {}).values()]
    return bool(states) and all("unreachable" in state for state in states)


def _reach(network: Document) -> Document:
    return network.get("reach") or {}


def _failed(network: Document) -> bool:
    states = list((network.get("bootstrap") or {}).values())
    return bool(states) and "connecting" not in states


def entry_name(entry: str) -> str:
    """A bootstrap peer, or the name that stands for some."""
    return entry if entry.startswith("/") else short_peer(entry)
