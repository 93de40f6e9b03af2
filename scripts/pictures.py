#!/usr/bin/env python3
"""Makes what docs/demo shows, from one real run of the demo: its recording and manifest, the
picture of the loss, the page in a browser, and a terminal that plays the run again.

    scripts/pictures.py                 # runs the demo first, some minutes; then the pictures
    scripts/pictures.py --recorded      # the page and the terminal only, of the recording that is there

Needs chromium (apt install chromium) and the extras plot and ui. Prints one JSON object: the files
and their sizes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs/demo"
sys.path.append(str(ROOT / "tests"))

from _terminal_svg import Screen, paint, play  # noqa: E402
from browser_kit import Browser  # noqa: E402
from look_kit import page  # noqa: E402
from PIL import Image  # noqa: E402

from atoll.node.look.document import document  # noqa: E402
from atoll.node.look.frame import frame  # noqa: E402
from atoll.node.look.source import about_of, in_words  # noqa: E402
from atoll.node.look.view import RunPicture  # noqa: E402
from atoll.node.manifest import load_manifest  # noqa: E402
from atoll.node.run import diary  # noqa: E402
from atoll.node.run.events import ReductionTimedEvent  # noqa: E402

RECORDING, MANIFEST = OUT / "events.jsonl.gz", OUT / "run.toml"
COLOURS = 96  # of a picture's palette: a third of the bytes, and nobody sees it
COLUMNS, LINES = 92, 19
ROUND_S, LAST_S = 0.55, 5.0


def record(folder: Path) -> None:
    """Run the demo, and take its recording, manifest and pictures."""
    command = [sys.executable, "-m", "atoll.node.cli", "demo", "--out", str(folder)]
    subprocess.run([*command, "--keep-events", str(RECORDING)], check=True)
    shutil.copy(folder / "run.toml", MANIFEST)
    for name in ("loss.png", "loss-dark.png"):
        shrink(folder / name, OUT / name)


def shrink(file: Path, to: Path) -> None:
    """A PNG with a palette."""
    Image.open(file).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        to, optimize=True
    )


def photograph(folder: Path) -> None:
    """The page of the recording, light and dark, down to where it repeats the rest in tables."""
    shown = page("replay", str(RECORDING), "--ui", home=folder)
    with shown as address, Browser(folder) as browser:
        for dark, name in ((False, "page.png"), (True, "page-dark.png")):
            browser.open(address, dark=dark)
            browser.run("document.querySelector('[data-last=\"60\"]').click()")
            foot = browser.run("document.getElementById('members').getBoundingClientRect().top")
            browser.picture(folder / name, round(foot) - 48)
            shrink(folder / name, OUT / name)


def screens(file: Path) -> Iterator[Screen]:
    """What `atoll top` showed: after each round, and where members came and went."""
    manifest = load_manifest(MANIFEST)
    view = RunPicture(about_of(manifest, manifest.run_id), in_words())
    told = list(diary.recorded(file))
    view.me = next(event.peer for event in told if isinstance(event, ReductionTimedEvent))
    for event, after in zip(told, [*told[1:], None], strict=True):
        view.take(event, event.by or view.me)
        if after is None or event.kind == "round.committed":
            found: dict[str, Any] = document(view, event.at)
            lines = frame(found, COLUMNS, LINES, paint)
            yield Screen(lines, ROUND_S if after is not None else LAST_S)


def main() -> int:
    """The command line above."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--recorded", action="store_true", help="of the recording that is there")
    given = options.parse_args()
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        if not given.recorded:
            record(Path(made) / "demo")
        photograph(Path(made))
    title = "A run of four peers in a terminal: one is killed, one joins late"
    text = play(list(screens(RECORDING)), COLUMNS, title)
    (OUT / "terminal.svg").write_text(text, encoding="utf-8")
    sizes = {path.name: path.stat().st_size for path in sorted(OUT.iterdir())}
    print(json.dumps({"files": sizes, "bytes": sum(sizes.values())}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
