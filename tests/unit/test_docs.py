"""Docstrings, maps, and documents that tell the truth: what they name exists, and no page is too
long to be read.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from house import LAYERS, ROOT, package_files, script_files, tree

TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*(ROOT / name for name in TOP), *PAGES]
MOST_WORDS = 2500  # of a page, as `wc -w` counts them
MOST_WITHOUT_HEADING = 800
MOST_PROTOCOLS = 53  # a reader who follows a call through one of them ends in a header
OVERRIDDEN = {"overload", "setter", "override"}


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    names = (getattr(item, "attr", getattr(item, "id", "")) for item in node.decorator_list)
    return set(names)


def _extends_something(node: ast.ClassDef) -> bool:
    """Whether the class has a base whose documentation its methods may inherit."""
    names = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
    return bool(
        names
        - {"Protocol", "Generic", "Struct", "Enum", "StrEnum", "IntEnum", "NamedTuple", "object"}
    )


SHORT = 4  # lines of a function whose name and signature tell all


@cache
def _documented_by_seams() -> set[str]:
    """Names of the methods that Protocols document: an implementation says what differs, if
    anything.
    """
    return {
        method.name
        for path in package_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and any("Protocol" in ast.unparse(base) for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    }


def _undocumented(path: Path) -> list[str]:
    missing = [] if ast.get_docstring(tree(path)) else [f"{path}: the module itself"]

    def look(body: list[ast.stmt], prefix: str, inherits: bool = False) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    missing.append(f"{path}:{node.lineno} class {prefix}{node.name}")
                look(node.body, f"{prefix}{node.name}.", inherits=_extends_something(node))
            elif isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef
            ) and not node.name.startswith("_"):
                exempt = (
                    inherits
                    or _decorators(node) & OVERRIDDEN
                    or node.name in _documented_by_seams()
                    or node.end_lineno - node.body[0].lineno < SHORT
                )
                if not exempt and not ast.get_docstring(node):
                    missing.append(f"{path}:{node.lineno} {prefix}{node.name}()")

    look(tree(path).body, "")
    return missing


def test_everything_public_has_a_docstring() -> None:
    assert [
        line for path in (*package_files(), *script_files()) for line in _undocumented(path)
    ] == []


@pytest.mark.parametrize("package", sorted({path.parent for path in package_files()}), ids=str)
def test_each_folder_opens_with_a_map_of_its_files(package: Path) -> None:
    if not (ROOT / package / "__init__.py").is_file():
        pytest.fail(f"{package} has no __init__.py")
    text = ast.get_docstring(tree(package / "__init__.py")) or ""
    files = {
        path.stem
        for path in package_files()
        if path.parent == package and not path.stem.startswith("__")
    }
    rooms = {
        path.parent.name
        for path in package_files()
        if path.parent.parent == package and path.name == "__init__.py"
    }
    assert (
        sorted(name for name in files | rooms if not re.search(rf"\b{re.escape(name)}\b", text))
        == []
    )


def _fences(text: str) -> list[str]:
    """The lines of shell code blocks, continuation lines joined, prompts and comments removed."""
    lines: list[str] = []
    for language, block in re.findall(r"```(sh|bash|console)\n(.*?)```", text, flags=re.DOTALL):
        for raw in block.replace("\\\n", " ").splitlines():
            if language == "console" and not raw.startswith("$ "):
                continue  # what the command printed
            line = re.sub(r"\s+#.*$", "", raw.strip()).removeprefix("$ ")
            if line and not line.startswith("#"):
                lines.append(line)
    return lines


def _commands(text: str) -> list[str]:
    """Shell lines of a document: those of its code blocks, and `atoll …` or `scripts/…` between
    backticks.
    """
    inline = [
        re.sub(r"\s+", " ", code)
        for code in re.findall(r"(?<!`)`((?:atoll|(?:\./)?scripts/)[^`]*)`(?!`)", text)
    ]
    return _fences(text) + inline


@cache
def _verbs() -> dict[str, set[str]]:
    """The verbs of the command line ("" is `atoll` itself; `invite new` is one too) and the flags
    each takes.
    """
    import click

    from atoll.node.cli import cli

    found: dict[str, set[str]] = {}

    def look(command: click.Command, name: str) -> None:
        context = click.Context(command, info_name=name or "atoll")
        found[name] = {
            flag
            for option in command.get_params(context)
            for flag in (*option.opts, *option.secondary_opts)
        }
        if isinstance(command, click.Group):
            for verb in command.list_commands(context):
                child = command.get_command(context, verb)
                assert child is not None
                look(child, f"{name} {verb}".strip())

    look(cli, "")
    return found


def _check_atoll(words: list[str]) -> str | None:
    verbs = _verbs()
    name, rest = "", list(words)
    while rest and f"{name} {rest[0]}".strip() in verbs:
        name = f"{name} {rest.pop(0)}".strip()
    if name == "" and rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
        return f"no verb {rest[0]!r}"
    flags = {
        word.split("=")[0]
        for word in rest
        if word.startswith("-")
        and len(word) > 1
        and re.fullmatch(r"-{1,2}[a-z][a-z-]*(=.*)?", word)
    }
    unknown = flags - verbs[name] - verbs[""]
    return f"`atoll {name}` has no {', '.join(sorted(unknown))}" if unknown else None


def _check_script(words: list[str]) -> str | None:
    name = words[0].removeprefix("./scripts/").removeprefix("scripts/")
    path = ROOT / "scripts" / name
    if not path.exists():
        return f"no scripts/{name}"
    if name == "demo":
        return _check_atoll(["demo", *words[1:]])
    if path.suffix == ".py":
        flags = [
            word.split("=")[0] for word in words[1:] if re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word)
        ]
        text = path.read_text(encoding="utf-8")
        missing = [flag for flag in flags if flag not in text and flag != "--help"]
        return f"scripts/{name} has no {', '.join(missing)}" if missing else None
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_documents_exist(document: Path) -> None:
    wrong = []
    for line in _commands(document.read_text(encoding="utf-8")):
        for command in re.split(r"\s*(?:&&|\||;)\s*", line):
            words = [word for word in command.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
            if not words:
                continue
            problem = None
            if words[0] == "atoll" and (len(words) == 1 or "…" not in words[1]):
                problem = _check_atoll(words[1:])
            elif re.match(r"(\./)?scripts/", words[0]):
                problem = _check_script(words)
            elif words[0].endswith("python") and len(words) > 1 and words[1].startswith("scripts/"):
                problem = _check_script(words[1:])
            if problem:
                wrong.append(f"{command}: {problem}")
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(
        re.findall(rf"`((?:{'|'.join(LAYERS)}|docs|tests|scripts|\.ci)/[\w./-]*[\w/])`", text)
    )
    links = set(re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text))
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not (document.parent / link).exists()]
    assert sorted(missing) == []


def _anchors(text: str) -> set[str]:
    """The fragments by which GitHub links to the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", _without_code(text), flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 1
        while slug in found and f"{slug}-{number}" in found:
            number += 1
        found.add(slug if slug not in found else f"{slug}-{number}")
    return found


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def test_anchors_of_headings_are_those_of_github() -> None:
    text = "# A `b`: c's [d](e.md)\n```sh\n# not one\n```\n## No quorum\n## No quorum\n"
    assert _anchors(text) == {"a-b-cs-d", "no-quorum", "no-quorum-1"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_headings_that_there_are(document: Path) -> None:
    missing = []
    for target, anchor in re.findall(
        r"\]\(([^)#:\s]*)#([^)\s]+)\)", _without_code(document.read_text(encoding="utf-8"))
    ):
        page = (document.parent / target) if target else document
        if not page.is_file() or anchor not in _anchors(page.read_text(encoding="utf-8")):
            missing.append(f"{target}#{anchor}")
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_blocks_in_documents_parse(document: Path) -> None:
    for language, block in re.findall(
        r"^```(\w+)\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.M
    ):
        if language == "python":
            compile(block, document.name, "exec")
        elif language == "toml":
            tomllib.loads(block)
        elif language == "json":
            json.loads(block)
        elif language == "mermaid":
            assert ";" not in block  # it would end a statement
        else:
            assert language in ("sh", "console", "text"), language


def _words(text: str) -> int:
    return sum(1 for token in text.split() if re.search(r"\w", token))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_are_short_and_have_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert len(text.split()) <= MOST_WORDS
    prose = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    sections = re.split(r"^#{1,6} .*$", prose, flags=re.MULTILINE)
    assert max(_words(section) for section in sections) <= MOST_WITHOUT_HEADING


def test_tests_named_in_documents_exist() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.M)
    }
    named = {
        name
        for path in DOCUMENTS
        for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))
    }
    assert named
    assert sorted(named - there) == []


