"""Without a quorum: branches, and what becomes of them when a quorum is back. Directed schedules;
random ones are in test_rounds.
"""

from __future__ import annotations

import pytest
from kits.rounds.branch_plants import BranchPlant
from kits.rounds.member import SimMember
from kits.rounds.swarm import run_seed
from quiet_stage import QuietStage

from atoll.collectives.group import Entry
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import adopted_rounds
from atoll.node.session.events import BranchAdvanced, BranchEnded, StateProgress, StateReady

P0, P1, P2 = map(PeerId, ("p0", "p1", "p2"))
GONE_ROUNDS = 40  # results of so long ago are kept nowhere: they go back to the older checkpoint
SEEDS = (1, 2, 4)  # any three


class Stage(QuietStage):
    """Three members, of whom some die, or are cut off, until they come back at ``back_s``; the
    others go on in branches.
    """

    def __init__(
        self, seed: int, *, after_s: float | None = 1.0, back_s: float = 16.0, peers: int = 3
    ) -> None:
        super().__init__(seed, peers=peers, branch_after_s=after_s, back_s=back_s)
        self.advanced: list[tuple[PeerId, BranchAdvanced]] = []
        self.ended: list[tuple[PeerId, BranchEnded]] = []
        heard = self.swarm.heard

        def hear(member: SimMember, event: object) -> None:
            if isinstance(event, BranchAdvanced):
                self.advanced.append((member.peer, event))
            if isinstance(event, BranchEnded):
                self.ended.append((member.peer, event))
            heard(member, event)

        self.swarm.heard = hear

    def adopted(self) -> list[Entry]:
        return [
            certified.entry
            for certified in self.swarm.checker.entries
            if adopted_rounds(certified.entry)
        ]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_work_of_a_lone_survivor_is_adopted_and_counted_once(seed: int) -> None:
    stage = Stage(seed)
    stage.strike((0, lambda: stage.die(P0, P1)))
    verdict = stage.run()
    assert verdict.problem == ""
    [entry] = stage.adopted()
    assert {c.member.peer for c in entry.contributors} == {P2}
    assert adopted_rounds(entry) == len([e for peer, e in stage.advanced if peer == P2]) > 2
    [(who, ended)] = stage.ended
    assert (who, ended.adopted, ended.lost) == (P2, True, ())


@pytest.mark.parametrize("seed", [1, 4, 6, 8])
def test_who_comes_back_soon_adopts_all_that_was_done_though_the_survivor_had_asked_before(
    seed: int,
) -> None:
    """It convened a ballot before its branch began: its own promise of then knew of no branch."""
    stage = Stage(seed, back_s=6.2)
    stage.strike((0, lambda: stage.die(P0, P1)))
    assert stage.run().problem == ""
    [entry] = stage.adopted()
    assert adopted_rounds(entry) == len([e for peer, e in stage.advanced if peer == P2]) > 1
    assert [ended.lost for _, ended in stage.ended] == [()]


@pytest.mark.parametrize("back_s", [5.0, 6.2])
def test_two_who_come_back_together_do_not_decide_past_the_branch_of_one_who_has_promised_more(
    back_s: float,
) -> None:
    """They are a quorum, and the survivor convened a later ballot than theirs before its branch
    began: it once did not answer them.
    """
    stage = Stage(7, back_s=back_s)
    stage.strike((0, lambda: stage.die(P0, P1)))
    assert stage.run().problem == ""
    [entry] = stage.adopted()
    assert adopted_rounds(entry) == len([e for peer, e in stage.advanced if peer == P2]) > 1
    assert [ended.lost for _, ended in stage.ended] == [()]


def test_with_the_pause_policy_nothing_happens_until_a_quorum_is_back() -> None:
    stage = Stage(1, after_s=None)
    stage.strike((0, lambda: stage.die(P0, P1)))
    verdict = stage.run()
    assert verdict.problem == ""
    assert (stage.adopted(), stage.advanced, stage.ended) == ([], [], [])


def test_of_two_branches_the_one_with_more_samples_is_adopted_and_the_other_reports_its_loss() -> (
    None
):
    """The founder is dead, the other two each alone: one branch stays behind, and says how many
    contributions no entry will count.

    Where one of the two voted for an entry before it missed the others, that is decided and nothing
    adopted: then another seed shows it.
    """
    for seed in range(1, 10):
        stage = Stage(seed)
        stage.strike(
            (0, lambda stage=stage: stage.die(P0)),
            (0, lambda stage=stage: stage.swarm.network.partition({P0: 0, P1: 1, P2: 2})),
            (5, lambda stage=stage: stage.swarm.network.partition(None)),
        )
        assert stage.run().problem == ""
        if stage.adopted():
            return both_told(stage)
    pytest.fail("of 9 schedules none led to an adoption")


