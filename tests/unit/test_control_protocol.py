"""Frames and messages of the control socket: any cut of the bytes gives the same messages, and no
bytes give anything else.
"""

from __future__ import annotations

import ast
import functools
import struct

import msgspec
import pytest
import trio
from house import ROOT
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives import errors
from atoll.collectives.errors import (
    AtollError,
    ConfigError,
    LocalProtocolError,
    MisbehaviourError,
    PeerLostError,
    RemoteProtocolError,
)
from atoll.collectives.group import Member
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Outcome, Share, Spent, Tally
from atoll.collectives.script_swarm import Call, PeerView
from atoll.collectives.swarm import RunSettings
from atoll.node.control import protocol as p
from atoll.node.control.calls import CallTable, answers, does, hears
from atoll.node.home.failures import error_of, failure

CID = bytes(range(16))
RUN = RunId("a" * 26)
REQUESTS = [
    p.Hello(1, (1, 2), 99),
    p.Status(2),
    p.Runs(3),
    p.Peers(4, "tide"),
    p.Ping(4, "12D3KooWa"),
    p.Check(4, "12D3KooWa"),
    p.JoinRun(5, p.JoinRequest(invite="atoll2:x", name="me")),
    p.FindRun(6, ""),
    p.Pause(6, "tiny", paused=False),
    p.Rest(6),
    p.Leave(7, "tide", True),
    p.BeginRun(7, "tide"),
    p.FetchBase(7, "tide"),
    p.ReadBans(7, "tide"),
    p.Recertify(7, "tide", (PeerId("12D3KooWa"), PeerId("12D3KooWb"))),
    p.Down(8),
    p.Subscribe(9),
    p.Open(10, RUN, make_layout([("w", (3, 4)), ("b", (4,))])),
    p.Found(11),
    p.Lease(12, 15),
    p.Release(3, 1),
    p.Contribute(13, CID, 64, None, 2),
    p.Computed(13, 4),
    p.Computed(13, 4, 62),
    p.BeginInterval(24, 4),
    p.Reclaim(25, 3),
    p.Resume(14, CID, 3),
    p.Members(15),
    p.Tallies(23, 5),
    p.NextNumber(27, "gossip", 5),
    p.Start(26, True),
    p.Preparing("loads the model"),
    p.Report({"loss": 1.5}),
    p.ShowAnswer(3, "What is an atoll?", "A ring of coral."),
    p.ShowEvaluation(3, 50_000, 1.25),
    p.Depart(16),
    p.Farewell("KeyError: 'mine'"),
    p.ReduceOpen(17, Call("op", "max", "fp32", 1, 2.5, True, "tag"), 5, 21),
    p.BufferOpen(21, 5),
    p.BufferClose(22, 3),
    p.ReduceStart(18, "op"),
    p.ReduceCancel(19, "op"),
    p.ReduceClose(20, "op"),
]
OUTCOME = Outcome(
    "committed", 3, (Share(PeerId("a"), 5),), True, (PeerId("b"),), 10, 11, 0.5, "why"
)
ANSWERS = [
    p.Welcome(1, 1, 99, PeerId("me"), True, 98),
    p.Done(2),
    p.Begun(24, True),
    p.Unread(25, True),
    p.Resting(26, "paused by its owner"),
    p.Starting(26, 1, 2),
    p.Document(3, {"runs": [{"a": 1}]}),
    p.Joined(4, p.RunInfo(RUN, "tide", PeerId("me"), RunSettings(rounds=7), 3)),
    p.Opened(5, 16, True, 5),
    p.Leased(6, 2, 41, "ab"),
    p.MemberList(
        7, (PeerView(PeerId("me"), 3, True, "self"),), Spent(1.0, None, 0.5, 1e-5, 8.0, 2, 14)
    ),
    p.TallyList(24, (Tally(2, 1, ((Member(PeerId("me"), 0), 5),), (Member(PeerId("me"), 0),)),)),
    p.Numbered(27, 6),
    p.BufferOpened(9, 3),
    p.ReduceOpened(8, 3, "bits", 65_536, 12, (PeerId("a"), PeerId("b"))),
    p.Failure(9, "ConfigError", "E400", "no", "because", "do", 78, False, "", "$.x"),
    p.Progress(10, "fetching state", 4, 10),
    p.Decided(CID, OUTCOME),
    p.Closing(3, 1),
    p.Asked(7, 3, bytes(32)),
    p.ReductionOutcome("op", OUTCOME),
    p.EventPush({"name": "RoundDecided"}),
    p.Ending("asked to"),
]


def test_every_message_is_tried() -> None:
    kinds = {
        kind
        for kind in vars(p).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__struct_config__.tag
    }
    assert kinds == {type(message) for message in (*REQUESTS, *ANSWERS)}


def test_a_request_that_the_first_version_lacks_says_since_when_there_is_one() -> None:
    """A new request raises VERSION, else nodes that are not restarted refuse it as garbage."""
    first = {type(request) for request in REQUESTS if request.since == 1}
    assert " ".join(sorted(str(kind.__struct_config__.tag) for kind in first)) == (
        "begin buffer_close buffer_open check computed contribute depart down find_run found hello "
        "join lease leave members open peers ping read_bans recertify reduce_cancel reduce_close "
        "reduce_open reduce_start release report resume runs status subscribe tallies"
    )
    assert max(kind.since for kind in p.REQUESTS) == p.VERSION


