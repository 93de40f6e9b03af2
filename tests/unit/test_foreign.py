"""Words from outside: escaped, bounded and quoted wherever a person or a log sees them; and that
nobody can forget it.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import logging
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hostile_words import HOSTILE, harmful

import atoll.collectives
import atoll.node
import atoll.optim
import atoll.security
from atoll.collectives.errors import AtollError, NotAdmittedError, RemoteProtocolError
from atoll.collectives.foreign import LINES, PLAIN, WORDS, escaped, quoted, shown
from atoll.collectives.identifiers import PeerId
from atoll.node.home import output
from atoll.node.home.logs import OneLine
from atoll.node.home.output import Terminal, as_json, painted, show_error
from atoll.node.run.events import KINDS, CodedEvent, OtherEvent, RunEvent, Slowest, read_event
from atoll.node.run.status import read_run_status
from atoll.node.service.refusals import MEMBER, NAMED, STRANGER, Refusal
from atoll.node.views import documents as views
from atoll.node.views.live import RunProgress, TrainingView

PEER = PeerId("12D3KooWEvilEvilEvilEvilEvilEvilEvilEvilEvilEvilEvil")
each_hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())


@each_hostile
def test_what_is_escaped_is_one_bounded_line_without_anything_that_is_obeyed(text: str) -> None:
    for found in (escaped(text), quoted(text), escaped(text, 50)):
        assert harmful(found, newlines=False) == set()
        found.encode("utf-8")  # no surrogate
    assert len(quoted(text)) <= 200 * 10 + 2
    assert quoted(text)[0] == "“"
    assert quoted(text)[-1] == "”"
    assert not set(quoted(text)[1:-1]) & set("“”")  # nobody ends the quotation himself
    assert escaped(escaped(text), 10_000) == escaped(text)


def test_what_is_harmless_stays_as_it_is() -> None:
    for text in (
        "",
        "your invite expired on Monday",
        "Größe 3 × 4 – “so”",
        "模型 训练 — привет",
        "C:\\new",
    ):
        assert escaped(text) == text
        assert shown(text) == text
    assert escaped("a\nb\x1b[0m\u202e") == r"a\nb\x1b[0m\u202e"
    assert escaped("x" * 500) == "x" * 199 + "…"
    assert quoted("say “no”") == "“say 'no'”"
    assert shown("two\nlines\tof ours\x1b[2J") == "two\nlines\tof ours\\x1b[2J"


@each_hostile
def test_patterns_of_messages_refuse_what_would_have_to_be_escaped(text: str) -> None:
    for pattern in (PLAIN, WORDS):
        kind = type("S", (msgspec.Struct,), {"__annotations__": {"s": _annotated(pattern)}})
        if escaped(text, len(text)) != text:
            with pytest.raises(msgspec.ValidationError):
                msgspec.convert({"s": text}, kind)
    several = msgspec.json.Decoder(_annotated(LINES))
    assert several.decode('"two\\nlines"') == "two\nlines"
    with pytest.raises(msgspec.ValidationError):
        several.decode('"two\\rlines"')


def _annotated(pattern: str) -> object:
    from typing import Annotated

    return Annotated[str, msgspec.Meta(pattern=pattern)]


# ── what reaches the terminal


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Everything that is written to stdout and stderr."""
    found = io.StringIO()
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    return found


