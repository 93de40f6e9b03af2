"""The law of liveness (docs/internals/protocol/liveness.md): a quorum that lives goes on, whatever
the dead took with them.
"""

from __future__ import annotations

import contextlib
from random import Random

import msgspec
import pytest
from kits.rounds.swarm import Options, SimSwarm
from seeds import seeds
from session_table import SETTINGS, Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.group import Entry, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Said
from atoll.collectives.round.catching_up import CATCH_ENTRIES
from atoll.node.session import events as ev
from atoll.node.session.waiting import LONG_S

KEPT = 8  # rounds whose results are kept for laggards


def together(table: Table, peers: list[Peer], name: str) -> None:
    """One round in which these all contribute."""
    rounds = max(peer.session.completed for peer in peers)
    for peer in peers:
        peer.contribute(f"{name} {peer.name}")
    table.until(lambda: all(peer.session.completed > rounds for peer in peers))


def three_left(table: Table) -> tuple[Peer, Peer, Peer]:
    """Four members; the founder is killed for good and evicted."""
    founder, one, two, three = table.all_in()
    together(table, table.peers, "all")
    founder.kill()
    while len(one.session.config_peers()) > 3:
        together(table, [one, two, three], f"evict {one.session.round}")
    return one, two, three


def goes_on(table: Table, peers: list[Peer]) -> None:
    """They commit three more rounds, and hold the same bits."""
    table.until(
        lambda: all(
            peer.inside and not peer.machine.frontier and peer.session.phase == "running"
            for peer in peers
        )
    )
    for number in range(3):
        together(table, peers, f"again {number}")
    logs = [[c.entry.hash() for c in peer.machine.journal.entries.since(1)] for peer in peers]
    assert all(log == logs[0] for log in logs)
    anchors = [peer.session.replica.anchor.tolist() for peer in peers if peer.session.replica]
    assert anchors == [anchors[0]] * len(peers)


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("more", range(4))
def test_who_holds_the_newest_state_alone_brings_one_that_lags_up_to_it(
    more: int, loss: float
) -> None:
    """The holder's newest state has no later entry that certifies it, and no quorum offers it
    alike; checkpoints come every 4 entries.
    """
    table = Table(4)
    dies, holder, lags = three_left(table)
    lags.kill()
    for number in range(2 * KEPT + 5 + more):
        together(table, [dies, holder], f"without {number}")
    dies.kill()
    table.network.weather.loss = loss
    lags.start().attach()
    goes_on(table, [holder, lags])
    table.end()


def test_a_holder_that_was_started_again_does_so_too() -> None:
    table = Table(4)
    dies, holder, lags = three_left(table)
    lags.kill()
    while (holder.session.round) % 4 or holder.session.round < 3 * KEPT:
        together(table, [dies, holder], f"without {holder.session.round}")
    dies.kill()
    holder.kill()
    lags.start().attach()
    holder.start().attach()
    goes_on(table, [holder, lags])
    table.end()


# ---- nobody offers anything


