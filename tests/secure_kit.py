"""Sites of a secure run on a simulated network, and what must hold of every sum, whoever dies when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from session_table import LAYOUT, LIMIT_S, Peer, Table

from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings, SecureSettings
from atoll.node.modes.secure.wire import PREFIX, AuthoredMessage, decode
from atoll.node.run.evidence import check
from atoll.node.session import events as ev
from atoll.node.session.memory_storage import MemoryStorage
from atoll.node.session.mode_events import Unmasked
from atoll.security.masking import Client
from atoll.security.masking.keys import seal
from atoll.security.masking.messages import Deal, Dealt, share_hash, signed

TERMS = SecureSettings(threshold=3)
SECURE = RunSettings(
    sync_every=1,
    codec="bits",
    reducer="copy",
    outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0),
    secure=TERMS,
)
NEAR = 2e-5  # a step of the ring for each of the rounds


class Sites:
    """Each contributes a vector of its own again and again. After `until`, everything that was
    unmasked has been checked.
    """

    def __init__(
        self,
        count: int,
        settings: RunSettings = SECURE,
        storage: Callable[[OuterSettings], MemoryStorage] = MemoryStorage,
    ) -> None:
        self.table = Table(count, settings, storage)
        self.peers = self.table.all_in()
        self.offered: dict[PeerId, bytes] = {}
        self.values: dict[bytes, float] = {}
        self.sums: dict[
            tuple[int, int], dict[PeerId, bytes]
        ] = {}  # by entry and attempt: whose vectors were unmasked together
        self.next: dict[
            PeerId, float
        ] = {}  # what a peer's next vector is made of, where it is to be a certain one
        self.near = NEAR
        self.liars = set[PeerId]()  # what they tell of themselves does not count
        self.proofs: dict[PeerId, list[tuple[PeerId, str]]] = {}  # by whom, and what it proves
        self.accused: dict[PeerId, set[str]] = {}  # by others
        self.counted: list[bytes] = []
        self.refused: list[bytes] = []
        self.anchors: dict[int, float] = {0: 0.0}  # by round
        self._read = dict.fromkeys((peer.name for peer in self.peers), 0)
        self._lives = dict.fromkeys(self._read, 1)
        for peer in self.peers:
            self.offer(peer)

    def offer(self, peer: Peer) -> None:
        """A fresh vector; no two are equal."""
        number = len(self.values) + 1
        value = self.next.pop(peer.name, number / 64)
        cid = peer.contribute(f"{number}", value)
        self.offered[peer.name], self.values[cid] = cid, value

    def _hear(self, peer: Peer, event: object) -> None:
        if peer.name in self.liars:
            if isinstance(event, ev.RoundCommitted | ev.ContributionRefused) and event.cid:
                self.offer(peer)
            return
        match event:
            case ev.Equivocated():
                found, what = check(
                    event.evidence, self.table.place.run_id, lambda *_: False, peer.name
                )
                assert found == event.peer
                assert found in self.liars
                self.proofs.setdefault(found, []).append((peer.name, what))
            case ev.PeerMisbehaved() if event.peer in self.liars:
                self.accused.setdefault(event.peer, set()).add(event.reason)
            case Unmasked():
                assert len(event.members) >= event.threshold
                key, told = (
                    (event.round, event.attempt),
                    {member: self.offered[member] for member in event.members},
                )
                assert self.sums.setdefault(key, told).keys() == told.keys()
            case ev.RoundCommitted() if event.contributors:
                if (
                    event.round == peer.session.completed
                ):  # else it caught up, and this is an entry on the way
                    anchor = float(self.anchor(peer).mean())
                    assert self.anchors.setdefault(event.round, anchor) == anchor
                if event.cid is not None:
                    assert event.cid == self.offered[peer.name]
                    if event.counted:
                        self.counted.append(event.cid)
                    self.offer(peer)
            case ev.ContributionRefused():
                self.refused.append(event.cid)
                if "epsilon" not in event.reason:  # else every other one would be, too
                    self.offer(peer)
            case ev.StateReady() if peer.lives > self._lives[peer.name]:
                self._lives[peer.name] = peer.lives
                peer.attach()
                self.offer(peer)
            case ev.StateDiverged() | ev.PeerMisbehaved():
                raise AssertionError(event)
            case _:
                pass

    def anchor(self, peer: Peer) -> torch.Tensor:
        """The newest."""
        replica: Any = peer.session.replica
        return replica.anchor[: LAYOUT.numel]

    def _look(self, what: Callable[[], bool]) -> bool:
        for peer in self.peers:
            while peer.node is not None and self._read[peer.name] < len(peer.heard):
                self._read[peer.name] += 1
                self._hear(peer, peer.heard[self._read[peer.name] - 1])
        return what()

    def until(self, what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Let time pass until something holds; then what must always hold."""
        assert self.table.world.run(
            until=self.table.world.now + limit_s, stop=lambda: self._look(what)
        ), (self.sums, self.anchors)
        self.check()

    def committed(self, rounds: int) -> Callable[[], bool]:
        """Whether all that live have so many rounds."""
        return lambda: all(
            peer.session.completed >= rounds for peer in self.peers if peer.node is not None
        )

    def check(self) -> None:
        """No vector in two sums; every round is the mean of one of them; who was told that it
        counted is in it.
        """
        given = [cid for members in self.sums.values() for cid in members.values()]
        assert len(given) == len(set(given))
        means = {
            key: sum(self.values[cid] for cid in members.values()) / len(members)
            for key, members in self.sums.items()
        }
        used = set[tuple[int, int]]()
        for round_ in sorted(self.anchors)[1:] if means else ():
            if round_ - 1 in self.anchors:
                moved = self.anchors[round_ - 1] - self.anchors[round_]
                key = min(means, key=lambda key: abs(means[key] - moved))
                assert abs(means[key] - moved) < self.near, (round_, moved, means)
                used.add(key)
        summed = {cid for key in self.sums for cid in self.sums[key].values()}
        assert not means or set(self.counted) <= summed
        assert not set(self.refused) & set(self.counted)

    def back_after(self, peer: Peer, seconds: float) -> None:
        """It starts again on its disk, unless something else has started it."""

        def start() -> None:
            if peer.node is None:
                peer.start()

        self.table.world.after(seconds, start)

    def kill_at(
        self,
        moment: str,
        of: Callable[[PeerId], bool],
        then: Callable[[Peer], None] = lambda _: None,
    ) -> list[PeerId]:
        """Kill the first peer, among those ``of`` says, that sends what ``moment`` names: what it
        sends then is lost. Returns who it was.
        """
        struck: list[PeerId] = []

        def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
            if sender in struck:
                return True
            if not struck and of(sender) and moment in kind_of(sender, channel, payload):
                struck.append(sender)
                peer = next(peer for peer in self.peers if peer.name == sender)

                def strike() -> None:
                    peer.kill()
                    self.table.network.tap = None
                    then(peer)

                self.table.world.after(0.0, strike)
                return True
            return False

        self.table.network.tap = tap
        return struck


