"""What a founder finds out of a pretrained model before she signs a manifest: which commit it is,
of which files, how large, and what its tokenizer does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from ....collectives.errors import ConfigError
from ...home.paths import user_path
from ...manifest import Manifest, adapters_of
from ...manifest.tables import BaseTable, ModelTable
from .files import (
    CONFIG,
    choose,
    read_json,
    refuse_code,
    refuse_quantised,
    sha256_of,
    weights_of,
)
from .gguf import converted, without_weights
from .hub import OF_FOUNDERS, OnHub, download, look_up
from .libraries import versions
from .loading import auto_dtype, count_parameters
from .shapes import shape_of
from .tokens import load_tokenizer, marks_of


@dataclass(frozen=True, slots=True)
class FoundModel:
    """``manifest``: with what was found, and without paths. ``source``: where the model lies on
    this machine, a folder or a GGUF file; None for one of the hub, whose weights need not be here.
    ``folder``: where its configuration and its tokenizer lie; None where nothing was to be found.
    """

    manifest: Manifest
    source: Path | None
    folder: Path | None = None


def find_model(
    manifest: Manifest, near: Path, cache: Path, aside: Path | None = None
) -> FoundModel:
    """Look at the pretrained model of a run that is about to be founded. ``near``: the folder that
    its text's paths start from. ``cache``: for what a GGUF file is made into. ``aside``: a folder
    for what is fetched or made, without weights, and nothing goes into a cache: for a look that
    founds nothing.

    Weights of the hub are not fetched, since the hub says their digests. Raises ConfigError E415,
    NetworkError, StorageError.
    """
    model = manifest.model
    if model.base is not None:
        return FoundModel(manifest, None)
    if model.hub is not None:
        on_hub = look_up(model.hub, model.revision)
        folder, base = _of_hub(model.hub, on_hub, aside)
        found = _bound(manifest, model, folder, base, on_hub.commit)
        return FoundModel(found, on_hub.offline and folder, folder)
    source = user_path(near / Path(model.folder or model.gguf or "").expanduser())
    if model.gguf is not None:
        if not source.is_file():
            raise ConfigError(f"there is no file {source}", key="$.model.gguf", code="E415")
        digest = sha256_of(source)
        folder = (
            converted(source, digest, cache)
            if aside is None
            else without_weights(source, digest, cache, aside)
        )
        base = _base({source.name: digest}, {source.name: source.stat().st_size})
    else:
        if not source.is_dir():
            raise ConfigError(f"there is no folder {source}", key="$.model.folder", code="E415")
        folder = source
        beside, shards = choose([path.name for path in source.iterdir()], str(source))
        names = [*beside, *weights_of(source, shards)]
        base = _base(
            {name: sha256_of(source / name) for name in names},
            {name: (source / name).stat().st_size for name in names},
        )
    refuse_code(folder, str(source))
    refuse_quantised(folder, str(source))
    named = {model.entry: source.name}
    return FoundModel(
        _bound(manifest, msgspec.structs.replace(model, **named), folder, base, model.revision),
        source,
        folder,
    )


def _of_hub(name: str, found: OnHub, aside: Path | None) -> tuple[Path, BaseTable]:
    beside, shards = choose(found.files, name)
    folder = found.offline or download(name, found.commit, beside, aside, OF_FOUNDERS)
    refuse_code(folder, name)
    refuse_quantised(folder, name)
    weights = weights_of(folder, shards)
    if missing := [each for each in weights if each not in found.files]:
        raise ConfigError(f"{name} has no {', '.join(missing[:3])}", code="E415")
    unsaid = [each for each in weights if not found.files[each][1]]
    if unsaid and aside is None:
        folder = found.offline or download(
            name, found.commit, [*beside, *unsaid], instead=OF_FOUNDERS
        )
    digests = {
        each: found.files[each][1] or (sha256_of(path) if (path := folder / each).exists() else "")
        for each in beside + weights
    }
    base = _base(digests, {each: found.files[each][0] for each in digests})
    return folder, msgspec.structs.replace(base, licence=found.licence, gated=found.gated)


def _base(files: dict[str, str], sizes: dict[str, int]) -> BaseTable:
    return BaseTable(files, sum(sizes.values()), 1, libraries=versions(), sizes=sizes)


def _bound(
    manifest: Manifest, model: ModelTable, folder: Path, base: BaseTable, commit: str
) -> Manifest:
    """The manifest with all that was found."""
    whole, trained = count_parameters(folder, model, adapters_of(manifest), manifest.data.length)
    base = msgspec.structs.replace(
        base,
        parameters=whole,
        tokenizer=marks_of(load_tokenizer(folder)),
        shape=shape_of(read_json(folder / CONFIG)),
    )
    model = msgspec.structs.replace(
        model,
        revision=commit,
        base=base,
        dtype=auto_dtype(folder, model),
        parameters=trained,
    )
    return msgspec.structs.replace(manifest, model=model)
