"""A browser without a window: Debian's chromium, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from house import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_S = 60.0  # a hang only
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page, as a context. Every request that it makes is kept in ``requests``."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._number = 0
        self._session = ""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]

        # The pipe is read from descriptor 3 and written to 4, whatever ours are.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "_", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)

    def open(
        self, address: str, *, width: int = 1240, height: int = 900, dark: bool = False
    ) -> None:
        """Go to an address and wait until the page has drawn once."""
        self.shape(width, height)
        self.scheme(dark=dark)
        self.ask("Page.navigate", url=address)
        self.until("document.body && document.body.dataset.ready === 'yes'")

    def shape(self, width: int, height: int) -> None:
        """The size of the window."""
        told = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **told)

    def scheme(self, *, dark: bool) -> None:
        """Light or dark, as the system would say."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # a picture of what is so now
        ]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        found = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = PATIENCE_S) -> float:
        """Wait until an expression is true; when it was seen to be."""
        until = time.monotonic() + timeout_s
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < until, (
                script,
                self.errors,
                self.run("document.body.innerText.slice(0, 2000)"),
            )
            threading.Event().wait(0.05)
        return time.monotonic()

    def picture(self, file: Path, height: int | None = None) -> None:
        """The page as a PNG: the whole, or so many pixels from its top."""
        file.parent.mkdir(parents=True, exist_ok=True)
        height = height or int(self.run("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": self.run("innerWidth"), "height": height, "scale": 1}
        found = self.ask(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        file.write_bytes(base64.b64decode(found["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        number = self._number
        told = {"id": number, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            told["sessionId"] = self._session
        os.write(self._out, json.dumps(told).encode() + b"\0")
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, PATIENCE_S), method
            answer = self._answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> None:
        with os.fdopen(self._in, "rb") as pipe:
            rest = b""
            while piece := pipe.read1(1 << 20):
                *whole, rest = (rest + piece).split(b"\0")
                for message in whole:
                    self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["exceptionDetails"])[:2000])
            case "Log.entryAdded":
                self.errors.append(json.dumps(told["entry"])[:2000])
            case _:
                pass
        if "id" in message:
            with self._news:
                self._answers[message["id"]] = message
                self._news.notify_all()


def serious(browser: Browser) -> list[Any]:
    """What axe-core finds on the page that keeps people from using it."""
    axe = (ROOT / "tests/axe/axe.min.js").read_text(encoding="utf-8")
    browser.run(f"{axe}\n;1")
    found = browser.run(
        "axe.run().then(r => r.violations.map(v => [v.id, v.impact, v.nodes[0].html]))"
    )
    return [row for row in found if row[1] in ("serious", "critical")]
