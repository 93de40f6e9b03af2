"""Check the log of a run with nothing but the log: whether it was decided as it says, by whom, and
who contributed.

Every member's journal is a chain: each entry names the hash of the one before it and carries the
signatures of those who decided it, from the genesis on, which the organiser signed, as it did the
manifest whose hash is the run's id. Source of a log is a node's journal, or an *archive*: one file
with the signed manifest and the entries of all logs of the run, for somebody who has nothing else.
No node is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from ...collectives.errors import (
    ConfigError,
    ProtocolError,
    RemoteProtocolError,
    SecurityError,
    StorageError,
)
from ...collectives.foreign import PLAIN, WORDS
from ...collectives.group import MAX_PEER_ID, Certified, Config, Entry, Member
from ...collectives.identifiers import PeerId, RunId
from ...collectives.round.certificate import check_genesis, check_log, vote_payload
from ...collectives.round.log import rounds_in
from ...collectives.round.sampling import draw_members
from ...security.identity import verify
from ..home.paths import Paths
from ..home.refusals import storage_error
from ..manifest import SignedManifest, decode_signed
from ..run.banning import Bans
from ..run.evidence import check
from ..run.proof import MAX_EVIDENCE
from ..run.signing import DOMAIN
from ..session.fragments import logs_of
from ..storage.frames import framed, read_frames
from ..storage.journal import stored_entries
from .export import CHECKPOINT_FOLDER

MAGIC = b"atoll-log-1\n"
HERE, WRITER = "this machine", "who wrote this archive"
BAN = b"ban "  # begins a frame of an archive that is no entry: these are arrays
_certified = msgspec.msgpack.Decoder(Certified)
Logs = dict[str, Callable[[], Iterator[Certified]]]
"""By name of each log of the run: its entries from the genesis on, as often as they are asked for.
"""


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """A ban, whose it is, and its proof."""

    by: Annotated[str, msgspec.Meta(max_length=64, pattern=WORDS)]
    peer: Annotated[PeerId, msgspec.Meta(max_length=MAX_PEER_ID, pattern=PLAIN)]
    proof: Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]


_evidence = msgspec.msgpack.Decoder(Evidence)


class AuditSource(NamedTuple):
    """The logs of one run, the bans with proof beside them, and where they were read. ``folders``:
    of the checkpoints, where there are any.
    """

    path: Path
    signed: SignedManifest
    logs: Logs
    folders: tuple[Path, ...] = ()
    bans: Callable[[], list[Evidence]] = list


class PeerShare(msgspec.Struct):
    """What one peer contributed: in how many rounds, of how many samples."""

    rounds: int = 0
    samples: int = 0


class ConfigurationChange(msgspec.Struct, frozen=True):
    """Entry number ``entry`` changed who decides from then on. ``removed``: on the organiser's
    word, for good.
    """

    entry: int
    joined: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    removed: tuple[PeerId, ...]


class Audited(msgspec.Struct, frozen=True):
    """What one log says, all of it checked. ``head``: hash of its newest entry; ``votes``:
    signatures under its entries.
    """

    log: str
    entries: int
    rounds: int
    votes: int
    head: bytes
    members: tuple[PeerId, ...]
    contributors: dict[PeerId, PeerShare]
    changes: tuple[ConfigurationChange, ...]


class LogFork(msgspec.Struct, frozen=True):
    """Two certified logs of one run differ from entry ``entry`` on. ``both``: who signed in both;
    ``liars``: under one ballot, or twice as the organiser, which no honest member does that has not
    lost its disk."""

    log: str
    entry: int
    both: tuple[PeerId, ...]
    liars: tuple[PeerId, ...]


def of_node(paths: Paths, signed: SignedManifest) -> AuditSource:
    """The logs of a run that is stored on this machine."""
    fragments = signed.open().exchange.fragments
    folders = paths.state_dirs(signed.run_id, fragments)
    names = logs_of(signed.run_id, fragments)
    return AuditSource(
        paths.run_dir(signed.run_id),
        signed,
        {
            name: lambda folder=folder: stored_entries(folder / "journal")
            for name, folder in zip(names, folders, strict=True)
        },
        tuple(folder / CHECKPOINT_FOLDER for folder in folders),
        lambda: _bans_of(paths, signed),
    )


def of_archive(path: Path) -> AuditSource:
    """The logs in an archive. Raises StorageError, ConfigError, BadSignatureError."""
    with closing(_bodies(path)) as bodies:
        signed = decode_signed(next(bodies, b""))
    names = logs_of(signed.run_id, signed.open().exchange.fragments)
    logs = {name: lambda name=name: _archived(path, name, names) for name in names}
    return AuditSource(path, signed, logs, bans=lambda: _archived_bans(path))


def _bans_of(paths: Paths, signed: SignedManifest) -> list[Evidence]:
    bans = Bans(paths.run_dir(signed.run_id), signed.run_id, signed.organiser)
    bans.load()
    listed = (("the organiser", bans.of_run), (HERE, bans.here))
    return [
        Evidence(by, ban.peer, ban.evidence)
        for by, some in listed
        for ban in some.values()
        if ban.evidence
    ]


class Proven(msgspec.Struct, frozen=True):
    """A ban of this machine or of the run that carries its proof: what that proves."""

    peer: PeerId
    by: str
    what: str


def proven_bans(source: AuditSource) -> list[Proven]:
    """All bans beside a run's logs that carry evidence, checked. Raises SecurityError E204 where
    one proves nothing, StorageError.
    """
    found = list[Proven]()
    btard = source.signed.open().settings().btard
    peers = btard.peers if btard is not None else ()
    for ban in source.bans():
        try:
            proven, what = check(
                ban.proof,
                source.signed.run_id,
                _verify,
                source.signed.organiser,
                peers,
                source.signed.open().quorum.lying,
                _configurations(source),
            )
            if proven != ban.peer:
                raise RemoteProtocolError(
                    f"it is evidence against {proven}", peer=source.signed.organiser
                )
        except RemoteProtocolError as error:
            raise SecurityError(
                (
                    f"the ban of {ban.peer} by {ban.by} carries evidence that proves "
                    f"nothing: {error.message}"
                ),
                code="E204",
                hint=(
                    f"Lift it, if you do not believe it for another reason: atoll unban {ban.peer}"
                ),
            ) from None
        found.append(Proven(ban.peer, ban.by, what))
    return found


def _configurations(source: AuditSource) -> Iterator[list[PeerId]]:
    """The members of each entry of each log."""
    for entries in source.logs.values():
        for certified in entries():
            yield [member.peer for member in certified.entry.next_config]


def write_archive(source: AuditSource, path: Path) -> int:
    """Write an archive of all logs, and of the bans that prove themselves; how many bytes it has.

    Raises StorageError; a file that is there is replaced, at once or not at all.
    """
    draft = path.with_name(f".{path.name}.new")
    bodies = (
        msgspec.msgpack.encode(certified)
        for entries in source.logs.values()
        for certified in entries()
    )
    try:
        with open(draft, "wb") as file:
            file.write(MAGIC)
            elsewhere = (
                msgspec.structs.replace(ban, by=WRITER if ban.by == HERE else ban.by)
                for ban in source.bans()
            )
            bans = (BAN + msgspec.msgpack.encode(ban) for ban in elsewhere)
            for body in chain([source.signed.encode()], bodies, bans):
                file.write(framed(body))
            size = file.tell()
        draft.replace(path)
    except OSError as error:
        raise storage_error(f"cannot write {path}", error) from None
    finally:
        draft.unlink(missing_ok=True)
    return size


def audit(
    source: AuditSource, name: str, progress: Callable[[int], None] = lambda entry: None
) -> Audited:
    """Check one log of ``source`` from its genesis on. Raises SecurityError E204 at the first entry
    that was not decided as it says, StorageError where the file is damaged, ConfigError where there
    is no log."""
    entries = source.logs[name]()
    genesis = next(entries, None)
    if genesis is None:
        raise ConfigError(
            f"there is no log of run {source.signed.run_id} in {source.path}",
            why=(
                "The node has not yet received it from the other members, or the "
                "run was never founded."
            ),
            hint="atoll status shows how far the run is.",
        )
    manifest = source.signed.open()
    report, sample, byzantine = _Report(name), manifest.settings().sample, manifest.quorum.lying
    try:
        check_genesis(
            genesis,
            run=source.signed.run_id,
            organiser=source.signed.organiser,
            verify=_verify,
            peer=PeerId(""),
        )
        if genesis.entry.log != name:
            raise ProtocolError(f"the genesis entry is of log {genesis.entry.log}, not {name}")
        report.take(genesis, ())
        for certified in entries:
            check_log(
                [certified],
                run=source.signed.run_id,
                log=name,
                base=report.head,
                config=report.config,
                organiser=source.signed.organiser,
                verify=_verify,
                peer=PeerId(""),
                tolerated=byzantine,
            )
            if sample is not None:
                _check_draw_members(
                    certified.entry,
                    draw_members(source.signed.run_id, report.head, report.config, sample),
                )
            if certified.entry.round != report.entries:
                raise ProtocolError(f"entry {report.entries} is numbered {certified.entry.round}")
            report.take(certified, report.config)
            progress(report.entries)
    except ProtocolError as error:
        raise SecurityError(
            f"{source.path}: {error.message}",
            code="E204",
            why=(
                "This log was not decided by the members that it names: it was "
                "changed, or somebody made it up."
            ),
            hint="Audit another member's log of the run, and compare: atoll audit RUN --with FILE",
        ) from None
    return report.made()


def _check_draw_members(entry: Entry, chosen: Config) -> None:
    if strange := {contributor.member for contributor in entry.contributors} - set(chosen):
        peer = min(strange).peer
        raise RemoteProtocolError(
            f"entry {entry.round} counts a contribution of {peer}, which was not drawn for it",
            peer=peer,
        )


def root_before(source: AuditSource, name: str, entry: int) -> bytes | None:
    """Merkle root of the state that entry number ``entry`` was decided on; None where the log ends
    before it.
    """
    found = next(islice(source.logs[name](), entry, None), None)
    return None if found is None else found.entry.base_state


def fork(mine: AuditSource, theirs: AuditSource, name: str) -> LogFork | None:
    """Where one log of two sources, audited in both, first says different things; None where one is
    the beginning of the other.
    """
    for one, other in zip(mine.logs[name](), theirs.logs[name](), strict=False):
        if one.entry == other.entry:
            continue
        signed, others = (_signers(mine.signed.run_id, each) for each in (one, other))
        both = {member.peer for member, _ in signed} & {member.peer for member, _ in others}
        return LogFork(
            name,
            one.entry.round,
            tuple(sorted(both)),
            tuple(sorted({member.peer for member, _ in signed & others})),
        )
    return None


def _signers(run: RunId, certified: Certified) -> set[tuple[Member, int]]:
    """Who signed an entry, and under which ballot; a signature that does not verify says nothing
    about anybody.
    """
    entry, digest = certified.entry, certified.entry.hash()
    if certified.removed or not entry.round:  # on the organiser's word, which was checked
        return {(Member(vote.member.peer, 0), -1) for vote in certified.votes[:1]}
    votes = (
        (vote, vote_payload(run, entry.log, entry.round, entry.base, vote.ballot, digest))
        for vote in certified.votes
    )
    return {
        (vote.member, vote.ballot)
        for vote, payload in votes
        if _verify(vote.member.peer, payload, vote.signature)
    }


class _Report:
    """What is counted on the way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries = self.rounds = self.votes = 0
        self.head = b""
        self.config: Config = ()
        self.contributors = dict[PeerId, PeerShare]()
        self.changes = list[ConfigurationChange]()

    def take(self, certified: Certified, before: Config) -> None:
        """The next entry, which was checked."""
        entry = certified.entry
        earlier, later = (
            {member.peer for member in config} for config in (before, entry.next_config)
        )
        if earlier != later or certified.removed:
            removed = tuple(sorted({member.peer for member in certified.removed}))
            self.changes.append(
                ConfigurationChange(
                    entry.round,
                    tuple(sorted(later - earlier)),
                    tuple(sorted(earlier - later)),
                    removed,
                )
            )
        for peer, count in Counter(
            contributor.member.peer for contributor in entry.contributors
        ).items():
            self.contributors.setdefault(peer, PeerShare()).rounds += count
        for contributor in entry.contributors:
            self.contributors[contributor.member.peer].samples += contributor.weight
        self.entries += 1
        self.rounds += rounds_in(entry)
        self.votes += len(certified.votes)
        self.head, self.config = entry.hash(), entry.next_config

    def made(self) -> Audited:
        members = tuple(sorted(member.peer for member in self.config))
        ranked = dict(
            sorted(self.contributors.items(), key=lambda item: (-item[1].samples, item[0]))
        )
        return Audited(
            self.name,
            self.entries,
            self.rounds,
            self.votes,
            self.head,
            members,
            ranked,
            tuple(self.changes),
        )


def _verify(peer: PeerId, payload: bytes, signature: bytes) -> bool:
    return verify(peer, DOMAIN, payload, signature)


def _bodies(path: Path) -> Generator[bytes]:
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(
                    f"{path} is no archive of a run's log",
                    hint="Such a file is written by: atoll audit RUN --export FILE",
                )
            yield from read_frames(file, path)
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from None


def _archived(path: Path, name: str, names: Sequence[str]) -> Iterator[Certified]:
    bodies = _bodies(path)
    next(bodies, None)
    for body in bodies:
        if body.startswith(BAN):
            continue
        try:
            certified = _certified.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise StorageError(
                f"{path}: a frame is no entry: {error}", code="E303", exit_code=74
            ) from None
        if certified.entry.log not in names:
            raise StorageError(
                f"{path}: an entry of log {certified.entry.log!r} is not of this run",
                code="E303",
                exit_code=74,
            )
        if certified.entry.log == name:
            yield certified


def _archived_bans(path: Path) -> list[Evidence]:
    try:
        return [
            _evidence.decode(body[len(BAN) :]) for body in _bodies(path) if body.startswith(BAN)
        ]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StorageError(
            f"{path}: a frame is no ban: {error}", code="E303", exit_code=74
        ) from None
