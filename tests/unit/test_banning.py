"""Bans: the organiser's newest list wins and nobody else's counts; a machine's own is its own; what
cannot be read bans nobody and is told.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import NotAdmittedError, RemoteProtocolError, StorageError
from atoll.collectives.identifiers import RunId
from atoll.node.cli import run
from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run.banning import (
    DOMAIN,
    HERE_FILE,
    MAX_BANS,
    RUN_FILE,
    Ban,
    BanList,
    Bans,
    SignedBans,
)
from atoll.node.run.capability import capability_name
from atoll.node.run.entrants import Entrants
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity
from atoll.security.key_file import load_or_create

ORGANISER, MEMBER, BAD, WORSE = (Identity(bytes([i]) * 32) for i in range(1, 5))
RUN = RunId("a" * 26)
BAN = Ban(BAD.peer, "sign flips", 1_700_000_000)


def lists(folder: Path) -> Bans:
    """Those of one member."""
    folder.mkdir(exist_ok=True)
    return Bans(folder, RUN, ORGANISER.peer)


def list_of(*bans: Ban, sequence: int = 7, run: RunId = RUN, by: Identity = ORGANISER) -> bytes:
    """A list as it travels."""
    data = msgspec.msgpack.encode(BanList(run, sequence, bans))
    return msgspec.msgpack.encode(SignedBans(data, by.sign(DOMAIN, data)))


def test_the_organisers_ban_reaches_another_member_and_its_disk(tmp_path: Path) -> None:
    mine, theirs = lists(tmp_path / "a"), lists(tmp_path / "b")
    assert mine.change(BAN, BAD.peer, ORGANISER)
    assert theirs.take(mine.encoded, MEMBER.peer)
    assert not theirs.take(mine.encoded, MEMBER.peer)  # once
    again = lists(tmp_path / "b")
    again.load()
    for each in (mine, theirs, again):
        assert (each.peers, each.encoded) == ({BAD.peer}, mine.encoded)
        assert each.why(BAD.peer) == "the run's organiser has banned this peer: “sign flips”"
        with pytest.raises(NotAdmittedError) as caught:
            each.refuse(BAD.peer)
        assert (caught.value.code, caught.value.peer) == ("E205", BAD.peer)
        each.refuse(MEMBER.peer)
    assert mine.change(None, BAD.peer, ORGANISER)
    assert theirs.take(mine.encoded, MEMBER.peer)
    assert theirs.peers == set()
    assert not theirs.take(again.encoded, MEMBER.peer)  # an older list bans nobody again


def test_a_lift_counts_also_where_the_clock_went_back(tmp_path: Path) -> None:
    mine, theirs = lists(tmp_path / "a"), lists(tmp_path / "b")
    mine.change(msgspec.structs.replace(BAN, since_s=2_000_000_000), BAD.peer, ORGANISER)
    assert theirs.take(mine.encoded, MEMBER.peer)
    for ban in (None, BAN, None):
        mine.change(ban, BAD.peer, ORGANISER)
        assert theirs.take(mine.encoded, MEMBER.peer)
        assert theirs.peers == ({BAD.peer} if ban else set())


def test_a_machines_own_ban_is_told_to_nobody(tmp_path: Path) -> None:
    mine = lists(tmp_path)
    assert mine.change(BAN, BAD.peer, None)
    mine.change(Ban(WORSE.peer, "", 1), WORSE.peer, None)
    assert mine.encoded == b""
    again = lists(tmp_path)
    again.load()
    assert (again.peers, again.why(WORSE.peer)) == (
        {BAD.peer, WORSE.peer},
        "this member has banned this peer",
    )
    assert not again.change(None, MEMBER.peer, None)
    assert again.change(None, BAD.peer, None)
    assert again.peers == {WORSE.peer}


def test_a_revoked_invite_is_known_wherever_the_list_is(tmp_path: Path) -> None:
    mine, theirs = lists(tmp_path / "a"), lists(tmp_path / "b")
    mine.change(BAN, BAD.peer, ORGANISER)
    mine.revoke(b"nonce678", ORGANISER)
    assert theirs.take(mine.encoded, MEMBER.peer)
    mine.change(None, BAD.peer, ORGANISER)  # the one does not undo the other
    assert theirs.take(mine.encoded, MEMBER.peer)
    for each in (mine, theirs):
        each.check_invite(b"another8")
        with pytest.raises(NotAdmittedError, match="revoked"):
            each.check_invite(b"nonce678")
    assert (theirs.peers, theirs.revoked) == (set(), {b"nonce678"})


@pytest.mark.parametrize(
    "data",
    [
        list_of(BAN, by=MEMBER),
        list_of(BAN, run=RunId("b" * 26)),
        list_of(BAN)[:-1],
        list_of(*[BAN] * (MAX_BANS + 1)),
        list_of(msgspec.structs.replace(BAN, reason="x" * 201)),
        b"",
        bytes(1 << 20),
    ],
    ids=[
        "another's",
        "another run's",
        "cut short",
        "too many",
        "too long a reason",
        "empty",
        "too large",
    ],
)
def test_what_the_organiser_did_not_sign_is_refused_and_names_the_sender(
    tmp_path: Path, data: bytes
) -> None:
    mine = lists(tmp_path)
    with pytest.raises(RemoteProtocolError) as caught:
        mine.take(data, WORSE.peer)
    assert (caught.value.peer, mine.peers, list(tmp_path.iterdir())) == (WORSE.peer, set(), [])


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Bans(tmp_path_factory.getbasetemp(), RUN, ORGANISER.peer).take(data, BAD.peer)


@pytest.mark.parametrize("file", [RUN_FILE, HERE_FILE])
def test_a_damaged_list_is_told_and_the_other_counts(tmp_path: Path, file: str) -> None:
    mine = lists(tmp_path)
    mine.change(BAN, BAD.peer, ORGANISER)
    mine.change(Ban(WORSE.peer, "", 1), WORSE.peer, None)
    (tmp_path / file).write_bytes(b"\xc1")
    again = lists(tmp_path)
    with pytest.raises(StorageError, match=file) as caught:
        again.load()
    assert caught.value.code == "E303"
    assert again.peers == ({WORSE.peer} if file == RUN_FILE else {BAD.peer})


def test_commands_without_a_node(atoll_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = find_paths(atoll_home)
    paths.ensure()
    me = load_or_create(paths.identity_file)
    folder = save_run(paths, sign_manifest(parse_manifest('schema = 1\nname = "tide"\n'), me))
    assert run(["ban", BAD.peer, "--reason", "sign flips"]) == 0
    said = capsys.readouterr()
    assert "for all its members" in said.out
    assert "next start" in said.err
    assert run(["ban", WORSE.peer, "--here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole_run"] is False
    assert run(["bans", "--json"]) == 0
    assert [
        (b["peer"], b["by"], b["reason"]) for b in json.loads(capsys.readouterr().out)["bans"]
    ] == [
        (BAD.peer, "the organiser", "sign flips"),
        (WORSE.peer, "this machine", ""),
    ]
    assert run(["unban", WORSE.peer]) == 78  # it is banned here, not in the run
    assert "--here" in capsys.readouterr().err
    assert (
        run(["trust", MEMBER.peer]) == run(["trust", f"…{MEMBER.peer[-8:]}", "--no-longer"]) == 0
    )  # by its end, as it is listed
    assert run(["unban", f"…{BAD.peer[-8:]}"]) == run(["unban", WORSE.peer, "--here"]) == 0
    assert run(["bans"]) == 0
    assert "nobody is banned" in capsys.readouterr().out
    assert (
        run(["ban", me.peer]),
        run(["ban", "nobody"]),
        run(["ban", BAD.peer, "--reason", "x" * 201]),
    ) == (78, 2, 2)
    assert run(["ban", BAD.peer, "--run", "nope"]) == 78
    assert (folder / RUN_FILE).stat().st_mode & 0o777 == 0o600


def organisers_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, RunId, Identity]:
    """A home whose key organises a run by invite; BAD and MEMBER came by one invite."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    paths = find_paths(str(tmp_path))
    paths.ensure()
    identity = load_or_create(paths.identity_file)
    signed = sign_manifest(parse_manifest('schema = 1\nname = "tide"\n'), identity)
    save_run(paths, signed)
    entrants = Entrants(paths.run_dir(signed.run_id))
    came = make_invite(signed.run_id, [], identity, now_s=time.time()).capability
    entrants.enter(BAD.peer, came)
    entrants.enter(MEMBER.peer, came)
    return paths.run_dir(signed.run_id), signed.run_id, identity


