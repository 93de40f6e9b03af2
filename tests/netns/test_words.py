"""What netcheck, doctor, ping and peers say behind every kind of router, to people and to programs,
against the texts in golden/.

One laboratory: two public nodes, one node behind each kind of router (all of these are in one run),
one that no relay takes, and one that meets nobody. Written anew by ``ATOLL_GOLDEN=write pytest -m
netns tests/netns/test_words.py``: then read the difference as its user would.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from netns.lab import Host, Lab
from netns.nat import KINDS, Inner, Router
from netns.warm import fork
from tiny_run import TINY

from atoll.node.cli import run as atoll
from atoll.node.control.protocol import JoinRequest
from atoll.node.home.names import name_of
from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient
from atoll.node.manifest import load_run
from atoll.security.identity import Identity

pytestmark = pytest.mark.netns
GOLDEN = Path(__file__).with_name("golden")
PATIENCE_S = 90.0  # a bound for hangs
OPEN = {"public", "full-cone", "upnp"}
"""Whoever is there can be dialled."""
MEMBERS = ("public", *KINDS)
PLACES = (*MEMBERS, "no-relay", "alone")
USUAL = ("public", "full-cone", "symmetric")
PINGED = {
    "symmetric": ("public", "full-cone", "port-restricted"),
    "rst": ("public", "full-cone"),
    "public": ("port-restricted", "symmetric"),
    "no-relay": ("third", "nobody"),
}
PINGED |= dict.fromkeys(("full-cone", "upnp"), ("public", "port-restricted", "symmetric")) | {
    "alone": ("nobody",)
}


class Peer:
    """A node as `atoll up` starts it. Its control socket is a file, so commands reach it from
    outside of its namespace.
    """

    def __init__(self, place: Host | Inner, home: Path, *options: str, **environ: str) -> None:
        listen = "--listen", "/ip4/0.0.0.0/tcp/4001"
        with open(os.devnull, "wb") as nowhere:
            self.process = fork(
                place,
                "atoll.node.__main__",
                "--home",
                str(home),
                "--json",
                *listen,
                *options,
                stderr=nowhere.fileno(),
                **environ,
            )
        self.home = home

    @functools.cached_property
    def up(self) -> dict[str, Any]:
        """What it said when it listened."""
        return json.loads(self.process.lines.get(timeout=PATIENCE_S))

    @property
    def peer(self) -> str:
        """Its id."""
        return str(self.up["peer"])

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self.up["addresses"][0])

    def network(self) -> dict[str, Any]:
        """Its status document's part."""
        with self.client() as client:
            return client.status()["network"]

    def client(self) -> NodeClient:
        """A connection to it."""
        return NodeClient.connect(find_paths(str(self.home)))


