"""The pieces of BTARD: what is committed to, what rounding may do, what proves what, and what is
refused.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from atoll.collectives.errors import RemoteProtocolError, SecurityError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.security.btard import Bundle, Fault, verify_evidence, verify_removals
from atoll.security.btard.draw import (
    bounds,
    direction,
    part_commitment,
    seed_of,
    share_commitment,
    validators,
)
from atoll.security.btard.history import ResidualNorms
from atoll.security.btard.messages import (
    Checks,
    Commit,
    CommittedVector,
    Context,
    GuiltyVerdict,
    Judgement,
    Kind,
    Lacking,
    Result,
    Reveal,
    decode,
    fits,
    is_signed,
    sign,
)
from atoll.security.btard.residuals import (
    ACCUSED,
    CONVICTED,
    Residual,
    aggregate,
    differs,
    impossible,
    off_centre,
    residual,
    sketch_error,
    unbalanced,
)
from atoll.security.btard.trail import Trail, interval_error, interval_of, opens
from atoll.security.btard.waiting import Late
from atoll.security.btard.wire import decode as unframed
from atoll.security.btard.wire import encode as framed
from atoll.security.identity import Identity, verify

RUN = RunId("run")
PEOPLE = {
    each.peer: each
    for each in (Identity(hashlib.sha256(f"{i}".encode()).digest()) for i in range(5))
}
ROSTER = tuple(sorted(PEOPLE))
CONTEXT = Context(RUN, 7, bytes(32), ROSTER)
SEEN = b"s" * 32


def by(number: int, body, context: Context = CONTEXT):  # type: ignore[no-untyped-def]
    return sign(context, PEOPLE[context.roster[number]], body)


def proof(fault: Fault, whom: int, *messages, item=None, context: Context = CONTEXT) -> Bundle:  # type: ignore[no-untyped-def]
    return Bundle(context, fault, whom, item, messages)


def test_a_commitment_binds_attempt_maker_part_and_bits() -> None:
    values = np.array([1.0, -0.0], np.float32)
    other = Context(RUN, 8, bytes(32), ROSTER)
    same = part_commitment(CONTEXT, ROSTER[0], 1, values)
    assert same == part_commitment(CONTEXT, ROSTER[0], 1, values.copy())
    different = [
        part_commitment(other, ROSTER[0], 1, values),
        part_commitment(CONTEXT, ROSTER[1], 1, values),
        part_commitment(CONTEXT, ROSTER[0], 2, values),
        part_commitment(CONTEXT, ROSTER[0], 1, np.array([1.0, 0.0], np.float32)),
    ]
    assert len({same, *different}) == 5


def test_a_message_counts_for_one_sender_and_one_attempt() -> None:
    said = by(1, Checks(SEEN, ()))
    smaller = Context(RUN, 7, bytes(32), ROSTER[:4])
    assert is_signed(CONTEXT, said, verify)
    assert not is_signed(CONTEXT, msgspec.structs.replace(said, sender=2), verify)
    assert not is_signed(smaller, msgspec.structs.replace(said, tag=smaller.tag), verify)
    assert not is_signed(CONTEXT, msgspec.structs.replace(said, body=said.body + b"\0"), verify)


def test_frames_cross_the_wire_and_what_is_no_frame_names_its_sender() -> None:
    said = by(0, Commit(bytes(32 * 5)))
    bundle = proof(Fault.NONSENSE, 0, said)
    for frame in (said, bundle):
        assert unframed(*framed(frame), peer="p", elements=4) == frame
    piece = CommittedVector(7, CONTEXT.tag, (Kind.PART, 0, 1), np.arange(4, dtype=np.float32))
    control, values = framed(piece)
    found = unframed(control, values, peer="p", elements=4)
    assert isinstance(found, CommittedVector)
    assert (found.item, found.values.tolist()) == (piece.item, [0, 1, 2, 3])
    for bad in (
        (control, values + bytes(4)),
        (control, values[:-1]),
        (b"\xc1", b""),
        (b"\xc1", bytes(4)),
        (bytes(1 << 22), b""),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            unframed(*bad, peer="p", elements=4)
        assert caught.value.peer == "p"


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (Commit(bytes(32 * 5)), True),
        (Commit(b""), True),
        (Commit(bytes(32 * 4)), False),
        (Lacking(((1, 5, 0),)), False),
        (Lacking(((1, 4, 0),)), True),
        (Judgement(SEEN, (GuiltyVerdict(5, 7),)), False),
    ],
)
def test_what_can_be_said_among_five(body: Commit | Lacking | Judgement, good: bool) -> None:
    assert fits(body, 5) is good
    assert decode(msgspec.msgpack.encode(body)) == body


def test_the_draw_gives_everybody_the_same_validators_and_nobody_itself() -> None:
    found = validators(b"r" * 32, ROSTER, set(ROSTER), 2)
    assert found == validators(b"r" * 32, ROSTER, set(ROSTER), 2)
    assert len(found) == len(set(found.values())) == 2
    assert all(validator != target for validator, target in found.items())
    assert set(validators(b"r" * 32, ROSTER, {ROSTER[0]}, 2).values()) == {ROSTER[0]}
    assert seed_of(b"r" * 32, 1, ROSTER[0]) != seed_of(b"r" * 32, 1, ROSTER[1])
    assert bounds(11, 4) == [0, 2, 5, 8, 11]


def test_the_draw_chooses_each_peer_equally_often() -> None:
    counts = dict.fromkeys(ROSTER, 0)
    for i in range(1000):
        counts[
            next(
                iter(
                    validators(
                        hashlib.sha256(bytes([i % 256, i // 256])).digest(), ROSTER, set(ROSTER), 1
                    )
                )
            )
        ] += 1
    assert (
        sum((count - 200) ** 2 / 200 for count in counts.values()) < 18.5
    )  # chi-square, 4 degrees of freedom: p = 0.001


def test_directions_are_exact_and_of_variance_one() -> None:
    found = direction(b"r" * 32, 3, 100_000)
    assert found[:2].tolist() == direction(b"r" * 32, 3, 2).tolist()
    assert abs(float(found.mean())) < 0.02
    assert abs(float(found.var()) - 1) < 0.02


def test_a_fixed_point_balances_and_a_changed_one_does_not() -> None:
    rng = np.random.default_rng(0)
    for seed in range(50):
        rows = [
            rng.standard_normal(40).astype(np.float32) * (1000 if i > 10 else 1) for i in range(15)
        ]
        centre = aggregate(rows, 5.0)
        z = direction(seed.to_bytes(32, "big"), 0, 40)
        assert not unbalanced([residual(row, centre, z, 5.0) for row in rows], centre, 5.0)
        assert not off_centre(rows, centre, 5.0)
        near = centre.copy()
        near[0] += np.float32(1e-9)
        assert not off_centre(rows, near, 5.0)
        near[0] += np.float32(1e-2)
        assert off_centre(rows, near, 5.0)
        assert unbalanced([residual(row, near, z, 5.0) for row in rows], near, 5.0)


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize(
    "hostile", ["as large as float32 has", "all sizes", "a thousand times the other way"]
)
def test_no_contribution_makes_an_owner_wrong_who_adds_up_as_it_should(
    scale: float, hostile: str
) -> None:
    rng = np.random.default_rng(3)
    rows = list(((1 + 0.1 * rng.standard_normal((16, 64))) * scale).astype(np.float32))
    for i in range(7):
        size = {"as large as float32 has": 3.4e38, "all sizes": 10.0 ** (5 * i + 3)}.get(
            hostile, -1000 * scale
        )
        rows[i] = np.full(64, size, np.float32)
    centre = aggregate(rows, 0.8 * scale)
    assert not off_centre(rows, centre, 0.8 * scale)
    for seed in range(20):
        z = direction(seed.to_bytes(32, "big"), 0, 64)
        assert not unbalanced(
            [residual(row, centre, z, 0.8 * scale) for row in rows], centre, 0.8 * scale
        )


@pytest.mark.parametrize("tiny", [1e-45, 3e-44, 1e-41])
def test_numbers_too_small_for_all_their_digits_convict_nobody(tiny: float) -> None:
    """An owner of a part in which nobody has anything can state an aggregate that is hardly
    anything.
    """
    centre = np.full(1000, tiny, np.float32)
    for seed in range(20):
        z = direction(seed.to_bytes(32, "big"), 0, 1000)
        found = residual(np.zeros(1000, np.float32), centre, z, 1.0)
        said = Residual(*(float(np.float32(each)) for each in found))
        assert not differs(said, found, 1.0, CONVICTED)
        assert not impossible(said, float(np.linalg.norm(z)), 1.0)


def test_whom_one_honest_peer_accuses_all_convict() -> None:
    found = Residual(1.0, 2.0)
    for said in (Residual(1.0 + 1e-3, 2.0), Residual(1.0, 2.001), Residual(-1.0, 2.0)):
        assert differs(said, found, 1.0, ACCUSED)
        assert differs(said, found, 1.0, CONVICTED)
    rounded = Residual(float(np.float32(1 / 3)), float(np.float32(2 / 3)))
    assert not differs(rounded, Residual(1 / 3, 2 / 3), 1.0, CONVICTED)
    assert impossible(Residual(5.0, 10.0), 2.0, 1.0)
    assert impossible(Residual(0.0, -1.0), 2.0, 1.0)
    assert not impossible(Residual(2.0, 10.0), 2.0, 1.0)


@pytest.mark.parametrize("error", [1e-3, 3e-2])
def test_a_sketch_tells_how_far_a_gradient_is(error: float) -> None:
    rng = np.random.default_rng(1)
    right = rng.standard_normal((16, 50)).astype(np.float32)
    wrong = (right * (1 + error * rng.standard_normal((16, 50)))).astype(np.float32)
    centre = np.zeros(50, np.float32)
    pairs = [
        [
            residual(row, centre, direction(b"r" * 32, part, 50), 100.0)
            for part, row in enumerate(rows)
        ]
        for rows in (wrong, right)
    ]
    assert error / 2 < sketch_error(*pairs, float(np.linalg.norm(right))) < 2 * error


def test_a_trail_opens_at_the_interval_that_was_drawn_and_nowhere_else() -> None:
    states = [np.full(3, i, np.float32) for i in range(5)]
    trail = Trail(states)
    assert opens(trail.root, states[0], 2, 4, trail.show(2), trail.path)
    for start, interval, values, path in (
        (states[1], 2, trail.show(2), trail.path),
        (states[0], 1, trail.show(2), trail.path),
        (states[0], 2, trail.show(2)[:5], trail.path),
        (states[0], 2, trail.show(2), trail.path[:4]),
        (states[0], 2, trail.show(2), trail.path[::-1]),
        (states[0], 2, trail.show(2) + 1, trail.path),
    ):
        assert not opens(trail.root, start, interval, 4, values, path)
    assert {interval_of(bytes([i]) * 32, ROSTER[0], 4) for i in range(40)} == {0, 1, 2, 3}
    shown = np.array([0, 0, 1, 0], np.float32)  # from the origin, one step along the first axis
    assert interval_error(shown, np.array([1, 0], np.float32)) == 0
    assert interval_error(shown, np.array([2, 0], np.float32)) == 0.5
    assert interval_error(shown * np.float32("nan"), np.array([1, 0], np.float32)) == float("inf")


def test_distances_are_those_of_most() -> None:
    history = ResidualNorms(8.0, 64)
    assert (history.radius(16), history.too_far(16)) == (4.0, float("inf"))
    history.saw([(2.0, 4), (1000.0, 4), (6.0, 16)])
    assert (history.radius(4), history.too_far(4)) == (3.0, 30.0)


def test_two_messages_for_a_slot_prove_themselves() -> None:
    one, two = (by(3, Checks(seen, ())) for seen in (SEEN, bytes(32)))
    assert verify_evidence(proof(Fault.EQUIVOCATION, 3, one, two), verify) == ROSTER[3]
    for bad in (
        (3, one, one),
        (3, one, by(3, Reveal(SEEN, SEEN))),
        (2, one, two),
        (3, one, by(2, Checks(bytes(32), ()))),
        (3, by(3, Lacking(((1, 0, 0),))), by(3, Lacking(((1, 1, 0),)))),
    ):
        with pytest.raises(SecurityError, match="proves nothing"):
            verify_evidence(proof(Fault.EQUIVOCATION, bad[0], *bad[1:]), verify)


def test_a_share_that_was_not_committed_to_proves_itself() -> None:
    share = b"x" * 32
    result = by(1, Result(SEEN, SEEN, share_commitment(CONTEXT, ROSTER[1], share)))
    assert (
        verify_evidence(proof(Fault.REVEAL, 1, result, by(1, Reveal(SEEN, b"y" * 32))), verify)
        == ROSTER[1]
    )
    with pytest.raises(SecurityError):
        verify_evidence(proof(Fault.REVEAL, 1, result, by(1, Reveal(SEEN, share))), verify)


def test_more_than_half_must_testify_each_counted_once_and_signed() -> None:
    item = (int(Kind.PART), 2, 4)
    lacking = [by(number, Lacking((item,))) for number in (0, 1, 3)]
    assert verify_evidence(proof(Fault.WITHHELD, 2, *lacking, item=item), verify) == ROSTER[2]
    forged = msgspec.structs.replace(lacking[0], sender=4)
    for messages in (
        lacking[:2],
        [*lacking[:2], lacking[0]],
        [*lacking[:2], forged],
        [*lacking[:2], by(3, Lacking(((7, 2, 3),)))],
    ):
        with pytest.raises(SecurityError):
            verify_evidence(proof(Fault.WITHHELD, 2, *messages, item=item), verify)
    with pytest.raises(SecurityError):
        verify_evidence(proof(Fault.WITHHELD, 1, *lacking, item=item), verify)


def test_more_than_half_must_find_guilty_of_this() -> None:
    judged = [
        by(number, Judgement(SEEN, (GuiltyVerdict(2, Fault.GRADIENT),))) for number in (0, 1, 3)
    ]
    assert verify_evidence(proof(Fault.GRADIENT, 2, *judged), verify) == ROSTER[2]
    for fault, whom in ((Fault.RESIDUAL, 2), (Fault.GRADIENT, 1)):
        with pytest.raises(SecurityError):
            verify_evidence(proof(fault, whom, *judged), verify)


def test_removals_are_a_chain_from_the_first_roster() -> None:
    first = proof(Fault.EQUIVOCATION, 3, *(by(3, Checks(seen, ())) for seen in (SEEN, bytes(32))))
    rest = Context(RUN, 7, bytes(32), tuple(peer for peer in ROSTER if peer != ROSTER[3]))
    second = proof(
        Fault.GRADIENT,
        0,
        *(by(i, Judgement(SEEN, (GuiltyVerdict(0, Fault.GRADIENT),)), rest) for i in (1, 2, 3)),
        context=rest,
    )
    assert verify_removals(RUN, ROSTER, [first, second], verify) == {
        ROSTER[3]: Fault.EQUIVOCATION,
        rest.roster[0]: Fault.GRADIENT,
    }
    alone = Context(RUN, 7, bytes(32), ROSTER[:1])
    for run, bundles in (
        (RUN, [second]),
        (RunId("other"), [first]),
        (RUN, [proof(Fault.NONSENSE, 0, by(0, Commit(bytes(7)), alone), context=alone)]),
    ):
        with pytest.raises(SecurityError):
            verify_removals(run, ROSTER, bundles, verify)
    with pytest.raises(SecurityError):
        verify_evidence(proof(Fault.GRADIENT, 9, by(0, Judgement(SEEN, ()))), verify)


def test_an_honest_owner_finds_the_fixed_point_where_clipping_comes_near_it_slowly() -> None:
    """Four rows almost in a line, all of them clipped: after a thousand iterations the sum was
    fifty times what judges call a lie.
    """
    rows = [
        np.array(row, np.float32)
        for row in (
            (-0.018278, -0.02180111),
            (-0.00715077, -0.00826168),
            (-0.07602894, -0.06822115),
            (-0.07129639, -0.06826717),
        )
    ]
    radius = 0.02067411318421364
    assert not off_centre(rows, aggregate(rows, radius), radius)
    rng = np.random.default_rng(7)
    for _ in range(300):
        along = rng.standard_normal((rng.integers(3, 9), 1)) * rng.standard_normal(3)
        near = along + 1e-3 * rng.standard_normal(along.shape)
        found = [row.astype(np.float32) for row in near]
        assert not off_centre(found, aggregate(found, 0.05), 0.05)


def test_a_maker_that_is_late_again_and_again_is_asked_at_once_for_a_while_and_forgiven() -> None:
    late = Late(3)
    for step in range(4):
        assert not late.asks_at_once(step, PeerId("a"))
        late.came(step, PeerId("a"), late=True)
    assert [step for step in range(4, 30) if late.asks_at_once(step, PeerId("a"))] == list(
        range(4, 20)
    )
    late.came(20, PeerId("a"), late=True)
    assert late.asks_at_once(52, PeerId("a"))
    assert not late.asks_at_once(53, PeerId("a"))
    for step in range(400):  # of whom one part in twenty is late
        late.came(step, PeerId("b"), late=step % 20 == 0)
        assert not late.asks_at_once(step + 1, PeerId("b"))