def _chapters(page: str) -> str:
    """The text of a page of docs/ and of the pages in the folder of its name."""
    first = ROOT / "docs" / page
    pages = [first, *sorted(first.with_suffix("").glob("*.md"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in pages)


def test_each_promise_and_each_threat_names_what_shows_it() -> None:
    """A test or a script, or the words "not solved" in a row that nothing shows."""
    for name, first, column in (("guarantees.md", "promise", 2), ("threat-model.md", "threat", 3)):
        rows = list[str]()
        for table in _chapters(name).split(f"\n| {first} |")[1:]:
            rows += table.split("\n\n")[0].splitlines()[2:]
        assert len(rows) > 20
        for row in rows:
            cells = [cell.strip() for cell in row.strip("|").split(" |")]
            shown = re.findall(r"`(test_\w+|tests/[\w/]+\.py|\.?/?scripts/[\w.]+)", cells[column])
            assert shown or "**Not solved**" in row, row


def test_figures_of_the_threat_model_are_those_of_the_code() -> None:
    from inspect import signature

    from atoll.node.net import announcements, greeting, lane_routes, network, rendezvous
    from atoll.node.net.lan import neighbours
    from atoll.node.net.reach import punch, reach
    from atoll.node.net.transport import faults, lane_sockets, unread, workarounds
    from atoll.node.net.transport.host import Host

    text = " ".join(_chapters("threat-model.md").split())
    words = {4: "four", 6: "six", 12: "twelve"}
    places = signature(Host.__init__).parameters["max_connections"].default
    for said in (
        f"Where all {places} are taken",
        f"Another {workarounds.OUTGOING} connections are the node's own",
        "a peer has six connections at most",
        f"and {workarounds.MAX_STREAMS} open streams on each",
        f"Over all connections {unread.MOST_BYTES >> 20} MiB may be unread",
        f"as names, {rendezvous.MAX_OWED:,} of them and then no further question is read",
        f"the last frame ({rendezvous.FRAME_BYTES >> 10} KiB) was taken",
        f"nothing is read for {rendezvous.SILENT_S:.0f} s ends",
        f"Lists have {words[rendezvous.STREAMS_PER_PEER]} streams a peer and "
        f"{rendezvous.MAX_STREAMS} in all",
        f"agreed on in messages of {workarounds.MAX_NAME_BYTES >> 10} KiB at most",
        f"have {announcements.MAX_STRANGE:,} places, those of one run {announcements.MAX_PER_RUN}",
        f"at most {neighbours.MAX_OF_HOST} invented peers a host, {neighbours.MAX_PEERS} in all",
        f"after {faults.LIMIT} faults it is shut out for the rest of a minute",
        f"after {faults.LIMIT} bad messages its sender is not heard for the rest of a minute",
        f"up to {words[2 * reach.SERVERS]} servers",
        f"{words[punch.MAX_ADDRESSES]} addresses an attempt, {words[punch.SERVED_PER_MINUTE]} attempts a minute",
        f"({greeting.HELLO_S:.0f} s for a handshake or greeting, {lane_sockets.HELLO_S:.0f} s at the lane port)",
        f"{lane_routes.ERRANDS} addresses at once, and one a second",
        f"{network.DIALS} addresses at one machine of the internet at once, and one a second",
    ):
        assert said in text
    assert (workarounds.OF_ONE_PEER, faults.WINDOW_S, lane_routes.ERRANDS_PER_S) == (6, 60.0, 1.0)
    assert network.DIALS_PER_S == 1.0


def test_every_script_says_what_it_does() -> None:
    for path in (path for path in script_files() if not path.name.startswith("_")):
        assert (
            "--help" in path.read_text()
            or "argparse" in path.read_text()
            or "click" in path.read_text()
        ), path
    table = (ROOT / "scripts" / "bench" / "README.md").read_text(encoding="utf-8")
    measuring = [path.name for path in (ROOT / "scripts" / "bench").glob("[a-z]*.py")]
    assert re.findall(r"(?m)^\| `(\w+\.py)`", table) == sorted(measuring)
    for name in ("demo", "test"):
        assert (ROOT / "scripts" / name).stat().st_mode & 0o100
        assert (ROOT / "scripts" / name).read_text().splitlines()[1].startswith("# ")


def test_classes_that_the_glossary_names_exist() -> None:
    """A word's class is renamed in both places."""
    text = (ROOT / "docs" / "internals" / "glossary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z][a-z]+[A-Za-z]*)`", text))
    code = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in package_files())
    assert len(named) > 8
    assert {name for name in named if not re.search(rf"^(class )?{name}\b", code, re.M)} == set()


