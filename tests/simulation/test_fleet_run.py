"""A user's run on machines that she describes, in virtual time."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import outline
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.cli import run
from atoll.node.look.view import RunPicture
from atoll.node.run import diary
from atoll.node.simulation.churn import Mishap, draw, parse_script, seconds_of
from atoll.node.simulation.fleet import TFLOPS, FleetPeer, parse_fleet
from atoll.node.simulation.fleet_run import FleetRun, PlayedRun, _Play
from atoll.optim.federated.simulation import Task
from atoll.optim.planning import Choice, Conditions, PeerConditions, estimate

THREE = "2 x 100ms@10Mbit, 200ms@10Mbit"


def fleet(text: str = THREE) -> list[FleetPeer]:
    return parse_fleet(text, step_s=None, flops=None)


def play(
    settings: RunSettings, text: str = THREE, *, parameters: int = 1_000_000, **more: object
) -> PlayedRun:
    return FleetRun(settings, fleet(text), parameters, **more).play()  # type: ignore[arg-type]


# ---- machines and links


def test_rows_say_how_many_of_which_machine_on_which_link() -> None:
    found = parse_fleet(
        "2 x 4090@100Mbit, A100@1Gbit/200Mbit+40ms,0.5s@2.5MB/s", step_s=0.5, flops=None
    )
    ratio = TFLOPS["4090"] / TFLOPS["A100"]
    assert found == [
        FleetPeer("4090-1", 0.5, 12_500_000, 12_500_000, 0.0125),
        FleetPeer("4090-2", 0.5, 12_500_000, 12_500_000, 0.0125),
        FleetPeer("a100-1", 0.5 * ratio, 125_000_000, 25_000_000, 0.02),
        FleetPeer("05s-1", 0.5, 2_500_000, 2_500_000, 0.0125),
    ]
    assert fleet("50ms@1Gbit+0ms")[0].latency_s == 0.0
    by_work = parse_fleet("rtx 4090@1Gbit", step_s=None, flops=165.2e12 * 0.35)
    assert by_work[0].step_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "peers"),
        ("4090", "peers"),
        ("4090@fast", "peers"),
        ("8 x toaster@100Mbit", "peers"),
        ("300 x 10ms@100Mbit", "peers"),
        ("999999999 x 10ms@1Gbit", "peers"),
        ("4090@100Mbit", "step-ms"),
        ("0ms@100Mbit", "peers"),
        ("10ms@" + "9" * 400 + "Mbit", "peers"),
        ("10ms@1Gbit in a place", "peers"),
        ("10ms@1Gbit in a/b/c", "peers"),
        ("3 x 10ms@1Gbit in 2 sites of 2 hosts", "peers"),
        ("3 x 10ms@1Gbit in 0 sites", "peers"),
    ],
)
def test_what_is_no_fleet_is_refused_by_name(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet(text)
    assert caught.value.key == key


@given(st.text(max_size=60))
def test_any_text_is_a_fleet_or_a_config_error(text: str) -> None:
    try:
        found = parse_fleet(text, step_s=0.1, flops=None)
    except ConfigError:
        return
    assert 1 <= len(found) <= 256
    assert len({peer.name for peer in found}) == len(found)


def test_machines_have_places_by_name_or_are_dealt_to_them() -> None:
    rows = "3 x 10ms@1Gbit in 2 sites, 2 x 20ms@8MB/s+3ms in lab/box-1, 30ms@1Gbit in lab, "
    rows += "5 x 40ms@1Gbit in 2 sites of 2 hosts, 50ms@1Gbit"
    assert [peer.site for peer in fleet(rows)] == [
        *("site-1", "site-1", "site-2", "lab/box-1", "lab/box-1", "lab"),
        *("site-3/host-1", "site-3/host-1", "site-3/host-2", "site-4/host-1", "site-4/host-2"),
        "",
    ]
    sizes = Counter(peer.site for peer in parse_fleet(
        "1000 x 10ms@1Gbit in 25 sites of 8 hosts", step_s=None, flops=None, most=4096
    ))  # fmt: skip
    assert (len(sizes), set(sizes.values())) == (200, {5})


# ---- churn


def test_a_script_says_what_happens_when_to_whom() -> None:
    text = """
    at 300 kill 3               # for good
    at 5m kill b back 60
    at 15m freeze 1 for 30
    at 1h cut 2 for 1m
    at 2h join 3
    """
    assert parse_script(text, ["a", "b", "c", "d"]) == [
        Mishap(300.0, "kill", 3),
        Mishap(300.0, "kill", 1, 60.0),
        Mishap(900.0, "freeze", 1, 30.0),
        Mishap(3600.0, "cut", 2, 60.0),
        Mishap(7200.0, "join", 3),
    ]


@pytest.mark.parametrize(
    "line",
    ["kill 3", "at 5 kill 9", "at 5 kill z", "at x kill 1", "at 5 freeze 1", "at 5 cut 1 back 3",
     "at 5 join 0", "at 5 kill 1 for 3", "at 5 eat 1", "at 5 kill ²", "at 5 kill " + "9" * 5000],
)  # fmt: skip
def test_a_line_that_says_nothing_is_named_by_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2|no time"):
        parse_script("# first\n" + line, ["a", "b"])


def test_drawn_churn_is_a_function_of_its_seed_and_spares_the_first() -> None:
    found = [draw("mtbf=2h, back=10m", 5, 86_400.0, Random(seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert {each.who for each in found[0]} == {1, 2, 3, 4}
    assert 20 <= len(found[0]) <= 70  # 4 machines x 24 h / 2 h 10 min: 44 on the mean
    assert all(each.for_s is None for each in draw("mtbf=1h", 4, 86_400.0, Random(0)))
    assert seconds_of("1.5h", "churn") == 5400.0
    for wrong in ("mtbf", "mtbf=0", "back=3", "mtbf=1h,mtbf=2h", "often=1"):
        with pytest.raises(ConfigError):
            draw(wrong, 3, 10.0, Random(0))


# ---- runs


def test_a_round_takes_the_slowest_links_time_and_every_machine_counts() -> None:
    played = play(RunSettings(sync_every=50, rounds=4, codec="int8"))
    # a butterfly of three: each sends 4/3 vectors of 1.016 MB over 1.25 MB/s, 1.08 s, beside 5 s
    ideal = 5.0 / (5.0 + 1.084)
    assert (played.rounds, played.ended) == (4, "finished")
    assert [count for _, count in played.counted] == [3, 3, 3, 3]
    assert [machine.steps for machine in played.machines[:2]] == [200, 200]
    assert ideal - 0.06 < played.machines[0].share < ideal
    assert played.samples == sum(machine.samples for machine in played.machines)
    assert 4 * 4 / 3 * 1.016e6 < played.machines[1].bytes_sent < 1.15 * 4 * 4 / 3 * 1.016e6


@pytest.mark.parametrize(("overlap", "delay"), [("none", None), ("late", 3)])
def test_a_round_takes_as_long_as_a_plan_says(overlap: Any, delay: int | None) -> None:
    """Both count on the payload that a line carries with real nodes, and on their work."""
    settings = RunSettings(sync_every=20, rounds=4, overlap=overlap, delay=delay)
    played = play(settings, "2 x 200ms@20Mbit", parameters=20_000_000)
    peers = tuple(PeerConditions(f"p{n}", 2.5e6, 2.5e6, 0.2) for n in range(2))
    choice = Choice(20, settings.codec, overlap, delay)
    said = estimate(Conditions(20_000_000, peers, rtt_s=4 * 0.0125), choice)
    (first_s, _), *_, (last_s, _) = played.counted
    assert (last_s - first_s) / 3 == pytest.approx(said.period_s, rel=0.05)


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_larger_model_takes_as_many_bytes_more_and_is_no_slower_to_play() -> None:
    small, large = (
        play(RunSettings(sync_every=500, rounds=2), "3 x 100ms@100Mbit", parameters=size)
        for size in (1_000_000, 100_000_000)
    )
    assert 90 < large.machines[1].bytes_sent / small.machines[1].bytes_sent < 101
    assert large.counted[-1][1] == 3
    assert small.share > large.share > 0.75


def test_the_same_seed_gives_the_same_run_and_late_results_wait_less() -> None:
    settings = RunSettings(sync_every=20, rounds=5)
    first, again = (play(settings, seed=3) for _ in range(2))
    assert (first.counted, first.events, first.bytes) == (again.counted, again.events, again.bytes)
    late = RunSettings(sync_every=20, rounds=5, overlap="late", delay=15)
    assert play(late, seed=3).share > first.share + 0.2


def test_fragments_travel_one_by_one() -> None:
    played = play(RunSettings(sync_every=20, rounds=3, fragments=2), "3 x 100ms@10Mbit")
    assert (played.rounds, played.ended) == (3, "finished")
    assert len(played.counted) == 6
    assert {event.fragment for event in played.events if event.kind == "round.committed"} == {0, 1}


def churned(lines: str, rounds: int = 12, *, of: str = "500ms", every: int = 20) -> PlayedRun:
    peers = fleet(f"4 x {of}@20Mbit")
    mishaps = parse_script(lines, [peer.name for peer in peers])
    settings = RunSettings(sync_every=every, rounds=rounds)
    return FleetRun(settings, peers, 1_000_000, mishaps=mishaps).play()


def test_machines_alike_are_all_in_a_round_however_long_their_steps_are() -> None:
    """A wait of five seconds would end each round in the middle of the other's step."""
    steps = RunSettings(sync_every=10, rounds=4)
    played = play(steps, "16s@20Mbit, 17s@20Mbit", parameters=10_000)
    assert [count for _, count in played.counted] == [2] * 4


