#!/usr/bin/env python3
"""From nothing to one's own training with two peers, as the README says it: its script and manifest
are saved, its commands typed into two terminals, and what was typed is counted.

Each terminal is a shell of its own with an empty home. Where the README leaves something for the
reader to put in, such as the invite, that is pasted from the other terminal. With --install each
terminal begins with an environment of its own and `pip install .`, which takes minutes; else this
script's environment is on the path. The last line of stdout is one JSON object.

    scripts/bench/bench_first.py
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from _bench import ROOT, FailedError, emit, progress

PROMPT = "typed-here> "
QUESTION = "[y/N]"
PATIENCE_S = 600.0
INVITE = re.compile(r"atoll2:[A-Za-z0-9_-]+")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class TypedTerminal:
    """A shell at a terminal, and what was typed there."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.typed = list[str]()
        self.screen = ""
        ours, theirs = pty.openpty()
        self.line = ours
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**environment, "PS1": PROMPT, "COLUMNS": "200", "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=_own_the_terminal,
        )
        os.close(theirs)
        self.until(PROMPT)

    def read(self, seconds: float) -> None:
        """Take in what is shown for at most so long."""
        if select.select([self.line], [], [], seconds)[0]:
            shown = os.read(self.line, 65536).decode(errors="replace")
            self.screen += _COLOURS.sub("", shown)

    def until(self, words: str, seconds: float = 300.0) -> None:
        """Wait until they are on the screen since the last command."""
        ends = time.monotonic() + seconds
        while words not in self.screen:
            if time.monotonic() > ends:
                raise FailedError(f"not shown within {seconds:g} s: {words}\n{self.screen[-3000:]}")
            self.read(0.5)

    def type(self, line: str) -> None:
        """A line and Enter; the screen is then looked at anew."""
        self.typed.append(line)
        self.screen = ""
        os.write(self.line, f"{line}\n".encode())

    def run(self, line: str, seconds: float = 300.0) -> str:
        """Type a command, wait until it has ended; what it said."""
        self.type(line)
        self.until(PROMPT, seconds)
        return self.screen

    def close(self) -> None:
        """End the shell."""
        os.close(self.line)  # what runs in it is hung up
        self._shell.kill()
        self._shell.wait(30)


def _own_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches what runs in the foreground


def blocks(kind: str, text: str) -> list[str]:
    """The blocks of a language in a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> tuple[list[str], list[str]]:
    """The lines of the README's two terminals, without their comments."""
    (block,) = (found for found in blocks("sh", text) if "ATOLL_HOME=~/one" in found)
    one, two = block.split("\n\n")
    return tuple(  # type: ignore[return-value]
        [line.partition("  #")[0].strip() for line in part.splitlines() if line.strip()]
        for part in (one, two)
    )


def rounds_of_both(home: Path) -> list[float]:
    """When the rounds came to which both contributed."""
    found = list[float]()
    for file in home.glob("one/state/runs/*/events.jsonl"):
        for line in file.read_bytes().splitlines():
            event = json.loads(line)
            if event.get("event") == "round.committed" and len(event["contributors"]) == 2:
                found.append(event["at"])
    return found


def play(folder: Path, wanted: int, *, install: bool) -> dict[str, Any]:
    """All of it, until ``wanted`` rounds have come to which both contributed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (script,) = (found for found in blocks("python", text) if "attach(" in found)
    (manifest,) = blocks("toml", text)
    (folder / "train.py").write_text(script)
    (folder / "run.toml").write_text(manifest)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ATOLL")},
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ATOLL_NETWORK__LAN_DISCOVERY": "false",
        "ATOLL_NETWORK__PORT_MAPPING": "false",
    }
    first, second = commands(text)
    terminals = [TypedTerminal(folder, environment) for _ in range(2)]
    one, two = terminals
    began = time.time()
    try:
        if install:
            for number, terminal in enumerate(terminals):
                terminal.run(
                    f"python3 -m venv {folder}/{number} && . {folder}/{number}/bin/activate"
                )
                terminal.run(f"pip install --quiet {ROOT}", 1800)
        installed, invite = time.time(), ""
        for line in first[:-1]:
            found = INVITE.search(one.run(line))
            invite = found[0] if found else invite
        if not invite:
            raise FailedError(f"no invite was printed\n{one.screen}")
        one.type(first[-1])
        one.until(QUESTION)
        one.type("y")
        for line in second[:-1]:
            two.run(line)
        two.type(re.sub(r"atoll2:…", invite, second[-1]))
        progress("both train")
        while len(rounds := rounds_of_both(folder)) < wanted:
            if time.time() - installed > PATIENCE_S or PROMPT in one.screen + two.screen:
                raise FailedError(f"it ended\n{one.screen[-3000:]}\n{two.screen[-3000:]}")
            for each in terminals:
                each.read(0.2)
        for terminal in (two, one):
            os.write(terminal.line, b"\x03")  # Ctrl-C
            terminal.until(PROMPT)
        said = [terminal.screen for terminal in terminals]
        typed = [list(terminal.typed) for terminal in terminals]
        statuses = [int(re.findall(r"\bis (\d+)", t.run("echo is $?"))[0]) for t in terminals]
    finally:
        with contextlib.suppress(FailedError):
            one.run("atoll down", 60)
        for terminal in terminals:
            terminal.close()
    return {
        "commands": [len([line for line in lines if line != "y"]) for lines in typed],
        "characters": [sum(len(line) + 1 for line in lines) for lines in typed],
        "invite_characters": len(invite),
        "typed": [[line.replace(invite, "atoll2:…") for line in lines] for lines in typed],
        "install_s": round(installed - began, 1),
        "first_round_s": round(rounds[0] - installed, 1),
        "rounds_of_both": len(rounds),
        "exit": statuses,
        "last_lines": [text.strip().splitlines()[-6:] for text in said],
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of both, until Ctrl-C is typed")
    parser.add_argument("--install", action="store_true", help="install into new environments, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = play(Path(folder), given.rounds, install=given.install)
    for lines in found.pop("last_lines"):
        progress("\n".join(lines))
    emit("first", vars(given), (), **found)


if __name__ == "__main__":
    main()
