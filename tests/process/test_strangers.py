"""Somebody outside of a run that is entered by invite, who knows one node's address and speaks the
protocol well: it gets nothing.

Real nodes against a hand-made peer: it announces itself as a member, asks for the run, answers
greetings, opens streams, sends messages. Once with nothing in its hands, once as an ex-member:
banned, under a fresh key, with all certificates that it saw while it was a member.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import trio
from bad_input_kit import Member, Run, ended, new_run, one_round
from strangers_kit import Crowd, Stranger, got_nothing

from atoll.node.home.paths import find_paths
from atoll.node.run.capability import genuine
from atoll.node.run.standing import load_standing
from atoll.security.key_file import load_or_create


@pytest.fixture
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Member, Member]]:
    run = new_run(tmp_path_factory.mktemp("run"))
    organiser, b = run.organiser(), run.member("b")
    with ended(organiser, b):
        one_round(organiser, b)
        yield run, organiser, b


def test_a_stranger_that_knows_an_address_gets_nothing(swarm: tuple[Run, Member, Member]) -> None:
    run, organiser, b = swarm
    stranger = Stranger(run)
    trio.run(stranger.work)
    got_nothing(stranger, organiser, b)


@pytest.mark.slow
def test_an_ex_member_with_the_certificates_of_others_gets_nothing(
    swarm: tuple[Run, Member, Member],
) -> None:
    """It was a member, is banned, comes back under a fresh key, and shows its old certificate and
    that of another member.
    """
    run, organiser, b = swarm
    paths = find_paths(str(run.folder / "b"))
    stolen = load_standing(paths, run.signed.run_id).certificate
    assert genuine(stolen) is not None
    assert load_or_create(paths.identity_file).peer == b.swarm.peer
    stranger = Stranger(run, [stolen])
    trio.run(stranger.work)
    got_nothing(stranger, organiser, b)


@pytest.mark.slow
def test_a_join_takes_no_longer_while_strangers_announce_themselves(
    swarm: tuple[Run, Member, Member],
) -> None:
    """The organiser's node is the bootstrap of the invite, and has heard of hundreds who are not
    there.
    """
    run, _, _ = swarm

    def join_s(name: str) -> float:
        began = time.monotonic()
        with ended(run.member(name)):
            return time.monotonic() - began

    before = [join_s(f"before{number}") for number in range(2)]
    crowd = Crowd(run)
    crowd.start()
    try:
        assert crowd.there.wait(60)
        during = [join_s(f"during{number}") for number in range(2)]
    finally:
        crowd.stop()
    print(f"join {before} s, while {crowd.said} were announced {during} s")
    assert crowd.said > 30
    assert min(during) <= 1.5 * max(before) + 1.0
