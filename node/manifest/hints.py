"""Hints as sentences that a machine can follow, too: what each would change in a manifest's table.

A hint is one or more alternatives, the best first, joined by ``, or``::

    Leave it out, or [train] method = "diloco".
    plan = "butterfly"
    Leave [secure] out and kind = "swarm".
    rounds = 100 (each spends of epsilon)

``it`` is the key of the fault, a key without a table is one of the fault's table, and words in
parentheses are for people. ``"PEER"`` stands for a peer id. So there is nothing beside the words
that could say otherwise, and `reading` tries a hint before it gives it.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

PEER = "PEER"
"""In a hint, in place of a peer id that only the user knows."""

_OR = re.compile(r"(?:, or |; or )(?![^()]*\))")  # not in a remark
_AND = re.compile(r" and (?![^()]*\))(?=\[|[A-Za-z_]+ = |[Ll]eave )")
_REMARK = re.compile(r" \([^()]*\)\Z")
_LEAVE = re.compile(r"[Ll]eave (?:it|(?:\[(?P<table>[\w.]+)\] ?)?(?P<key>\w+)?) out\Z")
_WRITE = re.compile(r"(?:\[(?P<table>[\w.]+)\] )?(?P<key>\w+) = (?P<value>.+)\Z", re.DOTALL)
_MEANT = re.compile(r"Did you mean `(?P<key>[^`]+)`\?\Z")
_CHOOSE = re.compile(r"Choose one of: (?P<words>.+)\Z", re.DOTALL)
_ADD = re.compile(r"(?:Add|Write .*, such as) `(?P<line>[^`]+)`\.\Z", re.DOTALL)

Path = tuple[str | int, ...]


class Edit(NamedTuple):
    """A change of a table. ``path``: keys from its top, and indices of lists; ``value``: what is
    written there; None: the key is left out.
    """

    path: Path
    value: Any = None


class Cure(NamedTuple):
    """One alternative of a hint: its words, and what they change."""

    words: str
    edits: tuple[Edit, ...]

    @property
    def keeps_setting(self) -> bool:
        """Whether it spells a key right, or gives it a value of its type."""
        return _MEANT.match(self.words) is not None or _ADD.match(self.words) is not None


def read_hint(hint: str, key: str, table: Mapping[str, Any]) -> list[Cure]:
    """The alternatives of a hint for the setting ``key``, such as ``$.train.delay``, of ``table``.
    Those that are words only are not among them.
    """
    at = find_path(table, key)
    if found := _MEANT.match(hint):
        meant = (*at[:-1], found["key"])
        return [Cure(hint, (Edit(at), Edit(meant, value_at(table, at))))]
    if found := _CHOOSE.match(hint):
        return [Cure(word, (Edit(at, word),)) for word in found["words"].split(", ")]
    if found := _ADD.match(hint):
        return [Cure(hint, tuple(_edits(found["line"], at)))]
    cures: list[Cure] = []
    for words in split_hint(hint):
        parts = [(part, edit) for part in _AND.split(words) for edit in _edits(part, at)]
        if len(parts) == len(_AND.split(words)):
            # what is not there need not be left out
            there = [
                (part, edit)
                for part, edit in parts
                if edit.value is not None or value_at(table, edit.path) is not None
            ]
            kept = there or parts[:1]
            told = " and ".join(part for part, _ in kept)
            cures.append(Cure(told, tuple(edit for _, edit in kept)))
    return cures


def split_hint(hint: str) -> list[str]:
    """The alternatives of a hint, as words."""
    return _OR.split(hint.removesuffix("."))


def write_hint(cures: Sequence[Cure]) -> str:
    """The hint that has these alternatives, at least one."""
    if _MEANT.match(cures[0].words) or _ADD.match(cures[0].words):
        return cures[0].words
    if all(_is_choice(cure) for cure in cures):
        return f"Choose one of: {', '.join(cure.words for cure in cures)}"
    first, *others = (cure.words for cure in cures)
    words = [first[0].upper() + first[1:] if first.startswith("leave") else first]
    words += [f"l{other[1:]}" if other.startswith("Leave") else other for other in others]
    return ", or ".join(words) + ("." if words[0].startswith("Leave") else "")


def _is_choice(cure: Cure) -> bool:
    """Whether the words are a bare value, as in "Choose one of"."""
    return not (_LEAVE.match(cure.words) or _WRITE.match(cure.words) or " " in cure.words)


def follow(table: Mapping[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    """A copy of the table with these changes."""
    new = copy.deepcopy(dict(table))
    for edit in edits:
        inside: Any = new
        for step in edit.path[:-1]:
            if edit.value is None and not _holds(inside, step):
                break
            if isinstance(inside, dict) and not isinstance(inside.get(step), dict | list):
                inside[step] = {}
            inside = inside[step]
        else:
            _change(inside, edit.path[-1], edit.value)
    return new


def contradicts(edits: Sequence[Edit], before: Sequence[Edit]) -> bool:
    """Whether nobody can follow ``edits`` after those ``before``: they say otherwise of one key, or
    one writes what the other leaves out.
    """
    return any(_are_at_odds(one, other) for one in edits for other in before)


def _are_at_odds(one: Edit, before: Edit) -> bool:
    if one == before or (one.value is None and before.value is None):
        return False
    if one.path == before.path:
        return True
    if one.path[: len(before.path)] == before.path:  # inside of what was written or left out
        return before.value is None
    return before.path[: len(one.path)] == one.path and one.value is None


def find_path(table: Mapping[str, Any], key: str) -> Path:
    """``$.a.b`` as keys of a table, of which some may have dots or quotes of their own."""
    rest, inside = key.removeprefix("$").removeprefix("."), dict(table)
    path: list[str | int] = []
    while rest:
        if found := re.match(r"\[(\d+)\]\.?", rest):
            path.append(int(found[1]))
            inside, rest = {}, rest[found.end() :]
            continue
        name, spelt = _first_key(inside, rest)
        path.append(name)
        held = inside.get(name)
        inside = held if isinstance(held, dict) else {}
        rest = rest[len(spelt) :].removeprefix(".")
    return tuple(path)


def _first_key(table: Mapping[str, Any], rest: str) -> tuple[str, str]:
    """The key that the rest of a path begins with, and as it is spelt there: the longest of the
    table, else all up to the next dot.
    """
    for name in sorted(table, key=len, reverse=True):
        for spelt in (json.dumps(name, ensure_ascii=False), name):
            if rest.startswith(spelt) and rest[len(spelt) : len(spelt) + 1] in ("", ".", "["):
                return name, spelt
    spelt = rest.split(".", 1)[0].split("[", 1)[0] or rest
    return spelt, spelt


def value_at(table: Any, path: Path) -> Any:
    """What stands at a path; None where nothing does."""
    for step in path:
        if not _holds(table, step):
            return None
        table = table[step]
    return table


def _edits(words: str, at: Path) -> list[Edit]:
    """What an alternative, or a part of it, changes; nothing where it is words only."""
    words = _REMARK.sub("", words)
    if found := _LEAVE.match(words):
        if found["table"] is None and found["key"] is None:
            return [Edit(at)]
        table = at[:-1] if found["table"] is None else tuple(found["table"].split("."))
        return [Edit(table if found["key"] is None else (*table, found["key"]))]
    if found := _WRITE.match(words):
        table = at[:-1] if found["table"] is None else tuple(found["table"].split("."))
        table = () if found["key"] == "kind" else table
        try:
            value = tomllib.loads(f"value = {found['value']}")["value"]
        except tomllib.TOMLDecodeError:
            return []
        return [Edit((*table, found["key"]), _with_peers(value))]
    return []


def _with_peers(value: Any) -> Any:
    """With peer ids in place of `PEER`, as the user would write them."""
    if isinstance(value, list):
        return [_peer(i) if item == PEER else item for i, item in enumerate(value)]
    return value


@cache
def _peer(index: int) -> str:
    from ...security.identity import Identity

    return Identity(bytes([index % 256]) * 32).peer


def _holds(inside: Any, step: str | int) -> bool:
    if isinstance(inside, list):
        return isinstance(step, int) and step < len(inside)
    return isinstance(inside, dict) and step in inside


def _change(inside: Any, step: str | int, value: Any) -> None:
    if value is not None:
        if isinstance(inside, dict) or _holds(inside, step):
            inside[step] = value
    elif _holds(inside, step):
        del inside[step]
