"""Verdicts over rounds: each with a cause, raised in time and withdrawn; none in healthy rounds."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from atoll.node.home.errors_catalogue import PAGES as ERRORS
from atoll.node.run import diary
from atoll.node.run.events import RoundCommittedEvent, RunEvent, Slowest, read_event
from atoll.node.run.verdicts import (
    CLOCK_S,
    FALLEN_S,
    GONE_S,
    KEPT,
    PAGES,
    QUIET_S,
    Verdict,
    VerdictChange,
    Verdicts,
    judge,
)
from atoll.node.views.event_words import Words
from atoll.node.watching.judging import Notifier, RunVerdicts
from atoll.optim.script.adoption import AdoptionLosses

Event = RunEvent
PEERS = [f"peer{n}" for n in range(8)]


class Run:
    """A run's events, as a node would publish them, from a seed: times are log-normal, losses fall
    with noise, peers come and go, and now and then something is odd once.
    """

    def __init__(self, seed: int, peers: int = 8) -> None:
        self.rng, self.at, self.number = random.Random(seed), 1e9, 0
        self.members, self.live = PEERS[:peers], peers
        self.loss = 4.0
        self.dropped = 0
        self.seconds = 2.0

    def event(self, kind: str, **told: Any) -> Event:
        return read_event({"at": self.at, "event": kind, "run": "r", **told})

    def round(self, *, factor: float = 1.0, mine: float = 1.0, loss: float = 1.0) -> list[Event]:
        """One round; ``mine`` multiplies this script's loss, ``loss`` that of the first peer."""
        rng = self.rng
        self.number += 1
        seconds = self.seconds * factor * rng.lognormvariate(0, 0.25)
        self.at += seconds + 20
        self.loss = 1.5 + (self.loss - 1.5) * 0.999
        losses = {peer: self.loss * rng.lognormvariate(0, 0.05) for peer in self.members}
        losses[self.members[0]] *= loss
        needed = len(self.members) // 2 + 1
        reach = {"reachable": self.live, "members": len(self.members), "needed": needed}
        metrics = {"step": self.number, "loss": self.loss * mine * rng.lognormvariate(0, 0.05)}
        return [
            self.event(
                "reduction.timed",
                slowest={"peer": rng.choice(self.members), "phase": "gather", "behind_s": 0.1},
            ),
            self.event(
                "round.committed",
                round=self.number,
                contributors=dict.fromkeys(self.members, 64),
                members=self.members,
                lost=[],
                elapsed_s=seconds,
                counted=True,
                losses=losses,
                reach={**reach, "held": self.live >= needed},
            ),
            self.event(
                "script.report",
                metrics={**metrics, **({"dropped": self.dropped} if self.dropped else {})},
            ),
        ]

    def odd(self) -> list[Event]:
        """Something that happens in a healthy run and is nothing to tell."""
        match self.rng.randrange(9):
            case 0:  # one slow round
                return self.round(factor=8)
            case 1:  # one bad batch
                return self.round(mine=3.0)
            case 2:
                return self.round(loss=3.0)
            case 3:  # one update that is not finite
                self.dropped += 64
                return self.round()
            case 4:  # a path is relayed for a moment
                told = [self.event("peer.path", peer="peer3", path="direct")]
                told.append(self.event("peer.path", peer="peer3", path="relay"))
                self.at += FALLEN_S / 3
                return [*told, self.event("peer.path", peer="peer3", path="punched")]
            case 5:  # a peer is gone for two rounds, of which the quorum hangs on the last
                self.live = len(self.members) // 2 + 1
                told = self.round() + self.round()
                self.live = len(self.members)
                return told + self.round()
            case 6:  # the script starts again
                told = [self.event("script.ended", pid=1)]
                self.at += 300
                return [*told, self.event("script.attached", pid=2)]
            case 7:  # a night
                told = [self.event("run.paused", why="paused until 22:00")]
                self.at += 40_000
                return [*told, self.event("run.resumed")]
            case _:  # members come and go
                self.members = PEERS[: self.rng.randint(5, 8)]
                self.live = len(self.members)
                return self.round()


def healthy(seed: int, rounds: int) -> Iterator[Event]:
    run = Run(seed)
    yield run.event("script.attached", pid=1)
    while run.number < rounds:
        yield from run.odd() if run.rng.random() < 0.02 else run.round()


