"""A run looked at: events and status documents folded into one picture, by values; and the lines
that a terminal draws of it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile_words import HOSTILE, harmful
from look_kit import NUMEL, ROUND_S, RUN, SAMPLES, SENT, STEPS, WAIT_S, made_up, peer_id, write
from reference_node import PEER, Node, ReferenceService
from rich.cells import cell_len

from atoll.collectives.errors import ConfigError
from atoll.node.cli import run
from atoll.node.cli.looking import watch
from atoll.node.home.names import name_of
from atoll.node.home.output import Terminal
from atoll.node.home.paths import find_paths
from atoll.node.look import source as source_file
from atoll.node.look import view as view_file
from atoll.node.look.allowed import Allowed
from atoll.node.look.document import document
from atoll.node.look.frame import frame
from atoll.node.look.source import Live, Replay, in_words
from atoll.node.look.view import About, RunPicture
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run import diary
from atoll.node.run.events import read_event
from atoll.node.run.rate import rate_of
from atoll.node.run.status import read_run_status
from atoll.security.identity import Identity


def seen(view: RunPicture, now: float = 2_000_000.0, **after: int) -> dict[str, Any]:
    """The document as a page gets it: through JSON."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(document(view, now, **after)))
    return found


def folded(*args: Any, about: About | None = None, **kwargs: Any) -> RunPicture:
    found = RunPicture(about, in_words())
    for event in made_up(*args, **kwargs):
        found.take(read_event(event))
    return found


def test_rounds_members_and_figures() -> None:
    view = folded(30, 3, killed=11, late=21)
    found = seen(view)
    rounds, quick = found["rounds"], found["quick"]
    assert rounds["round"] == list(range(1, 31))
    assert rounds["who"] == ["7"] * 10 + ["3"] * 10 + ["b"] * 10
    assert [i for i, lost in enumerate(rounds["lost"], 1) if lost != "0"] == [11]
    assert rounds["lost"][10] == "4"
    assert rounds["period_s"] == [None] + [ROUND_S] * 29
    assert set(rounds["waited_s"]) == {WAIT_S}
    assert rounds["slowest"] == [2] * 10 + [1] * 10 + [3] * 10
    assert [peer["name"] for peer in found["peers"]] == [name_of(peer_id(n)) for n in range(4)]
    assert [peer["member"] for peer in found["peers"]] == [True, True, False, True]
    assert [peer["rounds"] for peer in found["peers"]] == [30, 30, 10, 10]
    assert [peer["state"] for peer in found["peers"]] == ["member", "member", "gone", "member"]
    assert [peer["samples"] for peer in found["peers"]] == [SAMPLES * n for n in (30, 30, 10, 10)]
    assert [peer["slowest"] for peer in found["peers"]] == [0, 10, 10, 10]
    assert found["peers"][2]["until"] == 1_000_000 + 11 * ROUND_S
    assert found["peers"][0]["you"] is True
    assert quick["members"] == 3
    assert quick["samples"] == 80 * SAMPLES
    assert quick["training_share"] == pytest.approx(1 - WAIT_S / ROUND_S)
    assert quick["bytes_sent"] == 30 * SENT
    # 2 (k - 1) / k times bf16 a step: the script's report after a round tells its steps
    ring = {3: 4 * 2 / 3, 2: 4 * 1 / 2}
    exact = STEPS * NUMEL * (9 * ring[3] + 10 * ring[2] + 10 * ring[3])
    assert quick["ddp_bytes"] == pytest.approx(exact, abs=1)
    assert quick["ddp_times"] == pytest.approx(exact / (30 * SENT))
    assert found["losses"]["0"]["rounds"] == list(range(1, 31))


def test_a_reader_that_has_some_is_sent_the_rest() -> None:
    view = folded(30)
    whole, rest = seen(view), seen(view, rounds=28, lines=10_000, losses=29)
    assert rest["rounds"]["first"] == 28
    assert rest["rounds"]["round"] == [29, 30]
    assert rest["losses"]["0"] == {
        "first": 29,
        "rounds": [30],
        "losses": whole["losses"]["0"]["losses"][-1:],
    }
    assert rest["lines"]["rows"] == []


