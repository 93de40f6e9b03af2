"""Who takes part in a round: drawn alike by everybody, by chance, and never fewer than a round
needs.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.group import Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round.sampling import draw_members
from atoll.collectives.round_settings import SampleSettings
from atoll.node.cli.costs import describe_lines
from atoll.node.manifest import parse_manifest

FEDERATED = 'schema = 1\nname = "x"\nkind = "federated"\nmodel = { entry = "local:x" }\n'


def config(n: int, life: int = 0) -> tuple[Member, ...]:
    return tuple(Member(PeerId(f"p{index:03}"), life) for index in range(n))


@given(
    st.integers(1, 40),
    st.binary(min_size=32, max_size=32),
    st.one_of(st.floats(0.01, 1), st.integers(1, 50)),
    st.integers(1, 6),
)
def test_a_draw_is_everybodys_and_of_the_size_that_was_asked_for(
    n: int, base: bytes, asked: float | int, least: int
) -> None:
    sample = (
        SampleSettings(count=asked, least=least)
        if isinstance(asked, int)
        else SampleSettings(asked, least=least)
    )
    found = draw_members("run", base, config(n), sample)
    wanted = asked if isinstance(asked, int) else -(-asked * n // 1)
    assert len(found) == min(n, max(least, int(wanted)))
    assert found == tuple(sorted(found))
    assert {member.peer for member in draw_members("run", base, config(n, 7), sample)} == {
        member.peer for member in found
    }  # of a peer, not of a life
    without = tuple(member for member in config(n) if member != found[0])
    assert set(found[1:]) <= set(
        draw_members("run", base, without, SampleSettings(count=len(found)))
    )  # nobody loses a place by another's going


def test_draws_differ_by_round_and_run_and_are_fair() -> None:
    rounds = [
        draw_members("run", number.to_bytes(32, "big"), config(10), SampleSettings(0.3))
        for number in range(2000)
    ]
    assert draw_members("other", bytes(32), config(10), SampleSettings(0.3)) != rounds[0]
    assert len(set(rounds)) == 120  # of 120 that there are
    for member in config(10):  # 600 expected, standard deviation 20
        assert 500 < sum(member in chosen for chosen in rounds) < 700
    assert draw_members("run", bytes(32), config(10), None) == config(10)


def test_the_manifest_says_how_many_and_no_fewer_than_a_round_needs() -> None:
    def sample(text: str) -> SampleSettings | None:
        return parse_manifest(FEDERATED + text).settings().sample

    assert sample("") is None
    assert sample("federated = { sample = 0.5 }") == SampleSettings(0.5)
    assert sample("federated = { sample = 10 }") == SampleSettings(count=10)
    assert sample("federated = { sample = 0.1 }\nsecure = { threshold = 5 }") == SampleSettings(
        0.1, least=5
    )
    assert sample(
        "federated = { sample = 0.1 }\nrobust = { rule = 'krum', f = 2 }"
    ) == SampleSettings(0.1, least=7)
    for asked, told in ((0.5, "50% of the members drawn a round"), (7, "7 members drawn a round")):
        assert any(
            told in line
            for line in describe_lines(
                parse_manifest(FEDERATED + f"federated = {{ sample = {asked} }}")
            )
        )
    for text, key in (
        ("federated = { sample = 0 }", "$.federated.sample"),
        ("federated = { sample = 1.5 }", "$.federated.sample"),
        ("federated = { sample = 2 }\nsecure = {}", "$.federated.sample"),
        (
            "federated = { sample = 0.5 }\njoin = { policy = 'open', probation = 3 }",
            "$.join.probation",
        ),
        ("federated = { sample = 0.5 }\nexchange = { fragments = 2 }", "$.exchange.fragments"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_manifest(FEDERATED + text)
        assert caught.value.key == key
