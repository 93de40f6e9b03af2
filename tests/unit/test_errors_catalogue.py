"""Every error code that the source can raise has a page, and every page's commands exist."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import pytest
from house import ROOT, package_files

from atoll.collectives import errors
from atoll.collectives.errors import ConfigError
from atoll.node.cli import COMMANDS
from atoll.node.home.errors_catalogue import PAGES, page

CATALOGUE = "node/home/errors_catalogue.py"


def _raised() -> dict[str, str]:
    """Code → a file that names it in quotes."""
    found = dict[str, str]()
    texts = [
        (path.as_posix(), (ROOT / path).read_text(encoding="utf-8")) for path in package_files()
    ]
    texts.append(("scripts/_setup", (ROOT / "scripts" / "_setup").read_text(encoding="utf-8")))
    for name, text in texts:
        if name != CATALOGUE:
            found |= dict.fromkeys(re.findall(r"[\"'](E[0-9]{3})(?=[\"' ])", text), name)
    return found


def _classes(kind: type[errors.AtollError]) -> Iterator[type[errors.AtollError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _classes(below)


def test_every_code_has_a_page() -> None:
    assert {code: name for code, name in _raised().items() if code not in PAGES} == {}


def test_every_page_has_a_code() -> None:
    assert set(PAGES) - set(_raised()) == set()


@pytest.mark.parametrize(
    "kind",
    [k for k in _classes(errors.AtollError) if k.__module__ == errors.__name__],
    ids=lambda k: k.__name__,
)
def test_classes_and_pages_agree_on_the_exit_status(kind: type[errors.AtollError]) -> None:
    own_code = "code" in vars(kind)
    assert kind.code in PAGES
    if own_code and kind.code not in (
        "E140",
        "E501",
    ):  # E140 is two classes; E501 is 74 for reading, 73 for writing
        assert PAGES[kind.code].exit_code == kind.exit_code


def test_pages_are_complete() -> None:
    slugs = [p.slug for p in PAGES.values()]
    assert len(set(slugs)) == len(slugs)
    assert list(PAGES) == sorted(PAGES)
    for code, found in PAGES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", found.slug), code
        assert found.text == found.text.strip(), code
        assert max(map(len, found.text.splitlines())) <= 100, code
        assert found.exit_code in {1, 2, 3, 69, 70, 71, 73, 74, 75, 76, 77, 78}


def test_commands_on_pages_exist() -> None:
    for code, found in PAGES.items():
        for verb in re.findall(r"(?:^    |`)atoll ([a-z]+)", found.text, re.MULTILINE):
            assert verb in COMMANDS, code


def test_an_unknown_code_is_a_defect() -> None:
    assert page("E999") == PAGES["E000"]
    assert page("e201") == PAGES["E201"]


def test_the_traceback_of_a_script_ends_with_the_way_out() -> None:
    error = ConfigError("lr is -1", key="lr", why="A rate is positive.", hint="Give another lr.")
    assert "".join(traceback.format_exception(error)).splitlines() == [
        "atoll.collectives.errors.ConfigError: lr is -1",
        "A rate is positive.",
        "Give another lr.",
        "More: atoll explain E400",
    ]
    assert not hasattr(ConfigError("lr is -1"), "__notes__")
