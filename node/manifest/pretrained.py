"""What `[model]` and `[lora]` say of a pretrained model: which of the settings belong together, and
what a founder has to have found out before members can take her word.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...collectives.errors import ConfigError
from .manifest import Manifest
from .refusals import Row, against
from .tables import PRETRAINED, BaseTable, InnerTable, LoraTable, ModelTable

OF_PRETRAINED = ("revision", "method", "dtype", "attention", "checkpointing", "base")
"""Settings of ``[model]`` that mean nothing of another model."""
MOST_FILE_BYTES = 256 << 30  # of one file that travels: hashes of its chunks fit into one message


def name_entry(table: dict[str, Any]) -> None:
    """Fill in ``entry`` of a text's ``[model]`` that only says where a pretrained model is."""
    model: Any = table.get("model")
    if isinstance(model, dict) and "entry" not in model:
        found = [key for key in PRETRAINED if key in model]
        if found:
            model["entry"] = found[0]


def adapters_of(manifest: Manifest) -> LoraTable | None:
    """The adapters of a run of a pretrained model; None where all of it trains."""
    if not manifest.model.pretrained or manifest.model.method == "full":
        return None
    return manifest.lora or LoraTable()


def why_not_sharded(manifest: Manifest) -> tuple[str, str]:
    """What of a run several cards of one machine cannot train as one member, each holding a part of
    the model, and what its founder would write instead; ("", "") where they can.
    """
    model, inner, settings = manifest.model, manifest.train.inner, manifest.settings()
    table = (
        (
            model.method == "qlora",
            'method = "qlora", and FSDP2 does not cut weights of four bits',
            '[model] method = "lora"',
        ),
        (
            inner.optimizer == "adamw8bit",
            'optimizer = "adamw8bit", and bitsandbytes does not step shards of parameters',
            '[train.inner] optimizer = "adamw"',
        ),
        (settings.fragments > 1, "fragments", "[exchange] fragments = 1"),
        (
            settings.method == "gradient_averaging",
            'method = "gradient_averaging"',
            '[train] method = "diloco"',
        ),
        (
            settings.has_feedback,
            f'error feedback, which codec = "{settings.codec}" has or [exchange] asks for',
            '[exchange] codec = "int8_dither", feedback = false',
        ),
    )
    return next(((why, cure) for found, why, cure in table if found), ("", ""))


def pretrained_rows(manifest: Manifest) -> list[Row]:
    """Settings of a pretrained model that mean something only together."""
    model = manifest.model
    given = [key for key in PRETRAINED if getattr(model, key) is not None]
    if not model.pretrained:
        return _of_other_models(manifest, given)
    one = "A run has one model."
    extra = [key for key in given if key != model.entry and model.entry in given]
    rows = [
        Row(
            True,
            f"$.model.{key}",
            one,
            "Leave it out.",
            says=f"both $.model.{model.entry} and $.model.{key} are given",
        )
        for key in extra
    ]
    rows.append(
        Row(
            model.entry not in given,
            "$.model.entry",
            'It follows from hub = "ORG/NAME", folder = "DIR" or gguf = "FILE.gguf".',
            "Leave it out.",
            says=f'$.model.entry = "{model.entry}", and $.model.{model.entry} is missing',
        )
    )
    made = "The files say what the model is, and where it begins."
    return rows + against(
        f"a pretrained model ({model.entry})",
        [
            (bool(model.config), "$.model.config", made, "Leave it out."),
            (
                manifest.lora is not None and model.method == "full",
                "$.model.method",
                "[lora] is given, and all of the model would train.",
                'method = "lora", or leave [lora] out.',
            ),
            (
                model.method == "full" and model.dtype == "float16",
                "$.model.dtype",
                "AdamW's divisors and small gradients are zero in float16, and weights become NaN.",
                'dtype = "auto" (float32), or "bfloat16"',
            ),
            (
                model.method == "qlora" and manifest.adapters.base == "values",
                "$.adapters.base",
                'method = "qlora" packs the base into four bits, which differ from machine to '
                "machine: its files are compared.",
                '[adapters] base = "shapes"',
            ),
            (
                manifest.data.source == "builtin:stdlib-text",
                "$.data.source",
                "A pretrained model is trained on records that its members have.",
                'source = "local"',
            ),
        ],
    )


def _of_other_models(manifest: Manifest, given: list[str]) -> list[Row]:
    model, plain = manifest.model, ModelTable()
    keys = [key for key in OF_PRETRAINED if getattr(model, key) != getattr(plain, key)]
    why = "It is of a pretrained model, which the run does not have."
    rows = [(True, f"$.model.{key}", why, "Leave it out.") for key in (*given, *keys)]
    scripts = "A script of each member makes its own adapters (docs/adapters.md)."
    if manifest.lora is not None:
        rows.append((True, "$.lora.rank", scripts, "Leave [lora] out."))
    return against(f'entry = "{model.entry}"', rows)


