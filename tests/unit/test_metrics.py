"""Metrics of a node: one function from its documents to Prometheus' text, and who may ask."""

from __future__ import annotations

import json
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hostile_words import HOSTILE, harmful
from house import ROOT
from prometheus_client.parser import text_string_to_metric_families

from atoll.collectives.errors import ConfigError, SwarmClosedError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.telemetry import ReductionTimed
from atoll.node.home.config import NodeConfig, load_config, set_value
from atoll.node.home.endpoint import Endpoint, endpoint_of
from atoll.node.home.memory_use import resident_bytes
from atoll.node.home.paths import find_paths
from atoll.node.look.allowed import EVERYTHING, Allowed
from atoll.node.look.machine import MachineReadings, find_nvml
from atoll.node.look.metrics import NODE_METRICS, RUN_METRICS, NodeDocuments, exposition
from atoll.node.look.metrics_server import MOST, REQUEST_S, MetricsServer
from atoll.node.run.status import FIGURES
from atoll.node.session.events import Timed
from atoll.node.watching.timings import Timings

NAMES = {metric.name for metric in (*NODE_METRICS, *RUN_METRICS)}
Labels = tuple[tuple[str, str], ...]


def status(run: str = "abc", **more: Any) -> dict[str, Any]:
    """A status document with everything in it."""
    return {
        "uptime_s": 12.5,
        "memory_bytes": 1 << 20,
        "lane_bytes": {
            "direct": {"sent": 10, "received": 20},
            "relay": {"sent": 1, "received": 2},
        },
        "network": {
            "connected": ["b", "c"],
            "lanes": {"b": "direct, not encrypted", "c": "relay"},
            "bytes_sent": 5,
            "bytes_received": 6,
            "relayed": {"circuits": 0, "bytes": 7},
        },
        "machine": {
            "energy_joules": {"package-0": 8.5},
            "gpus": [
                {
                    "index": 0,
                    "name": "H100",
                    "busy": 0.5,
                    "memory_bytes": 1 << 30,
                    "watts": 300.0,
                    "joules": 4.0,
                    "celsius": 60,
                }
            ],
        },
        "runs": [
            {
                "run_id": run,
                "name": "tiny",
                "round": 3,
                "rounds": 6,
                "finished": False,
                "script": True,
                "members": ["a", "b", "c"],
                "unreachable": ["c"],
                "quorum": {"held": True},
                "last_round": {
                    "event": "round.committed",
                    "round": 4,
                    "contributors": {"a": 8, "b": 16},
                    "at": 1e9,
                },
                "timings": {
                    "reductions": 3,
                    "transfer_s": 1.5,
                    "decision_s": 0.25,
                    "training_share": 0.9,
                },
                "privacy": {"epsilon": 1.25, "stop_at_epsilon": 8.0},
                **{figure.field: 4096 for figure in FIGURES},
                "verdicts": [{"code": "V01"}],
                "trouble": {"code": "E302"},
                "metrics": {"loss": 2.0, "broken": float("nan")},
                **more,
            }
        ],
    }


PEERS = [
    {"peer": "a", "you": True, "member": True, "live": True, "path": "self"},
    {"peer": "b", "member": True, "live": True, "path": "direct", "over_budget": {"get": 2}},
    {"peer": "c", "member": True, "live": False, "path": "relay", "over_budget": {"get": 3}},
    {"peer": "d", "member": False, "live": True, "path": "direct"},
]


def documents(
    allowed: Allowed | None = EVERYTHING, machine: dict[str, Any] | None = None, **more: Any
) -> NodeDocuments:
    told = status(**more)
    told["machine"] = told["machine"] if machine is None else machine
    return NodeDocuments(told, {"abc": PEERS}, {"abc": allowed} if allowed is not None else {})


