"""What is kept of the invites by which peers have entered: how many one admits, and what each may
do, over restarts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from atoll.collectives.errors import NotAdmittedError, StorageError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.run import entrants
from atoll.node.run.capability import Capability, Role
from atoll.node.run.entrants import FILE, Entrants
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity

ORGANISER = Identity(b"o" * 32)
A, B, C = (PeerId(name) for name in "abc")


def token(role: Role = "train", uses: int = 0) -> Capability:
    return make_invite(
        RunId("a" * 26), ["/ip4/10.0.0.1/tcp/1"], ORGANISER, now_s=1000, role=role, uses=uses
    ).capability


def test_the_first_two_enter_and_come_back_and_nobody_else_also_after_a_restart(
    tmp_path: Path,
) -> None:
    two, other = token(uses=2), token(uses=1)
    here = Entrants(tmp_path)
    for peer in (A, B, A, B):
        here.enter(peer, two)
    again = Entrants(tmp_path)
    again.load()
    for each in (here, again):
        with pytest.raises(NotAdmittedError, match="has let in 2 already") as caught:
            each.enter(C, two)
        assert caught.value.code == "E201"
        assert C not in each.known
    again.enter(C, other)
    again.enter(B, two)
    assert {peer: entrant.uses for peer, entrant in again.known.items()} == {A: 2, B: 2, C: 1}


def test_a_role_stays_until_the_organiser_gives_another(tmp_path: Path) -> None:
    here = Entrants(tmp_path)
    here.enter(A, token("observe"))
    here.enter(B, token())
    again = Entrants(tmp_path)
    again.load()
    assert here.roles == again.roles == {A: "observe"}
    again.note(A, token())
    assert again.roles == {}


def test_what_counts_no_more_gives_nobody_another_role(tmp_path: Path) -> None:
    here = Entrants(tmp_path)
    here.enter(A, token("aggregate"))
    here.recall(A, token())
    here.recall(B, token("aggregate"))  # of it nothing is known yet
    assert here.roles == {A: "aggregate", B: "aggregate"}


def test_of_more_than_can_be_kept_nobody_enters_without_its_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrants, "MOST", 1)
    here = Entrants(tmp_path)
    here.enter(A, token("observe"))
    with pytest.raises(NotAdmittedError, match="no more can be kept"):
        here.enter(B, token("observe"))
    here.enter(C, token())


def test_who_holds_the_seed_of_one_invite_leaves_places_for_whoever_comes_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrants, "MOST", 8)
    monkeypatch.setattr(entrants, "MOST_BY_ONE", 6, raising=False)
    here, leaked, own = Entrants(tmp_path), token("observe"), token("aggregate", uses=2)
    for number in range(20):
        with contextlib.suppress(NotAdmittedError):
            here.enter(PeerId(f"minted{number}"), leaked)
    here.enter(A, own)
    here.enter(PeerId("minted0"), leaked)  # whoever is there comes back
    assert here.roles == {A: "aggregate", **{f"minted{n}": "observe" for n in range(6)}}


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff")
    with pytest.raises(StorageError) as caught:
        Entrants(tmp_path).load()
    assert caught.value.code == "E303"
