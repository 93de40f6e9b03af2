"""What a step of the recipe takes on this machine, measured: a model of random weights trains on
random tokens, in a process of its own: ``python -m atoll.node.recipes.finetune.measuring JSON``.

The argument has ``shape``, what the model's config.json says, and all that `StepSettings` has. The
last line of stdout is JSON: bytes of host memory after the imports, with the model, and at the
peak; ``gpu``, the most of a GPU's, or null; tokens_s of the last step; the losses.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from ....collectives.errors import ConfigError
from ...manifest.tables import DataTable, InnerTable, LoraTable, ModelTable
from ..models.counting import config_of
from ..models.libraries import library
from ..models.loading import with_adapters
from .loop import FineTuneSettings, FineTuning
from .preparing import DataSummary, PreparedData, TokenStore
from .rendering import RenderedText

STEPS = 2  # the first makes the optimizer's state, the second has it


def resident(name: str) -> int | None:
    """Bytes that the system says of this process: VmRSS, VmHWM; None where it says none."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _settle() -> None:
    """Give back what was freed, and begin the high-water mark anew, where the system can."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError):
        pass


def _random_model(given: dict[str, Any], device: str) -> Any:
    """The model as `load_model` has it."""
    transformers = library("transformers")
    if given["method"] == "qlora":
        raise ConfigError(
            "a model in four bits is made of files, and nothing is loaded here",
            key="--measure",
            hint='Measure method = "lora": what is counted of four bits is said without --measure.',
        )
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(given["shape"]), dtype=getattr(torch, given["dtype"])
    )
    if given["method"] == "lora":
        table = ModelTable(entry="folder", folder="random", method="lora")
        model = with_adapters(model, table, LoraTable(rank=given["rank"]))
    return model.to(device)


def _random_data(vocabulary: int, length: int, documents: int) -> PreparedData:
    """Documents of the full length, all of it learned."""
    store, generator = TokenStore(), torch.Generator().manual_seed(1)
    for _ in range(documents):
        ids = torch.randint(vocabulary, (length,), generator=generator).tolist()
        store.add(RenderedText(ids, [True] * length))
    return PreparedData(store, TokenStore(), DataSummary(), "")


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Train so, and say what it took. Raises ConfigError."""
    warnings.simplefilter("ignore")
    library("peft")
    library(f"transformers.models.{given['shape']['model_type']}")
    _settle()
    imports, gpu = resident("VmRSS"), torch.cuda.is_available()
    model = _random_model(given, "cuda" if gpu else "cpu")
    length, rows = given["length"], given["micro_batch"]
    tokens = length * rows * given["accumulated"]
    inner = InnerTable(
        lr=1e-5,
        warmup=0,
        clip=0.0 if given["in_backward"] else 1.0,
        optimizer=given["optimizer"],
        in_backward=given["in_backward"],
        tokens_per_step=tokens,
        micro_batch=rows,
    )
    table = DataTable(source="local", length=length, loss="all", held_out=0.0)
    settings = FineTuneSettings(table, inner, bf16=gpu, checkpointing=given["checkpointing"])
    documents = (STEPS + 1) * rows * given["accumulated"]
    data = _random_data(given["shape"]["vocab_size"], length, documents)
    _settle()
    made = resident("VmRSS")
    training = FineTuning(model, None, data, settings)
    losses, took_s = list[float](), 0.0
    for _ in range(STEPS):
        began_s = time.perf_counter()
        losses.append(training.step())
        took_s = time.perf_counter() - began_s
    return {
        "imports": imports,
        "made": made,
        "peak": resident("VmHWM"),
        "gpu": int(torch.cuda.max_memory_allocated()) if gpu else None,
        "tokens_s": tokens / took_s,
        "losses": losses,
    }


def main() -> None:
    """Measure and print."""
    print(json.dumps(measure(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