def test_who_dies_is_missing_from_rounds_until_it_is_back() -> None:
    played = churned("at 25 kill 3 back 30")
    counts = [count for _, count in played.counted]
    assert counts[:2] == [4, 4]
    assert 3 in counts[2:6]
    assert counts[-1] == 4
    assert [machine.deaths for machine in played.machines] == [0, 0, 0, 1]


def test_who_comes_late_counts_from_then_on() -> None:
    played = churned("at 35 join 3")
    counts = [count for _, count in played.counted]
    assert counts[:3] == [3, 3, 3]
    assert counts[-1] == 4
    assert 0 < played.machines[3].samples < played.machines[2].samples


def test_who_is_cut_off_or_frozen_misses_rounds_and_comes_back() -> None:
    played = churned("at 22 cut 2 for 30\nat 80 freeze 1 for 15")
    counts = [count for _, count in played.counted]
    assert counts[:2] == [4, 4]
    # Thirty seconds last over three rounds of eleven, fifteen over two. Who comes back has a
    # contribution at once and opens one round more, in the middle of the others' turn.
    assert counts[2:5] == [3, 3, 3]
    assert counts[5] < 3
    assert counts[6:] == [4, 3, 3, 4, 4, 4]


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_run_without_a_quorum_stalls_and_says_so() -> None:
    played = churned("at 25 kill 1\nat 25 kill 2\nat 25 kill 3", of="2s", every=5)
    assert (played.ended, played.rounds) == ("stalled", 2)
    assert played.silent_s >= 1800


