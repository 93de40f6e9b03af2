"""``/dnsaddr/HOST``: a name that stands for addresses of peers, which its owner can change at any time.

The TXT records of ``_dnsaddr.HOST`` list them, one ``dnsaddr=ADDRESS`` each; an address may be such a name again. With ``/p2p/PEER``
behind it only that peer's count. What DNS says is no more trusted than any other hint: a peer proves its id when it is dialled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from ...collectives.errors import ConfigError, NetworkError, PeerUnreachableError
from ...collectives.identifiers import PeerId
from ...security.identity import is_peer_id
from .addresses import MAX_ADDRESS_CHARS, is_host_name, split_peer

PREFIX = "/dnsaddr/"
MAX_DEPTH = 4
MAX_QUESTIONS = 16
MAX_FOUND = 32
ANSWER_S = 5.0

Texts = Callable[[str], Awaitable[Sequence[str]]]
"""The TXT records of a host. Raises NetworkError."""


def split(address: str) -> tuple[str, str]:
    """Host and peer id ("" for any) of ``/dnsaddr/HOST[/p2p/PEER]``. Raises ConfigError."""
    host, mark, peer = address.removeprefix(PREFIX).partition("/p2p/")
    if not address.startswith(PREFIX) or len(address) > MAX_ADDRESS_CHARS or not is_host_name(host) or (mark and not is_peer_id(peer)):
        raise ConfigError(
            f"not a name for addresses: {address[:MAX_ADDRESS_CHARS]!r}",
            key="bootstrap",
            why="it needs a host name, and may end with the id of the one peer that is meant",
            hint="/dnsaddr/boot.example.org, or /dnsaddr/boot.example.org/p2p/12D3Koo…",
        )
    return host, peer


async def texts_of(host: str) -> Sequence[str]:
    """Ask the system's name servers. Raises NetworkError."""
    import dns.asyncresolver  # comes with libp2p; its import takes its time

    try:
        with trio.fail_after(ANSWER_S):
            answer = await dns.asyncresolver.resolve(host, "TXT")
        return [b"".join(record.strings).decode("utf-8", "replace") for record in answer]
    except Exception as error:  # the library raises many kinds
        raise PeerUnreachableError(f"{host} has no TXT record: {error or type(error).__name__}", peer=PeerId("")) from None


async def look_up(address: str, texts: Texts = texts_of) -> list[tuple[PeerId, str]]:
    """The peers a name stands for, with an address each; at most 32. Raises NetworkError when nobody could be asked, ConfigError on no name."""
    split(address)
    found: dict[tuple[PeerId, str], None] = {}
    waiting, asked, failure = [(address, 0)], set[str](), None
    while waiting and len(asked) < MAX_QUESTIONS and len(found) < MAX_FOUND:
        name, depth = waiting.pop(0)
        host, wanted = split(name)
        if host in asked:
            continue
        asked.add(host)
        try:
            said = await texts(f"_dnsaddr.{host}")
        except NetworkError as error:
            failure = failure or error
            continue
        for text in said[:MAX_FOUND]:
            entry = text.removeprefix("dnsaddr=")
            if entry == text or (wanted and not entry.endswith(f"/p2p/{wanted}")):
                continue
            try:
                if not entry.startswith(PREFIX):
                    found.setdefault(split_peer(entry))
                elif depth < MAX_DEPTH:
                    split(entry)
                    waiting.append((entry, depth + 1))
            except ConfigError:
                continue  # QUIC and whatever else others list
    if failure is not None and not found:
        raise failure
    return list(found)[:MAX_FOUND]
