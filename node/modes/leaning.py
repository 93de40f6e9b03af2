"""Who leans: members whose contributions keep pointing one way over many rounds, from what members
have signed and kept.

Figures for people (`security.rules.leaning` says what they are, and how often they are wrong):
nobody is banned for them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...collectives.codecs.codec import Chunking
from ...collectives.codecs.encoded import EncodedVector
from ...collectives.errors import ConfigError
from ...collectives.identifiers import PeerId
from ...security.rules.leaning import LEAST_ROUNDS, Leaning, chance
from ..records.audit import AuditSource
from ..records.export import read_info
from ..records.figures import Leaner, Leans
from ..records.recompute import contributions_of
from ..storage.contributions import FOLDER as CONTRIBUTIONS
from .splitting import newest_rounds

SAMPLED = 65_536  # elements that are looked at: a direction of many shows in a sample of them
LEAST_MEMBERS = 3  # of two, each is the other's median


def leans(
    source: AuditSource,
    log: str,
    rounds: int,
    folders: Sequence[Path],
    progress: Callable[[int], None] = lambda entry: None,
) -> Leans:
    """Look at the newest ``rounds`` rounds of a log, from what ``folders`` and the node's own
    folder hold. The log itself is `audit`'s affair.

    Of long vectors a sample is looked at, drawn anew each time, so that nobody can lean beside it.
    Raises ConfigError where contributions are missing or the run has none in the clear,
    SecurityError E204 for one that is not what its contributor has signed, StorageError.
    """
    manifest = source.signed.open()
    if not manifest.audit.keep_contributions:
        raise ConfigError(
            f"members of {manifest.name} do not keep what they contribute",
            key="$.audit.keep_contributions",
            hint=f"A run with [audit] keep_contributions = {LEAST_ROUNDS}, or more",
        )
    places = [
        folder
        for folder in (*folders, *(folder.parent / CONTRIBUTIONS for folder in source.folders))
        if folder.is_dir()
    ]
    why = f"a direction is told from noise by {LEAST_ROUNDS}"
    entries, _ = newest_rounds(source, log, rounds, places, LEAST_ROUNDS, why)
    entries = [entry for entry in entries if len(entry.contributors) >= LEAST_MEMBERS]
    f = manifest.robust.f or 1
    found, chosen = Leaning[PeerId](f, len(entries)), _sample(source, log, entries[0].numel)
    for entry in entries:
        chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements)
        rows = torch.empty(len(entry.contributors), len(chosen))
        values = torch.empty(chunking.numel)
        for row, vector in zip(
            rows, contributions_of(source, entry, chunking, places), strict=True
        ):
            EncodedVector(chunking, vector).decode(values)
            row.copy_(values[chosen])
        found.saw([contributor.member.peer for contributor in entry.contributors], rows)
        progress(entry.round)
    members = min(len(entry.contributors) for entry in entries)
    return Leans(
        log,
        tuple(entry.round for entry in entries),
        len(chosen),
        f,
        chance(members, f),
        tuple(
            Leaner(row.who, row.constancy, row.against, row.rounds, row.leans)
            for row in found.found()
        ),
    )


def _sample(source: AuditSource, log: str, numel: int) -> Tensor:
    """Indices of the elements to look at, int64: of parameters only, where a checkpoint beside the
    log says which these are.
    """
    kept = torch.ones(numel, dtype=torch.bool)
    place = dict(zip(source.logs, source.folders, strict=False)).get(log)
    if place is not None and (layout := read_info(place).layout).numel == numel:
        for spec in layout.tensors:
            kept[spec.offset : spec.offset + spec.numel] = spec.role == "parameter"
    found = kept.nonzero().flatten()
    if len(found) <= SAMPLED:
        return found
    order = torch.Generator().manual_seed(secrets.randbits(63))
    drawn = torch.randint(len(found), (SAMPLED,), generator=order)
    return found[drawn.unique()]