@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_healthy_rounds_have_no_verdict(seed: int) -> None:
    _, changes = judge(healthy(seed, 10_000))
    assert changes == []


Cause = Callable[[Run], list[Event]]


def slow(run: Run) -> list[Event]:
    told = run.round(factor=4)
    slowest = Slowest("peer2", "gather", 1.0)
    return [msgspec.structs.replace(told[0], slowest=slowest), *told[1:]]


def relayed(run: Run) -> list[Event]:
    told = [run.event("peer.path", peer="peer5", path="direct")] if run.number == 200 else []
    return [*told, run.event("peer.path", peer="peer5", path="relay"), *run.round()]


def narrow(run: Run) -> list[Event]:
    return [run.event("round.part", part=0.0), *run.round()]


def not_finite(run: Run) -> list[Event]:
    run.dropped += 64
    return run.round()


def nan(run: Run) -> list[Event]:
    return run.round(mine=math.nan)


def trouble(code: str) -> Cause:
    def cause(run: Run) -> list[Event]:
        kind = "storage.trouble" if code in ("E501", "E303") else "run.trouble"
        return [run.event(kind, code=code, message="told"), *run.round()]

    return cause


def claimed(times: int) -> Cause:
    def cause(run: Run) -> list[Event]:
        told = run.round()
        (round_,) = (event for event in told if event.kind == "round.committed")
        assert isinstance(round_, RoundCommittedEvent)
        round_.contributors["peer4"] = 64 * times
        return told

    return cause


def edge(run: Run) -> list[Event]:
    run.live = len(run.members) // 2 + 1
    return run.round()


def usual(run: Run) -> list[Event]:
    run.live = len(run.members)
    return [
        run.event("peer.path", peer="peer5", path="direct"),
        run.event("round.part", part=0.1),
        *run.round(),
    ]


@pytest.mark.parametrize(
    ("cause", "code", "subject", "within"),
    [
        (slow, "V01", "", 6),
        (relayed, "V02", "peer5", 4),
        (narrow, "V02", "", 1),
        (lambda run: run.round(loss=3.0), "V03", "peer0", 8),
        (lambda run: run.round(mine=2.5), "V03", "", 8),
        (lambda run: run.round(loss=math.nan), "V03", "peer0", 8),
        (not_finite, "V04", "", 3),
        (nan, "V04", "", 3),
        (trouble("E120"), "V05", "", 1),
        (trouble("E501"), "V06", "", 1),
        (trouble("E303"), "V06", "", 1),
        (edge, "V07", "", 3),
        (trouble("E308"), "V08", "", 1),
        (claimed(100), "V23", "peer4", 3),
        (claimed(1 << 40), "V23", "peer4", 1),
    ],
)
def test_each_cause_is_told_in_time_once_and_withdrawn(
    cause: Cause, code: str, subject: str, within: int
) -> None:
    run, verdicts = Run(7), Verdicts()

    def play(how: Cause, rounds: int) -> list[tuple[int, VerdictChange]]:
        return [
            (number, change)
            for number in range(1, rounds + 1)
            for event in how(run)
            for change in verdicts.take(event)
        ]

    assert play(lambda run: run.round(), 200) == []
    told = play(cause, 30)
    assert [(change.raised, change.verdict[:2]) for _, change in told] == [(True, (code, subject))]
    assert told[0][0] <= within
    assert set(verdicts.standing) == {(code, subject)}
    over = play(usual, 80)
    assert [(change.raised, change.verdict[:2]) for _, change in over] == [(False, (code, subject))]
    assert verdicts.standing == {}
    assert play(usual, 200) == []


def test_a_machine_that_is_fifty_times_faster_claims_nothing_odd_and_one_that_leaves_is_let_go() -> (
    None
):
    run, verdicts = Run(7), Verdicts()
    for _ in range(50):
        assert [change for event in claimed(50)(run) for change in verdicts.take(event)] == []
    told = [change for event in claimed(1 << 30)(run) for change in verdicts.take(event)]
    assert told[0].verdict.said == (
        "says that its contribution stands for 6.872e+10 samples, 1.074e+09 times the others' "
        "median: 100% of a plain mean"
    )
    run.members = run.members[:4]
    over = [change for event in run.round() for change in verdicts.take(event)]
    assert [(change.raised, change.verdict.code) for change in over] == [(False, "V23")]


