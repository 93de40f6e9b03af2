"""Secure rounds in sessions: sums are exact, bit-equal everywhere and of enough members, whoever
dies in which phase; each vector in one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from secure_kit import SECURE, TERMS, Sites, deals_shares_that_do_not_fit, replaces_the_copy
from session_table import Peer, Table

from atoll.collectives.api import enter
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round_settings import SampleSettings
from atoll.collectives.swarm import PrivacySettings, RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.modes.secure.evidence import MISDEALT
from atoll.node.modes.secure.results import MaskedResults
from atoll.node.modes.secure.rounds import SecureRounds
from atoll.node.modes.secure.spending import GIVEN
from atoll.node.modes.secure.vectors import RingLayout, threshold_of
from atoll.node.modes.secure.wire import AttemptMessage, AuthoredMessage, encode
from atoll.node.session import events as ev
from atoll.node.session.copies import Copies
from atoll.node.session.memory_storage import MemorySpent, MemoryStorage
from atoll.node.session.mode_events import PrivacySpent
from atoll.node.simulation.local_member import LocalMember
from atoll.security.masking import Client, Memory
from atoll.security.privacy.budget import epsilon_after, most_rounds

PRIVATE = PrivacySettings(noise=3.0, clip=1.0, delta=1e-5, stop_at_epsilon=9.0)
PHASES = ("Keys", "Deal", "Fixed", "record", "MaskConsent", "MaskReveal")


@pytest.mark.parametrize("moment", PHASES)
def test_a_site_that_dies_in_any_phase_costs_its_vector_at_most(moment: str) -> None:
    sites = Sites(5)
    sites.until(sites.committed(1))
    struck = sites.kill_at(moment, lambda _: True)
    sites.until(lambda: bool(struck) and sites.committed(4)())
    sizes = {len(members) for members in sites.sums.values()}
    assert sizes <= {4, 5}
    assert 5 in sizes
    assert 4 in sizes or moment in ("MaskConsent", "MaskReveal")
    assert {
        len(members) for key, members in sites.sums.items() if key[0] == max(sites.sums)[0]
    } == {4}
    sites.table.end()


@pytest.mark.parametrize("moment", ["Deal", "MaskConsent"])
def test_a_site_that_comes_back_takes_part_again_and_unmasks_nothing_twice(moment: str) -> None:
    sites = Sites(4)
    sites.until(sites.committed(1))
    struck = sites.kill_at(moment, lambda _: True, lambda peer: sites.back_after(peer, 3.0))
    sites.until(lambda: any(peer.node is None for peer in sites.peers))
    before = set(sites.sums)
    sites.until(
        lambda: (
            sites.committed(4)()
            and any(
                struck[0] in members for key, members in sites.sums.items() if key not in before
            )
        )
    )
    sites.until(lambda: all(peer.node is not None for peer in sites.peers))
    sites.table.end()


@pytest.mark.parametrize("secure", [True, False])
def test_a_coordinator_adds_up_everything_until_it_dies_and_then_another_does(secure: bool) -> None:
    """The organiser's member is killed as it sends what it added up: one round takes longer, no
    contribution of the others is lost.
    """
    settings = structs.replace(SECURE, coordinator=True)
    sites = Sites(
        5,
        settings
        if secure
        else structs.replace(settings, secure=None, codec="fp32", reducer="mean"),
    )
    sites.until(sites.committed(2))
    first = sites.peers[0].name

    def owners(of: list[Peer], since: int) -> set[PeerId]:
        plans = [
            event.plan
            for peer in of
            for event in peer.heard[since:]
            if isinstance(event, ev.PlanTaken)
        ]
        assert all(len({part.owner for part in plan.parts}) == 1 for plan in plans)
        return {part.owner for plan in plans for part in plan.parts}

    assert owners(sites.peers, 0) == {first}
    struck = sites.kill_at("record", lambda peer: peer == first)
    sites.until(lambda: bool(struck))
    rounds, seen = sites.peers[1].session.completed, len(sites.peers[1].heard)
    sites.until(sites.committed(rounds + 3))
    assert len(owners(sites.peers[1:2], seen) - {first}) == 1
    sites.table.end()


def test_below_the_threshold_nothing_is_unmasked_until_enough_are_back() -> None:
    """Of four sites three are needed: with two the round stays open, though two are a quorum with
    the organiser; then one returns.
    """
    sites = Sites(4)
    sites.until(sites.committed(1))
    for peer in sites.peers[2:]:
        peer.kill()
    before, rounds = len(sites.sums), sites.peers[0].session.completed
    sites.table.wait(20.0)
    sites.until(lambda: True)
    assert all(len(members) == 4 for members in list(sites.sums.values())[before:])
    assert sites.peers[0].session.completed <= rounds + 1
    sites.peers[2].start()
    sites.until(sites.committed(rounds + 3))
    assert min(len(members) for members in sites.sums.values()) >= 3
    sites.table.end()


@pytest.mark.parametrize("seed", range(2))
def test_sums_hold_through_loss_and_deaths(seed: int) -> None:
    sites, rng = Sites(5), Random(seed)
    sites.table.network.weather.loss = 0.1
    for _ in range(3):
        peer = rng.choice(sites.peers[1:])
        sites.table.world.run(until=sites.table.world.now + rng.random())
        sites.until(lambda: True)
        if peer.node is not None:
            peer.kill()
            sites.back_after(peer, 2 + 2 * rng.random())
        sites.until(lambda: all(peer.node is not None for peer in sites.peers))
    rounds = max(peer.session.completed for peer in sites.peers)
    sites.until(sites.committed(rounds + 3))
    sites.table.end()


def test_what_cannot_be_masked_is_refused_and_the_others_go_on() -> None:
    """A value beyond the reach, and NaN: the script is told what to do, nobody waits for it."""
    sites = Sites(4)
    sites.until(sites.committed(1))
    peer = sites.peers[2]
    reach = TERMS.reach
    for number, (value, why) in enumerate(
        ((2 * reach, "whose reach is 16"), (float("nan"), "it holds NaN or infinity")), 1
    ):
        sites.next[peer.name] = value
        sites.until(lambda number=number: len(sites.refused) == number)
        told = next(
            event for event in reversed(peer.heard) if isinstance(event, ev.ContributionRefused)
        )
        assert told.unfit
        assert why in told.reason
    rounds = peer.session.completed
    sites.until(sites.committed(rounds + 2))
    sites.table.end()


def test_a_site_spends_no_more_than_its_privacy_over_all_its_lives() -> None:
    """Each contribution counts before it is handed over, a killed process forgets none, and then
    the site's are refused.
    """
    terms = PrivacySettings(noise=3.0, clip=1.0, delta=1e-5, stop_at_epsilon=4.0)
    allowed = most_rounds(terms)
    assert allowed == 6
    sites = Sites(4, structs.replace(SECURE, privacy=terms))
    sites.near = float("inf")  # what is added is noise
    sites.until(sites.committed(1))
    victim = sites.peers[2]
    victim.kill()
    sites.back_after(victim, 2.0)

    def spent(peer: Peer) -> list[PrivacySpent]:
        return [event for event in peer.heard if isinstance(event, PrivacySpent)]

    sites.until(
        lambda: all(
            any(isinstance(e, ev.ContributionRefused) and "epsilon" in e.reason for e in p.heard)
            for p in sites.peers[:2]
        )
    )
    for peer in sites.peers:
        told = spent(peer)
        assert [event.steps for event in told] == list(range(1, len(told) + 1))
        assert all(event.epsilon <= 4.0 for event in told)
        assert peer.storage.spent.noisy() == len(told) <= allowed
    assert spent(sites.peers[0])[-1].left == 0
    assert spent(sites.peers[0])[-1].epsilon == pytest.approx(epsilon_after(terms, allowed))
    assert sites.peers[0].session.completed <= allowed
    sites.table.end()


def test_what_a_contribution_spends_of_privacy_is_forced_beside_the_control_loop() -> None:
    """A slow disk delays the contribution; only once the count is on the medium the script is told
    of it, and the sum begins.
    """
    sites = Sites(4, structs.replace(SECURE, privacy=PRIVATE))
    sites.near = float("inf")
    sites.table.place.sync_s = 0.3
    forcing, counted = set[PeerId](), list[tuple[PeerId, bool]]()

    def watch(peer: Peer) -> None:
        assert peer.node is not None
        persist, spend = peer.node.persist, peer.storage.spent.spend_noisy

        def beside(work: Callable[[], Any], done: Callable[[float, Any], None]) -> None:
            def job() -> Any:
                forcing.add(peer.name)
                try:
                    return work()
                finally:
                    forcing.remove(peer.name)

            persist(job, done)

        def count(entry: int) -> None:
            counted.append((peer.name, peer.name in forcing))
            spend(entry)

        peer.node.persist, peer.storage.spent.spend_noisy = beside, count

    for peer in sites.peers:
        watch(peer)
    sites.until(sites.committed(2))
    assert all(beside for _, beside in counted)
    for peer in sites.peers:
        steps = [event.steps for event in peer.heard if isinstance(event, PrivacySpent)]
        times = [name for name, _ in counted].count(peer.name)
        assert steps == list(range(1, len(steps) + 1))
        assert 2 <= len(steps) <= times <= len(steps) + 1  # one may be under way
    sites.table.end()


class CountedSpent(MemorySpent):
    """What was spent is lost with the power, until a sync."""

    def __init__(self) -> None:
        super().__init__()
        self.spends, self.forced = 0, list[str]()

    def spend(self, key: str) -> None:
        super().spend(key)
        self.spends += 1

    def lose_power(self) -> None:
        """Between two lives."""
        self._keys = list(self.forced)


class Disk(MemoryStorage):
    """With `CountedSpent`."""

    def __init__(self, outer: OuterSettings) -> None:
        super().__init__(outer)
        self.counted = CountedSpent()
        self.spent = self.counted

    @property
    def written(self) -> int:
        return self.counted.spends

    def sync(self) -> None:
        self.counted.forced = self.counted.operations()


def disks_of_their_own(sites: Sites, rng: Random) -> None:
    """Each sync takes a time of its own: the convener may be the last whose medium is done."""
    for peer in sites.peers:
        assert peer.node is not None
        barrier: Any = peer.node.barrier

        def later(
            work: Callable[[], Any],
            done: Callable[[float, Any], None],
            persist: Callable[..., None] = barrier._persist,
        ) -> None:
            sites.table.world.after(rng.uniform(0, 0.3), lambda: persist(work, done))

        barrier._persist = later


@pytest.mark.parametrize("planted", [False, True])
def test_the_medium_says_that_a_vector_was_handed_over_before_any_byte_of_it_leaves(
    planted: bool,
) -> None:
    """Lanes wait for no record, but no plan names a vector whose Ready waits for the record: the
    convener's own one does, too. Planted: it does not, and bytes leave before. A site that loses
    power as it sends does not give that vector again."""
    sites = Sites(5, storage=Disk)
    sites.table.place.sync_s = 0.05
    disks_of_their_own(sites, Random(1))
    early, struck = list[PeerId](), list[tuple[Peer, bytes]]()
    if planted:
        for peer in sites.peers:
            peer.node.after_sync = lambda act: False  # type: ignore[union-attr,method-assign]

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        peer = next(peer for peer in sites.peers if peer.name == sender)
        if channel != "record" or struck:
            return bool(struck) and peer is struck[0][0]
        key, disk = GIVEN + sites.offered[sender].hex(), peer.storage
        assert isinstance(disk, Disk)
        if key in disk.spent.operations() and key not in disk.counted.forced:
            early.append(sender)
        if not planted and key in disk.counted.forced and peer.session.completed > 7:
            struck.append((peer, sites.offered[sender]))

            def cut() -> None:
                peer.kill()
                disk.counted.lose_power()
                sites.table.network.tap = None
                sites.back_after(peer, 1.0)

            sites.table.world.after(0.0, cut)
            return True
        return False

    sites.table.network.tap = tap
    if planted:
        sites.until(lambda: bool(early))
    else:
        sites.until(lambda: bool(struck) and struck[0][0].lives == 2)
        assert not early
        peer, cid = struck[0]
        rounds: Any = peer.session.pre_round
        assert rounds.spending.gave(cid)
        sites.until(sites.committed(max(p.session.completed for p in sites.peers) + 2))
    sites.table.end()


def test_a_masked_vector_is_bounded_and_carries_its_part_of_the_noise() -> None:
    """Over many elements the noise of a sum at the threshold, less what colluders know, has the
    variance that is accounted.
    """
    terms, numel = PrivacySettings(noise=2.0, clip=1.0, delta=1e-5, stop_at_epsilon=9.0), 4000
    vectors = RingLayout(TERMS, terms, numel, 5, 4, terms.clip)
    rows, rng = (
        [torch.full((numel,), 5.0), torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)],
        Random(1),
    )
    found = [vectors.words(row, 7, rng) for row in rows]
    words = [each for each in found if not isinstance(each, str)]
    assert len(words) == 4
    assert all(int(each[-1]) == 1 for each in words)
    values = [each[:-1].view(np.int32) * vectors.ring.step for each in words]
    quiet = RingLayout(
        TERMS, msgspec.structs.replace(terms, noise=0.02), numel, 5, 4, terms.clip
    )  # a deviation of the mean's norm of 0.01
    bounded = quiet.words(rows[0], 7, rng)
    assert not isinstance(bounded, str)
    mean = float((bounded[:-1].view(np.int32) * quiet.ring.step).mean())
    assert mean * numel**0.5 == pytest.approx(1.0, abs=0.1)
    honest = values[1] + values[2] + values[3]
    assert float(honest.std()) == pytest.approx(terms.noise * terms.clip, rel=0.05)


def test_groups_of_tensors_are_clipped_one_by_one_and_noise_is_measured_by_all_of_them() -> None:
    """The longest pattern decides; what no pattern names is a group, too (arXiv 1710.06963)."""
    shapes = [("a.weight", (3, 4)), ("a.bias", (4,)), ("b.weight", (5,)), ("c", (2,))]
    layout = make_layout([*shapes])
    clips = {"a.*": 3.0, "*.bias": 2.0, "b.weight": 6.0}
    terms = PrivacySettings(2.0, 1.0, 1e-5, 9.0, clips=clips)
    vectors = RingLayout(TERMS, terms, layout.numel, 5, 4, terms.clip, layout)
    norm = math.sqrt(1.0 + 9.0 + 4.0 + 36.0)
    noise = vectors.noise
    assert noise is not None
    assert (vectors.norm, noise.clip) == (pytest.approx(norm), pytest.approx(norm))
    assert vectors.ring.clip == pytest.approx(2.0 * norm)
    quiet = RingLayout(
        TERMS, structs.replace(terms, noise=0.001), layout.numel, 5, 4, terms.clip, layout
    )
    words = quiet.words(torch.full((layout.numel,), 100.0), 7, Random(3))
    assert not isinstance(words, str)
    found = torch.from_numpy(words[:-1].view(np.int32) * quiet.ring.step)
    groups = {spec.name: found[spec.offset : spec.offset + spec.numel] for spec in layout.tensors}
    lengths = {name: float(part.norm()) for name, part in groups.items()}
    wanted = {"a.weight": 3.0, "a.bias": 2.0, "b.weight": 6.0, "c": 1.0}
    assert lengths == {name: pytest.approx(value, abs=0.1) for name, value in wanted.items()}
    short = quiet.words(torch.full((layout.numel,), 0.25), 7, Random(4))
    assert not isinstance(short, str)
    same = short[:-1].view(np.int32) * quiet.ring.step
    assert np.abs(same - 0.25).max() < 0.1


def test_a_private_vector_that_is_not_finite_counts_as_null() -> None:
    terms = PrivacySettings(noise=1.0, clip=1.0, delta=1e-5, stop_at_epsilon=9.0)
    vectors = RingLayout(TERMS, terms, 4000, 5, 4, terms.clip)
    row = torch.full((4000,), 5.0)
    row[17] = float("nan")
    words = vectors.words(row, 7, Random(1))
    assert not isinstance(words, str)
    values = words[:-1].view(np.int32) * vectors.ring.step
    assert values.mean() == pytest.approx(0.0, abs=0.05)
    assert values.std() == pytest.approx(1 / math.sqrt(3), rel=0.05)


def test_there_is_room_for_every_members_weight_however_many_there_are() -> None:
    """Where 32 bits are too coarse the ring has 64, and nobody counts less."""
    for members, heaviest, bits in (
        (3, 10_922, 32),
        (3, 10_923, 64),
        (1000, 32, 32),
        (1000, 33, 64),
        (1024, 1_000_000, 64),
    ):
        terms, rng = structs.replace(TERMS, max_weight=heaviest), Random(2)
        vectors = RingLayout(terms, None, 3, members, 3)
        assert vectors.ring.bits == bits
        assert vectors.ring.levels >= 1 << 16
        words = [
            vectors.words(torch.tensor([16.0, -16.0, 0.0]), samples, rng)
            for samples in (2_000_000, 3)
        ]
        assert not any(isinstance(each, str) for each in words)
        total = np.array([words[0]] * (members - 1) + [words[1]]).sum(
            axis=0, dtype=f"<u{bits // 8}"
        )
        found = vectors.summed(total)
        assert found.weight == (members - 1) * heaviest + 3
        assert found.mean.tolist() == pytest.approx([16.0, -16.0, 0.0], abs=16 / (1 << 16))


def test_a_threshold_is_more_than_two_thirds_and_what_the_manifest_asks_for() -> None:
    assert [threshold_of(TERMS, members) for members in (3, 4, 5, 6, 7, 9, 12)] == [
        3,
        3,
        4,
        5,
        5,
        7,
        9,
    ]


def test_a_secure_run_needs_an_identity() -> None:
    table = Table(3, SECURE)
    table.place.identities = {}
    with pytest.raises(LocalProtocolError, match="takes an identity"):
        table.peers[0].start()


def test_nobody_follows_one_member_to_an_attempt_far_ahead() -> None:
    """It would be the last that can be said: who went on from there would be taken for a liar by
    all others, and no round would end any more.
    """
    sites = Sites(5)
    sites.until(sites.committed(1))
    liar, honest = sites.peers[4], sites.peers[:4]
    machine = sites.peers[0].session.machine
    assert machine is not None
    last = next(
        number
        for number in range(2**62 - 1, 0, -1)
        if machine.convener_of(number).peer == liar.name
    )
    liar.kill()
    identity = sites.table.place.identities[liar.name]

    def lie() -> None:
        for peer in honest:
            rounds = peer.session.pre_round
            assert isinstance(rounds, SecureRounds)
            if (masking := rounds.masking) is None:
                continue
            binding = dataclasses.replace(masking.binding, attempt=last)
            said = AuthoredMessage(
                binding.number(liar.name), Client(binding, identity, Memory()).keys()
            )
            peer.session.on_message(
                sites.table.world.now, liar.name, encode(AttemptMessage(binding.round, last, said))
            )

    for moment in range(40):
        sites.table.world.after(0.05 * moment, lie)
    rounds = honest[0].session.completed
    sites.until(sites.committed(rounds + 3))
    assert max(attempt for _, attempt in sites.sums) < 20
    sites.table.end()


def test_what_a_round_needs_is_of_those_that_were_drawn_for_it() -> None:
    """It is what `atoll status` shows: three of four, where seven are members."""
    for sample, needed in ((SampleSettings(count=4, least=3), 3), (None, 5)):
        table = Table(7, structs.replace(SECURE, sample=sample))
        assert {
            rounds.needed
            for peer in table.all_in()
            if isinstance(rounds := peer.session.pre_round, SecureRounds)
        } == {needed}
        table.end()


def test_an_operation_of_a_script_is_none_of_the_sums_whatever_its_name() -> None:
    """Also named as sums are, as far as a script can: its handle hears of the decision."""

    def script(member: LocalMember) -> list[tuple[str, list[float]]]:
        enter(member)
        while len(member.members()) < 3:
            member.sleep(0.1)
        results = list[tuple[str, list[float]]]()
        for op_id in ("masking/1", "masking/" + 56 * "0"):
            flat = torch.full((3,), 2.0**member.index)
            outcome = member.all_reduce(
                flat, op_id=op_id, op="sum", codec="fp32", deadline_s=20.0, everyone=True
            ).wait()
            results.append((outcome.status, flat.tolist()))
        member.sleep(5.0)
        return results

    for results in LocalSwarm(3, settings=SECURE).run(script, limit_s=100.0):
        assert results == [("committed", [7.0] * 3)] * 2


ROBUST = structs.replace(SECURE, secure=structs.replace(TERMS, buckets=3, rule="median:1"))


@pytest.mark.parametrize(("count", "settings"), [(5, SECURE), (9, ROBUST)])
def test_one_member_does_not_replace_the_mean_that_the_others_hold(
    count: int, settings: RunSettings
) -> None:
    """As owner of a part, and as convener of its ballots: what the others have unmasked they make
    themselves, and vote for nothing else.
    """
    sites = Sites(count, settings)
    if settings is ROBUST:  # the median of buckets' means is no sum's mean, but moves no farther
        sites.near = float("inf")
    sites.until(sites.committed(1))
    (owner, *_) = (part.owner for part in sites.peers[0].rounds()[-1].parts)
    liar = next(peer for peer in sites.peers if peer.name == owner)
    honest = [peer for peer in sites.peers if peer is not liar]
    sites.liars.add(liar.name)
    replaces_the_copy(liar)
    rounds = honest[0].session.completed
    sites.until(lambda: all(peer.session.completed >= rounds + 12 for peer in honest))
    far = [abs(value) for value in sites.anchors.values()]
    assert len(far) > 12
    if settings is ROBUST:
        assert all(abs(far[at + 1] - far[at]) < 5.0 for at in range(len(far) - 1)), sites.anchors
    assert sites.accused.keys() == {liar.name}
    sites.table.end()


def test_a_dealer_whose_shares_do_not_fit_is_proven_once_and_costs_one_attempt() -> None:
    """Its mask stays on one sum: that one's vectors are lost, and the next attempts are without it."""
    sites = Sites(5)
    sites.until(sites.committed(1))
    liar, honest = sites.peers[-1], sites.peers[:-1]
    sites.liars.add(liar.name)
    deals_shares_that_do_not_fit(liar)
    rounds, burnt = honest[0].session.completed, len(sites.refused)
    sites.until(lambda: all(peer.session.completed >= rounds + 6 for peer in honest))
    told = sites.proofs[liar.name]
    assert sorted(by for by, _ in told) == sorted(peer.name for peer in honest)  # each of them once
    assert {what for _, what in told} == {MISDEALT}
    assert len(sites.refused) - burnt <= 4
    assert not sites.accused
    sites.table.end()


