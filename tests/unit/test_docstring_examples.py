"""Docstrings of public classes teach by an example: those with ``>>>`` are run, the others parse."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import sys
import textwrap
from typing import Any

import msgspec
import pytest

PUBLIC = (
    "atoll.node",
    "atoll.node.local",
    "atoll.optim",
    "atoll.optim.lab.coding",
    "atoll.optim.lab.experts",
    "atoll.optim.federated",
    "atoll.optim.lab.gossip",
    "atoll.optim.lab.pipeline",
    "atoll.optim.outer",
    "atoll.optim.planning",
    "atoll.collectives",
    "atoll.security.privacy",
    "atoll.security.rules",
)
ANSWERS = {  # what a function returns: the function's docstring tells how it comes about
    "Decoded", "Dadao", "Choice", "Estimate", "Lag", "RoundSteps", "Price", "PipelineSchedule",
    "PeerConditions", "TrainingPlan", "Averaged",
}  # fmt: skip


def public_classes() -> list[Any]:
    found: dict[int, Any] = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", ["LocalSwarm"]):
            value = getattr(module, each)
            if inspect.isclass(value) and value.__name__ not in ANSWERS:
                found[id(value)] = value
    return list(found.values())


def blocks_of(docstring: str) -> list[str]:
    """The indented blocks of code in it, such as begin four columns further right."""
    blocks, block = [], list[str]()
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        if line.startswith("    ") or (block and not line):
            block.append(line)
        else:
            blocks.append(textwrap.dedent("\n".join(block)).strip())
            block = []
    blocks.append(textwrap.dedent("\n".join(block)).strip())
    return [block for block in blocks if block]


@pytest.mark.parametrize("value", public_classes(), ids=lambda value: value.__name__)
def test_a_public_class_shows_how_it_is_used(value: Any) -> None:
    module = sys.modules[value.__module__]
    examples = [
        example
        for example in doctest.DocTestFinder(recurse=False).find(
            value, value.__name__, module, globs=dict(vars(module))
        )
        if example.examples
    ]
    said: list[str] = []
    for example in examples:
        assert not doctest.DocTestRunner(verbose=False).run(example, out=said.append).failed, said
    blocks = [] if examples else blocks_of(value.__doc__ or "")
    for block in blocks:
        ast.parse(block)
    assert examples or blocks or issubclass(value, msgspec.Struct)
