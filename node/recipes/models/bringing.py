"""A member's own copy of the run's pretrained model: from the hub, a folder or a GGUF file of this
machine, every file compared with what the manifest says. In the run's folder

    base/        links to exactly these files, or to those that a GGUF file was made into
    base.json    where they came from, and when they were compared
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ....collectives.errors import ConfigError
from ...home.output import bytes_text
from ...home.paths import Paths, write_atomic
from ...home.refusals import storage_error
from ...manifest.tables import BaseTable, ModelTable
from .files import link_all, sha256_of, stamp_of
from .gguf import converted
from .hub import download
from .tokens import compare_marks, load_tokenizer

BASE_FOLDER, BASE_FILE = "base", "base.json"


def bring_model(
    paths: Paths,
    run_id: str,
    model: ModelTable,
    given: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """The folder of links to this machine's copy of the run's model, compared file by file, and its
    tokenizer with what it does at the founder's. ``given``: a folder or a GGUF file that has it;
    None: where it was the last time, else the hub. ``say`` hears what takes long.

    Raises ConfigError E415 naming the file or the part of the tokenizer that differs, NetworkError,
    StorageError.
    """
    assert model.base is not None, "checked where manifests are read"
    run = paths.run_dir(run_id)
    before, stamps = _remembered(run)
    source = given or before
    if model.gguf is not None:
        found = _gguf_of(model.gguf, source)
        _compare(model.base, {model.gguf: found}, stamps, say)
        folder = converted(found, model.base.files[model.gguf], paths.cache_dir)
        linked, compared = {path.name: path for path in folder.iterdir()}, [found]
    else:
        folder = _folder_of(model, model.base, source, given is not None, say)
        linked = {name: folder / name for name in model.base.files}
        _compare(model.base, linked, stamps, say)
        compared = list(linked.values())
    link_all(linked, run / BASE_FOLDER)
    compare_marks(load_tokenizer(run / BASE_FOLDER), model.base.tokenizer, model.base.libraries)
    _remember(run, source, compared)
    return run / BASE_FOLDER


def _gguf_of(name: str, source: Path | None) -> Path:
    if source is not None and source.is_dir():
        source /= name
    if source is None or not source.is_file():
        raise ConfigError(
            f"this run's model is the file {name}, which is not known on this machine"
            if source is None
            else f"there is no file {source}",
            key="--model",
            code="E415",
            why="A manifest names no file of the machines of its members.",
            hint=f"Get it from whoever invited you, then: atoll join … --model {name}",
        )
    return source


def _folder_of(
    model: ModelTable,
    base: BaseTable,
    source: Path | None,
    insisted: bool,
    say: Callable[[str], None],
) -> Path:
    """The folder that should have the files."""
    if source is not None and source.is_dir():
        missing = [name for name in base.files if not (source / name).exists()]
        if not missing:
            return source
        if insisted or model.hub is None:
            raise ConfigError(
                f"{source} has no {', '.join(missing[:3])}",
                key="--model",
                code="E415",
                hint="Give the folder with the run's model.",
            )
    elif source is not None and (insisted or model.hub is None):
        raise ConfigError(f"there is no folder {source}", key="--model", code="E415")
    if model.hub is None:
        raise ConfigError(
            f"this run's model is the folder {model.folder}, which is not known on this machine",
            key="--model",
            code="E415",
            why="A manifest names no file of the machines of its members.",
            hint="Get it from whoever invited you, then: atoll join … --model DIR",
        )
    size = bytes_text(base.size)
    say(f"model    {model.hub}, {size}: from this machine's cache, else the hub …")
    return download(model.hub, model.revision, list(base.files))


def _compare(
    base: BaseTable,
    found: dict[str, Path],
    stamps: dict[str, list[int]],
    say: Callable[[str], None],
) -> None:
    """Raise ConfigError for a file that is not the run's. ``stamps``: of files that were compared
    before.
    """
    wrong = list[str]()
    for name, path in found.items():
        try:
            known = stamps.get(str(path.resolve())) == stamp_of(path)
        except OSError as error:
            raise storage_error(f"cannot read {path}", error) from None
        if not known and sha256_of(path) != base.files[name]:
            wrong.append(name)
    if wrong:
        first = found[wrong[0]].parent
        raise ConfigError(
            f"the model in {first} is not the run's: {', '.join(wrong[:4])} differ"
            + ("s" if len(wrong) == 1 else ""),
            key="--model",
            code="E415",
            why="It is another model, another revision of it, or a damaged copy: the manifest says "
            "the sha256 of each file.",
            hint="Leave --model out where the run's model is one of the hub; else get the "
            "founder's files.",
        )


def _remembered(run: Path) -> tuple[Path | None, dict[str, list[int]]]:
    """What `given` was the last time, and the files that were compared, each as it was then."""
    try:
        found = json.loads((run / BASE_FILE).read_bytes())
        source = Path(found["source"]) if found["source"] else None
        return source, {str(path): list(stamp) for path, stamp in found["files"].items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None, {}


def _remember(run: Path, source: Path | None, files: list[Path]) -> None:
    stamps = {str(path.resolve()): stamp_of(path) for path in files}
    about = {"source": None if source is None else str(source), "files": stamps}
    write_atomic(run / BASE_FILE, json.dumps(about).encode())


def remember_source(run: Path, source: Path) -> None:
    """Say where this machine has the model of the run whose folder this is, before anything was
    compared. Raises StorageError.
    """
    if not (run / BASE_FILE).exists():
        _remember(run, source, [])


def base_folder(paths: Paths, run_id: str) -> Path | None:
    """The folder that `bring_model` made; None where it has not."""
    folder = paths.run_dir(run_id) / BASE_FOLDER
    return folder if folder.is_dir() else None