class Town:
    """The laboratory, its nodes by where they are, and the words that stand for what is another
    each time.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        lab = stack.enter_context(Lab(3 + len(KINDS) + 1, internet=True))
        homes = [Router(host, kind) for host, kind in zip(lab.hosts[3:], KINDS, strict=False)]
        house = Router(lab.hosts[-1], "port-restricted", 2)
        public = [
            Peer(host, folder / f"public{host.index}", "--relay-for-all") for host in lab.hosts[:2]
        ]
        third = Peer(lab.hosts[2], folder / "third")
        entry = [part for peer in public for part in ("--bootstrap", peer.address)]
        nobody = str(Identity.generate().peer)
        dead = [
            f"/ip4/{host.address}/tcp/4999/p2p/{Identity.generate().peer}"
            for host in (lab.hosts[2], lab.hosts[3])
        ]
        self.peers = {"public": public[0], "second": public[1], "third": third}
        self.peers |= {home.kind: Peer(home.hosts[0], folder / home.kind, *entry) for home in homes}
        self.peers["no-relay"] = Peer(
            house.hosts[0], folder / "no-relay", "--bootstrap", third.address
        )
        self.peers["alone"] = Peer(
            house.hosts[1],
            folder / "alone",
            "--bootstrap",
            dead[0],
            "--bootstrap",
            dead[1],
            ATOLL_NETWORK__LAN_DISCOVERY="true",
        )
        for peer in self.peers.values():
            stack.callback(peer.process.kill)
        ids = {place: peer.peer for place, peer in self.peers.items()} | {"nobody": nobody}
        ids |= {f"dead{number}": address.rpartition("/")[2] for number, address in enumerate(dead)}
        self.ids = ids
        self._words = {f"{name_of(peer)} …{peer[-8:]}": f"<{place}>" for place, peer in ids.items()}
        self._words |= {peer: f"ID<{place}>" for place, peer in ids.items()}
        self._words |= {str(folder): "FOLDER", f"{lab.block}.{lab.net}.": "11.0."}

    def mask(self, text: str) -> str:
        """``text`` without what is another each time."""
        for volatile, word in self._words.items():
            text = text.replace(volatile, word)
        for pattern, word in MASKS:
            text = re.sub(pattern, word, text)
        return text


MASKS = [
    (r"[\d.]+ ms\b", "_ ms"),
    (
        r"[+-]\d+\.\d\d s against \d+ peers?|not compared: no peer is connected that tells its own",
        "+_ s against _ peers",
    ),
    (r"reached by (\d+) of \1 public", "reached by all public"),
    (r"reached by 0 of \d+ public", "reached by none of the public"),
    (r"connected to \d+ peers?", "connected to _ peers"),
    (r"\d+ places, \d+ circuits, [\d.]+ \w+ relayed", "_ places, _ circuits, _ relayed"),
    (r"(python|torch|libp2p|trio) \d[\w.+]*", r"\1 _"),
    (r"[\d.]+ [KMGT]iB free", "_ free"),
    (r" {2,}", "  "),
    (r"  –  not yet", "  live  not yet"),  # who has said nothing yet in a run that is not founded
    (r"no lane  –", "no lane  _ ms"),  # who did not answer within a second on a busy machine
]
COUNTS = {"rtt_ms", "relaying", "circuits", "dial_backs", "servers", "observers"}
"""Keys of documents whose numbers are another each time."""


def join_all(town: Town, folder: Path) -> None:
    """All members enter a run that the first public node has made."""
    recipe, organiser = folder / "run.toml", town.peers["public"]
    recipe.write_text(TINY, encoding="utf-8")
    with redirect_stdout(io.StringIO()) as said:
        assert atoll(["new", str(recipe), "--home", str(organiser.home), "--json"]) == 0
    invite = str(json.loads(said.getvalue())["invite"])
    manifest = load_run(find_paths(str(organiser.home)), "tiny").encode()
    for place in MEMBERS:
        with town.peers[place].client() as client:
            client.join(
                JoinRequest(manifest=manifest) if place == "public" else JoinRequest(invite=invite)
            )


def settled(town: Town, place: str) -> str:
    """What ``place`` still has to find out; "" when nothing."""
    network = town.peers[place].network()
    reach = network["reach"]
    if place == "alone":
        return (
            "" if "connecting" not in network["bootstrap"].values() else str(network["bootstrap"])
        )
    tried = [
        len(found["reached_by"]) + len(found["not_reached_by"])
        for found in reach["candidates"].values()
    ]
    if place in OPEN:
        known = (
            reach["reach"] == "public" and not reach["relays"] and bool(tried) and min(tried) > 1
        )
    else:
        known = reach["reach"] == "private" and reach["port_mapping"] == "none"
        known &= bool(reach["relays_refused"]) if place == "no-relay" else len(reach["relays"]) == 2
        known &= place in ("symmetric", "no-relay") or min(tried) > 1
    if place == "no-relay":
        return "" if known else str(reach)
    wrong = {
        other: network["paths"].get(town.ids[other], "") for other in MEMBERS if other != place
    }
    wrong = {other: path for other, path in wrong.items() if path not in ways(place, other)}
    if known and not wrong:
        return ""
    theirs = {other: town.peers[other].network() for other in wrong}
    said = {
        other: (found["paths"].get(town.ids[place]), found["faults"])
        for other, found in theirs.items()
    }
    return f"{wrong}, they say {said}; faults {network['faults']}; {reach}"


def ways(place: str, other: str) -> tuple[str, ...]:
    """By which paths two members may see each other in the end."""
    pair = {place, other}
    if "public" in pair:
        return ("direct",)
    if pair & OPEN:
        return "direct", "punched"  # whichever came first
    if pair == {"symmetric", "rst"}:
        # Each refusal lets both dial again at once, from another port of the symmetric router: some
        # hundred pairs of ports are tried, and one of them may fit.
        return "punched", "relay"
    if "symmetric" in pair:
        return ("relay",)
    return "punched", "relay"  # packets have to meet: nobody waits for that here


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """All of it, when everybody has found out what there is to find out."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("town")
        found = Town(stack, folder)
        join_all(found, folder)
        end = time.monotonic() + PATIENCE_S
        for place in PLACES:
            while left := settled(found, place):
                assert time.monotonic() < end, f"{place}: {left}"
                time.sleep(
                    0.5
                    # between questions to a node, which has no event for "nothing more is to be found
                    # out"
                )
        yield found