def test_it_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_file, "KEPT_ROUNDS", 100)
    monkeypatch.setattr(view_file, "KEPT_PEERS", 50)
    view = folded(250, 3)
    for number in range(300):  # names that nobody else has, in any number
        view.take(
            read_event({"at": 1.0, "event": "run.trouble", "code": f"E{number}", "message": "x"})
        )
        event = {"event": "entry.committed", "round": 250, "contributors": {}, "lost": []}
        view.take(
            read_event(
                {**event, "at": 2.0, "entry": 251 + number, "members": [peer_id(900 + number)]}
            )
        )
    found = seen(view)
    assert found["rounds"]["first"] == 150
    assert found["rounds"]["round"][0] == 151
    assert len(found["losses"]["0"]["rounds"]) == 100
    assert len(found["peers"]) == 50
    assert len(found["verdicts"]) == 64
    assert len(view.lines) == view_file.KEPT_LINES


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "round.committed"},
        {"event": "round.committed", "at": 1.0, "round": -1, "entry": 1, "members": []},
        {"event": "round.committed", "at": 1.0, "round": 1, "entry": "x", "members": [1]},
        {"event": "reduction.timed", "at": 1.0, "peer": "", "round": 1},
        {"event": "reduction.timed", "at": 1.0, "peer": "a", "round": 1, "elapsed_s": -1},
        {"event": "script.report", "at": 1.0, "metrics": {"loss": "low"}},
        {"event": "run.trouble", "at": 1.0, "message": 7},
        {"event": "round.unmasked", "at": 1.0, "metrics": ["x"]},
        {"event": ["x"], "at": "now"},
        {"event": "run.waiting", "at": math.inf, "of": 7},
    ],
)
def test_what_does_not_fit_is_left_out(event: dict[str, Any]) -> None:
    view = folded(2)
    before = seen(view)["rounds"]
    view.take(read_event(event))
    found = seen(view)
    assert found["rounds"] == before
    assert frame(found, 80, 24)


def test_a_loss_that_is_no_number_is_told_as_none() -> None:
    view = folded(2)
    view.take(
        read_event(
            {"event": "script.report", "at": 1.0, "metrics": {"step": math.nan, "loss": math.nan}}
        )
    )
    found = seen(view)
    assert found["losses"]["0"]["losses"][-1] is None
    assert found["quick"]["loss"] is None


def test_bytes_of_a_node_that_began_anew_are_added_to_those_before() -> None:
    view = folded(2)
    last = [event for event in made_up(3) if event["event"] == "round.committed"][-1]
    view.take(read_event({**last, "bytes_sent": 5, "bytes_received": 6}))
    assert seen(view)["rounds"]["sent"] == [SENT, 2 * SENT, 2 * SENT + 5]


def test_of_a_federated_run_only_what_validate_explains_is_shown() -> None:
    about = About(RUN, "ward", "federated", allowed=Allowed(False, False, False))
    view = folded(5, about=about)
    view.take(
        read_event({"event": "script.report", "at": 1.0, "metrics": {"step": 99.0, "loss": 0.5}}),
        peer_id(1),
    )
    found = seen(view)
    assert {row["samples"] for row in found["peers"]} == {None}
    assert {row["slowest"] for row in found["peers"]} == {None}
    assert (found["rounds"]["samples"], found["rounds"]["slowest"]) == ([], [])
    assert found["quick"]["samples"] is None
    assert list(found["losses"]) == ["0"], "one's own"
    assert [row["loss"] is None for row in found["peers"]] == [False, True, True]


def test_tokens_a_second_of_all_and_of_each_are_what_the_log_counted() -> None:
    """The third member is killed in round 11, another comes in round 21: in the newest 20 rounds
    two contribute to 9, three to 10 and to the one that they begin at.
    """
    about = About(RUN, "reef", unit="tokens")
    view = folded(30, 3, killed=11, late=21, about=about)
    found = seen(view)
    counted = sum(found["rounds"]["samples"][10:])
    assert found["rate"] == {"unit": "tokens", "all": counted / (20 * ROUND_S), "members": 3}
    each = SAMPLES / ROUND_S
    assert [peer["rate"] for peer in found["peers"]] == [each, each, None, each]
    lines = frame(found, 100, 24)
    assert any("40 learned tokens a second, of 3 members" in line for line in lines)
    heads = [line.split() for line in lines if line.startswith("MEMBER")]
    assert heads == [["MEMBER", "TOKENS/S", "PATH", "RTT", "STATE", "ROUNDS"]]
    (mine,) = (line for line in lines if line.startswith(name_of(peer_id(0))))
    assert mine.split()[2] == "16"
    whole = [(event["at"], event["contributors"]) for event in made_up(30, 3, killed=11, late=21)
             if event["event"] == "round.committed"]  # fmt: skip
    told = rate_of(whole, [peer_id(0), peer_id(1), peer_id(3)], "tokens")
    assert told is not None  # as the node's status has it
    assert (told.all, set(told.members.values())) == (found["rate"]["all"], {each})


