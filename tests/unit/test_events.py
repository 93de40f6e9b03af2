"""Every kind of event: what is published is read back as the same value, and has its line; and an
event of a kind that is new needs no more than its class and a row here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.collectives.reach import Reach
from atoll.node.home.output import short_peer
from atoll.node.look.view import RunPicture
from atoll.node.run import events as e
from atoll.node.run.diary import Diary, events
from atoll.node.views.event_words import Words

PEER = f"12D3KooW{'a' * 44}"
P = short_peer(PEER)
FULL = {"code": "E501", "message": "no space", "why": "it is full", "hint": "df -h"}

SAID: list[tuple[e.RunEvent, str]] = [
    (
        e.EntryCommittedEvent(round=1, entry=2, members=(PEER,), lost=(PEER,)),
        f"{P} was lost in the round; it was decided without it",
    ),
    (
        e.RoundCommittedEvent(
            round=2,
            contributors={PEER: 8},
            counted=True,
            losses={PEER: float("inf")},
            worth=e.WorthReading(1.0, 2.0, None, 0.5, 3, 2),
            reach=Reach(1, 1, 1),
        ),
        "round 2: 1 contributed, 8 samples, 0.0 s, 0 B sent so far",
    ),
    (e.RoundPartEvent(part=0.0), 'round.part {"part": 0.0}'),
    (
        e.RoundPhaseEvent(log="main/r", round=3, phase="decide"),
        'round.phase {"log": "main/r", "round": 3, "phase": "decide", "op_id": "", "ballot": 0, '
        '"revision": 0, "convener": "", "owners": [], "contributors": [], "elapsed_s": 0.0}',
    ),
    (e.ReductionTimedEvent(peer=PEER, slowest=e.Slowest(PEER, "gather", 0.5)), ""),
    (e.OperationCommittedEvent(op_id="x", contributors={PEER: 1}, elapsed_s=2.0), ""),
    (e.RoundUnmaskedEvent(entry=4, members=(PEER,), buckets=((PEER,),), next_clip=1.5), ""),
    (
        e.MaskingFailedEvent(entry=4, attempt=1, reason="too few"),
        "a masked sum failed and is tried again: too few",
    ),
    (
        e.PrivacySpentEvent(epsilon=1.5, steps=3, left=7),
        "epsilon 1.5 is spent here; 7 more contributions are allowed",
    ),
    (
        e.EntryRecertifiedEvent(entry=4, removed=(PEER,)),
        "recertified without 1 members",
    ),
    (e.StateProgressEvent(have=1, total=2), 'state.progress {"have": 1, "total": 2}'),
    (e.StateReadyEvent(round=4), "the state of round 4 is here"),
    (e.StateRootEvent(entry=4, root="ab"), 'state.root {"entry": 4, "root": "ab"}'),
    (e.StateDivergedEvent(entry=4), 'state.diverged {"entry": 4}'),
    (
        e.MemberRenewedEvent(life=2),
        "this home is an old copy: it goes on as a new member, after rounds that it had forgotten",
    ),
    (e.PeerMisbehavedEvent(peer=PEER, reason="two things"), f"{P} broke a rule: two things"),
    (
        e.PeerConvictedEvent(peer=PEER, reason="two votes"),
        f'peer.convicted {{"peer": "{PEER}", "reason": "two votes"}}',
    ),
    (e.PeerPathEvent(peer=PEER, path="relay"), f"{P} is reached: relay"),
    (e.SumDisputedEvent(owner=PEER, wrong=(PEER,)), ""),
    (e.SumsDifferEvent(peers=(PEER,)), f'sums.differ {{"peers": ["{PEER}"]}}'),
    (e.WorkJudgedEvent(peer=PEER, entry=4, good=1, fault=""), ""),
    (
        e.RunWaitingEvent(state="no quorum", what="votes", of=(PEER,), ends="it comes"),
        f"no quorum, no round for 0 s: waits for votes, of {P}; it ends when it comes",
    ),
    (e.RunGoesOnEvent(), "it goes on"),
    (
        e.RunStartingEvent(there=1, wanted=2),
        "the script waits with its first step: 1 of 2 members are there",
    ),
    (e.RunBegunEvent(there=2, wanted=2), "training begins; 2 of 2 members are there"),
    (e.RunPausedEvent(why="paused"), "training is paused; the node serves the run"),
    (e.RunResumedEvent(), "training may go on"),
    (e.RunLeftEvent(), "this machine has left the run"),
    (e.ScriptAttachedEvent(pid=7, averaging="mean"), "a script trains, process 7"),
    (
        e.ScriptEndedEvent(pid=7, farewell=True, error="KeyError"),
        "the script has let go, process 7: KeyError",
    ),
    (e.ScriptExitedEvent(pid=7, how="died of SIGKILL", failed=True), "process 7 died of SIGKILL"),
    (
        e.ScriptMissingEvent(pid=7),
        "a script trained here until the node ended, and none is attached now",
    ),
    (
        e.ScriptUnattachedEvent(pid=7, seconds=61.0),
        "process 7 joined 1 min 1 s ago and has attached nothing",
    ),
    (
        e.ScriptIdleEvent(seconds=130.0),
        "the script has made no step in the 2 min 10 s since it attached",
    ),
    (
        e.ScriptStillEvent(pid=7, seconds=600.0, step_s=1.0, doing="it waits"),
        "process 7 has made no step for 10 min; it waits",
    ),
    (e.ScriptReportEvent(metrics={"loss": 2.0}), 'script.report {"metrics": {"loss": 2.0}}'),
    (
        e.ScriptAnswerEvent(round=4, prompt="And?", text="a\nring \x1b[1m“of”"),
        r"round 4, “And?” → “a\nring \x1b[1m'of'”",
    ),
    (
        e.ScriptEvaluationEvent(round=4, tokens=50_000, held_out=1.25),
        "held-out loss 1.25 after round 4, on 50,000 tokens",
    ),
    (
        e.DataOrderEvent(equal={PEER: 3}),
        f"the same data in the same order are read by this script and by {P}",
    ),
    (e.RunTroubleEvent(**FULL), "trouble: E501 no space"),
    (e.StorageTroubleEvent(**FULL), "trouble: E501 no space"),
    (e.RunFailedEvent(**FULL), "failed: E501 no space"),
    (e.EngineTroubleEvent(**FULL), "trouble: E501 no space"),
    (e.NodeFailedEvent(**FULL), "trouble: E501 no space"),
    (e.StorageMendedEvent(), "what must be written is written again"),
    (e.VerdictRaisedEvent(code="V03", subject=PEER, said="up"), f"verdict V03: {P} up"),
    (e.VerdictWithdrawnEvent(code="V03", said="up"), "verdict holds no more: V03: up"),
    (e.NodeAddressesEvent(addresses=("/ip4/1.2.3.4",)), ""),
]
"""One of each kind, and its line; "" where that is its whole document and long."""


def test_each_kind_has_a_row_and_its_class_is_named_after_it() -> None:
    assert [event.kind for event, _ in SAID] == list(dict.fromkeys(event.kind for event, _ in SAID))
    assert {event.kind for event, _ in SAID} == set(e.KINDS)
    for kind, each in e.KINDS.items():
        words = kind.replace(".", "_").split("_")
        assert each.__name__ == "".join(map(str.capitalize, words)) + "Event"
        assert each.__doc__


@pytest.mark.parametrize(("event", "line"), SAID, ids=lambda each: getattr(each, "kind", ""))
def test_what_is_published_is_read_back_kept_and_said(
    event: e.RunEvent, line: str, tmp_path: Any
) -> None:
    assert e.read_event(json.loads(json.dumps(e.document(event)))) == event
    book = Diary(tmp_path, "run", lambda: "name")
    book.write(event)
    book.close()
    assert list(events(tmp_path)) == ([event] if event.kept else [])
    (said,) = Words().of(event)
    assert said == line or not line
    assert said.isprintable()
    picture = RunPicture(words=Words().of)
    picture.take(event)
    assert picture.skipped == 0
    assert [text for _, _, text in picture.lines] == [said]


def test_an_event_that_does_not_fit_its_kind_is_kept_as_it_came_and_counted() -> None:
    odd = {"event": "state.ready", "round": "seven", "at": 1.0, "more": [1]}
    event = e.read_event(odd)
    assert isinstance(event, e.OtherEvent)
    assert (event.kind, event.at, e.document(event)) == ("state.ready", 1.0, odd)
    picture = RunPicture()
    picture.take(event)
    assert picture.skipped == 1
    picture.take(e.read_event({"event": "of.tomorrow", "at": 1.0}))
    assert picture.skipped == 1
