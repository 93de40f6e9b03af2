"""Bans with real nodes: the organiser's reaches all and evicts, is told to whom it strikes, outlives the organiser's node, and can be lifted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_input_kit import Member, Run, atoll, ended, new_home, new_run, one_round, soon

from atoll.collectives.errors import NotAdmittedError

pytestmark = pytest.mark.slow


def others(member: Member) -> dict[str, str]:
    """Whom a node has banned, and why."""
    banned: dict[str, str] = member.state()["banned"]
    return banned


@contextmanager
def four(folder: Path) -> Iterator[tuple[Run, list[Member]]]:
    """A run with its organiser and three more, after a round of all."""
    run = new_run(folder)
    members = [run.organiser(), *(run.member(name) for name in "bcd")]
    with ended(*members):
        one_round(*members)
        yield run, members


def test_the_organisers_ban_evicts_one_of_four_and_a_lift_lets_it_back(tmp_path: Path) -> None:
    with four(tmp_path) as (run, (organiser, b, c, bad)):
        who = bad.swarm.peer
        told = atoll(organiser.home, "ban", who[-8:], "--reason", "garbage")
        assert told.status == 0, told
        assert "for all its members" in told.out
        for member in (organiser, b, c):
            soon(lambda member=member: who in others(member), "the ban is known everywhere")
            assert others(member)[who].endswith("garbage")
        outcomes = one_round(organiser, b, c)
        assert all(who not in outcome.contributors for outcome in outcomes)
        one_round(organiser, b, c)  # an entry begins after the ban was known
        soon(lambda: all(who not in member.state()["members"] for member in (organiser, b, c)), "it is evicted")
        soon(lambda: "E205" in bad.codes() or bad.state()["phase"] == "failed", "it is told")

        assert atoll(b.home, "allow", who).status == 78  # not b's to lift
        assert atoll(organiser.home, "allow", who).status == 0
        soon(lambda: not any(map(others, (organiser, b, c))), "the lift is known everywhere")
        bad.end()
        back = run.member("e")
        with ended(back):
            one_round(organiser, b, c, back)


def test_a_ban_on_one_machine_is_its_own_and_the_organisers_outlives_its_node(tmp_path: Path) -> None:
    with four(tmp_path) as (run, (organiser, b, c, d)):
        assert "from this machine" in atoll(b.home, "ban", c.swarm.peer).out
        assert list(others(b)) == [c.swarm.peer]
        assert others(organiser) == others(d) == {}
        assert atoll(b.home, "allow", c.swarm.peer).status == 0
        one_round(organiser, b, c, d)

        stranger = "12D3KooWGmMhkEcrdKBj9sqTYGDuiKMv1hDF5vjJoYk1uuheBuBS"
        assert atoll(organiser.home, "ban", stranger).status == 0
        soon(lambda: stranger in others(b), "b has the list")
        for invite, told in ((run.invite(peer=stranger), "only"), (withdrawn := run.invite(), "revoked")):
            if invite is withdrawn:
                assert atoll(organiser.home, "invite", "revoke", invite).status == 0
            with pytest.raises(NotAdmittedError, match=told):
                Member(new_home(run.folder / told), invite)
        organiser.end()
        late = run.folder / "late"
        told = atoll(b.home, "invite", "new")
        assert told.status == 0, told
        newcomer = Member(new_home(late), told.out.strip())
        with ended(newcomer):
            soon(lambda: stranger in others(newcomer), "handed on without the organiser")
