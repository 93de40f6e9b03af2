"""What a command says and where: data to stdout, talk to stderr, one JSON object with ``--json``,
colour only where it is wanted.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from ...collectives.errors import AtollError, ConfigError
from ...collectives.foreign import escaped, shown
from .errors_catalogue import page
from .short_words import short_peer as short_peer
from .short_words import span_text as span_text

if TYPE_CHECKING:
    from .paths import Paths

SCHEMA = 1
_COLOUR = f"\x1b{secrets.token_hex(8)}"
"""Stands for the escape character in colours of ours until they are written, since nobody else can
know it.
"""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Terminal:
    """The options every command shares, and the two streams."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    no_color: bool = False
    no_input: bool = False
    yes: bool = False
    home: str | None = None
    config: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def paths(self) -> Paths:
        from .paths import find_paths

        return find_paths(self.home, self.environ)

    def child_environ(self) -> dict[str, str]:
        """The environment for processes that this command starts: the settings file that was named
        is theirs, too.
        """
        from .local_settings import CONFIG_VARIABLE

        named = {CONFIG_VARIABLE: os.path.abspath(self.config)} if self.config else {}
        return {**self.environ, **named}

    def colour(self, stream: IO[str]) -> bool:
        """Whether escape sequences may be written to this stream."""
        if self.no_color or self.json or self.environ.get("NO_COLOR"):
            return False
        if self.environ.get("FORCE_COLOR", "0") not in ("", "0"):
            return True
        return self.environ.get("TERM") != "dumb" and stream.isatty()

    @property
    def live(self) -> bool:
        """Whether a display that redraws itself is wanted: a terminal that a person looks at."""
        plain = (
            self.json or self.quiet or self.environ.get("CI") or self.environ.get("TERM") == "dumb"
        )
        return not plain and self.colour(sys.stderr) and sys.stderr.isatty()

    @property
    def interactive(self) -> bool:
        """Whether a question can be asked."""
        return not self.no_input and not self.json and sys.stdin.isatty()

    @property
    def width(self) -> int:
        """Columns of the terminal (``COLUMNS`` counts)."""
        return shutil.get_terminal_size((100, 24)).columns

    def style(self, text: str, stream: IO[str], **style: Any) -> str:
        """``text`` with colours if the stream wants them."""
        if not self.colour(stream):
            return text
        return click.style(shown(text), **style).replace("\x1b", _COLOUR)

    def say(self, text: str = "", *, level: int = 0) -> None:
        """Write to stderr. ``--quiet`` silences level 0; levels 1 and 2 need ``-v`` and ``-vv``."""
        if level > self.verbose or (self.quiet and level >= 0):
            return
        print(painted(text), file=sys.stderr, flush=True)

    def data(self, human: str, machine: Mapping[str, Any]) -> None:
        """The command's result, to stdout: text for people, or one JSON object. Ends the command
        when nobody reads it any more.
        """
        try:
            self.print(as_json(machine) if self.json else painted(human))
        except BrokenPipeError:
            raise click.exceptions.Exit(141) from None

    def print(self, text: str) -> None:
        """To stdout, at once. After an OSError nothing more goes there, the interpreter's last
        flush included, and errors go to stderr.
        """
        try:
            print(text, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.json = False
            raise

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        """Columns two spaces apart, the header bold where colour is on."""
        rows = [[escaped(cell) for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in (header, *rows)
        ]
        lines[0] = self.style(lines[0], sys.stdout, bold=True)
        return "\n".join(lines)

    def confirm(self, question: str) -> bool:
        """Ask yes or no on stderr; ``--yes`` answers. Raises ConfigError if nobody can be asked."""
        if self.yes:
            return True
        if not self.interactive:
            raise ConfigError(
                f"cannot ask “{question}” here",
                why="There is no terminal, or --no-input or --json is on.",
                hint="Say yes beforehand: --yes",
                exit_code=2,
            )
        return click.confirm(shown(question), default=False, err=True)


def current() -> Terminal:
    """The terminal of the running command."""
    return click.get_current_context().ensure_object(Terminal)


def painted(text: str) -> str:
    """``text`` as a terminal may have it: the colours that `Terminal.style` put in, and nothing
    else that a terminal obeys.
    """
    return "\x1b".join(shown(piece) for piece in text.split(_COLOUR))


def as_json(machine: Mapping[str, Any]) -> str:
    """One line of JSON, ``schema`` first. What a terminal would obey, and what stdout's encoding
    may lack, is written as JSON's escapes: the values are the same.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    plain = encoding.lower().replace("-", "") != "utf8"
    text = json.dumps({"schema": SCHEMA, **machine}, ensure_ascii=plain, default=str)
    if shown(text) == text:
        return text
    return "".join(c if shown(c) == c else json.dumps(c)[1:-1] for c in text)


def error_object(error: AtollError) -> dict[str, Any]:
    """What ``--json`` prints for an error."""
    described = page(error.code)
    found: dict[str, Any] = {
        "code": error.code,
        "slug": described.slug,
        "message": error.message,
        "why": error.why,
        "hints": [error.hint] if error.hint else [],
        "retryable": error.retryable,
        "exit": error.exit_code,
    }
    if isinstance(error, ConfigError) and error.key:
        found["key"] = error.key
    if isinstance(error, ConfigError) and error.faults:
        found["faults"] = [
            {"key": each.key, "message": each.message, "why": each.why, "hint": each.hint}
            for each in error.faults
        ]
    return {"error": found}


def show_error(terminal: Terminal, error: AtollError) -> None:
    """Print an error: what happened, why it probably is so, what to type. As JSON to stdout, if
    that takes it.
    """
    if terminal.json:
        with contextlib.suppress(OSError):
            terminal.print(as_json(error_object(error)))
            return
    width = max(40, min(terminal.width, 120))
    indent = " " * (len(error.code) + 1)
    code = terminal.style(error.code, sys.stderr, fg="red", bold=True)
    lines = _wrapped(error.message, width, indent)
    lines[0] = f"{code} {lines[0].lstrip()}"
    if error.why:
        lines += _wrapped(error.why, width, indent)
    if error.hint:
        lines += [
            terminal.style(line, sys.stderr, bold=True)
            for line in _wrapped(error.hint, width, indent)
        ]
    lines.append(f"{indent}More: atoll explain {error.code}   [exit {error.exit_code}]")
    print(painted("\n".join(lines)), file=sys.stderr, flush=True)


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    lines = list[str]()
    for paragraph in shown(text).split("\n"):
        lines += textwrap.wrap(
            paragraph,
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [indent]
    return lines


def bytes_text(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count_text(count: float) -> str:
    """``865024`` as ``0.87M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size * 0.8:
            return f"{count / size:.2f}{unit}" if count < 10 * size else f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
