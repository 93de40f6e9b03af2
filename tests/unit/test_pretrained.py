"""Pretrained models: found and bound by a founder, compared by a member, loaded, exported."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import random_models
import torch
from exporting_kit import KeptSwarm
from fake_hub import FakeHub
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from atoll.collectives.errors import AtollError, ConfigError, NetworkError, StorageError
from atoll.collectives.swarm import RunSettings
from atoll.node.bases.own import fetched_folder, read_own, unchanged
from atoll.node.home.paths import Paths, find_paths
from atoll.node.manifest import (
    Manifest,
    SignedManifest,
    adapters_of,
    decode_manifest,
    parse_manifest,
    sign_manifest,
)
from atoll.node.manifest.pretrained import travels
from atoll.node.recipes.models.bringing import base_folder, bring_model
from atoll.node.recipes.models.chatting import open_folder
from atoll.node.recipes.models.files import WEIGHTS, sha256_of
from atoll.node.recipes.models.finding import FoundModel, find_model
from atoll.node.recipes.models.loading import LoadedModel, draw_factors, load_model
from atoll.node.recipes.models.merging import merge_adapter
from atoll.optim import attach
from atoll.security.identity import Identity

peft: Any = pytest.importorskip("peft", reason="peft is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
huggingface_hub: Any = pytest.importorskip("huggingface_hub", reason="no client of the hub")
constants: Any = huggingface_hub.constants
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

NAME = "org/tiny"
IDS = torch.arange(5, 37).view(2, 16)
FEW = ("llama_tied", "qwen3_moe", "gpt_neox")
"""Architectures of the default tests: a tied head, experts, a head of another name on disk."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of random models, by architecture."""
    top = tmp_path_factory.mktemp("models")
    for each in FEW:
        random_models.write_model(top / each, each)
    return top


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A model's folder of one's own."""
    return shutil.copytree(models / "llama_tied", tmp_path / "tiny")


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub({NAME: folder}) as hub:
        use_cache(monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield hub


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on this is the user's cache: another machine, as far as the client can tell."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))


def settings(where: str, method: str = "lora", more: str = "") -> Manifest:
    """Those of a run of this model."""
    return parse_manifest(
        f'schema = 1\nname = "tiny"\n[model]\n{where}\nmethod = "{method}"\n{more}'
        '[data]\nsource = "local"\nlength = 64\n[train]\nsync_every = 2\nrounds = 3\n'
    )


def found_at(paths: Paths, manifest: Manifest, near: Path = Path("/")) -> FoundModel:
    paths.ensure()
    return find_model(manifest, near, paths.cache_dir)


def signed(found: FoundModel) -> SignedManifest:
    return sign_manifest(found.manifest, Identity.generate())


def bring(home: Path, found: FoundModel, given: Path | None = None) -> Path:
    """As a member with this home does, of what the founder has signed."""
    paths = find_paths(home)
    paths.ensure()
    manifest = decode_manifest(found.manifest.encode())
    return bring_model(paths, str(manifest.run_id), manifest.model, given)


# ---- what a manifest says


def test_a_pretrained_model_is_bound_and_names_no_path(folder: Path, tmp_path: Path) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    model = decode_manifest(found.manifest.encode()).model
    assert str(tmp_path) not in repr(found.manifest)
    assert (model.entry, model.folder, model.dtype) == ("folder", "tiny", "float32")
    assert model.base is not None
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= model.base.files.keys()
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.base.parameters == sum(p.numel() for p in whole.parameters())
    loaded = load_model(folder, model, adapters_of(found.manifest))
    trained = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    assert model.parameters == trained < model.base.parameters


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('hub = "a/b"\nfolder = "c"', "$.model.folder"),
        ('entry = "hub"', "$.model.entry"),
        ('entry = "builtin:gpt"\nhub = "a/b"', "$.model.hub"),
        ('entry = "local:x"\nmethod = "lora"', "$.model.method"),
        ('hub = "a/b"\nmethod = "qlora"', "$.adapters.base"),
        ('hub = "a/b"\n[lora]\nrank = 4', "$.model.method"),
        ('hub = "a/b"\ndtype = "float16"', "$.model.dtype"),
        ('entry = "local:x"\n[lora]\nrank = 4', "$.lora.rank"),
        ('hub = "a/b"\nconfig = { width = 1 }', "$.model.config"),
    ],
)
def test_settings_that_do_not_go_together(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(f'schema = 1\nname = "x"\n[data]\nsource = "local"\n[model]\n{text}\n')
    assert caught.value.key == key
    assert caught.value.hint


def test_a_manifest_of_somebody_else_names_no_file_here(folder: Path, tmp_path: Path) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    model = msgspec.structs.replace(found.manifest.model, folder="../x")
    with pytest.raises(ConfigError, match="a path"):
        decode_manifest(msgspec.structs.replace(found.manifest, model=model).encode())
    with pytest.raises(ConfigError, match="which files its model is made of"):
        decode_manifest(settings('hub = "a/b"').encode())


# ---- the hub


def test_a_branch_is_a_commit_once_and_weights_are_not_fetched_for_it(
    hub: FakeHub, tmp_path: Path
) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))
    model = found.manifest.model
    assert model.revision == hub.commits[NAME]
    assert model.base is not None
    assert (model.base.licence, model.base.gated) == ("apache-2.0", False)
    assert not [path for _, path in hub.asked if path.endswith(".safetensors")]
    first = bring(tmp_path / "member", found)
    assert sorted(each.name for each in first.iterdir()) == sorted(model.base.files)
    asked = len(hub.asked)
    assert bring(tmp_path / "member", found) == first
    assert len(hub.asked) == asked  # what is in the cache is not asked for again


def test_without_a_network_the_users_cache_is_enough(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))
    bring(tmp_path / "home", found)
    huggingface_hub.snapshot_download(NAME)  # as transformers does it: main is known, too
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))
    assert again.manifest.model.revision == hub.commits[NAME]
    before, now = found.manifest.model.base, again.manifest.model.base
    assert before is not None
    assert now is not None
    assert (now.files, now.size, now.tokenizer) == (before.files, before.size, before.tokenizer)
    assert (now.licence, now.gated) == ("", None)  # nobody could be asked
    bring(tmp_path / "other", found)
    use_cache(monkeypatch, tmp_path / "empty")
    with pytest.raises(NetworkError, match="not in this machine's cache"):
        bring(tmp_path / "third", found)


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_hub_that_nobody_answers_for(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not offline by a setting: there is no network."""
    paths, run = find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"')
    found = found_at(paths, run)
    bring(tmp_path / "home", found)
    huggingface_hub.snapshot_download(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert found_at(paths, run).manifest.model.revision == hub.commits[NAME]  # of the user's cache
    use_cache(monkeypatch, tmp_path / "empty")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": NAME}))
    for ask, way in (
        (lambda: found_at(paths, run), 'folder = "DIR" in [model]'),
        (lambda: bring(tmp_path / "third", found), "--model DIR"),
        (lambda: open_folder(adapter, paths), "atoll export RUN DIR --merge"),
    ):
        with pytest.raises(NetworkError, match="and the hub cannot be asked") as caught:
            ask()
        assert caught.value.code == "E415"
        assert "refused" in caught.value.why
        assert way in caught.value.hint


def test_a_cache_that_cannot_be_written_is_named(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    use_cache(monkeypatch, tmp_path / "file" / "cache")
    with pytest.raises(StorageError, match=f"cannot keep {NAME} in its cache"):
        found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))


