"""The loop of fine-tuning: packing, the loss to the last bit, accumulation, and going on."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
import torch.nn.functional as F
from finetune_kit import many_chats, tiny_model, tiny_tokenizer, write_jsonl

from atoll.collectives.errors import ConfigError, StateError
from atoll.collectives.swarm import EvaluateSettings, RunSettings
from atoll.node.manifest import Manifest, parse_manifest
from atoll.node.manifest.tables import DataTable, InnerTable, PromptsTable
from atoll.node.recipes.finetune import losses, packing
from atoll.node.recipes.finetune.keeping import read_state, write_state
from atoll.node.recipes.finetune.launching import devices_for
from atoll.node.recipes.finetune.loop import STATE_FILE, FineTuneSettings, FineTuning
from atoll.node.recipes.finetune.losses import SummedLoss
from atoll.node.recipes.finetune.packing import Document, lay_out, packs
from atoll.node.recipes.finetune.preparing import PreparedData, prepare_data
from atoll.node.recipes.finetune.train import finetune
from atoll.optim import SoloSwarm

TABLE = DataTable(held_out=0.1, length=64)
INNER = InnerTable(lr=5e-3, steps=8, warmup=2, tokens_per_step=256)
SETTINGS = FineTuneSettings(TABLE, INNER)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    path = write_jsonl(tmp_path_factory.mktemp("data") / "chats.jsonl", *many_chats(60))
    return prepare_data(str(path), tiny_tokenizer(), TABLE, vocabulary=304)


def documents(*sizes: int, seed: int = 0) -> list[Document]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(300, (size,), generator=drawn),
            torch.rand(size, generator=drawn) < 0.5,
        )
        for size in sizes
    ]


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", {}), ("qwen2", {}), ("gpt2", {}), ("mistral", {"sliding_window": 4})],
)
def test_packed_documents_have_the_logits_that_each_has_alone(
    kind: str, settings: dict[str, Any]
) -> None:
    model = tiny_model(kind, **settings)
    given = documents(9, 20, 5, 14, 30, 3)
    assert packs(model, 300) == ""
    batches = lay_out(given, length=32, rows=2, packing=True)
    found = 0
    for batch in batches:
        with torch.no_grad():
            logits = model(**batch.inputs).logits
        assert batch.positions is not None
        for row in range(len(batch.ids)):
            starts = (batch.positions[row] == 0).nonzero().flatten().tolist()
            for start, stop in zip(starts, [*starts[1:], batch.ids.shape[1]], strict=True):
                with torch.no_grad():
                    own = alone(model, batch.ids[row, start:stop])
                torch.testing.assert_close(logits[row, start:stop], own, rtol=1e-5, atol=1e-6)
                found += any(torch.equal(batch.ids[row, start:stop], ids) for ids, _ in given)
    assert found == len(given)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(random_models.ARCHITECTURES.keys()))
def test_every_architecture_packs_or_is_refused(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    name, config = random_models.ARCHITECTURES[architecture]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**config))
    model.eval()
    packing.check_causal(model, 300)
    assert bool(packs(model, 300)) == (architecture == "falcon")
    given = documents(9, 20, 5)
    (batch,) = lay_out(given, length=40, rows=1, packing=architecture != "falcon")[:1]
    if batch.positions is None:
        return
    with torch.no_grad():
        logits = model(**batch.inputs).logits[0]
    for start, stop in ((0, 20), (20, 29), (29, 34)):
        with torch.no_grad():
            own = alone(model, batch.ids[0, start:stop])
        torch.testing.assert_close(logits[start:stop], own, rtol=1e-4, atol=1e-5)


def test_a_model_that_sees_what_comes_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=304, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="a bert model lets tokens see those behind them"):
        packing.check_causal(model, 300)
    model = tiny_model()
    packing.check_causal(model, 300)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(ConfigError, match="the model's logits are no finite numbers"):
        packing.check_causal(model, 300)


def test_samples_longer_than_the_models_positions(data: PreparedData) -> None:
    settings = FineTuneSettings(DataTable(length=257), INNER)
    with pytest.raises(ConfigError, match=r"up to 257 tokens, and the model has 256") as caught:
        FineTuning(tiny_model("gpt2"), tiny_tokenizer(), data, settings)
    assert (caught.value.key, caught.value.hint) == ("$.data.length", "length = 256")
    told = list[str]()
    FineTuning(tiny_model(), tiny_tokenizer(), data, settings, tell=told.append)
    assert "the model knows 256 positions" in told[0]


def test_packing_is_refused_where_documents_see_one_another() -> None:
    model = tiny_model("falcon", num_kv_heads=2, new_decoder_architecture=False)
    with pytest.raises(ConfigError) as caught:
        packing.check_packing(model, 300)
    assert caught.value.key == "$.data.packing"
    assert "falcon" in caught.value.message
    assert "packing = false" in caught.value.hint


def test_rows_hold_all_documents_once_and_are_never_too_long() -> None:
    sizes = [3, 9, 6, 2, 10, 1, 1, 7]
    rows = packing.pack_rows(sizes, 10)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    assert max(sum(sizes[index] for index in row) for row in rows) <= 10
    assert len(rows) == 4


@pytest.mark.parametrize("packed", [True, False])
def test_each_document_predicts_its_own_learned_tokens_and_nothing_else(packed: bool) -> None:
    given = documents(9, 20, 5, 14)
    batches = lay_out(given, length=32, rows=2, packing=packed)
    wanted = sorted(
        (int(ids[at]), int(ids[at + 1]))
        for ids, learned in given
        for at in range(len(ids) - 1)
        if learned[at + 1]
    )
    found = sorted(
        (int(batch.ids[row, at]), int(batch.targets[row, at]))
        for batch in batches
        for row in range(len(batch.ids))
        for at in range(batch.ids.shape[1])
        if batch.targets[row, at] != packing.IGNORED
    )
    assert found == wanted


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("chunked", [False, True])
def test_what_is_masked_adds_nothing_to_the_last_bit(kind: str, chunked: bool) -> None:
    """Against a plain loop: token after token, whatever is learned, added up."""
    model = tiny_model(kind)
    (batch,) = lay_out(documents(9, 20, 5, 14), length=64, rows=1, packing=True)
    loss = SummedLoss(model)
    assert loss.chunked
    loss.chunked = chunked
    summed = loss(batch)
    kept = batch.targets[0] != packing.IGNORED
    with torch.no_grad():
        if chunked:  # of what is learned alone
            hidden = model.get_decoder()(**batch.inputs).last_hidden_state[0]
            logits = model.get_output_embeddings()(hidden[kept]).float()
        else:
            logits = model(**batch.inputs).logits[0][kept].float()
    plain = 0.0
    for at, target in enumerate(batch.targets[0][kept].tolist()):
        plain += float(F.cross_entropy(logits[at : at + 1], torch.tensor([target])).double())
    assert float(summed.detach()) == plain
    other = batch.ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 300  # the last token of a document predicts nothing
    again = loss(packing.PackedBatch(other, batch.targets, batch.positions))
    assert float(again.detach()) == plain
    gradient = torch.autograd.grad(summed, model.get_input_embeddings().weight)[0]
    masked = batch.ids[0][(batch.targets[0] == packing.IGNORED).nonzero().flatten()]
    assert len(masked) > 10
    # a last token of a document is seen by nothing that is learned, so nothing hangs on it
    only = [int(ids[-1]) for ids, _ in documents(9, 20, 5, 14)]
    others = torch.cat([ids[:-1] for ids, _ in documents(9, 20, 5, 14)]).tolist()
    if kind == "llama":  # gpt2's head is its embedding
        for token in set(only) - set(others):
            assert not gradient[token].any()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_the_head_in_chunks_gives_the_same_loss_and_gradients(kind: str) -> None:
    model = tiny_model(kind)
    (batch,) = lay_out(documents(9, 20, 5, 14), length=64, rows=1, packing=True)
    whole, chunked = SummedLoss(model), SummedLoss(model, chunk=304 * 5)
    whole.chunked = False
    assert chunked.chunked
    results = []
    for loss in (whole, chunked):
        model.zero_grad()
        summed = loss(batch)
        (summed / 23).backward()
        results.append((float(summed.detach()), [p.grad.clone() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_model_that_scales_its_logits_is_not_cut_into_chunks() -> None:
    transformers = pytest.importorskip("transformers")
    assert not SummedLoss(tiny_model("granite", logits_scaling=8.0)).chunked
    name, config = random_models.ARCHITECTURES["gemma2"]  # it caps logits far above a random one's
    capped = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**config))
    assert not SummedLoss(capped.eval()).chunked
    assert losses.SummedLoss(tiny_model()).chunked


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_a_step_is_the_same_however_it_is_cut(data: PreparedData, micro_batch: int) -> None:
    """Against one plain backward pass over each document alone."""
    inner = InnerTable(lr=1e-2, steps=8, warmup=0, tokens_per_step=256, micro_batch=micro_batch,
                       optimizer="sgd", clip=1e6)  # fmt: skip
    member = FineTuning(tiny_model(), tiny_tokenizer(), data, FineTuneSettings(TABLE, inner))
    plain = tiny_model()
    taken = FineTuning(tiny_model(), tiny_tokenizer(), data, FineTuneSettings(TABLE, inner))
    given = taken.feed.take(256)
    count = sum(int(learned[1:].sum()) for _, learned in given)
    total = torch.zeros(())
    for ids, learned in given:
        kept = learned[1:]
        total = total + F.cross_entropy(
            alone(plain, ids)[:-1][kept], ids[1:][kept], reduction="sum"
        )
    (total / count).backward()
    loss = member.step()
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-5)
    for mine, other in zip(member.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            mine.detach(), (other - 1e-2 * other.grad).detach(), rtol=1e-4, atol=1e-6
        )


def swarm_settings(**more: Any) -> RunSettings:
    return RunSettings(codec="fp32", sync_every=3, rounds=4, **more)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_learns_and_evaluation_is_of_sums(data: PreparedData, kind: str) -> None:
    said = list[dict[str, Any]]()
    settings = FineTuneSettings(TABLE, InnerTable(lr=1e-2, warmup=2, tokens_per_step=512),
                                PromptsTable(("what of the 1?",), every=2, tokens=4))  # fmt: skip
    swarm = SoloSwarm(swarm_settings(evaluate=EvaluateSettings(1, 0.5, 3)))
    member = FineTuning(tiny_model(kind), tiny_tokenizer(), data, settings, swarm, say=said.append)
    before = member.evaluate_anchor()
    while not member.finished():
        member.step()
        member.after_step()
    final = member.finish()
    assert (final["steps"], final["round"]) == (12, 4)
    assert final["held_out"] < 0.85 * before["held_out"]
    assert final["tokens"] == data.held_out.targets
    assert final["nll"] / final["tokens"] == pytest.approx(final["held_out"], abs=1e-4)
    assert [each["round"] for each in said if each["event"] == "sample"] == [2, 4]
    assert sum(each["event"] == "round" for each in said) == 4
    plain = tiny_model(kind)
    plain.load_state_dict(member.model.state_dict())


def test_evaluations_are_as_large_as_the_runs_tokens_allow(data: PreparedData) -> None:
    """A share of at most twenty rounds; where that is too little to say anything, none is made."""
    held_out = data.held_out.tokens

    def most(share: float, rounds: int | None, step: int) -> tuple[int, list[str]]:
        told = list[str]()
        settings = FineTuneSettings(TABLE, InnerTable(tokens_per_step=step))
        run = RunSettings(sync_every=3, rounds=rounds, evaluate=EvaluateSettings(1, share, 3))
        member = FineTuning(
            tiny_model("llama"), tiny_tokenizer(), data, settings, SoloSwarm(run), tell=told.append
        )
        return member._watched, [line for line in told if "averaging helps" in line]

    assert held_out < 512
    assert most(0.01, 4, 256)[0] == 0
    assert most(0.01, 4, 256)[1] == [
        "whether averaging helps is not evaluated: 1.00% of this run's time is enough for 31 "
        "held-out tokens"
    ]
    assert most(0.5, 4, 256) == (1536, [])  # all of what is held out
    assert most(0.01, None, 8192) == (4096, [])
    assert most(0.01, 10, 8192) == (2458, [])


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_an_interrupted_machine_goes_on_bit_for_bit(
    data: PreparedData, tmp_path: Path, joined: bool, dropout: float
) -> None:
    """Random states, data position, moments and what was not yet sent are part of it."""

    def member(folder: Path | None, seed: int = 0) -> FineTuning:
        model = tiny_model("gpt2", seed, resid_pdrop=dropout, embd_pdrop=dropout)
        swarm = SoloSwarm(swarm_settings()) if joined else None
        return FineTuning(model, tiny_tokenizer(), data, SETTINGS, swarm, folder=folder)

    def go(each: FineTuning, steps: int) -> list[float]:
        return [each.step() for _ in range(steps)]

    torch.manual_seed(5)
    through = member(None)
    whole = go(through, 8)
    torch.manual_seed(5)
    first = member(tmp_path)
    losses_ = go(first, 4)  # one step into the second round
    first.keep()
    if first.attachment is not None:
        first.attachment.detach()
    torch.manual_seed(99)
    second = member(tmp_path, seed=0 if joined else 7)
    assert second.steps == 4
    losses_ += go(second, 4)
    assert losses_ == whole
    for mine, other in zip(second.model.parameters(), through.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_state_is_private_and_refused_when_damaged(data: PreparedData, tmp_path: Path) -> None:
    member = FineTuning(tiny_model(), tiny_tokenizer(), data, SETTINGS, folder=tmp_path)
    member.step()
    member.keep()
    file = tmp_path / STATE_FILE
    assert file.stat().st_mode & 0o077 == 0
    assert [each.name for each in tmp_path.iterdir()] == [STATE_FILE]
    with pytest.raises(StateError, match="is of another model"):
        FineTuning(tiny_model("gpt2"), tiny_tokenizer(), data, SETTINGS, folder=tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StateError, match="is damaged"):
        FineTuning(tiny_model(), tiny_tokenizer(), data, SETTINGS, folder=tmp_path)


def test_states_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "a": torch.arange(3),
        "b": [1, 2.5, None, "x"],
        "c": {1: (True, {"d": torch.zeros(0)})},
    }
    write_state(tmp_path / "state", state)
    found = read_state(tmp_path / "state")
    assert found is not None
    assert torch.equal(found["a"], state["a"])  # type: ignore[arg-type]
    assert found["b"] == state["b"]
    assert found["c"][1][0] is True
    assert found["c"][1][1]["d"].shape == (0,)
    assert read_state(tmp_path / "none") is None


def test_other_data_begin_at_their_first_document(data: PreparedData, tmp_path: Path) -> None:
    member = FineTuning(tiny_model(), tiny_tokenizer(), data, SETTINGS, folder=tmp_path / "state")
    member.step()
    member.keep()
    path = write_jsonl(tmp_path / "other.jsonl", *many_chats(30))
    other, told = prepare_data(str(path), tiny_tokenizer(), TABLE), list[str]()
    again = FineTuning(tiny_model(), tiny_tokenizer(), other, SETTINGS, folder=tmp_path / "state", tell=told.append)  # fmt: skip
    assert again.feed.position == 0
    assert any("the data are others" in line for line in told)


def test_what_is_read_and_how_long_it_takes_is_said_before_the_first_step(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", *many_chats(60))
    told, said = list[str](), list[dict[str, Any]]()
    final = finetune(
        tiny_model(),
        tiny_tokenizer(),
        SETTINGS,
        str(path),
        steps=2,
        folder=tmp_path / "new",
        say=said.append,
        tell=told.append,
    )
    assert final["steps"] == 2
    assert told[0] == "60 records (60 of messages)"
    assert "tokens, " in told[1]
    assert told[3].startswith(
        "the first sample, with what is learned between ⟦ and ⟧:\n<|im_start|>"
    )
    assert "tokens a second here: a pass takes" in told[-1]
    assert [each["event"] for each in said][:2] == ["data", "step"]


def test_data_that_a_run_reads_many_times_are_said(data: PreparedData) -> None:
    step = data.training.tokens // 2  # two a pass
    assert not any("times" in line for line in data.lines(step, 20))
    assert not any("times" in line for line in data.lines(step))
    (said,) = [line for line in data.lines(step, 44) if "times" in line]
    assert said.startswith("the run's 44 steps read these data about 22 times: a model then")
    shared = dataclasses.replace(data, alone=False)
    assert not any("times" in line for line in shared.lines(step, 44))


def test_one_data_set_is_dealt_out_by_the_run(data: PreparedData) -> None:
    table = DataTable(source="shared", sha256="0" * 64, length=64)
    swarm = SoloSwarm(swarm_settings())
    member = FineTuning(tiny_model(), tiny_tokenizer(), data, FineTuneSettings(table, INNER), swarm)
    while not member.finished():
        member.step()
    assert member.finish()["samples_counted"] > 12  # documents, by which leases count


def test_a_loss_that_is_no_number_ends_training_by_name(data: PreparedData) -> None:
    model = tiny_model()
    member = FineTuning(model, tiny_tokenizer(), data, SETTINGS)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(StateError, match="the loss of step 1 is nan"):
        member.step()


def test_the_rate_is_tried_with_no_more_than_a_step_has(data: PreparedData) -> None:
    inner = InnerTable(tokens_per_step=256, micro_batch=65_536)
    member = FineTuning(tiny_model(), tiny_tokenizer(), data, FineTuneSettings(TABLE, inner))
    seen, loss = list[int](), member.loss

    def noted(batch: packing.PackedBatch) -> torch.Tensor:
        seen.append(batch.ids.numel())
        return loss(batch)

    member.loss = noted  # type: ignore[assignment]
    assert member.tokens_s() > 0
    assert seen[0] <= 256 + 2 * 64


def test_what_cannot_be_trained_is_refused(data: PreparedData) -> None:
    frozen = tiny_model()
    frozen.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model is trained"):
        FineTuning(frozen, tiny_tokenizer(), data, SETTINGS)


def test_bfloat16_is_calculated_in_where_weights_are_float32(data: PreparedData) -> None:
    settings = FineTuneSettings(TABLE, INNER, bf16=True)
    exact = FineTuning(tiny_model(), tiny_tokenizer(), data, SETTINGS).step()
    member = FineTuning(tiny_model(), tiny_tokenizer(), data, settings)
    short = member.step()
    assert 0 < abs(short - exact) < 0.02 * exact
    assert all(each.dtype == torch.float32 for each in member.model.parameters())


@pytest.mark.parametrize(("kind", "joined"), [("llama", False), ("gpt2", True)])
def test_an_optimizer_in_backward_makes_the_same_steps_bit_for_bit(
    data: PreparedData, tmp_path: Path, kind: str, joined: bool
) -> None:
    """gpt2's head is its embedding, which steps once. Going on is part of it."""

    def member(in_backward: bool, folder: Path | None = None) -> FineTuning:
        inner = InnerTable(lr=5e-3, steps=8, warmup=2, tokens_per_step=128, micro_batch=16, clip=0,
                           in_backward=in_backward)  # fmt: skip
        swarm = SoloSwarm(swarm_settings()) if joined else None
        settings = FineTuneSettings(TABLE, inner)
        exact: dict[str, Any] = (
            {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if joined else {}
        )
        model = tiny_model(kind, **exact)
        return FineTuning(model, tiny_tokenizer(), data, settings, swarm, folder=folder)

    plain, inside = member(False), member(True, tmp_path)
    assert inside.tokens_s() > 0
    widest = list[int]()
    loss = inside.loss
    inside.loss = lambda batch: (widest.append(len(batch.ids)), loss(batch))[1]  # type: ignore[assignment]
    assert inside.evaluate() == plain.evaluate()
    assert max(widest) <= 16
    inside.loss = loss
    losses_ = [plain.step() for _ in range(7)]
    found = [inside.step() for _ in range(4)]
    assert all(each.grad is None for each in inside.trained)
    inside.keep()
    if inside.attachment is not None:
        assert inside.round == 1
        inside.attachment.detach()
    again = member(True, tmp_path)
    found += [again.step() for _ in range(3)]
    assert found == losses_
    for mine, other in zip(again.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_eight_bit_adamw_trains_and_goes_on_or_is_named(data: PreparedData, tmp_path: Path) -> None:
    settings = FineTuneSettings(TABLE, InnerTable(lr=5e-3, optimizer="adamw8bit", warmup=0, tokens_per_step=256))  # fmt: skip
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(ConfigError, match="which bitsandbytes has"):
            FineTuning(tiny_model(), tiny_tokenizer(), data, settings)
        return
    swarm = SoloSwarm(swarm_settings())
    whole = FineTuning(tiny_model(), tiny_tokenizer(), data, settings, swarm)
    losses_ = [whole.step() for _ in range(7)]
    swarm = SoloSwarm(swarm_settings())
    first = FineTuning(tiny_model(), tiny_tokenizer(), data, settings, swarm, folder=tmp_path)
    found = [first.step() for _ in range(4)]
    first.keep()
    assert first.attachment is not None
    first.attachment.detach()
    swarm = SoloSwarm(swarm_settings())
    second = FineTuning(tiny_model(), tiny_tokenizer(), data, settings, swarm, folder=tmp_path)
    assert found + [second.step() for _ in range(3)] == losses_
    assert losses_[-1] < losses_[0]


@pytest.mark.parametrize(
    ("rows", "cards", "micro_batches"),
    [(8, 1, [8, 4]), (8, 2, [6, 6]), (5, 2, [3, 3, 3, 3]), (64, 5, [3, 3, 3, 3]), (1, 2, [1] * 12)],
)
def test_rows_are_laid_out_for_as_many_cards(
    rows: int, cards: int, micro_batches: list[int]
) -> None:
    given = documents(*range(20, 32))
    laid = lay_out(given, length=32, rows=rows, packing=True, cards=cards)
    assert [len(each.ids) for each in laid] == micro_batches
    assert lay_out([], length=32, rows=rows, packing=True, cards=cards) == []


def of_text(text: str) -> Manifest:
    """A run of a pretrained model; ``text`` begins in [model]."""
    head = 'schema = 1\nname = "x"\n[data]\nsource = "local"\n[model]\nfolder = "x"\n'
    return parse_manifest(head + text)


@pytest.mark.parametrize(
    ("text", "why", "cure"),
    [
        ('method = "qlora"\n[adapters]\nbase = "shapes"\n', "four bits", 'method = "lora"'),
        (
            '[train.inner]\noptimizer = "adamw8bit"\n',
            "bitsandbytes does not step shards",
            'optimizer = "adamw"',
        ),
        ("[exchange]\nfragments = 2\n", "fragments", "fragments = 1"),
        ("[exchange]\nfeedback = true\n", "error feedback", "feedback = false"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_cure(text: str, why: str, cure: str) -> None:
    """Where somebody asks for several devices; else one trains."""
    manifest = of_text(text)
    with pytest.raises(ConfigError) as caught:
        devices_for(2, manifest)
    assert caught.value.key == "devices"
    assert why in caught.value.message
    assert caught.value.hint.startswith("--devices 1; or")
    assert cure in caught.value.hint
    assert devices_for(1, manifest) == 1


def test_devices_are_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, four = of_text(""), of_text('method = "qlora"\n[adapters]\nbase = "shapes"\n')
    told = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [devices_for(asked, plain) for asked in (None, 1, 3)] == [1, 1, 3]
    with pytest.raises(ConfigError, match="--devices 4096, and torch sees no GPU here"):
        devices_for(4096, plain)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [devices_for(asked, plain) for asked in (None, 1, 3)] == [4, 1, 3]
    with pytest.raises(ConfigError, match="--devices 5, and torch sees 4 here"):
        devices_for(5, plain)
    assert devices_for(None, four, told.append) == 1
    assert told == [
        'one of this machine\'s 4 GPUs trains, since this run has method = "qlora", and FSDP2 does '
        "not cut weights of four bits"
    ]
