"""What `atoll demo` takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What ``atoll demo`` takes. ``steps``: inner steps of each peer; None: 700, or 400 with
    ``quick``. ``browser``: whether ``ui`` opens the page in one.
    """

    peers: int = 3
    steps: int | None = None
    seed: int = 0
    no_kill: bool = False
    no_baseline: bool = False
    quick: bool = False
    out: str = "atoll-demo"
    json: bool = False
    live: bool = False
    colour: bool = False
    quiet: bool = False
    keep_events: str | None = None
    ui: bool = False
    browser: bool = False
