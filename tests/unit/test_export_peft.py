"""What PEFT saves is what is exported: asked in the script, whatever the kind. Needs peft, which is
no dependency; by names alone: `test_export_model`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import exported_models
import pytest
import torch
from exporting_kit import KeptSwarm, trained
from safetensors.torch import load_file

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.node.records.beginnings import keep_start, weights_in
from atoll.optim import SoloSwarm, attach

peft: Any = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' own
TASK = {"task_type": "CAUSAL_LM"}
TARGETS = {"target_modules": ["q_proj", "v_proj"], **TASK}
LORA = {"r": 2, "lora_alpha": 4, **TARGETS}
PROMPTS = {"num_virtual_tokens": 3, **TASK}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", LORA),
    "dora": ("LoraConfig", {**LORA, "use_dora": True}),
    "tokens": ("LoraConfig", {**LORA, "trainable_token_indices": [1, 2]}),
    "modules": ("LoraConfig", {**LORA, "modules_to_save": ["norm", "lm_head"]}),
    "embedding": ("LoraConfig", {**LORA, "target_modules": ["embed_tokens", "q_proj"]}),
    "ranks": ("LoraConfig", {**LORA, "rank_pattern": {"v_proj": 1}}),
    "ia3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"], **TASK},
    ),
    "prompt": ("PromptTuningConfig", PROMPTS),
    "prefix": ("PrefixTuningConfig", PROMPTS),
    "prefix_projection": (
        "PrefixTuningConfig",
        {**PROMPTS, "prefix_projection": True, "encoder_hidden_size": 8},
    ),
    "p_tuning": ("PromptEncoderConfig", {**PROMPTS, "encoder_hidden_size": 8}),
    "vera": ("VeraConfig", {"r": 2, **TARGETS}),
    "loha": ("LoHaConfig", {"r": 2, **TARGETS}),
    "lokr": ("LoKrConfig", {"r": 2, **TARGETS}),
    "adalora": ("AdaLoraConfig", {"init_r": 3, "target_r": 2, "total_step": 100, **TARGETS}),
    "ln_tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm"], **TASK}),
    "vblora": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 8, **TARGETS}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 8, **TARGETS}),
}


def base() -> Any:
    """The base, the same each time."""
    torch.manual_seed(7)
    return exported_models.library("Llama")()


def adapted(kind: str, **named: Any) -> Any:
    """The base with an adapter of this kind."""
    config, settings = KINDS[kind]
    torch.manual_seed(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(base(), getattr(peft, config)(**settings), **named)


def train(model: Any, swarm: KeptSwarm) -> torch.Tensor:
    """All rounds of the run; the logits of its anchor."""
    ids = exported_models.IDS
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sync = attach(model, optimizer, swarm, batch_size=1)
    while not sync.done:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    swarm.checkpoint(sync._flat.layout)
    with sync.evaluate_anchor(), torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    sync.detach()
    return logits


def reloaded(line: str) -> torch.Tensor:
    """The logits of a fresh base with the adapter that the printed line loads."""
    names = {"model": base()}
    exported_models.RUN(compile(line, "printed", "single"), names)  # as it stands
    with torch.no_grad():
        return names["model"].eval()(input_ids=exported_models.IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_exported(kind: str, atoll_home: Path, tmp_path: Path) -> None:
    model = adapted(kind)
    swarm = KeptSwarm(atoll_home, kind.replace("_", "-"), RunSettings(sync_every=1, rounds=3))
    wanted = train(model, swarm)
    done = swarm.export(tmp_path / "out")
    assert (done.round, done.missing) == (3, ())
    assert done.files == (
        "adapter_model.safetensors",
        "adapter_config.json",
        "generation_config.json",
        "atoll.json",
        "README.md",
    )
    assert torch.equal(reloaded(done.load), wanted)
    model.save_pretrained(tmp_path / "by_peft")
    mine, its = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "by_peft")
    )
    assert {n: (t.shape, t.dtype) for n, t in mine.items()} == {
        n: (t.shape, t.dtype) for n, t in its.items()
    }


def test_an_adapter_of_another_name(atoll_home: Path, tmp_path: Path) -> None:
    swarm = KeptSwarm(atoll_home, "named", RunSettings(sync_every=1, rounds=2))
    wanted = train(adapted("lora", adapter_name="hospital"), swarm)
    assert torch.equal(reloaded(swarm.export(tmp_path / "out").load), wanted)


def test_adapters_that_the_library_holds_itself(atoll_home: Path, tmp_path: Path) -> None:
    """``model.add_adapter``, without a PeftModel around."""
    model = base()
    torch.manual_seed(8)
    model.add_adapter(peft.LoraConfig(**LORA))
    swarm = KeptSwarm(atoll_home, "inside", RunSettings(sync_every=1, rounds=2))
    wanted = train(model, swarm)
    assert torch.equal(reloaded(swarm.export(tmp_path / "out").load), wanted)


@pytest.mark.parametrize("kind", ["lora", "ia3", "prompt", "modules", "vblora"])
def test_a_run_goes_on_from_an_exported_adapter(
    kind: str, atoll_home: Path, tmp_path: Path
) -> None:
    from atoll.node.joining.beginning import beginning

    first = KeptSwarm(atoll_home, "first", RunSettings(sync_every=1, rounds=2))
    train(adapted(kind), first)
    first.export(tmp_path / "out")
    second = KeptSwarm(atoll_home, "second", RunSettings(sync_every=1, rounds=1))
    keep_start(weights_in(tmp_path / "out"), second.folder)
    sync = attach(adapted(kind), None, second)
    begun, anchor = torch.zeros(sync._flat.numel), torch.zeros(sync._flat.numel)
    beginning(second.folder, sync._flat.layout, lambda destination: None)(begun)
    first.anchor().copy_into(anchor)
    assert torch.equal(begun, anchor)


def test_what_peft_would_lose_is_refused_before_training() -> None:
    model = adapted("lora")
    for name, parameter in model.named_parameters():
        if name.endswith("model.norm.weight"):
            parameter.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"does not save 1 .*model.norm.weight") as caught:
        attach(model, None, SoloSwarm())
    assert "modules_to_save" in str(caught.value.hint)
    attach(adapted("modules"), None, SoloSwarm()).detach()  # as the hint says
    both = adapted("lora")
    both.add_adapter("other", peft.LoraConfig(**LORA))
    both.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match=r"does not save 8 .*other"):
        attach(both, None, SoloSwarm())


def test_running_statistics_are_exported_as_peft_advises(atoll_home: Path, tmp_path: Path) -> None:
    """Of layers that are not in modules_to_save it loses them, and that is said before training;
    by the hint's words they come out.
    """

    def build(**settings: Any) -> Any:
        torch.manual_seed(7)
        base = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], **settings))

    with pytest.raises(ConfigError, match=r"does not save 2 .*1.running_mean") as caught:
        attach(build(), None, SoloSwarm())
    assert str(caught.value.hint).startswith("Name their layers in modules_to_save")
    swarm, wanted = trained(atoll_home, "norm", build(modules_to_save=["1"]), exported_models.ROWS)
    done = swarm.export(tmp_path / "out")
    assert done.missing == ()
    names = {"model": build().unload()}
    exported_models.RUN(compile(done.load, "printed", "single"), names)
    with torch.no_grad():
        assert torch.equal(names["model"].eval()(exported_models.ROWS), wanted)
