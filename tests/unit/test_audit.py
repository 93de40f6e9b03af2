"""Audit: a log that was decided as it says is proven, one that was touched anywhere is not, and two
histories name who signed both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.digest import chunk_hash, merkle_root
from atoll.collectives.errors import AtollError, SecurityError, StorageError
from atoll.collectives.group import Certified, Contributor, Entry, Member, Part, Vote
from atoll.collectives.identifiers import RunId
from atoll.collectives.round.certificate import genesis_payload, recertified_payload, vote_payload
from atoll.collectives.round.sampling import draw_members
from atoll.collectives.round_settings import SampleSettings
from atoll.node.cli import run
from atoll.node.home.paths import Paths, find_paths
from atoll.node.manifest import SignedManifest, parse_manifest, save_run, sign_manifest
from atoll.node.records.audit import (
    BAN,
    MAGIC,
    Audited,
    PeerShare,
    audit,
    of_archive,
    of_node,
    write_archive,
)
from atoll.node.run.banning import Ban, Bans
from atoll.node.run.proof import twice
from atoll.node.service.ports import DOMAIN
from atoll.node.session.fragments import logs_of
from atoll.node.storage.frames import framed
from atoll.node.storage.journal import FileJournal
from atoll.security.identity import Identity

KEYS = [Identity(bytes([i]) * 32) for i in range(1, 5)]
ORGANISER, SECOND, THIRD, STRANGER = KEYS
MANIFEST = 'schema = 1\nname = "tide"\n[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }\n'
SIGNED = sign_manifest(parse_manifest(MANIFEST), ORGANISER)
ZERO = bytes(32)


@dataclass
class Chain:
    """Entries that their members really signed."""

    signed: SignedManifest = SIGNED
    log: str = logs_of(SIGNED.run_id, 1)[0]
    entries: list[Certified] = field(default_factory=list[Certified])

    def entry(
        self,
        members: list[Identity],
        givers: list[Identity],
        root: bytes = ZERO,
        reducer: str = "mean",
    ) -> Entry:
        """The next entry, unsigned."""
        base = self.entries[-1].entry.hash() if self.entries else ZERO
        contributors = tuple(
            Contributor(Member(k.peer, 0), bytes([i]) * 16, 10 + i) for i, k in enumerate(givers)
        )
        parts = (Part(givers[0].peer, 0, 1),) if givers else ()
        config = tuple(sorted(Member(k.peer, 0) for k in members))
        return Entry(
            self.log,
            len(self.entries),
            base,
            root,
            contributors,
            parts,
            (ZERO,) * len(parts),
            4,
            4,
            "fp32",
            reducer,
            config,
        )

    def found(self, members: list[Identity], by: Identity = ORGANISER) -> None:
        """The genesis."""
        entry = self.entry(members, [])
        signature = by.sign(DOMAIN, genesis_payload(self.signed.run_id, entry.hash()))
        self.entries.append(Certified(entry, (Vote(Member(by.peer, 0), 0, signature),)))

    def decide(self, entry: Entry, voters: list[Identity], ballot: int = 0) -> None:
        """Append an entry with votes."""
        payload = vote_payload(
            self.signed.run_id, self.log, entry.round, entry.base, ballot, entry.hash()
        )
        votes = tuple(Vote(Member(k.peer, 0), ballot, k.sign(DOMAIN, payload)) for k in voters)
        self.entries.append(Certified(entry, votes))

    def recertify(self, entry: Entry, without: list[Identity]) -> None:
        """Append an entry on the organiser's word."""
        removed = tuple(sorted(Member(k.peer, 0) for k in without))
        payload = recertified_payload(
            self.signed.run_id, self.log, entry.round, entry.hash(), removed
        )
        self.entries.append(
            Certified(
                entry,
                (Vote(Member(ORGANISER.peer, 0), 0, ORGANISER.sign(DOMAIN, payload)),),
                removed,
            )
        )

    def store(self, home: Path) -> Paths:
        """As a node keeps it."""
        paths = find_paths(home)
        paths.ensure()
        journal = FileJournal(save_run(paths, self.signed) / "journal")
        for certified in self.entries:
            journal.append(certified)
        journal.close()
        return paths

    def archive(self, path: Path) -> Path:
        """As somebody hands it over, whatever it is."""
        frames = [
            framed(self.signed.encode()),
            *(framed(msgspec.msgpack.encode(certified)) for certified in self.entries),
        ]
        path.write_bytes(MAGIC + b"".join(frames))
        return path


