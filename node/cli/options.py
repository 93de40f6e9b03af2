"""Options that every command takes, before or after its own arguments; and values that may not be
empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..home.output import Terminal
from ..home.paths import user_path

F = TypeVar("F", bound=Callable[..., Any])
_EMPTY = "it is empty. Is a variable of your shell not set?"


class _Given(click.types.StringParamType):
    """Text that is not blank: ``atoll leave "$RUN"`` with RUN unset must not leave any run."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value.strip() else self.fail(_EMPTY, param, ctx)


class _Named(_Given):
    """A name that a shell can complete: ``words`` of `completing` gives (word, what it is) for what
    was typed.
    """

    def __init__(self, words: str) -> None:
        self._words = words

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """What fits; nothing where anything is wrong, since nobody could read why."""
        from . import completing

        terminal = ctx.find_object(Terminal) or Terminal()
        try:
            found = list(getattr(completing, self._words)(terminal.paths, incomplete))
        except Exception:
            return []
        return [CompletionItem(word, help=what) for word, what in found]


class GivenPath(click.Path):
    """A path that is not blank: an empty one would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return (
            super().convert(value, param, ctx)
            if str(value).strip()
            else self.fail(_EMPTY, param, ctx)
        )


class _Data(click.Path):
    """A file or folder that exists, or FILE.py:NAME of a file that does."""

    name = "path or factory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the file's absolute path with the name: whoever reads it may run in another
        folder.
        """
        from ..home.own_data import is_factory

        if not is_factory(str(value)):
            return super().convert(value, param, ctx)
        file, _, name = str(value).rpartition(":")
        path = user_path(file)
        super().convert(str(path), param, ctx)
        return f"{path}:{name}"


GIVEN = _Given()
RUN = _Named("runs")
PEER = _Named("peers")
DATA = _Data(exists=True)
HOURS = click.option(
    "--hours", metavar="FROM-TO", type=GIVEN, help="Train only then, such as 22-06; serve always."
)
DRAIN = click.option(
    "--drain",
    metavar="SECONDS",
    type=click.FloatRange(2, 3600),
    help=(
        "After SIGTERM hand the round over and end within this: less than a spot machine's notice."
    ),
)


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            setattr(ctx.ensure_object(Terminal), name, value)

    return callback


_SHARED: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_store("json"),
        help="Print one JSON object.",
    ),
    click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_store("quiet"),
        help="Say nothing but results and errors.",
    ),
    click.option(
        "-v",
        "--verbose",
        count=True,
        expose_value=False,
        is_eager=True,
        callback=_store("verbose"),
        help="Say more; -vv shows tracebacks.",
    ),
    click.option(
        "--no-color",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_store("no_color"),
        help="No colours (so does NO_COLOR).",
    ),
    click.option(
        "--home",
        metavar="DIR",
        type=GivenPath(file_okay=False),
        expose_value=False,
        is_eager=True,
        callback=_store("home"),
        help="Use this folder (so does ATOLL_HOME).",
    ),
    click.option(
        "--config",
        metavar="FILE",
        type=GivenPath(exists=True, dir_okay=False),
        expose_value=False,
        is_eager=True,
        callback=_store("config"),
        help="Settings of this file, in place of ./atoll.toml (so does ATOLL_CONFIG).",
    ),
)
_ASKING: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "-y",
        "--yes",
        is_flag=True,
        expose_value=False,
        callback=_store("yes"),
        help="Answer yes to questions.",
    ),
    click.option(
        "--no-input",
        is_flag=True,
        expose_value=False,
        callback=_store("no_input"),
        help="Never ask.",
    ),
)


def shared_options(function: F) -> F:
    """--json, --quiet, --verbose, --no-color, --home, --config."""
    for option in reversed(_SHARED):
        function = option(function)
    return function


def asking_options(function: F) -> F:
    """--yes, --no-input."""
    for option in reversed(_ASKING):
        function = option(function)
    return function
