#!/usr/bin/env python3
"""A swarm trains behind home routers, in a network laboratory: rounds of DiLoCo with int8 by one
peer behind each router and a public one, which is killed on the way.

The public peer starts the run and is everybody's bootstrap, observer of ports and relay; it is
killed (SIGKILL) while round ``--kill`` is under way. Then the others have to do without it; with
``--public 2`` there is another one, at which those who need relays have a place, too. Two tables of
paths are printed: before, and at the end.

ok                 every peer that was not killed has gone through all rounds to the same anchor,
                   and contributed to the last one
anchors_identical  whether the digests of their last anchors are
rounds             which rounds were committed, and by how many contributions each
parts              which share of the last rounds each peer added up for all, as its status says: 0
                   where its link is too slow for one (``--slow``)
valid              ping before was on target
paths              "before" and "after": for every pair how the first is connected to the second,
                   and by which way its lane goes
"""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import time
from pathlib import Path
from typing import Any

from _bench import FailedError, emit, progress
from _kits import TESTS, Lab, Peer, Peers, in_laboratory
from netns.nat import KINDS, Kind, Router

from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient

MANIFEST = """
schema = 1
name = "behind-routers"
[model]
entry = "local:small"
[train]
sync_every = 20
rounds = {rounds}
method = "diloco"
[train.outer]
lr = 0.7
momentum = 0.9
[exchange]
codec = "int8"
[checkpoint]
every = 4
"""
PATIENCE_S = 120.0
SETTLE_S = 30.0
"""So long after the last round a pair may take to come from a relay, or from nothing, to a direct
path.
"""


def roundabout(peers: list[Peer]) -> bool:
    """Whether a pair of these is connected over a relay or not at all, or has no direct lane."""
    ids = {peer.peer for peer in peers}
    for peer in peers:
        with NodeClient.connect(find_paths(peer.home)) as client:
            network = client.status()["network"]
        for paths in (network["paths"], network["lanes"]):
            if not all(
                paths.get(other) in ("direct", "punched", "lan") for other in ids - {peer.peer}
            ):
                return True
    return False


def table(peers: list[Peer], names: dict[str, str]) -> dict[str, dict[str, str]]:
    """By who and whom: the path of the connection, and that of the lane; printed, too."""
    found: dict[str, dict[str, str]] = {}
    for peer in peers:
        with NodeClient.connect(find_paths(peer.home)) as client:
            network = client.status()["network"]
        row = found[names[peer.peer]] = {
            name: f"{network['paths'].get(other, '-')} / {network['lanes'].get(other, '-')}"
            for other, name in names.items()
            if other != peer.peer
        }
        progress(
            f"{names[peer.peer]:18}" + "  ".join(f"{name}: {path}" for name, path in row.items())
        )
        for other, why in network["lanes_why"].items():
            progress(f"{'':18}{names.get(other, other)}: {why}")
    return found


def parts_at(peers: list[Peer], names: dict[str, str]) -> dict[str, float | None]:
    """By name: see ``parts`` above."""
    found: dict[str, float | None] = {}
    for peer in peers:
        with NodeClient.connect(find_paths(peer.home)) as client:
            found[names[peer.peer]] = client.status()["runs"][0]["part"]
    return found


