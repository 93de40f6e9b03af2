"""Sessions of a run with BTARD on a simulated network: rounds end alike everywhere, and who lies or
stops is removed, whatever the network loses.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from kits.btard.hostile import ATTACKS, Gang
from session_table import LAYOUT, LIMIT_S, Peer, Table
from torch import Tensor

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.group import Contributor, Entry
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import RoundMachine
from atoll.collectives.seeded import BtardSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.modes.btard.evidence import FAULTS
from atoll.node.modes.btard.rounds import BtardRounds, StepOutcome
from atoll.node.modes.btard.wire import MOST_SPANS, Offered, Taken, decode, encode
from atoll.node.run.evidence import check
from atoll.node.session import events as ev
from atoll.node.session.memory_storage import MemoryStorage
from atoll.node.session.mode_events import WorkAsked
from atoll.security.btard import BtardPeer
from atoll.security.btard.draw import first_draw, seed_of
from atoll.security.btard.messages import Fault, Kind, Vector
from atoll.security.btard.stages import AttemptStage
from atoll.security.btard.wire import VectorHeader
from atoll.security.identity import Identity

OPTIMUM = torch.linspace(-1, 1, LAYOUT.numel)


def settings(count: int, validators: int, lying: int, intervals: int = 0) -> RunSettings:
    """Of so many peers, with short times."""
    peers = tuple(sorted(Identity(bytes([index]) * 32).peer for index in range(count)))
    outer = OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
    btard = BtardSettings(
        peers, validators=validators, timeout_s=1.0, compute_s=2.0, intervals=intervals
    )
    return RunSettings(
        sync_every=1, codec="bits", reducer="copy", outer=outer, btard=btard, lying=lying
    )


class Seeds:
    """Peers whose scripts train a quadratic by seeds; those in ``liars`` answer with another vector
    for themselves, or attack the protocol (`recruit`).
    """

    def __init__(
        self, count: int, liars: int = 0, validators: int = 1, lying: int = 0, intervals: int = 0
    ) -> None:
        self.table = Table(count, settings(count, validators, lying, intervals))
        self.intervals, self.again = intervals, dict[int, int]()
        self.jump = 2.0  # of liars, in one interval; another is only said, and in no last one
        self.scale = -20.0  # of liars' vectors
        self.peers = self.table.all_in()
        self.liars = {peer.name for peer in self.peers[count - liars :]}
        self.anchors: dict[int, Tensor] = {0: torch.zeros(LAYOUT.numel)}
        self.proofs: dict[PeerId, ev.Equivocated] = {}
        self.refused: dict[PeerId, str] = {}
        self._read = dict.fromkeys((peer.name for peer in self.peers), 0)
        for peer in self.peers:
            peer.contribute("0")

    def _hear(self, peer: Peer, event: object) -> None:
        match event:
            case WorkAsked() if self.intervals:
                peer.do(lambda session, now: self._walk(peer, session.pre_round, now, event))
            case WorkAsked():
                vector = self.vector(event.round, event.seed)
                if peer.name in self.liars and event.round == peer.session.completed:
                    vector *= self.scale
                peer.do(lambda session, now: session.work.computed(now, event.number, vector))
            case ev.RoundCommitted() if event.contributors:
                replica: Any = peer.session.replica
                if event.round == peer.session.completed:
                    anchor = self.anchors.setdefault(
                        event.round, replica.anchor[: LAYOUT.numel].clone()
                    )
                    assert torch.equal(anchor, replica.anchor[: LAYOUT.numel])
                if event.cid is not None:
                    peer.contribute(f"{event.round}")
            case ev.ContributionRefused():
                self.refused[peer.name] = event.reason
            case ev.Equivocated() if peer.name not in self.liars:
                self.proofs.setdefault(event.peer, event)
                peer.session.membership.banned |= {event.peer}  # as the run's service does
            case ev.StateDiverged() | ev.PeerMisbehaved():
                raise AssertionError(event)
            case _:
                pass

    def _walk(self, peer: Peer, rounds: Any, now: float, event: WorkAsked) -> None:
        """All intervals of a peer's own work, in one of which a liar jumps; or one of another's,
        from the state that it has shown.
        """
        if event.interval >= 0:
            self.again[event.interval] = self.again.get(event.interval, 0) + 1
            start = rounds.work.starts(event.number)
            assert torch.isfinite(start).all()
            return rounds.work.computed(
                now, event.number, self.state_after(start, event.seed, event.interval)
            )
        state = self.anchors[event.round]
        for interval in range(self.intervals):
            state = self.state_after(state, event.seed, interval)
            said = state
            if (
                peer.name in self.liars
                and interval == event.seed[0] % self.intervals
                and interval < self.intervals - (self.jump != 2.0)
            ):
                said = state + self.jump
            state = said if self.jump == 2.0 else state
            rounds.work.computed(now, event.number, said, interval)
        return None

    def state_after(self, state: Tensor, seed: bytes, interval: int) -> Tensor:
        """One interval of local steps."""
        noise = torch.randn(
            LAYOUT.numel,
            generator=torch.Generator().manual_seed(int.from_bytes(seed[:6], "big") + interval),
        )
        return state - (0.1 * (state - OPTIMUM) + 0.02 * noise)

    def vector(self, round_: int, seed: bytes) -> Tensor:
        """What follows from an anchor and a seed."""
        noise = torch.randn(
            LAYOUT.numel, generator=torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        )
        return 0.2 * (self.anchors[round_] - OPTIMUM) + 0.05 * noise

    def recruit(self, attack: str) -> None:
        """Let the last two peers attack the protocol, and contribute what is right."""
        self.liars, self.scale, self.jump = {peer.name for peer in self.peers[-2:]}, 1.0, 0.0
        gang = Gang(
            {name: self.table.place.identities[name] for name in self.liars},
            {name: Random(name) for name in self.liars},
            self.table.world,
            self.gradient_of,
        )
        for peer in self.peers[-2:]:
            gang.recruit(btard_peer(peer), ATTACKS[attack])

    def gradient_of(self, step: int, peer: PeerId) -> Vector:
        """What is right for anybody, which attackers compute, too."""
        machine = btard_peer(self.peers[0])
        draw = first_draw(machine.run) if machine.previous is None else machine.previous.draw
        return self.vector(step, seed_of(draw, step, peer)).numpy()

    def until(self, what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Let time pass until something holds."""

        def look() -> bool:
            for peer in self.peers:
                while peer.node is not None and self._read[peer.name] < len(peer.heard):
                    self._read[peer.name] += 1
                    self._hear(peer, peer.heard[self._read[peer.name] - 1])
            return what()

        assert self.table.world.run(until=self.table.world.now + limit_s, stop=look), (
            sorted(self.anchors),
            self.refused,
        )

    def rounds(self, count: int) -> Callable[[], bool]:
        """Whether all honest peers that live have so many."""
        return lambda: all(
            peer.session.completed >= count
            for peer in self.peers
            if peer.node is not None and peer.name not in self.liars
        )

    def proven(self, peer: PeerId) -> str:
        """What the evidence against a peer proves, to anybody who has the manifest."""
        terms = self.table.place.settings.btard
        assert terms is not None
        found, what = check(
            self.proofs[peer].evidence, self.table.place.run_id, lambda *_: False, peer, terms.peers
        )
        assert found == peer
        return what