def test_of_a_run_that_hides_samples_no_rate_is_shown() -> None:
    view = folded(5, about=About(RUN, "ward", "federated", allowed=Allowed(samples=False)))
    found = seen(view)
    assert found["rate"] is None
    assert {peer["rate"] for peer in found["peers"]} == {None}
    assert "a second" not in "\n".join(frame(found, 100, 24))


def test_held_out_losses_and_answers_are_shown() -> None:
    view = folded(3)
    report = {"event": "script.report", "at": 1.0}
    view.take(read_event({**report, "metrics": {"held_out": 2.5, "held_out_own": 2.75}}))
    assert seen(view)["held_out"] == {"first": 0, "rounds": [3], "losses": [2.5]}
    told = {"event": "script.evaluation", "at": 2.0, "round": 3, "tokens": 50_000}
    view.take(read_event({**told, "held_out": 2.375}))
    for number in range(70):
        answer = {"event": "script.answer", "at": 3.0 + number, "round": number}
        view.take(
            read_event({**answer, "prompt": "What is it?", "text": f"a reef \x1b[2J {number}"})
        )
    found = seen(view)
    assert found["evaluation"] == {"round": 3, "tokens": 50_000, "held_out": 2.375}
    assert len(found["answers"]) == view_file.KEPT_ANSWERS
    assert found["answers"][-1] == [72.0, 69, "What is it?", r"a reef \x1b[2J 69"]
    text = "\n".join(frame(found, 100, 30))
    assert "held-out loss 2.375 after round 3, 50,000 tokens" in text
    assert "round 69, “What is it?” → “a reef" in text
    view.take(read_event({**told, "held_out": math.nan}))
    assert seen(view)["evaluation"]["held_out"] is None


def test_what_members_found_of_held_out_data_goes_before_one_scripts_word() -> None:
    view, worth = (
        RunPicture(),
        {"own": 3.0, "behind": None, "worse": None, "members": 3, "rounds": 2},
    )
    for event in made_up(4):
        if event["event"] == "round.committed":
            event["worth"] = {**worth, "anchor": float(event["round"])}
        elif event["event"] == "script.report":
            event["metrics"]["held_out"] = 9.0
        view.take(read_event(event))
    assert seen(view)["held_out"] == {
        "first": 0,
        "rounds": [1, 2, 3, 4],
        "losses": [1.0, 2.0, 3.0, 4.0],
    }


def test_the_node_says_who_is_there_and_what_is_wrong() -> None:
    view = folded(5)
    run = {
        "members": [peer_id(0), peer_id(1), peer_id(2)],
        "unreachable": [peer_id(2)],
        "phase": "running",
        "script": True,
        "bytes_sent": 123,
        "trouble": {"code": "E113", "message": "members are off", "hint": "atoll netcheck"},
        "quorum": {"reachable": 1, "members": 3, "needed": 2, "held": False},
    }
    view.take_status(read_run_status(run), {"peer": peer_id(0), "memory_bytes": 7})
    view.take_peers([{"peer": peer_id(1), "path": "direct", "link": "direct", "rtt_ms": 12.5}])
    found = seen(view)
    assert [row["state"] for row in found["peers"]] == ["live", "member", "lost"]
    assert found["peers"][1]["path"] == "direct"
    assert found["quick"]["reachable"] == 2
    assert found["quick"]["bytes_sent"] == 123
    assert [row["code"] for row in found["verdicts"]] == ["E113"]
    assert "no quorum" in found["waits"]
    view.node_gone("no node is up here")
    assert seen(view)["verdicts"] == []


def test_a_verdict_stands_until_it_is_withdrawn() -> None:
    view = folded(2)
    told = {"at": 1.0, "code": "E601", "subject": peer_id(1), "said": "slow since round 3"}
    view.take(read_event({**told, "event": "verdict.raised"}))
    view.take(read_event({**told, "event": "verdict.raised", "subject": peer_id(2)}))
    view.take(read_event({**told, "event": "verdict.withdrawn", "subject": peer_id(2)}))
    (row,) = seen(view)["verdicts"]
    assert row["message"] == f"{name_of(peer_id(1))}: slow since round 3"
    assert (row["code"], row["hint"]) == ("E601", "atoll explain E601")
    view.take(read_event({"at": 2.0, "event": "peer.path", "peer": peer_id(1), "path": "punched"}))
    assert [peer["path"] for peer in seen(view)["peers"]] == ["", "punched", ""]


