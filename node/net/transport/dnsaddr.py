"""Names in addresses: ``/dns4/HOST/tcp/PORT``, and ``/dnsaddr/HOST``, which stands for peers that
its owner can change at any time.

The TXT records of ``_dnsaddr.HOST`` list them, one ``dnsaddr=ADDRESS`` each; an address may be such
a name again. With ``/p2p/PEER`` behind it only that peer's count. What DNS says is no more trusted
than any other hint: a peer proves its id when it is dialled.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence

import trio

from ....collectives.errors import ConfigError, NetworkError, PeerUnreachableError
from ....collectives.identifiers import PeerId
from ....security.identity import is_peer_id
from .addresses import (
    MAX_ADDRESS_CHARS,
    host_and_port,
    is_direct,
    is_host_name,
    is_public,
    make_address,
    split_peer,
)

PREFIX = "/dnsaddr/"
MAX_DEPTH = 4
MAX_QUESTIONS = 16
MAX_FOUND = 32
ANSWER_S = 5.0

_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}

Texts = Callable[[str], Awaitable[Sequence[str]]]
"""The TXT records of a host. Raises NetworkError."""


def split(address: str) -> tuple[str, str]:
    """Host and peer id ("" for any) of ``/dnsaddr/HOST[/p2p/PEER]``. Raises ConfigError."""
    host, mark, peer = address.removeprefix(PREFIX).partition("/p2p/")
    if (
        not address.startswith(PREFIX)
        or len(address) > MAX_ADDRESS_CHARS
        or not is_host_name(host)
        or (mark and not is_peer_id(peer))
    ):
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
            # made anew: the library's own reads once for ever which name servers there are
            answer = await dns.asyncresolver.Resolver().resolve(host, "TXT")
        return [b"".join(record.strings).decode("utf-8", "replace") for record in answer]
    except Exception as error:  # the library raises many kinds
        raise PeerUnreachableError(
            f"{host} has no TXT record: {error or type(error).__name__}", peer=PeerId("")
        ) from None


async def look_up(address: str, texts: Texts = texts_of) -> list[tuple[PeerId, str]]:
    """The peers a name stands for, with an address each; at most 32. Raises NetworkError when
    nobody could be asked, ConfigError on no name.
    """
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
            listed = await texts(f"_dnsaddr.{host}")
        except NetworkError as error:
            failure = failure or error
            continue
        for text in listed[:MAX_FOUND]:
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


async def numeric(addresses: Sequence[str], given: Collection[str]) -> list[str]:
    """``addresses``, their names replaced by what they stand for: libp2p's TCP asks no name server.

    A name that is not among ``given``, what our user told us, is a stranger's: it leads to no
    private host. One that stands for nothing stays.
    """
    found: list[str] = []
    for address in addresses:
        family = _FAMILIES.get(address.split("/", 2)[1])
        if family is None or not is_direct(address):
            found.append(address)
            continue
        host, port = host_and_port(address)
        infos: list[str] = []
        with contextlib.suppress(OSError), trio.move_on_after(ANSWER_S):
            answers = await trio.socket.getaddrinfo(
                host, port, family=family, type=socket.SOCK_STREAM
            )
            infos = [str(sockaddr[0]).partition("%")[0] for *_, sockaddr in answers]
        found += (
            [make_address(info, port) for info in infos if address in given or is_public(info)]
            if infos
            else [address]
        )
    return list(dict.fromkeys(found))