def btard_peer(peer: Peer) -> BtardPeer:
    """The state machine that a node of the run drives."""
    rounds = peer.session.pre_round
    assert isinstance(rounds, BtardRounds)
    machine = rounds._made()
    assert machine is not None
    return machine


def test_honest_peers_train_as_one() -> None:
    seeds = Seeds(4)
    seeds.until(seeds.rounds(12))
    assert not seeds.proofs
    assert float((seeds.anchors[12] - OPTIMUM).norm()) < 0.3 * float(OPTIMUM.norm())
    seeds.table.end()


def liars_are_removed_and_the_others_go_on(seeds: Seeds) -> None:
    seeds.until(lambda: seeds.liars <= seeds.proofs.keys())
    assert seeds.proofs.keys() == seeds.liars
    for liar in seeds.liars:
        assert seeds.proven(liar).startswith("its vector is not what follows from its seed")
    seeds.until(seeds.rounds(len(seeds.anchors) + 3))
    assert seeds.refused.keys() <= seeds.liars


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_who_lies_is_removed_with_evidence_and_the_others_go_on_through_loss(loss: float) -> None:
    seeds = Seeds(7, liars=2, validators=2)
    seeds.table.network.weather.loss = loss
    liars_are_removed_and_the_others_go_on(seeds)
    seeds.table.end()