class Told(ReferenceService):
    """A node in one run, of whose status a round is told."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id, self.round = run_id, 1

    async def peers(self, run: str) -> list[dict[str, Any]]:
        return [{"peer": PEER, "you": True}]

    async def status(self) -> dict[str, Any]:
        return {"runs": [{"run_id": self.run_id, "round": self.round, "members": [PEER]}]}


def test_who_looks_after_a_while_sees_what_is_so_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_file, "AGAIN_S", 60.0)
    monkeypatch.setattr(source_file, "STATUS_S", 0.01)
    manifest = parse_manifest('schema = 1\nname = "seen"\n[model]\nentry = "local:x"\n')
    signed = sign_manifest(manifest, Identity.generate())
    node = Node(tmp_path, lambda: Told(signed.run_id))
    save_run(node.paths, signed)
    try:
        with Live(node.paths, signed) as source:
            assert source.view.status.round == 1
            for number in range(2, 6):
                source._seen -= 1e6  # as if nobody had looked for so long
                while source._client is not None:
                    time.sleep(0.001)
                node.do(functools.partial(setattr, node.service, "round", number))
                source.look()
                assert source.view.status.round == number
    finally:
        node.stop()


# ── on a terminal


def test_a_frame_has_the_lines_that_fit_and_says_who_contributed() -> None:
    view = folded(12, 3, killed=11)
    found = seen(view)
    lines = frame(found, 80, 24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines if line}
    gone = rows[name_of(peer_id(2))]
    assert gone.endswith("▪" * 10 + "×" + "·")
    assert "gone" in gone
    assert rows[name_of(peer_id(0))].endswith("■" * 12)
    assert f"round 12  2 of 2 members  {ROUND_S:.0f} s a round  training 90%" in lines
    for width, height in ((44, 10), (200, 60), (1, 1)):
        assert len(frame(found, width, height)) <= max(10, height)


@pytest.mark.parametrize("members", [3, 40])
def test_no_line_of_a_frame_is_wider_than_its_terminal(members: int) -> None:
    view = folded(30, members, killed=20)
    view.take(
        read_event({"at": 9e5, "event": "run.trouble", "code": "E501", "message": "長い" * 40})
    )
    view.about.name, view.about.rounds = "長い名前" * 9, 60
    found = seen(view)
    for width in range(12, 120):
        assert max(cell_len(line) for line in frame(found, width, 40)) <= width, width
    narrow = frame(found, 20, 24)
    assert [line.split() for line in narrow if line.startswith("MEMBER")] == [["MEMBER", "ROUNDS"]]
    (mine,) = (line for line in narrow if line.startswith(name_of(peer_id(0))[:8]))
    assert mine.endswith("■" * 6)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_words_are_text_in_the_document_and_the_frame(text: str) -> None:
    view = RunPicture(About(text, text, codec=text), in_words())
    for event in made_up(3):
        spoilt = json.dumps(event).replace(peer_id(1), json.dumps(text[:100])[1:-1])
        view.take(read_event(json.loads(spoilt)))
    for event in (
        {"event": "peer.misbehaved", "peer": text, "reason": text},
        {"event": "run.trouble", "code": text[:4000], "message": text[:4000], "hint": text[:4000]},
        {"event": "run.waiting", "state": text, "what": text, "of": [text], "ends": text},
        {"event": "script.answer", "round": 3, "prompt": text[:4000], "text": text[:4000]},
        {"event": "script.report", "metrics": {text[:64]: 1.0, "loss": 2.0}},
        {"event": "round.unmasked", "metrics": {text[:64]: 1.0}},
        {"event": text, "more": text},
    ):
        view.take(read_event({"at": 2_000_000.0, **event}))
    view.take_peers([{"peer": text, "path": text, "link": text, "member": True, "rtt_ms": text}])
    found = document(view, 2_000_000.0)
    for line in frame(found, 80, 40):
        assert harmful(line, newlines=False) == set()

    def strings(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                strings(key)
                strings(inner)
        elif isinstance(value, list):
            for inner in value:
                strings(inner)
        elif isinstance(value, str):
            assert harmful(value, newlines=False) == set()

    strings(found)


# ── played again


def test_a_file_is_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "events.jsonl", made_up(40, 3, killed=11))
    with file.open("a") as torn:
        torn.write('{"at": 1, "event": "half')
    with Replay([file]) as source:
        watch(Terminal(environ={"NO_COLOR": "1"}), source, once=True)
        watch(Terminal(json=True), source, once=True)
    text, told = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text.startswith("lagoon  lookrunl")
    assert "round 40  2 of 2 members" in text
    assert json.loads(told)["quick"]["round"] == 40


def test_files_of_several_peers_are_one_picture(tmp_path: Path) -> None:
    """The second peer's file tells its losses; its word on rounds is not counted again, and its
    bytes are not the first one's, though it hears of every other round before.
    """
    one = write(tmp_path / "one.jsonl", made_up(10))
    swapped = json.dumps(list(made_up(10))).replace(peer_id(0), "!").replace(peer_id(1), peer_id(0))
    events = json.loads(swapped.replace("!", peer_id(1)))
    for event in events:
        if "bytes_sent" in event:
            event["at"] -= 0.05 * (event["round"] % 2)
            event["bytes_sent"] //= 3
    other = write(tmp_path / "two.jsonl", iter(events))
    with Replay([one, other]) as source:
        found = seen(source.view)
    assert found["quick"]["samples"] == 10 * 3 * SAMPLES
    assert found["quick"]["bytes_sent"] == 10 * SENT
    assert sorted(found["losses"]) == ["0", "1"]
    assert found["peers"][0]["you"]


def test_a_folder_is_played_with_its_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diary, "MAX_BYTES", 16_000)
    monkeypatch.setattr(diary, "LEAST_LEFT", 0)
    writer = diary.Diary(tmp_path, RUN, lambda: "lagoon")
    for event in made_up(20):
        writer.write(read_event(event))
    writer.close()
    assert len(list(tmp_path.iterdir())) > 1
    with Replay([tmp_path]) as source:
        assert source.view.taken == 20
    with Replay([tmp_path / diary.NEWEST]) as source:
        assert 0 < source.view.taken < 20


def test_a_recorded_run_plays_at_its_speed(tmp_path: Path) -> None:
    file = write(tmp_path / "events.jsonl", made_up(20))
    with Replay([file], speed=1000.0) as source:  # 200 s of then
        assert source.ended.wait(30)
        assert seen(source.view)["quick"]["round"] == 20
        assert source.now() == 1_000_000 + 20 * ROUND_S + 0.1


def test_no_file_of_events_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"event": "x", "at": 1}\n')
    with pytest.raises(ConfigError, match="is no file of events"):
        Replay([tmp_path / "x"])
    one, other = (write(tmp_path / name, made_up(1)) for name in ("a", "b"))
    other.write_text(other.read_text().replace(RUN, "another"))
    with pytest.raises(ConfigError, match="several runs"):
        Replay([one, other])


def test_a_report_before_the_first_round_makes_nobody_up() -> None:
    """Alone, a node times no reduction: whose file it is, its first counted round tells."""
    view, me = RunPicture(), peer_id(0)
    report = {"event": "script.report", "at": 1.0, "metrics": {"loss": 2.0, "step": 1}}
    view.take(read_event(report))
    assert view.peers == []
    alone = {"members": [me], "contributors": {me: SAMPLES}, "counted": True}
    view.take(read_event({"event": "round.committed", "at": 2.0, "round": 1, "entry": 1, **alone}))
    view.take(read_event({**report, "at": 3.0}))
    found = seen(view)
    assert [peer["name"] for peer in found["peers"]] == [name_of(me)]
    assert found["rounds"]["who"] == ["1"]
    assert found["peers"][0]["loss"] == 2.0


def test_replay_finds_the_folder_of_a_run_and_draws_its_last_screen(
    tmp_path: Path, atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "events.jsonl", made_up(12))
    assert run(["replay", str(tmp_path), "--once"]) == 0
    assert "round 12  3 of 3 members" in capsys.readouterr().out
    assert run(["replay", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quick"]["samples"] == 12 * 3 * SAMPLES


def test_top_shows_the_run_to_which_something_happened_last_without_a_node(
    atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--once"]) == 78
    assert "there is no run on this machine" in capsys.readouterr().err
    paths, owner = find_paths(str(atoll_home)), Identity(bytes(32))
    model = "[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }\n"
    ids = {}
    for name in ("ebb", "tide", "flow"):
        signed = sign_manifest(parse_manifest(f'schema = 1\nname = "{name}"\n{model}'), owner)
        save_run(paths, signed)
        ids[name] = signed.run_id
    for name in ("ebb", "tide"):  # nothing has happened in the third
        file = write(paths.run_dir(ids[name]) / "events.jsonl", made_up(3), name)
        file.write_text(file.read_text().replace(RUN, ids[name]))
        os.utime(file, (0, 100 if name == "tide" else 50))
    assert run(["top", "--once"]) == 0
    assert capsys.readouterr().out.startswith(f"tide  {ids['tide'][:8]}")
    assert run(["top", "ebb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quick"]["round"] == 3