def kind_of(sender: PeerId, channel: str, payload: Any) -> str:
    """What a message is, as far as secure rounds are concerned."""
    if channel == "record":
        return "record"
    if payload[:1] != PREFIX:
        return ""
    body = decode(payload[1:], sender).body
    return type(body.message if isinstance(body, AuthoredMessage) else body).__name__


def replaces_the_copy(peer: Peer) -> None:
    """From now on it gives the log another vector than the mean that all have unmasked: as owner of
    parts, and as convener.
    """
    rounds: Any = peer.session.pre_round
    give, told = rounds._give, set[bytes]()

    def lie(now: float) -> None:
        cid, mean, _ = rounds.mean
        if cid not in told:
            told.add(cid)
            mean += 7.0
        give(now)

    rounds._give = lie


def deals_shares_that_do_not_fit(peer: Peer) -> None:
    """From now on each share that it deals fits its own hash, and no other share; and it reveals
    what it has as it should.
    """
    rounds: Any = peer.session.pre_round
    join = rounds._join

    def lie(now: float) -> None:
        join(now)
        client = rounds.masking.client if rounds.masking is not None else None
        if client is not None and client.deal.__func__ is Client.deal:
            deal = client.deal

            def wrongly(keys: Any) -> Deal:
                honest = deal(keys)
                roster, shares = client.binding.roster, []
                for each in honest.shares:
                    seed, pair = (rounds.rng.randbytes(64).rjust(66, b"\0") for _ in range(2))
                    key = client._sealing(roster[each.to], True)
                    box = seal(key, seed + pair)
                    shares.append(Dealt(each.to, share_hash(seed), share_hash(pair), box))
                return signed(Deal(tuple(shares)), client.binding, rounds.identity)

            client.deal = wrongly
            wrongly.__func__ = wrongly  # type: ignore[attr-defined]

    rounds._join = lie