def test_a_run_that_has_no_quorum_is_not_said_to_be_one_loss_away_from_it() -> None:
    run, verdicts = Run(7), Verdicts()
    for _ in range(5):
        for event in edge(run):
            verdicts.take(event)
    assert set(verdicts.standing) == {("V07", "")}
    waits = run.event("run.waiting", state="no quorum", what="4 of 7 members", of=[])
    assert [(change.raised, change.verdict.code) for change in verdicts.take(waits)] == [
        (False, "V07")
    ]
    assert verdicts.standing == {}


def test_the_slowest_member_is_named() -> None:
    run, verdicts = Run(1), Verdicts()
    for _ in range(100):
        for event in run.round():
            verdicts.take(event)
    for _ in range(10):
        for event in slow(run):
            verdicts.take(event)
    (verdict,) = verdicts.standing.values()
    assert verdict.said.endswith("; the last one is peer2")


def test_rounds_that_a_newcomer_catches_up_with_are_not_its_usual_ones() -> None:
    run, verdicts = Run(4), Verdicts()
    for _ in range(60):
        for event in run.round(factor=0):
            if isinstance(event, RoundCommittedEvent):
                event = msgspec.structs.replace(event, counted=False)
            verdicts.take(event)
    told = [change for _ in range(100) for event in run.round() for change in verdicts.take(event)]
    assert told == []
    told = [change for _ in range(6) for event in slow(run) for change in verdicts.take(event)]
    assert [change.verdict.code for change in told] == ["V01"]


def test_what_stays_slow_becomes_usual() -> None:
    run, verdicts = Run(2), Verdicts()
    told = list[tuple[bool, int]]()
    for number in range(100 + KEPT + 20):
        for event in run.round(factor=1 if number < 100 else 5):
            told += [(change.raised, number) for change in verdicts.take(event)]
    (raised, _), (withdrawn, at) = told
    assert (raised, withdrawn) == (True, False)
    assert at <= 100 + KEPT + 8


def test_silence_is_noticed_by_time_alone() -> None:
    run, verdicts = Run(3), Verdicts()
    verdicts.take(run.event("script.attached", pid=1))
    for _ in range(50):
        for event in run.round():
            verdicts.take(event)
    verdicts.take(run.event("run.waiting", state="no quorum", what="votes of two members"))
    assert verdicts.look(run.at + QUIET_S) == []
    (change,) = verdicts.look(run.at + QUIET_S + 1)
    assert change.verdict[:2] == ("V09", "")
    assert change.verdict.said == "no round for 10 min; waits for votes of two members"
    assert verdicts.look(run.at + 2 * QUIET_S) == []
    run.at += 3 * QUIET_S
    assert [c.raised for event in run.round() for c in verdicts.take(event)] == [False]
    for kind in ("script.ended", "run.paused"):
        verdicts = Verdicts()
        verdicts.take(run.event("script.attached", pid=1))
        verdicts.take(run.event(kind, pid=1, why="paused by its owner"))
        assert verdicts.look(run.at + 100 * QUIET_S) == []


def test_a_trouble_is_over_when_it_is_not_told_again() -> None:
    run, verdicts = Run(4), Verdicts()
    for code, seconds in (("E501", GONE_S), ("E120", CLOCK_S)):
        verdicts.take(run.event("run.trouble", code=code, message="told"))
        assert verdicts.look(run.at + seconds) == []
        assert [change.raised for change in verdicts.look(run.at + seconds + 1)] == [False]


def test_odd_events_are_passed_over() -> None:
    verdicts = Verdicts()
    for kind in (
        "round.committed",
        "reduction.timed",
        "script.report",
        "run.waiting",
        "peer.path",
        "round.part",
        "run.trouble",
        "storage.trouble",
        "nothing",
    ):
        for more in (
            {},
            {"contributors": 3, "elapsed_s": "x", "metrics": 7, "code": [], "slowest": "you"},
            {"metrics": {"loss_after": "x", "loss_before": None}},
            {"contributors": {"a": 1}, "elapsed_s": 1.0, "losses": [1], "reach": "far"},
            {"contributors": {"a": 1}, "elapsed_s": math.inf, "losses": {"a": "b"}},
        ):
            for at in (1.0, math.nan, "now", None, True):
                assert verdicts.take(read_event({"event": kind, "at": at, **more})) == []
    assert verdicts.take(read_event({})) == []


