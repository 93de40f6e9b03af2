"""Memory of a step: by the shape alone, and counted on the meta device."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from atoll.collectives.errors import ConfigError
from atoll.node.cli import run
from atoll.node.cli.fit import COUNTED
from atoll.node.cli.needs import step_settings
from atoll.node.cli.templates import FINETUNE, with_model
from atoll.node.manifest import parse_manifest
from atoll.node.manifest.tables import ModelTable
from atoll.node.recipes.models.counting import config_of, count_step, counted_bytes
from atoll.node.recipes.models.gguf import converted
from atoll.node.recipes.models.shapes import (
    KNOWN,
    adapter_parameters,
    config_values,
    look_for_shape,
    shape_of,
    whole_parameters,
)
from atoll.node.recipes.models.sizing import StepSettings, step_bytes, sum_up

VALUES = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("method", "dtype", "checkpointing"),
    list(product(("full", "lora"), ("float32", "bfloat16"), (False, True))),
)
def test_the_shape_says_what_is_counted(method: str, dtype: str, checkpointing: bool) -> None:
    shape = shape_of(VALUES)
    assert shape is not None
    settings = StepSettings(method, dtype, checkpointing, 512, accumulated=2, rank=8)  # type: ignore[arg-type]
    said, counted = step_bytes(shape, settings), counted_bytes(config_of(VALUES), shape, settings)
    assert said.activations == pytest.approx(counted.activations, rel=0.12)
    alone = count_step(config_of(VALUES), settings)
    assert alone.weights == pytest.approx(said.weights, rel=1e-3)  # rotary buffers are small
    assert alone.trained == said.gradients


def test_gradients_of_one_micro_batch_come_as_activations_go() -> None:
    shape = shape_of(VALUES)
    assert shape is not None
    settings = StepSettings("full", "float32", length=512, accumulated=1)
    counted = counted_bytes(config_of(VALUES), shape, settings)
    backward = StepSettings("full", "float32", length=512, accumulated=1, in_backward=True)
    least = counted_bytes(config_of(VALUES), shape, backward)
    assert least.peak <= counted.peak
    assert counted.peak <= sum_up(shape, settings, counted.activations, 1 << 40).peak


def test_a_shape_is_a_configuration_of_as_many_parameters() -> None:
    shape = KNOWN["Llama-3.2-1B"]
    assert shape_of(config_values(shape)) == shape
    settings = StepSettings("lora", "bfloat16", True, 64)
    counted = count_step(config_of(config_values(shape)), settings)
    adapters = adapter_parameters(shape, 16)
    assert counted.weights == pytest.approx(2 * whole_parameters(shape) + 4 * adapters, rel=1e-5)
    assert counted.trained == 4 * adapters


def test_a_kind_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="transformers does not know this model"):
        config_of({"model_type": "nothing-of-the-kind"})
    with pytest.raises(ConfigError, match="transformers does not know this model"):
        config_of({})


def test_fit_counts_the_one_model_that_it_is_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    given = ["fit", "--machine", "cpu@1Gbit/16GB", "--model", str(tmp_path), "--json"]
    assert run(["--home", str(tmp_path / "home"), *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == COUNTED
    shape = shape_of(VALUES)
    assert shape is not None
    settings = step_settings(parse_manifest(with_model(FINETUNE, "ORG/any")))
    counted = counted_bytes(config_of(VALUES), shape, settings)
    lora = found["machines"][0]["models"][0]["methods"]["lora"]["needs"]
    assert lora["step_bytes"]["peak"] == counted.peak != step_bytes(shape, settings).peak


def test_a_gguf_file_says_its_shape(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "any.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(192)
    writer.add_feed_forward_length(512)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(2048)])
    writer.add_tensor("token_embd.weight", np.zeros((2048, 192), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = ModelTable(entry="gguf", gguf="any.gguf")
    assert look_for_shape(model, tmp_path) == shape_of(VALUES)
    file.write_bytes(file.read_bytes()[:40])
    assert look_for_shape(model, tmp_path) is None
    with pytest.raises(ConfigError, match=r"cannot read .*any\.gguf"):
        converted(file, "0" * 64, tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
