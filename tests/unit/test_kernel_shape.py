"""No class, seam or function of ring 1 is larger than one can hold in the head, unless it says why
that is better so: a paragraph of its docstring that begins "Larger than".
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from house import ROOT, package_files

sys.path.append(str(ROOT / "scripts"))

from kernel import LIST, read_rings

LIMITS = {
    "methods of a seam": 12,
    "methods of a class": 90,
    "fields of a class": 35,
    "lines of a function": 70,
    "parameters of a function": 12,
}
DOORS = (
    *("FaultModel", "Proofs", "ArrivalPolicy", "OwnResults", "Dissemination", "SiteNames"),
    *("RoundSeal", "Recertification", "OtherLogs", "Measures"),
)
"""Seams that are classes, since they do themselves what a plain run does."""
WHY = re.compile(r"^Larger than \S+(?:\s+\S+){7,}", re.MULTILINE)
"""The sentence. It says more than that it is larger."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def methods_of(cls: ast.ClassDef) -> list[Function]:
    return [each for each in cls.body if isinstance(each, Function)]


def fields_of(cls: ast.ClassDef) -> set[str]:
    """What the class declares, and what its own methods assign to themselves."""
    declared = {
        each.target.id
        for each in cls.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        node.attr
        for method in methods_of(cls)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return declared | assigned


def bases_of(cls: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class and those of the ring that it inherits from: a seam is not smaller by having some of
    its methods from another.
    """
    yield cls
    for base in cls.bases:
        name = ast.unparse(base).split("[")[0]
        if name in classes and classes[name] is not cls:
            yield from bases_of(classes[name], classes)


def is_seam(cls: ast.ClassDef) -> bool:
    return cls.name in DOORS or any("Protocol" in ast.unparse(base) for base in cls.bases)


def sizes_of_class(
    cls: ast.ClassDef, classes: Mapping[str, ast.ClassDef]
) -> Iterator[tuple[str, int]]:
    if is_seam(cls):
        names = {each.name for base in bases_of(cls, classes) for each in methods_of(base)}
        yield "methods of a seam", len(names)
    yield "methods of a class", len(methods_of(cls))
    yield "fields of a class", len(fields_of(cls))


def sizes_of_function(function: Function) -> Iterator[tuple[str, int]]:
    """From its name to its last line; of parameters, without ``self``."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    assert function.end_lineno is not None
    yield "lines of a function", function.end_lineno - function.lineno + 1
    yield "parameters of a function", len([name for name in names if name not in ("self", "cls")])


def says_why(node: ast.ClassDef | Function) -> bool:
    return WHY.search(inspect.cleandoc(ast.get_docstring(node) or "")) is not None


def too_large(texts: Mapping[str, str]) -> Iterator[str]:
    """What is larger than the limits in these files and does not say why."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    for path, node in nodes:
        sizes: Iterable[tuple[str, int]] = ()
        if isinstance(node, ast.ClassDef):
            sizes = sizes_of_class(node, classes)
        elif isinstance(node, Function):
            sizes = sizes_of_function(node)
        else:
            continue
        for kind, size in sizes:
            if size > LIMITS[kind] and not says_why(node):
                yield f"{path} {node.name}: {size} {kind}, at most {LIMITS[kind]}"


def class_of(methods: int, base: str = "", docstring: str = "") -> str:
    body = "".join(f"    def m{number}(self) -> None: ...\n" for number in range(methods))
    return f'class Big({base}):\n    """Much.\n\n    {docstring}\n    """\n{body}'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (class_of(90), []),
        (class_of(91), ["91 methods of a class, at most 90"]),
        (class_of(13, "Protocol"), ["13 methods of a seam, at most 12"]),
        (
            class_of(12, "Protocol") + "class More(Big, Protocol):\n    def m(self): ...\n",
            ["13 methods of a seam, at most 12"],
        ),
        (class_of(13, "Protocol", "Larger than others: it is so."), ["13 methods of a seam"]),
        (class_of(13, "Protocol", "Larger than others, since its two halves write one file."), []),
        (
            "class Big:\n    one: int\n    def set(self):\n"
            + "".join(f"        self.x{number}, self.y = 1, 2\n" for number in range(34)),
            ["36 fields of a class, at most 35"],
        ),
        ("def f():\n" + "    pass\n" * 69, []),
        ("def f():\n" + "    pass\n" * 70, ["71 lines of a function, at most 70"]),
        (f"class Big:\n    def f(self, {', '.join('abcdefghijkl')}): ...\n", []),
        (
            f"def f({', '.join('abcdefghijk')}, *, x, y): ...\n",
            ["13 parameters of a function, at most 12"],
        ),
    ],
)
def test_what_is_too_large_is_found(text: str, found: list[str]) -> None:
    named = list(too_large({"big.py": text}))
    assert len(named) == len(found)
    assert all(what in line for what, line in zip(found, named, strict=True))


STILL = {"RoundActions", "RoundMachine", "Session", "Membership", "__init__"}
"""To become smaller, or to say why not."""


def test_nothing_in_ring_1_is_too_large_without_saying_why() -> None:
    ring = read_rings(LIST.read_text(encoding="utf-8"), package_files())[0]
    texts = {path.as_posix(): Path(ROOT, path).read_text(encoding="utf-8") for path in ring}
    found = sorted(too_large(texts))
    assert [line for line in found if line.split()[1].rstrip(":") not in STILL] == []
    assert {line.split()[1].rstrip(":") for line in found} >= STILL