def adoptions(
    seed: int, rounds: int, *, apart: float = 1.0, jump: float = 1.0
) -> list[VerdictChange]:
    """Of a script that logs 15 losses a round, with heavy tails: they fall by 1 % a round. ``apart``:
    how much lower a member's own weights are on its data; ``jump``: by how much each adoption
    raises the anchor's loss over that of the one before.
    """
    rng, losses, verdicts = random.Random(seed), AdoptionLosses(), Verdicts()
    verdicts.take(
        read_event({"at": 0.5, "event": "script.attached", "averaging": "outer sgd lr 1"})
    )
    changes = list[VerdictChange]()
    level = 4.0
    for number in range(1, rounds + 1):
        for step in range(15):
            share = apart if step > 7 else 1.0
            noise = rng.lognormvariate(0, 0.1) * (3.0 if rng.random() < 0.02 else 1.0)
            losses.add(level * share * noise)
        losses.adopted(whole=True)
        metrics = losses.reading()
        changes += verdicts.take(
            read_event({"at": float(number), "event": "script.report", "metrics": metrics})
        )
        level *= 0.99 * jump
    return changes


@pytest.mark.parametrize("apart", [1.0, 0.7])
def test_averaging_that_is_well_is_never_accused(apart: float) -> None:
    """Also where members have unlike data, so that each loses by every adoption what it had learnt
    of its own."""
    for seed in range(100):
        assert adoptions(seed, 200, apart=apart) == []


def test_anchors_that_become_worse_are_named_with_the_settings_and_only_where_losses_are_known() -> (
    None
):
    raised, *rest = adoptions(1, 40, jump=1.6)
    assert (raised.raised, raised.verdict.code, rest) == (True, "V10", [])
    assert raised.at <= 5
    assert raised.verdict.said.endswith("after the one before (outer sgd lr 1)")
    losses = AdoptionLosses()
    losses.adopted(whole=True)
    assert losses.reading() == {}


def test_training_that_diverges_by_itself_is_not_laid_to_averaging() -> None:
    """The member's own loss is as high before it adopts the anchor."""
    verdicts = Verdicts()
    for number in range(1, 20):
        metrics = {"loss_before": 3.0 * 1.5**number, "loss_after": 2.9 * 1.5**number}
        told = {"at": float(number), "event": "script.report"}
        assert verdicts.take(read_event({**told, "metrics": {**metrics, "loss_noise": 0.1}})) == []


def test_averaging_that_is_well_again_is_withdrawn() -> None:
    verdicts, losses = Verdicts(), [3.0, 9.0, 5.0, 3.0, 2.9, 2.8, 2.7, 2.6, 2.5]
    changes = [
        (number, change.raised)
        for number, loss in enumerate(losses)
        for change in verdicts.take(
            read_event(
                {
                    "at": float(number + 1),
                    "event": "script.report",
                    "metrics": {"loss_before": 3.0, "loss_after": loss, "loss_noise": 0.1},
                }
            )
        )
    ]
    assert changes == [(1, True), (6, False)]


def evaluated(verdicts: Verdicts, at: float, behind: float, **told: Any) -> list[VerdictChange]:
    """A round whose members found this."""
    worth = {"anchor": 3.0, "own": 2.0, "behind": behind, "worse": None, "members": 3, "rounds": 3}
    return verdicts.take(
        read_event(
            {
                "at": at,
                "event": "round.committed",
                "round": 1,
                "contributors": {"a": 1},
                "elapsed_s": 1.0,
                "worth": worth,
                **told,
            }
        )
    )


