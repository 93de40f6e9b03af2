"""A member's own copy of the run's pretrained model: from the hub, a folder or a GGUF file of this
machine, or from other members; every file compared with what the manifest says. In the run's folder

    base/        links to exactly these files, or to those that a GGUF file was made into
    base.json    where they came from, and when they were compared (`bases.own`)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ....collectives.errors import ConfigError, NetworkError
from ...bases.own import OwnBase, fetched_folder, keep_own, read_own, stamp_of
from ...home.output import bytes_text
from ...home.paths import Paths
from ...home.refusals import storage_error
from ...manifest.pretrained import travels
from ...manifest.tables import BaseTable, ModelTable
from .files import link_all, sha256_of
from .gguf import converted
from .hub import download, in_cache, is_gated
from .tokens import compare_marks, load_tokenizer

BASE_FOLDER = "base"
FromMembers = Callable[[], object]
"""Has members send the run's base into `fetched_folder`. Raises AtollError: NetworkError E415
where none has it."""


def bring_model(
    paths: Paths,
    run_id: str,
    model: ModelTable,
    given: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    fetch: FromMembers | None = None,
) -> Path:
    """The folder of links to this machine's copy of the run's model, compared file by file, and its
    tokenizer with what it does at the founder's. ``given``: a folder or a GGUF file that has it;
    None: where it was the last time, else the hub's cache, else ``fetch``, where members may hand
    it on, else the hub. ``say`` hears what takes long.

    Raises ConfigError E415 naming the file or the part of the tokenizer that differs, NetworkError,
    StorageError.
    """
    base = model.base
    assert base is not None, "checked where manifests are read"
    run = paths.run_dir(run_id)
    before = read_own(run)
    source = given or find_copy(paths, run_id, model)
    gated = before.gated
    if source is None and not in_hubs_cache(model):
        if model.hub is not None and travels(model):  # as it was when the run was founded
            gated = gated or bool(is_gated(model.hub, model.revision))
        if fetch is not None and travels(model) and not gated and _fetched(model, fetch, say):
            source = fetched_folder(paths.cache_dir, base)
    if source is None and before.source is not None:
        source = Path(before.source)
    if model.gguf is not None:
        found = _gguf_of(model.gguf, source)
        named = {model.gguf: found}
        _compare(base, named, before, say)
        folder = converted(found, base.files[model.gguf], paths.cache_dir)
        linked = {path.name: path for path in folder.iterdir()}
    else:
        folder = _folder_of(model, base, source, given is not None, say)
        linked = named = {name: folder / name for name in base.files}
        _compare(base, named, before, say)
    link_all(linked, run / BASE_FOLDER)
    compare_marks(load_tokenizer(run / BASE_FOLDER), base.tokenizer, base.libraries)
    stamps = {str(path.resolve()): stamp_of(path) for path in named.values()}
    absolute = {name: str(path.absolute()) for name, path in named.items()}
    keep_own(run, OwnBase(None if source is None else str(source), stamps, absolute, gated))
    return run / BASE_FOLDER


def find_copy(paths: Paths, run_id: str, model: ModelTable) -> Path | None:
    """Where this machine has the files, whatever they hold: where they were the last time, or
    where members' are written. Asks nobody.
    """
    assert model.base is not None
    before = read_own(paths.run_dir(run_id)).source
    for source in (before and Path(before), fetched_folder(paths.cache_dir, model.base)):
        if source and all(
            (source / name if source.is_dir() else source).is_file() for name in model.base.files
        ):
            return source
    return None


def in_hubs_cache(model: ModelTable) -> bool:
    """Whether the user's cache of the hub has all files of a run's model. Asks nobody."""
    if model.hub is None or model.base is None:
        return False
    return in_cache(model.hub, model.revision, list(model.base.files)) is not None


def _fetched(model: ModelTable, fetch: FromMembers, say: Callable[[str], None]) -> bool:
    """Whether members have sent it; False where the hub is to be asked."""
    try:
        fetch()
    except NetworkError as error:
        if model.hub is None:
            raise
        say(f"{error.message}: asking the hub …")
        return False
    return True


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
    before: OwnBase,
    say: Callable[[str], None],
) -> None:
    """Raise ConfigError for a file that is not the run's. ``before``: what was compared already."""
    wrong = list[str]()
    for name, path in found.items():
        try:
            known = before.files.get(str(path.resolve())) == stamp_of(path)
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


def remember_source(run: Path, source: Path) -> None:
    """Say where this machine has the model of the run whose folder this is, before anything was
    compared. Raises StorageError.
    """
    if read_own(run) == OwnBase():
        keep_own(run, OwnBase(str(source)))


def base_folder(paths: Paths, run_id: str) -> Path | None:
    """The folder that `bring_model` made; None where it has not."""
    folder = paths.run_dir(run_id) / BASE_FOLDER
    return folder if folder.is_dir() else None