@pytest.mark.parametrize("place", PLACES)
def test_the_words(
    town: Town, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    commands = [
        ["netcheck"],
        ["doctor"],
        ["peers"],
        *(["ping", town.ids[other], "--count", "1"] for other in PINGED.get(place, USUAL)),
    ]
    text, document = "", dict[str, Any]()
    for command in commands:
        capsys.readouterr()
        status = atoll([*command, "--home", str(town.peers[place].home)])
        out, err = (town.mask(part) for part in capsys.readouterr())
        asked = town.mask(" ".join(command))
        text += f"$ atoll {asked}\n{''.join(lines(out, place))}{err}[exit {status}]\n\n"
        assert atoll([*command, "--home", str(town.peers[place].home), "--json"]) == status
        said = json.loads(capsys.readouterr().out)
        document[asked] = {"exit": status, "said": ordered(town, said, place)}
    compare(GOLDEN / f"{place}.txt", text)
    spread = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True)
    compare(
        GOLDEN / f"{place}.json",
        re.sub(r"[{\[][^{}\[\]]*[}\]]", lambda inner: re.sub(r"\n\s*", " ", inner[0]), spread)
        + "\n",
    )


def test_bandwidth_to_a_member(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    public, hidden = town.peers["public"], town.peers["port-restricted"]
    assert (
        atoll(["ping", public.peer, "--count", "1", "--bandwidth", "--home", str(hidden.home)]) == 0
    )
    pong, flow = (town.mask(line) for line in capsys.readouterr().out.splitlines())
    assert pong == "pong from <public>  _ ms  direct 11.0.1.2"
    assert re.fullmatch(r"to <public> up [\d.]+ Mbit/s, down [\d.]+ Mbit/s, path direct", flow)


def test_a_punched_path_says_so(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    target, home = town.peers["port-restricted"].peer, str(town.peers["port-shifting"].home)
    assert atoll(["ping", target, "--until-direct", "--count", "60", "--home", home]) == 0
    assert (
        town.mask(capsys.readouterr().out).splitlines()[-1]
        == "pong from <port-restricted>  _ ms  punched 11.0.5.2"
    )


def test_a_path_that_stays_relayed(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    target, home = town.peers["symmetric"].peer, str(town.peers["no-udp"].home)
    assert atoll(["ping", target, "--until-direct", "--count", "2", "--home", home]) == 1
    out, err = (town.mask(text) for text in capsys.readouterr())
    assert out == 2 * "pong from <symmetric>  _ ms  through a relay\n"
    assert err.startswith(
        "It works, but slowly: the two routers do not let a direct connection through."
    )


def compare(file: Path, text: str) -> None:
    """``text`` is what the file holds."""
    if os.environ.get("ATOLL_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def lines(text: str, place: str) -> list[str]:
    """Those of a table, with what may come in any order sorted, and without what only some nodes
    happen to do.
    """
    found = [
        soft(line, place, line)
        for line in text.splitlines(keepends=True)
        if place == "public" or not line.startswith(" ok  serves")
    ]
    first = (
        1
        if text.startswith("PEER")
        else next((i for i, line in enumerate(found) if line.startswith(" ok  relay")), len(found))
    )
    last = (
        len(found)
        if text.startswith("PEER")
        else first + sum(line.startswith(" ok  relay") for line in found)
    )
    return [*found[:first], *sorted(found[first:last]), *found[last:]]


def soft(text: str, place: str, about: str) -> str:
    """``text`` that names the member ``about``, with the path masked where either may come out."""
    other = next((other for other in MEMBERS if f"<{other}>" in about), place)
    either = ways(place, other) if other != place else ()
    return (
        re.sub(r"\b(direct|punched|relay)\b", "/".join(either), text) if len(either) > 1 else text
    )


def ordered(town: Town, value: Any, place: str) -> Any:
    """A document masked, its lists sorted, without repetitions."""
    if isinstance(value, list):
        rows = {
            json.dumps(ordered(town, inner, place), sort_keys=True, ensure_ascii=False)
            for inner in value
        }
        return [json.loads(row) for row in sorted(rows) if row != "null"]
    if not isinstance(value, dict):
        return town.mask(value) if isinstance(value, str) else value
    if value.get("what") == "serves" and place != "public":
        return None
    value = {key: inner for key, inner in value.items() if key != "schema"}
    if "you" in value:
        value |= {"live": "_", "rtt_ms": None if value["you"] else 0}
    if "clock" in value and place != "alone":  # some of those that are connected
        value["clock"] = "_"
    if "reached_by" in value:
        value |= {key: value[key] and ["some"] for key in ("reached_by", "not_reached_by")}
    if "candidates" in value and place == "symmetric":
        value["candidates"] = "others each time"
    if "port_mapping" in value and place == "full-cone":
        value["port_mapping"] = "_"  # it may have asked before it knew that it can be dialled
    found = {
        town.mask(str(key)): "_"
        if key in COUNTS and inner is not None
        else ordered(town, inner, place)
        for key, inner in value.items()
    }
    return found | {
        key: soft(found[key], place, found["peer"])
        for key in ("path", "link")
        if "peer" in found and found.get(key)
    }
