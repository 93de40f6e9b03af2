"""A real node that serves metrics."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import LISTEN, atoll, nothing_stays, start
from prometheus_client.parser import text_string_to_metric_families
from tiny_run import TINY

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


def test_metrics_of_a_run_say_what_status_says(tmp_path: Path) -> None:
    home = tmp_path / "a"
    (tmp_path / "run.toml").write_text(TINY)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = atoll(home, "up", "--background", "--metrics", f":{port}", *LISTEN, status=73)
        assert refused["error"]["code"] == "E101"
    atoll(home, "up", "--background", "--metrics", f":{port}", *LISTEN)
    try:
        atoll(home, "new", str(tmp_path / "run.toml"))
        joined = start(home, "join", "tiny", "--yes", "--json")
        _, err = joined.communicate(timeout=150)
        assert joined.returncode == 0, err
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        run = atoll(home, "status", "tiny")["runs"][0]
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found["atoll_round"] == run["round"] == 6
        assert found["atoll_finished"] == 1
        assert found["atoll_samples"] == sum(run["last_round"]["contributors"].values()) > 0
        assert found["atoll_last_round_timestamp_seconds"] == pytest.approx(run["last_round"]["at"])
        assert found["atoll_memory_bytes"] > 10 << 20
        assert found["atoll_disk_bytes"] > 0
    finally:
        atoll(home, "down", "--scripts", "--now")
