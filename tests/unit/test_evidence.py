"""Evidence is self-contained: whoever has it bans for itself, nobody is banned by what proves
nothing, and a user has the last word.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.round.certificate import genesis_payload, vote_payload
from atoll.node.cli import run
from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run.banning import Ban, Bans
from atoll.node.run.evidence import accused, check
from atoll.node.run.proof import MAX_EVIDENCE, Twice, twice
from atoll.node.service.ports import DOMAIN
from atoll.node.session.record import statement_payload
from atoll.security.identity import Identity, verify
from atoll.security.key_file import load_or_create

ORGANISER, MEMBER, LIAR = (Identity(bytes([i]) * 32) for i in range(1, 4))
RUN = RunId("a" * 26)


def said(
    hash_: bytes,
    *,
    ballot: int = 0,
    round_: int = 5,
    run_id: str = RUN,
    by: Identity = LIAR,
    log: str = "main/x",
    base: bytes = b"0",
) -> tuple[bytes, bytes]:
    """A vote, and the signature under it."""
    payload = vote_payload(run_id, log, round_, base * 32, ballot, hash_ * 32)
    return payload, by.sign(DOMAIN, payload)


def proof(run_id: str = RUN) -> Twice:
    return twice(LIAR.peer, said(b"b", run_id=run_id), said(b"a", run_id=run_id))


def checked(data: bytes, run_id: RunId = RUN) -> str:
    return check(
        data,
        run_id,
        lambda peer, payload, signature: verify(peer, DOMAIN, payload, signature),
        MEMBER.peer,
    )[1]


def test_two_votes_for_one_ballot_are_proof() -> None:
    assert checked(proof().encode()) == "it has voted for two values of one ballot"
    assert (
        proof().encode() == twice(LIAR.peer, said(b"a"), said(b"b")).encode()
    )  # whoever puts it together


def test_what_is_known_need_not_be_checked_again(tmp_path: Path) -> None:
    data = proof().encode()
    assert accused(data) == LIAR.peer
    assert accused(b"\xff") is accused(bytes(MAX_EVIDENCE + 1)) is None
    bans = Bans(tmp_path, RUN, ORGANISER.peer)
    assert bans.can_convict(LIAR.peer)
    assert bans.convict(Ban(LIAR.peer, "", 1, data))
    assert not bans.can_convict(LIAR.peer)
    assert not bans.can_convict(ORGANISER.peer)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (said(b"a"), said(b"a"), "not of one slot"),
        (said(b"a"), said(b"b", ballot=1), "not of one slot"),
        (said(b"a"), said(b"b", round_=6), "not of one slot"),
        (said(b"a"), said(b"b", base=b"1"), "not of one slot"),  # another history of the run
        (said(b"a", log="op/x"), said(b"b", log="op/x"), "not of one slot"),
        (said(b"a", run_id="b" * 26), said(b"b", run_id="b" * 26), "not of one slot of this run"),
        (said(b"a"), said(b"b", by=MEMBER), "has not signed"),
        (said(b"a"), (genesis_payload(RUN, b"b" * 32), bytes(64)), "malformed"),
        (said(b"a"), (said(b"b")[0] + b"\0", said(b"b")[1]), "malformed"),
        (said(b"a"), (b"", bytes(64)), "malformed"),
    ],
)
def test_what_is_no_proof_is_refused_in_the_name_of_who_brings_it(
    first: tuple[bytes, bytes], second: tuple[bytes, bytes], told: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=told) as caught:
        checked(twice(LIAR.peer, first, second).encode())
    assert caught.value.peer == MEMBER.peer


def test_two_contributions_under_one_id_are_proof() -> None:
    both = [statement_payload(RUN, "main/x", 4, b"c" * 16, root * 32) for root in (b"a", b"b")]
    one, other = ((payload, LIAR.sign(DOMAIN, payload)) for payload in both)
    assert (
        checked(twice(LIAR.peer, one, other).encode())
        == "it has signed two contributions under one id"
    )


def test_evidence_is_bounded_and_in_one_order() -> None:
    with pytest.raises(RemoteProtocolError, match="evidence of"):
        checked(bytes(MAX_EVIDENCE + 1))
    found = proof()
    turned = Twice(LIAR.peer, found.other, found.other_signature, found.one, found.one_signature)
    with pytest.raises(RemoteProtocolError, match="not of one slot"):
        checked(turned.encode())


def test_a_proof_bans_here_until_the_user_says_otherwise_and_goes_into_the_organisers_list(
    tmp_path: Path,
) -> None:
    bans = Bans(tmp_path, RUN, ORGANISER.peer)
    ban = Ban(LIAR.peer, "voted twice", 1_700_000_000, proof().encode())
    assert bans.convict(ban)
    assert not bans.convict(ban)  # known
    again = Bans(tmp_path, RUN, ORGANISER.peer)
    again.load()
    assert again.here == {LIAR.peer: ban}
    assert again.change(None, LIAR.peer, None)  # lifted
    assert not again.convict(ban)  # and not banned by the same proof again
    late = Bans(tmp_path, RUN, ORGANISER.peer)
    late.load()
    assert (late.peers, late.pardoned) == (set(), {LIAR.peer})
    assert late.change(ban, LIAR.peer, None)
    assert late.pardoned == frozenset()
    assert late.change(ban, LIAR.peer, ORGANISER)
    other = Bans(tmp_path / "b", RUN, ORGANISER.peer)
    (tmp_path / "b").mkdir()
    assert other.take(late.encoded, MEMBER.peer)
    assert checked(other.of_run[LIAR.peer].evidence)


def test_who_is_trusted_is_not_convicted_and_trust_travels_with_the_organisers_list(
    tmp_path: Path,
) -> None:
    mine, theirs = Bans(tmp_path, RUN, ORGANISER.peer), Bans(tmp_path / "b", RUN, ORGANISER.peer)
    (tmp_path / "b").mkdir()
    assert mine.trust(LIAR.peer, True, ORGANISER)
    assert not mine.trust(LIAR.peer, True, ORGANISER)
    assert theirs.take(mine.encoded, MEMBER.peer)
    assert theirs.trusted == {LIAR.peer}
    assert not theirs.convict(Ban(LIAR.peer, "", 0, proof().encode()))
    assert not theirs.convict(Ban(ORGANISER.peer, "", 0, b"x"))
    assert mine.trust(LIAR.peer, False, ORGANISER)
    assert theirs.take(mine.encoded, MEMBER.peer)
    assert theirs.trust(MEMBER.peer, True, None)
    again = Bans(tmp_path / "b", RUN, ORGANISER.peer)
    again.load()
    assert (again.trusted, again.trusted_here) == ({MEMBER.peer}, {MEMBER.peer})


def test_bans_trust_and_audit_on_the_command_line(
    tmp_path: Path, atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = find_paths(atoll_home)
    identity = load_or_create(paths.identity_file)
    signed = sign_manifest(
        parse_manifest('schema = 1\nname = "x"\n[model]\nentry = "local:x"\n'), identity
    )
    folder = save_run(paths, signed)

    def said_by(*argv: str) -> tuple[int, dict[str, object]]:
        status = run([*argv, "--json"])
        return status, json.loads(capsys.readouterr().out)

    bans = Bans(folder, signed.run_id, identity.peer)
    assert bans.convict(Ban(LIAR.peer, "voted twice", 1_700_000_000, proof(signed.run_id).encode()))
    assert said_by("ban", LIAR.peer[-8:])[0] == 0
    status, listed = said_by("bans")
    rows = listed["bans"]
    assert isinstance(rows, list)
    assert [(row["by"], row["reason"], bool(row["evidence"])) for row in rows] == [
        ("the organiser", "voted twice", True),
        ("this machine", "voted twice", True),
    ]
    assert said_by("trust", MEMBER.peer) == (
        0,
        {
            "schema": 1,
            "run_id": signed.run_id,
            "peer": MEMBER.peer,
            "trusted": True,
            "changed": True,
            "whole_run": True,
        },
    )
    assert said_by("bans")[1]["trusted"] == [MEMBER.peer]
    assert said_by("trust", MEMBER.peer, "--no-longer")[1]["changed"]
    assert said_by("bans")[1]["trusted"] == []
    assert PeerId(str(rows[0]["peer"])) == LIAR.peer
    assert status == 0
    assert msgspec.msgpack.decode(bytes.fromhex(str(rows[0]["evidence"])))[1] == LIAR.peer