def _protocols(code: ast.AST) -> set[str]:
    """The classes that are a `typing.Protocol` themselves."""
    return {
        node.name
        for node in ast.walk(code)
        if isinstance(node, ast.ClassDef)
        and "Protocol"
        in {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
    }


def test_protocols_are_found() -> None:
    code = "class A(Protocol): ...\nclass B(C, typing.Protocol[T]): ...\nclass D(A): ...\n"
    assert _protocols(ast.parse(code)) == {"A", "B"}


def test_every_protocol_has_a_reason() -> None:
    """A Protocol that repeats the signatures of one class sends a reader from header to header."""
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \| `([\w/]+\.py)` \| (seam|callback|library) \| (.+) \|$", text, flags=re.M
    )
    assert sorted((name, file) for name, file, _, _ in rows) == sorted(
        (name, path.as_posix()) for path in package_files() for name in _protocols(tree(path))
    )
    assert len(rows) <= MOST_PROTOCOLS
    files = [*(ROOT / path for path in package_files()), *(ROOT / "tests").rglob("*.py")]
    classes = {
        name
        for file in files
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), flags=re.M)
    }
    for name, _, why, cell in rows:
        named = re.findall(r"`(\w+)`", cell)
        assert set(named) <= classes, f"{name}: {set(named) - classes}"
        assert len(named) >= {"seam": 2, "callback": 1, "library": 0}[why], name


@cache
def _names_in(path: str) -> set[str]:
    """Classes, functions and methods of a file, methods with their class before them."""
    found = set[str]()

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{prefix}{node.name}")
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")

    look(tree(Path(path)).body, "")
    return found


def test_functions_that_the_internals_name_are_where_they_say() -> None:
    """Who looks for one thing finds it by one grep of docs/internals/README.md."""
    text = (ROOT / "docs" / "internals" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (`[\w/]+\.py`: .+) \|$", text, flags=re.M)
    assert len(rows) >= 80
    assert len({subject for subject, _ in rows}) == len(rows)
    missing = [
        f"{path}: {name}"
        for _, places in rows
        for path, names in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", places)
        for name in re.findall(r"`([\w.]+)`", names)
        if name not in _names_in(path)
    ]
    assert missing == []
    for _, places in rows:  # nothing that the pattern above passes over
        assert re.fullmatch(r"(`[\w/]+\.py`: `[\w.]+`(, `[\w.]+`)*(; |$))+", places), places
