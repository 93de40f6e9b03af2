"""One member on two cards, over gloo: each case as one process plays it, within rounding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cards_kit
import pytest
import torch
from cards_kit import CASES, go_on, play
from ranks_kit import play_two_ranks

from atoll.node.recipes.finetune.keeping import read_state
from atoll.node.recipes.finetune.sharding import ONE_CARD

pytestmark = pytest.mark.slow  # the one of GPUs is of both marks
SCRIPT = Path(cards_kit.__file__)
STEPS = [
    "case_one_row_a_micro_batch",
    "case_one_micro_batch_is_cut_for_two_and_the_head_is_tied",
    "case_fewer_rows_than_cards",
    "case_the_whole_model_makes_the_logits",
    "case_an_optimizer_in_backward",
    "case_calculated_in_16_bits",
    "case_plain_sgd_in_weights_of_16_bits",
    "case_adapters_of_one_row_on_a_base_of_16_bits",
]


def play_by_two(folder: Path, **environment: str) -> Path:
    """Two processes play all cases, and keep in ``folder`` what they found."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), **environment}
    assert play_two_ranks(SCRIPT, folder, environment, 600) == [list(CASES)] * 2
    return folder


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play_by_two(tmp_path_factory.mktemp("cards"), CUDA_VISIBLE_DEVICES="")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found_by(played: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found = read_state(played / f"{name}-{rank}.found")
    assert found is not None
    return found


@pytest.mark.parametrize("name", STEPS)
def test_two_cards_make_the_steps_of_one(played: Path, name: str, tmp_path: Path) -> None:
    """Losses, held-out sums and weights after three steps, of unequal shares of tokens."""
    two, other, one = (
        found_by(played, name),
        found_by(played, name, 1),
        play(name, ONE_CARD, tmp_path),
    )
    coarse = 5e-3 if "16" in name else 1e-5
    assert two["losses"] == pytest.approx(one["losses"], rel=coarse)
    assert (two["position"], two["chunked"]) == (one["position"], one["chunked"])
    for mine, alone in zip(two["held_out"], one["held_out"], strict=True):
        assert mine[0] == alone[0]
        assert mine[1] == pytest.approx(alone[1], rel=coarse)
    assert one["held_out"][0] != one["held_out"][1]
    assert [sum(each) for each in zip(two["dealt"], other["dealt"], strict=True)] == one["dealt"]
    assert two["dealt"] != other["dealt"]
    assert two["weights"].keys() == one["weights"].keys()
    for key, value in one["weights"].items():
        torch.testing.assert_close(
            two["weights"][key], value, rtol=coarse, atol=2e-2 if "16" in name else 2e-5
        )
        assert torch.equal(two["weights"][key], other["weights"][key])


def test_one_card_of_two_makes_passes_that_count_nothing(played: Path) -> None:
    name = "case_fewer_rows_than_cards"
    assert found_by(played, name, 1)["dealt"] == [0, 0, 0]
    assert all(found_by(played, name)["dealt"])


def test_a_member_of_two_cards_says_what_one_says(played: Path, tmp_path: Path) -> None:
    name = "case_a_member_of_a_run"
    two, one = found_by(played, name), play(name, ONE_CARD, tmp_path)
    kinds = [each["event"] for each in one["said"]]
    assert [each["event"] for each in two["said"]] == kinds
    assert {"data", "step", "round", "sample", "evaluation", "final"} <= set(kinds)
    for mine, alone in zip(two["said"], one["said"], strict=True):
        assert mine.keys() == alone.keys()
        for key in ("documents", "tokens", "targets", "round", "step", "steps", "prompt", "text"):
            assert mine.get(key) == alone.get(key)
        for key in {"loss", "nll", "held_out"} & alone.keys():
            if mine["event"] != "data":  # there it is a number of tokens
                assert mine[key] == pytest.approx(alone[key], rel=1e-4)
        if mine["event"] == "round":
            shares = [
                [dict(each)["samples"] for each in said["contributors"]] for said in (mine, alone)
            ]
            assert shares[0] == shares[1]
    assert two["final"]["samples_counted"] == one["final"]["samples_counted"]
    assert (two["final"]["steps"], two["final"]["round"]) == (6, 2)
    assert found_by(played, name, 1)["said"] == found_by(played, name, 1)["told"] == []
    only = set(two["told"]) - set(one["told"])
    assert "whether averaging helps is not evaluated by a member of several cards" in only
    assert len(two["told"]) == len(one["told"]) + 1


def test_a_model_in_shards_is_exported_as_what_it_is(played: Path, tmp_path: Path) -> None:
    name = "case_its_model_is_described_for_export"
    one = play(name, ONE_CARD, tmp_path)
    assert [found_by(played, name, rank) for rank in range(2)] == [one, one]
    assert one["class"] == ["transformers", "GPT2LMHeadModel"]
    assert one["saved"]["lm_head.weight"] == ["transformer.wte.weight", False]


def test_cards_share_what_is_leased_to_their_member(played: Path, tmp_path: Path) -> None:
    name = "case_one_data_set_is_dealt_out_by_the_run"
    two, other, one = (
        found_by(played, name),
        found_by(played, name, 1),
        play(name, ONE_CARD, tmp_path),
    )
    assert two["taken"] == other["taken"]
    both = min(len(two["taken"]), len(one["taken"]))
    assert both > 20
    assert two["taken"][:both] == one["taken"][:both]
    assert two["counted"] == len(two["taken"])
    assert one["counted"] == len(one["taken"])


def test_what_two_cards_have_kept_one_goes_on_with(played: Path, tmp_path: Path) -> None:
    """As well as the other way round: four steps, of which each kind makes two."""
    name = "case_what_one_process_has_kept_is_gone_on_with"
    whole = go_on(ONE_CARD, tmp_path, 4)
    two = found_by(played, name)
    assert two["steps"] == 4
    assert two["losses"] == pytest.approx(whole["losses"][2:], rel=1e-5)
    for key, value in whole["weights"].items():
        torch.testing.assert_close(two["weights"][key], value, rtol=1e-4, atol=2e-5)
    further, through = go_on(ONE_CARD, played / name / "other", 1), go_on(ONE_CARD, tmp_path, 1)
    assert further["steps"] == 5
    assert further["losses"] == pytest.approx(through["losses"], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_make_the_steps_of_one_process(tmp_path: Path) -> None:
    """NCCL in place of gloo, against a process on the CPU."""
    played = play_by_two(tmp_path)
    for name in STEPS:
        two, one = found_by(played, name), play(name, ONE_CARD, tmp_path / "alone")
        assert two["losses"] == pytest.approx(one["losses"], rel=2e-2 if "16" in name else 1e-3)
        for mine, alone in zip(two["held_out"], one["held_out"], strict=True):
            assert mine[0] == alone[0]
            assert mine[1] == pytest.approx(alone[1], rel=2e-2 if "16" in name else 1e-3)
