"""Secure aggregation: exact for every pattern of who drops out, refused below the threshold,
uniform before it, liars named.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from itertools import combinations

import msgspec
import numpy as np
import pytest

from atoll.collectives.errors import (
    BadSignatureError,
    ConfigError,
    LocalProtocolError,
    NotEnoughPeersError,
    ProtocolError,
    RemoteProtocolError,
    SecurityError,
)
from atoll.collectives.identifiers import PeerId, RunId
from atoll.security.identity import Identity
from atoll.security.masking import Binding, Client, Memory, Ring, Unmasking, verify_misdealt
from atoll.security.masking.keys import apply_mask
from atoll.security.masking.messages import Deal, Keys, MaskConsent, MaskReveal, Message, signed
from atoll.security.masking.misdealt import misdealt
from atoll.security.masking.shamir import join, split, weights_of

PEOPLE = {
    identity.peer: identity for identity in (Identity(bytes([number]) * 32) for number in range(6))
}
ROSTER = tuple(sorted(PEOPLE))
NUMEL = 5


def subsets(peers: Iterable[PeerId], least: int = 0) -> Iterator[tuple[PeerId, ...]]:
    chosen = tuple(peers)
    for size in range(least, len(chosen) + 1):
        yield from combinations(chosen, size)


def binding_of(attempt: int = 0, threshold: int = 4, numel: int = NUMEL) -> Binding:
    return Binding(RunId("run"), 7, attempt, ROSTER, threshold, numel, 32)


class Meeting:
    """Six members, who have come as far as their masked vectors; who is not among ``dealing`` said
    nothing after its keys.
    """

    def __init__(
        self, dealing: Iterable[PeerId] = ROSTER, attempt: int = 0, numel: int = NUMEL
    ) -> None:
        self.binding = binding_of(attempt, numel=numel)
        self.clients = {
            peer: Client(self.binding, identity, Memory(), random.Random(f"{peer}{attempt}"))
            for peer, identity in PEOPLE.items()
        }
        self.keys = {peer: client.keys() for peer, client in self.clients.items()}
        self.deals = {peer: self.clients[peer].deal(self.keys) for peer in dealing}
        rng = np.random.default_rng(attempt)
        self.plain = {peer: rng.integers(0, 1 << 32, numel, np.uint32) for peer in self.deals}
        self.masked = {peer: words.copy() for peer, words in self.plain.items()}
        for peer, words in self.masked.items():
            self.clients[peer].mask(words, peer.encode(), self.deals)

    def total(self, survivors: Iterable[PeerId], plain: bool = False) -> np.ndarray:
        return np.sum(
            [(self.plain if plain else self.masked)[peer] for peer in survivors],
            axis=0,
            dtype=np.uint32,
        )

    def unmasking(self, survivors: Iterable[PeerId]) -> Unmasking:
        return Unmasking(self.binding, self.keys, self.deals, tuple(survivors))

    def reveals(self, survivors: tuple[PeerId, ...]) -> dict[PeerId, MaskReveal]:
        """What survivors would say: of copies, since a client says it once."""
        clients = {peer: copy.deepcopy(self.clients[peer]) for peer in survivors}
        consents = {peer: client.consent(survivors) for peer, client in clients.items()}
        return {peer: client.reveal(consents) for peer, client in clients.items()}


@pytest.fixture(scope="module")
def meeting() -> Meeting:
    return Meeting()


def test_every_pattern_of_survivors_and_of_who_reveals(meeting: Meeting) -> None:
    exact = refused = 0
    for survivors in subsets(ROSTER):
        if len(survivors) < 4:
            with pytest.raises(NotEnoughPeersError):
                meeting.unmasking(survivors)
            for peer in survivors:
                with pytest.raises(NotEnoughPeersError):
                    copy.deepcopy(meeting.clients[peer]).consent(survivors)
            refused += 1
            continue
        said = meeting.reveals(survivors)
        nobody = meeting.unmasking(survivors)
        for telling in subsets(survivors, 3):
            unmasking = copy.deepcopy(nobody)
            for peer in telling:
                unmasking.add(peer, said[peer])
            total = meeting.total(survivors)
            before = total.copy()
            if len(telling) < 4:
                with pytest.raises(NotEnoughPeersError):
                    unmasking.unmask(total)
                assert total.tolist() == before.tolist()
                refused += 1
                continue
            unmasking.unmask(total)
            assert total.tolist() == meeting.total(survivors, plain=True).tolist()
            assert before.tolist() != total.tolist()
            exact += 1
    assert exact == 73
    assert refused == 42 + 15 * 4 + 6 * 10 + 20


def test_every_pattern_of_who_deals() -> None:
    for number, dealing in enumerate(subsets(ROSTER, 4)):
        meeting = Meeting(dealing, attempt=number)
        survivors = dealing[-4:]
        unmasking = meeting.unmasking(survivors)
        for peer, reveal in meeting.reveals(survivors).items():
            unmasking.add(peer, reveal)
        total = meeting.total(survivors)
        unmasking.unmask(total)
        assert total.tolist() == meeting.total(survivors, plain=True).tolist()
    few = Client(binding_of(50), PEOPLE[ROSTER[0]], Memory())
    with pytest.raises(NotEnoughPeersError):
        few.deal({ROSTER[0]: few.keys()})


def test_owners_of_parts_unmask_their_parts_of_one_vector() -> None:
    meeting = Meeting(attempt=3, numel=70_000)
    survivors = ROSTER[:3] + ROSTER[4:]
    unmasking = meeting.unmasking(survivors)
    for peer, reveal in meeting.reveals(survivors).items():
        unmasking.add(peer, reveal)
    masked, wanted = meeting.total(survivors), meeting.total(survivors, plain=True)
    for first, stop in ((0, 1), (1, 30_003), (30_003, 69_998), (69_998, 70_000)):
        part = masked[first:stop].copy()
        unmasking.unmask(part, first)
        assert (part == wanted[first:stop]).all(), (first, stop)
    with pytest.raises(LocalProtocolError):
        unmasking.unmask(masked[:2].copy(), 69_999)


def test_masked_vectors_are_uniform_and_fresh() -> None:
    """Chi-square over bytes, at every position in a word, of vectors that were all the same: below
    what one in 10,000 is above.
    """
    numel = 16_384
    meeting, again = Meeting(attempt=8, numel=numel), Meeting(attempt=9, numel=numel)
    for peer in ROSTER[:2]:
        noise = (
            meeting.masked[peer] - meeting.plain[peer]
        )  # what a vector of zeros would be sent as
        for one in (
            noise,
            noise - (again.masked[peer] - again.plain[peer]),
            noise - (meeting.masked[ROSTER[2]] - meeting.plain[ROSTER[2]]),
        ):
            for place in range(4):
                counts = np.bincount(one.view(np.uint8)[place::4], minlength=256)
                assert ((counts - numel / 256) ** 2 / (numel / 256)).sum() < 255 + 3.9 * (
                    2 * 255
                ) ** 0.5, (peer, place)


def test_both_shares_of_a_peer_are_never_told(meeting: Meeting) -> None:
    client = copy.deepcopy(meeting.clients[ROSTER[0]])
    first = client.consent(ROSTER[:5])
    assert client.consent(reversed(ROSTER[:5])) == first
    for others, named in ((ROSTER, ROSTER[5]), (ROSTER[:4], ROSTER[4])):
        with pytest.raises(SecurityError, match="both shares") as caught:
            client.consent(others)
        assert caught.value.peer == named
    said = meeting.reveals(ROSTER[:5])[ROSTER[0]]
    assert [number for number, _ in said.seeds] == [0, 1, 2, 3, 4]
    assert [number for number, _ in said.pairs] == [5]


def test_a_vector_is_unmasked_once_and_an_attempt_begun_once(meeting: Meeting) -> None:
    identity, memory = PEOPLE[ROSTER[0]], Memory()
    client = copy.deepcopy(meeting.clients[ROSTER[0]])
    client.consent(ROSTER)
    memory.begun, memory.consented = client._memory.begun, client._memory.consented
    with pytest.raises(SecurityError, match="begun before") as caught:
        Client(meeting.binding, identity, memory)
    assert caught.value.peer == ROSTER[0]
    retried = Meeting(attempt=1)
    again = Client(binding_of(2), identity, memory)
    others = {peer: Client(binding_of(2), PEOPLE[peer], Memory()) for peer in ROSTER[1:]}
    keys = {peer: one.keys() for peer, one in {**others, ROSTER[0]: again}.items()}
    deals = {peer: one.deal(keys) for peer, one in {**others, ROSTER[0]: again}.items()}
    words = np.zeros(NUMEL, np.uint32)
    with pytest.raises(SecurityError, match="unmasking before"):
        again.mask(words, ROSTER[0].encode(), deals)
    assert not words.any()
    again.mask(words, b"another", deals)
    assert words.any()
    assert (meeting.masked[ROSTER[1]] != retried.masked[ROSTER[1]]).any()


def test_steps_come_once_and_in_order(meeting: Meeting) -> None:
    client = copy.deepcopy(meeting.clients[ROSTER[0]])
    with pytest.raises(LocalProtocolError):
        client.keys()
    with pytest.raises(LocalProtocolError):
        client.deal(meeting.keys)
    with pytest.raises(LocalProtocolError):
        client.mask(np.zeros(NUMEL, np.uint32), b"x", meeting.deals)
    with pytest.raises(LocalProtocolError):
        client.reveal({})
    with pytest.raises(LocalProtocolError):
        client.consent(ROSTER[1:])  # without itself


def test_messages_hold_for_their_binding_and_sender_only(meeting: Meeting) -> None:
    binding = meeting.binding
    stranger = Identity(b"s" * 32)
    for changed in (
        {"attempt": 1},
        {"round": 8},
        {"run": RunId("other")},
        {"threshold": 5},
        {"numel": 6},
        {"bits": 64},
        {"roster": ROSTER[:5]},
    ):
        other = Client(msgspec_replace(binding, changed), PEOPLE[ROSTER[0]], Memory())
        other.keys()
        with pytest.raises(BadSignatureError) as caught:
            other.deal({ROSTER[1]: meeting.keys[ROSTER[1]]})
        assert caught.value.peer == ROSTER[1]
    fresh = Client(binding, PEOPLE[ROSTER[0]], Memory())
    own = fresh.keys()
    with pytest.raises(BadSignatureError):
        fresh.deal({**meeting.keys, ROSTER[0]: own, ROSTER[2]: meeting.keys[ROSTER[1]]})
    with pytest.raises(RemoteProtocolError) as refused:
        fresh.deal({**meeting.keys, stranger.peer: meeting.keys[ROSTER[1]]})
    assert refused.value.peer == stranger.peer
    with pytest.raises(SecurityError):
        Client(binding, PEOPLE[ROSTER[0]], copy.deepcopy(meeting.clients[ROSTER[0]]._memory))


def msgspec_replace(binding: Binding, changed: dict[str, object]) -> Binding:
    names = ("run", "round", "attempt", "roster", "threshold", "numel", "bits")
    return Binding(**{name: getattr(binding, name) for name in names} | changed)  # type: ignore[arg-type]


def resigned(message: Message, peer: PeerId, binding: Binding) -> Message:
    return signed(message, binding, PEOPLE[peer])  # type: ignore[type-var]


def test_liars_are_named(meeting: Meeting) -> None:
    """Who reveals what was not dealt to it; who deals something else than it committed to; whose
    key agrees on nothing.
    """
    survivors, binding = ROSTER[:5], meeting.binding
    said = meeting.reveals(survivors)
    liar = ROSTER[1]
    honest = said[liar]
    wrong = [
        msgspec.structs.replace(
            honest, seeds=(honest.seeds[1][:0] or (0, bytes(66)), *honest.seeds[1:])
        ),
        msgspec.structs.replace(honest, seeds=honest.seeds[1:]),
        msgspec.structs.replace(honest, pairs=((0, honest.seeds[0][1]),)),
        msgspec.structs.replace(said[ROSTER[2]]),
    ]
    unmasking = meeting.unmasking(survivors)
    for message in wrong:
        with pytest.raises(RemoteProtocolError) as caught:
            unmasking.add(liar, resigned(message, liar, binding))  # type: ignore[arg-type]
        assert caught.value.peer == liar
    with pytest.raises(BadSignatureError):
        unmasking.add(liar, said[ROSTER[2]])
    assert not unmasking.ready

    dealt = meeting.deals[liar].shares
    swapped = (msgspec.structs.replace(dealt[0], seed=dealt[1].seed), *dealt[1:])
    torn = (msgspec.structs.replace(dealt[0], box=bytes(148)), *dealt[1:])
    for shares in (swapped, torn, dealt[1:], (dealt[0], *dealt)):
        client = Client(binding_of(), PEOPLE[ROSTER[0]], Memory(), random.Random(f"{ROSTER[0]}0"))
        assert client.keys() == meeting.keys[ROSTER[0]]
        own = client.deal(meeting.keys)
        with pytest.raises(RemoteProtocolError) as caught:
            client.mask(
                np.zeros(NUMEL, np.uint32),
                b"x",
                {**meeting.deals, ROSTER[0]: own, liar: resigned(Deal(shares), liar, binding)},  # type: ignore[dict-item]
            )
        assert caught.value.peer == liar

    low_order = resigned(
        msgspec.structs.replace(meeting.keys[liar], channel=bytes(32)), liar, binding
    )
    client = Client(binding_of(), PEOPLE[ROSTER[0]], Memory())
    with pytest.raises(RemoteProtocolError) as refused:
        client.deal({**meeting.keys, ROSTER[0]: client.keys(), liar: low_order})  # type: ignore[dict-item]
    assert refused.value.peer == liar


def test_a_dealer_whose_secret_is_another_is_named() -> None:
    """Shares fit their own commitments, but give back a seed that the keys did not promise."""
    meeting = Meeting(attempt=11)
    liar = ROSTER[3]
    other = resigned(
        msgspec.structs.replace(meeting.keys[liar], seed=bytes(32)), liar, meeting.binding
    )
    said = meeting.reveals(ROSTER)
    unmasking = Unmasking(meeting.binding, {**meeting.keys, liar: other}, meeting.deals, ROSTER)  # type: ignore[dict-item]
    for peer, reveal in said.items():
        unmasking.add(peer, reveal)
    total = meeting.total(ROSTER)
    with pytest.raises(RemoteProtocolError, match="committed") as caught:
        unmasking.unmask(total)
    assert caught.value.peer == liar
    assert (total == meeting.total(ROSTER)).all()


def test_consents_to_other_survivors_do_not_count(meeting: Meeting) -> None:
    clients = {peer: copy.deepcopy(meeting.clients[peer]) for peer in ROSTER}
    consents = {
        peer: client.consent(ROSTER if peer != ROSTER[2] else ROSTER[:5])
        for peer, client in clients.items()
    }
    with pytest.raises(RemoteProtocolError) as caught:
        clients[ROSTER[0]].reveal(consents)
    assert caught.value.peer == ROSTER[2]
    three = {peer: consents[peer] for peer in (ROSTER[0], ROSTER[1], ROSTER[3])}
    with pytest.raises(NotEnoughPeersError):
        clients[ROSTER[0]].reveal(three)
    assert clients[ROSTER[0]].reveal({**three, ROSTER[4]: consents[ROSTER[4]]}).pairs == ()


def test_messages_are_bounded() -> None:
    for kind, fields in (
        (Keys, (b"x" * 31, b"x" * 32, b"x" * 32, b"")),
        (MaskConsent, ([1024], b"")),
        (MaskReveal, ([[0, b"short"]], [], b"")),
    ):
        data = msgspec.msgpack.encode((kind.__struct_config__.tag, *fields))
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(data, type=kind)


@pytest.mark.parametrize(
    "changed",
    [
        {"threshold": 3},
        {"threshold": 7},
        {"roster": ROSTER[:2], "threshold": 2},
        {"roster": ROSTER[::-1]},
        {"bits": 16},
        {"numel": 0},
    ],
)
def test_bindings_that_protect_nothing_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        msgspec_replace(binding_of(), changed)
    assert binding_of().colluding == 1


def test_shares() -> None:
    """Any four of six give the secret back; three leave every secret as likely (here: give
    something else).
    """
    secret, places = bytes(range(32)), (1, 2, 3, 5, 8, 13)
    shares = dict(zip(places, split(secret, 4, places, random.Random(0)), strict=True))
    for chosen in combinations(places, 4):
        assert join({place: shares[place] for place in chosen}, weights_of(chosen)) == secret
    with pytest.raises(ValueError, match="belong"):
        join({place: shares[place] for place in places[:3]}, weights_of(places[:3]))
    for threshold, where in ((7, places), (2, (1, 1)), (1, (0,))):
        with pytest.raises(ValueError):
            split(secret, threshold, where, random.Random(0))


def test_streams_begin_anywhere() -> None:
    for dtype in (np.uint32, np.uint64):
        whole = np.zeros(100_001, dtype)
        apply_mask(whole, b"k" * 32, 0, add=True)
        assert len(set(whole.tolist())) > 99_000
        for first in (1, 2, 3, 65_537, 100_000):
            part = np.zeros(100_001 - first, dtype)
            apply_mask(part, b"k" * 32, first, add=False)
            assert ((part + whole[first:]) == 0).all()


def test_a_sum_on_the_ring_is_the_weighted_mean() -> None:
    rng = np.random.default_rng(0)
    for bits, heaviest in ((32, 1), (32, 500), (64, 1_000_000)):
        ring = Ring(numel=2000, clip=2.0, members=5, weight=heaviest, bits=bits)  # type: ignore[arg-type]
        weights = [1, heaviest, max(1, heaviest // 3), heaviest, 1]
        values = [rng.uniform(-2, 2, 2000).astype(np.float32) for _ in weights]
        rows = [
            ring.encode(ring.quantise(row, random.Random(i)), weights[i])
            for i, row in enumerate(values)
        ]
        mean, total = ring.decode(np.sum(rows, axis=0, dtype=rows[0].dtype))
        assert total == sum(weights)
        error = mean - np.average(np.array(values, np.float64), axis=0, weights=weights)
        assert np.abs(error).max() <= ring.step
        assert abs(error.mean()) < 5 * ring.step / 2000**0.5  # rounding leans to no side


def test_the_largest_sum_does_not_wrap_and_larger_values_are_clipped() -> None:
    for bits, heaviest in ((32, 3), (64, 1 << 20)):
        ring = Ring(numel=2, clip=1.0, members=7, weight=heaviest, bits=bits)  # type: ignore[arg-type]
        row = ring.encode(
            ring.quantise(np.array([9.0, -9.0], np.float32), random.Random(0)), heaviest
        )
        mean, _ = ring.decode(np.sum([row] * 7, axis=0, dtype=row.dtype))
        assert mean.tolist() == pytest.approx([1, -1], rel=1e-12)
    with pytest.raises(LocalProtocolError):
        ring.quantise(np.array([np.nan, 0], np.float32), random.Random(0))
    with pytest.raises(LocalProtocolError):
        ring.encode(np.zeros(2, np.int64), 1 << 21)
    with pytest.raises(SecurityError):
        ring.decode(np.zeros(3, np.uint64))
    with pytest.raises(ConfigError):
        Ring(numel=2, clip=1.0, members=1 << 12, weight=1 << 13)
    assert issubclass(RemoteProtocolError, ProtocolError)


def test_nobody_can_prove_misdealing_of_a_member_that_dealt_as_it_should() -> None:
    """Not with its own shares, nor with others; and a proof against another holds for its run
    alone.
    """
    binding = binding_of()
    clients = {
        peer: Client(binding, PEOPLE[peer], Memory(), random.Random(peer)) for peer in ROSTER
    }
    keys = {peer: client.keys() for peer, client in clients.items()}
    deals = {peer: client.deal(keys) for peer, client in clients.items()}
    dealer = ROSTER[1]
    shares = {
        number: clients[peer]._opened(dealer, deals[dealer])
        for number, peer in enumerate(ROSTER[: binding.threshold])
    }
    for pairs in (False, True):
        mine = {number: both[pairs] for number, both in shares.items()}
        proof = misdealt(binding, dealer, keys[dealer], deals[dealer], pairs, mine)
        with pytest.raises(SecurityError, match="as they should be"):
            verify_misdealt(proof, binding.run)
        forged = msgspec.structs.replace(proof, shares=((0, bytes(66)), *proof.shares[1:]))
        with pytest.raises(SecurityError, match="not dealt so"):
            verify_misdealt(forged, binding.run)
        with pytest.raises(SecurityError, match="proves nothing"):
            verify_misdealt(proof, RunId("another"))
        with pytest.raises(SecurityError, match="not signed by it"):
            verify_misdealt(msgspec.structs.replace(proof, attempt=9), binding.run)
