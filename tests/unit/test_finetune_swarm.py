"""Members that fine-tune together: data of their own or of all, a crash, adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_kit import many_chats, tiny_model, tiny_tokenizer, write_jsonl

from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest.tables import DataTable, InnerTable, PromptsTable
from atoll.node.recipes.finetune.loop import FineTuneSettings, FineTuning
from atoll.node.recipes.finetune.preparing import prepare_data
from atoll.optim import SoloSwarm

INNER = InnerTable(lr=1e-2, warmup=2, tokens_per_step=256)
RUN = RunSettings(codec="fp32", sync_every=4, rounds=4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(member: FineTuning) -> dict[str, Any]:
    while not member.finished():
        member.step()
        member.after_step()
    return member.finish()


@pytest.mark.slow
def test_members_with_data_of_their_own_reach_one_model_though_one_is_killed(
    tmp_path: Path,
) -> None:
    table = DataTable(held_out=0.1, length=64)
    chats = many_chats(120)
    files = [write_jsonl(tmp_path / f"p{i}.jsonl", *chats[i * 60 : i * 60 + 60]) for i in (0, 1)]
    told, said = dict[str, list[str]](), list[dict[str, Any]]()
    settings = FineTuneSettings(table, INNER, PromptsTable(("what of the 1?",), every=1, tokens=3))

    def script(swarm: Any) -> dict[str, Any]:
        index = int(swarm.peer[1:])
        lines = told.setdefault(swarm.peer, [])
        data = prepare_data(str(files[index]), tiny_tokenizer(), table)
        member = FineTuning(
            tiny_model(), tiny_tokenizer(), data, settings, swarm, folder=tmp_path / swarm.peer,
            say=said.append, tell=lines.append,
        )  # fmt: skip
        return trained(member)

    swarm = LocalSwarm(2, settings=RUN)
    found = swarm.crash_at(1, 7.3, back_after_s=1.0).run(script, step_s=1.0)
    assert {each["round"] for each in found} == {4}
    assert found[0]["anchor_digest"] == found[1]["anchor_digest"]
    assert all(each["held_out"] < 3.6 for each in found)
    assert any(line.startswith("going on after step 4") for line in told["p1"])
    rounds = [each["round"] for each in said if each["event"] == "sample"]
    assert len(rounds) == len(set(rounds)) >= 2  # one member shows a round's answers


def test_members_share_out_one_data_set(tmp_path: Path) -> None:
    table = DataTable(held_out=0.0, length=64)
    path = write_jsonl(tmp_path / "all.jsonl", *many_chats(120))
    data = prepare_data(str(path), tiny_tokenizer(), table)
    shared = FineTuneSettings(DataTable(source="shared", sha256="0" * 64, length=64), INNER)
    taken = dict[str, list[tuple[int, ...]]]()

    def script(swarm: Any) -> dict[str, Any]:
        member = FineTuning(tiny_model(), tiny_tokenizer(), data, shared, swarm)
        mine = taken.setdefault(swarm.peer, [])
        take = member.feed.take

        def noted(tokens: int) -> Any:
            found = take(tokens)
            mine.extend(tuple(ids.tolist()) for ids, _ in found)
            return found

        member.feed.take = noted  # type: ignore[method-assign]
        return trained(member)

    rounds = RunSettings(codec="fp32", sync_every=2, rounds=2)
    found = LocalSwarm(2, settings=rounds).run(script, step_s=1.0)
    assert found[0]["anchor_digest"] == found[1]["anchor_digest"]
    both = [set(taken["p0"]), set(taken["p1"])]
    assert len(taken["p0"]) + len(taken["p1"]) <= 120  # within one pass
    assert not both[0] & both[1]


def test_adapters_are_trained_and_resumed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    table = DataTable(held_out=0.1, length=64)
    path = write_jsonl(tmp_path / "all.jsonl", *many_chats(60))
    data = prepare_data(str(path), tiny_tokenizer(), table)

    def member(folder: Path | None) -> FineTuning:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT asks transformers by an older name
                model = peft.get_peft_model(tiny_model(), config)
        settings = FineTuneSettings(table, INNER)
        return FineTuning(model, tiny_tokenizer(), data, settings, SoloSwarm(RUN), folder=folder)

    whole = member(None)
    losses = [whole.step() for _ in range(8)]
    first = member(tmp_path / "state")
    assert first.loss.chunked
    halves = [first.step() for _ in range(5)]
    first.keep()
    assert (tmp_path / "state" / "finetune.safetensors").stat().st_size < 400_000
    assert first.attachment is not None
    first.attachment.detach()
    second = member(tmp_path / "state")
    halves += [second.step() for _ in range(3)]
    assert halves == losses
    assert losses[-1] < losses[0]


def test_no_script_is_told_of_a_rate_that_follows_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its user has none: where the rate does not end with the run, `validate` and `join` say so."""
    path = write_jsonl(tmp_path / "all.jsonl", *many_chats(60))
    table = DataTable(held_out=0.0, length=64)
    data = prepare_data(str(path), tiny_tokenizer(), table)
    inner = InnerTable(lr=1e-2, warmup=1, steps=40, tokens_per_step=64)
    swarm = SoloSwarm(RunSettings(codec="fp32", sync_every=2, rounds=10))
    found = trained(
        FineTuning(tiny_model(), tiny_tokenizer(), data, FineTuneSettings(table, inner), swarm)
    )
    assert found["round"] == 10
    assert [each for each in caplog.messages if "learning rate" in each] == []