def data_rows(manifest: Manifest) -> list[Row]:
    """Settings of `[data]` and of what trains on it that the model does not read, or that need one
    another.
    """
    data, inner = manifest.data, manifest.train.inner
    gpt = manifest.model.entry == "builtin:gpt"
    reads = "The byte-level GPT reads text as bytes, in windows of its context."
    small = "A model of a million parameters has no use for it."
    out = "Leave it out."
    fields = {field.name: field.default for field in msgspec.structs.fields(type(data))}
    rows = against(
        f'entry = "{manifest.model.entry}"',
        [
            (
                gpt and data.source == "shared",
                "$.data.source",
                reads,
                'source = "local", or leave it out.',
            ),
            *(
                (gpt and getattr(data, key) != fields[key], f"$.data.{key}", reads, out)
                for key in ("format", "length", "loss", "packing", "held_out", "sha256")
            ),
            (
                gpt and inner.optimizer == "adamw8bit",
                "$.train.inner.optimizer",
                small,
                'optimizer = "adamw"',
            ),
            (gpt and inner.in_backward, "$.train.inner.in_backward", small, out),
            (
                gpt and manifest.prompts is not None,
                "$.prompts.texts",
                "It continues bytes, and answers nobody.",
                "Leave [prompts] out.",
            ),
        ],
    )
    rows += _backward_rows(manifest)
    rows += _size_rows(manifest)
    shared = data.source == "shared"
    rows.append(
        Row(
            not gpt and shared != bool(data.sha256),
            "$.data.sha256",
            "One data set is dealt out by the numbers of its records: all must have the same, "
            "which sha256sum FILE says."
            if shared
            else "Only a data set that all members have is compared.",
            'source = "local"' if shared else 'Leave it out, or source = "shared".',
            says="$.data.sha256 is missing"
            if shared
            else f'$.data.sha256 is given, and $.data.source is "{data.source}"',
        )
    )
    return rows


def _size_rows(manifest: Manifest) -> list[Row]:
    """How large a step is, in words of the other kind of model."""
    inner, plain = manifest.train.inner, InnerTable()
    step = "A step has tokens_per_step tokens, in micro-batches of micro_batch rows."
    windows = "A step of the byte-level GPT has batch windows."
    rows = [(manifest.model.pretrained, "batch", step)]
    gpt = manifest.model.entry == "builtin:gpt"
    rows += [(gpt, key, windows) for key in ("tokens_per_step", "micro_batch")]
    return [
        Row(
            when and getattr(inner, key) != getattr(plain, key),
            f"$.train.inner.{key}",
            why,
            "Leave it out.",
            says=f"$.train.inner.{key} is of another kind of model",
        )
        for when, key, why in rows
    ]


def _backward_rows(manifest: Manifest) -> list[Row]:
    """An optimizer that steps in backward sees one micro-batch, and no gradient as a whole."""
    inner, length = manifest.train.inner, manifest.data.length
    if not inner.in_backward:
        return []
    most = length * inner.micro_batch
    return against(
        "in_backward",
        [
            (
                inner.clip > 0,
                "$.train.inner.clip",
                "The norm of the whole gradient is known when every weight has stepped.",
                "clip = 0.0",
            ),
            (
                inner.tokens_per_step > most,
                "$.train.inner.tokens_per_step",
                f"A step is then one micro-batch: of {length:,} × {inner.micro_batch} tokens at "
                "most.",
                f"tokens_per_step = {most} (or a larger micro_batch)",
            ),
            (
                manifest.train.method == "gradient_averaging",
                "$.train.method",
                "What it averages are gradients, and none is left.",
                'method = "diloco"',
            ),
        ],
    )


def check_bound(model: ModelTable) -> None:
    """A pretrained model of a manifest that came from somebody else is bound by its files, and
    names no path. Raises ConfigError.
    """
    if not model.pretrained:
        return
    for key in ("folder", "gguf"):
        where = getattr(model, key)
        if where is not None and not is_plain(where):
            raise ConfigError(
                f"the run's manifest has $.model.{key} = {where!r}, a path",
                key=f"$.model.{key}",
                why="A manifest names no file of the machines of its members.",
            )
    if model.base is None:
        raise ConfigError(
            "the run's manifest does not say which files its model is made of",
            key="$.model.base",
            why="Whoever founds a run looks at them, and signs their digests.",
            hint="Its organiser founds it with: atoll new run.toml",
        )
    _check_sizes(model.base)


def _check_sizes(base: BaseTable) -> None:
    """Members take as many bytes of one another as the manifest says. Raises ConfigError."""
    sizes = base.sizes
    if sizes and (sizes.keys() != base.files.keys() or sum(sizes.values()) != base.size):
        raise ConfigError(
            "the run's manifest says of its model's files another size together than of each",
            key="$.model.base.sizes",
            why="Whoever founds a run looks at them, and signs how large they are.",
            hint="Its organiser founds it with: atoll new run.toml",
        )


def travels(model: ModelTable) -> bool:
    """Whether members may have the base's files from one another: never what the hub says is
    gated, or may be; and only what is bound by size, too.
    """
    base = model.base
    if base is None or not base.sizes or max(base.sizes.values()) > MOST_FILE_BYTES:
        return False
    return base.gated is False or (base.gated is None and model.hub is None)


def is_plain(name: str) -> bool:
    """Whether it is a name, and no path."""
    return "/" not in name and "\\" not in name and name not in ("", ".", "..")
