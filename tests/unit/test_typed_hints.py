"""Commands that are printed anywhere (errors' hints and pages, verdicts, status, waits, help,
templates, warnings of scripts) are typed as they stand: each is one that `atoll` takes, with all
that it needs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from atoll.collectives.errors import AtollError
from atoll.node.cli import cli
from atoll.node.home.output import Terminal
from atoll.node.run.status import RunStatus
from atoll.node.run.verdicts import PAGES
from atoll.node.views.documents import finished_text, run_lines, run_state, status_text

WORD = re.compile(
    r"--?[a-z][a-z-]*|[A-Z][A-Z0-9-]*(\.toml)?|V\d\d|:?\d+|[0-9a-f]{8}|[\w./]+\.(py|toml|jsonl)(:\w+)?"
    r"|(node|notify|data|models)\.\w+|true|false|\./node2|federated-hospital|site-a|bash|train|\'\'"
)
"""What may follow a command: options, names that the reader fills in, numbers, ids, settings,
files, and some words.
"""
PRODUCT = Path(__file__).parents[2]
PARTS = ("collectives", "security", "optim", "node")
RUN_ID = "1a2b3c4d" + "0" * 24
OTHERS = frozenset(
    {
        *("sudo timedatectl set-ntp true", "df -h", "nvidia-smi", "python train.py"),
        "ps -o stat,time,wchan -p PID",
        *("data = swarm.shard(loader)", "AtollCallback(swarm, shard=True)"),
        "AtollLightningCallback(swarm, shard=True)",
        "torch.manual_seed(crc32(swarm.peer.encode()))",
        "parameter.requires_grad_(True)",
        "schedule by attachment.round",
    }
)
"""Commands of pages that are not ours, and lines of a script."""


def commands_in(text: str) -> Iterator[list[str]]:
    """Every ``atoll …`` of a text, as words, up to the prose behind it."""
    for found in re.finditer(r"\batoll ", text):
        line = re.split(r"\s{2,}|\n|[,;)]|` |`$", text[found.end() :])[0]
        words = [word.lstrip("`(").rstrip('`:(".') for word in line.split()]
        command = cli.get_command(click.Context(cli), words[0].rstrip(".")) if words else None
        if command is None:
            continue
        taken, rest = [words[0].rstrip(".")], words[1:]
        if isinstance(command, click.Group) and rest and rest[0].rstrip(".") in command.commands:
            taken.append(rest.pop(0).rstrip("."))
        while rest and WORD.fullmatch(rest[0].rstrip(".")):
            taken.append(rest.pop(0).rstrip("."))
        yield taken


def typed(words: list[str], folder: Path) -> click.Context:
    """Parse a command as the shell would give it. Raises click's UsageError."""
    files = ("run.toml", "train.py", "site.py", "chats.jsonl", "FILE")
    for name in files:
        (folder / name).write_text("schema = 1\n")
    for name in ("dir", "tiny"):
        (folder / name).mkdir(exist_ok=True)
    fill = {
        **{name: str(folder / name) for name in files},
        "RUN": "tiny",
        "PEER": "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
        "RUN.toml": str(folder / "run.toml"),
        "DIR": str(folder / "dir"),
        "INVITE": "atoll2:abc",
        "CODE": "V11",
    }
    command, rest = cli.get_command(click.Context(cli), words[0]), words[1:]
    if isinstance(command, click.Group) and rest:
        command, rest = command.commands[rest[0]], rest[1:]
    assert command is not None
    return command.make_context(words[0], [fill.get(word, word) for word in rest])


class Said(NamedTuple):
    """A text of the product; ``hint``: of an error, so whole commands stand in it."""

    where: str
    text: str
    hint: bool