@given(st.lists(st.sampled_from(REQUESTS), max_size=8), st.data())
def test_requests_survive_any_cut(messages: list[p.Request], data: st.DataObject) -> None:
    wire = b"".join(p.frame(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    frames, got = p.request_frames(), []
    for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        got += frames.feed(wire[start:stop])
    assert got == messages


def test_answers_come_back() -> None:
    frames = p.answer_frames()
    assert [frames.feed(p.frame(answer)) for answer in ANSWERS] == [[answer] for answer in ANSWERS]


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_waited_for(data: bytes) -> None:
    frames = p.request_frames()
    try:
        for message in frames.feed(data):
            assert isinstance(message, p.Request)
    except RemoteProtocolError:
        pass


@given(st.integers(p.MAX_FRAME_BYTES + 1, 2**32 - 1))
def test_oversized_frames_are_refused_by_their_length(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{size} bytes"):
        p.request_frames().feed(struct.pack(">I", size))


@pytest.mark.parametrize(
    "body",
    [
        {"type": "contribute", "id": 1, "cid": b"short", "samples": 1},
        {"type": "contribute", "id": 1, "cid": CID, "samples": -1},
        {"type": "release", "slot": 4},
        {"type": "report", "metrics": {f"m{n}": 0.0 for n in range(65)}},
        {"type": "report", "metrics": {"m" * 65: 0.0}},
        {"type": "hello", "id": -1, "versions": [1], "pid": 1},
        *(
            {"type": "reduce_open", "id": 1, "call": {"op_id": "a", **wrong}, "numel": 5}
            for wrong in (
                {"weight": -1},
                {"deadline_s": -1.0},
                {"tag": "A/B"},
                {"tag": "x" * 49},
                {"op_id": ""},
                {"more": 1},
            )
        ),
        {"type": "reduce_open", "id": 1, "call": {"op_id": "a"}, "numel": 0},
        {"type": "open", "id": 1, "run_id": RUN, "layout": [[["w", [1] * 9, 0]], 1]},
        {"type": "nonsense", "id": 1},
        {"id": 1},
        [1, 2],
    ],
)
def test_what_is_out_of_bounds_is_refused(body: object) -> None:
    wire = msgspec.msgpack.encode(body)
    with pytest.raises(RemoteProtocolError, match="malformed"):
        p.request_frames().feed(struct.pack(">I", len(wire)) + wire)


def test_deep_nesting_is_refused() -> None:
    wire = b"\x91" * 5000 + b"\xc0"
    with pytest.raises(RemoteProtocolError):
        p.request_frames().feed(struct.pack(">I", len(wire)) + wire)


def test_unknown_fields_are_ignored() -> None:
    wire = msgspec.msgpack.encode({"type": "status", "id": 5, "later": True})
    assert p.request_frames().feed(struct.pack(">I", len(wire)) + wire) == [p.Status(5)]


def test_too_large_a_message_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="Document of"):
        p.frame(p.Document(1, {"x": "y" * p.MAX_FRAME_BYTES}))


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AtollError)
    ],
)
def test_every_error_crosses_with_its_class(kind: type[AtollError]) -> None:
    made = kind("what", peer="someone") if issubclass(kind, MisbehaviourError) else kind("what")
    made.code, made.why, made.hint, made.exit_code, made.retryable = "E999", "why", "hint", 42, True
    got = error_of(failure(7, made))
    assert type(got) is kind
    assert (got.message, got.code, got.why, got.hint, got.exit_code, got.retryable) == (
        "what",
        "E999",
        "why",
        "hint",
        42,
        True,
    )
    assert got.__notes__ == ["why", "hint", "More: atoll explain E999"]


def test_the_fields_of_errors_cross() -> None:
    key = error_of(failure(0, ConfigError("what", key="$.train.outer.lr")))
    assert isinstance(key, ConfigError)
    assert key.key == "$.train.outer.lr"
    peer = error_of(failure(0, PeerLostError("what", peer="someone")))
    assert isinstance(peer, PeerLostError)
    assert peer.peer == "someone"
    assert type(error_of(p.Failure(1, "FromTheFuture", "E777", "what"))) is AtollError
    assert (
        len(p.frame(failure(0, AtollError("x" * 2_000_000, why="y" * 2_000_000))))
        < p.MAX_FRAME_BYTES
    )


def test_every_request_is_answered_by_somebody_and_once() -> None:
    """A row each, but for what the connection itself takes (`node.control.connection`)."""
    rows = [
        ast.unparse(call.args[0]).removeprefix("p.")
        for path in (
            "control/requests.py",
            "service/node.py",
            "service/scripts.py",
            "watching/calls.py",
        )
        for call in ast.walk(ast.parse((ROOT / "node" / path).read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("answers", "does", "hears")
    ]
    assert sorted([*rows, "Hello", "Subscribe", "Farewell"]) == sorted(
        kind.__name__ for kind in p.REQUESTS
    )


def test_a_table_gives_functions_the_fields_by_name_and_their_values_to_the_reply() -> None:
    heard = list[object]()

    async def ping(peer: str) -> dict[str, str]:
        return {"peer": peer}

    def leave(run: str, now: bool = False) -> None:
        heard.append((run, now))

    def number(name: str, least: int) -> int:
        return least + len(name)

    def farewell(error: str = "") -> None:
        heard.append(error)

    table = CallTable(
        answers(p.Ping, ping, p.Document),
        does(p.Leave, leave),
        answers(p.NextNumber, number, p.Numbered),
        hears(p.Farewell, farewell),
    )
    answer = functools.partial(trio.run, table.answer)
    assert answer(p.Ping(3, "a")) == p.Document(3, {"peer": "a"})
    assert answer(p.Leave(4, "tide", True)) == p.Done(4)
    assert answer(p.NextNumber(5, "abc", 4)) == p.Numbered(5, 7)
    assert answer(p.Farewell("gone")) is None
    assert heard == [("tide", True), "gone"]
    assert p.Ping(1, "a") in table
    with pytest.raises(LocalProtocolError, match="Runs is out of place"):
        answer(p.Runs(6))
