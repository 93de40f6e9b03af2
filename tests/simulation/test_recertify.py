"""A quorum is lost for ever, and the organiser recertifies: directed schedules. Random ones are in
test_rounds.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations
from typing import Any

import msgspec
import pytest
from kits.rounds.member import Disk
from kits.rounds.plant import Plant
from kits.rounds.seal_plants import SEAL_PLANTS
from kits.rounds.storage import Backup
from kits.rounds.swarm import SeedResult
from quiet_stage import QuietStage
from seeds import daily

from atoll.collectives import messages as m
from atoll.collectives.errors import RecertifyError, RemoteProtocolError
from atoll.collectives.group import Certified, Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.simulation import ProcessDied
from atoll.node.modes.recertifying import recertify
from atoll.node.run.evidence import check
from atoll.node.run.proof import twice
from atoll.node.session.session import Session
from atoll.node.simulation.process import NodeProcess, sign_as

ORGANISER = PeerId("p0")
P1, P2, P3, P4 = map(PeerId, ("p1", "p2", "p3", "p4"))
SEEDS = (1, 2, 4)  # any three
HOME = 40.0  # when the dead come back, in a new life


class Stage(QuietStage):
    """Some of the members die for ever in a calm moment; the organiser's user says so two seconds
    later.
    """

    def __init__(
        self,
        seed: int,
        *,
        peers: int = 3,
        back_s: float = HOME,
        fragments: int = 1,
    ) -> None:
        super().__init__(seed, peers=peers, back_s=back_s, fragments=fragments)

    def session(self, peer: PeerId = ORGANISER) -> Session:
        return self.sessions(peer)[0]

    def recertified(self) -> list[Certified]:
        return [certified for certified in self.swarm.checker.entries if certified.removed]

    def play(self, plant: Plant | None = None) -> SeedResult:
        with (plant or Plant()).planted():
            return self.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_organiser_goes_on_alone_and_the_lost_come_back_in_a_new_life(seed: int) -> None:
    stage = Stage(seed)
    stage.strike((0, lambda: stage.die(P1, P2)), (2, stage.swarm.removal.ask))
    verdict = stage.run()
    assert verdict.problem == ""
    [entry] = stage.recertified()
    assert [who.peer for who in entry.removed] == [P1, P2]
    if (
        not entry.entry.contributors
    ):  # else it is the value that the organiser had accepted, unchanged
        assert entry.entry.next_config == (stage.swarm.members[ORGANISER].me,)
    after = stage.swarm.checker.entries[-1].entry.next_config
    assert {(who.peer, who.incarnation) for who in after} == {(ORGANISER, 0), (P1, 1), (P2, 1)}
    assert verdict.stats["contribution counted"] > 3


@pytest.mark.parametrize("fragments", [1, 3])
def test_an_organiser_whose_home_was_an_old_copy_goes_on_with_one_survivor(fragments: int) -> None:
    """Its old life is removed with the lost; the survivor is asked for what it accepted, and is a
    member of what follows.
    """
    stage = Stage(2, peers=5, fragments=fragments)
    stage.strike(
        (0, lambda: stage.die(P2, P3, P4)),
        (0.5, lambda: stage.swarm.renew(ORGANISER)),
        (3, stage.swarm.removal.ask),
    )
    verdict = stage.run()
    assert verdict.problem == ""
    for watch in stage.swarm.watches:
        entries = [certified for certified in watch.checker.entries if certified.removed]
        assert {(who.peer, who.incarnation) for who in entries[-1].removed} == {
            (peer, 0) for peer in (ORGANISER, P2, P3, P4)
        }
        assert set(entries[-1].entry.next_config) == {
            stage.swarm.members[ORGANISER].me,
            stage.swarm.members[P1].me,
        }


def test_the_founder_of_a_run_of_two_gives_its_earlier_life_up_after_an_old_copy() -> None:
    """Nobody has to say so: only this node can know that it never votes again, and the other one
    answers.
    """
    stage = Stage(1, peers=2)
    refused: list[str] = []

    def too_early() -> None:
        with pytest.raises(RecertifyError) as error:
            ask(stage, ORGANISER)
        refused.append(error.value.message)

    stage.strike(
        (0, too_early),
        (0, lambda: stage.swarm.renew(ORGANISER)),
    )
    assert stage.run().problem == ""
    assert refused == ["name the members that are lost for ever, not this node itself"]
    [entry] = stage.recertified()
    assert entry.removed == (Member(ORGANISER, 0),)
    assert set(entry.entry.next_config) == {Member(ORGANISER, 1), Member(P1, 0)}


def test_old_copies_of_all_homes_cost_no_round_that_is_on_a_disk() -> None:
    stage = Stage(2)
    everybody = (ORGANISER, P1, P2)
    rounds: list[int] = []

    def out() -> None:
        rounds.append(len(stage.swarm.checker.entries))
        stage.swarm.checker.retired.update(Member(peer, 0) for peer in everybody)
        for peer in everybody:
            stage.swarm.renew(peer)

    stage.strike((0, out), (3, lambda: ask(stage, P1, P2)))
    assert stage.run().problem == ""
    [entry] = stage.recertified()
    assert entry.entry.round >= rounds[0] > 2
    assert entry.removed == tuple(Member(peer, 0) for peer in everybody)
    assert {
        (who.peer, who.incarnation) for who in stage.swarm.checker.entries[-1].entry.next_config
    } == {(peer, 1) for peer in everybody}


@pytest.mark.parametrize("made", daily(2, ((made,) for made in permutations((0.0, 1.0, 2.0)))))
def test_homes_of_all_from_copies_of_different_ages_go_on_from_the_newest(
    made: tuple[float, ...],
) -> None:
    """Nobody has to say so: whoever comes from an older copy says itself that it never votes as the
    member that it was, and nobody is silent.
    """
    stage, everybody = Stage(2), (ORGANISER, P1, P2)
    checker, members = stage.swarm.checker, stage.swarm.members
    copies = dict[PeerId, Backup]()
    newest = list[int]()

    def copy(peer: PeerId) -> None:
        copies[peer] = present(members[peer].disks[0].storage.backup())

    def out() -> None:
        newest.append(max(copy.entries for copy in copies.values()))
        assert len(checker.entries) > newest[0] + 1  # some rounds are on no disk any more
        assert len({copy.entries for copy in copies.values()}) == len(everybody)
        checker.retired.update(
            Member(peer, 0) for peer in everybody if copies[peer].entries < newest[0]
        )
        for peer in everybody:
            stage.swarm.kill(members[peer])
            members[peer].disks[0].restore(copies[peer])
            members[peer].disks[0].units.destroyed.update(
                unit for unit, round_ in checker.used.items() if round_ >= newest[0]
            )
        checker.forget(newest[0], votes=newest[0])
        for peer in everybody:
            stage.swarm.restart(peer)

    stage.strike(
        *((at, partial(copy, peer)) for at, peer in zip(made, everybody, strict=True)), (5, out)
    )
    assert stage.run().problem == ""
    [entry] = stage.recertified()
    assert entry.entry.round == newest[0]
    assert set(entry.removed) == checker.retired
    assert {(who.peer, who.incarnation) for who in checker.entries[-1].entry.next_config} == {
        (peer, int(Member(peer, 0) in checker.retired)) for peer in everybody
    }


def test_a_run_in_fragments_is_recertified_in_all_of_them() -> None:
    stage = Stage(2, peers=5, fragments=3)
    stage.strike((0, lambda: stage.die(P2, P3, P4)), (2, stage.swarm.removal.ask))
    assert stage.run().problem == ""
    for watch in stage.swarm.watches:
        assert [
            [who.peer for who in certified.removed]
            for certified in watch.checker.entries
            if certified.removed
        ] == [[P2, P3, P4]]


@pytest.mark.parametrize("nth", daily(1, (1, 2, 3)))
def test_a_word_that_is_cut_short_between_two_fragments_is_given_again(nth: int) -> None:
    """The organiser's node dies before it has written the word down for fragment ``nth``; its user
    repeats it.
    """
    stage = Stage(2, peers=5, fragments=3)
    struck: list[int] = []
    for number, disk in enumerate(stage.swarm.members[ORGANISER].disks):

        def write(kind: str, disk: Disk = disk, number: int = number) -> None:
            if kind == "seal" and number == nth - 1 and not struck:
                struck.append(number)
                raise ProcessDied(ORGANISER, 0.5)
            type(disk).before_write(disk, kind)

        disk.before_write = write  # type: ignore[method-assign]
    stage.strike(
        (0, lambda: stage.die(P2, P3, P4)), *((wait, stage.swarm.removal.ask) for wait in (2, 4))
    )
    assert stage.run().problem == ""
    assert struck == [nth - 1]
    assert all(
        any(certified.removed for certified in watch.checker.entries)
        for watch in stage.swarm.watches
    )


def test_a_lost_peer_that_is_about_to_be_admitted_is_removed_too() -> None:
    """Else an accepted entry that admits it stands, and those who are left are no quorum of it
    (found by seed 6000288).
    """
    stage, lost = Stage(1), (Member(P1, 0), Member(P2, 0), Member(P3, 0))

    def word() -> None:
        stage.swarm.checker.retired.update(lost)
        machine = stage.session().machine
        assert machine is not None
        machine.entrance.joiners[lost[-1]] = (machine.round, stage.swarm.world.now)
        ask(stage, P1, P2, P3)
        for peer in (P1, P2):
            stage.swarm.wipe(stage.swarm.members[peer])

    stage.strike((0, lambda: stage.die(P1, P2)), (2, word))
    assert stage.run().problem == ""
    [entry] = stage.recertified()
    assert entry.removed == lost


def test_nothing_happens_without_the_organisers_word() -> None:
    stage = Stage(1, back_s=15.0)
    stage.strike((0, lambda: stage.die(P1, P2)))
    verdict = stage.run()
    assert verdict.problem == ""
    assert stage.recertified() == []


def test_every_survivor_is_waited_for_and_votes_no_more() -> None:
    """p1 is frozen: the organiser waits for its answer, however long, and decides nothing, though
    it is back with two of five.
    """
    stage = Stage(2, peers=5)
    seen: list[tuple[Any, ...]] = []

    def look() -> None:
        view, sealed = stage.session().recertifying.view(), stage.session().machine
        assert view is not None
        assert sealed is not None
        seen.append((view.removed, view.awaited, sealed.sealing.active, len(stage.recertified())))

    stage.strike(
        (0, lambda: stage.die(P2, P3, P4)),
        (0, lambda: stage.swarm.freeze(P1)),
        (2, stage.swarm.removal.ask),
        (5, look),
        (6, lambda: stage.swarm.thaw(P1)),
    )
    verdict = stage.run()
    assert verdict.problem == ""
    assert seen == [((P2, P3, P4), (P1,), True, 0)]
    assert len(stage.recertified()) == 1


def ask(stage: Stage, *peers: PeerId) -> None:
    process = stage.swarm.members[ORGANISER].process
    assert process is not None
    with process.alive():
        recertify(process.run.sessions, stage.swarm.world.now, peers)


def test_what_cannot_be_right_is_refused() -> None:
    stage = Stage(1)
    refused: list[str] = []

    def refuse(*peers: PeerId) -> None:
        with pytest.raises(RecertifyError) as error:
            ask(stage, *peers)
        refused.append(error.value.message)

    stage.strike(
        (0, lambda: refuse(P1)),
        (0, lambda: refuse(ORGANISER)),
        (0, lambda: refuse(PeerId("px"))),
        (0, lambda: stage.die(P1)),
        (3, lambda: refuse(P1)),
        (3, lambda: refuse()),
    )
    assert stage.run().problem == ""
    assert [text.split(" ", 1)[1] for text in refused] == [
        "is alive",
        "the members that are lost for ever, not this node itself",
        "was never a member of this run",
        "is nothing to recertify",
        "the members that are lost for ever, not this node itself",
    ]


class Unheard(Stage):
    """From a calm moment on votes are lost, and the organiser hears nothing: so a value is chosen
    that nobody knows to be. Then all but the organiser and one of the voters die for ever, and the
    organiser's user says so."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, peers=5)
        self.value = b""
        self.deaf = False
        tap = self.swarm.network.tap

        def hear(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
            lost = tap(sender, receiver, channel, payload) if tap else False
            if not self.deaf:
                return lost
            vote = (
                channel == "control"
                and payload[:1] == b"R"
                and isinstance(m.decode(payload[1:], sender).body, m.Accepted)
            )
            return lost or vote or ORGANISER in (sender, receiver)

        self.swarm.network.tap = hear
        self.strike((0, self._fall_silent))

    def voters(self) -> list[PeerId]:
        """Those but the organiser who voted for one value under one ballot, if they are a majority
        of all.
        """
        votes = {
            peer: disk.storage.journal().accepted
            for peer, disk in self.swarm.members.items()
            if peer != ORGANISER
        }
        for vote in votes.values():
            same = [peer for peer, other in votes.items() if vote is not None and other == vote]
            if len(same) > len(self.swarm.names) // 2:
                return same
        return []

    def _fall_silent(self) -> None:
        self.deaf = True
        self.once(lambda: bool(self.voters()), (0, self._strike), (2, self.swarm.removal.ask))

    def _strike(self) -> None:
        kept = self.voters()[0]
        accepted = self.swarm.members[kept].storage.journal().accepted
        assert accepted is not None
        assert self.swarm.members[ORGANISER].storage.journal().accepted is None
        self.value, self.deaf = accepted[1].hash(), False
        self.die(*(peer for peer in self.swarm.names if peer not in (ORGANISER, kept)))


def test_a_value_that_one_survivor_voted_for_is_signed_unchanged() -> None:
    stage = Unheard(1)
    verdict = stage.run()
    assert verdict.problem == ""
    [entry] = stage.recertified()[:1]
    assert entry.entry.hash() == stage.value


@pytest.mark.parametrize("plant", ["no-seal", "own-value-only"])
def test_a_planted_bug_of_recertifying_loses_that_value(plant: str) -> None:
    """Where the organiser happens to make the same value anew, nothing is lost: not in each seed."""
    assert any(
        Unheard(seed).play(SEAL_PLANTS[plant]()).problem.startswith("chosen") for seed in (1, 2, 3)
    )


@pytest.mark.parametrize(
    ("who", "nth"),
    daily(2, ((ORGANISER, 1), (P1, 1), (ORGANISER, 2), (ORGANISER, 3), (ORGANISER, 4))),
)
def test_a_kill_before_any_write_of_a_seal_changes_nothing(who: PeerId, nth: int) -> None:
    """One signature an entry, however often the organiser dies; a sealed member stays sealed."""
    stage = Stage(2, peers=5)
    disk, count = stage.swarm.members[who].disks[0], 0
    before = type(disk).before_write

    def write(kind: str) -> None:
        nonlocal count
        count += kind == "seal"
        if kind == "seal" and count == nth:
            raise ProcessDied(who, 0.5)
        before(disk, kind)

    disk.before_write = write  # type: ignore[method-assign]
    stage.strike(
        (0, lambda: stage.die(P2, P3, P4)), *((wait, stage.swarm.removal.ask) for wait in (2, 4, 6))
    )
    verdict = stage.run()
    assert verdict.problem == ""
    assert count >= nth
    assert len(stage.recertified()) == 1


def test_votes_of_two_histories_are_no_proof_of_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """p1 and p2 decide rounds without the organiser, and lose all. In their next life they vote in
    rounds of the same numbers again, in some of these schedules.
    """
    again = 0
    for back_s in (18.0, 21.0, 22.0):
        with monkeypatch.context() as patch:
            again += refused_as_proof(Stage(1, back_s=back_s), patch)
    assert again


def refused_as_proof(stage: Stage, patch: pytest.MonkeyPatch) -> int:
    """How many pairs of votes of one member, log, round and ballot there were. Asserts that none of
    them proves a lie.
    """
    said, honest = dict[tuple[object, ...], dict[bytes, bytes]](), NodeProcess.sign

    def sign(process: NodeProcess, payload: bytes) -> bytes:
        signature = honest(process, payload)
        if b"atoll/vote/" in payload[:16]:
            _, _, log, round_, _, ballot, _ = msgspec.msgpack.decode(payload)
            said.setdefault((process.peer, log, round_, ballot), {})[payload] = signature.ljust(
                64, b"\0"
            )
        return signature

    patch.setattr(NodeProcess, "sign", sign)
    stage.strike(
        (0, lambda: stage.swarm.network.partition({ORGANISER: 0, P1: 1, P2: 1})),
        (12, lambda: stage.die(P1, P2)),
        (12, lambda: stage.swarm.network.partition(None)),
        (14, stage.swarm.removal.ask),
    )
    assert stage.run().problem == ""
    assert stage.swarm.checker.revoked
    pairs = 0
    for (peer, *_), votes in said.items():
        first, *others = votes.items()
        for other in others:
            pairs += 1
            with pytest.raises(RemoteProtocolError, match="not of one slot"):
                check(
                    twice(PeerId(str(peer)), first, other).encode(),
                    stage.swarm.run_id,
                    verified,
                    ORGANISER,
                )
    return pairs


def present(copy: Backup | None) -> Backup:
    assert copy is not None
    return copy


def verified(peer: PeerId, payload: bytes, signature: bytes) -> bool:
    return signature == sign_as(peer, payload).ljust(64, b"\0")