def honest(rounds: int = 3) -> Chain:
    """The organiser alone, then two more who join, then rounds of two or three."""
    chain = Chain()
    chain.found([ORGANISER])
    chain.decide(chain.entry([ORGANISER, SECOND, THIRD], [ORGANISER]), [ORGANISER])
    for number in range(rounds):
        givers = KEYS[: 2 + number % 2]
        chain.decide(chain.entry(KEYS[:3], givers), givers, ballot=number)
    return chain


def audited(chain: Chain, path: Path) -> Audited:
    """What the archive of a chain says."""
    return audit(of_archive(chain.archive(path)), chain.log)


def test_an_honest_log_is_proven_and_told(tmp_path: Path) -> None:
    chain = honest()
    found = audited(chain, tmp_path / "a")
    assert (found.entries, found.rounds, found.votes) == (5, 4, 1 + 1 + 2 + 3 + 2)
    assert found.head == chain.entries[-1].entry.hash()
    assert found.contributors == {
        ORGANISER.peer: PeerShare(4, 40),
        SECOND.peer: PeerShare(3, 33),
        THIRD.peer: PeerShare(1, 12),
    }
    assert [(c.entry, set(c.joined), c.left) for c in found.changes] == [
        (0, {ORGANISER.peer}, ()),
        (1, {SECOND.peer, THIRD.peer}, ()),
    ]
    assert set(found.members) == {k.peer for k in KEYS[:3]}


def test_the_organisers_word_is_proven_too(tmp_path: Path) -> None:
    chain = honest()
    chain.recertify(chain.entry([ORGANISER], []), [SECOND, THIRD])
    chain.decide(chain.entry([ORGANISER], [ORGANISER]), [ORGANISER])
    found = audited(chain, tmp_path / "a")
    assert (found.entries, found.members) == (7, (ORGANISER.peer,))
    assert set(found.changes[-1].removed) == {SECOND.peer, THIRD.peer}


def _stranger_votes(chain: Chain) -> None:
    chain.decide(chain.entry(KEYS[:3], [ORGANISER]), [ORGANISER, STRANGER])


def _too_few(chain: Chain) -> None:
    chain.decide(chain.entry(KEYS[:3], [SECOND]), [SECOND])


def _two_ballots(chain: Chain) -> None:
    entry = chain.entry(KEYS[:3], [SECOND])
    chain.decide(entry, [SECOND], 0)
    chain.decide(entry, [THIRD], 1)
    both = chain.entries[-2].votes + chain.entries[-1].votes
    chain.entries[-2:] = [Certified(entry, both)]


def _samples_added(chain: Chain) -> None:
    certified = chain.entries[2]
    share = msgspec.structs.replace(certified.entry.contributors[0], weight=1000)
    entry = msgspec.structs.replace(
        certified.entry, contributors=(share, *certified.entry.contributors[1:])
    )
    chain.entries[2] = Certified(entry, certified.votes)


def _entry_cut_out(chain: Chain) -> None:
    del chain.entries[2]


def _founded_by_another(chain: Chain) -> None:
    del chain.entries[:]
    chain.found([SECOND], by=SECOND)


def _removed_by_another(chain: Chain) -> None:
    chain.recertify(chain.entry([ORGANISER], []), [SECOND, THIRD])
    certified = chain.entries[-1]
    payload = recertified_payload(
        chain.signed.run_id,
        chain.log,
        certified.entry.round,
        certified.entry.hash(),
        certified.removed,
    )
    votes = (Vote(Member(ORGANISER.peer, 0), 0, SECOND.sign(DOMAIN, payload)),)
    chain.entries[-1] = Certified(certified.entry, votes, certified.removed)


LIES = [
    _stranger_votes,
    _too_few,
    _two_ballots,
    _samples_added,
    _entry_cut_out,
    _founded_by_another,
    _removed_by_another,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__.strip("_"))
def test_a_log_that_was_touched_is_not_proven(tmp_path: Path, lie: object) -> None:
    chain = honest()
    assert callable(lie)
    lie(chain)
    with pytest.raises(SecurityError) as caught:
        audited(chain, tmp_path / "a")
    assert (caught.value.code, caught.value.exit_code) == ("E204", 77)


@given(st.data())
def test_any_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = honest(1).archive(tmp_path_factory.mktemp("audit") / "a")
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    with pytest.raises(AtollError):
        audit(of_archive(path), Chain.log)