def test_a_gated_model_without_a_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    with pytest.raises(ConfigError, match=f"{NAME} is gated") as caught:
        found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))
    assert "hf auth login" in caught.value.hint
    hub.gated.clear()
    found = found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))
    hub.gated.add(NAME)
    with pytest.raises(ConfigError, match="is gated"):
        bring(tmp_path / "member", found)


def test_names_that_the_hub_does_not_have(hub: FakeHub, tmp_path: Path) -> None:
    paths = find_paths(tmp_path / "home")
    with pytest.raises(ConfigError, match="no model org/none") as caught:
        found_at(paths, settings('hub = "org/none"'))
    assert caught.value.key == "$.model.hub"
    with pytest.raises(ConfigError, match="no revision 'v9'") as caught:
        found_at(paths, settings(f'hub = "{NAME}"', more='revision = "v9"\n'))
    assert caught.value.key == "$.model.revision"


# ---- from members


class Members:
    """Have the files of ``folder``, or none; each call is counted."""

    def __init__(self, folder: Path | None, home: Path, found: FoundModel) -> None:
        base = found.manifest.model.base
        assert base is not None
        self.folder, self.asked, self.base = folder, 0, base
        self.target = fetched_folder(find_paths(home).cache_dir, base)

    def __call__(self) -> None:
        self.asked += 1
        if self.folder is None:
            raise NetworkError("the base cannot be had from members: nobody", code="E415")
        self.target.mkdir(parents=True)
        for name in self.base.files:
            shutil.copyfile(self.folder / name, self.target / name)


