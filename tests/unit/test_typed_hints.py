"""Commands that verdicts, status and waits print are typed as they stand: each is one that `atoll`
takes, with all that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from atoll.node.cli import cli
from atoll.node.home.output import Terminal
from atoll.node.run.verdicts import PAGES
from atoll.node.views.documents import finished_text, run_lines, run_state, status_text

WORD = re.compile(r"--?[a-z][a-z-]*|[A-Z][A-Z0-9]*(\.toml)?|V\d\d|\d+|[0-9a-f]{8}|[a-z_]+\.py")
"""What may follow a command: options, names that the reader fills in, numbers and ids."""
RUN_ID = "1a2b3c4d" + "0" * 24
OTHERS = frozenset(
    {
        *("sudo timedatectl set-ntp true", "df -h", "nvidia-smi", "python train.py"),
        *("data = swarm.shard(loader)", "AtollCallback(swarm, shard=True)"),
        "AtollLightningCallback(swarm, shard=True)",
        "torch.manual_seed(crc32(swarm.peer.encode()))",
        "parameter.requires_grad_(True)",
    }
)
"""Commands of pages that are not ours, and lines of a script."""


def commands_in(text: str) -> Iterator[list[str]]:
    """Every ``atoll …`` of a text, as words, up to the prose behind it."""
    for found in re.finditer(r"\batoll ", text):
        line = re.split(r"\s{2,}|\n|[,;)]", text[found.end() :])[0]
        words = [word.strip("`:(") for word in line.split()]
        if not words or words[0] not in cli.list_commands(click.Context(cli)):
            continue
        taken, rest = words[:1], words[1:]
        while rest and WORD.fullmatch(rest[0].rstrip(".")):
            taken.append(rest.pop(0).rstrip("."))
        yield taken


def typed(words: list[str], folder: Path) -> click.Context:
    """Parse a command as the shell would give it. Raises click's UsageError."""
    (folder / "run.toml").write_text("schema = 1\n")
    (folder / "dir").mkdir(exist_ok=True)
    fill = {
        "RUN": "tiny",
        "PEER": "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
        "RUN.toml": str(folder / "run.toml"),
        "DIR": str(folder / "dir"),
        "INVITE": "atoll2:abc",
        "CODE": "V11",
    }
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    return command.make_context(words[0], [fill.get(word, word) for word in words[1:]])


def run_of(**more: Any) -> dict[str, Any]:
    return {"run_id": RUN_ID, "name": "tiny", "phase": "running", "rounds": 3, **more}


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
