"""Export: the anchor of a checkpoint as files that load without atoll; a damaged checkpoint is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.collectives.cutting import cut
from atoll.collectives.digest import chunk_hash, merkle_root
from atoll.collectives.errors import ModelMismatchError, StorageError
from atoll.collectives.layout import Layout, TensorSpec, make_layout
from atoll.node.cli import run
from atoll.node.home.paths import Paths, find_paths
from atoll.node.joining.beginning import beginning
from atoll.node.manifest import SignedManifest, parse_manifest, save_run, sign_manifest
from atoll.node.recipes import gpt
from atoll.node.records.beginnings import keep_start, weights_in
from atoll.node.records.export import export_run
from atoll.node.storage.checkpoint import SavedCheckpoint, save
from atoll.security.identity import Identity

MANIFEST = parse_manifest(
    'schema = 1\nname = "tide"\n[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }\n'
)


@pytest.fixture
def stored(atoll_home: Path) -> tuple[Paths, SignedManifest, gpt.GPT]:
    """A run whose checkpoint holds the initial model as anchor, after round 7."""
    paths = find_paths(atoll_home)
    paths.ensure()
    signed = sign_manifest(MANIFEST, Identity.generate())
    folder = save_run(paths, signed)
    model = gpt.build(MANIFEST)
    layout = make_layout([(name, tuple(p.shape)) for name, p in model.named_parameters()])
    anchor = torch.cat([p.detach().flatten() for p in model.parameters()])
    momentum = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    state = anchor.numpy().tobytes() + momentum.numpy().tobytes()
    assert len(state) < 1 << 20
    saved = SavedCheckpoint(9, 7, merkle_root([chunk_hash(state)]), anchor, momentum)
    save(folder / "checkpoint", layout, saved, run_id=signed.run_id, entry_hash=bytes(32))
    return paths, signed, model


def test_the_files_load_without_atoll(
    stored: tuple[Paths, SignedManifest, gpt.GPT], tmp_path: Path
) -> None:
    paths, signed, model = stored
    done = export_run(paths, signed, tmp_path / "out")
    assert (done.round, done.parameters) == (7, sum(p.numel() for p in model.parameters()))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in weights.items()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["width"], config["heads"]) == ("atoll-gpt", 32, 2)
    origin = json.loads((tmp_path / "out" / "atoll.json").read_text())
    assert (origin["run_id"], origin["round"], origin["manifest"]["name"]) == (
        signed.run_id,
        7,
        "tide",
    )
    other = gpt.GPT(model.config)
    other.load_state_dict(weights)


def test_where_the_newest_checkpoint_is_torn_the_one_before_is_exported(
    stored: tuple[Paths, SignedManifest, gpt.GPT], tmp_path: Path
) -> None:
    """A disk that lost what it had confirmed leaves files of no length."""
    paths, signed, model = stored
    folder = paths.run_dir(signed.run_id)
    layout = make_layout([(name, tuple(p.shape)) for name, p in model.named_parameters()])
    (folder / "layout").write_bytes(msgspec.msgpack.encode(layout))
    newer = SavedCheckpoint(12, 10, bytes(32), torch.zeros(layout.numel), torch.zeros(layout.numel))
    save(folder / "checkpoint", layout, newer, run_id=signed.run_id, entry_hash=bytes(32))
    for name in ("state.safetensors", "atoll.json"):
        (folder / "checkpoint" / name).write_bytes(b"")
    assert export_run(paths, signed, tmp_path / "out").round == 7
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    (folder / "checkpoint" / "before.safetensors").write_bytes(b"")
    with pytest.raises(StorageError, match=r"state.safetensors is damaged"):
        export_run(paths, signed, tmp_path / "none")


def test_what_travels_beside_a_model_is_not_exported(atoll_home: Path, tmp_path: Path) -> None:
    paths = find_paths(atoll_home)
    paths.ensure()
    signed = sign_manifest(MANIFEST, Identity.generate())
    layout = Layout((TensorSpec("w", (3,), 0), TensorSpec("atoll.controls", (3,), 3, "sum")), 6)
    anchor, momentum = torch.arange(6.0), torch.zeros(6)
    saved = SavedCheckpoint(
        1,
        1,
        merkle_root([chunk_hash(anchor.numpy().tobytes() + momentum.numpy().tobytes())]),
        anchor,
        momentum,
    )
    save(
        save_run(paths, signed) / "checkpoint",
        layout,
        saved,
        run_id=signed.run_id,
        entry_hash=bytes(32),
    )
    done = export_run(paths, signed, tmp_path / "out")
    assert (done.parameters, done.tensors) == (3, ("w",))
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [0.0, 1.0, 2.0]


def test_an_adapter_is_written_as_peft_saves_it(atoll_home: Path, tmp_path: Path) -> None:
    paths, prefix = find_paths(atoll_home), "base_model.model.h.0.c_attn."
    paths.ensure()
    signed = sign_manifest(MANIFEST, Identity.generate())
    layout = make_layout(
        [
            (f"{prefix}lora_B.default.weight", (2, 1)),
            ("base_model.model.e.lora_embedding_A.default", (2,)),
            ("base_model.model.score.modules_to_save.default.weight", (2,)),
        ]
    )
    anchor, momentum = torch.arange(6.0), torch.zeros(6)
    root = merkle_root([chunk_hash(anchor.numpy().tobytes() + momentum.numpy().tobytes())])
    save(
        save_run(paths, signed) / "checkpoint",
        layout,
        SavedCheckpoint(1, 1, root, anchor, momentum),
        run_id=signed.run_id,
        entry_hash=bytes(32),
    )
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    saved = {
        f"{prefix}lora_A.weight": torch.full((1, 2), 9.0),  # frozen in the run: stays
        f"{prefix}lora_B.weight": torch.zeros(2, 1),
        "base_model.model.e.lora_embedding_A": torch.zeros(2),
        "base_model.model.score.weight": torch.zeros(2),
    }
    save_file(saved, begun / "adapter_model.safetensors")
    done = export_run(paths, signed, tmp_path / "out", adapter=begun)
    assert done.files == (
        "adapter_model.safetensors",
        "adapter_config.json",
        "atoll.json",
        "README.md",
    )
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: value.flatten().tolist() for name, value in written.items()} == {
        f"{prefix}lora_A.weight": [9.0, 9.0],
        f"{prefix}lora_B.weight": [0.0, 1.0],
        "base_model.model.e.lora_embedding_A": [2.0, 3.0],
        "base_model.model.score.weight": [4.0, 5.0],
    }
    assert (tmp_path / "out" / "adapter_config.json").read_text() == '{"peft_type": "LORA"}'
    with pytest.raises(StorageError, match="exists"):
        export_run(paths, signed, tmp_path / "out", adapter=begun)
    save_file({"other": torch.zeros(2)}, begun / "adapter_model.safetensors")
    with pytest.raises(ModelMismatchError, match="3 tensors differ"):
        export_run(paths, signed, tmp_path / "out", adapter=begun, force=True)


def test_files_are_not_replaced_unasked(
    stored: tuple[Paths, SignedManifest, gpt.GPT], tmp_path: Path
) -> None:
    paths, signed, _ = stored
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(StorageError, match="exists"):
        export_run(paths, signed, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"
    export_run(paths, signed, tmp_path, force=True)
    assert (tmp_path / "model.safetensors").read_bytes() != b"mine"


@pytest.mark.parametrize("damage", ["flip", "cut", "json", "layout", "missing"])
def test_damage_is_noticed(
    stored: tuple[Paths, SignedManifest, gpt.GPT],
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths, signed, _ = stored
    folder = paths.run_dir(signed.run_id) / "checkpoint"
    state, info = folder / "state.safetensors", folder / "atoll.json"
    data = bytearray(state.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        state.write_bytes(data)
    elif damage == "cut":
        state.write_bytes(data[: len(data) // 2])
    elif damage == "json":
        info.write_text("{")
    elif damage == "layout":
        info.write_text(info.read_text().replace("[32]", "[33]", 1))
    else:
        state.unlink()
    assert run(["export", "tide", str(tmp_path / "out"), "--json"]) == 74
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == "E303"
    assert not (tmp_path / "out").exists()


def test_without_a_checkpoint(atoll_home: Path, tmp_path: Path) -> None:
    paths = find_paths(atoll_home)
    paths.ensure()
    signed = sign_manifest(MANIFEST, Identity.generate())
    save_run(paths, signed)
    with pytest.raises(StorageError, match="no checkpoint"):
        export_run(paths, signed, tmp_path / "out")


def test_a_model_in_fragments_is_one_model(atoll_home: Path, tmp_path: Path) -> None:
    paths = find_paths(atoll_home)
    paths.ensure()
    text = 'schema = 1\nname = "cut"\n[model]\nentry = "local:x"\n[exchange]\nfragments = 2\n'
    signed = sign_manifest(parse_manifest(text), Identity.generate())
    save_run(paths, signed)
    parts = cut(make_layout([("a", (2, 3)), ("b", (4,)), ("c", (1,))]), 2)
    roots = list[str]()
    for number, (part, folder) in enumerate(
        zip(parts, paths.state_dirs(signed.run_id, 2), strict=True)
    ):
        anchor, momentum = torch.arange(part.numel) + 10.0 * number, torch.zeros(part.numel)
        root = merkle_root([chunk_hash(anchor.numpy().tobytes() + momentum.numpy().tobytes())])
        saved = SavedCheckpoint(9, 7 - number, root, anchor, momentum)
        save(folder / "checkpoint", part, saved, run_id=signed.run_id, entry_hash=bytes(32))
        roots.append(root.hex())
    done = export_run(paths, signed, tmp_path / "out")
    assert (done.round, done.parameters, done.tensors) == (6, 11, ("a", "b", "c"))
    assert not (tmp_path / "out" / "model.safetensors").exists()  # no script has described it
    weights = load_file(tmp_path / "out" / "partial.safetensors")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [10, 11, 12, 13],
        "c": [14],
    }
    origin = json.loads((tmp_path / "out" / "atoll.json").read_text())
    expected = [{"round": 7 - number, "state_root": root} for number, root in enumerate(roots)]
    assert (origin["round"], origin["fragments"], "state_root" in origin) == (6, expected, False)


def begun(folder: Path, layout: Layout) -> list[float]:
    """What a run of this model begins with, whose script would begin with nines."""
    values = torch.zeros(layout.numel)
    beginning(folder, layout, lambda destination: destination.fill_(9.0))(values)
    return values.tolist()


def test_a_run_begins_with_the_model_that_its_organiser_gave(tmp_path: Path) -> None:
    """All but sums, which no model has; one of other tensors, and one that is damaged, are refused."""
    layout = Layout(
        (
            TensorSpec("w", (2, 1), 0),
            TensorSpec("atoll.controls", (2,), 2, "sum"),
            TensorSpec("b", (1,), 4),
        ),
        5,
    )
    source, folder = tmp_path / "out", tmp_path / "run"
    source.mkdir()
    folder.mkdir()
    assert begun(folder, layout) == [9.0] * 5
    with pytest.raises(StorageError, match=r"cannot read .*model.safetensors"):
        keep_start(weights_in(source), folder)
    save_file(
        {"w": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([3.0])}, source / "model.safetensors"
    )
    keep_start(weights_in(source), folder)
    assert begun(folder, layout) == [1.0, 2.0, 9.0, 9.0, 3.0]
    with pytest.raises(ModelMismatchError, match="1 tensors differ, c"):
        begun(folder, Layout((TensorSpec("w", (2, 1), 0), TensorSpec("c", (1,), 2)), 3))
    with pytest.raises(ModelMismatchError, match="1 tensors differ, w"):
        begun(folder, Layout((TensorSpec("w", (2,), 0), TensorSpec("b", (1,), 2)), 3))
    (source / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(StorageError) as caught:
        keep_start(weights_in(source), folder)
    assert caught.value.code == "E303"
    assert begun(folder, layout)[0] == 1.0  # what was kept is still there
