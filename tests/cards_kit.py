"""Fine-tuning by one process, and by two over gloo that hold the model in shards: the same cases.
python cards_kit.py FOLDER RANK plays all of them as one of two, and keeps what rank 0 found.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_kit import many_chats, tiny_model, tiny_tokenizer, write_jsonl
from round_table import RoundTable
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.collectives.errors import ConfigError, StateError
from atoll.collectives.swarm import EvaluateSettings, RunSettings
from atoll.node.manifest.tables import DataTable, InnerTable, PromptsTable
from atoll.node.recipes.finetune.keeping import write_state
from atoll.node.recipes.finetune.loop import STATE_FILE, FineTuneSettings, FineTuning
from atoll.node.recipes.finetune.preparing import PreparedData, prepare_data
from atoll.node.recipes.finetune.sharding import ONE_CARD, Cards, ShardedCards
from atoll.node.recipes.finetune.train import finetune
from atoll.optim import SoloSwarm

TABLE = DataTable(held_out=0.1, length=64)
RUN = RunSettings(codec="fp32", sync_every=3, rounds=2)
Found = dict[str, Any]


def read(cards: Cards, folder: Path) -> PreparedData:
    """By the first card alone: the others have no file."""

    def make() -> PreparedData:
        folder.mkdir(exist_ok=True)
        path = write_jsonl(folder / f"chats{cards.size}.jsonl", *many_chats(60))
        return prepare_data(str(path), tiny_tokenizer(), TABLE, vocabulary=304)

    return cards.read(make)


def inner(**more: Any) -> InnerTable:
    return InnerTable(**{"lr": 5e-3, "steps": 8, "warmup": 2, "tokens_per_step": 256, **more})


def whole(member: FineTuning) -> dict[str, Tensor]:
    """What is trained, put together by all."""
    member.cards.let_go(member.model)
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.clone()
        for name, each in member._named().items()
    }


def dealt(member: FineTuning) -> list[int]:
    """Learned tokens of this card's micro-batches, step by step, from now on."""
    found, deal = list[int](), member.cards.deal

    def noted(batches: Any) -> Any:
        mine = deal(batches)
        found.append(sum(int((each.targets >= 0).sum()) for each, counts in mine if counts))
        return mine

    member.cards.deal = noted  # type: ignore[method-assign]
    return found


def steps_of(
    cards: Cards,
    folder: Path,
    model: Any,
    table: InnerTable,
    *,
    checkpointing: bool = True,
    bf16: bool = False,
) -> Found:
    """Three steps, and held-out sums before and behind them."""
    settings = FineTuneSettings(TABLE, table, bf16=bf16, checkpointing=checkpointing)
    member = FineTuning(model, tiny_tokenizer(), read(cards, folder), settings, cards=cards)
    held_out = [member.evaluate()]
    mine = dealt(member)
    losses = [member.step() for _ in range(3)]
    del member.cards.deal
    assert all(each.grad is None for each in member.trained)
    held_out.append(member.evaluate())
    return {
        "losses": losses,
        "held_out": [list(each) for each in held_out],
        "weights": whole(member),
        "chunked": member.loss.chunked,
        "dealt": mine,
        "position": member.feed.position,
    }


def case_one_row_a_micro_batch(cards: Cards, folder: Path) -> Found:
    return steps_of(cards, folder, tiny_model("llama"), inner())


def case_one_micro_batch_is_cut_for_two_and_the_head_is_tied(cards: Cards, folder: Path) -> Found:
    exact: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = tiny_model("gpt2", **exact)
    return steps_of(cards, folder, model, inner(micro_batch=64), checkpointing=False)


def case_fewer_rows_than_cards(cards: Cards, folder: Path) -> Found:
    """Steps of one document each: a card makes its passes, and nothing of them counts."""
    return steps_of(cards, folder, tiny_model("qwen2"), inner(tokens_per_step=1, clip=0))


def case_the_whole_model_makes_the_logits(cards: Cards, folder: Path) -> Found:
    return steps_of(cards, folder, tiny_model("granite", logits_scaling=8.0), inner())


