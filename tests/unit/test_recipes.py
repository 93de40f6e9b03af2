"""The built-in recipe: its text, its model, and that training lowers the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from round_table import RoundTable
from tiny_run import TINY

from atoll.collectives.errors import ConfigError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.manifest import parse_manifest
from atoll.node.manifest.gpt import GptConfig
from atoll.node.manifest.tables import InnerTable
from atoll.node.recipes import data, gpt, loop
from atoll.node.recipes.train import TrainingMember, load_data
from atoll.optim import SoloSwarm


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.load_corpus(data.BUILTIN, 16)


def test_text_is_the_same_every_time_and_nothing_is_in_both_parts(corpus: data.Corpus) -> None:
    again = data.load_corpus(data.BUILTIN, 16)
    assert torch.equal(corpus.training, again.training)
    assert torch.equal(corpus.held_out, again.held_out)
    assert len(corpus.training) + len(corpus.held_out) <= data.STDLIB_BYTES
    assert 8 < len(corpus.training) / len(corpus.held_out) < 10


def test_split_by_blocks() -> None:
    text = b"".join(bytes([i]) * data.BLOCK_BYTES for i in range(25))
    training, held_out = data.split(text)
    assert set(held_out) == {9, 19}
    assert set(training) == set(range(25)) - {9, 19}
    assert len(training) + len(held_out) == len(text)


def test_repeated_paragraphs_count_once() -> None:
    assert data.unique_paragraphs(["a\n\nb\n\na", "b\n\n\n\nc"]) == "a\n\nb\n\nc"


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second " * 9000)
    (tmp_path / "a.md").write_text("first " * 9000)
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe" * 9000)  # not text
    (tmp_path / "d.bin").write_bytes(b"x" * 9000)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "e.txt").write_text("hidden " * 9000)
    folder = data.load_corpus(str(tmp_path), 16)
    text = bytes(folder.training.tolist())
    assert text.startswith(b"first ")
    assert b"second" in text
    assert b"hidden" not in text
    single = data.load_corpus(str(tmp_path / "b.txt"), 16)
    assert bytes(single.training[:7].tolist()) == b"second "
    (tmp_path / "short.txt").write_text("too short")
    for bad, words in (("short.txt", "9 bytes"), ("none.txt", "No such file")):
        with pytest.raises(ConfigError, match=words):
            data.load_corpus(str(tmp_path / bad), 16)


def test_batches_are_windows_and_their_next_bytes() -> None:
    tokens = torch.arange(200, dtype=torch.uint8)
    inputs, targets = data.batch(tokens, 5, 400, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (400, 5)
    assert torch.equal(inputs + 1, targets)
    assert (int(inputs[:, 0].min()), int(inputs[:, 0].max())) == (0, 194)


def test_peers_see_other_windows_and_the_same_after_a_restart() -> None:
    draws = [
        torch.randint(1 << 30, (4,), generator=data.peer_generator(seed, PeerId(peer))).tolist()
        for seed, peer in ((0, "a"), (0, "b"), (1, "a"), (0, "a"))
    ]
    assert draws[0] == draws[3]
    assert len({tuple(d) for d in draws}) == 3


@pytest.mark.parametrize(
    "config",
    [
        GptConfig(),
        GptConfig(width=32, layers=1, heads=2, context=16),
        GptConfig(width=24, layers=3, heads=3, context=9),
    ],
)
def test_parameter_count_is_the_manifests(config: GptConfig) -> None:
    assert sum(p.numel() for p in gpt.GPT(config).parameters()) == config.parameters


def test_model_is_causal_and_reproducible() -> None:
    manifest = parse_manifest(TINY)
    state = torch.get_rng_state()
    model, again = gpt.build(manifest), gpt.build(manifest)
    assert torch.equal(state, torch.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = 7
    assert torch.allclose(model(tokens)[:, :9], model(changed)[:, :9], atol=1e-6)
    other = gpt.build(parse_manifest(TINY.replace("[train]", 'init = "seed:5"\n[train]', 1)))
    assert not torch.equal(model.head.weight, other.head.weight)


def test_schedule() -> None:
    inner = InnerTable(lr=1.0, steps=100, warmup=10)
    assert loop.lr_at(0, inner) == pytest.approx(0.1)
    assert loop.lr_at(50, inner) == pytest.approx(0.5)
    assert loop.lr_at(100, inner) == loop.lr_at(10_000, inner) == pytest.approx(0.01)
    assert loop.lr_at(10_000, InnerTable(lr=1.0, steps=None)) == 1.0


def test_loss_falls_in_sixty_steps(corpus: data.Corpus, tmp_path: Path) -> None:
    manifest = parse_manifest(TINY)
    records: list[dict[str, Any]] = []
    swarm = SoloSwarm(manifest.settings())
    member = TrainingMember(swarm, manifest, corpus, records.append, anchors=tmp_path)
    before = loop.evaluate(member.model, corpus.held_out)
    member.train(evaluate_every=3)
    final = member.finish()
    assert before > math.log(256) - 0.5
    assert final["held_out"] < before - 1.5
    assert (final["round"], final["steps"], final["counted"]) == (6, 60, 6)
    assert [r["round"] for r in records if r["event"] == "round"] == [1, 2, 3, 4, 5, 6]
    assert [r["round"] for r in records if r["event"] == "evaluation"] == [3, 6, 6]
    assert [r["step"] for r in records if r["event"] == "step"] == list(range(5, 61, 5))
    assert records[0] == {"event": "state", "round": 0}
    assert final["samples_counted"] == 60 * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"round-000{round_}.safetensors" for round_ in (0, 5, 6)
    ]


@pytest.mark.parametrize(
    "federated",
    [
        'method = "scaffold_m_vr"',
        'method = "per_fedavg"',
        'method = "scaffold"\npersonal = "ditto"',
    ],
)
def test_the_recipe_trains_by_federated_methods_with_several_gradients_a_step(
    corpus: data.Corpus, federated: str
) -> None:
    text = TINY.replace("[train.outer]\nlr = 0.9\nmomentum = 0.6\n", "").replace(
        "lr = 0.01", 'optimizer = "sgd"\nlr = 0.3'
    )
    manifest = parse_manifest(f'kind = "federated"\n{text}[federated]\n{federated}\n')
    member = TrainingMember(SoloSwarm(manifest.settings()), manifest, corpus)
    before = loop.evaluate(member.model, corpus.held_out)
    member.train()
    assert member.finish()["held_out"] < before - 0.3
    assert member.attachment.round == 6


def test_a_late_member_enters_the_schedule_where_the_run_is(corpus: data.Corpus) -> None:
    manifest = parse_manifest(TINY)
    swarm = SoloSwarm(
        RunSettings(
            sync_every=10, rounds=6, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
        )
    )
    first = TrainingMember(swarm, manifest, corpus)
    first.train(steps=40)
    first.finish()
    late = TrainingMember(swarm, manifest, corpus)
    assert late.position == 40
    late.train()
    assert (late.steps, late.attachment.round) == (20, 6)
    late.finish()


def test_own_text_must_be_given() -> None:
    manifest = parse_manifest(TINY + '[data]\nsource = "local"')
    with pytest.raises(ConfigError, match="own text"):
        load_data(manifest, None)


def test_a_schedule_by_samples_follows_what_all_members_have_contributed(
    corpus: data.Corpus,
) -> None:
    """480 samples of all together are the whole cosine of 60 steps: another member's count as much
    as one's own.
    """
    manifest = parse_manifest(TINY.replace("steps = 60", "steps = 60\nsamples = 480"))
    table = RoundTable(
        ["a", "b"],
        RunSettings(
            sync_every=10, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6), deadline_s=0.0
        ),
        auto=False,
    )
    member, other = TrainingMember(table.member("a"), manifest, corpus), table.member("b")
    assert table.store is not None
    other.open(table.store.layout, lambda initial: None)
    member.train(steps=10)
    other.contribute(samples=160, write=lambda out: out.zero_())
    table.decide(["a", "b"])
    member.attachment.sync()
    member.train(steps=11)
    assert table.member("a").anchor().samples == 80 + 160
    assert (
        member.position == 60 * (240 + 3 * 8) // 480
    )  # and of the round under way: own samples, of which it had a third of the last round's
    member.train(steps=15)
    assert member.position == 60 * (240 + 3 * 40) // 480
