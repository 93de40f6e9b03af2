"""chat: talk to what a run has learnt."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...collectives.errors import StateError
from ...collectives.foreign import shown
from ..home.output import current
from .options import GIVEN, shared_options

if TYPE_CHECKING:
    from ..home.output import Terminal
    from ..recipes.models.chatting import Conversation

MOST_TOKENS = 512
_END = ("/exit", "/quit")


@click.command("chat")
@click.argument("source", metavar="FOLDER|RUN", type=GIVEN)
@click.argument("prompt", required=False)
@click.option(
    "--tokens",
    type=click.IntRange(1, 1 << 20),
    default=MOST_TOKENS,
    show_default=True,
    help="Tokens of an answer, at most.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch.")
@shared_options
def chat_command(source: str, prompt: str | None, tokens: int, threads: int | None) -> int:
    """Talk to a model: a folder that atoll export wrote, or the newest checkpoint of a run.

    With PROMPT one answer is printed. Without, one for each line: /new begins anew, /exit ends.
    """
    terminal = current()
    from ..recipes.models.libraries import library

    library("transformers")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    conversation = _open(terminal, source)
    if not conversation.templated:
        terminal.say("This model has no chat template: it goes on from your text.")
    if prompt is not None:
        text = _say(conversation, prompt, tokens, out=not terminal.json)
        if terminal.json:
            terminal.data(text, {"prompt": prompt, "answer": text})
        return 0
    if terminal.json:
        raise click.UsageError("--json needs a PROMPT")
    while True:
        try:
            line = input("> " if terminal.interactive else "").strip()
        except EOFError:
            return 0
        if line in _END:
            return 0
        if line == "/new":
            conversation.forget()
        elif line:
            try:
                _say(conversation, line, tokens, out=True)
            except StateError as error:
                terminal.say(f"{error.message}. {error.hint}")


def _open(terminal: Terminal, source: str) -> Conversation:
    from ..recipes.models.chatting import open_folder

    if Path(source).expanduser().is_dir():
        return open_folder(Path(source).expanduser().absolute(), terminal.paths)
    from ..manifest import load_run
    from ..records.export import export_run

    signed = load_run(terminal.paths, source)
    with tempfile.TemporaryDirectory() as made:
        done = export_run(terminal.paths, signed, Path(made))
        terminal.say(f"{signed.open().name}, round {done.round}")
        return open_folder(Path(made), terminal.paths)


def _say(conversation: Conversation, text: str, tokens: int, *, out: bool) -> str:
    """The answer, printed as it comes."""
    pieces = list[str]()
    for piece in conversation.answer(text, tokens):
        pieces.append(piece)
        if out:
            sys.stdout.write(shown(piece))  # what a model says may come of anybody's text
            sys.stdout.flush()
    if out:
        print(flush=True)
        if not "".join(pieces).strip():
            current().say(
                "The answer is empty: the model ended it at once, or made special tokens alone."
            )
    return "".join(pieces)