def linear_task() -> Task:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=rng)
    y = (x[:, 0] > 0).long()

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(8, 2)

    return Task(model, x[:300], y[:300], x[300:], y[300:])


def test_the_loss_is_measured_and_the_page_shows_the_run(tmp_path: Path) -> None:
    settings = RunSettings(
        sync_every=10, rounds=6, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
    )
    played = play(settings, parameters=18, task=linear_task(), lr=0.05, start_at=1000.0)
    assert [round_ for _, round_, _ in played.loss] == [1, 2, 3, 4, 5, 6]
    assert played.loss[-1][2] < 0.6 * played.loss[0][2]
    diary.record(tmp_path / "events.jsonl", "simulated", "tried", played.events)
    picture = RunPicture()
    for event in diary.recorded(tmp_path / "events.jsonl"):
        picture.take(event, event.by)
    assert [row.round for row in picture.rounds] == [1, 2, 3, 4, 5, 6]
    assert {row.who.bit_count() for row in picture.rounds} == {3}
    assert len(picture.curves) == 3


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_large_fleet_comes_in_by_waves_adds_up_in_three_levels_and_bears_churn() -> None:
    """Two machines die for good, one comes back, one comes late: rounds go on, all the while with
    everybody who is there.
    """
    deeds = [
        Mishap(1.0, "kill", 3),
        Mishap(3.0, "kill", 17, 4.0),
        Mishap(6.5, "join", 47),
        Mishap(8.0, "kill", 30),
    ]
    run = FleetRun(
        RunSettings(sync_every=10, rounds=6, plan="three-level"),
        fleet("48 x 200ms@1Gbit in 3 sites of 4 hosts"),
        parameters=100_000,
        mishaps=deeds,
    )
    plays = _Play(run, lambda played: None)
    knocks = Counter[tuple[str, float]]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: bytes) -> bool:
        tag = outline(payload[1:], sender).tag if payload[:1] == b"R" else ""
        knocks[sender, plays.swarm.world.now] += tag == "join"
        return False

    plays.swarm.network.tap = tap
    played = plays.run()
    assert (played.ended, played.rounds) == ("finished", 6)
    assert min(count for _, count in played.counted) >= 44
    assert played.machines[47].rounds >= 2
    assert 3 <= played.machines[17].rounds < 6
    assert played.machines[30].rounds < played.machines[31].rounds == 6
    late = [count for (sender, _), count in knocks.items() if sender == "200ms-48"]
    assert late
    assert max(late) <= 3 + 3 + 1 + 5  # conveners, the organiser, and some
    processes = [peer.process for peer in plays.swarm.peers if peer.process is not None]
    assert max(len(process.plane._sender.boxes) for process in processes[1:]) < 40