def bring_from(members: Members, home: Path, found: FoundModel, given: Path | None = None) -> Path:
    paths = find_paths(home)
    paths.ensure()
    manifest = decode_manifest(found.manifest.encode())
    return bring_model(paths, str(manifest.run_id), manifest.model, given, fetch=members)


def test_what_members_sent_is_compared_linked_and_remembered(folder: Path, tmp_path: Path) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    base = found.manifest.model.base
    assert base is not None
    assert sum(base.sizes.values()) == base.size
    members = Members(folder, tmp_path / "member", found)
    made = bring_from(members, tmp_path / "member", found)
    assert {each.resolve().parent for each in made.iterdir()} == {members.target.resolve()}
    assert bring_from(members, tmp_path / "member", found) == made
    assert members.asked == 1
    own = read_own(made.parent)
    assert own.named.keys() == base.files.keys()
    assert all(unchanged(own, name) for name in base.files)
    # another run with the same base has it, too
    other = msgspec.structs.replace(found.manifest, name="other")
    again = FoundModel(other, None)
    assert bring_from(members, tmp_path / "member", again) != made
    assert members.asked == 1
    wrong = members.target / "model.safetensors"
    wrong.write_bytes(bytes(wrong.stat().st_size))
    assert "model.safetensors differs" in str(refused(tmp_path / "member", found, None))


def test_members_are_asked_before_the_hub_and_after_what_is_here(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))
    use = Members(folder, tmp_path / "a", found)
    hub.asked.clear()
    bring_from(use, tmp_path / "a", found)
    assert use.asked == 1
    assert not [path for _, path in hub.asked if path.endswith(".safetensors")]
    given = Members(folder, tmp_path / "b", found)
    bring_from(given, tmp_path / "b", found, folder)
    assert given.asked == 0
    nobody = Members(None, tmp_path / "c", found)
    bring_from(nobody, tmp_path / "c", found)  # then the hub is
    assert nobody.asked == 1
    assert [path for _, path in hub.asked if path.endswith(".safetensors")]
    cached = Members(folder, tmp_path / "d", found)
    bring_from(cached, tmp_path / "d", found)
    assert cached.asked == 0


def test_where_no_member_has_it_and_there_is_no_hub(folder: Path, tmp_path: Path) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    with pytest.raises(NetworkError, match="cannot be had from members"):
        bring_from(Members(None, tmp_path / "a", found), tmp_path / "a", found)


