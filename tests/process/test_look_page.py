"""The page in a browser: what it draws, what it asks for, and whether everybody can use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_kit import CHROMIUM, Browser, serious
from hostile_words import HOSTILE
from house import ROOT
from look_kit import RUN, made_up, page, peer_id, write

from atoll.collectives.codec_names import CODECS, DEFAULT_CODEC
from atoll.node.home.names import name_of

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


OVERLAPS = """
(() => {
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) {
    const of = node.parentElement;
    if (!node.data.trim() || !of.checkVisibility() || of.closest("option, .skip, noscript")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const { left, top, right, bottom } of range.getClientRects()) {
      const seen = { text: node.data, left, top, right, bottom };
      for (let box = of; box; box = box.parentElement) {
        if (getComputedStyle(box).overflowX === "visible" || box === document.documentElement) continue;
        const clip = box.getBoundingClientRect();
        seen.left = Math.max(seen.left, clip.left); seen.right = Math.min(seen.right, clip.right);
        seen.top = Math.max(seen.top, clip.top); seen.bottom = Math.min(seen.bottom, clip.bottom);
      }
      if (seen.right - seen.left > 1 && seen.bottom - seen.top > 1) found.push(seen);
    }
  }
  const pairs = [];
  found.forEach((a, i) => found.slice(0, i).forEach((b) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 4) pairs.push([a.text, b.text]);
  }));
  return [found.length, pairs];
})()
"""
"""How many pieces of text can be seen on the page, and which pairs of them lie over one another; line
boxes of neighbouring lines may share a few pixels of their spacing."""
PATHS = ("direct", "relay", "punched", "lan", "direct")


def reached(rounds: int, members: int) -> Iterator[dict[str, Any]]:
    """A run whose members are reached in several ways, and told losses that are not alike."""
    for event in made_up(rounds, members):
        if event["event"] != "script.report":
            yield event
            continue
        for number in range(members):
            loss = event["metrics"]["loss"] + number / 10
            yield {**event, "by": peer_id(number), "metrics": {**event["metrics"], "loss": loss}}
    for number in range(1, members):
        path = PATHS[number % len(PATHS)]
        yield {"at": 2e6, "event": "peer.path", "run": RUN, "peer": peer_id(number), "path": path}


def test_the_page_holds_for_thirty_members(tmp_path: Path) -> None:
    file = write(tmp_path / "events.jsonl", reached(40, 30))
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        assert browser.run("document.querySelectorAll('#paths svg').length") == 0
        rows = "[...document.querySelectorAll('#paths li')].map((row) => row.className)"
        kinds = [PATHS[number % len(PATHS)] for number in range(1, 30)]
        order = ("relay", "punched", "direct", "lan")  # first who is reached through others
        assert browser.run(rows) == [
            *sorted(kinds, key=lambda kind: min(order.index(kind), order.index("direct")))
        ]
        for width in (1240, 760, 390):
            browser.shape(width, 900)
            browser.run("draw()")
            count, pairs = browser.run(OVERLAPS)
            assert (count > 100, pairs) == (True, [])
            label, cell, many, whole = browser.run(
                "[drawn.label, drawn.cell, drawn.many, document.getElementById('timeline-box').clientWidth]"
            )
            assert (many, round(label + cell * many)) == (40, whole)
            assert serious(browser) == []
        browser.shape(1240, 900)
        browser.picture(OUT / "page-thirty.png")

        # losses: a line each, by a colour of its own, told by name
        legend = "[...document.querySelectorAll('#loss-legend button')]"
        told = browser.run(f"{legend}.map((one) => [one.dataset.name, one.lastChild.textContent])")
        losses = "Object.values(data.doc.losses).map((one) => one.losses.at(-1).toPrecision(4))"
        assert [name for name, _ in told] == [name_of(peer_id(number)) for number in range(30)]
        assert [loss for _, loss in told] == browser.run(losses)
        colours = f"new Set({legend}.map((one) => one.firstChild.style.background)).size"
        assert browser.run(colours) == 30
        browser.run(f"{legend}[7].focus()")
        alphas = "charts.loss.series.slice(1).map((one) => one.alpha)"
        assert browser.run(alphas) == [0.15] * 7 + [1] + [0.15] * 22
        browser.run("document.activeElement.blur()")
        assert set(browser.run(alphas)) == {1}
        browser.run("document.getElementById('loss').scrollIntoView({block: 'center'})")
        x, y = browser.run(
            "(() => { const c = charts.loss, box = c.over.getBoundingClientRect();"
            "return [box.left + c.valToPos(20, 'x'), box.top + c.valToPos(data.doc.losses[7].losses[19], 'y')]; })()"
        )
        browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        browser.until("document.getElementById('loss-now').textContent.startsWith('round ')")
        loss, low, high = browser.run(
            "[7, 0, 29].map((number) => data.doc.losses[number].losses[19].toPrecision(4))"
        )
        assert browser.run("document.getElementById('loss-now').textContent") == (
            f"round 20: {name_of(peer_id(7))} {loss}; 30 lines from {low} to {high}"
        )

        # one factor against DDP, and it is what was sent
        assert browser.run("document.body.textContent.split('times as much').length") == 2
        times = browser.run("data.doc.quick.ddp_bytes / data.doc.quick.bytes_sent")
        sent = browser.run("document.querySelector('[data-key=sent] small').textContent")
        assert sent.endswith(f", {times:.0f} times as much")
        assert browser.errors == []


def test_members_are_sorted_by_any_column(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    column = "[...document.querySelectorAll('#members tbody tr')].map((row) => row.cells[{}].textContent)"
    heads = "[...document.querySelectorAll('#members th')].map((th) => th.textContent)"
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        names = browser.run(heads)
        assert names[:6] == ["Member", "State", "Path", "Round trip", "Rounds", "Samples/s"]
        rounds, rate = names.index("Rounds"), names.index("Samples/s")
        as_they_are = browser.run(column.format(rounds))
        click = "document.querySelectorAll('#members th button')[{}].click()"
        sorts = "[...document.querySelectorAll('#members th')].map((th) => th.ariaSort)"
        for order in ("descending", "ascending"):
            browser.run(click.format(rounds))
            found = [int(text) for text in browser.run(column.format(rounds))]
            assert found == sorted(found, reverse=order == "descending")
            assert browser.run(sorts)[rounds] == order
            assert set(browser.run(sorts)) == {"none", order}
        assert sorted(as_they_are) == sorted(browser.run(column.format(rounds)))
        browser.run(click.format(rate))
        rates = browser.run(column.format(rate))
        assert rates == ["16", "16", "16", "16", "–"], "what is not known stands last"
        browser.run(
            f"{click.format(0)}, document.querySelectorAll('#members th button')[0].focus()"
        )
        assert browser.run(column.format(0)) == sorted(browser.run(column.format(0)))
        browser.run("draw()")
        assert browser.run("document.activeElement.textContent") == "Member", "the head stays"
        assert browser.run("data.doc.rate.all") == 64
        figure = "document.querySelector('[data-key=rate]').firstChild.textContent"
        assert browser.run(figure) == "64"
        assert serious(browser) == []
        assert browser.errors == []


@pytest.mark.parametrize("members", [2, 5, 8, 9])
def test_names_of_paths_never_lie_over_one_another(members: int, tmp_path: Path) -> None:
    """Up to seven others are a picture where there is room for it, else a list."""
    file = write(tmp_path / "events.jsonl", reached(5, members))
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        for width in (1240, 390):
            browser.shape(width, 900)
            browser.run("draw()")
            assert browser.run(OVERLAPS)[1] == []
            shown = browser.run("document.querySelectorAll('#paths circle, #paths li').length")
            pictured = browser.run("document.querySelectorAll('#paths svg').length") == 1
            assert shown == members - (not pictured)
            if members == 9:
                assert not pictured
            if members <= 5 and width == 1240:
                assert pictured


def test_what_the_model_answers_stands_on_the_page(tmp_path: Path) -> None:
    answers = [
        {"at": 2e6 + n, "event": "script.answer", "round": n, "prompt": "What is it?", "text": text}
        for n, text in enumerate(("A bird.", "<b>An atoll</b> is a ring\nof coral."), 1)
    ]
    found = {
        "at": 2e6,
        "event": "script.evaluation",
        "round": 2,
        "tokens": 65_536,
        "held_out": 1.25,
    }
    with_none = recorded(tmp_path, rounds=5)
    with page("replay", str(with_none), "--ui", home=tmp_path) as address:
        with Browser(tmp_path) as browser:
            browser.open(address)
            assert not browser.run("document.getElementById('answers').checkVisibility()")
    file = recorded(tmp_path, *answers, found, rounds=5)
    with page("replay", str(file), "--ui", home=tmp_path) as address, Browser(tmp_path) as browser:
        browser.open(address)
        rows = browser.run(
            "[...document.querySelectorAll('#answers li')].map((li) => li.innerText)"
        )
        assert [row.split("\n")[0] for row in rows] == ["round 2", "round 1"]
        assert r"<b>An atoll</b> is a ring\nof coral." in rows[0]
        held = browser.run("document.querySelector('[data-key=evaluation]').innerText")
        assert held.split("\n")[0] == "1.250"
        assert "after round 2, 65.5k tokens" in held
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