def test_averaging_that_is_not_worth_it_is_named_with_the_cure_and_withdrawn() -> None:
    verdicts = Verdicts()
    attached = {"event": "script.attached", "averaging": "outer nesterov lr 0.9 momentum 0.9"}
    verdicts.take(read_event({"at": 0.5, **attached}))
    found = [evaluated(verdicts, float(at), 0.02) for at in (1, 2)]
    assert found == [[], []]
    ((raised, verdict, at),) = evaluated(verdicts, 3.0, 0.02)
    assert (raised, verdict.code, verdict.subject, at) == (True, "V21", "", 3.0)
    assert verdict.said == (
        "a round's model is worse than the members' own weights before it: 3 and 2 on held-out "
        "data; what helps: outer momentum in a run that started cold: [train.outer] preset = "
        '"plain-mean", or warmup; rounds that are too long: a smaller [train] sync_every '
        "(outer nesterov lr 0.9 momentum 0.9)"
    )
    later = [evaluated(verdicts, float(at), -0.1) for at in (4, 5, 6)]
    assert [[change.raised for change in each] for each in later] == [[], [], [False]]


def test_the_verdict_names_the_entry_from_which_a_governor_cures() -> None:
    verdicts = Verdicts()
    changes = [evaluated(verdicts, float(at), 0.02, plain_since=7) for at in (1, 2, 3)]
    assert changes[2][0].verdict.said.endswith("takes the plain mean from entry 7 on")


@pytest.mark.parametrize(
    "worth",
    [{}, [], "x", {"behind": "x"}, {"anchor": 1, "own": 1, "behind": None, "worse": 0}, 7],
)
def test_odd_readings_in_an_event_are_passed_over(worth: object) -> None:
    verdicts = Verdicts()
    for at in range(1, 9):
        assert evaluated(verdicts, float(at), 0.0, worth=worth) == []


def test_a_key_that_is_one_nodes_again_is_no_verdict_after_two_rounds() -> None:
    verdicts, run = Verdicts(), Run(7)
    took = [verdicts.take(each) for each in run.round()]
    doubled = run.event("run.trouble", code="E308", message="told")
    took.append(verdicts.take(doubled))
    assert set(verdicts.standing) == {("V08", "")}
    for _ in range(2):
        assert set(verdicts.standing) == {("V08", "")}
        took += [verdicts.take(each) for each in run.round()]
    assert not verdicts.standing


def test_every_verdict_has_a_page_that_no_error_has() -> None:
    assert list(PAGES) == [f"V{n:02}" for n in range(1, 25)]
    assert not PAGES.keys() & ERRORS.keys()
    assert not {page.slug for page in PAGES.values()} & {page.slug for page in ERRORS.values()}
    for page in PAGES.values():
        assert max(map(len, page.text.splitlines())) <= 100
        assert page.title[0].islower()


def test_the_node_publishes_what_it_finds(tmp_path: Path) -> None:
    told = list[RunEvent]()
    made, run = RunVerdicts("r", told.append), Run(5)
    (change,) = made.take(run.event("storage.trouble", code="E501", message="full"))
    assert change == VerdictChange(True, Verdict("V06", "", run.at, "full"), run.at)
    assert made.take(told[0]) == []
    assert made.view() == [
        {"code": "V06", "subject": "", "since": run.at, "said": "full", "title": PAGES["V06"].title}
    ]
    made.look(run.at + GONE_S + 1)
    assert [event.kind for event in told] == ["verdict.raised", "verdict.withdrawn"]
    assert [line for event in told for line in Words().of(event)] == [
        "verdict V06: full",
        "verdict holds no more: V06: full",
    ]
    book = diary.Diary(tmp_path, "r", lambda: "name")
    for event in (run.event("storage.trouble", code="E501", message="full"), *told):
        book.write(event)
    book.close()
    verdicts, _ = judge(diary.events(tmp_path))
    assert set(verdicts.standing) == {("V06", "")}


