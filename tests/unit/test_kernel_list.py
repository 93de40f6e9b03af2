"""docs/internals/kernel.txt names files that exist, once each, and its closure does not grow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from house import ROOT, edges_of_files, package_files

sys.path.append(str(ROOT / "scripts"))

from kernel import LIST, chain_to, closure_of, count, read_rings, with_packages

MOST_LINES, MOST_CLOSED = 23_440, 25_000
"""Of ring 1: by the list, and with all that it imports, which is not to grow again."""
MOST_BOTH, MOST_BOTH_CLOSED = 34_570, 42_010
"""Of both rings: by the list, and with all that they import."""

TOP, PACKAGE, USED, UNUSED = map(Path, ("a/top.py", "a/__init__.py", "a/used.py", "b.py"))


def test_a_list_is_read_by_rings() -> None:
    files = [TOP, PACKAGE, USED, UNUSED]
    assert read_rings("# words\n## Ring 1: x\na/top.py\n\n## Ring 2\nb.py\n", files) == [
        [TOP],
        [UNUSED],
    ]
    assert read_rings("## Ring 1\na/\n", files) == [sorted([TOP, PACKAGE, USED])]
    for wrong in ("## Ring 1\nc.py\n", "a/\n", "## Ring 1\na/\na/top.py\n"):
        with pytest.raises(ValueError, match=r"named already|no file"):
            read_rings(wrong, files)


def test_a_closure_has_what_packages_import_and_says_how_a_file_was_reached() -> None:
    edges = with_packages(
        {TOP: frozenset(), PACKAGE: frozenset({USED}), USED: frozenset(), UNUSED: frozenset()}
    )
    reached = closure_of([TOP], edges)
    assert reached.keys() == {TOP, PACKAGE, USED}
    assert chain_to(USED, reached) == [TOP, PACKAGE, USED]


def test_the_kernel_does_not_grow() -> None:
    edges = with_packages(edges_of_files(types=True))
    rings = read_rings(LIST.read_text(encoding="utf-8"), package_files())
    assert len(rings) == 2
    ring = count(rings[0], edges)
    assert ring.lines <= MOST_LINES
    assert ring.closure_lines <= MOST_CLOSED
    both = count([path for each in rings for path in each], edges)
    assert both.lines <= MOST_BOTH
    assert both.closure_lines <= MOST_BOTH_CLOSED


def test_neither_ring_knows_who_puts_it_together() -> None:
    edges = with_packages(edges_of_files(types=True))
    rings = read_rings(LIST.read_text(encoding="utf-8"), package_files())
    reached = closure_of([path for ring in rings for path in ring], edges)
    outside = ("node/composing", "node/joining", "node/watching", "node/manifest", "node/net/reach")
    assert [path for path in reached if str(path.parent).startswith(outside)] == []