@pytest.mark.parametrize("jump", [2.0, float("nan")])
def test_of_work_in_intervals_one_is_computed_again_and_who_jumps_in_it_is_removed(
    jump: float,
) -> None:
    """The liar jumps in one of two intervals a round, so a look finds it in one of two; validators
    compute no more than that interval, and nothing from what is no number, which the liar says it
    has passed through."""
    seeds = Seeds(5, liars=1, intervals=2)
    seeds.jump = jump
    liars_are_removed_and_the_others_go_on(seeds)
    assert seeds.again.keys() <= {0, 1}
    assert seeds.again
    seeds.table.end()


@pytest.mark.parametrize(
    ("attack", "fault"),
    [
        ("equivocation", Fault.EQUIVOCATION),
        ("withheld_parts", Fault.WITHHELD),
        ("wrong_aggregate", Fault.AGGREGATE),
        ("false_accusation", Fault.ACCUSATION),
        ("abort_abuse", Fault.WITHHELD),
        ("copied_commitments", Fault.WITHHELD),
        ("hidden_states", Fault.WITHHELD),
    ],
)
def test_attacks_on_the_protocol_end_with_the_attackers(attack: str, fault: Fault) -> None:
    seeds = Seeds(7, validators=2, intervals=3 if attack == "hidden_states" else 0)
    seeds.recruit(attack)
    seeds.until(lambda: seeds.liars <= seeds.proofs.keys())
    assert seeds.proofs.keys() == seeds.liars
    assert all(seeds.proven(liar).startswith(FAULTS[fault]) for liar in seeds.liars)
    seeds.until(seeds.rounds(len(seeds.anchors) + 3))
    assert seeds.refused.keys() <= seeds.liars
    seeds.table.end()


def test_with_a_log_that_bears_a_liar() -> None:
    seeds = Seeds(6, liars=1, validators=2, lying=1)
    seeds.until(lambda: seeds.liars <= seeds.proofs.keys())
    seeds.until(seeds.rounds(len(seeds.anchors) + 3))
    assert len(seeds.peers[0].session.config_peers()) == 5
    seeds.table.end()


@pytest.mark.slow
def test_nobody_votes_for_another_vector_than_its_own_step_came_to() -> None:
    """Two of five give the log copies of another vector, and plan with these: in their ballots no
    round is decided, and the others decide in theirs.
    """
    seeds = Seeds(5)
    liars = {peer.name for peer in seeds.peers[3:]}
    for peer in seeds.peers[3:]:
        rounds, machine = peer.session.pre_round, peer.machine
        assert isinstance(rounds, BtardRounds)
        end = rounds._end

        def theirs(machine: RoundMachine = machine) -> list[Contributor]:
            return [
                offer
                for offer in machine.open.offers(machine.draw.members)
                if offer.member.peer in liars
            ]

        machine.offers = theirs  # type: ignore[method-assign]

        def other(now: float, found: StepOutcome, kin: bytes, end: Any = end) -> None:
            wrong = StepOutcome(found.step, found.vector * -50, found.counted)
            end(now, wrong, wrong.kin)

        rounds._end = other  # type: ignore[method-assign]
    honest = seeds.peers[:3]
    seeds.until(
        lambda: all(peer.session.completed >= 5 for peer in honest), 4 * LIMIT_S
    )  # a ballot of a liar's takes long
    assert not seeds.proofs
    assert float((seeds.anchors[5] - OPTIMUM).norm()) < 0.5 * float(OPTIMUM.norm())
    assert not any(
        contributor.member.peer in liars
        for entry in entries(honest[0])
        for contributor in entry.contributors
    )
    seeds.table.end()


def entries(peer: Peer) -> list[Entry]:
    """All that its log has decided."""
    log = peer.machine.journal.entries
    return [log[index].entry for index in range(log.length)]


