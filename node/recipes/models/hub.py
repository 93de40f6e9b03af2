"""The model hub, asked by its own client: the user's cache, login and settings hold, offline, too
(``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from ....collectives.errors import ConfigError, NetworkError
from ...home.refusals import storage_error
from .libraries import first_line, library

OF_MEMBERS = "give a folder that has it, with --model DIR"
OF_FOUNDERS = 'name a folder that has it, in place of hub: folder = "DIR" in [model]'


@dataclass(frozen=True, slots=True)
class OnHub:
    """One revision of a model. ``files``: size and sha256 by name; "" where the hub does not say
    the digest. ``licence``, ``gated``: "" and None: not known. ``offline``: the folder of the
    user's cache it was found in, where the hub could not be asked.
    """

    commit: str
    files: dict[str, tuple[int, str]]
    licence: str = ""
    gated: bool | None = None
    offline: Path | None = None


def look_up(name: str, revision: str, instead: str = OF_FOUNDERS) -> OnHub:
    """What the hub says of a model, or, where it cannot be asked, the user's cache. Raises
    ConfigError E415, NetworkError, whose hint says what else would do: ``instead``.
    """
    hub, errors = library("huggingface_hub"), library("huggingface_hub.errors")
    with _translated(name, revision, instead):
        try:
            api = hub.HfApi()
            info = api.model_info(name, revision=revision)
            tree = list(api.list_repo_tree(name, revision=info.sha))
        except (errors.OfflineModeIsEnabled, ConnectionError, *_unreachable()) as error:
            try:
                return _cached(name, revision)
            except errors.LocalEntryNotFoundError:
                raise error from None  # it says why the hub was not asked, the cache does not
    files = dict[str, tuple[int, str]]()
    for each in tree:
        if hasattr(each, "size"):  # a file
            lfs = getattr(each, "lfs", None)
            files[each.path] = (int(each.size), str(lfs.sha256) if lfs else "")
    card = info.card_data
    licence = card.get("license") if card is not None else None
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    if licence == "other" and card is not None:
        licence = card.get("license_name") or licence
    return OnHub(str(info.sha), files, str(licence or "")[:128], bool(info.gated))


def _cached(name: str, revision: str) -> OnHub:
    hub = library("huggingface_hub")
    folder = Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    files = {path.name: (path.stat().st_size, "") for path in folder.iterdir() if path.is_file()}
    return OnHub(folder.name, files, offline=folder)


def download(
    name: str,
    commit: str,
    files: Sequence[str],
    into: Path | None = None,
    instead: str = OF_MEMBERS,
) -> Path:
    """The folder of the user's cache with these files of a model; what is there is not asked for
    again. ``into``: a folder for what is not; ``instead``: as of `look_up`. Raises ConfigError
    E415, NetworkError.
    """
    if (found := in_cache(name, commit, files)) is not None:
        return found
    hub = library("huggingface_hub")
    given: dict[str, object] = {} if into is None else {"local_dir": str(into)}
    with _translated(name, commit, instead):
        return Path(
            hub.snapshot_download(name, revision=commit, allow_patterns=list(files), **given)
        )


def in_cache(name: str, commit: str, files: Sequence[str]) -> Path | None:
    """The folder of the user's cache where it has all these files; nobody is asked. Raises
    ConfigError E415 where there is no client of the hub.
    """
    hub, errors = library("huggingface_hub"), library("huggingface_hub.errors")
    with _translated(name, commit):
        try:
            found = Path(
                hub.snapshot_download(
                    name, revision=commit, allow_patterns=list(files), local_files_only=True
                )
            )
        except errors.LocalEntryNotFoundError:
            return None
    return found if all((found / each).exists() for each in files) else None


def is_gated(name: str, commit: str) -> bool | None:
    """Whether the hub calls a model gated now; None where it does not answer."""
    hub, errors = library("huggingface_hub"), library("huggingface_hub.errors")
    try:
        return bool(hub.HfApi().model_info(name, revision=commit).gated)
    except errors.GatedRepoError:
        return True
    except (
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
        ConnectionError,
        *_unreachable(),
    ):
        return None


def _unreachable() -> tuple[type[BaseException], ...]:
    """What the client raises where there is no network: an error of the HTTP library that it uses,
    which has been httpx and is httpx2.
    """
    found = [name for name in ("httpx2", "httpx") if util.find_spec(name) is not None]
    return tuple(library(name).TransportError for name in found)


@contextmanager
def _translated(name: str, revision: str, instead: str = OF_MEMBERS) -> Generator[None]:
    """Errors of the client as sentences; ``instead``: what else would do."""
    errors = library("huggingface_hub.errors")
    where = f"https://huggingface.co/{name}"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name} is gated: the hub does not give it to this account",
            code="E415",
            why="Its owner wants its licence accepted first.",
            hint=f"Accept it at {where}, then: hf auth login",
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{name} has no revision {revision!r} on the hub",
            key="$.model.revision",
            code="E415",
            hint=f"A branch, a tag or a commit of {where}",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"the hub has no model {name}, or does not show it to this account",
            key="$.model.hub",
            code="E415",
            hint=f"Look at {where}; a private one: hf auth login",
        ) from None
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        ConnectionError,
        *_unreachable(),
    ) as error:
        raise NetworkError(
            f"{name} at {revision} is not in this machine's cache, and the hub cannot be asked",
            code="E415",
            why=str(error).partition("\n")[0][:300],
            hint=f"Without a network: {instead}",
        ) from None
    except errors.HfHubHTTPError as error:
        raise NetworkError(
            f"the hub does not give {name}: {first_line(error)}",
            code="E415",
            hint=f"Try again later, or {instead}",
        ) from None
    except OSError as error:
        raise storage_error(f"the hub's client cannot keep {name} in its cache", error) from None
