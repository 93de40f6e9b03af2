"""The mesh of a large run: whom each member beats to, and who tells it of the others."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.group import MAX_MEMBERS
from atoll.collectives.identifiers import PeerId
from atoll.node.run.hearsay import Hearsay
from atoll.node.run.membership_records import MOST_PARTNERS
from atoll.node.run.partners import PartnerMesh, mesh_of


def named(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{number:04}") for number in range(count))


@pytest.mark.parametrize("count", [*range(1, 60), 64, 99, 100, 101, 240, 250, 256])
def test_of_two_members_that_are_no_partners_two_others_tell(count: int) -> None:
    mesh = PartnerMesh(named(count))
    partners = {peer: set(mesh.partners(peer)) for peer in mesh.peers}
    for one, other in combinations(mesh.peers, 2):
        assert (other in partners[one]) == (one in partners[other])
        if other in partners[one]:
            continue
        for told in (mesh.between(one, other), mesh.between(other, one)):
            assert len(set(told)) == 2
            assert not {one, other} & set(told)
            assert all(other in partners[each] and each in partners[one] for each in told)


@pytest.mark.parametrize("count", [33, 64, 100, 256, 1000, 4096])
def test_a_member_has_about_two_roots_of_partners(count: int) -> None:
    mesh = PartnerMesh(named(count))
    root = count**0.5
    sizes = [len(mesh.partners(peer)) for peer in mesh.peers]
    assert sum(sizes) / count < 2 * root + 1
    assert 2 * root - 4 < min(sizes)
    assert max(sizes) < 3 * root + 2
    assert max(sizes) <= MOST_PARTNERS or count > MAX_MEMBERS


@given(st.integers(9, 150), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_whoever_lives_hears_of_everybody_whoever_else_is_dead(
    count: int, rng: random.Random
) -> None:
    """Fewer dead than a row has members: no live member is cut off from another."""
    mesh = PartnerMesh(named(count))
    width = int((count - 1) ** 0.5) + 1
    dead = set(rng.sample(mesh.peers, rng.randrange(width)))
    living = [peer for peer in mesh.peers if peer not in dead]
    found, ahead = {living[0]}, [living[0]]
    while ahead:
        for peer in mesh.partners(ahead.pop()):
            if peer not in dead and peer not in found:
                found.add(peer)
                ahead.append(peer)
    assert found == set(living)


@given(st.permutations(named(40)))
@settings(max_examples=20, deadline=None)
def test_the_order_in_which_members_are_named_says_nothing(peers: list[PeerId]) -> None:
    one, other = PartnerMesh(peers), mesh_of(named(40))
    assert one.name == other.name
    assert all(one.partners(peer) == other.partners(peer) for peer in peers)
    assert PartnerMesh(named(41)).name != other.name


def hearsay(count: int, me: int = 0) -> tuple[Hearsay, dict[PeerId, float]]:
    mesh, heard = mesh_of(named(count)), dict[PeerId, float]()
    since = dict.fromkeys(mesh.peers, 0.0)
    return (
        Hearsay(
            mesh.peers[me], mesh, heard, since, beat_s=0.5, detect_s=2.5, asked={}, beaten=since
        ),
        heard,
    )


def word(of: Hearsay, partner: PeerId, *heard: PeerId) -> bytes:
    bits = of.mesh.bits(partner)
    number = sum(1 << bits[peer] for peer in heard)
    return number.to_bytes((len(bits) + 7) // 8, "little")


def test_one_word_counts_for_a_little_while_and_two_for_longer_but_not_for_ever() -> None:
    it, _ = hearsay(36)
    far = it.mesh.peers[35]
    one, other = it.mesh.between(it.mesh.peers[0], far)
    for now in (4.0, 6.0):
        it.said(now, one, it.mesh.name, word(it, one, far))
        # heard itself 4 s ago one word is enough; 6 s ago it is not
        assert it.last(now, far) == (now - 1.0 if now <= 5.0 else float("-inf"))
    it.said(6.0, other, it.mesh.name, word(it, other, far))
    assert it.last(6.0, far) == 5.0
    trust_s = 8 * 6 * 0.5
    for now, counts in ((trust_s - 0.1, True), (trust_s + 0.1, False)):
        for each in (one, other):
            it.said(now, each, it.mesh.name, word(it, each, far))
        assert (it.last(now, far) == now - 1.0) is counts


def test_who_is_vouched_for_no_more_is_asked_and_suspected_only_without_an_answer() -> None:
    it, heard = hearsay(36)
    far = it.mesh.peers[35]
    between = it.mesh.between(it.mesh.peers[0], far)

    def says(now: float, *lacking: PeerId) -> None:
        for partner in it.partners:
            all_of_them = set(it.mesh.partners(partner)) - set(lacking)
            it.said(now, partner, it.mesh.name, word(it, partner, *all_of_them))

    says(10.0)
    assert far not in it.questions(10.0, {})
    for now in (10.5, 11.0, 11.5):
        says(now, far)
        asked = it.questions(now, {})
        assert (far in asked) is (now >= 11.0)  # 9.0 was its last sign
    assert it.last(11.5, far) == 9.0
    assert not it.unanswered(11.5, far, 9.0)
    assert it.unanswered(11.8, far, 9.0)
    heard[far] = 11.6  # it answers
    assert not it.unanswered(11.8, far, 11.6)
    assert len(set(between)) == 2


def test_bits_of_partners_that_nobody_has_are_refused_and_other_grids_are_not_read() -> None:
    it, _ = hearsay(36)
    partner, far = it.partners[0], it.mesh.peers[35]
    for bits in (b"", b"\xff", b"\xff" * 9, b"\x00\x04"):  # ten partners
        with pytest.raises(RemoteProtocolError):
            it.said(1.0, partner, it.mesh.name, bits)
    it.said(1.0, partner, bytes(8), b"")
    it.said(1.0, far, it.mesh.name, b"")  # no partner: its word is for others
    assert it.last(1.0, far) == float("-inf")


def test_everybody_is_asked_in_turn_long_before_the_word_of_two_counts_no_more() -> None:
    it, heard = hearsay(100)
    others = set(it.mesh.peers) - set(it.partners) - {it.mesh.peers[0]}
    asked, most, now = set[PeerId](), 0, 0.0
    while now < 40.0:  # 8 √100 beats
        now += 0.5
        for partner in it.partners:
            it.said(now, partner, it.mesh.name, word(it, partner, *it.mesh.partners(partner)))
        questions = it.questions(now, {})
        most = max(most, len(questions))
        for peer in questions:
            heard[peer] = now
            asked.add(peer)
        assert all(it.last(now, peer) == now - 1.0 for peer in others)
    assert asked == others
    assert most <= 3
