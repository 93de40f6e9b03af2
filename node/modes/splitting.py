"""A run's members in clusters by the direction of what they contributed lately, and a manifest for
a run of each cluster.

As the simulation does it, with the same code (`optim.modes.clusters`), from contributions that
members have signed and kept. What comes of it names members and says how alike their updates are on
average; nothing else of a contribution leaves the process that looks at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ...collectives.codecs.codec import Chunking
from ...collectives.codecs.encoded import EncodedVector
from ...collectives.errors import ConfigError
from ...collectives.group import Entry
from ...collectives.identifiers import PeerId
from ...collectives.layout import Layout
from ...optim.modes.clusters import adjusted_rand, alike, clusters, same_names
from ..manifest import Manifest
from ..manifest.tables import JoinTable
from ..records.audit import AuditSource
from ..records.export import read_info
from ..records.figures import Split
from ..records.recompute import contributions_of, missing
from ..storage.contributions import FOLDER as CONTRIBUTIONS

MAX_NAME = 58  # of the parent's name in a cluster's


def check_split(manifest: Manifest) -> None:
    """Raise ConfigError for a run whose members cannot be told apart by what they contributed."""
    for wrong, key, why, hint in (
        (
            manifest.secure is not None,
            "$.secure",
            "Contributions are masked, and clusters are found from contributions in the clear.",
            (
                "A site can still fine-tune the run's model, or train one of its own beside "
                'it: personal = "ditto"'
            ),
        ),
        (
            not manifest.audit.keep_contributions,
            "$.audit.keep_contributions",
            "Members of this run do not keep what they contribute.",
            (
                "Another run, of the exported model (atoll new RUN.toml --from DIR), with [audit] "
                "keep_contributions = 2, or more"
            ),
        ),
        (
            manifest.exchange.fragments > 1,
            "$.exchange.fragments",
            "No contribution of such a run is of the whole model.",
            "fragments = 1",
        ),
    ):
        if wrong:
            raise ConfigError(
                f"{manifest.name} cannot be split: {key}", key=key, why=why, hint=hint
            )


def split(
    source: AuditSource,
    folders: Sequence[Path],
    rounds: int = 2,
    count: int | None = None,
    progress: Callable[[int], None] = lambda entry: None,
) -> Split:
    """Cluster by the newest ``rounds`` rounds, from what ``folders`` and the node's own folder
    hold; ``count``: so many clusters, not as many as show.

    Of each half of these rounds a member's direction is the sum of its updates, each of length 1.
    The log itself is `audit`'s affair.

    Raises ConfigError where contributions are missing, SecurityError E204 for one that is not what
    its contributor has signed, StorageError.
    """
    check_split(source.signed.open())
    (log,) = source.logs
    places = [
        folder
        for folder in (*folders, *(folder.parent / CONTRIBUTIONS for folder in source.folders))
        if folder.is_dir()
    ]
    entries, members = newest_rounds(
        source, log, rounds, places, 2, "two clusterings of different rounds are compared"
    )
    layout = read_info(source.folders[0]).layout
    middle = len(entries) // 2
    halves = [
        _directions(source, half, places, layout, progress)
        for half in (entries[:middle], entries[middle:])
    ]
    seen = [peer for peer in members if all(peer in half for half in halves)]
    if not seen:
        raise ConfigError(
            f"no member contributed in both halves of {len(entries)} rounds",
            key="--rounds",
            hint="More rounds: --rounds N",
        )
    found, newest = list[list[int]](), torch.empty(0)
    for half in halves:
        newest = torch.stack([half.pop(peer) for peer in seen])
        found.append(clusters(newest, count=count))
    before, after = found[0], same_names(*found)
    groups = [
        tuple(peer for peer, name in zip(seen, after, strict=True) if name == each)
        for each in sorted(set(after))
    ]
    within, between = alike(newest, after)
    return Split(
        tuple(sorted(groups, key=lambda group: (-len(group), group))),
        tuple(peer for peer in members if peer not in seen),
        adjusted_rand(before, after),
        within,
        between,
        tuple(entry.round for entry in entries),
    )


def manifests(parent: Manifest, found: Split) -> list[Manifest]:
    """A manifest for each cluster: the parent's, of another name, which only members of the cluster
    may enter.
    """
    return [
        msgspec.structs.replace(
            parent,
            name=f"{parent.name[:MAX_NAME]}-{number}",
            join=JoinTable(policy="allow", allow=tuple(members)),
            description=(
                f"cluster {number} of {len(found.clusters)} of {parent.name}, {parent.run_id}"
            ),
        )
        for number, members in enumerate(found.clusters, 1)
    ]


def newest_rounds(
    source: AuditSource, log: str, rounds: int, folders: Sequence[Path], least: int, why: str
) -> tuple[list[Entry], list[PeerId]]:
    """The newest ``rounds`` rounds of which all contributions are here, the oldest first, and who
    the members are now.

    Raises ConfigError where there are fewer than ``least``, of which ``why`` says what they are
    for.
    """
    kept, members = (
        deque[Entry](maxlen=source.signed.open().audit.keep_contributions),
        list[PeerId](),
    )
    for certified in source.logs[log]():
        entry = certified.entry
        members = [member.peer for member in entry.next_config]
        if entry.contributors:
            kept.append(entry)
    found = [entry for entry in kept if not missing(entry, folders)][-rounds:]
    if len(found) < least:
        lost = sorted({peer for entry in [*kept][-least:] for peer in missing(entry, folders)})
        raise ConfigError(
            f"there are {len(found)} rounds of which all contributions are here, and {why}",
            key="--from",
            why=f"Of the newest rounds those of {', '.join(lost)} are missing."
            if lost
            else f"The run has {len(kept)} rounds that are kept.",
            hint=(
                f"Ask the members for their folder {CONTRIBUTIONS}, and name "
                "each copy: --from FOLDER"
            ),
        )
    return found, members


def _directions(
    source: AuditSource,
    entries: Iterable[Entry],
    folders: Sequence[Path],
    layout: Layout,
    progress: Callable[[int], None],
) -> dict[PeerId, Tensor]:
    """By contributor: the sum of its updates, each of length 1, parameters only; of those that have
    a direction.
    """
    found = dict[PeerId, Tensor]()
    for entry in entries:
        chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements)
        vectors = contributions_of(source, entry, chunking, folders)
        for contributor, vector in zip(entry.contributors, vectors, strict=True):
            EncodedVector(chunking, vector).decode(values := torch.empty(chunking.numel))
            update = _parameters(values, layout)
            peer, length = contributor.member.peer, update.norm()
            if not torch.isfinite(length) or not length:
                continue
            found[peer] = (
                update.div_(length).add_(found[peer]) if peer in found else update.div_(length)
            )
        progress(entry.round)
    return found


def _parameters(values: Tensor, layout: Layout) -> Tensor:
    """Without running statistics and sums."""
    return torch.cat(
        [
            values[spec.offset : spec.offset + spec.numel]
            for spec in layout.tensors
            if spec.role == "parameter"
        ]
    )