def both_told(stage: Stage) -> None:
    """The longer branch is in the log, the other one's member knows its loss."""
    [entry] = stage.adopted()
    [winner] = {c.member.peer for c in entry.contributors}
    lengths = {who: len([1 for peer, _ in stage.advanced if peer == who]) for who in (P0, P1, P2)}
    assert adopted_rounds(entry) == max(lengths.values()) == lengths[winner]
    assert {(who, ended.adopted, len(ended.lost)) for who, ended in stage.ended} == {
        (who, who == winner, 0 if who == winner else rounds)
        for who, rounds in lengths.items()
        if rounds
    }
    for who in (P1, P2):
        record = stage.swarm.members[who].storage.branch()
        assert record is not None
        assert lengths[who] > 0
        assert (record.tip, record.lost) == (None, 0 if who == winner else lengths[who])


def test_two_of_five_go_on_together_and_a_restart_in_a_branch_resumes_it() -> None:
    stage = Stage(104, peers=5)
    stage.strike(
        (0, lambda: stage.die(P0, P1, P2)),
        (3, lambda: stage.die(PeerId("p3"))),
        (3.2, lambda: stage.swarm.restart(PeerId("p3"))),
    )
    verdict = stage.run()
    assert verdict.problem == ""
    [entry] = stage.adopted()
    assert {c.member.peer for c in entry.contributors} == {"p3", "p4"}
    before = len([e for peer, e in stage.advanced if peer == "p4" and len(e.contributors) == 2])
    assert adopted_rounds(entry) > 2
    assert before > 0
    assert all(ended.adopted and not ended.lost for _, ended in stage.ended)
    assert verdict.stats["branch begun"] == 4  # two members, before and after the restart


def test_a_convener_that_is_on_no_branch_fetches_the_tip_that_it_adopts() -> None:
    """In such seeds the round once stood still for ever: the tip's members did not know the name by
    which it was asked for.
    """
    absorbed = 0
    for seed in (22, 23, 29, 31):  # what a seed plays moves with every change of timing
        verdict = run_seed(seed, plant=BranchPlant())
        assert (seed, verdict.problem) == (seed, "")
        absorbed += verdict.stats["branches absorbed"]
    assert absorbed >= 1


def test_a_run_that_ends_in_a_branch_leaves_nothing_in_the_data_plane() -> None:
    stage, held = Stage(1), list[tuple[int, int]]()

    def end() -> None:
        process = stage.swarm.members[P2].process
        assert process is not None
        assert process.session.branching.branch is not None
        assert process.plane._slots
        assert process.plane._frozen
        process.run.drop()
        held.append((len(process.plane._slots), len(process.plane._frozen)))
        stage.die(P2)

    stage.strike((0, lambda: stage.die(P0, P1)), (4, end))
    assert stage.run().problem == ""
    assert held == [(0, 0)]


@pytest.mark.parametrize("seed", [5, 6, 8, 9])
def test_a_branch_goes_no_further_while_a_fetched_state_is_being_installed(seed: int) -> None:
    """One member alone is so far behind that it fetches the others' state. What its script gives
    meanwhile was once added to that state.
    """
    stage, alone = Stage(seed, peers=4, after_s=0.5), PeerId("p3")
    heard, swarm = stage.swarm.heard, stage.swarm

    def behind() -> bool:
        if stage.struck_at is None:
            return False
        [mine], [theirs] = stage.sessions(alone), stage.sessions(P0)
        return mine.branching.rounds > 0 and theirs.round - mine.round > GONE_ROUNDS

    def hear(member: SimMember, event: object) -> None:
        heard(member, event)
        if (
            isinstance(event, StateProgress) and stage.struck_at is not None
        ):  # all of it is here: installing it takes long
            swarm.place.work_s = 1.0
        if isinstance(event, StateReady):
            swarm.place.work_s = 0.002

    swarm.heard, swarm.train_s = hear, 0.1
    stage.strike((0, lambda: swarm.network.partition({P0: 0, P1: 0, P2: 0, alone: 1})))
    stage.once(behind, (0, lambda: swarm.network.partition(None)))
    assert stage.run().problem == ""
    assert swarm.stats["state ready"] > 4
