"""What subscribers and status are told of each event of a session."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from atoll.collectives.group import Part
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.outcomes import Share
from atoll.collectives.reach import Reach
from atoll.node.run.events import OperationCommittedEvent, RoundUnmaskedEvent, RunEvent, document
from atoll.node.service.reactions import react_to
from atoll.node.service.troubles import Troubles
from atoll.node.session import events as ev
from atoll.node.session.mode_events import MaskingFailed, PrivacySpent, Unmasked
from atoll.node.watching.chronicle import SEEKING, Chronicle

ME, OTHER = PeerId("me"), PeerId("other")


class Run:
    """What a chronicle sees of its run."""

    def __init__(self) -> None:
        self.run_id, self.told = RunId("run"), list[dict[str, Any]]()
        self.node = SimpleNamespace(publish=self.publish, identity=SimpleNamespace(peer=ME))
        self.troubles = Troubles(self.run_id, self.publish)
        self.whole: Any = None
        self.foreign, self.splits = {OTHER}, dict[PeerId, ev.HistorySplit]()
        self.failed, self.proofs = list[BaseException](), list[bytes]()
        self.reach = Reach(2, 2, 2)

    def publish(self, event: RunEvent) -> None:
        self.told.append(document(event))

    def traffic(self) -> tuple[int, int]:
        return 7, 8

    def guard(self, act: Callable[[], object]) -> None:
        act()

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)

    def take_proof(self, evidence: bytes) -> None:
        self.proofs.append(evidence)


def noting(test: Callable[[Run, Chronicle], None]) -> None:
    """Run a test in trio, whose clock the chronicle reads."""

    async def main() -> None:
        run = Run()
        test(run, Chronicle(run))  # type: ignore[arg-type]  # the part of Run that it reads

    trio.run(main)


def committed(entry: int, parts: tuple[Part, ...] = (), *who: Share) -> ev.RoundCommitted:
    return ev.RoundCommitted(
        entry, entry, who, (ME, OTHER), (), (), b"cid", bool(who), bytes(32), 1.5, parts
    )


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (
            PrivacySpent(1.5, 3, 7),
            {"event": "privacy.spent", "epsilon": 1.5, "steps": 3, "left": 7},
        ),
        (
            MaskingFailed(2, 1, "why"),
            {"event": "masking.failed", "entry": 2, "attempt": 1, "reason": "why"},
        ),
        (
            ev.Recertified(6, (OTHER,)),
            {"event": "entry.recertified", "entry": 6, "removed": (OTHER,)},
        ),
        (ev.StateDiverged(5, b"a", b"b"), {"event": "state.diverged", "entry": 5}),
        (
            ev.PeerMisbehaved(OTHER, "said two things"),
            {"event": "peer.misbehaved", "peer": OTHER, "reason": "said two things"},
        ),
        (
            ev.SumDisputed(OTHER, (ME,)),
            {"event": "sum.disputed", "owner": OTHER, "wrong": (ME,)},
        ),
        (
            ev.WorkJudged(OTHER, 3, 8, "none"),
            {"event": "work.judged", "peer": OTHER, "entry": 3, "good": 8, "fault": "none"},
        ),
        (ev.Renewed(2), {"event": "member.renewed", "life": 2}),
        (ev.WaitEnded(), {"event": "run.goes_on"}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_an_event_of_the_session_is_published(event: object, told: dict[str, Any]) -> None:
    def test(run: Run, chronicle: Chronicle) -> None:
        chronicle.note(0, event)
        assert run.told == [{"run": "run", "at": 0.0, **told}]
        run.told.clear()
        chronicle.note(1, event)
        assert run.told == [{"run": "run", "at": 0.0, "fragment": 1, **told}]  # of which

    noting(test)


def test_a_round_is_kept_with_its_state_root_and_ends_a_trouble() -> None:
    def test(run: Run, chronicle: Chronicle) -> None:
        def react(event: object) -> None:
            react_to(run, event)  # type: ignore[arg-type]  # the part of Run that it reads
            chronicle.note(0, event)

        react(ev.AnotherHistory(OTHER))
        assert run.troubles.current is not None
        assert run.troubles.current.code == "E305"
        assert "founded twice" in run.troubles.current.message
        run.splits[OTHER] = ev.HistorySplit(7, b"\1" * 32, b"\2" * 32, 9, 20)
        react(ev.AnotherHistory(OTHER, run.splits[OTHER]))
        assert run.troubles.current.message.endswith(
            "entry 7 is 010101010101 here and 020202020202 there (newest: 9 here, 20 there)"
        )
        react(committed(1, (Part(ME, 0, 3), Part(OTHER, 3, 4)), Share(ME, 5)))
        assert run.troubles.current is None
        chronicle.note(0, committed(2))  # an entry that at most changes who is a member
        assert [told["event"] for told in run.told[2:]] == ["round.committed", "entry.committed"]
        first = chronicle.rounds[0]
        assert (first.contributors, first.parts, first.bytes_sent) == (
            {ME: 5},
            {ME: 0.75},
            7,
        )
        chronicle.note(0, ev.StateRoot(1, b"\x01\x02"))
        assert [row.state_root for row in chronicle.rounds] == ["0102", ""]
        assert chronicle.part(ME) == 0.75
        assert chronicle.part(OTHER) is None

    noting(test)


def test_a_node_whose_link_carries_no_part_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    both = (Share(ME, 1), Share(OTHER, 1))

    def test(run: Run, chronicle: Chronicle) -> None:
        for entry, owner in enumerate((OTHER, OTHER, ME)):
            chronicle.note(0, committed(entry, (Part(owner, 0, 4),), *both))
        parts = [told["part"] for told in run.told if told["event"] == "round.part"]
        assert parts == [0.0, 1.0]

    with caplog.at_level(logging.WARNING):
        noting(test)
    assert len([r for r in caplog.records if "too slow to add up" in r.getMessage()]) == 1


def test_progress_and_secure_sums_are_kept_for_status() -> None:
    def test(run: Run, chronicle: Chronicle) -> None:
        assert chronicle.progress == SEEKING
        chronicle.note(0, ev.StateProgress(3, 10, (OTHER,)))
        assert chronicle.progress == ("fetching state", 3, 10)
        chronicle.note(0, ev.StateReady(7))
        assert chronicle.progress == ("ready", 1, 1)
        chronicle.note(0, Unmasked(3, 1, (ME, OTHER), 2, 9, {"loss": 0.5}, 2.5, ((ME,), (OTHER,))))
        assert chronicle.unmasked == RoundUnmaskedEvent(
            run="run",
            entry=3,
            attempt=1,
            members=(ME, OTHER),
            weight=9,
            metrics={"loss": 0.5},
            buckets=((ME,), (OTHER,)),
            next_clip=2.5,
        )
        operation = OperationCommittedEvent(op_id="mean")
        chronicle.note_published(operation)
        assert chronicle.operation == operation

    noting(test)


def test_what_ends_the_run_or_needs_its_owner_is_no_mere_event() -> None:
    def test(run: Run, _: Chronicle) -> None:
        def react(event: object) -> None:
            react_to(run, event)  # type: ignore[arg-type]  # the part of Run that it reads

        react(ev.Removed(4))
        assert [getattr(error, "code", "") for error in run.failed] == ["E307"]
        react(ev.Equivocated(OTHER, b"proof"))
        assert run.proofs == [b"proof"]
        react(ev.Doubled())
        assert run.troubles.current is not None
        assert run.troubles.current.code == "E308"
        run.foreign.clear()
        react(ev.AnotherHistory(OTHER))  # nobody is on another one any more
        assert run.troubles.current.code == "E308"

    noting(test)


@pytest.mark.parametrize(("state", "level"), [("training", "INFO"), ("no quorum", "WARNING")])
def test_a_wait_is_news_in_the_log_unless_it_is_usual(
    state: Any, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    def test(run: Run, chronicle: Chronicle) -> None:
        waiting = ev.Waiting(state, "votes", (), "they come", trio.current_time(), 3.0)
        chronicle.note(0, ev.StillWaiting(waiting))
        said = run.told[0]
        assert (said["event"], said["what"], said["of"]) == ("run.waiting", "votes", ())

    with caplog.at_level(logging.INFO):
        noting(test)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().endswith(f"{state} for 3 s: waits for votes; it ends when they come")


def test_of_a_finished_run_the_log_says_that_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def test(run: Run, chronicle: Chronicle) -> None:
        waiting = ev.Waiting(
            "finished",
            "nothing",
            (),
            "all rounds of the run are committed",
            trio.current_time(),
            3.0,
        )
        chronicle.note(0, ev.StillWaiting(waiting))

    with caplog.at_level(logging.INFO):
        noting(test)
    (record,) = caplog.records
    assert record.getMessage().endswith(": finished: all rounds of the run are committed")


def test_the_pace_is_the_mean_period_of_the_newest_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def test(run: Run, chronicle: Chronicle) -> None:
        for entry, at in ((1, 100.0), (2, 104.0), (3, 110.0)):
            monkeypatch.setattr("atoll.node.watching.chronicle.time.time", lambda at=at: at)
            assert chronicle.period_s == (None if entry < 3 else 4.0)
            chronicle.note(0, committed(entry, (), Share(ME, 5)))
        chronicle.note(0, committed(4))  # no round
        assert chronicle.period_s == 5.0

    noting(test)


def test_who_was_in_a_configuration_is_known_to_have_been_a_member() -> None:
    def test(run: Run, chronicle: Chronicle) -> None:
        assert not chronicle.was_member(OTHER)
        chronicle.note(0, committed(1, (), Share(ME, 3)))
        assert chronicle.was_member(OTHER)
        assert not chronicle.was_member(PeerId("third"))

    noting(test)