def test_a_gated_base_is_never_asked_of_members(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the founder was told, or as this machine is."""
    found = found_at(find_paths(tmp_path / "home"), settings(f'hub = "{NAME}"'))
    base = found.manifest.model.base
    assert base is not None
    use_cache(monkeypatch, tmp_path / "empty")
    bound = msgspec.structs.replace(base, gated=True)
    model = msgspec.structs.replace(found.manifest.model, base=bound)
    gated = FoundModel(msgspec.structs.replace(found.manifest, model=model), None)
    members = Members(folder, tmp_path / "a", gated)
    made = bring_from(members, tmp_path / "a", gated)  # from the hub, by this machine's login
    assert members.asked == 0
    assert not travels(decode_manifest(gated.manifest.encode()).model)
    use_cache(monkeypatch, tmp_path / "empty again")
    hub.gated.add(NAME)
    members = Members(folder, tmp_path / "b", found)
    with pytest.raises(ConfigError, match="is gated"):
        bring_from(members, tmp_path / "b", found)
    assert members.asked == 0
    monkeypatch.setenv("HF_TOKEN", "hf_a")
    made = bring_from(members, tmp_path / "b", found)
    assert members.asked == 0
    assert read_own(made.parent).gated  # and so it is not handed on


# ---- what is refused by name


def refused(home: Path, found: FoundModel, given: Path | None) -> AtollError:
    with pytest.raises(AtollError) as caught:
        bring(home, found, given)
    assert caught.value.code == "E415"
    return caught.value


def test_another_revision_of_the_base(folder: Path, models: Path, tmp_path: Path) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    other = random_models.write_model(tmp_path / "other", "llama_tied", seed=8)
    error = refused(tmp_path / "member", found, other)
    assert "model.safetensors differs" in str(error)
    error = refused(tmp_path / "member", found, None)
    assert "not known on this machine" in str(error)
    assert bring(tmp_path / "member", found, folder)
    assert bring(tmp_path / "member", found)  # it is remembered
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert "model.safetensors differs" in str(refused(tmp_path / "member", found, None))


def test_another_tokenizer_file(folder: Path, tmp_path: Path) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    other = shutil.copytree(folder, tmp_path / "other")
    random_models.write_tokenizer(other, words="entirely other words make other merges ")
    assert "tokenizer.json" in str(refused(tmp_path / "member", found, other))


@pytest.mark.parametrize("what", ["ids-of-a-text", "chat-template", "special-tokens"])
def test_libraries_that_read_equal_files_otherwise(what: str, folder: Path, tmp_path: Path) -> None:
    """As if the founder's had given other ids for the probe's text."""
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    base = found.manifest.model.base
    assert base is not None
    base.tokenizer[what] = "0" * 64
    error = refused(tmp_path / "member", found, folder)
    assert f"other {what.replace('-', ' ')}" in str(error)
    assert f"transformers {transformers.__version__}" in error.why


def test_another_quantisation_of_the_model(folder: Path, tmp_path: Path) -> None:
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    mine, other = tmp_path / "tiny.Q4_1.gguf", tmp_path / "tiny.Q8_0.gguf"
    mine.write_bytes(b"GGUF in four bits")
    other.write_bytes(b"GGUF in eight bits")
    replace, model = msgspec.structs.replace, found.manifest.model
    assert model.base is not None
    size = mine.stat().st_size
    base = replace(
        model.base, files={mine.name: sha256_of(mine)}, sizes={mine.name: size}, size=size
    )
    model = replace(model, entry="gguf", folder=None, gguf=mine.name, base=base)
    found = FoundModel(replace(found.manifest, model=model), None)
    assert "tiny.Q4_1.gguf differs" in str(refused(tmp_path / "member", found, other))
    assert "not known on this machine" in str(refused(tmp_path / "member", found, None))
    assert "transformers cannot read" in str(refused(tmp_path / "member", found, mine))


def test_a_library_that_splits_the_same_text_otherwise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version of transformers does with equal files."""
    found = found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))
    load = transformers.AutoTokenizer.from_pretrained

    def other(*given: Any, **more: Any) -> Any:
        tokenizer = load(*given, **more)
        spaced = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.backend_tokenizer.pre_tokenizer = spaced
        return tokenizer

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", other)
    assert "the run's: other ids of a text" in str(refused(tmp_path / "member", found, folder))


def test_pickles_and_code_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    paths, text = find_paths(tmp_path / "home"), f'folder = "{folder}"'
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"auto_map": {"AutoModel": "m.M"}}))
    with pytest.raises(ConfigError, match="Python of its own"):
        found_at(paths, settings(text))
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"weights in pytorch_model\.bin") as caught:
        found_at(paths, settings(text))
    assert "may run code" in caught.value.why