@each_hostile
@pytest.mark.parametrize("colour", [False, True])
def test_no_command_lets_it_through(text: str, colour: bool, screen: io.StringIO) -> None:
    terminal = Terminal(environ={"FORCE_COLOR": "1"} if colour else {"NO_COLOR": "1"}, verbose=2)
    terminal.say(text)
    terminal.data(terminal.style(text, sys.stdout, bold=True) + text, {})
    terminal.data(terminal.table(("PEER", "NAME"), [(text, text)]), {})
    error = AtollError(text, why=text, hint=text)
    error.message = error.why = error.hint = text  # as one that came over the control socket
    show_error(terminal, error)
    run = {
        "name": text,
        "run_id": text,
        "refused": {PEER: ["E205", text, STRANGER, text], text: ["E205", text]},
        "banned": {PEER: text},
        "trouble": {"code": text, "message": text, "hint": text},
        "progress": [text, 1, 2],
        "rule": text,
        "members": [text],
    }
    network = {
        "addresses": [text],
        "bootstrap": {text: text},
        "reach": {"relays_refused": {PEER: text}},
    }
    terminal.data(views.status_text(terminal, {"runs": [run], "network": network}), {})
    terminal.data(views.peers_table(terminal, [{"peer": text, "path": text, "link": text}]), {})
    with TrainingView(terminal, RunProgress(text, 3)) as view:
        view.say(text)
        view.take_status(read_run_status(run), draining=False)
        for event in (
            {"event": "peer.misbehaved", "peer": PEER, "reason": text},
            {"event": "run.trouble", "code": text, "message": text, "hint": text},
            {"event": "round.committed", "round": 1, "lost": [text]},
            {"event": "round.committed", "round": 1, "lost": 7},  # how many events were lost before
        ):
            view.take_event(read_event(event))
    said = screen.getvalue()
    for sequence in ("\x1b[1m", "\x1b[0m", "\x1b[31m", "\x1b[33m"):
        said = said.replace(sequence, "") if colour else said
    assert harmful(said) == set()


def test_only_our_own_colours_are_colours(screen: io.StringIO) -> None:
    terminal = Terminal(environ={"FORCE_COLOR": "1"})
    ours = terminal.style("a\x1b[32mb", sys.stdout, bold=True)
    assert painted(ours) == "\x1b[1ma\\x1b[32mb\x1b[0m"
    assert painted("\x1b[31mred\x1b[0m") == "\\x1b[31mred\\x1b[0m"


@each_hostile
def test_json_says_the_same_without_a_control(text: str) -> None:
    line = as_json({"text": text})
    assert harmful(line, newlines=False) == set()
    assert json.loads(line)["text"] == text


@each_hostile
def test_the_live_view_takes_text_for_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    view = TrainingView(Terminal(), RunProgress(text, 3))
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(view._block())
    said = console.file.getvalue()  # type: ignore[attr-defined]
    plain = Console(file=io.StringIO(), force_terminal=True, width=200, no_color=True)
    assert harmful(_without_styles(said)) == set()
    assert plain.is_terminal
    if text.startswith("[red]"):
        assert "[red]banned[/red]" in said