def test_an_archive_cut_between_entries_is_a_shorter_log(tmp_path: Path) -> None:
    whole, part = honest(3), honest(1)
    assert audited(part, tmp_path / "part").entries == 3
    path = whole.archive(tmp_path / "whole")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="frame 5"):
        audit(of_archive(path), whole.log)


def test_command_checks_exports_and_compares(
    atoll_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = honest()
    paths = chain.store(atoll_home)
    archive = tmp_path / "tide.log"
    assert run(["audit", "tide", "--export", str(archive), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["proven"], said["logs"][0]["entries"], said["state"]) == (True, 5, [])
    assert write_archive(of_node(paths, chain.signed), tmp_path / "again") == archive.stat().st_size
    assert (
        archive.read_bytes()
        == (tmp_path / "again").read_bytes()
        == chain.archive(tmp_path / "third").read_bytes()
    )
    assert (
        run(["--home", str(tmp_path / "nowhere"), "audit", str(archive)]) == 0
    )  # without anything else
    assert "33       38.8%" in capsys.readouterr().out
    assert run(["audit", "tide", "--with", str(honest(1).archive(tmp_path / "short"))]) == 0
    assert "says the same" in capsys.readouterr().err


def test_a_journal_that_a_node_writes_is_read_to_its_last_whole_entry(atoll_home: Path) -> None:
    chain = honest()
    paths = chain.store(atoll_home)
    entries = paths.run_dir(chain.signed.run_id) / "journal" / "entries"
    entries.write_bytes(entries.read_bytes() + framed(b"half an entry")[:9])
    assert audit(of_node(paths, chain.signed), chain.log).entries == 5


@pytest.mark.parametrize("lies", [True, False], ids=["one ballot", "two ballots"])
def test_two_histories_name_who_signed_both(
    atoll_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lies: bool
) -> None:
    mine, theirs = honest(), honest()
    mine.decide(mine.entry(KEYS[:3], [SECOND]), [SECOND, ORGANISER], 1)
    theirs.decide(theirs.entry(KEYS[:3], [THIRD]), [SECOND, THIRD], 1 if lies else 2)
    framing = theirs.entries[
        -1
    ]  # a vote of the organiser's that it never signed proves nothing against it
    forged = Vote(Member(ORGANISER.peer, 0), framing.votes[0].ballot, bytes(64))
    theirs.entries[-1] = Certified(framing.entry, (*framing.votes, forged))
    mine.store(atoll_home)
    assert (
        run(["audit", "tide", "--with", str(theirs.archive(tmp_path / "theirs")), "--json"]) == 77
    )
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], "entry 5" in error["message"]) == ("E203" if lies else "E204", True)
    assert (SECOND.peer[-8:] in error["message"], ORGANISER.peer[-8:] in error["message"]) == (
        lies,
        False,
    )


@pytest.mark.parametrize("signs", ["two beginnings", "two words"])
def test_an_organiser_that_signs_two_entries_of_one_number_is_named(
    atoll_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], signs: str
) -> None:
    """Its word is a whole certificate: of two, each is proven, and both together prove that it
    lied.
    """
    mine, theirs = honest(), honest()
    if signs == "two beginnings":
        mine, theirs = Chain(), Chain()
        mine.found([ORGANISER])
        theirs.found([ORGANISER, SECOND])
    else:
        mine.recertify(mine.entry([ORGANISER, THIRD], []), [SECOND])
        theirs.recertify(theirs.entry([ORGANISER, SECOND], []), [THIRD])
    mine.store(atoll_home)
    there = theirs.archive(tmp_path / "theirs")
    assert run(["audit", "tide", "--with", str(there), "--json"]) == 77
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "E203"
    assert f"{ORGANISER.peer[-8:]} signed both" in error["message"]


