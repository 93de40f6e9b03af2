"""The kernel, its lines, and what it imports beside itself.

Reads docs/internals/kernel.txt, and computes for ring 1, and for both rings together, the closure
under all imports: at the top, inside functions, for types only, and of the packages' own files
that an import runs. Prints the lines of list and closure, and what the closure has more, by
folder. ``--edges`` prints each import that leaves the list, with the lines that the closure of its
target alone would add; ``--why FILE`` a shortest chain of imports to a file. Both are of ring 1, and
of both rings with ``--both``, whose edges are then those that leave the list and ring 1's closure.

The last line is one JSON object.

    .venv/bin/python scripts/kernel.py --edges
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # what the tests of the house share

from house import edges_of_files, package_files  # noqa: E402

LIST = ROOT / "docs" / "internals" / "kernel.txt"
Edges = Mapping[Path, frozenset[Path]]


def read_rings(text: str, files: Iterable[Path]) -> list[list[Path]]:
    """The files of each ring, in the order of the list. Raises ValueError for a line that names
    nothing, and for a file that two lines name.
    """
    known = sorted(files)
    rings, named = list[list[Path]](), set[Path]()
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("## Ring"):
            rings.append([])
        elif not line.startswith("#"):
            found = [path for path in known if _is_named(path, line)]
            if not found or not rings:
                raise ValueError(f"{line}: no file of the four folders")
            if twice := named & set(found):
                raise ValueError(f"{line}: {min(twice)} is named already")
            rings[-1] += found
            named |= set(found)
    return rings


def _is_named(path: Path, line: str) -> bool:
    return path.parent == Path(line) if line.endswith("/") else path == Path(line)


def with_packages(edges: Edges) -> dict[Path, frozenset[Path]]:
    """``edges``, and from each file to the files of the packages around it and around all that it
    imports, which Python runs first.
    """
    known = set(edges)

    def around(path: Path) -> set[Path]:
        return {each / "__init__.py" for each in path.parents} & known

    return {
        path: frozenset((found | around(path)).union(*map(around, found)) - {path})
        for path, found in edges.items()
    }


def closure_of(files: Iterable[Path], edges: Edges) -> dict[Path, Path | None]:
    """All files that ``files`` lead to, themselves included; of each the file by which it was
    reached first, None for those given.
    """
    reached: dict[Path, Path | None] = dict.fromkeys(files)
    waiting = deque(reached)
    while waiting:
        path = waiting.popleft()
        for each in sorted(edges[path] - reached.keys()):
            reached[each] = path
            waiting.append(each)
    return reached


def chain_to(path: Path, reached: Mapping[Path, Path | None]) -> list[Path]:
    """How ``path`` was reached, from the list on."""
    chain = [path]
    while (before := reached[chain[-1]]) is not None:
        chain.append(before)
    return chain[::-1]


@dataclass(frozen=True, slots=True)
class Counted:
    """Files and lines of a list, and of its closure."""

    files: int
    lines: int
    closure_files: int
    closure_lines: int


def lines_of(files: Iterable[Path]) -> int:
    """All lines of these files together."""
    return sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in files)


def count(listed: Iterable[Path], edges: Edges) -> Counted:
    """Lines of a list and of its closure."""
    listed = list(listed)
    reached = closure_of(listed, edges)
    return Counted(len(listed), lines_of(listed), len(reached), lines_of(reached))


def show_edges(listed: Iterable[Path], edges: Edges, known: Iterable[Path] = ()) -> None:
    """Each import that leaves the list: its file, its target, and the lines of the closure that
    would go if this target were imported by no file of the list. ``known``: files that are read in
    any case; no edge to them is shown.
    """
    listed = set(listed)
    leaving = {
        target: sorted(path for path in listed if target in edges[path])
        for target in sorted(set().union(*(edges[path] for path in listed)) - listed - set(known))
    }
    whole = lines_of(closure_of(listed, edges))
    rows = list[tuple[int, Path, list[Path]]]()
    for target, sources in leaving.items():
        cut = {path: found - {target} if path in listed else found for path, found in edges.items()}
        rows.append((whole - lines_of(closure_of(listed, cut)), target, sources))
    for spared, target, sources in sorted(rows, reverse=True):
        print(f"{spared:7,}  {target}  by {', '.join(map(str, sources))}")


def main() -> None:
    """Print both rings, and what was asked for."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--edges", action="store_true", help="Show the imports that leave ring 1.")
    parser.add_argument("--why", type=Path, help="Show how ring 1 leads to this file.")
    parser.add_argument("--both", action="store_true", help="Show those of both rings instead.")
    given = parser.parse_args()
    edges = with_packages(edges_of_files(types=True))
    rings = read_rings(LIST.read_text(encoding="utf-8"), package_files())
    both = [path for ring in rings for path in ring]
    shown, known = (both, closure_of(rings[0], edges)) if given.both else (rings[0], {})
    if given.why is not None:
        reached = closure_of(shown, edges)
        there = given.why in reached
        print(" → ".join(map(str, chain_to(given.why, reached))) if there else "not reached")
        return
    if given.edges:
        show_edges(shown, edges, known)
    found = {"ring 1": count(rings[0], edges), "both rings": count(both, edges)}
    for name, each in found.items():
        print(
            f"{name}: {each.files} files, {each.lines:,} lines; "
            f"closed {each.closure_files} files, {each.closure_lines:,} lines"
        )
    more = Counter[str]()
    for path in closure_of(shown, edges).keys() - set(shown) - known.keys():
        more[str(path.parent)] += lines_of([path])
    for folder, lines in more.most_common():
        print(f"{lines:7,}  {folder}")
    print(json.dumps({name: [e.lines, e.closure_lines] for name, e in found.items()}))


if __name__ == "__main__":
    main()
