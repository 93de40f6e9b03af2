"""The page in a browser: what it draws, what it asks for, and whether everybody can use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser_kit import CHROMIUM, Browser, serious
from hostile_words import HOSTILE
from house import ROOT
from look_kit import made_up, page, write

from atoll.collectives.codec_names import CODECS, DEFAULT_CODEC

pytest.importorskip("starlette", reason="the page needs the extra ui")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium"),
]
OUT = ROOT / ".ci/out"
REDRAW_MS = 200.0


def recorded(folder: Path, *events: dict[str, Any], rounds: int = 120) -> Path:
    made = made_up(rounds, 4, killed=rounds * 2 // 5, late=rounds * 3 // 5)
    return write(folder / "events.jsonl", iter([*made, *events]))


def test_a_recorded_run_light_dark_and_on_a_phone(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        assert browser.run("document.querySelector('[data-key=round]').textContent") == "120"
        assert browser.run("document.querySelectorAll('#members tbody tr').length") == 5
        browser.run("document.getElementById('timeline-box').focus()")
        browser.run(
            "document.getElementById('timeline-box').dispatchEvent("
            "new KeyboardEvent('keydown', {key: 'Home'}))"
        )
        assert browser.run("document.getElementById('round-now').textContent").startswith(
            "Round 1,"
        )
        browser.until("document.getElementById('w-codec')")
        codecs = "[...document.getElementById('w-codec').options].map((one) => one.value)"
        assert tuple(browser.run(codecs)) == CODECS
        assert browser.run("document.getElementById('w-codec').value") == DEFAULT_CODEC
        browser.picture(OUT / "page-light.png")
        for dark, width in ((False, 1240), (True, 1240), (True, 390)):
            browser.scheme(dark=dark)
            browser.shape(width, 900)
            assert serious(browser) == []
            assert browser.run("document.documentElement.scrollWidth") <= width
            browser.picture(OUT / f"page-{'dark' if dark else 'light'}-{width}.png")
        assert browser.errors == []
        assert {url.split("/")[2] for url in browser.requests} == {address.split("/")[2]}
        assert not any(address.split("#")[1] in url.split("#")[0] for url in browser.requests)


def test_the_recording_in_the_docs_is_a_page(tmp_path: Path) -> None:
    file = ROOT / "docs/demo/events.jsonl.gz"
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        assert browser.run("document.getElementById('name').textContent").startswith("demo")
        assert browser.run("document.querySelector('[data-key=round]').textContent") == "35 / 35"
        assert browser.run("document.querySelectorAll('#members tbody tr').length") == 4
        for dark in (False, True):
            browser.scheme(dark=dark)
            assert serious(browser) == []
        assert browser.errors == []


def test_ten_thousand_rounds_are_redrawn_at_once(tmp_path: Path) -> None:
    file = recorded(tmp_path, rounds=10_000)
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        browser.run("document.querySelector('[data-last=\"0\"]').click()")
        taken = [float(browser.run("draw(), document.body.dataset.drawMs")) for _ in range(5)]
        assert min(taken) <= REDRAW_MS, taken


def test_hostile_words_are_text_on_the_page(tmp_path: Path) -> None:
    words = [*HOSTILE.values(), "<img src=x onerror=window.hit=1>", "<script>hit=1</script>"]
    told = [
        {"at": 2e6, "event": "verdict.raised", "code": "E1", "subject": w[:400], "said": w[:4000]}
        for w in words
        if w.isascii() or w.encode(errors="ignore").decode() == w
    ]
    spoilt = {"at": 2e6, "event": "peer.misbehaved", "peer": words[-1], "reason": words[-2]}
    file = recorded(tmp_path, *told, spoilt)
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        assert browser.run("typeof window.hit") == "undefined"
        assert browser.run("document.querySelectorAll('img').length") == 1, "the icon"
        assert "<script>hit=1" in browser.run("document.getElementById('wrong').textContent")
        assert browser.errors == []