def test_a_ban_with_a_proof_is_checked_and_one_that_proves_nothing_is_told(
    atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    votes = [
        vote_payload(SIGNED.run_id, "main/x", 3, bytes(32), 1, bytes([i]) * 32) for i in (1, 2)
    ]
    one, other = ((payload, SECOND.sign(DOMAIN, payload)) for payload in votes)
    chain = honest()
    folder = chain.store(atoll_home).run_dir(SIGNED.run_id)
    bans = Bans(folder, SIGNED.run_id, ORGANISER.peer)
    assert bans.convict(Ban(SECOND.peer, "", 5, twice(SECOND.peer, one, other).encode()))
    assert run(["audit", "tide", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["bans"]
    assert row == {
        "peer": SECOND.peer,
        "by": "this machine",
        "proves": "it has voted for two values of one ballot",
    }
    archive = atoll_home / "run.log"
    assert run(["audit", "tide", "--export", str(archive)]) == 0
    capsys.readouterr()
    elsewhere = ["--home", str(atoll_home / "nowhere")]
    assert (
        run([*elsewhere, "audit", str(archive), "--json"]) == 0
    )  # a third party checks it from the file alone
    assert json.loads(capsys.readouterr().out)["bans"] == [{**row, "by": "who wrote this archive"}]
    framed_ = twice(THIRD.peer, one, other).encode()
    assert bans.convict(Ban(THIRD.peer, "", 5, framed_))
    assert run(["audit", "tide"]) == 77
    assert THIRD.peer in capsys.readouterr().err
    for body in (
        BAN + msgspec.msgpack.encode(["the organiser", THIRD.peer, framed_]),
        BAN + b"\xff",
    ):
        archive.write_bytes(chain.archive(atoll_home / "plain").read_bytes() + framed(body))
        assert run([*elsewhere, "audit", str(archive)]) in (74, 77)


def test_a_model_that_the_log_does_not_name_is_told(
    atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from atoll.collectives.layout import make_layout
    from atoll.node.storage.checkpoint import SavedCheckpoint, save

    anchor, momentum = torch.arange(4.0), torch.ones(4)
    root = merkle_root([chunk_hash(anchor.numpy().tobytes() + momentum.numpy().tobytes())])
    for named, status in ((root, 0), (ZERO, 77)):
        chain = honest(1)
        chain.decide(chain.entry(KEYS[:3], KEYS[:2], root=named), KEYS[:2])
        paths = chain.store(atoll_home / named.hex())
        folder = paths.run_dir(chain.signed.run_id) / "checkpoint"
        saved = SavedCheckpoint(2, 2, root, anchor, momentum)
        save(
            folder,
            make_layout([("w", (4,))]),
            saved,
            run_id=chain.signed.run_id,
            entry_hash=chain.entries[2].entry.hash(),
        )
        assert run(["--home", str(atoll_home / named.hex()), "audit", "tide"]) == status
        said = capsys.readouterr()
        assert "is the one that the log names" in said.out or "is not the state" in said.err


def test_what_is_no_archive_or_no_log(
    atoll_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"hello, this is text")
    assert run(["audit", str(other)]) == 78
    find_paths(atoll_home).ensure()
    save_run(find_paths(atoll_home), SIGNED)
    assert run(["audit", "tide"]) == 78
    assert "no log" in capsys.readouterr().err
    foreign = Chain(signed=sign_manifest(parse_manifest(MANIFEST.replace("tide", "ebb")), SECOND))
    foreign.log = logs_of(foreign.signed.run_id, 1)[0]
    foreign.found([SECOND], by=SECOND)
    honest().store(atoll_home / "two")
    assert (
        run(
            [
                "--home",
                str(atoll_home / "two"),
                "audit",
                "tide",
                "--with",
                str(foreign.archive(tmp_path / "f")),
            ]
        )
        == 78
    )
    assert RunId(foreign.signed.run_id) in capsys.readouterr().err


def test_a_contribution_that_was_not_drawn_is_found(tmp_path: Path) -> None:
    """Every round's draw follows from the entry before: whoever has the log can make it again."""
    signed = sign_manifest(
        parse_manifest(
            MANIFEST.replace("[model]", 'kind = "federated"\nfederated = { sample = 1 }\n[model]')
        ),
        ORGANISER,
    )
    chain = Chain(signed, logs_of(signed.run_id, 1)[0])
    chain.found(KEYS[:3])
    for _ in range(4):
        before = chain.entries[-1].entry
        (chosen,) = draw_members(
            signed.run_id, before.hash(), before.next_config, SampleSettings(count=1)
        )
        giver = next(key for key in KEYS if key.peer == chosen.peer)
        chain.decide(chain.entry(KEYS[:3], [giver]), KEYS[:3])
    assert audited(chain, tmp_path / "a").rounds == 4
    before = chain.entries[-1].entry
    (chosen,) = draw_members(
        signed.run_id, before.hash(), before.next_config, SampleSettings(count=1)
    )
    other = next(key for key in KEYS[:3] if key.peer != chosen.peer)
    chain.decide(chain.entry(KEYS[:3], [other]), KEYS[:3])
    with pytest.raises(SecurityError, match=f"{other.peer}, which was not drawn"):
        audited(chain, tmp_path / "b")