def test_a_mean_that_nobody_compares_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: members vote for whatever bytes they get. Then the liar's mean is decided, and the
    oracle sees it.
    """
    sites = Sites(5)
    sites.until(sites.committed(1))
    monkeypatch.setattr(Copies, "contradict", lambda *_: False)
    monkeypatch.setattr(MaskedResults, "may_vote", lambda *_: True)
    monkeypatch.setattr(MaskedResults, "may_fetch", lambda *_: True)
    liar = sites.peers[-1]
    sites.liars.add(liar.name)
    replaces_the_copy(liar)
    rounds = sites.peers[0].session.completed
    with pytest.raises(AssertionError, match=r"^\([0-9]+, 7\."):  # (round, by how much it moved
        sites.until(lambda: sites.peers[0].session.completed >= rounds + 8)


@pytest.mark.slow
def test_a_dealer_that_nobody_names_ends_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an attempt that its shares spoil is begun again with it. Six rounds take 33 s where
    it is named.
    """
    sites = Sites(5)
    sites.until(sites.committed(1))
    monkeypatch.setattr(
        SecureRounds, "_misdealt", lambda self, now, _, error: self._fail(now, error.message)
    )
    liar, honest = sites.peers[-1], sites.peers[:-1]
    sites.liars.add(liar.name)
    deals_shares_that_do_not_fit(liar)
    rounds = honest[0].session.completed
    with pytest.raises(AssertionError, match=r"^\(\{"):  # its time is over; (sums, anchors)
        sites.until(lambda: any(peer.session.completed >= rounds + 6 for peer in honest), 40.0)
    assert not sites.proofs
