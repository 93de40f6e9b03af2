"""Manifests as a node asks for them: what their bytes say, and which this machine has."""

from __future__ import annotations

from collections.abc import Mapping

from ...collectives.errors import StorageError
from ...collectives.identifiers import PeerId, RunId
from ..home.paths import Paths
from ..manifest import Manifest, SignedManifest, decode_signed, list_runs, load_run, save_run
from ..manifest.presets import averaging_text
from ..service.outside import Manifests, RunTerms, SignedRun


def manifests_of(paths: Paths) -> Manifests:
    """Those of one home."""

    def stored(damaged: list[StorageError]) -> Mapping[RunId, SignedRun]:
        return {run: signed_run(found) for run, found in list_runs(paths, damaged).items()}

    def save(signed: SignedRun) -> None:
        save_run(paths, decode_signed(signed.data))

    return Manifests(
        decode=lambda data: signed_run(decode_signed(data)),
        terms=lambda signed: terms_of(manifest_of(signed)),
        save=save,
        load=lambda run: signed_run(load_run(paths, run)),
        stored=stored,
    )


def signed_run(signed: SignedManifest) -> SignedRun:
    """As the service hands it on."""
    return SignedRun(signed.run_id, signed.organiser, signed.encode())


def manifest_of(signed: SignedRun) -> Manifest:
    """After checking the signature. Raises BadSignatureError, ConfigError, VersionMismatchError."""
    return decode_signed(signed.data).open()


def terms_of(manifest: Manifest) -> RunTerms:
    """What a node goes by."""
    return RunTerms(
        name=manifest.name,
        settings=manifest.settings(),
        policy=manifest.join.policy,
        allow=frozenset(map(PeerId, manifest.join.allow)),
        names_sites=manifest.names_sites,
        probation=manifest.join.probation,
        per_hour=manifest.join.per_hour,
        encrypts=manifest.lanes.encrypt,
        lanes=manifest.lanes.per_peer,
        checkpoint_every=manifest.checkpoint.every,
        keep_contributions=manifest.audit.keep_contributions,
        start_with=manifest.train.start_with or 1,
        least_masked=manifest.secure.threshold if manifest.secure else 0,
        bans_by_quorum=manifest.quorum.bans == "quorum",
        parameters=manifest.parameters,
        entry=manifest.model.entry,
        averaging=averaging_text(manifest),
    )
