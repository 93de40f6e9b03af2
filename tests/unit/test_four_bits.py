"""QLoRA: adapters on a base that is held in four bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_kit import many_chats, tiny_model, tiny_tokenizer, write_jsonl

from atoll.node.local import LocalSwarm
from atoll.node.manifest import adapters_of, decode_manifest, parse_manifest
from atoll.node.manifest.tables import DataTable, InnerTable
from atoll.node.recipes.finetune.loop import FineTuneSettings, FineTuning
from atoll.node.recipes.finetune.preparing import prepare_data
from atoll.node.recipes.models.finding import find_model
from atoll.node.recipes.models.loading import load_model

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (pip install 'atoll[4bit]')")


def test_two_members_train_adapters_on_a_base_in_four_bits(tmp_path: Path) -> None:
    """Both hold the base in four bits; their adapters are one, and learn."""
    base = tmp_path / "tiny"
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    asked = parse_manifest(
        f'schema = 1\nname = "tiny"\n[model]\nfolder = "{base}"\nmethod = "qlora"\n'
        'dtype = "bfloat16"\n[adapters]\nbase = "shapes"\n[data]\nsource = "local"\nlength = 64\n[train]\nsync_every = 4\nrounds = 4\n'
    )
    (tmp_path / "cache").mkdir()
    manifest = find_model(asked, Path("/"), tmp_path / "cache").manifest
    model, lora = decode_manifest(manifest.encode()).model, adapters_of(manifest)
    table = DataTable(held_out=0.1, length=64)
    chats = many_chats(120)
    files = [write_jsonl(tmp_path / f"p{i}.jsonl", *chats[i * 60 : i * 60 + 60]) for i in (0, 1)]
    inner = FineTuneSettings(table, InnerTable(lr=1e-2, warmup=2, tokens_per_step=256))
    losses = dict[str, list[float]]()

    def script(swarm: Any) -> dict[str, Any]:
        loaded = load_model(base, model, lora)
        packed = [each for each in loaded.model.parameters() if each.dtype == torch.uint8]
        assert len(packed) == 14  # seven matrices of each of two layers
        mine = losses.setdefault(swarm.peer, [])
        member = FineTuning(
            loaded.model,
            loaded.tokenizer,
            prepare_data(str(files[int(swarm.peer[1:])]), loaded.tokenizer, table),
            inner,
            swarm,
            say=lambda each: mine.append(each["loss"]) if each["event"] == "step" else None,
        )
        while not member.finished():
            member.step()
            member.after_step()
        return member.finish()

    found = LocalSwarm(2, settings=manifest.settings()).run(script, step_s=1.0)
    assert {each["round"] for each in found} == {4}
    assert found[0]["anchor_digest"] == found[1]["anchor_digest"]
    assert all(mine[-1] < mine[0] for mine in losses.values())
