"""Tables that manifests once had are refused with what holds instead."""

from __future__ import annotations

import msgspec
import pytest

from atoll.collectives.errors import ConfigError
from atoll.node import manifest as m
from atoll.node.manifest.removed import REMOVED, find_removed

HEAD = 'schema = 1\nname = "tide"\n'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[no_quorum]\npolicy = "pause"\n', "no_quorum"),
        ('[no_quorum]\npolicy = "branch"\n', "no_quorum"),
        ("no_quorum = 1\n", "no_quorum"),
        ('[durability]\nsync = "all"\n', "durability"),
    ],
)
def test_a_text_with_a_removed_table_is_refused_with_the_cure(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(HEAD + text, "run.toml")
    assert (caught.value.key, caught.value.code) == (f"$.{key}", "E411")
    assert caught.value.message == f"run.toml has $.{key}: {REMOVED[key]}"
    assert caught.value.hint == "Leave it out."


def test_all_removed_tables_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(HEAD + "[no_quorum]\n[durability]\n")
    assert "[durability] was removed" in caught.value.message
    assert "[no_quorum] was removed" in caught.value.why


@pytest.mark.parametrize("key", REMOVED)
def test_bytes_of_an_earlier_atoll_are_not_called_newer(key: str) -> None:
    plain = {**msgspec.msgpack.decode(m.parse_manifest(HEAD).encode()), key: {"a": 1}}
    with pytest.raises(ConfigError, match="was removed") as caught:
        m.decode_manifest(msgspec.msgpack.encode(plain))
    assert caught.value.hint == "Its organiser founds the run again without it."


@pytest.mark.parametrize("table", [{}, {"exchange": 1}, [], None])
def test_other_tables_are_not_refused(table: object) -> None:
    assert find_removed(table, "manifest") == []


@pytest.mark.parametrize("mode", ["federated", "swarm"])
def test_a_mode_is_a_kind_now(mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(f'{HEAD}mode = "{mode}"\n')
    assert (caught.value.key, caught.value.code) == ("$.mode", "E411")
    assert caught.value.hint == f'Leave it out and kind = "{mode}".'


def test_every_sentence_says_that_it_was_removed() -> None:
    for sentence in REMOVED.values():
        assert " was removed: " in sentence
        assert not sentence.endswith(".")