class Rounds:
    """What peers say of their rounds."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.contributors: dict[str, dict[int, list[str]]] = {peer.name: {} for peer in peers}
        self.trained: dict[str, dict[str, Any]] = {}

    def follow(self, peers: list[Peer], until: int | None = None) -> None:
        """Take in what these say until all have trained, or one has committed round ``until``.
        Raises FailedError.
        """
        end = time.monotonic() + PATIENCE_S
        while len(self.trained) < len(peers):
            for peer in peers:
                try:
                    said = peer.expect_any(0.05)
                except queue.Empty:
                    continue
                if said["event"] == "round" and said["status"] == "committed":
                    progress(f"{peer.name}: round {said['round']} of {len(said['contributors'])}")
                    self.contributors[peer.name][said["round"]] = said["contributors"]
                    if said["round"] == until:
                        return
                elif said["event"] == "trained":
                    self.trained[peer.name] = said
                elif said["event"] == "end":
                    raise FailedError(f"{peer.name} ended: {peer.log()}")
            if time.monotonic() > end:
                raise FailedError(
                    "no end in sight; " + "\n".join(peer.log()[-1500:] for peer in peers)
                )


def run(options: argparse.Namespace, folder: Path) -> int:
    """Train and print."""
    kinds: list[Kind] = options.nat
    public = options.public
    mbit = [options.mbit] * (public + len(kinds) - 1) + [options.slow or options.mbit]
    with Lab(public + len(kinds), internet=True, mbit=mbit, rtt_ms=options.rtt_ms) as lab:
        ping = lab.ping_ms()  # routers do not answer
        homes = [Router(host, kind) for host, kind in zip(lab.hosts[public:], kinds, strict=True)]
        places: list[Any] = [*lab.hosts[:public], *(home.hosts[0] for home in homes)]
        manifest = MANIFEST.format(rounds=options.rounds)
        script = TESTS / "netns" / "train_peer.py"
        with Peers(
            folder, len(places), options.width, script, hosts=places, manifest=manifest
        ) as swarm:
            called = (
                [*(f"public {number}" for number in range(public)), *options.nat]
                if public > 1
                else ["public", *options.nat]
            )
            called = [
                f"{name} {index}" if called.count(name) > 1 else name
                for index, name in enumerate(called)
            ]
            names = {peer.peer: name for peer, name in zip(swarm.all, called, strict=True)}
            began = time.monotonic()
            for peer in swarm.all:
                peer.say(do="train")
            rounds = Rounds(swarm.all)
            rounds.follow(swarm.all, options.kill - 1)
            before = table(swarm.all, names)
            swarm.all[0].signal("both", signal.SIGKILL)
            progress("the public peer is killed")
            left = swarm.all[1:]
            rounds.follow(left)
            seconds = time.monotonic() - began
            settled = time.monotonic() + SETTLE_S
            while roundabout(left) and time.monotonic() < settled:
                time.sleep(0.2)
            after, parts = table(left, names), parts_at(left, names)
    digests = {said["digest"] for said in rounds.trained.values()}
    last = [
        set(rounds.contributors[peer.name].get(options.rounds, ()))
        >= {other.peer for other in left}
        for peer in left
    ]
    counts = {
        number: len(peers)
        for peer in left
        for number, peers in rounds.contributors[peer.name].items()
    }
    emit(
        "nat_swarm",
        vars(options),
        [rounds.trained],
        ok=len(digests) == 1 and all(last),
        anchors_identical=len(digests) == 1,
        rounds=dict(sorted(counts.items())),
        parts=parts,
        paths={"before": before, "after": after},
        seconds=round(seconds, 1),
        ping_ms=round(ping, 2),
        valid=lab.on_target(ping),
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "full-cone,port-restricted,port-shifting,upnp"
    parser.add_argument(
        "--nat",
        default=default,
        metavar="KIND[,KIND…]",
        help=f"{', '.join(KINDS)} (default {default})",
    )
    parser.add_argument(
        "--public", type=int, default=1, help="public peers; the first is killed (default 1)"
    )
    parser.add_argument(
        "--mbit", type=float, default=100.0, help="rate of every router, up and down (default 100)"
    )
    parser.add_argument(
        "--slow", type=float, default=0.0, help="rate of the last router (default: as the others)"
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=50.0, help="between any two routers (default 50)"
    )
    parser.add_argument("--rounds", type=int, default=8, help="default 8")
    parser.add_argument(
        "--kill", type=int, default=3, help="in which round the public peer is killed (default 3)"
    )
    parser.add_argument(
        "--width",
        type=int,
        default=2000,
        help="of the model, which has about 128 times as many parameters (default 2000)",
    )
    options = parser.parse_args()
    options.nat = options.nat.split(",")
    if wrong := [kind for kind in options.nat if kind not in KINDS]:
        parser.error(f"no kind of router: {wrong[0]}; there are {', '.join(KINDS)}")
    if (
        not 1 < options.kill < options.rounds
        or options.public < 1
        or options.public + len(options.nat) < 4
    ):
        parser.error(
            "--kill is between 2 and --rounds less one, and three peers have to be left, so that they are a majority"
        )
    return options


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))
