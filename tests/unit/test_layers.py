"""The order of the folders and the size of things, enforced: collectives <- security <- optim <-
node.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house import (
    LAYERS,
    ROOT,
    edges_of_files,
    functions,
    imports,
    only_for_types,
    package_files,
    script_files,
    tree,
)

MAX_FUNCTION_LINES = 70
LONG_FOR_A_REASON = {
    ("collectives/exchange/slot.py", "__init__"): "it wires parts together",
    ("collectives/round/machine.py", "__init__"): "a table of what the machine knows",
    ("node/__main__.py", "_parser"): "a table of arguments",
    ("node/manifest/btard.py", "check_btard"): "a table of refusals",
    ("node/manifest/federated.py", "_check_secure"): "a table of refusals",
    ("node/manifest/methods.py", "arrival_refusals"): "a table of refusals",
    ("node/net/network.py", "__init__"): "it wires parts together",
    ("node/watching/chronicle.py", "note"): "one case an event",
    ("node/composing/process.py", "_main"): "one order of starts and ends",
    ("node/modes/operations/operation.py", "__init__"): "it wires parts together",
    ("node/session/session.py", "__init__"): "it wires parts together",
    ("scripts/bench/bench_start.py", "main"): "a table of arguments",
    ("scripts/simulate_rounds.py", "described"): "a table of arguments",
}

# The few places that wrap libp2p, and the ones that may name trio: everything else stays free of
# both.
LIBP2P_MAY = ("node/net/",)
TRIO_MAY = (
    "node/net/",
    "node/service/",
    "node/watching/",
    "node/composing/",
    "node/control/",
    "node/daemon.py",
    "node/__main__.py",
)

FORBIDDEN = [
    # (what, where it is refused); built from pieces so that this list does not find itself
    (r"\bTO" + r"DO\b|\bFIX" + r"ME\b|\bXX" + r"X\b", "a note instead of work"),
    (r"\bNotImplemented" + r"Error\b", "an unfinished place"),
    (
        r"\bpick" + r"le\b\.|import pick" + r"le|torch\.lo" + r"ad\(|torch\.sa" + r"ve\(",
        "a format that runs code when read",
    ),
    (
        r"(?<![\w.])(?:ev" + r"al|ex" + r"ec)\(|import (?:mars" + r"hal|shel" + r"ve|di" + r"ll)\b",
        "text or bytes that are run",
    ),
    (r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot)/", "a path of somebody's machine"),
    (r"py" + r"pi\.org|python" + r"hosted|download\.pytor" + r"ch", "a registry host"),
]


def test_there_is_something_to_check() -> None:
    assert len(package_files()) > 8
    assert {path.parts[0] for path in package_files()} == set(LAYERS)


def test_folders_import_only_what_stands_to_their_left() -> None:
    wrong = []
    for path in package_files():
        mine = LAYERS.index(path.parts[0])
        for line, level, module in imports(path):
            if not module.startswith("atoll"):
                if level and not module.startswith("atoll."):
                    wrong.append(f"{path}:{line} leaves the package")
                continue
            if level == 0:
                wrong.append(
                    f"{path}:{line} imports {module} absolutely; inside the folders imports are relative"
                )
                continue
            layer = module.split(".")[1] if "." in module else ""
            if layer and layer not in LAYERS:
                wrong.append(f"{path}:{line} imports {module}: no such folder")
            elif layer and LAYERS.index(layer) > mine:
                wrong.append(f"{path}:{line} imports {module}, which stands to its right")
    assert wrong == []


@pytest.mark.parametrize(("library", "allowed"), [("libp2p", LIBP2P_MAY), ("trio", TRIO_MAY)])
def test_only_the_wrapping_files_name_the_network_libraries(
    library: str, allowed: tuple[str, ...]
) -> None:
    wrong = [
        f"{path}:{line}"
        for path in package_files()
        if not path.as_posix().startswith(allowed)
        for line, _, module in imports(path)
        if module.split(".")[0] == library
    ]
    assert wrong == []


def test_scripts_and_tests_import_the_package_by_its_name() -> None:
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    wrong = [
        f"{path}:{line} {module}"
        for path in [*tests, *script_files()]
        for line, level, module in imports(path)
        if level == 0 and module.split(".")[0] in LAYERS
    ]
    assert wrong == []


def _circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """What is left of a graph of modules once those are taken off, again and again, that import
    nothing that is left: the circles, and what leads from one to another. ``edges``: by module,
    what it imports.
    """
    left = {module: set(needed) for module, needed in edges.items()}
    while free := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in free}
    return [[module, *sorted(needed & left.keys())] for module, needed in sorted(left.items())]


def test_circles_are_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert _circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == [["a", "b"], ["b", "a"]]


def test_imports_for_types_are_found() -> None:
    code = ast.parse("from .a import A\nif TYPE_CHECKING:\n    from .b import B\n    import c\n")
    only = only_for_types(code)
    imports = [node for node in ast.walk(code) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [node in only for node in imports] == [False, True, True]


def test_no_two_files_import_each_other_at_run_time() -> None:
    """The parts of one object in one folder may name its class in annotations: a hand-written
    Protocol that repeats the signatures of one class would be the only way around it.
    """
    edges = {
        str(path): {str(each) for each in found}
        for path, found in edges_of_files(types=False).items()
    }
    assert sum(map(len, edges.values())) > 1500
    assert _circles(edges) == []


def test_folders_import_only_what_stands_above_them_in_the_map() -> None:
    """The map is docs/internals/architecture.md's list of folders. Imports for types count, too."""
    text = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    order = [Path(row) for row in re.findall(r"^([a-z0-9_/]+)/ +\S", text, flags=re.MULTILINE)]
    assert sorted(order) == sorted({path.parent for path in package_files()})
    assert [row.parts[0] for row in order] == sorted(
        (row.parts[0] for row in order), key=LAYERS.index
    )
    place = {folder: number for number, folder in enumerate(order)}
    wrong = [
        f"{path} imports {each}, whose folder stands below"
        for path, found in edges_of_files(types=True).items()
        for each in sorted(found)
        if place[each.parent] > place[path.parent]
    ]
    assert wrong == []


