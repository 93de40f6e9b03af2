"""The file of what happened in a run: appended, rotated, read while it is written, whole lines
only; and its words.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from atoll.node.run import diary
from atoll.node.run.diary import Diary, events, follow
from atoll.node.run.events import (
    PeerMisbehavedEvent,
    RunEvent,
    StateProgressEvent,
    document,
    read_event,
)
from atoll.node.views.event_words import Words

PEERS = [f"12D3KooW{name * 44}" for name in "abc"]


def numbered(number: int, **more: Any) -> RunEvent:
    """An event of a kind that this version does not know."""
    return read_event({"at": float(number), "event": "e", "number": number, **more})


def read(folder: Path, since_s: float = 0.0) -> list[dict[str, Any]]:
    return [document(event) for event in events(folder, since_s)]


def filled(folder: Path, count: int, first: int = 0) -> Diary:
    found = Diary(folder, "run", lambda: "tiny")
    for number in range(first, first + count):
        found.write(numbered(number))
    return found


def test_what_is_written_is_read_and_a_later_life_goes_on_behind_half_a_line(
    tmp_path: Path,
) -> None:
    filled(tmp_path, 2).close()
    file = tmp_path / "events.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_bytes().splitlines()[0])["diary"] == 1
    with file.open("ab") as torn:
        torn.write(b'{"at": 9, "event": "half')
    filled(tmp_path, 1, 2).close()
    assert [event["number"] for event in read(tmp_path)] == [0, 1, 2]
    assert [event["number"] for event in read(tmp_path, since_s=1.0)] == [1, 2]


@pytest.mark.parametrize("name", ["kept.jsonl", "kept.jsonl.gz"])
def test_a_recording_is_read_back_and_a_spoilt_one_up_to_where_it_is(
    tmp_path: Path, name: str
) -> None:
    told = [numbered(number) for number in range(3000)]
    file = tmp_path / name
    diary.record(file, "run", "tiny", told)
    assert list(diary.recorded(file)) == told
    with diary.opened(file) as lines:
        assert json.loads(lines.readline())["diary"] == diary.VERSION
    whole = file.read_bytes()
    assert whole.startswith(diary.GZIP) == name.endswith(".gz")
    file.write_bytes(whole[: len(whole) // 2])
    kept = list(diary.recorded(file))
    assert kept == told[: len(kept)]
    assert 0 < len(kept) < len(told)
    file.write_bytes(diary.GZIP + b"nonsense")
    assert list(diary.recorded(file)) == []


def test_a_line_that_is_too_long_is_skipped_and_not_held(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl.gz"
    long, short = numbered(1, text="x" * (5 * diary.MAX_LINE)), numbered(2)
    diary.record(file, "run", "tiny", [long, short])
    assert list(diary.recorded(file)) == [short]


def test_files_are_rotated_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diary, "MAX_BYTES", 1000)
    monkeypatch.setattr(diary, "LEAST_LEFT", 100)
    filled(tmp_path, 400).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["events.1.jsonl", "events.2.jsonl", "events.3.jsonl", "events.jsonl"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    kept = [event["number"] for event in read(tmp_path)]
    assert kept == list(range(kept[0], 400))
    assert len(kept) > 50


def test_what_peers_do_under_many_keys_pushes_nothing_else_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of 2 MB in all; 4 MB of breaches among 100 rounds, and rounds afterwards."""
    monkeypatch.setattr(diary, "MAX_BYTES", 500_000)
    diary_, round_, number = Diary(tmp_path, "run", lambda: "tiny"), "round.committed", 0
    for number in range(100):
        diary_.write(numbered(number, event=round_, more="x" * 400))
        for key in range(200):
            peer = f"{PEERS[0]}{number}/{key}"
            diary_.write(PeerMisbehavedEvent(at=float(number), peer=peer, reason="r" * 100))
    diary_.close()
    found = read(tmp_path)
    assert [event["number"] for event in found if event["event"] == round_] == list(range(100))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size <= diary.OF_PEERS_BYTES + 100 * 600 * (1 + 1 / diary.OF_PEERS_SHARE) + 1000
    breaches = [event for event in found if event["event"] == "peer.misbehaved"]
    assert breaches[-1]["at"] == 99.0, "those of now are told, too"
    assert sum(event.get("missed", 0) for event in found) + len(breaches) <= 20_000
    assert sum(event.get("missed", 0) for event in found) + len(breaches) >= 20_000 - 200


