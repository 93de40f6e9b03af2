"""From a text of settings to a run that this machine has founded: what `new` and `join` do with a
file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from msgspec import structs

from ...collectives.errors import ConfigError
from ...collectives.identifiers import PeerId
from ..home.output import Terminal
from .identity import identity_of

if TYPE_CHECKING:
    from ..manifest import Manifest, SignedManifest
    from ..recipes.models.bringing import FromMembers

TEXT_FILE = "text"  # in the run's folder: the id of its settings before anything was found out
SUFFIX = ".toml"
INVITE_DAYS = 7


@dataclass(frozen=True, slots=True)
class Founding:
    """``signed``: with all that was found of its model, whose copy on this machine is ``source``
    where that is a folder or a file. ``text``: the id of the settings as they were written.
    ``known``: this machine has founded it before.
    """

    signed: SignedManifest
    source: Path | None
    text: str
    known: bool


def is_settings(target: str) -> bool:
    """Whether a target of `join` is a file of settings."""
    return target.endswith(SUFFIX) and Path(target).expanduser().is_file()


def founding_in(terminal: Terminal, target: str, check: Callable[[Manifest], object]) -> Founding:
    """The run of a file of settings, which pass ``check`` before its model is looked at. Raises
    what that and `founding_of` do.
    """
    from ..home.paths import user_path
    from ..manifest import load_manifest

    path = user_path(target)
    manifest = load_manifest(path)
    check(manifest)
    return founding_of(terminal, manifest, path.parent)


def founding_of(terminal: Terminal, manifest: Manifest, near: Path) -> Founding:
    """The run that these settings are, signed by this machine's key. A pretrained model is looked
    at once: afterwards the same text is the same run, wherever a branch of the hub has moved to.
    ``near``: the folder that paths in the text start from. Stores nothing of the run.

    Raises ConfigError, NetworkError, StorageError.
    """
    from ..manifest import list_runs, sign_manifest
    from ..manifest.methods import check_work

    text, identity = str(manifest.run_id), identity_of(terminal)
    stored = list_runs(terminal.paths, [])
    if (before := founded_before(terminal, manifest, identity.peer)) is not None:
        return Founding(before, None, text, True)
    check_work(manifest, manifest.name)
    if not manifest.nonce:
        manifest = structs.replace(manifest, nonce=_nonce_of(identity.peer))
    source = None
    if manifest.model.pretrained:
        from ..recipes.models.finding import find_model

        terminal.paths.ensure()
        if manifest.model.base is None:
            where = getattr(manifest.model, manifest.model.entry)
            terminal.say(f"looking at the model {where} …")
        found = find_model(manifest, near, terminal.paths.cache_dir)
        manifest, source = found.manifest, found.source
    signed = sign_manifest(manifest, identity)
    return Founding(signed, source, text, signed.run_id in stored)


def id_of(terminal: Terminal, manifest: Manifest) -> str:
    """The id of the run that these settings are where this machine founds it, or has; "" where that
    follows from a key that is not made yet, or from a model that nobody has looked at. Writes
    nothing.
    """
    from ...security.key_file import load

    file = terminal.paths.identity_file
    organiser = load(file).peer if file.exists() else None
    if organiser and (before := founded_before(terminal, manifest, organiser)) is not None:
        return str(before.run_id)
    if manifest.model.pretrained and manifest.model.base is None:
        return ""
    if not manifest.nonce:
        if organiser is None:
            return ""
        manifest = structs.replace(manifest, nonce=_nonce_of(organiser))
    return str(manifest.run_id)


def founded_before(
    terminal: Terminal, manifest: Manifest, organiser: PeerId
) -> SignedManifest | None:
    """The run that ``organiser``, this machine's key, has founded of these settings; None: none."""
    from ..manifest import list_runs

    text = str(manifest.run_id)
    for run_id, signed in list_runs(terminal.paths, []).items():
        if signed.organiser == organiser and _text_of(terminal, run_id) == text:
            return signed
    return None


def keep_founding(terminal: Terminal, founding: Founding) -> Path:
    """Store the run, and that it was made of this text; its folder. Raises ConfigError,
    StorageError.
    """
    from ..home.paths import write_atomic
    from ..manifest import save_run

    folder = save_run(terminal.paths, founding.signed)
    write_atomic(folder / TEXT_FILE, founding.text.encode())
    if founding.source is not None:
        from ..recipes.models.bringing import remember_source

        remember_source(folder, founding.source)
    return folder


def say_invite(terminal: Terminal, signed: SignedManifest) -> None:
    """Print an invite that names the running node's addresses, or why there is none yet."""
    from .invites import addresses_in_use, fresh_invite

    try:
        addresses = addresses_in_use(terminal, (), signed)
        made = fresh_invite(terminal, signed, addresses, INVITE_DAYS * 86_400.0)
    except ConfigError as error:
        name = " --name SITE" * signed.open().names_sites
        later = f"atoll invite new {signed.run_id[:8]}{name}"
        terminal.say(f"No invite yet: {error.message}. Later: {later}")
        return
    terminal.say(f"invite  {made.encode()}")


def bring_base(
    terminal: Terminal,
    signed: SignedManifest,
    given: Path | None,
    founding: Founding | None = None,
    fetch: FromMembers | None = None,
) -> None:
    """Have this machine's copy of the run's pretrained model where the recipe finds it, every file
    compared; nothing where the run has none. ``given``: what the user names. ``founding``: the run
    is this machine's, and stored first. ``fetch``: has members send it.

    Raises ConfigError E415, NetworkError, StorageError.
    """
    from ..manifest import decode_manifest

    if founding is not None:
        keep_founding(terminal, founding)
    model = decode_manifest(signed.manifest).model
    if not model.pretrained:
        if given is not None:
            raise ConfigError(
                f"--model is given, and this run trains {model.entry}",
                key="--model",
                hint="Leave it out.",
                exit_code=2,
            )
        return
    from ..recipes.models.bringing import bring_model

    terminal.paths.ensure()
    bring_model(terminal.paths, signed.run_id, model, given, terminal.say, fetch)


def _nonce_of(organiser: PeerId) -> str:
    """What makes the same settings another run at each organiser, and the same at the same one."""
    return blake3(b"atoll/nonce/1" + organiser.encode()).hexdigest(8)


def _text_of(terminal: Terminal, run_id: str) -> str:
    try:
        return (terminal.paths.run_dir(run_id) / TEXT_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
