"""An adapter merged into its base: a folder that from_pretrained loads without peft."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch

from ....collectives.errors import ConfigError
from ...home.refusals import storage_error
from ...records.sharding import LARGEST, remove_adapter
from .libraries import library
from .loading import add_stops, mend_generation, read_whole
from .tokens import PROBE, load_tokenizer

NEARLY = 1e-4  # relative difference of logits that rounding in float32 explains, and more
PROBED = 128  # tokens of the text whose logits are compared


def merge_adapter(
    base: Path,
    adapter: Path,
    folder: Path,
    dtype: str | None,
    source: str = "",
    largest: int = LARGEST,
) -> float:
    """Write the whole model into ``folder``: the adapter is merged in float32, the sum converted
    once, to ``dtype`` or to what the base has. ``source``: the base's name, for config.json.
    ``largest``: bytes of a file of weights. Returns by how much its logits in float32 differ from
    those of base and adapter, relative.

    Raises ConfigError E415 where they differ by more than rounding, and nothing is written then;
    StorageError.
    """
    transformers, peft = library("transformers"), library("peft")
    tokenizer = load_tokenizer(adapter if (adapter / "tokenizer_config.json").exists() else base)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.from_pretrained(
            str(base), trust_remote_code=False, local_files_only=True
        )
        own, most = config.dtype, getattr(config, "max_position_embeddings", None) or PROBED
        ids = torch.tensor([tokenizer(PROBE)["input_ids"][: min(PROBED, most)]])
        model, _ = read_whole(base, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
        before = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        after = merged(input_ids=ids).logits
    difference = float((after - before).abs().max() / before.abs().max())
    if not difference <= NEARLY:
        raise ConfigError(
            f"the merged model's logits differ by {difference:.2g} of their size",
            code="E415",
            why="More than rounding explains: this adapter cannot be merged so.",
            hint="Leave --merge out: the adapter's folder is exact.",
        )
    kind = getattr(torch, dtype) if dtype is not None else own or torch.float32
    merged.to(kind)
    merged.config.dtype = kind
    merged.config._name_or_path = source
    mend_generation(merged)
    add_stops(merged, tokenizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merged.save_pretrained(folder, max_shard_size=largest)
        remove_adapter(folder)
        readable = (folder / "config.json").stat().st_mode & 0o777
        for weights in folder.glob("*.safetensors"):  # which are written for their owner alone
            weights.chmod(readable)
        tokenizer.save_pretrained(folder)
        for name in ("atoll.json",):
            if (adapter / name).exists():
                shutil.copyfile(adapter / name, folder / name)
    except OSError as error:
        raise storage_error(f"cannot write into {folder}", error) from None
    return difference