def _without_styles(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@each_hostile
def test_a_record_is_one_line_of_the_log(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.warning("a peer says: %s", text)
    assert harmful(stream.getvalue()) == set()
    assert stream.getvalue().count("\n") == 1
    assert len(stream.getvalue()) < 45_000
    stream.truncate(0)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("it failed of %s", text)
    assert harmful(stream.getvalue().lstrip("\0")) == set()
    first, *others = stream.getvalue().lstrip("\0").splitlines()
    assert "it failed of" in first
    assert all(line.startswith("  | ") for line in others)


@each_hostile
def test_errors_about_peers_stay_on_one_line(text: str) -> None:
    for error in (
        RemoteProtocolError(f"malformed message: {text}", peer=PEER),
        NotAdmittedError(text),
    ):
        assert harmful(error.message, newlines=False) == set()
        assert harmful(str(error), newlines=False) == set()
        assert len(error.message) <= 41_000
    assert harmful("".join(AtollError(text, why=text, hint=text).__notes__)) == set()


# ── whose words they are


def test_a_member_gives_a_verdict_and_a_stranger_only_says_something() -> None:
    evil = HOSTILE["screen cleared"]
    stranger = Refusal("E205", evil, STRANGER, "203.0.113.9")
    assert stranger.verdict(PEER) is None
    assert (
        stranger.text(PEER)
        == "a stranger at 203.0.113.9 (…EvilEvil) says “\\x1b[2J\\x1b[H you are banned”"
    )
    for standing in (MEMBER, NAMED):
        found = Refusal("E205", evil, standing, "").verdict(PEER)
        assert found is not None
        assert found.code == "E205"
        assert "refuses: “\\x1b[2J\\x1b[H you are banned”" in found.message
    assert Refusal("E000", "anything", MEMBER, "").verdict(PEER) is None
    row = views.refusal_text(PEER, stranger.row())
    assert row.startswith("no member of this run, a stranger at 203.0.113.9, ")
    assert row.endswith("says “\\x1b[2J\\x1b[H you are banned” (E205)")


# ── that nobody forgets it

TOLD = {
    ("node.net.lane_talk", "Refuse", "reason"): "quoted in node/net/lanes.py",
    ("node.net.through.relaying", "_Denied", "reason"): "quoted where it is raised",
    (
        "node.net.greeting",
        "GreetingAnswer",
        "reason",
    ): "escaped in node/net/outbox.py, quoted by Refusal",
    ("node.net.look", "LookAnswer", "reason"): "quoted in node/composing/preview.py",
    ("node.run.banning", "Ban", "reason"): "quoted by Bans.why and `atoll bans`",
}
"""Fields of messages that may hold anything, and where that is dealt with."""

OURS = {
    "node.bases.own.OwnBase": "where this machine's own copy lies",
    "node.run.rate.TrainingRate": "a report",
    "node.recipes.finetune.preparing.StorePlace": "between processes of one member",
    "node.recipes.finetune.train.MemberJob": "between processes of one member",
    "node.recipes.finetune.launching._CardJob": "between processes of one member",
    "collectives.swarm.RunSettings": "made from a checked manifest",
    "node.records.audit.Audited": "a report",
    "node.records.audit.ConfigurationChange": "a report",
    "node.records.audit.LogFork": "a report",
    "node.records.audit.Proven": "a report",
    "node.home.config.Loaded": "where settings come from",
    "node.home.config.NodeTable": "the user's own settings",
    "node.home.config.NotifyTable": "the user's own settings",
    "node.records.contents.Contents": "of the user's own model",
    "node.records.export.Exported": "a report",
    "node.home.lifecycle.NodeFile": "written by this node",
    "node.run.status.RunStatus": "between nodes and views of one user",
    "node.home.private_node._Ready": "between a script and its node",
    "node.net.rendezvous._Said": "written by this node, never read",
    "node.watching.presence._Noted": "written by this node",
    **{
        f"node.run.events.{each.__name__}": "of a file, escaped where it is shown"
        for each in (*KINDS.values(), RunEvent, OtherEvent, CodedEvent, Slowest)
    },
    "node.records.figures.Leaner": "a report",
    "node.records.figures.Leans": "a report",
    "node.records.recompute.RecomputedPart": "a report",
    "node.records.recompute.Recomputed": "a report",
    "node.storage.results._Trailer": "written by this node",
    "node.run.standing.Standing": "written by this node",
    "node.home.local_settings.LocalSettings": "a file of the current folder, quoted where it is shown",
    "node.run.invite.Invite": "its addresses are checked where they are unpacked",
    "node.session.events.Waiting": "sentences of a session's own",
    "node.control.shared_memory.AnchorSlot": "between a script and its node",
    "node.records.figures.Split": "a report",
    "optim.model.card.ModelCard": "written by the user's own script",
    "optim.model.card.Saved": "written by the user's own script",
    "optim.ranks.swarm._SwarmHead": "between ranks of one job",
    "optim.ranks.talk._Failed": "between ranks of one job",
}
"""Structs that nobody outside writes. `node.control` is between a user's processes, as a whole."""


def _structs() -> Iterator[type[msgspec.Struct]]:
    for package in (atoll.collectives, atoll.security, atoll.optim, atoll.node):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith(
                ("__main__", "_native", "lightning", "trainer", "look.server")
            ):
                importlib.import_module(module.name)
    found, seen = [msgspec.Struct], set[type]()
    while found:
        for kind in found.pop().__subclasses__():
            if kind not in seen and kind.__module__.startswith("atoll."):
                seen.add(kind)
                found.append(kind)
                yield kind


def _open_strings(kind: msgspec.inspect.Type) -> bool:
    """Whether a value of this type can hold a text that would have to be escaped."""
    match kind:
        case msgspec.inspect.StrType():
            import re

            if kind.pattern is None:
                return True
            return any(
                len(text) < 1000 and re.search(kind.pattern, text) and escaped(text) != text
                for text in (*HOSTILE.values(), "x\n", "name\n")
                if kind.pattern != LINES or "\n" not in text
            )
        case msgspec.inspect.Metadata():
            return _open_strings(kind.type)
        case msgspec.inspect.UnionType():
            return any(map(_open_strings, kind.types))
        case msgspec.inspect.DictType():
            return _open_strings(kind.key_type) or _open_strings(kind.value_type)
        case msgspec.inspect.TupleType():
            return any(map(_open_strings, kind.item_types))
        case (
            msgspec.inspect.VarTupleType() | msgspec.inspect.ListType() | msgspec.inspect.SetType()
        ):
            return _open_strings(kind.item_type)
    return False


def test_every_text_that_a_peer_can_write_is_refused_or_listed_here() -> None:
    """Gate: a new field of a message either has a pattern without controls (PLAIN, WORDS, LINES),
    or a line in TOLD that says who quotes it.
    """
    wrong, told = list[str](), set[tuple[str, str, str]]()
    for kind in _structs():
        module = kind.__module__.removeprefix("atoll.")
        if (
            module.startswith(("node.control.", "node.home.failures"))
            or f"{module}.{kind.__name__}" in OURS
        ):
            continue
        described = msgspec.inspect.type_info(kind)
        assert isinstance(described, msgspec.inspect.StructType)
        for field in described.fields:
            if _open_strings(field.type):
                key = (module, kind.__name__, field.name)
                told.add(key)
                if key not in TOLD:
                    wrong.append(f"{module}.{kind.__name__}.{field.name}")
    assert not wrong, "\n".join(wrong)
    assert told == TOLD.keys()  # none is listed in vain


WRITERS = {
    "node/home/output.py": "the terminal's door",
    "node/cli/__init__.py": "click's own help; an empty object",
    "node/views/live.py": "shown() before rich",
    "node/cli/looking.py": "painted() line by line",
    "node/cli/join.py": "as_json",
    "node/cli/chat.py": "shown(), piece by piece; its own prompt",
    "node/cli/consent.py": "a fixed question",
    "node/__main__.py": "as_json; its own addresses",
    "node/joining/joining.py": "its own stages",
    "node/joining/speaking.py": "lines of the user's own script",
    "node/home/own_data.py": "a path of the current folder, shown()",
    "node/recipes/train.py": "numbers, as JSON",
    "node/recipes/finetune/measuring.py": "numbers, as JSON",
    "node/recipes/finetune/__main__.py": "shown() line by line",
    "node/demo/director.py": "numbers, as JSON",
    "node/demo/measure.py": "numbers, as JSON",
    "node/demo/processes.py": "a child's own log",
    "node/demo/run.py": "its own verdict",
    "node/demo/view.py": "its own names",
}
"""The only files that write to a terminal, and why they may."""


def test_only_known_places_write_to_a_terminal() -> None:
    root, found = Path(__file__).resolve().parents[2], set[str]()
    for folder in ("collectives", "security", "optim", "node"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _writes(node.func):
                    found.add(str(path.relative_to(root)))
    assert found == WRITERS.keys()
    assert output.SCHEMA == 1


def _writes(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in ("print", "Console", "input")
    if not isinstance(called, ast.Attribute):
        return False
    of = ast.unparse(called.value)
    return (called.attr, of) in (("echo", "click"), ("secho", "click"), ("prompt", "click")) or (
        called.attr == "write" and of in ("sys.stdout", "sys.stderr")
    )


def test_no_pattern_takes_a_newline_at_its_end() -> None:
    r"""Gate: ``$`` matches before a trailing newline, too; patterns end with ``\Z``, or are used by
    fullmatch.
    """
    root, wrong = Path(__file__).resolve().parents[2], list[str]()
    for folder in ("collectives", "security", "optim", "node"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                words = [k.value for k in node.keywords if k.arg == "pattern"]
                if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re":
                    words += node.args[:1]
                for word in words:
                    text = word.value if isinstance(word, ast.Constant) else ""
                    text = text.decode("latin-1") if isinstance(text, bytes) else text
                    if isinstance(text, str) and "$" in text.replace(r"\$", ""):
                        wrong.append(f"{path.relative_to(root)}:{node.lineno} {text}")
    # The answer of a router, of which this is one line among others.
    assert [line for line in wrong if "(?im)^location:" not in line] == []


@pytest.mark.parametrize("text", ["builtin:gpt\n", "local:x\n"])
def test_a_model_entry_with_a_newline_is_refused(text: str) -> None:
    from atoll.node.manifest.tables import ModelTable

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"entry": text}, ModelTable)
    assert msgspec.convert({"entry": text.strip()}, ModelTable).entry == text.strip()