@pytest.mark.parametrize("back", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dies", [None, 0, 1, 2, 3, 4])
def test_who_lost_its_home_is_let_in_where_nobody_trains(back: int, dies: int | None) -> None:
    """Whoever owns the first ballot of the open round: the earlier life of who comes back, one that
    died for good, or one that lives. An entry without contributors lets it in, and no other is
    decided after it.
    """
    if back == dies:
        return
    table = Table(5)
    table.all_in()
    together(table, table.peers, "first")
    table.peers[back].kill()
    if dies is not None:
        table.peers[dies].kill()
    new = table.peers[back]
    new.storage = table.storage(SETTINGS.outer)
    new.storage.journal().renew(7)
    new.start().attach()
    began = table.world.now
    table.until(lambda: new.inside and new.machine.me.incarnation == 7)
    assert table.world.now - began < 15.0
    live = [peer for peer in table.peers if peer.node is not None]
    table.until(lambda: len({peer.session.round for peer in live}) == 1)
    rounds = new.session.round
    table.wait(30.0)
    assert [peer.session.round for peer in live] == [rounds] * len(live)
    goes_on(table, live)
    table.end()


# ---- nobody waits in silence


def waits_of(peer: Peer) -> list[tuple[str, tuple[str, ...]]]:
    """What it has said that it waits for."""
    told = [event.waiting for event in peer.heard if isinstance(event, ev.StillWaiting)]
    return [(waiting.state, waiting.of) for waiting in told]


def test_where_members_may_lie_who_is_no_quorum_is_not_sent_to_recertify() -> None:
    """It is refused in such a run (E306), and more than a majority is needed."""
    table = Table(5, msgspec.structs.replace(SETTINGS, lying=1))
    first, *others = table.all_in()
    for peer in others[:2]:
        peer.kill()
    first.contribute("in vain")
    table.until(lambda: any(state == "no quorum" for state, _ in waits_of(first)))
    waiting = first.session.waits.look(table.world.now)
    assert waiting.what == "4 of 5 members; 3 can be counted on"
    assert "atoll export" in waiting.ends
    assert "recertify" not in waiting.ends


def test_who_is_no_quorum_says_so_and_of_whom_it_waits() -> None:
    table = Table(3)
    first, second, third = table.all_in()
    together(table, table.peers, "one")
    second.kill()
    third.kill()
    first.contribute("alone")
    table.until(lambda: ("no quorum", ("p1", "p2")) in waits_of(first))
    waiting = first.session.waits.look(table.world.now)
    assert (waiting.what, waiting.since > 0) == ("2 of 3 members; 1 can be counted on", True)
    assert "recertify" in waiting.ends
    second.start().attach()
    second.contribute("with it")
    table.until(lambda: any(isinstance(event, ev.WaitEnded) for event in first.heard))
    assert first.session.completed == 2
    table.end()


def test_a_swarm_whose_scripts_train_for_long_says_that_it_waits_for_them() -> None:
    table = Table(2)
    first, second = table.all_in()
    together(table, table.peers, "one")
    table.until(lambda: bool(waits_of(first) and waits_of(second)))
    assert waits_of(first) == waits_of(second) == [("training", ("p0", "p1"))]
    table.end()


def test_who_lacks_the_state_says_who_would_have_it() -> None:
    table = Table(3)
    _, second, third = table.all_in()
    together(table, table.peers, "one")
    for peer in table.peers:
        peer.kill()
    second.storage.states._checkpoint = second.storage.states._before = (
        None  # its disk lost the state only
    )
    second.start().attach()
    table.until(lambda: bool(waits_of(second)))
    assert waits_of(second)[-1] == ("lacking state", ("p0", "p2"))
    third.start().attach()
    goes_on(table, [second, third])
    table.end()


def lose(peer: Peer, *, incarnation: int | None = None) -> None:
    """Its home is gone, and it begins as this life (by its clock); or its state only is, where None
    is given."""
    if incarnation is None:
        peer.storage.states._checkpoint, peer.storage.states._before, peer.storage.results._kept = (
            None,
            None,
            {},
        )
    else:
        peer.storage = peer.table.storage(SETTINGS.outer)
        peer.storage.journal().renew(incarnation)


def three_stopped(rounds: int) -> Table:
    """Three members after so many rounds; all were killed."""
    table = Table(3)
    table.all_in()
    for number in range(rounds):
        together(table, table.peers, f"round {number}")
    for peer in table.peers:
        peer.kill()
    return table


def test_where_the_organiser_is_dead_newcomers_without_a_log_name_it_and_not_one_another() -> None:
    table = three_stopped(3)
    founder, second, third = table.peers
    for peer in (second, third):
        lose(peer, incarnation=50)
        peer.start().attach()
    table.until(lambda: all(waits_of(peer) for peer in (second, third)))
    table.wait(20.0)
    assert waits_of(second)[-1] == waits_of(third)[-1] == ("waiting for peers", ("p0",))
    founder.start().attach()
    table.until(lambda: waits_of(second)[-1:] == [("no quorum", ("p1", "p2"))])
    table.end()


@pytest.mark.parametrize("late_s", [0.0025, 0.01, 0.1])
def test_who_came_half_in_names_the_dead_organiser(late_s: float) -> None:
    """It died when the newcomers had the beginning of the log, and no state yet."""
    table = Table(3)
    founder = table.found()
    table.wait(1.0)
    newcomers = [peer.start().attach() for peer in table.peers[1:]]
    table.wait(late_s)
    founder.kill()
    table.until(lambda: all(waits_of(peer) for peer in newcomers))
    table.wait(20.0)
    assert [waits_of(peer)[-1] for peer in newcomers] == [("lacking state", ("p0",))] * 2
    founder.start().attach()
    goes_on(table, table.peers)
    table.end()


def test_where_every_log_or_state_is_lost_nobody_is_waited_for_in_vain() -> None:
    """One has the journal, two have nothing; or all three have journals, and no state."""
    for lost in ((None, 50, 50), (None, None, None), (60, 50, None), (60, 50, 50)):
        table = three_stopped(6)
        for peer, incarnation in zip(table.peers, lost, strict=True):
            lose(peer, incarnation=incarnation)
            peer.start().attach()
        table.until(lambda peers=table.peers: all(waits_of(peer) for peer in peers))
        table.wait(20.0)
        for peer in table.peers:
            waiting = peer.session.waits.look(table.world.now)
            state = "lacking state" if None in lost else "waiting for peers"
            assert (waiting.state, waiting.of) == (state, ())
            assert "seeks it, too" in waiting.what
            assert "backup" in waiting.ends
        table.end()


def test_a_run_that_nobody_has_begun_waits_for_a_script_of_its_organiser() -> None:
    table = Table(2)
    first, second = (peer.start() for peer in table.peers)
    table.until(lambda: all(waits_of(peer) for peer in (first, second)))
    mine, others = (peer.session.waits.look(table.world.now) for peer in (first, second))
    assert mine.what.startswith("a script of yours, with whose model the run begins: none has")
    assert mine.ends == "one trains here"  # its script may be loading a model
    assert others.what.startswith("the beginning of the run's log")
    assert others.ends == "the organiser's script begins the run"
    later = table.world.now + LONG_S
    for peer, ends in ((first, mine.ends), (second, others.ends)):
        assert peer.session.waits.look(later).ends.startswith(f"{ends}; if the run had begun")
    table.end()


def test_where_folders_of_two_lives_were_exchanged_all_name_the_lives_that_are_missing() -> None:
    """(A node refuses such a folder, but for one that names no owner.) The second was in its 51st
    life and the third in its first. Each is another life now than the configuration says.
    """
    table = Table(3)
    first, second, third = table.all_in()
    together(table, table.peers, "first")
    second.kill()
    lose(second, incarnation=50)
    second.start().attach()
    table.until(lambda: second.inside)
    together(table, table.peers, "second")
    for peer in table.peers:
        peer.kill()
    second.storage, third.storage = third.storage, second.storage
    for peer in table.peers:
        peer.start().attach()
    for peer in table.peers:
        table.until(lambda peer=peer: waits_of(peer)[-1:] == [("no quorum", ("p1", "p2"))])
        what = peer.session.waits.look(table.world.now).what
        assert "p1 lives on from an older folder" in what
        assert "p2 lives on as another member" in what
    assert first.session.completed == 2
    table.end()


def test_a_member_that_lost_its_state_but_not_its_journal_goes_on_as_the_same_life() -> None:
    """It takes an older state from the one that is left, and the results of what its own journal
    knows.
    """
    table = Table(3)
    _, second, third = table.all_in()
    for number in range(6):
        together(table, table.peers, f"round {number}")
    for peer in table.peers:
        peer.kill()
    second.storage.states._checkpoint, second.storage.results._kept = (
        second.storage.states._before,
        {},
    )
    second.start().attach()
    third.start().attach()
    goes_on(table, [second, third])
    assert second.machine.me.incarnation == 0
    table.end()


def test_a_member_that_lacks_a_result_which_nobody_keeps_takes_a_newer_state() -> None:
    """Its checkpoint is behind its journal, and the results between are gone with the disk; the
    state that comes is beyond both.
    """
    table = Table(3)
    first, second, third = table.all_in()
    for number in range(6):
        together(table, table.peers, f"round {number}")
    third.kill()
    third.storage.results._kept = {}
    while first.session.round < 3 * KEPT:
        together(table, [first, second], f"without {first.session.round}")
    third.start().attach()
    goes_on(table, [first, second, third])
    assert third.machine.me.incarnation == 0
    table.end()


# ---- backups


@pytest.mark.parametrize("back", [3, 15])
@pytest.mark.parametrize("organiser", [True, False])
def test_a_run_of_two_goes_on_when_one_of_them_comes_back_from_a_backup(
    organiser: bool, back: int
) -> None:
    """What it has voted for since is in the log: it goes on as a new member, and the organiser's
    gives its earlier life up by itself.
    """
    table = Table(2)
    first, second = table.all_in()
    peer, other = (first, second) if organiser else (second, first)
    together(table, table.peers, "first")
    backup = peer.storage.copy()
    for number in range(back):
        together(table, table.peers, f"round {number}")
    peer.kill()
    peer.storage = backup
    peer.start().attach()
    goes_on(table, [first, second])
    renewed = [event for event in peer.heard if isinstance(event, ev.Renewed)]
    assert [event.incarnation for event in renewed] == [1]
    assert peer.machine.me.incarnation == 1
    assert other.machine.me.incarnation == 0
    table.end()


def test_a_copy_from_within_the_open_round_is_known_by_what_another_heard() -> None:
    """The promise that it has forgotten is in no certificate: who heard it tells."""
    table = Table(3)
    first = table.all_in()[0]
    together(table, table.peers, "first")
    named = {peer.name: peer for peer in table.peers}
    dead, convener, copied = (named[first.machine.convener_of(ballot).peer] for ballot in range(3))
    backup, round_ = copied.storage.copy(), convener.machine.round
    dead.kill()
    for peer in (convener, copied):
        peer.contribute(f"second {peer.name}")
    table.until(lambda: convener.machine.recovery.heard_of.of(copied.name) == Said(0, round_, 1))
    copied.kill()
    copied.storage = backup
    assert backup.journal().promised == -1
    copied.start().attach()
    table.until(lambda: copied.machine.me.incarnation == 1)
    assert convener.machine.round == round_
    dead.start().attach()
    goes_on(table, table.peers)
    assert [event.incarnation for event in copied.heard if isinstance(event, ev.Renewed)] == [1]
    assert (dead.machine.me.incarnation, convener.machine.me.incarnation) == (0, 0)
    table.end()


def test_a_copy_is_known_by_a_life_that_was_renewed_before_it() -> None:
    """The same backup comes back twice. Who answers first heard the first life only; the second
    life of this home was another process, so it takes a third.
    """
    table = Table(3)
    first, second, copied = table.all_in()
    together(table, table.peers, "first")
    backup = copied.storage.copy()
    together(table, table.peers, "second")
    copied.kill()
    first.kill()
    copied.storage = backup.copy()
    copied.start().attach()
    table.until(lambda: copied.machine.me.incarnation == 1)
    first.start().attach()
    goes_on(table, table.peers)
    for peer in table.peers:
        peer.kill()
    copied.storage = backup
    first.start().attach()
    copied.start().attach()
    second.start().attach()
    goes_on(table, table.peers)
    assert [peer.machine.me.incarnation for peer in table.peers] == [0, 0, 2]
    table.end()


def test_a_life_that_is_renewed_asks_whether_it_is_one_that_was_renewed_before() -> None:
    """One member heard its first life, another its second, which no certificate shows."""
    table = Table(3)
    first, second, copied = table.all_in()
    together(table, table.peers, "first")
    copied.kill()
    first.kill()
    second.kill()
    copied.start()
    machine = copied.machine
    table.wait(0.2)
    assert machine.recovery.check is not None
    round_ = machine.round
    catch = m.Catch((), round_, 0, machine.recovery.check.nonce, Said(0, round_, 1))
    machine.on_message(table.world.now, first.name, 0, round_, catch)
    table.until(lambda: machine.me.incarnation == 1)
    table.wait(0.2)
    assert machine.recovery.check is not None
    assert machine.recovery.check.waits
    assert machine.recovery.check.nonce != catch.anew
    catch = m.Catch((), round_, 0, machine.recovery.check.nonce, Said(1, round_ + 4, 0))
    machine.on_message(table.world.now, second.name, 0, round_, catch)
    table.until(lambda: machine.me.incarnation == 2)
    for peer in (first, second):
        peer.start().attach()
    copied.attach()
    goes_on(table, table.peers)
    table.end()


def test_only_an_answer_of_who_was_asked_counts() -> None:
    """Not one of a stranger to whom a member gave the question away, nor one of before."""
    table = Table(3)
    first, second, asks = table.all_in()
    together(table, table.peers, "first")
    for peer in table.peers:
        peer.kill()
    asks.start().attach()
    machine = asks.machine
    table.wait(0.2)
    assert machine.recovery.check is not None
    round_, nonce, high = machine.round, machine.recovery.check.nonce, Said(3, 99, 0)
    for who, anew in (("p9", nonce), (first.name, 0), (second.name, nonce + 1)):
        catch = m.Catch((), 1_000, 0, anew, high)
        machine.on_message(table.world.now, PeerId(who), 0, round_, catch)
    assert (machine.recovery.forgotten, machine.recovery.check.answered(1_000)) == (0, [])
    first.start().attach()
    table.until(lambda: machine.may_act)
    second.start().attach()
    goes_on(table, table.peers)
    assert machine.me.incarnation == 0
    table.end()


def test_who_begins_with_an_empty_home_asks_nobody_and_who_is_alone_waits_for_nobody() -> None:
    table = Table(2)
    founder = table.found()
    together(table, [founder], "first")
    founder.kill()
    founder.start()
    assert founder.machine.may_act
    joiner = table.peers[1].start().attach()
    table.until(lambda: joiner.session.machine is not None)
    assert joiner.machine.recovery.check is None
    founder.attach()
    goes_on(table, table.peers)
    table.end()


def test_members_that_all_start_again_at_once_go_on_as_who_they_were() -> None:
    """Each asks the others, who have heard nothing yet, and answer at once; one lags."""
    table = Table(3)
    _, lags, _ = table.all_in()
    together(table, table.peers, "first")
    lags.kill()
    together(table, [peer for peer in table.peers if peer is not lags], "second")
    for peer in table.peers:
        if peer is not lags:
            peer.kill()
    for peer in table.peers:
        peer.start().attach()
    assert not any(peer.machine.may_act for peer in table.peers)
    began = table.world.now
    table.until(lambda: all(peer.machine.may_act for peer in table.peers))
    assert table.world.now - began < 1.0
    goes_on(table, table.peers)
    assert [peer.machine.me.incarnation for peer in table.peers] == [0, 0, 0]
    table.end()


@pytest.mark.parametrize("late_s", [0.5, 3.0, 8.0])
def test_an_organiser_of_two_from_a_backup_decides_nothing_before_the_other_is_back(
    late_s: float,
) -> None:
    """It is a quorum alone: what it decided again, before it hears what it has forgotten, would be
    a second history.
    """
    table = Table(2)
    first, second = table.all_in()
    together(table, table.peers, "first")
    backup = first.storage.copy()
    for number in range(12):
        together(table, table.peers, f"round {number}")
    decided = [certified.entry.hash() for certified in second.machine.journal.entries]
    for peer in table.peers:
        peer.kill()
    first.storage = backup
    first.start().attach()
    held = len(first.machine.journal.entries)
    first.contribute("again")
    table.wait(late_s)
    assert len(first.machine.journal.entries) == held
    assert not first.inside
    assert first.session.waits.look(table.world.now).of == (second.name,)
    second.start().attach()
    goes_on(table, [first, second])
    log = [certified.entry.hash() for certified in first.machine.journal.entries]
    assert log[: len(decided)] == decided
    assert first.machine.me.incarnation == 1
    table.end()


def test_an_organiser_of_two_goes_on_alone_when_the_other_stays_dead() -> None:
    """It waits for it, some seconds, and no longer."""
    table = Table(2)
    first, second = table.all_in()
    together(table, table.peers, "first")
    for peer in table.peers:
        peer.kill()
    first.start().attach()
    began, rounds = table.world.now, first.session.completed
    first.contribute("alone")
    table.until(lambda: first.session.completed > rounds)
    assert 10 < table.world.now - began < 15
    assert first.machine.me.incarnation == 0
    assert second.name not in first.session.config_peers()
    table.end()


@pytest.mark.parametrize("shows", ["nothing", "old entries"])
def test_an_organiser_of_two_does_not_wait_for_ever_for_entries_that_nobody_shows(
    shows: str,
) -> None:
    """The other one says that it has a thousand entries, each time that it is asked."""
    table = Table(2)
    first, second = table.all_in()
    together(table, table.peers, "first")
    old = tuple(second.machine.journal.entries.since(1)) if shows == "old entries" else ()
    for peer in table.peers:
        peer.kill()
    first.start().attach()
    machine = first.machine

    def lie() -> None:
        if not first.inside and (check := machine.recovery.check) is not None:
            catch = m.Catch(old, 1_000, 0, check.nonce)
            with contextlib.suppress(RemoteProtocolError):
                machine.on_message(table.world.now, second.name, 0, machine.round, catch)
            table.world.after(0.2, lie)

    table.world.after(0.3, lie)
    began, rounds = table.world.now, first.session.completed
    first.contribute("alone")
    table.until(lambda: first.session.completed > rounds)
    assert 10 < table.world.now - began < 16
    table.end()


def test_an_organiser_of_two_that_was_only_killed_waits_for_nothing_but_an_answer() -> None:
    """The other lives and knows of nothing later: it goes on in the time of a question."""
    table = Table(2)
    first, _ = table.all_in()
    together(table, table.peers, "first")
    first.kill()
    first.start().attach()
    began = table.world.now
    table.until(lambda: first.inside)
    assert table.world.now - began < 3
    goes_on(table, table.peers)
    assert [event for event in first.heard if isinstance(event, ev.Renewed)] == []
    table.end()


def test_of_two_of_three_one_that_comes_back_from_a_backup_waits_for_the_third_and_says_so() -> (
    None
):
    """Its earlier life was one of the quorum. The third may have decided with it what nobody else
    knows.
    """
    table = Table(3)
    _, second, third = table.all_in()
    together(table, table.peers, "first")
    backup = second.storage.copy()
    for number in range(15):
        together(table, table.peers, f"round {number}")
    for peer in table.peers:
        peer.kill()
    second.storage = backup
    second.start().attach()
    third.start().attach()
    table.until(lambda: waits_of(third)[-1:] == [("no quorum", ("p0", "p1"))])
    table.until(lambda: waits_of(second)[-1:] == [("no quorum", ("p0", "p1"))])
    assert "p1 lives on as another member" in third.session.waits.look(table.world.now).what
    table.peers[0].start().attach()
    goes_on(table, table.peers)
    table.end()


def test_a_member_that_was_only_killed_stays_the_same_life() -> None:
    """It has voted for what was decided while it was dead, and its journal knows."""
    table = Table(3)
    first, second, third = table.all_in()
    for number in range(4):
        for peer in table.peers:
            peer.contribute(f"{number} {peer.name}")
        table.until(lambda: second.machine.journal.accepted is not None)
        second.kill()
        table.until(
            lambda number=number: first.session.completed == third.session.completed > number
        )
        second.start().attach()
        table.until(lambda: second.session.phase == "running" and not second.machine.frontier)
        table.until(lambda: second.session.completed == first.session.completed)
    assert [event for event in second.heard if isinstance(event, ev.Renewed)] == []
    table.end()


# ---- one key, one life


class Fan:
    """Two processes under one name, each of which hears all that is sent to it."""

    def __init__(self, table: Table, peer: Peer) -> None:
        self.table, self.peer = table, peer
        self.twin = Peer(table, peer.name)
        self.twin.storage = peer.storage.copy()
        self.twin.lives = 100  # another stream of random numbers

    def start(self) -> Peer:
        """The twin begins."""
        node = self.peer.node
        assert node is not None
        self.twin.start().attach()
        network, both = self.table.network, (node.deliver, self.twin.node.deliver)  # type: ignore[union-attr]
        network.detach(self.peer.name)
        network.attach(self.peer.name, lambda *what: [deliver(*what) for deliver in both])
        return self.twin


@pytest.mark.parametrize("count", [2, 3, 5])
def test_two_processes_with_one_key_find_one_another_and_take_no_more_part(count: int) -> None:
    table = Table(count)
    *rest, peer = table.all_in()
    together(table, table.peers, "first")
    twin = Fan(table, peer).start()
    began = table.world.now
    table.until(lambda: peer.session.doubled and twin.session.doubled)
    assert table.world.now - began < 10.0
    table.until(lambda: all(one.session.membership.doubled(peer.name) for one in rest))
    assert table.world.now - began < 10.0
    for one in (peer, twin):
        assert one.session.waits.look(table.world.now).state == "doubled"
        assert [event for event in one.heard if isinstance(event, ev.Doubled)] == [ev.Doubled()]
    together(table, rest, "without them")
    assert peer.name not in [
        c.member.peer for c in rest[0].machine.journal.entries[-1].entry.contributors
    ]
    table.end()


def test_a_copy_that_knows_only_a_doubled_organiser_learns_the_log_from_others() -> None:
    """The copy is of a time when the organiser alone was a member, and its own life was evicted
    since: nobody of its configuration takes part, though two beat under the organiser's key.
    """
    table = Table(5)
    founder = table.found()
    *rest, copied = table.peers[1:]
    copied.start()
    table.until(lambda: copied.session.machine is not None and not copied.machine.stateless)
    backup = copied.storage.copy()
    assert [who.peer for who in copied.machine.config] == [founder.name]
    for peer in (*rest, copied.attach()):
        if peer is not copied:
            peer.start().attach()
    table.until(lambda: all(len(peer.session.config_peers()) == 5 for peer in table.peers))
    together(table, table.peers, "first")
    copied.kill()
    while len(rest[0].session.config_peers()) > 4:
        together(table, [founder, *rest], f"evict {rest[0].session.round}")
    twin = Fan(table, founder).start()
    table.until(lambda: all(one.session.membership.doubled(founder.name) for one in rest))
    copied.storage = backup
    copied.start().attach()
    table.until(lambda: copied.session.membership.doubled(founder.name))
    goes_on(table, [*rest, copied])
    assert founder.session.doubled
    assert twin.session.doubled
    assert not any(one.session.membership.live(table.world.now, founder.name) for one in rest)
    table.end()


def watch(votes: dict[tuple[int, int], set[bytes]], peer: Peer) -> None:
    """Note what a peer votes for from now on, by round and ballot, whichever life it is of."""
    journal = peer.storage.journal()
    accept = journal.accept

    def note(ballot: int, entry: Entry, *proof: tuple[Vote, ...]) -> None:
        votes.setdefault((entry.round, ballot), set()).add(entry.hash())
        accept(ballot, entry, *proof)

    journal.accept = note  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", seeds(8, 24))
def test_of_two_processes_with_one_key_none_votes_for_what_the_other_did_not(seed: int) -> None:
    """The twin begins at any moment of a round, from a copy of that moment; ATOLL_SEEDS=200 for so
    many trials.
    """
    rng = Random(seed)
    table = Table(rng.choice((2, 3, 3, 4, 5)))
    *rest, peer = table.all_in()
    together(table, table.peers, "first")
    votes = dict[tuple[int, int], set[bytes]]()
    watch(votes, peer)
    for one in table.peers:
        one.contribute(f"of {one.name}")
    table.wait(rng.choice((0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 1.0))))
    fan = Fan(table, peer)
    watch(votes, fan.twin)
    began, twin = table.world.now, fan.start()
    table.until(lambda: peer.session.doubled and twin.session.doubled)
    table.until(lambda: all(one.session.membership.doubled(peer.name) for one in rest))
    assert table.world.now - began < 10.0
    if len(rest) > 1:
        together(table, rest, "without them")
    assert votes
    assert [key for key, entries in votes.items() if len(entries) > 1] == []
    table.end()