def test_who_stops_in_a_step_is_removed_and_takes_no_part_when_it_is_back() -> None:
    seeds = Seeds(5)
    seeds.until(seeds.rounds(2))
    gone = seeds.peers[-1]
    gone.kill()
    seeds.until(lambda: gone.name in seeds.proofs)
    assert seeds.proven(gone.name).startswith("it has withheld what it owes")
    seeds.until(seeds.rounds(4))
    gone.start().attach()
    seeds.until(lambda: gone.session.phase == "running")
    gone.contribute("again")
    seeds.until(lambda: gone.name in seeds.refused)
    assert "began again in the midst of the run" in seeds.refused[gone.name]
    seeds.table.end()


@pytest.mark.parametrize("stage", AttemptStage)
def test_who_dies_in_any_stage_of_a_step_is_the_only_one_removed(stage: AttemptStage) -> None:
    """The last two stages are of steps in which somebody is accused: there a liar is, too."""
    accused = stage >= AttemptStage.EXHIBITS
    seeds = Seeds(5, liars=1, intervals=2) if accused else Seeds(4)
    honest = [peer for peer in seeds.peers if peer.name not in seeds.liars]
    gone = honest.pop()

    def reached() -> bool:
        machine = gone.session.pre_round._peer  # type: ignore[union-attr]
        attempt = machine and machine.attempt
        return (
            attempt is not None
            and attempt.stage == stage
            and (accused or attempt.context.step >= 2)
        )

    seeds.until(reached)
    gone.kill()
    rounds = (
        honest[0].session.completed + 6
    )  # who is accused when, chance decides: these may not be the first ones
    seeds.until(lambda: all(peer.session.completed >= rounds for peer in honest))
    seeds.until(lambda: seeds.liars | {gone.name} <= seeds.proofs.keys())
    assert seeds.proofs.keys() == seeds.liars | {gone.name}
    assert seeds.proven(gone.name).startswith("it has withheld what it owes")
    seeds.table.end()


@pytest.mark.parametrize("rounds", [0, 3])
def test_who_has_lost_its_disk_says_nothing_of_steps_in_which_it_may_have_spoken(
    rounds: int,
) -> None:
    """Also of the first step, of which the log has nothing yet but that all were members; and
    though the others talk to it of steps while it has no more of the log than its beginning."""
    seeds = Seeds(5)
    seeds.until(
        lambda: (
            seeds.rounds(rounds)()
            and all(peer.session.pre_round.step == rounds for peer in seeds.peers)
        )
    )  # type: ignore[union-attr]
    gone = seeds.peers[-1]
    gone.kill()
    gone.storage = MemoryStorage(seeds.table.place.settings.outer, incarnation=1)
    gone.start().attach()
    seeds.until(lambda: gone.session.machine is not None and gone.session.phase == "running")
    gone.contribute("again")
    seeds.until(lambda: gone.name in seeds.refused)
    assert "began again in the midst of the run" in seeds.refused[gone.name]
    seeds.until(lambda: gone.name in seeds.proofs)
    assert seeds.proven(gone.name).startswith("it has withheld what it owes")
    seeds.until(lambda: all(peer.session.completed >= rounds + 3 for peer in seeds.peers[:-1]))
    seeds.table.end()


def test_evidence_of_peers_that_the_manifest_does_not_name_or_of_another_run_is_none() -> None:
    seeds = Seeds(5, liars=1)
    seeds.until(lambda: bool(seeds.proofs))
    (liar,), terms = seeds.liars, seeds.table.place.settings.btard
    assert terms is not None
    data = seeds.proofs[liar].evidence
    for run, peers in (
        ("other", terms.peers),
        ("run", terms.peers[1:]),
        ("run", ()),
        ("run", (*terms.peers, PeerId("another"))),
    ):
        with pytest.raises(RemoteProtocolError):
            check(data, run, lambda *_: True, liar, peers)  # type: ignore[arg-type]
    seeds.table.end()


def test_words_about_steps_are_read_or_refused() -> None:
    peer, header = Identity(bytes(32)).peer, VectorHeader(3, bytes(8), (Kind.PART, 1, 2))
    for said in (Offered(header, 5), Taken(bytes(32), ((0, 1),))):
        assert decode(encode(said)[1:], peer) == said
    long = msgspec.msgpack.encode(Taken(bytes(32), ((0, 1),) * (MOST_SPANS + 1)))
    for wrong in (
        b"",
        b"\x90",
        msgspec.msgpack.encode(Taken(bytes(31), ((0, 1),))),
        long,
        bytes(1 << 22),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(wrong, peer)
        assert caught.value.peer == peer