def test_a_follower_sees_what_comes_over_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diary, "MAX_BYTES", 1000)
    monkeypatch.setattr(diary, "LEAST_LEFT", 100)
    writer = filled(tmp_path, 3)
    written = iter(range(3, 60))

    def write_one() -> None:
        number = next(written)
        writer.write(numbered(number))

    found = follow(tmp_path, 2.0, write_one)
    assert [document(next(found))["number"] for _ in range(50)] == list(range(2, 52))
    found.close()
    writer.close()


def test_a_full_disk_loses_lines_and_says_how_many(tmp_path: Path) -> None:
    writer = filled(tmp_path / "none", 3)  # no such folder
    (tmp_path / "none").mkdir()
    writer.write(numbered(3))
    writer.write(StateProgressEvent(at=4.0))  # worth nothing later
    writer.write(numbered(5))
    writer.close()
    found = read(tmp_path / "none")
    assert [(event["number"], event.get("missed")) for event in found] == [(3, 3), (5, None)]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"event": 1, "at": 1}',
        b'{"event": "e"}',
        b'{"event":"e","at":true}',
        b'{"event":"e","at":-1}',
        b'{"event":"e","at":1e18}',
        b'{"event":"e","at":1e999}',
        b'{"event":"e","at":NaN}',
        b'{"event":"e","at":1' + 400 * b"0" + b"}",
        b"[" * 200_000,
        b'{"event":"e","at":1,"of":' + b"[" * 200_000,
    ],
)
def test_lines_that_are_no_events_are_skipped(tmp_path: Path, line: bytes) -> None:
    filled(tmp_path, 1).close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert [event["number"] for event in read(tmp_path)] == [0]


def test_half_a_pair_of_surrogates_becomes_a_text_that_can_be_printed(tmp_path: Path) -> None:
    filled(tmp_path, 0).close()
    line = rb'{"event": "e", "at": 1, "whole": "\ud83d\ude00", "half\uDC00": ["\ud83d"]}'
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    (event,) = read(tmp_path)
    assert event == {"event": "e", "at": 1, "whole": "\U0001f600", "half?": ["?"]}


def test_numbers_that_are_none_leave_an_event_without_words() -> None:
    (line,) = Words().of(read_event({"at": 0, "event": "script.attached", "pid": float("inf")}))
    assert line.startswith("script.attached")


def test_words() -> None:
    words = Words()
    entry = {"at": 0, "event": "entry.committed", "round": 6, "members": PEERS[:2]}
    assert list(words.of(read_event(entry))) == []
    round_ = {
        **entry,
        "event": "round.committed",
        "members": PEERS[1:],
        "round": 7,
        "contributors": {PEERS[1]: 8, PEERS[2]: 4},
        "lost": [PEERS[0]],
        "counted": True,
        "elapsed_s": 1.25,
        "bytes_sent": 2048,
    }
    came, went, lost, told = words.of(read_event(round_))
    assert came.endswith("is a member, of 2 now")
    assert went.endswith("is no member any more; 2 are")
    assert "was lost in the round" in lost
    after = {**entry, "members": PEERS[1:2], "lost": [], "left": [PEERS[2]]}
    (left,) = words.of(read_event(after))
    assert left.endswith("has left; 1 are members")
    assert told == "round 7: 2 contributed, 12 samples, 1.2 s, 2.0 KiB sent so far"
    (odd,) = words.of(read_event({"event": "run.trouble", "code": 501}))  # another version's
    assert odd == 'run.trouble {"code": 501}'
    (hostile,) = words.of(PeerMisbehavedEvent(peer=PEERS[0], reason="\x1b[2J\nforged"))
    assert "\x1b" not in hostile
    assert "\n" not in hostile


def test_a_masked_round_is_told_without_samples_that_nobody_knows() -> None:
    words = Words()
    told = {"at": 0, "event": "round.unmasked", "entry": 5, "members": PEERS, "weight": 1620}
    (line,) = words.of(read_event({**told, "metrics": {"loss": 0.25}}))
    assert line == "the masks are off the sum of 3 contributions, mean loss 0.25"
    (odd,) = words.of(read_event({**told, "metrics": {"\x1b[2J": 1}}))
    assert "\x1b" not in odd
    entry = {"at": 0, "event": "round.committed", "round": 5, "members": PEERS, "counted": True}
    entry |= {"contributors": dict.fromkeys(PEERS, 1), "elapsed_s": 1.25}
    (round_,) = words.of(read_event(entry))
    assert round_ == "round 5: 3 contributed, 1.2 s, 0 B sent so far"