def test_a_ban_names_the_invite_and_revokes_it_where_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run_id, identity = organisers_home(tmp_path, monkeypatch)
    bans = Bans(folder, run_id, identity.peer)
    assert run(["ban", BAD.peer, "--no-input"]) == 0
    told = capsys.readouterr().out
    came = Entrants(folder)
    came.load()
    name = capability_name(came.known[BAD.peer].nonce)
    assert f"came by invite {name}, as did 1 of the other peers" in told
    assert f"atoll invite revoke {name}" in told
    bans.load()
    assert (bans.revoked, bans.peers) == (frozenset(), {BAD.peer})
    assert run(["ban", BAD.peer, "--revoke-invite", "--no-input"]) == 0
    assert "nobody enters by it any more" in capsys.readouterr().out
    bans.load()
    assert bans.revoked == {came.known[BAD.peer].nonce}
    assert run(["ban", WORSE.peer, "--no-input"]) == 0
    assert "not known here" in capsys.readouterr().out
    assert run(["ban", WORSE.peer, "--here", "--revoke-invite"]) == 2


def test_an_invite_is_revoked_by_its_id_and_whoever_came_by_it_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run_id, identity = organisers_home(tmp_path, monkeypatch)
    came = Entrants(folder)
    came.load()
    name = capability_name(came.known[BAD.peer].nonce)
    assert run(["invite", "revoke", name, "--evict", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], set(told["banned"])) == (name, {BAD.peer, MEMBER.peer})
    bans = Bans(folder, run_id, identity.peer)
    bans.load()
    assert bans.revoked == {came.known[BAD.peer].nonce}
    assert bans.peers == {BAD.peer, MEMBER.peer}
    assert run(["invite", "revoke", "nonsense"]) == 77


def test_where_bans_need_a_quorum_the_organisers_list_counts_against_strangers_only(
    tmp_path: Path,
) -> None:
    members, bans = {BAD.peer, MEMBER.peer}, lists(tmp_path / "a")
    bans.spared = lambda: members
    worse = Ban(WORSE.peer, "", 1_700_000_000)
    assert bans.take(list_of(BAN, worse), MEMBER.peer)
    assert bans.peers == {WORSE.peer}
    assert bans.why(BAD.peer) is None
    bans.refuse(BAD.peer)
    assert bans.can_convict(BAD.peer)
    assert bans.change(BAN, BAD.peer, None)  # this machine's own word
    assert bans.peers == {BAD.peer, WORSE.peer}
    assert bans.why(BAD.peer) == "this member has banned this peer: “sign flips”"
    assert bans.change(None, BAD.peer, None)
    members.discard(BAD.peer)  # evicted
    assert bans.peers == {BAD.peer, WORSE.peer}
    assert bans.why(BAD.peer) == "the run's organiser has banned this peer: “sign flips”"