def test_the_owners_command_is_run_without_a_shell(tmp_path: Path) -> None:
    out, script = tmp_path / "out", tmp_path / "say.py"
    script.write_text(
        "import json, os, sys\n"
        f"with open({str(out)!r}, 'a') as file:\n"
        "    told = {k: v for k, v in os.environ.items() if k.startswith('ATOLL_')}\n"
        "    file.write(json.dumps([sys.argv[1:], told]) + '\\n')\n"
    )
    words = "$(touch /tmp/x); `id` \u202e"

    async def main() -> None:
        notifier = Notifier([sys.executable, str(script), "a b"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.run)
            for raised in (True, False):
                notifier.tell(
                    "r", words, [VerdictChange(raised, Verdict("V06", "p", 1.0, words), 1.0)]
                )
            with trio.fail_after(60):
                while not out.exists() or out.read_text().count("\n") < 2:
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()

    trio.run(main)
    first, second = map(json.loads, out.read_text().splitlines())
    assert first[0] == ["a b"]
    assert first[1]["ATOLL_NAME"] == words
    assert first[1]["ATOLL_TEXT"] == f"{PAGES['V06'].title}: {words}"
    assert second[1]["ATOLL_TEXT"] == f"holds no more: {first[1]['ATOLL_TEXT']}"
    assert [told["ATOLL_RAISED"] for _, told in (first, second)] == ["1", "0"]
    assert (first[1]["ATOLL_CODE"], first[1]["ATOLL_PEER"], first[1]["ATOLL_RUN"]) == (
        "V06",
        "p",
        "r",
    )


def test_a_command_that_fails_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for command in (["/nonexistent/program"], [sys.executable, "-c", "raise SystemExit(3)"]):
            await Notifier(command)._one({})
        for command in (["/nonexistent/program"], [sys.executable]):  # when the node starts
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Notifier(command).run)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "[notify] command cannot be run",
        "[notify] command ended with status 3",
        "[notify] command cannot be run",
    ]


def test_weights_that_others_changed_are_named_at_once_and_are_no_damaged_batch() -> None:
    verdicts = Verdicts()
    verdicts.take(read_event({"at": 0.0, "event": "script.attached"}))
    changes, moved = list[VerdictChange](), {"moved": 1, "moved_step": 155, "moved_by": 53.46}
    for at in range(1, 13):
        report = {"loss": 1.0, **({} if at < 5 else {**moved, "dropped": 320})}
        changes += verdicts.take(
            read_event({"at": float(at), "event": "script.report", "metrics": report})
        )
    assert [(change.raised, change.verdict.code, change.at) for change in changes] == [
        (True, "V16", 5.0),
        (False, "V16", 10.0),
    ]
    assert changes[0].verdict.said == (
        "this script's weights were changed by 53.5 times the length of a step, after its step 155"
    )
    for number in range(3):  # tensors that were replaced: each round, and never V04
        report = {"moved": 2 + number, "moved_step": 160, "moved_by": 0, "dropped": 640 + number}
        changes += verdicts.take(
            read_event({"at": 20.0, "event": "script.report", "metrics": report})
        )
    assert set(verdicts.standing) == {("V16", "")}
    verdicts.take(
        read_event({"at": 21.0, "event": "script.attached"})
    )  # another script counts from 0
    (again,) = verdicts.take(read_event({"at": 22.0, "event": "script.report", "metrics": moved}))[
        -1:
    ]
    assert again.raised


def test_buffers_and_parts_that_are_not_the_runs_are_named_and_taken_back() -> None:
    verdicts, at = Verdicts(), iter(range(1, 100))

    def report(**metrics: float) -> list[tuple[bool, str]]:
        event = {"at": float(next(at)), "event": "script.report", "metrics": metrics}
        return [(each.raised, each.verdict.code) for each in verdicts.take(read_event(event))]

    assert report(**{"loss": 1.0, "buffer_learnt/vq.book": 1.0}) == [(True, "V18")]
    assert verdicts.standing["V18", ""].said == "vq.book is learnt here and not averaged"
    assert report(**{"buffer_differs/mask": 2.0}) == []  # one stands already
    assert report(**{"buffer_differs/mask": 0.0}) == []
    assert report(parts_outside=3.0, parts_frozen=0.4) == [(True, "V19"), (True, "V20")] or set(
        verdicts.standing
    ) == {("V18", ""), ("V19", ""), ("V20", "")}
    assert verdicts.standing["V19", ""].said.endswith("no part of the run: 3")
    assert verdicts.standing["V20", ""].said.startswith("40% of what the run trains")
    assert report(parts_outside=0.0) == [(False, "V19")]
    ended = verdicts.take(read_event({"at": float(next(at)), "event": "script.ended"}))
    assert {change.verdict.code for change in ended} == {"V18", "V20"}
    assert report(**{"buffer_differs/mask": 2.0}) == [(True, "V18")]
    assert verdicts.standing["V18", ""].said == "mask is another one at 2 other members"
    assert report(**{"buffer_differs/mask": 0.0}) == [(False, "V18")]
