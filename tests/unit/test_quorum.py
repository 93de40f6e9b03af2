"""Whether enough members can be reached, in the words of the round's own rule; what is said of it,
and when.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.group import Member, is_quorum
from atoll.collectives.identifiers import PeerId
from atoll.collectives.reach import Reach, reach
from atoll.node.cli.costs import describe_lines
from atoll.node.home.output import Terminal
from atoll.node.manifest import parse_manifest
from atoll.node.run.quorum import no_quorum, quorum_of
from atoll.node.run.status import read_run_status
from atoll.node.views.documents import lying_text, peers_table, run_lines, runs_table, status_text
from atoll.node.views.live import RunProgress

FOUNDER, A, B = PeerId("o"), PeerId("a"), PeerId("b")


@pytest.mark.parametrize(
    ("everybody", "there", "expected"),
    [
        ("o", "o", Reach(1, 1, 1)),
        ("oa", "o", Reach(1, 2, 1)),  # exactly half, with the organiser
        ("oa", "a", Reach(1, 2, 2)),
        ("oab", "a", Reach(1, 3, 2)),
        ("oab", "o", Reach(1, 3, 2)),
        ("oab", "ab", Reach(2, 3, 2)),
        ("oabc", "oa", Reach(2, 4, 2)),
        ("oabc", "ab", Reach(2, 4, 3)),
        ("oabc", "a", Reach(1, 4, 2)),  # the organiser alone would do
        ("abcd", "ab", Reach(2, 4, 3)),  # an organiser that is no member breaks no tie
        ("", "", Reach(0, 0, 0)),
    ],
)
def test_who_is_there_and_who_is_needed(everybody: str, there: str, expected: Reach) -> None:
    assert reach({PeerId(name): name in there for name in everybody}, FOUNDER) == expected


@given(
    st.dictionaries(
        st.sampled_from([FOUNDER, *(PeerId(name) for name in "abcde")]), st.booleans(), min_size=1
    )
)
def test_it_is_the_rule_of_the_round(members: dict[PeerId, bool]) -> None:
    config = tuple(Member(peer, 3) for peer in sorted(members))
    assert reach(members, FOUNDER).quorum == is_quorum(
        config, [member for member in config if members[member.peer]], FOUNDER
    )


LACK = "no quorum: 1 of 3 members reachable; the open round waits for 2"


def test_words() -> None:
    assert str(reach({FOUNDER: False, A: True, B: False}, FOUNDER)) == LACK
    assert str(reach({FOUNDER: False, A: True, B: True}, FOUNDER)) == "2 of 3 members reachable"
    assert (
        str(reach({FOUNDER: True, A: True}, FOUNDER, 3))
        == "too few: 2 of 2 members reachable; the open round waits for 3"
    )
    assert not reach({FOUNDER: True, A: True, B: False}, FOUNDER, 3).quorum
    assert reach({FOUNDER: True, A: True, B: True}, FOUNDER, 3).quorum


def rows(live: dict[str, bool | None], *guests: str) -> list[dict[str, Any]]:
    """Rows as the node makes them."""
    members = [
        {"peer": peer, "live": there, "member": True, "organiser": peer == FOUNDER}
        for peer, there in live.items()
    ]
    return [
        *members,
        *({"peer": peer, "live": True, "member": False, "organiser": False} for peer in guests),
    ]


def test_documents_say_it_for_tools_and_people() -> None:
    terminal = Terminal(no_color=True)
    lost = rows({"o": False, "a": True, "b": False}, "c")  # a guest counts for nothing
    quorum = quorum_of(lost)
    assert quorum == {"reachable": 1, "members": 3, "needed": 2, "held": False}
    assert peers_table(terminal, lost).splitlines()[-1] == LACK
    run_ = {"phase": "running", "script": True, "quorum": quorum}
    assert f"  state    training; {LACK}\n" in status_text(
        terminal, {"runs": [run_ | {"bytes_sent": 1}]}
    )
    assert f"training; {LACK}" in runs_table(terminal, [run_])
    progress = RunProgress("tide", 9)
    progress.take_status(read_run_status(run_))
    assert progress.state == f"training; {LACK}"
    held = quorum_of(rows({"o": False, "a": True, "b": True}))
    progress.take_status(read_run_status(run_ | {"quorum": held}))
    assert progress.state == "training"


def test_what_a_node_cannot_tell_is_not_told() -> None:
    unsure = rows({"o": None, "a": True, "b": False})
    assert quorum_of(unsure) is None
    assert quorum_of([]) is None
    assert "quorum" not in peers_table(Terminal(no_color=True), unsure)
    for odd in (None, {}, 3, {"reachable": "x", "members": 3, "needed": 2}):
        assert no_quorum(odd) == ""


LYING = 'schema = 1\nname = "n"\n[quorum]\nlying = 1\n'


def test_a_manifest_says_how_many_may_lie() -> None:
    manifest = parse_manifest(LYING)
    assert (manifest.quorum.lying, manifest.settings().lying) == (1, 1)
    assert (
        parse_manifest(LYING.replace("lying = 1", "lying = 0")).run_id
        == parse_manifest('schema = 1\nname = "n"\n').run_id
    )
    assert any("that takes 4 members" in line for line in describe_lines(manifest))
    with pytest.raises(ConfigError) as error:
        parse_manifest(LYING.replace("lying = 1", "lying = 86"))
    assert error.value.key == "$.quorum.lying"


def test_a_manifest_says_whether_the_organiser_bans_members_alone() -> None:
    assert parse_manifest(LYING).quorum.bans == "organiser"
    assert parse_manifest(LYING + 'bans = "organiser"\n').run_id == parse_manifest(LYING).run_id
    manifest = parse_manifest(LYING + 'bans = "quorum"\n')
    assert manifest.run_id != parse_manifest(LYING).run_id
    assert any("bans no member alone: 3 members do" in line for line in describe_lines(manifest))
    with pytest.raises(ConfigError) as error:
        parse_manifest('schema = 1\nname = "n"\n[quorum]\nbans = "quorum"\n')
    assert error.value.key == "$.quorum.bans"


def test_words_of_a_run_that_bears_liars() -> None:
    assert lying_text(1, 3) == "rounds begin with 4 members; there are 3"
    assert lying_text(1, 5) == "the log stays one though 1 of its members lies: it takes 4 of 5"
    told = quorum_of(
        [
            {**row, "lying": 1}
            for row in rows({"o": True, "a": True, "b": True, "c": False, "d": False})
        ]
    )
    assert (told or {})["needed"] == 4
    assert no_quorum(told) == "no quorum: 3 of 5 members reachable; the open round waits for 4"
    assert "lying    rounds begin with 4 members; there are 1" in "\n".join(
        run_lines(Terminal(), read_run_status({"lying": 1, "members": ["o"]}))
    )