def test_a_process_that_was_started_again_is_not_its_own_double() -> None:
    table = Table(3)
    first, second, third = table.all_in()
    for _ in range(3):
        second.kill()
        second.start().attach()
        table.wait(6.0)
    assert not any(peer.session.membership.doubled(second.name) for peer in (first, second, third))
    goes_on(table, table.peers)
    table.end()


def test_a_newcomer_learns_the_log_though_all_that_it_knows_as_members_died() -> None:
    """It has the genesis, which names the founder alone; the founder dies, and who was let in since
    goes on.
    """
    swarm = SimSwarm(1, Options(peers=(4, 4), faults=(), rounds=500, fragments=1))
    swarm._start()
    founder, one, _, late = swarm.names

    def config(peer: PeerId) -> set[PeerId]:
        process = swarm.members[peer].process
        machine = process.session.machine if process is not None else None
        return {member.peer for member in machine.config} if machine is not None else set()

    assert swarm.world.run(until=10.0, stop=lambda: config(late) == {founder})
    swarm.freeze(late)
    assert swarm.world.run(until=10.0, stop=lambda: len(config(one)) >= 3)
    swarm.thaw(late)
    swarm.deaths.bury(founder)
    assert swarm.world.run(until=40.0, stop=lambda: config(late) == {*swarm.names} - {founder})


def test_a_newcomer_that_knows_a_part_of_the_log_learns_the_rest_from_who_lives() -> None:
    """More of it than one answer holds; all members that these entries name are dead, and nobody
    keeps results so old.
    """
    table = Table(4)
    founder = table.found()
    one, two, late = table.peers[1:]
    for number in range(CATCH_ENTRIES + 2):
        together(table, [founder], f"alone {number}")
    late.start()
    assert late.node is not None
    table.until(
        lambda: late.session.machine is not None and len(late.machine.frontier) > CATCH_ENTRIES
    )
    assert late.machine.round == 1
    late.node.freeze()
    for peer in (one, two):
        peer.start().attach()
    table.until(lambda: one.inside and two.inside)
    for number in range(2 * KEPT):
        together(table, [founder, one, two], f"with two {number}")
    founder.kill()
    late.node.thaw()
    late.attach()
    table.until(lambda: late.machine.round == one.machine.round)
    together(table, [one, two], "lets it in")
    goes_on(table, [one, two, late])
    table.end()
