"""Catching up: asking others for what was decided, and answering those who lag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .. import messages as m
from ..group import Certified
from ..identifiers import PeerId
from .certificate import check_chain

if TYPE_CHECKING:
    from .machine import RoundMachine

CATCH_ENTRIES = 16  # entries in one Catch: bounded by MAX_MESSAGE_BYTES even at 256 members
REMEMBERED_ANSWERS = 64  # beyond, those are forgotten that are old enough to be given again


class Catching:
    """Bounded in rate: a peer is asked, and a question of a peer answered, once in half a pull."""

    def __init__(self, machine: RoundMachine, now: float) -> None:
        self.machine = machine
        self._answered: dict[tuple[PeerId, int], float] = {}
        self._asked: dict[PeerId, float] = {}
        self._asked_all_at = -1e9
        self._asked_around_at = now

    def answer(self, now: float, peer: PeerId, round_: int) -> None:
        """The peer is at ``round_``, which is decided: send entries from there on."""
        machine, key, again_s = self.machine, (peer, round_), self.machine.timing.pull_s / 2
        if peer == machine.me.peer or now - self._answered.get(key, -1e9) < again_s:
            return
        if len(self._answered) > REMEMBERED_ANSWERS:
            self._answered = {key: at for key, at in self._answered.items() if now - at < again_s}
        self._answered[key] = now
        entries, size = list[Certified](), 0
        for certified in machine.journal.entries[round_ : round_ + CATCH_ENTRIES]:
            size += len(msgspec.msgpack.encode(certified))
            if entries and size > m.MAX_MESSAGE_BYTES // 2:
                break  # one that adopts a branch may be large
            entries.append(certified)
        machine.actions.send(
            peer,
            machine.log,
            round_,
            m.Catch(tuple(entries), machine.round, machine.actions.results_from()),
        )

    def fetch(self, now: float, peer: PeerId) -> None:
        """The peer seems to be ahead: ask for what follows the newest entry known."""
        if (
            not self.machine.open.applying
            and now - self._asked.get(peer, -1e9) >= self.machine.timing.pull_s / 2
        ):
            self._asked[peer] = now
            self._ask(peer)

    def ask_around(self, now: float, every_s: float) -> None:
        """Nothing comes on here: ask somebody of the newest configuration, now and then."""
        machine = self.machine
        if now - self._asked_around_at > every_s:
            self._asked_around_at = now
            known = [
                member.peer
                for member in machine.tail.entry.next_config
                if member.peer != machine.me.peer
            ]
            targets = [
                peer
                for peer in known
                if not machine.actions.suspected(peer) and not machine.actions.deaf_to(peer)
            ] or known
            if targets:
                self._ask(machine.rng.choice(targets))

    def ask_again(self, now: float, peer: PeerId) -> None:
        """Ask for the newest entry that is known here: whoever has it, or later ones, answers where
        it stands.
        """
        machine = self.machine
        if now - self._asked.get(peer, -1e9) >= machine.timing.fetch_s:
            self._asked[peer] = now
            machine.actions.send(peer, machine.log, machine.tail.entry.round, m.Fetch())

    def ask_all(self, now: float) -> None:
        """Ask every other member of the newest configuration that is known."""
        machine = self.machine
        if now - self._asked_all_at >= machine.timing.fetch_s:
            self._asked_all_at = now
            for member in machine.tail.entry.next_config:
                if member.peer != machine.me.peer:
                    self._ask(member.peer)

    def on_catch(self, now: float, peer: PeerId, body: m.Catch) -> None:
        """Entries that follow the newest one known are verified and kept; more of them are asked
        for. Raises RemoteProtocolError.
        """
        machine, last = self.machine, self.machine.tail.entry
        fresh = [certified for certified in body.entries if certified.entry.round > last.round]
        if not fresh or fresh[0].entry.round != last.round + 1:
            return
        check_chain(
            fresh,
            run=machine.run,
            log=machine.log,
            base=last.hash(),
            config=last.next_config,
            organiser=machine.organiser,
            verify=machine.actions.verify,
            peer=peer,
            lying=machine.lying,
        )
        machine.look_for_another_past(fresh)
        machine.ahead.extend(fresh)
        if body.head > fresh[-1].entry.round + 1:
            self._asked.pop(peer, None)
            self.fetch(now, peer)

    def _ask(self, peer: PeerId) -> None:
        self.machine.actions.send(
            peer, self.machine.log, self.machine.tail.entry.round + 1, m.Fetch()
        )