def read(text: bytes) -> dict[tuple[str, Labels], float]:
    """By name and labels, without those of the run."""
    return {
        (
            sample.name,
            tuple(sorted((k, v) for k, v in sample.labels.items() if not k.startswith("run"))),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_each_metric_says_what_the_documents_say() -> None:
    found = read(exposition(documents()))
    assert {name for name, _ in found} == NAMES

    def value(name: str, **labels: str) -> float:
        return found[f"atoll_{name}", tuple(sorted(labels.items()))]

    assert value("lanes", path="direct") == value("lanes", path="relay") == 1
    assert value("lane_bytes_total", path="direct", direction="received") == 20
    assert value("message_bytes_total", direction="sent") == 5
    assert value("machine_energy_joules_total", zone="package-0") == 8.5
    assert value("gpu_busy", gpu="0", gpu_name="H100") == 0.5
    assert value("gpu_celsius", gpu="0", gpu_name="H100") == 60
    assert (value("round"), value("rounds_wanted"), value("finished")) == (3, 6, 0)
    assert (value("members"), value("members_unreachable"), value("quorum_held")) == (3, 1, 1)
    assert (value("contributors"), value("samples")) == (2, 24)
    assert value("transfer_seconds_total") == 1.5
    assert value("decision_seconds_total") == 0.25
    assert value("training_share") == 0.9
    assert (value("epsilon_spent"), value("epsilon_limit")) == (1.25, 8)
    assert value("refused_by_budget_total", kind="get") == 5
    assert value("wrong", code="V01") == value("wrong", code="E302") == 1
    assert value("script_report", metric="loss") == 2
    assert ("atoll_script_report", (("metric", "broken"),)) not in found
    reachable = {labels: v for (name, labels), v in found.items() if name == "atoll_peer_reachable"}
    assert [(dict(labels)["peer"], v) for labels, v in reachable.items()] == [("b", 1), ("c", 0)]


@pytest.mark.parametrize(
    ("allowed", "kept_back"),
    [
        (Allowed(samples=True, timings=False, losses=False), {"timings", "losses"}),
        (Allowed(samples=False, timings=False, losses=False), {"samples", "timings", "losses"}),
        (None, {"samples", "timings", "losses"}),
    ],
)
def test_what_a_federated_run_keeps_back_is_left_out(
    allowed: Allowed | None, kept_back: set[str]
) -> None:
    hidden = {metric.name for metric in RUN_METRICS if metric.keeps in kept_back}
    found = {name for name, _ in read(exposition(documents(allowed)))}
    assert hidden
    assert found == NAMES - hidden


def test_a_node_that_says_little_has_the_metrics_it_has() -> None:
    assert read(exposition(NodeDocuments({}, {}, {}))) == {("atoll_connected_peers", ()): 0.0}
    bare = NodeDocuments({"runs": [{"run_id": "abc"}]}, {}, {})
    assert {name for name, _ in read(exposition(bare))} == {
        "atoll_connected_peers",
        "atoll_finished",
        "atoll_members",
        "atoll_members_unreachable",
        "atoll_round",
        "atoll_script_attached",
    }


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_words_are_labels(text: str) -> None:
    peers = [
        {"peer": text, "member": True, "live": True, "path": text, "over_budget": {text: 1}},
        {"peer": text + " ", "member": True, "live": True, "path": text},
    ]
    told = status(run=text, name=text, metrics={text: 1.0}, verdicts=[{"code": text}])
    told["network"]["lanes"] = {text: text}
    told["lane_bytes"] = {text: {"sent": 1}}
    exposed = exposition(NodeDocuments(told, {text: peers}, {text: EVERYTHING})).decode()
    assert harmful(exposed) == set()
    lines = exposed.splitlines()
    assert all(
        re.match(r'(# (HELP|TYPE) )?atoll_\w+( \S|\{(\w+="([^"\\]|\\.)*",?)+\} \S+$)', line)
        for line in lines
    )
    assert max(map(len, lines)) < 6 * 12 * 128
    assert {name for name, _ in read(exposed.encode())} == NAMES


def test_an_address_is_of_this_machine_unless_another_is_named() -> None:
    def at(text: str) -> Endpoint | None:
        return endpoint_of(text, "node.metrics")

    assert at("") is None
    assert at(":9464") == Endpoint("127.0.0.1", 9464)
    assert at("[::1]:9464") == Endpoint("::1", 9464)
    for text, local in (
        (":1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
    ):
        assert (found := at(text)) is not None
        assert found.local is local
    for wrong in (
        "9464",
        ":",
        ":0",
        ":65536",
        ":x",
        "::1:9464",
        "a b:1",
        "[a]:1",
        "[]:1",
        "[1.2.3.4]:1",
    ):
        with pytest.raises(ConfigError) as error:
            at(wrong)
        assert (error.value.code, error.value.key) == ("E413", "$.node.metrics")


def test_the_setting_is_checked_when_it_is_set(tmp_path: Any) -> None:
    paths = find_paths(str(tmp_path))
    with pytest.raises(ConfigError):
        set_value(paths, "node.metrics", "everywhere")
    set_value(paths, "node.metrics", ":9464")
    assert load_config(paths, environ={}).config.metrics == Endpoint("127.0.0.1", 9464)
    assert NodeConfig().metrics is None


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=30
        ) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_port_that_is_taken_is_told_with_a_code() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ConfigError) as error:
            MetricsServer(Endpoint("127.0.0.1", int(sock.getsockname()[1])))
    assert (error.value.code, error.value.exit_code) == ("E101", 73)
    assert "--metrics" in error.value.hint


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("half", [b"", b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_who_asks_is_answered_whatever_others_leave_half_sent(half: bytes) -> None:
    endpoint = Endpoint("127.0.0.1", _free_port())
    server = MetricsServer(endpoint)
    server.start(documents)
    try:
        with ExitStack() as stack:
            crowd = list[socket.socket]()
            for _ in range(3 * MOST):
                crowd.append(socket.create_connection((endpoint.host, endpoint.port)))
                stack.enter_context(crowd[-1]).sendall(half)
            with urllib.request.urlopen(endpoint.url, timeout=REQUEST_S - 1) as answer:
                assert answer.status == 200
            crowd[0].settimeout(REQUEST_S)
            assert crowd[0].recv(1) == b""  # it made room
    finally:
        server.close()


def test_more_requests_than_are_answered_at_once_end() -> None:
    endpoint = Endpoint("127.0.0.1", _free_port())
    server, held = MetricsServer(endpoint), threading.Event()

    def told() -> NodeDocuments:
        held.wait()
        return documents()

    server.start(told)
    asking = b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"
    try:
        with ExitStack() as stack:
            crowd = list[socket.socket]()
            for _ in range(MOST + 4):
                crowd.append(socket.create_connection((endpoint.host, endpoint.port)))
                stack.enter_context(crowd[-1]).sendall(asking)
            ended, _, _ = select.select(crowd, [], [], REQUEST_S)
            assert ended
            assert all(sock.recv(1) == b"" for sock in ended)
            held.set()
            answered = [_whole(sock).startswith(b"HTTP/1.0 200") for sock in crowd]
            assert sum(answered) >= MOST
    finally:
        held.set()
        server.close()


def _whole(sock: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(65536):
            found += more
    return found


def test_who_asks_is_answered_and_a_page_of_elsewhere_is_not() -> None:
    endpoint = Endpoint("127.0.0.1", _free_port())
    server = MetricsServer(endpoint)
    gone = list[bool]()

    def told() -> NodeDocuments:
        if gone:
            raise SwarmClosedError("the node ended")
        return documents()

    server.start(told)
    try:
        code, text = _get(endpoint.url)
        assert code == 200
        assert {name for name, _ in read(text.encode())} == NAMES
        assert _get(endpoint.url, Host="evil.example")[0] == 403
        assert _get(endpoint.url.replace("/metrics", "/"))[0] == 404
        gone.append(True)
        assert _get(endpoint.url) == (503, "the node ended\n")
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        _get(endpoint.url)


def test_the_page_the_board_and_the_alerts_name_what_is_exposed() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(atoll_\w+)`", page, flags=re.MULTILINE)) == NAMES
    board = json.loads((ROOT / "docs/metrics/grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    rules = (ROOT / "docs/metrics/alerts.yml").read_text(encoding="utf-8")
    alerts = re.findall(r"^ +expr: (.+)$", rules, flags=re.MULTILINE)
    assert len(queries) > 10
    assert len(alerts) == rules.count("- alert:") > 5
    for query in (*queries, *alerts):
        named = set(re.findall(r"\batoll_\w+", query))
        assert named, query
        assert named <= NAMES


RUN = '{run="abc", run_name="tiny"}'
HEALTHY = {  # for an hour and a half, a sample a minute
    f"atoll_last_round_timestamp_seconds{RUN}": "0+60x90",
    f"atoll_finished{RUN}": "0x90",
    f"atoll_script_attached{RUN}": "1x90",
    f"atoll_quorum_held{RUN}": "1x90",
    f"atoll_training_share{RUN}": "0.9x90",
    f"atoll_epsilon_spent{RUN}": "1x90",
    f"atoll_epsilon_limit{RUN}": "8x90",
    'atoll_wrong{run="abc", run_name="tiny", code="V01"}': "0x90",
    'atoll_refused_by_budget_total{run="abc", run_name="tiny", kind="get"}': "0x90",
}
CAUSES = {
    "AtollNoRound": {f"atoll_last_round_timestamp_seconds{RUN}": "0x90"},
    "AtollNoQuorum": {f"atoll_quorum_held{RUN}": "0x90"},
    "AtollWrong": {'atoll_wrong{run="abc", run_name="tiny", code="V01"}': "1x90"},
    "AtollScriptGone": {f"atoll_script_attached{RUN}": "0x90"},
    "AtollTrainsTooLittle": {f"atoll_training_share{RUN}": "0.4x90"},
    "AtollPrivacyNearlySpent": {f"atoll_epsilon_spent{RUN}": "7.5x90"},
    "AtollRefusesMuch": {
        'atoll_refused_by_budget_total{run="abc", run_name="tiny", kind="get"}': "0+300x90"
    },
}
PROMTOOL = shutil.which("promtool")
prometheus = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here (Debian's package prometheus has it)"
)


def promtool(*argv: str, stdin: bytes = b"") -> str:
    """What promtool says, which must find nothing wrong."""
    assert PROMTOOL is not None
    told = subprocess.run([PROMTOOL, *argv], input=stdin, capture_output=True, timeout=120)
    assert told.returncode == 0, (told.stdout + told.stderr).decode()
    return told.stdout.decode()


@prometheus
def test_promtool_takes_the_text_and_the_boards_queries(tmp_path: Path) -> None:
    assert promtool("check", "metrics", stdin=exposition(documents())) == ""
    board = json.loads((ROOT / "docs/metrics/grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [{"record": f"a:{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "board.yml"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(file))


@prometheus
def test_each_alert_is_raised_by_its_cause_and_none_without(tmp_path: Path) -> None:
    rules = ROOT / "docs/metrics/alerts.yml"
    assert f"{len(CAUSES)} rules found" in promtool("check", "rules", str(rules))

    def case(cause: dict[str, str], raised: str) -> dict[str, Any]:
        series = [{"series": name, "values": told} for name, told in (HEALTHY | cause).items()]
        return {
            "interval": "1m",
            "input_series": series,
            # each alert, and whether it is there: what it says is not compared
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                    "eval_time": "85m",
                    "exp_samples": [{"labels": "{}", "value": int(name == raised)}],
                }
                for name in CAUSES
            ],
        }

    cases = [case({}, ""), *(case(cause, name) for name, cause in CAUSES.items())]
    file = tmp_path / "causes.yml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "tests": cases}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def zone(folder: Path, name: str, energy: int) -> Path:
    """An energy counter as the kernel shows it; it is full at 999."""
    folder.mkdir()
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text("999\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder / "energy_uj"


def test_energy_is_counted_over_a_full_counter(tmp_path: Path) -> None:
    package = zone(tmp_path / "intel-rapl:0", "package-0", 900)
    zone(tmp_path / "intel-rapl:0:0", "core", 5)
    zone(tmp_path / "intel-rapl:1", "broken", 0).write_text("none\n")
    zone(tmp_path / "intel-rapl-mmio:0", "package-0", 0)  # the same energy once more
    (tmp_path / "intel-rapl").mkdir()
    machine = MachineReadings(tmp_path)
    package.write_text("100\n")  # it began anew at 1000
    assert machine.read() == {
        "energy_joules": {"package-0": 200e-6, "package-0/core": 0.0},
        "gpus": [],
    }
    package.write_text("150\n")
    assert machine.read()["energy_joules"]["package-0"] == 250e-6
    package.unlink()
    assert machine.read()["energy_joules"] == {"package-0/core": 0.0}


def test_without_counters_and_gpus_there_are_no_readings(tmp_path: Path) -> None:
    found = MachineReadings(tmp_path / "none").read()
    assert found == {"energy_joules": {}, "gpus": []}
    names = {name for name, _ in read(exposition(documents(machine=found)))}
    assert not any("gpu" in name or "machine" in name for name in names)


def test_a_device_is_read_by_nvidias_library() -> None:
    nvml = find_nvml()
    if nvml is None:
        pytest.skip("no NVIDIA driver, or no nvidia-ml-py, on this machine")
    (gpu, *_) = MachineReadings(nvml=nvml).read()["gpus"]
    assert gpu["memory_bytes"] > 0
    assert 0 <= gpu["busy"] <= 1


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    class NvmlError(Exception):
        """As NVIDIA's library raises it."""

    def fails(*_: object) -> float:
        raise NvmlError

    nvml = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index if index == 0 else fails(),
        nvmlDeviceGetName=lambda device: b"Tesla\xff",
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=25),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=7),
        nvmlDeviceGetPowerUsage=lambda device: 1500,
        nvmlDeviceGetTotalEnergyConsumption=fails,
        nvmlDeviceGetTemperature=fails,
    )
    (gpu,) = MachineReadings(nvml=nvml).read()["gpus"]
    assert gpu == {
        "index": 0,
        "name": "Tesla\ufffd",
        "busy": 0.25,
        "memory_bytes": 7,
        "watts": 1.5,
    }


def test_timings_of_all_rounds_add_up() -> None:
    timings = Timings(RunId("run"), lambda event: None, dict)
    me = PeerId("a")

    def over(now: float, op_id: str = "") -> None:
        told = ReductionTimed(
            me, "main/run", 1, op_id, "mean", "fp32", 8, (me,), 1, 1, 0,
            0.5, 1.5, 2.0, 2.5, {"ready": {me: 0.5}}, None,
        )  # fmt: skip
        timings.timed(now, Timed(now - 2.5, told))

    assert timings.view()["training_share"] is None
    over(10.0)
    over(30.0)
    over(31.0, "of a script")
    assert timings.view() == {
        "reductions": 2,
        "transfer_s": 2.0,
        "decision_s": 1.0,
        "training_share": 0.9,  # 2 of 20 s were waited
    }


def test_memory_is_that_of_the_process() -> None:
    found = resident_bytes()
    assert found is None or 10 << 20 < found < 1 << 40


def test_nothing_is_loaded_unless_asked_for() -> None:
    code = (
        "import sys; import atoll.node.__main__ as m; a = m._parser().parse_args([]);"
        "assert m._metrics(m._settings(a).config.metrics) is None;"
        "print([n for n in sys.modules if n.startswith(('prometheus', 'atoll.node.look'))])"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert made.stdout.strip() == "[]"
