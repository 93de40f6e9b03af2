"""join --dry-run: what a run takes of this machine, and how its data would be read. What has to be
fetched or made for that lies in a folder that is gone afterwards.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..home.output import Terminal
from .basing import base_lines
from .consent import check_fit, describe_run, preview
from .founding import id_of, is_settings

if TYPE_CHECKING:
    from ..home.config import NodeConfig
    from ..manifest import Manifest
    from ..manifest.tables import ModelTable
    from ..run.invite import Invite


@dataclass(frozen=True, slots=True)
class _Shown:
    """``run_id``: "" where it is not known yet. ``founds``: nobody has the run yet. ``source``:
    where its founder has its model; ``folder``: where its configuration and tokenizer lie, as far
    as that is known.
    """

    manifest: Manifest
    run_id: str
    invite: Invite | None = None
    founds: bool = False
    source: Path | None = None
    folder: Path | None = None


def try_join(
    terminal: Terminal,
    target: str,
    script: Path | None,
    model: Path | None,
    data: str,
    down: float | None,
    config: NodeConfig,
) -> int:
    """Print what joining asks of this machine and, of a pretrained model, what is read of ``data``,
    "" where none is given. ``model``: where this machine has the model. Stores nothing.

    Raises what `join` would before it asks: ConfigError for data (with file and line), for a model
    that cannot be read (E415), and for what is too large (E416); NetworkError, NotAdmittedError.
    """
    from .fitting import refuse_too_large
    from .needs import whole_machine

    with tempfile.TemporaryDirectory(prefix="atoll-dry-run-") as made:
        aside = Path(made)
        if is_settings(target):
            shown = _of_settings(terminal, target, script, data, aside)
        else:
            invite, signed = preview(terminal, target, config, dry_run=True)
            assert signed is not None, "without one a dry run ends in preview"
            shown = _Shown(signed.open(), signed.run_id, invite)
        table, own = shown.manifest.model, script is None and shown.manifest.model.pretrained
        base = base_lines(
            terminal.paths,
            shown.run_id,
            table,
            model or shown.source,
            share=config.models.share,
            founds=shown.founds,
        )
        describe_run(terminal, shown.manifest, shown.run_id, shown.invite, down, base)
        if script is None:
            refuse_too_large(shown.manifest, whole_machine())
        if data and own:
            check_fit(shown.manifest, script, data)
            folder = shown.folder or _folder_of(terminal, shown.run_id, table, model, aside)
            _read(terminal, shown.manifest, data, folder)
        elif own:
            terminal.say("data     none is given: --data FILE reads it, too")
    return 0


def _of_settings(
    terminal: Terminal, target: str, script: Path | None, data: str, aside: Path
) -> _Shown:
    from ..home.paths import user_path
    from ..manifest import list_runs, load_manifest
    from ..manifest.methods import check_work

    path = user_path(target)
    manifest = load_manifest(path)
    if data:
        check_fit(manifest, script, data)
    run_id = id_of(terminal, manifest)
    stored = {str(known): signed for known, signed in list_runs(terminal.paths, []).items()}
    if (before := stored.get(run_id)) is not None:
        return _Shown(before.open(), before.run_id)
    check_work(manifest, manifest.name)
    if not manifest.model.pretrained:
        return _Shown(manifest, run_id)
    from ..recipes.models.finding import find_model

    if manifest.model.base is None:
        terminal.say(f"looking at the model {getattr(manifest.model, manifest.model.entry)} …")
    found = find_model(manifest, path.parent, terminal.paths.cache_dir, aside)
    return _Shown(found.manifest, run_id, None, True, found.source, found.folder)


def _folder_of(
    terminal: Terminal, run_id: str, table: ModelTable, model: Path | None, aside: Path
) -> Path | None:
    """Where the tokenizer of a run's model lies, or was put now; None where nobody here has it."""
    from ..recipes.models.bringing import base_folder, find_copy
    from ..recipes.models.gguf import without_weights
    from ..recipes.models.hub import download

    assert table.base is not None, "checked where manifests are read"
    if (folder := base_folder(terminal.paths, run_id)) is not None and model is None:
        return folder
    copy = model or find_copy(terminal.paths, run_id, table)
    if copy is not None and table.gguf is not None:
        file = copy / table.gguf if copy.is_dir() else copy
        digest = table.base.files[table.gguf]
        return without_weights(file, digest, terminal.paths.cache_dir, aside)
    if copy is None and table.hub is not None:
        light = [name for name in table.base.files if not name.endswith(".safetensors")]
        return download(table.hub, table.revision, light, aside)
    return copy


def _read(terminal: Terminal, manifest: Manifest, data: str, folder: Path | None) -> None:
    """Say what `atoll join` says of the data before the first step."""
    from ..manifest.presets import steps_of
    from ..recipes.finetune.preparing import prepare_data
    from ..recipes.models.tokens import compare_marks, load_tokenizer

    if folder is None:
        terminal.say("data     not read: the run's tokenizer is not on this machine; --model PATH")
        return
    tokenizer = load_tokenizer(folder)
    if (base := manifest.model.base) is not None:
        compare_marks(tokenizer, base.tokenizer, base.libraries)
    terminal.say(f"reading {data} …")
    shape = base.shape if base is not None else None
    found = prepare_data(
        data,
        tokenizer,
        manifest.data,
        vocabulary=shape.vocabulary if shape is not None else None,
        tell=lambda count: terminal.say(f"{count:,} records read …"),
    )
    for line in found.lines(manifest.train.inner.tokens_per_step, steps_of(manifest)):
        terminal.say(f"data     {line}")
    terminal.say(f"the first sample, with what is learned between ⟦ and ⟧:\n{found.shown}")