def test_what_is_no_whole_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    paths, text = find_paths(tmp_path / "home"), f'folder = "{folder}"'
    about = json.loads((folder / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps(about | packed))
    with pytest.raises(ConfigError, match=r"are quantised \(bitsandbytes\)") as caught:
        found_at(paths, settings(text))
    assert 'method = "qlora"' in caught.value.hint
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter"):
        found_at(paths, settings(text))


def test_weights_that_the_files_lack_are_not_drawn(folder: Path) -> None:
    table, file = settings('hub = "a/b"').model, folder / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    own = weights.pop(name)
    save_file(weights, file, {"format": "pt"})
    for load in (lambda: load_model(folder, table, None), lambda: opened(folder)):
        with pytest.raises(ConfigError, match=f"lack 1 of its weights: {name}"):
            load()
    save_file(weights | {name: own, "tower.weight": own.clone()}, file, {"format": "pt"})
    (note,) = load_model(folder, table, None).notes
    assert note.startswith("1 weights of the files are not of this model")
    assert note.endswith("tower.weight")


def opened(folder: Path) -> Any:
    return open_folder(folder, find_paths(folder.parent / "home"))


@pytest.mark.parametrize("damage", ["cut", "empty", "value", "zero"])
def test_files_that_no_library_reads_are_named(damage: str, folder: Path, tmp_path: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage in ("cut", "empty"):
        weights.write_bytes(weights.read_bytes()[:-100] if damage == "cut" else b"")
    else:
        wrong = {"hidden_size": "32"} if damage == "value" else {"num_attention_heads": 0}
        config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    table = settings(f'folder = "{folder}"')

    def load() -> None:
        load_model(folder, found_at(find_paths(tmp_path / "home"), table).manifest.model, None)

    with pytest.raises(ConfigError, match=r"transformers (cannot load|does not know)") as caught:
        load()
    assert caught.value.code == "E415"


def test_samples_longer_than_the_positions_that_a_model_has(tmp_path: Path) -> None:
    folder = random_models.write_model(tmp_path / "gpt2", "gpt2")
    long = parse_manifest(
        f'schema = 1\nname = "x"\n[model]\nfolder = "{folder}"\n'
        '[data]\nsource = "local"\nlength = 129\n'
    )
    with pytest.raises(ConfigError, match="up to 129 tokens, and the model has 128") as caught:
        found_at(find_paths(tmp_path / "home"), long)
    assert caught.value.key == "$.data.length"


def test_a_package_that_fetches_code_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text("raise AssertionError('never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the package kernels is installed"):
        found_at(find_paths(tmp_path / "home"), settings(f'folder = "{folder}"'))


# ---- loading, training, going out


def loaded(swarm: KeptSwarm, found: FoundModel) -> LoadedModel:
    manifest = decode_manifest(swarm.signed.manifest)
    base = bring_model(swarm.paths, swarm.run_id, manifest.model, found.source)
    return load_model(base, manifest.model, adapters_of(manifest))


def test_adapters_begin_alike_on_every_type(models: Path) -> None:
    table = settings('hub = "a/b"')
    drawn = list[dict[str, torch.Tensor]]()
    for dtype in ("float32", "bfloat16"):
        model = settings('hub = "a/b"', more=f'dtype = "{dtype}"\n').model
        found = load_model(models / "llama_tied", model, adapters_of(table)).model
        drawn.append({n: p.float() for n, p in found.named_parameters() if "lora_" in n})
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    factors = [tensor for name, tensor in drawn[0].items() if "lora_A" in name]
    bound = 1 / factors[0].shape[1] ** 0.5  # PEFT's own distribution
    assert all(float(each.abs().max()) <= bound for each in factors[:1])
    assert 0.4 * bound < float(torch.cat([f.flatten() for f in factors[:1]]).abs().mean()) < bound
    more = settings('hub = "a/b"', more='[lora]\ntargets = ["embed_tokens"]\n')
    two = [load_model(models / "llama_tied", more.model, adapters_of(more)).model for _ in "ab"]
    begun = [{n: p for n, p in each.named_parameters() if p.requires_grad} for each in two]
    assert all(torch.equal(value, begun[1][name]) for name, value in begun[0].items())
    assert {bool(value.any()) for value in begun[0].values()} == {False, True}
    other = load_model(models / "llama_tied", table.model, adapters_of(table)).model
    draw_factors(other, "seed:1")
    assert not torch.equal(
        next(p for n, p in other.named_parameters() if "lora_A" in n).float(), factors[0]
    )


def test_the_router_of_experts_has_no_adapter(models: Path) -> None:
    table = settings('hub = "a/b"')
    found = load_model(models / "qwen3_moe", table.model, adapters_of(table)).model
    names = [name for name, each in found.named_parameters() if each.requires_grad]
    assert {name.split(".")[6] for name in names if ".mlp." in name} == {"experts"}


def trained_and_exported(architecture: str, method: str, source: Path, home: Path) -> None:
    """Three rounds, exported; the same logits bit for bit by the libraries alone."""
    paths = find_paths(home)
    found = found_at(paths, settings(f'folder = "{source}"', method))
    rounds = RunSettings(sync_every=2, rounds=3)
    swarm = KeptSwarm(home, "tiny", rounds, signed=signed(found))
    mine = loaded(swarm, found)
    model: Any = mine.model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sync = attach(model, optimizer, swarm, batch_size=2, tokenizer=mine.tokenizer)
    assert sync._flat.numel == found.manifest.model.parameters
    while not sync.done:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    swarm.checkpoint(sync._flat.layout)
    with sync.evaluate_anchor(), torch.no_grad():
        wanted = model.eval()(input_ids=IDS, use_cache=False).logits
    sync.detach()
    out = home / "out"
    assert swarm.export(out).missing == ()
    assert (out / "chat_template.jinja").read_text() == random_models.TEMPLATE
    assert (out / "generation_config.json").exists()
    load = transformers.AutoModelForCausalLM.from_pretrained
    if method == "full":
        assert torch.equal(logits(load(out)), wanted)
        if getattr(model.config, "tie_word_embeddings", False):  # one tensor of two names
            load(source).save_pretrained(home / "again")
            assert load_file(out / WEIGHTS).keys() == load_file(home / "again" / WEIGHTS).keys()
        return
    assert torch.equal(logits(peft.PeftModel.from_pretrained(load(source), out)), wanted)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        source.name
    )
    base = base_folder(paths, swarm.run_id)
    assert base is not None
    assert merge_adapter(base, out, home / "merged", None) < 1e-5
    with pytest.raises(StorageError, match="holds a whole model"):
        swarm.export(home / "merged", force=True)  # transformers would put the adapter over it
    shutil.copytree(out, home / "both")
    merge_adapter(base, out, home / "both", None)
    assert not list((home / "both").glob("adapter*"))
    modes = {file.suffix: file.stat().st_mode for file in (home / "merged").iterdir()}
    assert modes[".safetensors"] == modes[".json"]
    assert float((logits(load(home / "merged")) - wanted).abs().max() / wanted.abs().max()) < 1e-5


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("architecture", FEW)
def test_what_was_trained_is_what_is_loaded_elsewhere(
    architecture: str, method: str, models: Path, atoll_home: Path
) -> None:
    trained_and_exported(architecture, method, models / architecture, atoll_home)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("architecture", sorted(random_models.ARCHITECTURES.keys() - set(FEW)))
def test_every_architecture_is_trained_and_loaded_elsewhere(
    architecture: str, method: str, atoll_home: Path, tmp_path: Path
) -> None:
    source = random_models.write_model(tmp_path / architecture, architecture)
    trained_and_exported(architecture, method, source, atoll_home)


def test_a_generation_config_that_could_not_be_saved(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    found = load_model(folder, settings('hub = "a/b"').model, None)
    assert "do_sample false: true now" in found.notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.model.generation_config.validate(strict=True)  # type: ignore[operator, union-attr]


def test_a_generation_config_that_nothing_saves_keeps_its_tokens(folder: Path) -> None:
    given = {"eos_token_id": [3, 0], "num_return_sequences": 3}
    (folder / "generation_config.json").write_text(json.dumps(given))
    found = load_model(folder, settings('hub = "a/b"').model, None)
    assert found.notes[0].startswith("generation_config.json cannot be read, so only its token ids")
    model: Any = found.model
    model.generation_config.save_pretrained(folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [3, 0]


def test_a_folder_says_where_its_templates_answers_end(folder: Path) -> None:
    """As with a base model whose tokenizer has a template: others read it when they serve it."""
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    found = load_model(folder, settings('hub = "a/b"').model, None)
    model: Any = found.model
    assert model.generation_config.eos_token_id == [7, 0]
    assert found.notes == (
        "answers end with <|end|> too, which generation_config.json did not say",
    )