def filled(part: ast.expr) -> str:
    """A part of an f-string, with a name that the reader fills in for a value."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = ast.unparse(part)
    return "FILE" if value == "{file}" else "DIR" if "folder" in value else "RUN"


def texts_of(file: Path) -> Iterator[Said]:
    """All that a file may print: its strings, with RUN for what is filled in, and the help of
    commands, but no other docstrings.
    """
    tree = ast.parse(file.read_text())
    skipped, hints = set[int](), set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                decorated = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and not any(".command" in d for d in decorated):
                    skipped.add(id(first.value))
            case ast.JoinedStr():
                skipped |= set(map(id, node.values))
            case ast.keyword(arg="hint"):
                hints |= set(map(id, ast.walk(node.value)))
            case _:
                pass
    for node in ast.walk(tree):
        where = f"{file.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.JoinedStr):
            yield Said(where, "".join(map(filled, node.values)), id(node) in hints)
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            yield Said(where, str(node.value), id(node) in hints)


def run_of(**more: Any) -> RunStatus:
    return RunStatus(run_id=RUN_ID, name="tiny", phase="running", rounds=3, **more)


STATUS = {
    "no run": status_text(Terminal(), {"runs": []}),
    "finished": finished_text(run_of(finished=True)),
    "starting": run_state(run_of(starting={"there": 1, "wanted": 2})),
    **{
        code: "\n".join(
            run_lines(
                Terminal(),
                run_of(verdicts=[{"code": code, "title": page.title, "said": "so", "since": 1e9}]),
            )
        )
        for code, page in PAGES.items()
    },
}


@pytest.mark.parametrize("code", PAGES)
def test_commands_of_a_verdicts_page_are_typed_as_they_stand(code: str, tmp_path: Path) -> None:
    found = list(commands_in(PAGES[code].text))
    for words in found:
        typed(words, tmp_path)
    shown = [line[4:] for line in PAGES[code].text.splitlines() if line.startswith("    ")]
    others = {re.split(r"\s{2,}", line)[0] for line in shown if not line.startswith("atoll ")}
    # Others are settings, and lines of a script.
    said = {line for line in others if not line.startswith(("[", "attach(", "attachment."))}
    assert said <= OTHERS
    assert len(found) + len(others) >= len(shown)


@pytest.mark.parametrize("where", STATUS)
def test_commands_of_status_are_typed_as_they_stand(where: str, tmp_path: Path) -> None:
    found = list(commands_in(STATUS[where]))
    assert found
    for words in found:
        typed(words, tmp_path)


def test_all_commands_that_the_product_prints_are_typed_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a bare name in prose, such as "what atoll export wrote", which no hint is."""
    monkeypatch.chdir(tmp_path)
    found, wrong = 0, list[str]()
    for file in sorted(each for part in PARTS for each in (PRODUCT / part).rglob("*.py")):
        for where, text, hint in texts_of(file):
            for words in commands_in(text):
                found += 1
                try:
                    typed(words, tmp_path)
                except click.exceptions.Exit:  # --help, --example
                    pass
                except (click.UsageError, AtollError) as error:
                    if hint or len(words) > 1 or not isinstance(error, click.MissingParameter):
                        wrong.append(f"{where}: atoll {' '.join(words)}: {error}")
    assert (wrong, found > 300) == ([], True)


def test_the_table_sees_a_command_that_is_wrong(tmp_path: Path) -> None:
    for wrong in ("atoll events", "atoll events RUN --everything", "atoll recertify RUN now"):
        (words,) = commands_in(wrong)
        if wrong.endswith("now"):
            assert words == ["recertify", "RUN"]
            continue
        with pytest.raises(click.UsageError):
            typed(words, tmp_path)


def test_what_would_end_a_wait_is_typed_as_it_stands(tmp_path: Path) -> None:
    import atoll.node.session.waiting as waiting

    assert waiting.__file__ is not None
    source = Path(waiting.__file__).read_text()
    texts = re.findall(r'"([^"\n]*\batoll [^"\n]*)"', source)
    found = [words for text in texts for words in commands_in(text)]
    assert len(found) >= 5
    for words in found:
        typed(words, tmp_path)
