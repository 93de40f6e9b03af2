"""Groups of a configuration, and what averaging along them promises."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.collectives.averaging import drawn_error, expected_error
from atoll.collectives.group import Config, Member
from atoll.collectives.groups import grid_dims, group_fault, group_of
from atoll.collectives.identifiers import PeerId


def members(count: int) -> Config:
    return tuple(sorted(Member(PeerId(f"p{index:03}"), index % 3) for index in range(count)))


@pytest.mark.parametrize("count", [1, 2, 5, 12, 36, 37, 200])
@pytest.mark.parametrize(
    "name", ["d1.0", "d2.0", "d2.1", "d3.1", "16x16.0", "16x16.1", "p0", "p7", "p8"]
)
def test_groups_of_a_name_part_the_configuration_and_all_members_agree(
    count: int, name: str
) -> None:
    config = members(count)
    groups = {group_of(name, config, member, "seed") for member in config}
    assert all(
        group == tuple(sorted(group)) and group_of(name, config, member, "seed") == group
        for group in groups
        for member in group
    )
    assert sorted(member for group in groups for member in group) == list(config)


def test_lines_of_a_grid_meet_in_one_place() -> None:
    config = members(12)
    assert group_of("4x3.1", config, config[4], "") == config[3:6]
    assert group_of("4x3.0", config, config[4], "") == (config[1], config[4], config[7], config[10])
    assert group_of("4x3.0", config[:11], config[5], "") == (
        config[2],
        config[5],
        config[8],
    )  # one place is empty
    assert group_of("3x3.0", config, config[5], "") == config  # no room for all


def test_pairs_are_a_hypercube_where_they_can_be_and_chance_elsewhere() -> None:
    config = members(8)
    assert [group_of(f"p{number}", config, config[5], "") for number in range(3)] == [
        (config[4], config[5]),
        (config[5], config[7]),
        (config[1], config[5]),
    ]
    odd = members(7)
    pairings = {
        tuple(sorted({group_of("p0", odd, member, seed) for member in odd})) for seed in "abcdefgh"
    }
    assert len(pairings) > 4
    assert all(sorted(map(len, pairing)) == [1, 2, 2, 2] for pairing in pairings)


def test_grids_cost_few_lanes_and_have_room() -> None:
    assert [grid_dims(count) for count in (1, 4, 12, 36, 199, 200)] == [
        (1, 1),
        (2, 2),
        (4, 3),
        (6, 6),
        (15, 14),
        (20, 10),
    ]
    for count in range(1, 257):
        for dimensions in (1, 2, 3, 8):
            dims = grid_dims(count, dimensions)
            assert (len(dims), math.prod(dims) >= count) == (dimensions, True)
        assert sum(grid_dims(count)) - 2 <= 2.5 * count**0.5


@pytest.mark.parametrize(
    "name",
    [
        "",
        "d0.0",
        "d2.2",
        "d9.0",
        "p",
        "p64",
        "p100",
        "2x2",
        "2x2.2",
        "0x2.0",
        "x2.0",
        "199x99.0",
        "2x٢.0",
        "d2.1 ",
    ],
)
def test_names_of_no_group(name: str) -> None:
    assert group_fault(name)


def test_the_error_of_a_mean_over_some_of_all_is_as_predicted() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(30, generator=generator, dtype=torch.float64)
    drawn = [
        values[torch.randperm(30, generator=generator)[:12]].mean() - values.mean()
        for _ in range(4000)
    ]
    seen = math.sqrt(sum(float(error) ** 2 for error in drawn) / len(drawn)) / float(
        values.std(correction=0)
    )
    assert seen == pytest.approx(drawn_error(12, 30), rel=0.04)
    assert [drawn_error(1, 30), drawn_error(30, 30), drawn_error(1, 1), expected_error(200)] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("count", [30, 31])
def test_random_pairs_halve_the_distance_as_predicted(count: int) -> None:
    config, rounds = members(count), 400
    generator = torch.Generator().manual_seed(2)
    before = after = 0.0
    for turn in range(rounds):
        values = dict(
            zip(
                config,
                torch.randn(count, generator=generator, dtype=torch.float64).tolist(),
                strict=True,
            )
        )
        mean = sum(values.values()) / count
        for member in config:
            pair = group_of("p0", config, member, str(turn))
            before += (values[member] - mean) ** 2
            after += (sum(values[other] for other in pair) / len(pair) - mean) ** 2
    assert after / before == pytest.approx(((count + 1) // 2 - 1) / (count - 1), rel=0.03)
