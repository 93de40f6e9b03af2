"""A manifest with its organiser's signature: what members hand each other, and keep on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from ...collectives.errors import BadSignatureError, ConfigError, StorageError
from ...collectives.foreign import PLAIN, quoted
from ...collectives.group import MAX_PEER_ID
from ...collectives.identifiers import PeerId, RunId
from ..home.paths import Paths, make_private, write_atomic
from ..home.refusals import storage_error
from .manifest import Manifest, run_id_of
from .reading import MAX_MANIFEST_BYTES, decode_manifest

if TYPE_CHECKING:
    from ...security.identity import Identity

DOMAIN = "atoll/manifest/1"


class SignedManifest(msgspec.Struct, frozen=True, array_like=True):
    """Manifest bytes with the organiser's signature. This is what members hand each other and keep
    on disk.
    """

    manifest: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)]
    organiser: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    @property
    def run_id(self) -> RunId:
        return run_id_of(self.manifest)

    def encode(self) -> bytes:
        """Wire and file bytes."""
        return msgspec.msgpack.encode(self)

    def open(self) -> Manifest:
        """The manifest, after checking the signature. Raises BadSignatureError, ConfigError,
        VersionMismatchError.
        """
        from ...security.identity import verify

        if not verify(self.organiser, DOMAIN, self.manifest, self.signature):
            raise BadSignatureError(
                f"the manifest of run {self.run_id} is not signed by {self.organiser}",
                peer=self.organiser,
                why="It was changed on the way, or it is somebody else's.",
                hint="Ask the organiser for a new invite.",
            )
        return decode_manifest(self.manifest)


def sign_manifest(manifest: Manifest, identity: Identity) -> SignedManifest:
    data = manifest.encode()
    return SignedManifest(data, identity.peer, identity.sign(DOMAIN, data))


def decode_signed(data: bytes) -> SignedManifest:
    """A signed manifest from bytes (not yet verified: call ``open``). Raises ConfigError."""
    if len(data) > MAX_MANIFEST_BYTES + 1024:
        raise ConfigError(
            f"signed manifest of {len(data)} bytes, limit {MAX_MANIFEST_BYTES + 1024}"
        )
    try:
        return msgspec.msgpack.decode(data, type=SignedManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"the signed manifest cannot be read: {quoted(error)}") from None


def save_run(paths: Paths, signed: SignedManifest) -> Path:
    """Keep a run's signed manifest in its folder, which is returned.

    Raises ConfigError when the run is known here as another organiser's (the same settings have the
    same id), StorageError.
    """
    folder = paths.run_dir(signed.run_id)
    make_private(folder)
    known = list_runs(paths, []).get(signed.run_id)
    if known is not None and known.organiser != signed.organiser:
        raise ConfigError(
            f"run {signed.run_id} is known here as one of another organiser, {known.organiser}",
            why=(
                "The same settings are the same run; whoever signed them first on this "
                "machine is its organiser."
            ),
            hint="For a run of your own change anything, such as its name or description.",
        )
    write_atomic(folder / "manifest", signed.encode())
    return folder


def load_run(paths: Paths, run: str) -> SignedManifest:
    """The signed manifest of a stored run, by id, by a unique beginning of it, or by name. Raises
    ConfigError, StorageError.
    """
    damaged: list[StorageError] = []
    stored = list_runs(paths, damaged)
    if exact := stored.get(RunId(run)):
        return exact
    found = {
        i: s
        for i, s in stored.items()
        if (run and i.startswith(run)) or decode_manifest(s.manifest).name == run
    }
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ConfigError(
            f"{run!r} fits {len(found)} runs: {', '.join(sorted(found))}",
            hint="Give more of the id.",
        )
    if damaged:
        raise damaged[0]
    raise ConfigError(
        f"no run {run!r} on this node",
        why="It was neither made nor joined here. (An invite starts with atoll2:)",
        hint="See the runs: atoll ls",
    )


def list_runs(
    paths: Paths, damaged: list[StorageError] | None = None
) -> dict[RunId, SignedManifest]:
    """All runs whose manifest is stored on this node, by id. A damaged one is added to ``damaged``,
    else raised: StorageError.
    """
    runs = dict[RunId, SignedManifest]()
    if not paths.runs_dir.is_dir():
        return runs
    for file in sorted(paths.runs_dir.glob("*/manifest")):
        try:
            signed = _read_signed(file)
        except StorageError as error:
            if damaged is None:
                raise
            damaged.append(error)
        else:
            runs[signed.run_id] = signed
    return runs


def _read_signed(file: Path) -> SignedManifest:
    try:
        signed = decode_signed(file.read_bytes())
    except OSError as error:
        raise storage_error(f"cannot read {file}", error) from None
    except ConfigError as error:
        raise StorageError(
            f"{file} is damaged: {error}",
            code="E303",
            hint=f"Remove the folder and join again: {file.parent}",
        ) from None
    if signed.run_id != file.parent.name:
        raise StorageError(
            f"{file} is not the manifest of this folder",
            code="E303",
            hint=f"Remove the folder and join again: {file.parent}",
        )
    return signed