# ---- the command

MANIFEST = """\
schema = 1
name = "tried"
[model]
entry = "local:lm"
parameters = 1000000
[train]
sync_every = 20
rounds = 3
"""


def simulate(tmp_path: Path, *options: str) -> tuple[int, str, str]:
    (tmp_path / "run.toml").write_text(MANIFEST)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["simulate", str(tmp_path / "run.toml"), *options])
    return code, out.getvalue(), err.getvalue()


def test_the_command_prints_a_table_a_document_and_files(tmp_path: Path) -> None:
    (tmp_path / "churn").write_text("at 3 kill 1 back 5\n")
    options = [
        "--peers",
        THREE,
        "--untrained",
        "--churn",
        str(tmp_path / "churn"),
        "--out",
        str(tmp_path / "out"),
    ]
    code, out, err = simulate(tmp_path, *options)
    assert (code, out.splitlines()[0].split()[0]) == (0, "MACHINE")
    assert "died once" in out
    assert "round 3: " in err
    found = json.loads((tmp_path / "out/simulation.json").read_text())
    assert (found["rounds"], found["ended"], len(found["machines"])) == (3, "finished", 3)
    assert sum(1 for _ in diary.recorded(tmp_path / "out/events.jsonl")) > 6
    code, out, _ = simulate(tmp_path, "--peers", THREE, "--untrained", "--json", "--seed", "0")
    assert (code, json.loads(out)["parameters"]) == (0, 1_000_000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peers", "8 x toaster@1Gbit"], "no machine that is known"),
        (["--peers", THREE, "--alpha", "1"], "--alpha does not go with --peers"),
        (["--peers", THREE, "--churn", "nowhere.txt"], "cannot be read"),
        (["--peers", ""], "at least 1"),
        (["--peers", "4090@1Gbit"], "how long does a step take"),
    ],
)
def test_what_cannot_be_played_is_refused(
    tmp_path: Path, options: Sequence[str], words: str
) -> None:
    code, _, err = simulate(tmp_path, *options)
    assert code == 78
    assert words in err