def test_no_run_imports_the_lab_and_its_readme_has_a_row_for_each_file() -> None:
    """optim/lab has functions of papers, for scripts: what a run needs moves out of it."""
    lab = Path("optim/lab")
    found = {
        f"{path} imports {each}"
        for path, imported in edges_of_files(types=True).items()
        for each in imported
        if lab in each.parents and lab not in path.parents
    }
    assert found == set()
    text = (ROOT / lab / "README.md").read_text(encoding="utf-8")
    files = [path.relative_to(lab) for path in package_files() if lab in path.parents]
    missing = [
        str(path)
        for path in files
        if path.name != "__init__.py"
        and f"`{path}`" not in text
        and f"`{path.parent}/`" not in text
    ]
    assert len(files) > 12
    assert missing == []


def _said_twice(classes: list[tuple[str, str]]) -> list[str]:
    """The names that stand for more than one class, and where. ``classes``: (name, file)."""
    files: dict[str, list[str]] = {}
    for name, file in classes:
        files.setdefault(name, []).append(file)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(files.items()) if where[1:]]


def test_a_class_name_stands_for_one_class() -> None:
    """A name that is found once in the product needs no folder beside it to be understood. Another
    class gets the name of its message, of its owner or of what it is for.
    """
    assert _said_twice([("Plan", "a.py"), ("Part", "a.py"), ("Plan", "b.py")]) == [
        "Plan: a.py, b.py"
    ]
    classes = [
        (node.name, path.as_posix())
        for path in package_files()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 1000
    assert _said_twice(classes) == []


def _fields(path: str, name: str) -> set[str]:
    """The attributes of a class: those that its methods set, and those of a dataclass."""
    owner = next(
        node
        for node in tree(Path(path)).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    named = {
        node.target.id
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return named | {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


CHANGES = {"add", "append", "clear", "discard", "extend", "pop", "remove", "setdefault", "update"}


def _written(code: ast.AST, fields: set[str]) -> list[tuple[int, str]]:
    """Where a field of a round is written through a name that its parts have for it: by
    assignment, an item of it, or a method that changes a collection.
    """

    def is_of_round(node: ast.expr) -> bool:
        if isinstance(node, ast.Subscript):
            return is_of_round(node.value)
        if not isinstance(node, ast.Attribute) or node.attr not in fields:
            return False
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        return name in {"machine", "view", "open", "opened"}

    found = list[tuple[int, str]]()
    for node in ast.walk(code):
        match node:
            case (
                ast.Attribute(ctx=ast.Store() | ast.Del())
                | ast.Subscript(ctx=ast.Store() | ast.Del())
            ):
                changed: ast.expr = node
            case ast.Call(func=ast.Attribute(value=changed, attr=attr)) if attr in CHANGES:
                pass
            case _:
                continue
        if is_of_round(changed):
            found.append((node.lineno, ast.unparse(changed)))
    return found


def test_writes_through_a_view_are_found() -> None:
    fields = {"ballot", "known", "caught"}
    for code in (
        "self.session.machine.ballot = 1",
        "machine.ballot += 1",
        "a, view.open.known = 1, {}",
        "opened.known[b''] = entry",
        "del view.open.known[b'']",
        "view.caught.add(peer)",
        "view.open.known[1].setdefault(2, 3)",
    ):
        assert len(_written(ast.parse(code), fields)) == 1, code
    for code in ("machine = view.ballot", "self.ballot = 1", "view.known.get(1)", "x[view.ballot]"):
        assert _written(ast.parse(code), fields) == [], code


def test_only_the_machine_of_a_round_writes_its_fields() -> None:
    """One file tells the whole life of a round's state; others tell it what happened."""
    mine = "collectives/round/machine.py"
    fields = _fields(mine, "RoundMachine") | _fields("collectives/round/state.py", "OpenRound")
    assert {"ballot", "contribution", "stateless", "applying", "votes"} <= fields
    wrong = [
        f"{path}:{line} {what}"
        for path in package_files()
        if path.as_posix().startswith(("collectives/round/", "node/session/", "node/modes/secure/"))
        and path.as_posix() != mine
        for line, what in _written(tree(path), fields)
    ]
    assert wrong == []


def test_lines_fit_a_hundred_columns() -> None:
    """The formatter does not break strings, docstrings and comments: here the writer does."""
    wide = [
        f"{path}:{number}"
        for path in package_files()
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert wide == []


def test_no_docstring_only_points_elsewhere() -> None:
    """An override says what differs, or nothing: readers and tools find the seam's own words."""
    pointers = [
        f"{path}:{node.lineno} {node.name}"
        for path in package_files()
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and re.fullmatch(r"See `?[\w.]+`?\.", ast.get_docstring(node) or "")
    ]
    assert pointers == []


def test_functions_stay_short() -> None:
    long = [
        f"{path}:{line} {name}: {count} lines"
        for path in (*package_files(), *script_files())
        for name, line, count in functions(path)
        if count > MAX_FUNCTION_LINES and (path.as_posix(), name) not in LONG_FOR_A_REASON
    ]
    assert long == []


def _texts() -> list[Path]:
    shell = [ROOT / "scripts" / name for name in ("_setup", "demo", "test", "constraints.txt")]
    documents = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "pyproject.toml",
        *(ROOT / ".ci").glob("[a-z]*"),
    ]
    code = [ROOT / path for path in (*package_files(), *script_files())]
    return [path for path in (*code, *shell, *documents) if path.is_file()]


@pytest.mark.parametrize(("pattern", "why"), FORBIDDEN, ids=[why for _, why in FORBIDDEN])
def test_nothing_unfinished_or_foreign(pattern: str, why: str) -> None:
    found = []
    for path in _texts():
        if path.suffix == ".md" and why in (
            "a format that runs code when read",
            "text or bytes that are run",
            "an unfinished place",
        ):
            continue  # documents may say that these do not exist
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_no_bare_sleep_in_the_packages() -> None:
    found = [
        f"{path}:{number}"
        for path in package_files()
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\btime\.sleep\(", line)
    ]
    assert found == []


def _loaded_by(code: str, home: Path) -> set[str]:
    """Which of torch, trio and libp2p a fresh interpreter holds after ``code``."""
    probe = f"{code}\nimport sys\nprint('LOADED', *(m for m in ('torch', 'trio', 'libp2p') if m in sys.modules))"
    environment = {**os.environ, "ATOLL_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def _cli(*arguments: str) -> str:
    return f"import sys\nsys.argv = {['atoll', *arguments]!r}\nfrom atoll.node.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize(
    "code",
    [
        "import atoll.optim",
        "from atoll.optim import attach, DiLoCo",
        "import atoll.node.client",
        "from atoll.node import join",
    ],
)
def test_a_script_loads_neither_trio_nor_libp2p(code: str, atoll_home: Path) -> None:
    assert _loaded_by(code, atoll_home) & {"trio", "libp2p"} == set()


@pytest.mark.parametrize("arguments", [("--help",), ("status",), ("version",), ("explain", "E110")])
def test_light_commands_load_nothing_heavy(arguments: tuple[str, ...], atoll_home: Path) -> None:
    assert _loaded_by(_cli(*arguments), atoll_home) == set()
