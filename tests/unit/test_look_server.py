"""The server of the page: who may ask, what it answers, and that nothing leads elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from look_kit import made_up, write

from atoll.collectives.codec_names import CODECS
from atoll.node.look.source import Replay

pytest.importorskip("starlette", reason="the page needs the extra ui")
httpx = pytest.importorskip("httpx")

from atoll.node.look.server import FILES, PageServer  # noqa: E402

HOST = "127.0.0.1:8000"


def asked(tmp_path: Path, path: str, method: str = "GET", **headers: str) -> Any:
    import asyncio

    async def one() -> Any:
        transport = httpx.ASGITransport(app=page.application())
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            return await client.request(method, path, headers=headers)

    with Replay([write(tmp_path / "events.jsonl", made_up(12))]) as source:
        page = PageServer(source, "secret", frozenset({HOST}))
        return asyncio.run(one())


def test_the_run_is_told_to_whoever_has_the_token(tmp_path: Path) -> None:
    told = {"x-atoll-token": "secret"}
    found = asked(tmp_path, "/api/run", **told)
    assert found.status_code == 200
    assert found.json()["quick"]["round"] == 12
    rest = asked(tmp_path, "/api/run?rounds=11&lines=99", **told).json()
    assert rest["rounds"]["round"] == [12]
    for path in ("/api/run?rounds=-1", "/api/run?rounds=x", "/api/run?rounds=" + "9" * 40):
        assert asked(tmp_path, path, **told).json()["rounds"]["first"] == 0


@pytest.mark.parametrize("token", ["", "Secret", "secret ", "s", "secretsecret"])
@pytest.mark.parametrize("path", ["/api/run", "/api/what-if"])
def test_without_the_token_nothing_is_told(tmp_path: Path, path: str, token: str) -> None:
    told = {"x-atoll-token": token} if token else {}
    assert asked(tmp_path, path, **told).status_code == 403
    assert asked(tmp_path, f"{path}?token=secret").status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1", "[::1]:8000"])
@pytest.mark.parametrize("path", ["/", "/page.js", "/api/run"])
def test_another_hosts_name_leads_nowhere(tmp_path: Path, path: str, host: str) -> None:
    found = asked(tmp_path, path, host=host, **{"x-atoll-token": "secret"})
    assert found.status_code == 421


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/", 405), ("PUT", "/api/run", 405), ("GET", "/api", 404)],
)
def test_what_is_not_there_is_guarded_as_well(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    found = asked(tmp_path, path, method)
    assert found.status_code == status
    assert found.headers["content-security-policy"].startswith("default-src 'none';")
    assert found.headers["cache-control"] == "no-store"
    assert asked(tmp_path, path, method, host="evil.example").status_code == 421


@pytest.mark.parametrize("path", [*FILES, "/api/run"])
def test_every_answer_forbids_what_the_page_does_not_need(tmp_path: Path, path: str) -> None:
    found = asked(tmp_path, path, **{"x-atoll-token": "secret"})
    assert found.status_code == 200
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "set-cookie" not in found.headers
    assert "access-control-allow-origin" not in found.headers
    assert found.headers["cache-control"] == "no-store"


def test_files_name_no_other_host_and_hold_no_inline_script(tmp_path: Path) -> None:
    page = asked(tmp_path, "/").text
    assert re.findall(r"<script(?![^>]*src=)", page) == []
    assert re.findall(r"\son\w+=|style=", page) == []
    for path in ("/", "/page.js", "/draw.js", "/page.css"):
        text = asked(tmp_path, path).text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "innerHTML" not in text
    for path in ("/../server.py", "/static/page.js", "/%2e%2e/server.py"):
        assert asked(tmp_path, path).status_code in (404, 421)


def test_what_if(tmp_path: Path) -> None:
    told = {"x-atoll-token": "secret"}
    found = asked(tmp_path, "/api/what-if", **told).json()
    assert found["given"]["step_ms"] == 450.0  # 9 of 10 s, 20 steps
    assert tuple(found["among"]["codec"]) == CODECS
    assert found["given"]["codec"] in found["among"]["codec"]
    assert 0.9 < found["found"]["training_share"] < 1
    finer = asked(tmp_path, "/api/what-if?codec=int4&sync_every=50", **told).json()["found"]
    assert finer["bytes"] < found["found"]["bytes"]
    for query in ("codec=int3", "peers=0", "peers=x", "mbit=nan", "sync_every=1e99"):
        assert "error" in asked(tmp_path, f"/api/what-if?{query}", **told).json()
