"""The house of trust: locks with hashes, the bill of materials, the audit of dependencies."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from house import ROOT

LOCKS = ("requirements.lock", "requirements-test.lock")


def entries(lock: str) -> dict[str, str]:
    """By name: the lines of a package in a lock."""
    text = (ROOT / "scripts" / lock).read_text()
    found = [entry for entry in re.split(r"\n(?=[A-Za-z0-9])", text) if "==" in entry]
    return {entry.split("==")[0].lower().replace("_", "-"): entry for entry in found}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_the_tried_versions_and_hashes_of_all(lock: str) -> None:
    tried = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "scripts/constraints.txt").read_text().splitlines()
        if "==" in line
    )
    found = entries(lock)
    assert len(found) > 60
    for name, entry in found.items():
        version = re.match(r"[^=]+==([^\s;\\]+)", entry)
        assert version is not None
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), name
        assert tried.get(name, version[1]) == version[1], name
    assert "torch" not in found  # its builds differ: see scripts/_setup
    assert not [name for name in found if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_both_locks_agree_and_cover_what_is_declared() -> None:
    run, test = (entries(lock) for lock in LOCKS)
    assert run.keys() < test.keys()
    assert all(test[name].split()[0] == run[name].split()[0] for name in run)
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[ ]", row)[0].lower() for row in project["dependencies"]}
    assert declared - {"torch"} <= run.keys()
    wanted = {
        re.split(r"[<>=\[ ]", row)[0].lower() for row in project["optional-dependencies"]["test"]
    }
    assert wanted <= test.keys()


def test_the_bill_of_materials() -> None:
    command = [sys.executable, str(ROOT / "scripts/sbom.py")]
    one, other = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in "ab"
    )
    assert one == other
    found = json.loads(one)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", found["serialNumber"])
    parts = {part["name"].lower(): part for part in found["components"]}
    assert parts.keys() == {*entries(LOCKS[0]), "torch"}
    for name, part in parts.items():
        assert part["purl"] == f"pkg:pypi/{name}@{part['version']}"
        files = part.get("externalReferences", [])
        assert name == "torch" or files
        for file in files:
            assert re.fullmatch(r"[0-9a-f]{64}", file["hashes"][0]["content"])
    assert found["metadata"]["component"]["name"] == "atoll"
    assert set(found["dependencies"][0]["dependsOn"]) == {p["purl"] for p in parts.values()}


class Feed(http.server.BaseHTTPRequestHandler):
    """Knows one weakness, of one version of one package."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        weak = ("weak", "1.0")
        results = [
            {"vulns": [{"id": "TEST-1"}]} if (q["package"]["name"], q["version"]) == weak else {}
            for q in asked
        ]
        body = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def feed() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Feed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("version", "status"), [("1.0", 1), ("1.1", 0)])
def test_the_audit_names_what_is_known(
    feed: str, version: str, status: int, tmp_path: object
) -> None:
    lock = f"{tmp_path}/lock"
    with open(lock, "w", encoding="utf-8") as file:
        file.write(f"good==2.0 \\\n    --hash=sha256:{'0' * 64}\nweak=={version}\n")
    done = audit(feed, lock)
    assert done.returncode == status, done
    assert ("weak 1.0 has known weaknesses: TEST-1" in done.stdout) == bool(status)
    assert f"2 packages, {status} with known weaknesses" in done.stdout


def test_the_audit_is_skipped_with_one_line_where_there_is_no_feed() -> None:
    done = audit("http://127.0.0.1:1/")
    assert done.returncode == 0
    assert done.stdout.startswith("audit: skipped, no feed of advisories can be reached")
    assert done.stdout.count("\n") == 1


def audit(feed: str, *locks: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/audit.py"), *locks],
        env={"ATOLL_ADVISORIES": feed, "no_proxy": "127.0.0.1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