def case_an_optimizer_in_backward(cards: Cards, folder: Path) -> Found:
    table = inner(in_backward=True, micro_batch=16, clip=0)
    return steps_of(cards, folder, tiny_model("llama"), table)


def case_calculated_in_16_bits(cards: Cards, folder: Path) -> Found:
    """By autocast, or in weights that are gathered so, as on GPUs."""
    casts, cards.casts = cards.casts, cards.size > 1
    try:
        return steps_of(cards, folder, tiny_model("llama"), inner(), bf16=True)
    finally:
        cards.casts = casts


def case_plain_sgd_in_weights_of_16_bits(cards: Cards, folder: Path) -> Found:
    model = tiny_model("llama").to(torch.bfloat16)
    return steps_of(cards, folder, model, inner(optimizer="sgd", lr=0.5))


def case_adapters_of_one_row_on_a_base_of_16_bits(cards: Cards, folder: Path) -> Found:
    """Rank 1: one of two cards holds nothing of some."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by an older name
        torch.manual_seed(3)
        config = peft.LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(tiny_model("llama").to(torch.bfloat16), config)
    return steps_of(cards, folder, model, inner(lr=5e-2))


def case_a_member_of_a_run(cards: Cards, folder: Path) -> Found:
    """From data to the final record: rounds, evaluations, answers."""
    said, told = list[Found](), list[str]()
    settings = FineTuneSettings(
        TABLE,
        inner(lr=1e-2, tokens_per_step=512),
        PromptsTable(("what of the 1?",), every=1, tokens=4),
    )
    path = write_jsonl(folder / f"all{cards.size}.jsonl", *many_chats(60))
    run = RunSettings(codec="fp32", sync_every=3, rounds=2, evaluate=EvaluateSettings(1, 0.5, 3))
    final = finetune(
        tiny_model("llama"),
        tiny_tokenizer(),
        settings,
        "" if cards.rank else str(path),
        None if cards.rank else SoloSwarm(run),
        cards=cards,
        folder=folder / f"run{cards.size}",
        evaluate_every=1,
        say=said.append if not cards.rank else lambda record: None,
        tell=told.append if not cards.rank else lambda line: None,
    )
    cards.decide(True)  # the first has put away what it kept
    assert not list((folder / f"run{cards.size}").iterdir())
    return {"final": final, "said": said, "told": told}


def case_its_model_is_described_for_export(cards: Cards, folder: Path) -> Found:
    """By its own class, and a tied head as what it is."""
    settings = FineTuneSettings(TABLE, inner())
    swarm = None if cards.rank else SoloSwarm(RUN)
    model, data = tiny_model("gpt2"), read(cards, folder)
    member = FineTuning(model, tiny_tokenizer(), data, settings, swarm, cards=cards)
    assert member.attachment is not None
    found = member.attachment._keeper._saver.describe()
    member.attachment.detach()
    return {
        "class": [found.kind, found.library_class],
        "config": found.files["config.json"].decode(),
        "saved": {each.name: [each.of, each.frozen] for each in found.saved},
        "lost": list(found.lost),
    }


def case_one_data_set_is_dealt_out_by_the_run(cards: Cards, folder: Path) -> Found:
    """Each card reads its part of what is leased to the member, and all have the whole."""
    table = DataTable(source="shared", sha256="0" * 64, length=64, held_out=0.1)
    member = FineTuning(
        tiny_model("llama"),
        tiny_tokenizer(),
        read(cards, folder),
        FineTuneSettings(table, inner()),
        None if cards.rank else SoloSwarm(RUN),
        cards=cards,
    )
    taken, take = list[list[int]](), member.feed.take

    def noted(tokens: int) -> Any:
        found = take(tokens)
        taken.extend(ids.tolist() for ids, _ in found)
        return found

    member.feed.take = noted  # type: ignore[method-assign]
    while not member.finished():
        member.step()
    return {"taken": taken, "counted": member.finish(evaluate=False)["samples_counted"]}


def case_it_goes_on_where_it_stopped(cards: Cards, folder: Path) -> Found:
    """Bit for bit, dropout and data position included, in the middle of a round."""
    data, drops = read(cards, folder), {"resid_pdrop": 0.2, "embd_pdrop": 0.2}
    kept = folder / f"kept{cards.size}"

    def member(table: RoundTable, path: Path | None, seed: int = 0) -> FineTuning:
        settings = FineTuneSettings(TABLE, inner())
        swarm = None if cards.rank else table.member("job")
        model = tiny_model("gpt2", seed, **drops)
        return FineTuning(model, tiny_tokenizer(), data, settings, swarm, cards=cards, folder=path)

    torch.manual_seed(5 + cards.rank)
    through = member(RoundTable(["job"], RUN), None)
    expected = [through.step() for _ in range(6)]
    assert through.attachment is not None
    through.attachment.detach()
    torch.manual_seed(5 + cards.rank)
    table = RoundTable(["job"], RUN)
    first = member(table, kept)
    losses = [first.step() for _ in range(4)]
    first.evaluate()  # leaves gathered parameters behind
    first.keep()
    assert first.attachment is not None
    first.attachment.detach()
    torch.manual_seed(99)
    second = member(table, kept, seed=7)
    assert (second.steps, second.feed.position) == (4, first.feed.position)
    losses += [second.step() for _ in range(2)]
    assert losses == expected
    mine, other = whole(second), whole(through)
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert sorted(each.name for each in kept.iterdir()) == [STATE_FILE]
    return {"losses": losses}


def go_on(cards: Cards, folder: Path, steps: int) -> Found:
    """Steps that are kept, from what another number of cards has kept."""
    data = read(cards, folder)
    settings = FineTuneSettings(TABLE, inner())
    member = FineTuning(
        tiny_model("llama", 7), tiny_tokenizer(), data, settings, cards=cards, folder=folder
    )
    losses = [member.step() for _ in range(steps)]
    member.keep()
    return {"losses": losses, "steps": member.steps, "weights": whole(member)}


def case_what_one_process_has_kept_is_gone_on_with(cards: Cards, folder: Path) -> Found:
    place = folder / "other"
    if not cards.rank and cards.size == 2:
        go_on(ONE_CARD, place, 2)
    cards.decide(True)
    return go_on(cards, place, 2) if cards.size == 2 else {}


def case_what_one_meets_all_meet(cards: Cards, folder: Path) -> Found:
    """Data that cannot be read, a model that cannot be loaded, a disk that is full."""
    if cards.size == 1:
        return {}

    def broken() -> PreparedData:
        raise ConfigError("line 3 is wrong", key="data", hint="mend it")

    with pytest.raises(ConfigError, match="line 3 is wrong") as caught:
        cards.read(broken)
    assert caught.value.hint == "mend it"

    def load() -> Any:
        if cards.rank:
            raise ConfigError("no memory here", key="model")
        return type("Loaded", (), {"model": tiny_model("llama")})()

    with pytest.raises(ConfigError, match="no memory here"):
        cards.load(load)
    strands = {"0": {"own": torch.zeros(3)}}  # values of the shards of one card
    if not cards.rank:
        write_state(folder / "eager", {"attachment": {"strands": strands}, "random": None})
    cards.decide(True)
    with pytest.raises(StateError, match="was kept by 1 cards, and 2 go on") as found:
        cards.kept(folder / "eager")
    assert "--devices 1" in found.value.hint
    return {}


CASES: dict[str, Callable[[Cards, Path], Found]] = {
    name: case for name, case in globals().items() if name.startswith("case_")
}


def play(name: str, cards: Cards, folder: Path) -> Found:
    torch.manual_seed(1 + cards.rank)
    place = folder / name
    place.mkdir(exist_ok=True, parents=True)
    return CASES[name](cards, place)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    cards = ShardedCards(rank, 2, folder / "store")
    for name in CASES:
        found = play(name, cards, folder)
        write_state(folder / f"{name}-{rank}.found", found)
        print(name, flush=True)
    cards.close()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main(Path(sys.argv[1]), int(sys.argv[2]))
