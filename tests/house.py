"""What the tests of the house share: the project's files, parsed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "collectives",
    "security",
    "optim",
    "node",
)  # a folder imports only what stands to its left


@cache
def package_files() -> tuple[Path, ...]:
    """Every Python file of the four folders, relative to the project."""
    return tuple(
        sorted(path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
    )


@cache
def script_files() -> tuple[Path, ...]:
    """Every Python file of scripts/ but for the examples, relative to the project."""
    scripts = ROOT / "scripts"
    found = [*scripts.glob("*.py"), *(scripts / "bench").rglob("*.py")]
    return tuple(sorted(path.relative_to(ROOT) for path in found))


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file given relative to the project."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """`node/net/transport/host.py` → `atoll.node.net.transport.host`."""
    parts = path.with_suffix("").parts
    return ".".join(("atoll", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def package_name(path: Path) -> str:
    """The package a file's relative imports start from."""
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def imports(path: Path) -> list[tuple[int, int, str]]:
    """Every import of a file as (line, level, absolute module): also those inside functions, type
    checks and import_module calls.
    """
    found: list[tuple[int, int, str]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, 0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = package_name(path).split(".")
                base = ".".join(
                    [*package[: len(package) - node.level + 1], *([base] if base else [])]
                )
            found.append((node.lineno, node.level, base))
            # `from .. import collectives` names a module, too
            found += [
                (node.lineno, node.level, f"{base}.{alias.name}")
                for alias in node.names
                if base in ("", "atoll")
            ]
        elif (
            isinstance(node, ast.Call)
            and _callee(node) in ("import_module", "__import__")
            and node.args
        ):
            first = node.args[0]
            if (
                isinstance(first, ast.Constant)
                and isinstance(first.value, str)
                and not first.value.startswith(".")
            ):
                found.append((node.lineno, 0, first.value))
    return found


def _callee(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )


def functions(path: Path) -> list[tuple[str, int, int]]:
    """Every function and method of a file as (name, first line, lines), nested ones too.

    Lines of its docstring, and of comments, are not counted: explanations may be long.
    """
    comments = {
        number
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.lstrip().startswith("#")
    }

    def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        spent = set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) - comments
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            spent -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return len(spent)

    return [
        (node.name, node.lineno, lines(node))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def only_for_types(code: ast.AST) -> set[ast.AST]:
    """The nodes below ``if TYPE_CHECKING:``."""
    return {
        below
        for node in ast.walk(code)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for below in ast.walk(statement)
    }


@cache
def edges_of_files(*, types: bool) -> dict[Path, frozenset[Path]]:
    """What each file of the four folders imports, also inside functions.

    ``types``: also for type checks only. A name that a package's own file re-exports counts as
    that file.
    """
    modules = {module_name(path): path for path in package_files()}
    edges: dict[Path, frozenset[Path]] = {}
    for path in package_files():
        found: set[Path] = set()
        left_out = set[ast.AST]() if types else only_for_types(tree(path))
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node not in left_out:
                above = package_name(path).split(".")[: 1 - node.level or None]
                base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
                named = [modules.get(f"{base}.{alias.name}") for alias in node.names]
                found |= {each or modules[base] for each in named if each or base in modules}
        edges[path] = frozenset(found - {path})
    return edges
