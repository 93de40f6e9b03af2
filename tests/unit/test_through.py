"""Ways through routers, the parts without routers: when to dial whom, vouchers, and the thread that
moves a relay's bytes.
"""

from __future__ import annotations

import random
import socket
import threading

import pytest

from atoll.collectives.engine.meter import LaneCounters
from atoll.collectives.engine.settings import control, offers
from atoll.collectives.identifiers import PeerId
from atoll.node.net.through.punch import (
    GUESSES,
    LOWEST_PORT,
    MAX_TRIES,
    RETRY_S,
    SPREAD_S,
    Punch,
    candidates,
    guesses,
    is_symmetric,
    targets,
)
from atoll.node.net.through.splice import CLEAN_SEGMENTS, Leg, Splice
from atoll.node.net.through.vouchers import VOUCHER_BYTES, Limits, NoVoucherError, Vouchers
from atoll.node.net.transport.allowance import SWEEP, Allowance

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
SEEN = ("11.0.0.1", 20_001)
MINE = ("/ip4/11.0.0.9/tcp/20000", "/ip4/192.168.1.2/tcp/20000")


def test_an_allowance_is_used_up_and_comes_back_with_time_for_each_peer() -> None:
    allowance, a, b = Allowance(3, 0.5), PeerId("a"), PeerId("b")
    assert [allowance.allows(a, 0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert allowance.allows(b, 0.0)
    assert [allowance.allows(a, 2.0) for _ in range(2)] == [True, False]
    assert [allowance.allows(a, 1000.0) for _ in range(5)] == [True] * 3 + [False] * 2
    for number in range(2 * SWEEP):
        assert allowance.allows(PeerId(f"p{number}"), 2000.0 + 3 * number)
    assert len(allowance._left) <= SWEEP


def test_candidates_are_what_others_see_then_what_a_router_that_keeps_ports_maps_then_the_port_itself() -> (
    None
):
    local = ("192.168.1.2", 20_000)
    assert candidates([SEEN, SEEN], local) == (
        "/ip4/11.0.0.1/tcp/20001",
        "/ip4/11.0.0.1/tcp/20000",
        "/ip4/192.168.1.2/tcp/20000",
    )
    assert candidates([("11.0.0.1", 20_000)], ("0.0.0.0", 20_000)) == ("/ip4/11.0.0.1/tcp/20000",)
    assert is_symmetric([SEEN, ("11.0.0.1", 5)])
    assert not is_symmetric([SEEN, SEEN])


def test_addresses_of_a_house_are_dialled_only_from_behind_the_same_router() -> None:
    theirs = ("/ip4/11.0.0.1/tcp/20001", "/ip4/192.168.1.2/tcp/20001")
    assert targets(theirs, MINE) == [("11.0.0.1", 20_001)]
    assert targets(theirs, ("/ip4/11.0.0.1/tcp/7000",)) == [
        ("11.0.0.1", 20_001),
        ("192.168.1.2", 20_001),
    ]


@pytest.mark.parametrize(
    "hostile",
    [
        "/ip4/127.0.0.1/tcp/20001",
        "/ip4/11.0.0.1/tcp/22",
        "/ip4/224.0.0.1/tcp/20001",
        "/ip4/0.0.0.0/tcp/20001",
        "/ip4/169.254.1.1/tcp/20001",
        "/dns4/example.org/tcp/20001",
        "nonsense",
        "/ip6/::1/tcp/20001",
    ],
)
def test_a_partner_cannot_have_us_dial_this(hostile: str) -> None:
    assert targets([hostile], MINE) == []


def test_a_partner_cannot_have_us_dial_many_hosts() -> None:
    assert len(targets([f"/ip4/11.0.0.{host}/tcp/20001" for host in range(1, 9)], MINE)) == 2


def test_a_dial_that_is_refused_is_repeated_after_a_random_pause_and_not_for_ever() -> None:
    punch = Punch(10.0, [SEEN], 0.2, random.Random(1))
    pauses = list[float]()
    now, tries = 10.0, 0
    while punch.due(now):
        tries += 1
        assert punch.due(now) == []
        punch.ended(now, SEEN, "refuses", again=True)
        if punch.next_at() == float("inf"):
            break
        pauses.append(punch.next_at() - now)
        now = punch.next_at()
    assert tries == MAX_TRIES
    assert all(RETRY_S <= pause <= RETRY_S + 0.2 + 1e-9 for pause in pauses)
    assert max(pauses) - min(pauses) > SPREAD_S / 2
    assert punch.why() == "11.0.0.1:20001 refuses"


def test_what_became_of_each_candidate_is_told() -> None:
    punch = Punch(0.0, [SEEN, ("11.0.0.2", 5000)], 0.0, random.Random(1))
    assert punch.due(0.0) == [SEEN, ("11.0.0.2", 5000)]
    punch.ended(0.1, SEEN, "EHOSTUNREACH", again=False)
    assert punch.next_at() == float("inf")
    assert punch.why() == "11.0.0.1:20001 EHOSTUNREACH; 11.0.0.2:5000 does not answer"
    assert "no address" in Punch(0.0, [], 0.0, random.Random(1)).why()


def test_a_voucher_is_good_once_and_in_time() -> None:
    vouchers = Vouchers(bytes(32), Limits(bytes_each=1000, show_s=30.0))
    mine, theirs = vouchers.issue(100.0, b"c" * 16, "run", (A, B))
    assert len(mine) == len(theirs) == VOUCHER_BYTES
    claim = vouchers.show(101.0, mine)
    assert claim is not None
    assert (claim.circuit, claim.side, claim.bytes_left) == (b"c" * 16, 0, 1000)
    assert vouchers.show(102.0, mine) is None
    assert vouchers.show(130.5, theirs) is None


def test_guessed_ports_are_many_and_of_one_host() -> None:
    found = guesses([("11.0.0.2", 5000), ("11.0.0.3", 5000)], random.Random(1))
    assert len(set(found)) == GUESSES
    assert {host for host, _ in found} == {"11.0.0.2"}
    assert all(LOWEST_PORT <= port < 65_536 for _, port in found)
    assert guesses([], random.Random(1)) == []


def test_a_voucher_that_was_changed_or_made_by_another_relay_is_worth_nothing() -> None:
    vouchers, other = Vouchers(bytes(32), Limits()), Vouchers(bytes(31) + b"x", Limits())
    mine, _ = vouchers.issue(0.0, b"c" * 16, "run", (A, B))
    foreign, _ = other.issue(0.0, b"c" * 16, "run", (A, B))
    for index in range(0, VOUCHER_BYTES, 7):
        changed = bytearray(mine)
        changed[index] ^= 1
        assert vouchers.show(1.0, bytes(changed)) is None
    assert vouchers.show(1.0, foreign) is None
    assert vouchers.show(1.0, mine[:-1]) is None
    assert vouchers.show(1.0, mine) is not None


def test_a_relay_gives_so_many_circuits_and_no_more() -> None:
    vouchers = Vouchers(
        bytes(32), Limits(circuits=3, circuits_of_one=2, show_s=30.0, seconds_each=100.0)
    )
    vouchers.issue(0.0, b"1" * 16, "run", (A, B))
    vouchers.issue(0.0, b"2" * 16, "run", (A, C))
    with pytest.raises(NoVoucherError, match="one peer"):
        vouchers.issue(0.0, b"3" * 16, "run", (A, C))
    vouchers.issue(0.0, b"3" * 16, "run", (B, C))
    with pytest.raises(NoVoucherError, match="full"):
        vouchers.issue(0.0, b"4" * 16, "run", (PeerId("d"), PeerId("e")))
    vouchers.begun(10.0, b"1" * 16)
    vouchers.ended(b"2" * 16)
    assert vouchers.circuits == 2
    vouchers.issue(40.0, b"5" * 16, "run", (A, C))  # one was never used, one lasts
    assert vouchers.circuits == 2


@pytest.mark.parametrize(
    ("counters", "found"),
    [
        ([(CLEAN_SEGMENTS - 1, 1), (9999, 1)], [None, None]),  # something was lost: bbr for good
        (
            [
                (CLEAN_SEGMENTS - 1, 0),
                (CLEAN_SEGMENTS, 0),
                (9999, 1),
                (10_999, 11),
                (11_999, 21),
                (12_999, 31),
            ],
            [None, "cubic", None, None, "bbr", None],
        ),
    ],
)
def test_a_relays_leg_has_cubic_while_nothing_is_lost(
    counters: list[tuple[int, int]], found: list[str | None]
) -> None:
    leg = Leg()
    assert [
        leg.read(LaneCounters(0, 0, 0.0, 0.0, 0.05, 0.05, sent, again)) for sent, again in counters
    ] == found


def circuit(
    splice: Splice, nbytes: int = 1 << 30, seconds: float = 60.0
) -> tuple[socket.socket, socket.socket, threading.Event]:
    """Both outer ends of a circuit, and the event of its end."""
    (left, inner_left), (right, inner_right) = socket.socketpair(), socket.socketpair()
    for sock in (inner_left, inner_right):
        sock.setblocking(False)
    for sock in (left, right):
        sock.settimeout(60)
    over = threading.Event()
    splice.add(inner_left, inner_right, nbytes, seconds, over.set)
    return left, right, over


def read(sock: socket.socket) -> bytes:
    """Until the end."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_bytes_go_both_ways_and_an_end_is_passed_on() -> None:
    splice = Splice(60.0)
    try:
        data = random.Random(1).randbytes(3_000_000)
        left, right, over = circuit(splice)
        with left, right:
            sender = threading.Thread(
                target=lambda: (left.sendall(data), left.shutdown(socket.SHUT_WR))
            )
            sender.start()
            assert read(right) == data
            sender.join()
            right.sendall(b"thanks")
            right.shutdown(socket.SHUT_WR)
            assert read(left) == b"thanks"
            assert over.wait(60)
        assert splice.nbytes == len(data) + 6
    finally:
        splice.stop()


def test_a_circuit_is_cut_at_its_limit() -> None:
    splice = Splice(60.0)
    try:
        left, right, over = circuit(splice, nbytes=100_000)
        with left, right:
            left.sendall(bytes(150_000))
            assert over.wait(60)
            assert len(read(right)) <= 150_000
        assert splice.nbytes < 1_000_000
    finally:
        splice.stop()


@pytest.mark.parametrize(("idle_s", "seconds"), [(0.01, 60.0), (60.0, 0.01)])
def test_a_circuit_that_is_idle_or_too_old_is_cut(idle_s: float, seconds: float) -> None:
    splice = Splice(idle_s)
    try:
        left, right, over = circuit(splice, seconds=seconds)
        with left, right:
            assert over.wait(60)
            assert left.recv(1) == b""
    finally:
        splice.stop()


def test_stopping_ends_all_circuits() -> None:
    splice = Splice(60.0)
    left, right, over = circuit(splice)
    with left, right:
        splice.stop()
        assert over.is_set()
        assert read(left) == read(right) == b""


@pytest.mark.skipif(not offers("bbr"), reason="this system does not let us have bbr")
def test_both_legs_of_a_relay_have_bbr() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = [
            (socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(2)
        ]
    (left, inner_left), (right, inner_right) = pairs
    for inner in (inner_left, inner_right):
        inner.setblocking(False)
        assert control(inner, "reno")
    splice = Splice(60.0)
    try:
        splice.add(inner_left, inner_right, 1 << 30, 60.0, lambda: None)
        for inner in (inner_left, inner_right):
            assert (
                inner.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
                == b"bbr"
            )
    finally:
        splice.stop()
        left.close()
        right.close()
