"""Keys and values that manifests once had are refused with what to use instead."""

from __future__ import annotations

import msgspec
import pytest

from atoll.collectives.errors import ConfigError
from atoll.node import manifest as m
from atoll.node.manifest.removed import REMOVED, refuse_removed

HEAD = 'schema = 1\nname = "tide"\n'


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key, and a value in two places, that were removed."""
    for row, sentence in (
        ("$.old", "[old] was removed: use [new]"),
        ("$.exchange.codec = fp0", "codec fp0 was removed: use fp32"),
        ("$.exchange.codecs.* = fp0", "codec fp0 was removed: use fp32"),
    ):
        monkeypatch.setitem(REMOVED, row, sentence)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("text", "key", "code", "sentence"),
    [
        ("[old]\n", "$.old", "E411", "[old] was removed: use [new]"),
        ("old = 1\n", "$.old", "E411", "[old] was removed: use [new]"),
        ('[exchange]\ncodec = "fp0"\n', "$.exchange.codec", "E413", "use fp32"),
        ('[exchange.codecs]\n"a.b" = "fp0"\n', "$.exchange.codecs.*", "E413", "use fp32"),
    ],
)
def test_a_text_with_what_was_removed_is_refused_with_the_cure(
    text: str, key: str, code: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(HEAD + text)
    assert (caught.value.key, caught.value.code) == (key, code)
    assert sentence in caught.value.message
    assert caught.value.hint == "Remove it from the file."


@pytest.mark.usefixtures("rows")
def test_all_that_was_removed_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(HEAD + '[old]\n[exchange]\ncodec = "fp0"\n')
    assert "[old] was removed" in caught.value.message
    assert "codec fp0 was removed" in caught.value.why


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("table", [{"old": {"a": 1}}, {"exchange": {"codec": "fp0"}}])
def test_bytes_of_an_earlier_atoll_are_not_called_newer(table: dict[str, object]) -> None:
    plain = {**msgspec.msgpack.decode(m.parse_manifest(HEAD).encode()), **table}
    with pytest.raises(ConfigError, match="was removed") as caught:
        m.decode_manifest(msgspec.msgpack.encode(plain))
    assert caught.value.hint == "Its organiser founds the run again without it."


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "table", [{}, {"exchange": 1}, {"exchange": {"codec": ["fp0"], "codecs": {"a": "int8"}}}]
)
def test_what_was_not_removed_is_no_fault(table: dict[str, object]) -> None:
    refuse_removed(table, "manifest")


@pytest.mark.parametrize("policy", ["pause", "branch"])
def test_a_policy_without_a_quorum_is_none_any_more(policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(f'{HEAD}[no_quorum]\npolicy = "{policy}"\n', "run.toml")
    assert (caught.value.key, caught.value.code) == ("$.no_quorum", "E411")
    assert caught.value.message == (
        "run.toml has $.no_quorum: [no_quorum] was removed: a member without a quorum trains on "
        "alone and is rebased when a quorum is back; if it is lost for ever: atoll recertify"
    )


def test_every_sentence_says_that_it_was_removed_and_what_to_use() -> None:
    for sentence in REMOVED.values():
        assert " was removed: " in sentence
        assert not sentence.endswith(".")
